"""Logit adjustment: logits shifted by the log prior, in training or after it.

Menon et al., "Long-tail learning via logit adjustment", ICLR 2021, https://arxiv.org/abs/2007.07314. The classifier
with the best balanced error chooses the class whose logit exceeds its log prior most. Training can aim for this by
adding tau log pi to the logits inside the loss. Or it can be done post hoc, by subtracting tau log pi from the logits
of an ordinary model. With a uniform prior both are FedAvg.

    training   loss = CE(z + tau log pi, y);   inference uses z
    post hoc   loss = CE(z, y);   inference uses z - tau log pi, which is a shift of the bias
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from redgrape.errors import ConfigError
from redgrape.exchange import Received
from redgrape.learning.prior import Prior, PriorSource, post_hoc_shift
from redgrape.method import ClientSite, ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST

_BIAS = "classifier.bias"


class LogitAdjustment(FedAvg):
    """FedAvg with logits shifted by the log prior, in training or post hoc."""

    tau: float = Field(1.0, ge=0, le=LARGEST, description="strength of the shift")
    stage: Literal["training", "post_hoc"] = Field("training", description="shift inside the loss, or the trained bias")
    prior: PriorSource = Field(
        "global", description="class counts: the client's own, the sum over all clients, or an estimate"
    )

    presets: ClassVar = {"paper": {}}
    fidelity: ClassVar[str] = (
        "from a secondary source, which states its loss and its post-hoc rule; the sources of the prior are ours, and "
        "`estimated` is an estimator of our own"
    )

    @model_validator(mode="after")
    def _prior_is_to_be_had(self) -> Self:
        Prior(self.prior).check(self)
        if self.stage == "post_hoc" and self.prior == "local":
            raise ValueError(
                "stage is post_hoc with a local prior; the server has no counts: choose global or estimated"
            )
        return self

    def survey(self, site: ClientSite) -> Tree:
        return Prior(self.prior).survey(site)

    def needs_single(self) -> str:
        return Prior(self.prior).needs_single()

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        if self.stage == "post_hoc" and _BIAS not in model:
            raise ConfigError(
                "stage=post_hoc shifts the classifier's bias, and this net has none; choose stage=training"
            )
        return self._server(model, Prior(self.prior).first(model, site))

    def _server(self, model: Tensors, prior: Tensor) -> dict[str, Any]:
        """The server state. The deployed model has the shifted bias; training goes on with the bias kept beside it."""
        if self.stage == "training":
            return {"model": model, "prior": prior}
        shift = self.tau * post_hoc_shift(prior).to(model[_BIAS].dtype)
        return {"model": {**model, _BIAS: model[_BIAS] - shift}, "prior": prior, "trained_bias": model[_BIAS]}

    def broadcast(self, server: Tree) -> Tree:
        if self.stage == "training":
            return {"model": server["model"], "prior": server["prior"]}
        return {"model": _with_trained_bias(server)}

    def criterion(self, broadcast: Tree, site: ClientSite) -> Callable[[Tensor, Tensor], Tensor]:
        if self.stage == "post_hoc":
            return F.cross_entropy
        shift = self.tau * Prior(self.prior).log(broadcast["prior"], site)
        return lambda z, y: F.cross_entropy(z + shift.to(z.dtype), y)

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        prior = Prior(self.prior).next(server["prior"], received, self, site)
        model = server["model"] if self.stage == "training" else _with_trained_bias(server)
        return self._server(received.moved(model, self.server_lr), prior)

    def log(self, server: Tree, received: Received) -> Mapping[str, Tensor]:
        return {"prior": server["prior"]}


def _with_trained_bias(server: Tree) -> Tensors:
    return {**server["model"], _BIAS: server["trained_bias"]}
