"""Coverage: clients with examples of rare classes get more weight in the average.

This method is ours. In FedAvg a client's weight is its number of examples, so a frequent class has more mass than a
rare one. Here an example of class c counts N_c^-beta, with N_c the examples of c at all clients. beta = 0 is FedAvg bit
for bit; with beta = 1 all classes have the same mass. Only sums of a_k delta_k and a_k are needed, which a secure sum
can make.

    survey  N_c, the summed class counts
    client  a_k = min(sum_c w_c n_kc, kappa n_k),   w_c = N_c^-beta N / sum_j N_j^(1-beta): without the cap the a_k of
            all clients add up to N
            sends delta_k, n_k and a_k
    server  theta <- theta + eta_s sum_k a_k / (sum_i a_i) delta_k
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from redgrape.errors import ConfigError
from redgrape.exchange import Direction, Parts, Received, Scalar, Weight
from redgrape.method import ClientSite, ServerSite, Site
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree


class Coverage(FedAvg):
    """FedAvg in which clients with examples of rare classes get more weight."""

    coverage: float = Field(0.5, ge=0, le=1, description="beta: 0 weighs by examples, 1 gives all classes equal mass")
    most_weight: float = Field(5.0, ge=1, le=10**6, description="kappa, the largest weight for each example")

    presets = {"paper": {}}
    ingredient = "client weights"
    fidelity = "ours"

    def parts(self, model: Tensors, site: Site) -> Parts:
        parts = super().parts(model, site)
        weighted: Parts = {
            name: replace(part, weights="sent")
            for name, part in parts.items()
            if isinstance(part, Direction) and part.weights == "examples"
        }
        if not weighted or any(isinstance(p, Scalar) and p.weighs for p in parts.values()):
            raise ConfigError(
                "'coverage' sets the weights of clients, and this method does not weigh them by their examples; leave "
                "'coverage' out"
            )
        return {**parts, **weighted, "weight": Weight(self.most_weight)}

    def survey(self, site: ClientSite) -> Tree:
        return {**super().survey(site), "class_counts": site.class_counts}

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        mass = class_mass(site.survey["class_counts"], self.coverage)
        return {**super().init_server(model, site), "class_mass": mass}

    def broadcast(self, server: Tree) -> Tree:
        return {**super().broadcast(server), "class_mass": server["class_mass"]}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        update, state = super().client_update(broadcast, state, site)
        own = (site.class_counts.double() * broadcast["class_mass"]).sum()
        return {**update, "weight": own.clamp(max=self.most_weight * len(site.data))}, state

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        return {**super().server_update(server, received, site), "class_mass": server["class_mass"]}


def class_mass(counts: Tensor, beta: float) -> Tensor:
    """w_c, what an example of each class counts, in float64; zero for a class that nobody holds."""
    number = counts.double()
    held = number > 0
    scale = number.sum() / (number[held] ** (1 - beta)).sum()
    return torch.where(held, scale * number.clamp(min=1) ** -beta, 0.0)
