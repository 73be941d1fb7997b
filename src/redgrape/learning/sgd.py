"""Stochastic gradient descent without torch.optim's bookkeeping.

torch.optim.SGD gives the same bits. But creating the first one imports torch's compiler, which takes longer than many
rounds, and on a small net its hooks take as long as the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.sgd import sgd


class Optimizer(Protocol):
    """The optimizer interface that methods use; those of torch.optim fit."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self) -> None: ...

    def step(self) -> Any: ...


class Sgd:
    """v <- m v + g + w theta, theta <- theta - lr v. v starts as the first gradient."""

    def __init__(
        self, parameters: Sequence[Tensor], lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        group = {"params": list(parameters), "lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        self.param_groups: list[dict[str, Any]] = [group]
        self._velocity: dict[Tensor, Tensor] = {}

    def zero_grad(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        moved = [p for p in group["params"] if p.grad is not None]
        for known in (True, False):  # torch starts either all velocities of a call or none
            parameters = [p for p in moved if (p in self._velocity) == known]
            if parameters:
                self._step(parameters, group)

    def _step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        velocity = [self._velocity.get(p) for p in parameters]
        sgd(
            parameters,
            [p.grad for p in parameters],  # type: ignore[misc]  # step() chose parameters with a gradient
            velocity,
            lr=group["lr"],
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            fused=True,
        )
        if group["momentum"]:
            self._velocity.update(zip(parameters, velocity, strict=True))  # type: ignore[arg-type]
