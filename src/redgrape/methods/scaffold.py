"""SCAFFOLD: control variates correct the drift of local training.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
https://arxiv.org/abs/1910.06378. Every client keeps an estimate c_i of its own gradient, and the server keeps an
estimate c of the mean. Adding c - c_i to each local gradient makes the clients move in the common direction. This is
Algorithm 1 with option II, in which clients have equal weights:

    client  y <- x;  for S local steps:  y <- y - eta_l (g_i(y) + c - c_i)                        line 10
            c_i+ <- c_i - c + (x - y) / (S eta_l)                                                 line 12, option II
            sends y - x and c_i+ - c_i;  c_i <- c_i+
    server  x <- x + eta_s mean_i (y_i - x),   c <- c + 1/N sum_i (c_i+ - c_i)                    lines 16, 17
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from redgrape import tree
from redgrape.exchange import Direction, Parts, Received
from redgrape.learning.local_training import stackable, zeros_like_parameters
from redgrape.method import ClientSite, ServerSite, Site
from redgrape.methods.fedavg import FedAvg
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree


class Scaffold(FedAvg):
    """Control variates at clients and server correct the drift of local training."""

    optimizer: Literal["sgd"] = Field("sgd", description="local optimizer; option II measures gradients by sgd steps")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd; the paper has none")

    presets = {"paper": {}}
    sums_of_states = ("c",)
    ingredient = "regulariser"
    fidelity = (
        "from a secondary source, which states option II; with momentum, which the paper does not have, S counts "
        "effective steps, and with clipping, which it lacks as well, c_i is biased"
    )

    def parts(self, model: Tensors, site: Site) -> Parts:
        parts = super().parts(model, site) | {"delta_c": Direction(zeros_like_parameters(model, site), kept=True)}
        return {name: replace(p, weights="alike") if isinstance(p, Direction) else p for name, p in parts.items()}

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        return {**super().init_server(model, site), "c": zeros_like_parameters(model, site)}

    def init_client(self, broadcast: Tree) -> Tree:
        c_i = {name: torch.zeros_like(c) for name, c in broadcast["c"].items()}
        return {**super().init_client(broadcast), "c_i": c_i}

    def broadcast(self, server: Tree) -> Tree:
        return {**super().broadcast(server), "c": server["c"]}

    @stackable
    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        update, kept = super().client_update(broadcast, state, site)
        c, c_i = broadcast["c"], state["c_i"]
        first = site.members[0] if site.members else site  # members of a stack have equally many examples
        batchnorm = any(name.endswith("running_mean") for name in broadcast["model"])
        steps = self.steps(len(first.data), batchnorm=batchnorm)
        walked = self.effective_steps(steps) * self.learning_rate(site)
        moved = update["delta"] if walked > 0 else {}  # a learning rate of zero measures nothing
        new = {
            name: c_i[name] - c[name] - moved[name] / walked if name in moved else c_i[name] for name in c
        }  # line 12
        return {**update, "delta_c": tree.sub(new, c_i)}, {**kept, "c_i": new}

    @stackable
    def regulariser(self, net: Net, broadcast: Tree, state: Tree, site: ClientSite) -> Callable[[], None]:
        c, c_i = broadcast["c"], state["c_i"]
        trained = [(p, (c[name] - c_i[name]).to(site.device)) for name, p in net.named_parameters() if p.requires_grad]

        def add_gradient() -> None:
            for p, correction in trained:
                p.grad.add_(correction)  # type: ignore[union-attr]  # line 10; filled by backward()

        return add_gradient

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        share = len(received.clients) / site.num_clients
        c = tree.add(server["c"], received.mean("delta_c"), share)  # line 17: 1/N over all clients
        return {**super().server_update(server, received, site), "c": c}  # line 16
