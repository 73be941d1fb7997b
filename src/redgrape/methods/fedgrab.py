"""Fed-GraB: a controller for each class balances its positive and negative gradients.

Xiao et al., "Fed-GraB: Federated Long-tailed Learning with Self-Adjusting Gradient Balancer", NeurIPS 2023,
https://arxiv.org/abs/2310.07587. Every class is a yes-or-no question of its own, with a sigmoid. Examples of the class
push its logit up, all others push it down, and a rare class is mostly pushed down. Each client has a PID controller for
each class, which weights both pushes so that they add up to the same.

    client  for each batch of n examples, and each class c:
            e_c = -D_c;   I_c <- I_c + e_c;   u_c = K_p e_c + K_i I_c + K_d (e_c - the last e_c)
            w_ic = f(u_c) if y_i = c, else f(-u_c);   f(u) = (10/9) / (1/9 + exp(-u/2)): f(0) = 1, and at most 10
            loss = 1/n sum_i sum_c w_ic BCE(z_ic, [y_i = c])
            D_c <- D_c + 1/n (sum_{i: y_i = c} w_ic (1 - s_ic) - sum_{i: y_i != c} w_ic s_ic),   s = sigmoid(z)
            keeps D, I and the last e for its next round
    server  averages as FedAvg;   inference takes the largest logit

A class that the client lacks is pushed down ever less. With K_p = K_i = K_d = 0 it is FedAvg with a sigmoid for each
class.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from redgrape.method import ClientSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST

_MOST = 100.0  # a larger u counts as this one; f is 10 or 0 there


class FedGraB(FedAvg):
    """A sigmoid for each class, with gradients that a controller at each client balances."""

    proportional: float = Field(10.0, ge=0, le=LARGEST, description="K_p, what the present gap does")
    integral: float = Field(0.01, ge=0, le=LARGEST, description="K_i, what the sum of all gaps does")
    derivative: float = Field(0.1, ge=0, le=LARGEST, description="K_d, what the change of the gap does")

    presets = {"paper": {}}
    fidelity = (
        "from the authors' code, in part; it balances classes by their place in the order of labels, where the paper "
        "has a class prior from the lengths of the classifier's rows; how that prior enters could not be verified, so "
        "every class has a controller here and the prior is left out"
    )

    def init_client(self, broadcast: Tree) -> Tree:
        C = len(broadcast["model"]["classifier.weight"])
        return {"balance": {name: torch.zeros(C, dtype=torch.float64) for name in ("gap", "summed", "last")}}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        balance = {name: t.to(site.device) for name, t in state["balance"].items()}
        optimizer = self.make_optimizer(net.parameters(), site)
        losses = self.losses(net, site)
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            z = net(x)
            own = F.one_hot(y, site.num_classes).to(z)
            u, balance = self.control(balance)
            weights = (own * response(u) + (1 - own) * response(-u)).to(z)
            loss = F.binary_cross_entropy_with_logits(z, own, weight=weights, reduction="sum") / len(y)
            loss.backward()
            self.step(optimizer)
            losses.add(loss, y)
            balance["gap"] = balance["gap"] + (weights * (own - z.detach().sigmoid())).double().sum(dim=0) / len(y)
        kept = {name: t.cpu() for name, t in balance.items()}
        return self.report(net, broadcast["model"], losses, site), {**state, "balance": kept}

    def control(self, balance: Tensors) -> tuple[Tensor, Tensors]:
        """u of each class, and what the controllers remember."""
        error = -balance["gap"]
        summed = balance["summed"] + error
        u = self.proportional * error + self.integral * summed + self.derivative * (error - balance["last"])
        return u.clamp(-_MOST, _MOST), {"gap": balance["gap"], "summed": summed, "last": error}


def response(u: Tensor) -> Tensor:
    """f(u) = (10/9) / (1/9 + exp(-u/2)): 1 at zero, between 0 and 10."""
    return (10 / 9) / (1 / 9 + torch.exp(-u / 2))
