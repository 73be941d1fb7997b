"""FedAvgM: momentum at the server.

Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019,
https://arxiv.org/abs/1909.06335. The average of the clients' changes is noisy if data differs between clients. The
server treats it as a gradient and steps along its running sum. With beta = 0 it is FedAvg.

    server  v <- beta v + Delta,   theta <- theta + eta_s v
"""

from __future__ import annotations

from pydantic import Field

from redgrape import tree
from redgrape.exchange import Received
from redgrape.learning.local_training import zeros_like_parameters
from redgrape.method import ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree


class FedAvgM(FedAvg):
    """FedAvg with momentum at the server."""

    beta: float = Field(0.9, ge=0, lt=1, description="momentum of the server")

    presets = {"paper": {}}
    fidelity = (
        "from a secondary source, which states its update; later work also uses beta 0.97 (CReFF) and 0.2 (FEDIC)"
    )

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        return {"model": model, "velocity": zeros_like_parameters(model, site)}

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        delta = received.mean("delta")
        velocity = {name: self.beta * v + delta[name] if name in delta else v for name, v in server["velocity"].items()}
        moved = tree.add(server["model"], {name: velocity[name] for name in delta}, self.server_lr)
        return {"model": {**moved, **received.statistics()}, "velocity": velocity}
