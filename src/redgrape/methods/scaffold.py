"""SCAFFOLD: control variates correct the drift of local training.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
https://arxiv.org/abs/1910.06378. Every client keeps an estimate c_i of its own gradient, the server one, c, of the
mean. Adding c - c_i to each local gradient makes the clients walk in the common direction. Algorithm 1 with option
II, where the clients count alike:

    client  y <- x;  for S local steps:  y <- y - eta_l (g_i(y) + c - c_i)                        line 10
            c_i+ <- c_i - c + (x - y) / (S eta_l)                                                 line 12, option II
            sends y - x and c_i+ - c_i;  c_i <- c_i+
    server  x <- x + eta_s mean_i (y_i - x),   c <- c + 1/N sum_i (c_i+ - c_i)                    lines 16, 17
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from redgrape import tree
from redgrape.aggregation import client_report, sample_weights, zeros_like_parameters
from redgrape.method import ClientId, ClientSite, ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree


class Scaffold(FedAvg):
    """Control variates at clients and server correct the drift of local training."""

    optimizer: Literal["sgd"] = Field(
        "sgd", description="local optimizer; option II measures the gradient by sgd's steps"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd; the paper has none")

    presets: ClassVar = {"paper": {}}
    stacks: ClassVar[bool] = True
    summable: ClassVar[bool] = True
    fidelity: ClassVar[str] = (
        "from a secondary source, which states option II; with momentum, which the paper does not have, S counts "
        "effective steps, and with clipping, which it has not either, c_i is biased"
    )

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        return {"model": model, "c": zeros_like_parameters(model, site)}

    def init_client(self, broadcast: Tree) -> Tree:
        return {"c_i": {name: torch.zeros_like(c) for name, c in broadcast["c"].items()}}

    def broadcast(self, server: Tree) -> Tree:
        return {"model": server["model"], "c": server["c"]}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        c, c_i = broadcast["c"], state["c_i"]
        correction = {name: (c[name] - c_i[name]).to(site.device) for name in c}
        optimizer = self.make_optimizer(net.parameters(), site)
        total = torch.zeros((), dtype=net.classifier.weight.dtype, device=site.device)
        steps = 0
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            for name, p in net.named_parameters():
                if p.grad is not None:
                    p.grad.add_(correction[name])  # line 10
            self.step(optimizer)
            total += loss.detach() * len(y)
            steps += 1
        update = client_report(net, broadcast["model"], len(site.data), total / (self.epochs * len(site.data)))
        walked = self.effective_steps(steps) * self.learning_rate(site)
        moved = update["delta"] if walked > 0 else {}  # a learning rate of zero measures nothing
        new = {
            name: c_i[name] - c[name] - moved[name] / walked if name in moved else c_i[name] for name in c
        }  # line 12
        return {**update, "delta_c": tree.sub(new, c_i)}, {"c_i": new}

    def update_like(self, server: Tree, site: ServerSite) -> Tree:
        return {**super().update_like(server, site), "delta_c": server["c"]}

    def counts_alike(self, group: str) -> bool:
        return group.startswith("delta")

    def server_update(self, server: Tree, updates: Mapping[ClientId, Tree], site: ServerSite) -> Tree:
        answers = list(updates.values())
        alike = [1.0] * len(answers)
        moved = tree.add(server["model"], self.mean_delta(answers, alike), self.server_lr)  # line 16
        share = len(answers) / site.num_clients
        c = tree.add(server["c"], self.mean_delta(answers, alike, "delta_c"), share)  # line 17: 1/N over all clients
        return {"model": {**moved, **self.mean_buffers(answers, sample_weights(answers))}, "c": c}
