"""LDA: a linear discriminant from sums over the clients, without training.

The head is ours in its correction; the rest is Fisher's linear discriminant with a shrunken covariance. Clients send
sums over the features of the received encoder, in evaluation mode. A secure sum can add them up. The encoder stays as
it is, so it should be a pretrained one.

    client  n_k[c], s_k[c] = sum h over its examples of class c, Q_k = sum h h^T        once
    server  mu_c = s_c / N_c;   S = (Q - sum_c N_c mu_c mu_c^T) / (N - C)
            P = ((1 - g) S + g tr(S)/d I)^-1;   d_eff = tr(P S)
            w_c = P mu_c;   b_c = -1/2 [mu_c^T P mu_c - rho d_eff / N_c] + tau log(N_c / N)

A mean of few examples is longer than the true mean, E |mu_hat|^2 = |mu|^2 + tr(S) / n, so without rho the scores of
rare classes are too low. With rho = 0 and tau = 1 this is the usual LDA.

A client sends its sums in the first round in which it is asked, and zeros in later rounds. With all clients sampled,
one round is enough. With fewer, the head is that of the clients seen so far, each counted once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from redgrape.exchange import Parts, Received
from redgrape.learning import class_statistics
from redgrape.method import ClientSite, Method, ServerSite, Site
from redgrape.tree import Tensors, Tree


class LDA(Method):
    """A linear discriminant on the features of the encoder, from one round of sums."""

    g: float = Field(0.5, ge=0, le=1, description="shrinkage of the covariance towards a multiple of the identity")
    rho: float | None = Field(
        None, ge=0, le=1, description="correction for few examples; none: 1 for up to 20 classes, else 0.5"
    )
    tau: float = Field(0.0, ge=0, le=1, description="weight of the class shares; 0: all classes are equally likely")

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {}, "usual": {"rho": 0.0, "tau": 1.0}}
    fidelity: ClassVar[str] = "ours; the correction by rho was found in no paper, the rest is textbook LDA"
    sums_of_states: ClassVar[tuple[str, ...]] = ("sums",)

    def parts(self, model: Tensors, site: Site) -> Parts:
        return {"sums": class_statistics.part(model, site)}

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
        rho = class_statistics.usual_rho(site.num_classes) if self.rho is None else self.rho
        spread = class_statistics.Spread.of(sums)
        W, b = spread.discriminant(self.g, rho)
        b = b + self.tau * torch.log(spread.examples / spread.examples.sum())
        return {"model": class_statistics.with_head(server["model"], sums, W, b), "sums": sums}

    def log(self, server: Tree, received: Received) -> Mapping[str, Tensor]:
        return {"class_examples": server["sums"]["examples"]}
