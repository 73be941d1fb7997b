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
from typing import Any, Literal, Self

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

    presets = {"paper": {}, "post_hoc": {"stage": "post_hoc"}}
    ingredient = "loss"
    fidelity = (
        "from a secondary source, which states its loss and its post-hoc rule; the sources of the prior are ours, and "
        "`estimated` is an estimator of our own"
    )

    @model_validator(mode="after")
    def _prior_is_to_be_had(self) -> Self:
        Prior(self.prior).check(self, LogitAdjustment)
        if self.stage == "post_hoc" and self.prior == "local":
            raise ValueError(
                "stage is post_hoc with a local prior; the server has no counts: choose global or estimated"
            )
        return self

    def survey(self, site: ClientSite) -> Tree:
        return {**super().survey(site), **Prior(self.prior).survey(site)}

    def needs_single(self) -> str:
        return super().needs_single() or Prior(self.prior).needs_single()

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        if self.stage == "post_hoc" and _BIAS not in model:
            raise ConfigError(
                "stage=post_hoc shifts the classifier's bias, and this net has none; choose stage=training"
            )
        return self._server(super().init_server(model, site), Prior(self.prior).first(model, site))

    def _server(self, trained: Tree, prior: Tensor) -> dict[str, Any]:
        """The server state. The deployed model has the shifted bias; training goes on with the bias kept beside it."""
        if self.stage == "training":
            return {**trained, "prior": prior}
        bias = trained["model"][_BIAS]
        shifted = {**trained["model"], _BIAS: bias - self.tau * post_hoc_shift(prior).to(bias.dtype)}
        return {**trained, "model": shifted, "prior": prior, "trained_bias": bias}

    def _trained(self, server: Tree) -> Tree:
        """The server state with the bias that training goes on with."""
        if self.stage == "training":
            return server
        return {**server, "model": {**server["model"], _BIAS: server["trained_bias"]}}

    def broadcast(self, server: Tree) -> Tree:
        sent = super().broadcast(self._trained(server))
        return {**sent, "prior": server["prior"]} if self.stage == "training" else sent

    def criterion(self, broadcast: Tree, site: ClientSite) -> Callable[[Tensor, Tensor], Tensor]:
        if self.stage == "post_hoc":
            return F.cross_entropy
        shift = self.tau * Prior(self.prior).log(broadcast["prior"], site)
        return lambda z, y: F.cross_entropy(z + shift.to(z.dtype), y)

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        prior = Prior(self.prior).next(server["prior"], received, self, site)
        return self._server(super().server_update(self._trained(server), received, site), prior)

    def log(self, server: Tree, received: Received) -> Mapping[str, Tensor]:
        return {**super().log(server, received), "prior": server["prior"]}
