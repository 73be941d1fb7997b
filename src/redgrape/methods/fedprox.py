"""FedProx: a proximal term keeps local models near the global one.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, https://arxiv.org/abs/1812.06127. Local
training on skewed data drifts away from what other clients need. FedProx adds mu/2 ||theta - theta^t||^2 to the local
loss, over the parameters (not the buffers). With mu = 0 it is FedAvg.

    client  minimises  F_k(theta) + mu/2 ||theta - theta^t||^2
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field

from redgrape.learning.local_training import stackable
from redgrape.method import ClientSite
from redgrape.methods.fedavg import FedAvg
from redgrape.nets.net import Net
from redgrape.tree import Tree
from redgrape.validation import LARGEST


class FedProx(FedAvg):
    """FedAvg with a proximal term in the local loss."""

    mu: float = Field(0.01, ge=0, le=LARGEST, description="strength of the proximal term")

    presets = {
        "paper": {},
        "released": {"mu": 0.1, "clip_norm": 1.0},  # what RedGrape's released code adds to every method by default
    }
    ingredient = "regulariser"
    fidelity = (
        "from a secondary source, which states its term; the paper searches mu in 0.001 to 1, and 0.01 is our default"
    )

    @stackable
    def regulariser(self, net: Net, broadcast: Tree, state: Tree, site: ClientSite) -> Callable[[], None]:
        trained = [(p, p.detach().clone()) for p in net.parameters() if p.requires_grad]

        def add_gradient() -> None:
            for p, received in trained:
                p.grad.add_(p.detach() - received, alpha=self.mu)  # type: ignore[union-attr]  # filled by backward()

        return add_gradient
