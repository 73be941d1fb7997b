"""FedAvg: federated averaging.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
https://arxiv.org/abs/1602.05629. Every client trains the global model on its own data for a few epochs, the server
averages what they changed, weighted by how many examples each has. RedGrape's paper calls it FedAvg+CE.

    server  sends theta                                                         to the sampled clients
    client  theta_k <- theta; for each batch: theta_k <- theta_k - eta_l grad CE(theta_k; batch)
    client  sends delta_k = theta_k - theta, n_k
    server  theta <- theta + eta_s sum_k n_k / (sum_i n_i) delta_k
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from redgrape import tree
from redgrape.aggregation import Averaging, client_report, sample_weights
from redgrape.method import ClientId, ClientSite, Method, ServerSite
from redgrape.tree import Tensors, Tree


class FedAvg(Averaging, Method):
    """Federated averaging of models trained with the cross-entropy loss."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "released": {"clip_norm": 1.0},  # the released RedGrape code clips the gradient in every method
    }

    stacks: ClassVar[bool] = True
    noised: ClassVar[bool] = True
    summable: ClassVar[bool] = True
    fidelity: ClassVar[str] = "from RedGrape's paper, Eq. (2), without its factor 1/|C|, which would shrink every step"

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        return {"model": model}

    def broadcast(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        criterion = self.criterion(broadcast, site)
        optimizer = self.make_optimizer(net.parameters(), site)
        total = torch.zeros((), dtype=net.classifier.weight.dtype, device=site.device)
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            self.step(optimizer)
            total += loss.detach() * len(y)
        mean_loss = total / (self.epochs * len(site.data))
        return client_report(net, broadcast["model"], len(site.data), mean_loss), state

    def update_like(self, server: Tree, site: ServerSite) -> Tree:
        net = self.trainable(server["model"], site)
        return client_report(net, server["model"], 0, torch.zeros((), dtype=net.classifier.weight.dtype))

    def criterion(self, broadcast: Tree, site: ClientSite) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss of a batch's logits and labels; methods that only change the loss change this."""
        return F.cross_entropy

    def server_update(self, server: Tree, updates: Mapping[ClientId, Tree], site: ServerSite) -> Tree:
        return {"model": self.averaged_model(server["model"], updates, site)}

    def averaged_model(
        self, model: Tensors, updates: Mapping[ClientId, Tree], site: ServerSite | None = None
    ) -> Tensors:
        """theta + eta_s sum_k n_k / (sum_i n_i) delta_k; buffers are averaged plainly."""
        answers = list(updates.values())
        weights = sample_weights(answers)
        moved = tree.add(model, self.mean_delta(answers, weights, site=site), self.server_lr)
        return {**moved, **self.mean_buffers(answers, weights)}
