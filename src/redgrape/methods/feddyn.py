"""FedDyn: dynamic regularisation makes the clients' optima agree with the global optimum.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, https://arxiv.org/abs/2111.04263. A
linear and a quadratic term are added to every client's loss, so that at a fixed point the local first-order
conditions hold at the common model. Each client keeps its linear term g_k. The server keeps h, the sum of their moves.

    client  minimises  f_k(theta) - <g_k, theta> + a/2 ||theta - theta^t||^2,   g_k <- g_k - a (theta_k - theta^t)
    server  h <- h - a/N sum_{k in C} (theta_k - theta^t),   theta^{t+1} <- mean_{k in C} theta_k - h / a
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from pydantic import Field

from redgrape import tree
from redgrape.exchange import Direction, Parts, Received
from redgrape.learning.local_training import stackable, zeros_like_parameters
from redgrape.method import ClientSite, ServerSite, Site
from redgrape.methods.fedavg import FedAvg
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST


class FedDyn(FedAvg):
    """A dynamic regulariser at every client makes local optima agree with the global one."""

    alpha: float = Field(0.01, ge=1e-9, le=LARGEST, description="strength of the regulariser")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd; the paper has none")

    server_lr: float = Field(1.0, ge=1, le=1, description="the method has no such factor: 1")

    presets = {"paper": {}}
    fidelity = (
        "from a secondary source, which states its algorithm; the authors' code scales a by the client's share of the "
        "data and evaluates the clients' mean"
    )

    def parts(self, model: Tensors, site: Site) -> Parts:
        parts = self.training_parts(model, site, weights="alike")
        return {name: replace(p, kept=True) if isinstance(p, Direction) else p for name, p in parts.items()}

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        return {"model": model, "h": zeros_like_parameters(model, site)}

    def broadcast(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    @stackable
    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        update, _ = super().client_update(broadcast, state, site)
        g = state.get("g", {name: torch.zeros_like(t) for name, t in update["delta"].items()})
        return update, {"g": tree.add(g, update["delta"], -self.alpha)}

    @stackable
    def regulariser(self, net: Net, broadcast: Tree, state: Tree, site: ClientSite) -> Callable[[], None]:
        g = {name: t.to(site.device) for name, t in state.get("g", {}).items()}
        trained = {name: (p, p.detach().clone()) for name, p in net.named_parameters() if p.requires_grad}

        def add_gradient() -> None:
            for name, (p, received) in trained.items():
                assert p.grad is not None, "filled by backward()"
                p.grad.add_(p.detach() - received, alpha=self.alpha)
                if g:
                    p.grad.sub_(g[name])

        return add_gradient

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        mean = received.mean("delta")
        h = tree.add(server["h"], mean, -self.alpha * len(received.clients) / site.num_clients)
        moved = tree.add(
            tree.add(server["model"], mean, self.server_lr), {name: h[name] for name in mean}, -1 / self.alpha
        )
        return {"model": {**moved, **received.statistics()}, "h": h}
