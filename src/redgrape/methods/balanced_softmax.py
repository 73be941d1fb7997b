"""Balanced softmax: the class counts inside the softmax of the training loss.

Ren et al., "Balanced Meta-Softmax for Long-Tailed Visual Recognition", NeurIPS 2020,
https://arxiv.org/abs/2007.10740. If training sees class c in proportion n_c but tests see all classes equally often,
the right softmax for the training data is n_c exp(z_c) / sum_j n_j exp(z_j). Training with it gives logits that are
right for the balanced test. Here it is used in federated averaging, with a choice of sources for the counts (see
learning/prior.py).

    client  loss = CE(z + log n, y);   inference uses z only
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from redgrape.exchange import Received
from redgrape.learning.prior import Prior, PriorSource
from redgrape.method import ClientSite, ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree


class BalancedSoftmax(FedAvg):
    """FedAvg with the class counts inside the training softmax."""

    prior: PriorSource = Field(
        "global", description="class counts: the client's own, the sum over all clients, or an estimate"
    )

    presets = {"paper": {}}
    ingredient = "loss"
    fidelity = (
        "from a secondary source, which states its loss; the sources of the counts are ours, and `estimated` is an "
        "estimator of our own"
    )

    @model_validator(mode="after")
    def _estimate_fits_training(self) -> Self:
        Prior(self.prior).check(self, BalancedSoftmax)
        return self

    def survey(self, site: ClientSite) -> Tree:
        return {**super().survey(site), **Prior(self.prior).survey(site)}

    def needs_single(self) -> str:
        return super().needs_single() or Prior(self.prior).needs_single()

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        return {**super().init_server(model, site), "prior": Prior(self.prior).first(model, site)}

    def broadcast(self, server: Tree) -> Tree:
        return {**super().broadcast(server), "prior": server["prior"]}

    def criterion(self, broadcast: Tree, site: ClientSite) -> Callable[[Tensor, Tensor], Tensor]:
        log_prior = Prior(self.prior).log(broadcast["prior"], site)
        return lambda z, y: F.cross_entropy(z + log_prior.to(z.dtype), y)

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        prior = Prior(self.prior).next(server["prior"], received, self, site)
        return {**super().server_update(server, received, site), "prior": prior}

    def log(self, server: Tree, received: Received) -> Mapping[str, Tensor]:
        return {**super().log(server, received), "prior": server["prior"]}
