"""FedProx: a proximal term keeps local models near the global one.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, https://arxiv.org/abs/1812.06127. Local
training on skewed data drifts away from what other clients need. FedProx adds mu/2 ||theta - theta^t||^2 to the local
loss, over the parameters (not the buffers). With mu = 0 it is FedAvg.

    client  minimises  F_k(theta) + mu/2 ||theta - theta^t||^2
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from pydantic import Field

from redgrape.learning.local_training import stackable
from redgrape.method import ClientSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tree
from redgrape.validation import LARGEST


class FedProx(FedAvg):
    """FedAvg with a proximal term in the local loss."""

    mu: float = Field(0.01, ge=0, le=LARGEST, description="strength of the proximal term")

    presets: ClassVar = {
        "paper": {},
        "released": {"mu": 0.1, "clip_norm": 1.0},  # what RedGrape's released code adds to every method by default
    }
    fidelity: ClassVar[str] = (
        "from a secondary source, which states its term; the paper searches mu in 0.001 to 1, and 0.01 is our default"
    )

    @stackable
    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        anchor = {name: p.detach().clone() for name, p in net.named_parameters()}
        optimizer = self.make_optimizer(net.parameters(), site)
        losses = self.losses(net, site)
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            for name, p in net.named_parameters():
                if p.grad is not None:
                    p.grad.add_(p.detach() - anchor[name], alpha=self.mu)  # the gradient of the proximal term
            self.step(optimizer)
            losses.add(loss, y)
        return self.report(net, broadcast["model"], losses, site), state
