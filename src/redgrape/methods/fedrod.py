"""FedRoD: a balanced generic head for all clients, and a personal head for each.

Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022,
https://arxiv.org/abs/2107.00778. The encoder and the generic head learn by a balanced loss on every client, so that all
clients have the same aim. A personal head learns what is particular to its client, on top of the generic logits. It
stays at the client and gives no gradient to what is shared. So the global model, which is judged and exported, is the
same with and without personal heads.

    client  loss_g = CE(W h + log n_k, y)                        moves the encoder and W
            loss_p = CE(stop(W h) + W_k stop(h), y)              moves W_k, the personal head, which starts at zero
            sends the change of the encoder and of W; keeps W_k
    server  averages as FedAvg
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field

from redgrape import tree
from redgrape.learning import classifier
from redgrape.learning.margins import log_counts
from redgrape.method import ClientSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tree


class FedRoD(FedAvg):
    """Balanced softmax by local counts for what is shared, and a personal head that stays at each client."""

    personal: bool = Field(True, description="train personal heads; the global model is the same without them")

    presets = {"paper": {}}
    fidelity = (
        "from a secondary source: the authors released no code, and reimplementations differ; a class that a client "
        "lacks counts as one example; personal heads start at zero; the hypernetwork of the paper is not here"
    )

    def init_client(self, broadcast: Tree) -> Tree:
        W = classifier.of(broadcast["model"])
        return {"personal": {name: torch.zeros_like(t) for name, t in W.items()}} if self.personal else {}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        W, W_k = net.classifier, classifier.linear_like(net.classifier, state.get("personal"))
        log_n = log_counts(site.class_counts).to(W.weight)
        optimizer = self.make_optimizer(net.parameters(), site)
        own = self.make_optimizer(W_k.parameters(), site) if self.personal else None
        losses = self.losses(net, site)
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            h = net.encoder(x)
            z = W(h)
            loss = F.cross_entropy(z + log_n, y)
            loss.backward()
            self.step(optimizer)
            losses.add(loss, y)
            if own is not None:
                own.zero_grad()
                F.cross_entropy(z.detach() + W_k(h.detach()), y).backward()
                self.step(own)  # clipped by itself, so that it does not shorten the shared step
        new = {"personal": tree.parameters(W_k)} if self.personal else {}
        return self.report(net, broadcast["model"], losses, site), new
