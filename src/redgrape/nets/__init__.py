"""The nets, by name. Each is a function of the shape of one example and the number of classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

from redgrape import determinism, own_code
from redgrape.errors import ConfigError, unknown
from redgrape.nets import cnn, own, pretrained, resnet, vector
from redgrape.nets.net import Net

Builder: TypeAlias = Callable[[tuple[int, ...], int], Net]

NETS: dict[str, Builder] = {
    "cnn": cnn.cnn,
    "cnn_dropout": cnn.cnn_dropout,
    "linear": vector.linear,
    "mlp": vector.mlp,
    "resnet8": resnet.resnet8,
    "resnet8x4": resnet.resnet8x4,
    "resnet20": resnet.resnet20,
    "resnet32": resnet.resnet32,
    "resnet56": resnet.resnet56,
    "resnet56_bottleneck": resnet.resnet56_bottleneck,
}

# The shortest image side, in pixels, that leaves something to pool or, in a ResNet, more than one value to normalise.
# A net not listed here takes any shape.
SHORTEST_SIDE: dict[str, int] = {"cnn": 4, "cnn_dropout": 6} | {name: 5 for name in NETS if name.startswith("resnet")}


MOST_WEIGHTS = 10**9  # 4 GB


def build(
    name: str, shape: tuple[int, ...], num_classes: int, seed: int, *, head: str = "linear", size: int | None = None
) -> Net:
    """A new net for examples of this shape. Its weights depend on the seed only. `head`, `size`: of a pretrained
    encoder, the net on its features and the side of its images."""
    make = find(name, head, size)
    if not _fits(name, shape):
        raise ConfigError(
            f"net '{name}' needs images of at least {SHORTEST_SIDE[name]}x{SHORTEST_SIDE[name]} pixels, "
            f"but examples are {'x'.join(map(str, shape))}; choose from {', '.join(nets_for(shape))}"
        )
    if math.prod(shape) + num_classes > 10**5:  # below this, none of our nets is too large
        _check_size(name, make, shape, num_classes)
    with determinism.global_stream(determinism.key(seed, "net")):
        return make(shape, num_classes)


def builder(name: str, federation: _Inputs, seed: int = 0, **options: Any) -> Callable[[], Net]:
    """A function that makes such nets for a federation's examples; it can be sent to other processes."""
    return partial(build, name, federation.input_shape, federation.num_classes, seed, **options)


def find(name: str, head: str = "linear", size: int | None = None) -> Builder:
    """The net of this name."""
    if pretrained.is_pretrained(name):
        return pretrained.with_head(name, size, NETS[head])
    if own_code.is_own(name):
        return own.builder(name)
    if name not in NETS:
        raise unknown("net", name, [*NETS, pretrained.LITE0])
    return NETS[name]


class _Inputs(Protocol):
    @property
    def num_classes(self) -> int: ...

    @property
    def input_shape(self) -> tuple[int, ...]: ...


def _check_size(name: str, make: Builder, shape: tuple[int, ...], num_classes: int) -> None:
    with torch.device("meta"):  # takes no memory
        weights = sum(p.numel() for p in make(shape, num_classes).parameters())
    if weights > MOST_WEIGHTS:
        raise ConfigError(
            f"net '{name}' would have {weights:,} weights for {num_classes} classes of {'x'.join(map(str, shape))} "
            f"examples; the limit is {MOST_WEIGHTS:,}: choose smaller ones (data.image_size for images) or another net"
        )


def nets_for(shape: tuple[int, ...]) -> list[str]:
    """The names of the nets that take examples of this shape."""
    return [name for name in NETS if _fits(name, shape)]


def _fits(name: str, shape: tuple[int, ...]) -> bool:
    return name not in SHORTEST_SIDE or (len(shape) == 3 and min(shape[1:]) >= SHORTEST_SIDE[name])
