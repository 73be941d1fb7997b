"""cRT: the classifier is trained again at the end, with class-balanced draws on the frozen encoder.

Kang et al., "Decoupling Representation and Classifier for Long-Tailed Recognition", ICLR 2020,
https://arxiv.org/abs/1910.09217, Section 4. Features learnt from imbalanced data are good; the classifier on them is
not. So it is drawn anew, and trained with every class equally often. Here that is in the last rounds, within each
client (see over_sampling.py).

    rounds 1 .. R - R_2      FedAvg
    rounds R - R_2 + 1 .. R  W starts anew, once; clients train W alone, the encoder in evaluation mode, with draws in
                             which each class that the client holds comes equally often; the server averages W
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from redgrape.exchange import Received
from redgrape.learning import classifier
from redgrape.learning.class_draws import equally_often
from redgrape.learning.decoupling import in_second_stage, starts_second_stage, with_encoder_of, with_unmoved
from redgrape.method import ClientSite, ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree


class CRT(FedAvg):
    """Trains the classifier again in the last rounds, with class-balanced draws on the frozen encoder."""

    head_share: float = Field(0.1, ge=0, lt=1, description="R_2 / R, the share of rounds that train the classifier")

    presets = {"paper": {}}
    fidelity = (
        "from a secondary source, which states its second stage; the draws are balanced within each client, where the "
        "paper has all data in one place, and learning rate and its schedule are those of the first stage"
    )

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        drawn = classifier.fresh_classifier(classifier.of(model), site.generator("new classifier"))
        server = super().init_server(model, site)
        return {**server, "new_classifier": drawn, "starts_anew": torch.tensor(False)}

    def broadcast(self, server: Tree) -> Tree:
        return super().broadcast({**server, "model": self._sent(server)})

    def _sent(self, server: Tree) -> Tensors:
        """The model that training goes on with. The deployed one never has a classifier that was just drawn."""
        if not server["starts_anew"]:
            return dict(server["model"])
        return classifier.with_W(server["model"], server["new_classifier"])

    def load_for_training(self, model: Tensors, site: ClientSite) -> Net:
        net = super().load_for_training(model, site)
        if in_second_stage(self.head_share, site.round, site.rounds):
            net.encoder.requires_grad_(False).eval()
        return net

    def order(self, site: ClientSite, random: torch.Generator) -> Tensor:
        if in_second_stage(self.head_share, site.round, site.rounds):
            return equally_often(site.data.labels, random)
        return super().order(site, random)

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        update, state = super().client_update(broadcast, state, site)
        if in_second_stage(self.head_share, site.round, site.rounds):
            update = with_unmoved(update, self.training_parts(broadcast["model"], site))
        return update, state

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        moved = super().server_update({**server, "model": self._sent(server)}, received, site)
        model = moved["model"]
        if in_second_stage(self.head_share, site.round, site.rounds):
            model = with_encoder_of(model, server["model"])
        starts = torch.tensor(starts_second_stage(self.head_share, site))
        return {**moved, "model": model, "new_classifier": server["new_classifier"], "starts_anew": starts}
