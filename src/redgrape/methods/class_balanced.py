"""Class-balanced loss: classes are weighted by the inverse of their effective number of examples.

Cui et al., "Class-Balanced Loss Based on Effective Number of Samples", CVPR 2019, https://arxiv.org/abs/1901.05555.
Examples of a class overlap, so n of them are worth E_n < n. beta = 0 weighs all classes alike, as FedAvg does; beta
near 1 weighs by 1 / n_c.

    E_n = (1 - beta^n) / (1 - beta)                                                                    Proposition 1
    client  loss = mean over the batch of w_y CE(z, y),   w_c ~ 1 / E_{n_c} with mean one over the classes with examples
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from redgrape.exchange import Received
from redgrape.learning.prior import Counts, CountSource, effective_number_weights
from redgrape.method import ClientSite, ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree


class ClassBalanced(FedAvg):
    """FedAvg with classes weighted by the inverse of their effective number of examples."""

    beta: float = Field(0.9999, ge=0, lt=1, description="how little examples of a class overlap; 0: no weights")
    counts: CountSource = Field("global", description="class counts: the sum over all clients, or the client's own")

    presets = {"paper": {}}
    ingredient = "loss"
    fidelity = (
        "from a secondary source, which states its weights; they have mean one over the classes with examples, where "
        "the paper's add up to the number of all classes, and the sources of the counts are ours"
    )

    def survey(self, site: ClientSite) -> Tree:
        return {**super().survey(site), **Counts(self.counts).survey(site)}

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        return {**super().init_server(model, site), **Counts(self.counts).first(site)}

    def broadcast(self, server: Tree) -> Tree:
        return {**super().broadcast(server), **Counts(self.counts).kept(server)}

    def criterion(self, broadcast: Tree, site: ClientSite) -> Callable[[Tensor, Tensor], Tensor]:
        weights = effective_number_weights(Counts(self.counts).of(broadcast, site), self.beta).to(site.device)
        # A plain mean: torch's weighted cross-entropy would divide by the sum of the weights.
        return lambda z, y: (weights.to(z.dtype)[y] * F.cross_entropy(z, y, reduction="none")).mean()

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        return {**super().server_update(server, received, site), **Counts(self.counts).kept(server)}
