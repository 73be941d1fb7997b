"""Fed3R: ridge regression to the labels from sums over the clients, without training.

Fanì et al., "Accelerating Heterogeneous Federated Learning with Closed-form Classifiers", ICML 2024,
https://arxiv.org/abs/2406.01116. Every example counts alike, so rare classes lose.

    client  n_k[c], s_k[c] = sum h over its examples of class c, Q_k = sum h h^T        once
    server  w_c = (Q + r I)^-1 s_c, the ridge regression of [y = c] on h
            w_c <- w_c / |w_c|, b_c <- b_c / |w_c|          if normalise

With `constant`, h has a further feature 1, and b_c is its weight. A client sends its sums in the first round in which
it is asked, and zeros in later rounds. With all clients sampled, one round is enough.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from redgrape.exchange import Parts, Received
from redgrape.learning import class_statistics
from redgrape.method import ClientSite, Method, ServerSite, Site
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST


class Fed3R(Method):
    """Ridge regression on the features of the encoder, from one round of sums."""

    r: float = Field(0.01, ge=1e-9, le=LARGEST, description="the ridge")
    constant: bool = Field(False, description="add a constant feature, whose weight is the bias")
    normalise: bool = Field(False, description="scale the weights of each class to length 1")

    presets = {
        "paper": {},
        "released": {"constant": True, "normalise": True},
        "post_hoc": {},
    }
    fidelity = (
        "from the authors' code (constant feature, normalised weights: preset released); the plain ridge from a "
        "secondary source; r is a setting there, and 0.01 is our choice"
    )
    sums_of_states = ("sums",)

    def parts(self, model: Tensors, site: Site) -> Parts:
        return {"sums": class_statistics.part(class_statistics.zeros(model, site))}

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        return {"model": model, "sums": class_statistics.zeros(model, site)}

    def broadcast(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def init_client(self, broadcast: Tree) -> Tree:
        return {"visits": torch.tensor(0)}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        rows = class_statistics.reported_rows(site)
        sums = class_statistics.of_rows(site.load(broadcast["model"]), site, rows[:0] if state["visits"] else rows)
        return {"sums": sums}, {"visits": state["visits"] + 1}

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        new = received.total("sums")
        if not new["examples"].any():
            return server
        sums = class_statistics.added(server["sums"], new)
        W, b = class_statistics.ridge(sums, self.r, constant=self.constant)
        if self.normalise:
            length = torch.linalg.vector_norm(W, dim=1).clamp(min=1e-6)
            W, b = W / length[:, None], b / length
        return {"model": class_statistics.with_head(server["model"], sums, W, b), "sums": sums}

    def log(self, server: Tree, received: Received) -> Mapping[str, Tensor]:
        return {"class_examples": server["sums"]["examples"]}
