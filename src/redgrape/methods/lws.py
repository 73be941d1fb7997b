"""LWS: in the last rounds each row of the classifier learns a scale, with class-balanced draws.

Kang et al., "Decoupling Representation and Classifier for Long-Tailed Recognition", ICLR 2020,
https://arxiv.org/abs/1910.09217, Section 4. Classifiers of imbalanced data have short rows for rare classes. Learnable
weight scaling keeps the net and the directions of the rows, and learns one number for each class. The deployed
classifier has the scales in its rows.

    rounds 1 .. R - R_2      FedAvg
    rounds R - R_2 + 1 .. R  z_c = s_c (w_c h + b_c), s = 1 at first; clients train s alone, in evaluation mode, with
                             draws in which each class that the client holds comes equally often; the server averages s
    deployed                 s_c w_c, s_c b_c
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from redgrape.exchange import Direction, Parts, Received
from redgrape.learning.class_draws import equally_often
from redgrape.learning.decoupling import in_second_stage, with_unmoved
from redgrape.method import ClientSite, ServerSite, Site
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree


class LWS(FedAvg):
    """Learns a scale for each row of the classifier in the last rounds, with class-balanced draws."""

    head_share: float = Field(0.1, ge=0, lt=1, description="R_2 / R, the share of rounds that train the scales")

    presets = {"paper": {}}
    fidelity = (
        "from a secondary source, which states its second stage; the draws are balanced within each client, where the "
        "paper has all data in one place, and learning rate and its schedule are those of the first stage"
    )

    def parts(self, model: Tensors, site: Site) -> Parts:
        scales = torch.ones_like(model["classifier.weight"][:, 0])
        return {**super().parts(model, site), "delta_scales": Direction({"scales": scales})}

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        return self._scaled(super().init_server(model, site), torch.ones_like(model["classifier.weight"][:, 0]))

    def _scaled(self, trained: Tree, scales: Tensor) -> dict[str, Any]:
        """The server state. The deployed model has the scales in its rows; training goes on with the rows kept beside
        it."""
        model = trained["model"]
        rows = {name: t for name, t in model.items() if name.startswith("classifier.")}
        scaled = {name: t * scales.reshape(-1, *[1] * (t.dim() - 1)) for name, t in rows.items()}
        return {**trained, "model": {**model, **scaled}, "rows": rows, "scales": scales}

    def _with_rows(self, server: Tree) -> Tree:
        """The server state with the rows that training goes on with."""
        return {**server, "model": {**server["model"], **server["rows"]}}

    def broadcast(self, server: Tree) -> Tree:
        return {**super().broadcast(self._with_rows(server)), "scales": server["scales"]}

    def order(self, site: ClientSite, random: torch.Generator) -> Tensor:
        if in_second_stage(self.head_share, site.round, site.rounds):
            return equally_often(site.data.labels, random)
        return super().order(site, random)

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        if in_second_stage(self.head_share, site.round, site.rounds):
            return self._train_scales(broadcast, site), state
        update, state = super().client_update(broadcast, state, site)
        return {**update, "delta_scales": {"scales": torch.zeros_like(broadcast["scales"])}}, state

    def _train_scales(self, broadcast: Tree, site: ClientSite) -> Tree:
        net = self.load_for_training(broadcast["model"], site).requires_grad_(False).eval()
        scales = broadcast["scales"].to(site.device, copy=True).requires_grad_()
        criterion, optimizer = self.criterion(broadcast, site), self.make_optimizer([scales], site)
        losses = self.losses(net, site)
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            loss = criterion(scales * net(x), y)
            loss.backward()
            self.step(optimizer)
            losses.add(loss, y)
        update = self.report(net, broadcast["model"], losses, site)
        moved = {"scales": scales.detach().cpu() - broadcast["scales"]}
        return {**with_unmoved(update, self.training_parts(broadcast["model"], site)), "delta_scales": moved}

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        trained = self._with_rows(server)
        if not in_second_stage(self.head_share, site.round, site.rounds):
            return self._scaled(super().server_update(trained, received, site), server["scales"])
        scales = server["scales"] + self.server_lr * received.mean("delta_scales")["scales"]
        return self._scaled(trained, scales)
