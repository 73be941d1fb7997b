"""NCM: nearest class means from sums over the clients, without training.

Mensink et al., "Distance-Based Image Classification", TPAMI 2013, is the classifier. FedNCM (Legate et al., "Guiding
The Last Layer in Federated Learning with Pre-Trained Models", NeurIPS 2023, https://arxiv.org/abs/2306.03937) makes it
from sums over clients. The correction by rho is ours. This is `lda` with g = 1: S counts by its trace alone.

    client  n_k[c], s_k[c] = sum h over its examples of class c, Q_k = sum h h^T        once
    server  mu_c = s_c / N_c;   v = tr(Q - sum_c N_c mu_c mu_c^T) / ((N - C) d)
            z_c = -1/2 [|h - mu_c|^2 / v - rho d / N_c], without |h|^2, which all classes share

The distance to a mean of n examples is too large by tr(S) / n; rho = 1 takes this back. With rho = 0 this is the usual
nearest mean. A client sends its sums in the first round in which it is asked, and zeros in later rounds. With all
clients sampled, one round is enough.
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


class NCM(Method):
    """The nearest class mean of the features of the encoder, from one round of sums."""

    rho: float | None = Field(
        None, ge=0, le=1, description="correction for few examples; none: 1 for up to 20 classes, else 0.5"
    )

    presets = {"paper": {}, "usual": {"rho": 0.0}, "post_hoc": {}}
    fidelity = (
        "from a secondary source, which states the class means; the correction by rho is ours, and features are not "
        "normalised"
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
        rho = class_statistics.usual_rho(site.num_classes) if self.rho is None else self.rho
        W, b = class_statistics.Spread.of(sums).discriminants(g=[1.0], rho=[rho])
        return {"model": class_statistics.with_head(server["model"], sums, W[0], b[0, 0]), "sums": sums}

    def log(self, server: Tree, received: Received) -> Mapping[str, Tensor]:
        return {"class_examples": server["sums"]["examples"]}
