"""Forward passes through an encoder besides those of training.

In training mode such a pass would move BatchNorm's running statistics, which must describe the data that the encoder is
trained on. All such passes are made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Statistics: TypeAlias = Literal["running", "batch", "batch_update"]


def batchnorms(module: nn.Module) -> list[_BatchNorm]:
    return [m for m in module.modules() if isinstance(m, _BatchNorm)]


def momenta(module: nn.Module) -> dict[str, float]:
    """The share of a batch in each running statistic, by its name; one if BatchNorm averages all batches."""
    return {
        f"{name}.{buffer}": 1.0 if layer.momentum is None else layer.momentum
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm)
        for buffer in ("running_mean", "running_var")
    }


def features(encoder: nn.Module, x: Tensor, statistics: Statistics) -> Tensor:
    """h = f(x; P), without a graph. `running`: evaluation mode. `batch`: training mode, in which BatchNorm uses the
    batch's statistics but does not update its buffers. `batch_update`: ordinary training mode."""
    with torch.no_grad():
        if statistics == "running" or len(x) == 1:  # BatchNorm has no statistics of a single example
            with _evaluation(encoder):
                return cast(Tensor, encoder(x))
        if statistics == "batch":
            with _buffers_untouched(encoder):
                return cast(Tensor, encoder(x))
        return cast(Tensor, encoder(x))


_ABOVE = (nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Softplus)
_KEEPING = (nn.Dropout, nn.Flatten, nn.Identity, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)


def never_negative(encoder: nn.Module) -> bool:
    """Whether features are known to be never negative: the encoder ends in a ReLU or the like, or in a module with an
    attribute of this name, and nothing after it can change a sign."""
    for module in reversed(_in_order(encoder)):
        if type(module) in _ABOVE or getattr(module, "never_negative", False) is True:
            return True
        if type(module) not in _KEEPING:
            return False
    return False


def _in_order(module: nn.Module) -> list[nn.Module]:
    if type(module) is not nn.Sequential:
        return [module]
    return [inner for child in module for inner in _in_order(child)]


@contextmanager
def _evaluation(encoder: nn.Module) -> Iterator[None]:
    training = [m for m in encoder.modules() if m.training]
    encoder.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _buffers_untouched(encoder: nn.Module) -> Iterator[None]:
    # In training mode, a BatchNorm without tracking normalises by the batch and neither reads nor writes buffers.
    tracking = [m for m in batchnorms(encoder) if m.training and m.track_running_stats]
    for layer in tracking:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in tracking:
            layer.track_running_stats = True
