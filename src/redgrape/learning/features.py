"""Extra forward passes through an encoder, beside the one that training makes.

In training mode such a pass would move BatchNorm's running statistics, which must describe the data the encoder is
trained on. This is the one place that makes them.
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
    """By the name of every running statistic, the share of a batch in it: one where BatchNorm averages all batches."""
    return {
        f"{name}.{buffer}": 1.0 if layer.momentum is None else layer.momentum
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm)
        for buffer in ("running_mean", "running_var")
    }


def features(encoder: nn.Module, x: Tensor, statistics: Statistics) -> Tensor:
    """h = f(x; P), without a graph. `running`: evaluation mode. `batch`: training mode, where BatchNorm uses the
    batch's statistics but leaves its buffers alone. `batch_update`: training mode as it is."""
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
    """Whether features are known to be none of them below zero: the encoder ends in a ReLU, say, or in a module that
    says so of itself by an attribute of this name, with nothing behind it that could change a sign."""
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
    # A BatchNorm in training mode that does not track normalises by the batch and reads and writes no buffer.
    tracking = [m for m in batchnorms(encoder) if m.training and m.track_running_stats]
    for layer in tracking:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in tracking:
            layer.track_running_stats = True
