"""FedOpt: an adaptive optimizer at the server (FedAdam, FedYogi, FedAdagrad).

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, https://arxiv.org/abs/2003.00295. The server treats the
clients' average change as a gradient, and gives every parameter its own step size. There is no bias correction.
Clients have equal weights, as in the paper's Algorithm 2. Buffers get a plain average.

    server  m <- beta_1 m + (1 - beta_1) Delta
            v <- v + Delta^2                                          FedAdagrad
            v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2)           FedYogi
            v <- beta_2 v + (1 - beta_2) Delta^2                      FedAdam
            theta <- theta + eta_s m / (sqrt(v) + tau)
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from redgrape.exchange import Parts, Received
from redgrape.learning.local_training import zeros_like_parameters
from redgrape.method import ServerSite, Site
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST


class FedOpt(FedAvg):
    """FedAvg with Adam, Yogi or Adagrad at the server."""

    server_optimizer: Literal["adam", "yogi", "adagrad"] = Field("adam", description="how v follows Delta^2")
    server_lr: float = Field(0.01, gt=0, le=LARGEST, description="eta_s, the server's learning rate")
    beta_1: float = Field(0.9, ge=0, lt=1, description="momentum of m (the paper uses 0 for adagrad)")
    beta_2: float = Field(0.99, ge=0, lt=1, description="memory of v, for adam and yogi")
    tau: float = Field(1e-3, gt=0, le=LARGEST, description="degree of adaptivity; v starts at tau^2")
    client_weights: Literal["uniform", "count"] = Field(
        "uniform", description="average with equal weights, or weighted by examples"
    )

    presets = {
        "paper": {},
        "adagrad": {"server_optimizer": "adagrad", "beta_1": 0.0},
        "yogi": {"server_optimizer": "yogi"},
    }
    fidelity = (
        "from a secondary source, which states the three updates; the paper searches eta_s per task, and 0.01 is what "
        "others found for CIFAR-100"
    )

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        m = zeros_like_parameters(model, site)
        return {"model": model, "m": m, "v": {name: torch.full_like(t, self.tau**2) for name, t in m.items()}}

    def parts(self, model: Tensors, site: Site) -> Parts:
        return self.training_parts(model, site, "alike" if self.client_weights == "uniform" else "examples")

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        delta = received.mean("delta")
        model, m, v = dict(server["model"]), dict(server["m"]), dict(server["v"])
        for name, d in delta.items():
            m[name] = self.beta_1 * m[name] + (1 - self.beta_1) * d
            v[name] = self._second_moment(v[name], d.square())
            model[name] = model[name] + self.server_lr * m[name] / (v[name].sqrt() + self.tau)
        return {"model": {**model, **received.statistics()}, "m": m, "v": v}

    def _second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        match self.server_optimizer:
            case "adagrad":
                return v + squared
            case "yogi":
                return v - (1 - self.beta_2) * squared * torch.sign(v - squared)
            case "adam":
                return self.beta_2 * v + (1 - self.beta_2) * squared
