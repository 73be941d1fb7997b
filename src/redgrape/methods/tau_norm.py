"""tau-normalisation: the rows of the trained classifier, scaled towards the same length.

Kang et al., "Decoupling Representation and Classifier for Long-Tailed Recognition", ICLR 2020,
https://arxiv.org/abs/1910.09217. A classifier trained on a long tail has long rows for frequent classes and short rows
for rare ones. Dividing each row by a power of its length takes this back. Training is FedAvg and does not see it.

    deployed   z_c = w_c h / |w_c|^tau, without bias

It needs nothing from the clients. `redgrape adjust RUN tau_norm` does it to the model of a finished run.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from redgrape.exchange import Received
from redgrape.learning import classifier
from redgrape.method import ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree

_SHORTEST = 1e-12  # a shorter row is divided by the power of this length


class TauNorm(FedAvg):
    """FedAvg whose deployed classifier has rows scaled towards the same length."""

    tau: float = Field(1.0, ge=0, le=2, description="0 leaves the rows as they are, 1 makes them equally long")

    presets = {"paper": {}, "post_hoc": {}}
    ingredient = "head"
    fidelity = (
        "from the authors' code (facebookresearch/classifier-balancing at f162ade), which drops the bias; the paper "
        "chooses tau by validation data, here it is fixed beforehand"
    )

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        return self._deployed(super().init_server(model, site))

    def _deployed(self, trained: Tree) -> dict[str, Any]:
        """The server state. The deployed model has the scaled rows; training goes on with those kept beside it."""
        model = trained["model"]
        W = classifier.of(model)
        length = torch.linalg.vector_norm(W["weight"].double(), dim=1, keepdim=True).clamp(min=_SHORTEST)
        head = {"classifier.weight": (W["weight"] / length**self.tau).to(W["weight"].dtype)}
        if "bias" in W:
            head["classifier.bias"] = torch.zeros_like(W["bias"])
        return {**trained, "model": {**model, **head}, "beneath": W}

    def broadcast(self, server: Tree) -> Tree:
        return super().broadcast(classifier.beneath_head(server))

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        return self._deployed(super().server_update(classifier.beneath_head(server), received, site))
