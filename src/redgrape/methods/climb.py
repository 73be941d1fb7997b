"""CLIMB: clients with a loss above the average get more weight.

Shen et al., "An Agnostic Approach to Federated Learning with Class Imbalance", ICLR 2022,
https://openreview.net/forum?id=Xo0lbDt975. Empirical risk is minimised under the constraint that no client's loss
exceeds the average by more than eps. The dual variable of a client grows while its constraint is violated, and the
weight of the client's update grows with it.

    min 1/N sum_i f_i   s.t.   f_i - mean_j f_j <= eps
    client  sends f_i, the loss of the received model on its data, along with delta_i
    server  w_i = max(0, 1 + lambda_i - mean over all clients of lambda)
            theta <- theta + eta_s sum_i n_i w_i / (sum_j n_j w_j) delta_i
            lambda_i <- clamp(lambda_i + eta_D (f_i - mean_j f_j - eps), 0, 100)    for the clients that answered

The exchange caps an f_i that is implausible in its round. Even so, a client that claims a high loss in every round gets
all the weight in the end. This is inherent in the method.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from redgrape import tree
from redgrape.exchange import Parts, Received, Scalar
from redgrape.method import ClientSite, ServerSite, Site
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST

_LARGEST_DUAL = 100.0
_BATCH = 256


class CLIMB(FedAvg):
    """Gives clients with a loss above the average more weight, by dual variables."""

    eps: float = Field(0.01, ge=0, le=LARGEST, description="how far above the average a loss may lie")
    dual_lr: float = Field(2.0, ge=0, le=LARGEST, description="eta_D, the step of the dual variables")

    presets = {
        "paper": {},
        "cifar": {"eps": 0.1, "dual_lr": 0.1},  # RedGrape's appendix; the defaults are its MNIST setting
        "released": {"clip_norm": 1.0},
    }
    fidelity = (
        "from the authors' code (shenzebang/Federated-Learning-Pytorch at c841a4d) and RedGrape's appendix; the "
        "defaults are RedGrape's values for MNIST, while the authors' code has eps 1 and a dual step of 1/N every "
        "five rounds; eta_D is not divided by N, as RedGrape's values are tuned; weights below zero are cut off, and "
        "the weights of a round add up to one; clients are also weighted by their examples"
    )

    def parts(self, model: Tensors, site: Site) -> Parts:
        f = Scalar(torch.zeros((), dtype=torch.float64), least=0.0, weighs=True)
        return {**super().parts(model, site), "received_loss": f}

    def needs_single(self) -> str:
        return "the server weighs each client by a dual variable of its own"

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        return {"model": model, "dual": torch.zeros(site.num_clients, dtype=torch.float64)}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        received_loss = self._loss_of_received_model(broadcast["model"], site)
        update, state = super().client_update(broadcast, state, site)
        return {**update, "received_loss": received_loss}, state

    @torch.no_grad()
    def _loss_of_received_model(self, model: Tensors, site: ClientSite) -> Tensor:
        net = site.load(model).eval()
        total = torch.zeros((), dtype=torch.float64)
        for rows in torch.arange(len(site.data)).split(_BATCH):
            z = net(site.inputs(rows, net.classifier.weight.dtype)).cpu()
            total += F.cross_entropy(z.double(), site.data.labels[rows], reduction="sum")
        return total / len(site.data)

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        clients = torch.tensor(received.clients)
        counts = [float(n) for n in received.each("count").values()]
        weights = client_weights(server["dual"], clients, counts)
        moved = tree.add(server["model"], received.mean("delta", weights), self.server_lr)
        f = torch.stack(list(received.each("received_loss").values()))
        dual = server["dual"].clone()
        dual[clients] = (dual[clients] + self.dual_lr * (f - f.mean() - self.eps)).clamp(0, _LARGEST_DUAL)
        return {"model": {**moved, **received.statistics()}, "dual": dual}

    def log(self, server: Tree, received: Received) -> Mapping[str, Tensor]:
        return {"dual": server["dual"]}


def client_weights(dual: Tensor, clients: Tensor, counts: list[float]) -> list[float]:
    """n_i max(0, 1 + lambda_i - mean lambda); n_i alone in the rare case that all these weights are zero."""
    climb = (1 + dual[clients] - dual.mean()).clamp(min=0)
    weights = [n * float(w) for n, w in zip(counts, climb, strict=True)]
    return weights if sum(weights) > 0 else counts
