"""A user's own nets: any module that ends in a linear layer becomes an encoder P and a linear classifier W."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from redgrape import own_code
from redgrape.errors import ConfigError
from redgrape.nets.net import Net


def builder(name: str) -> Callable[[tuple[int, ...], int], Net]:
    """The net of the function `file.py:function` or `module:function`, called with the shape of an example and the
    number of classes."""

    def build(shape: tuple[int, ...], num_classes: int) -> Net:
        return as_net(own_code.load(name, "net")(shape, num_classes), shape, num_classes, f"'{name}'")

    return build


def copies(module: nn.Module, shape: tuple[int, ...], num_classes: int) -> Callable[[], Net]:
    """A function that returns copies of this net, with its weights; it can be sent to other processes."""
    return partial(copy.deepcopy, as_net(copy.deepcopy(module), shape, num_classes, "the net"))


def as_net(made: Any, shape: tuple[int, ...], num_classes: int, what: str) -> Net:
    """The module as a Net. Its last nn.Linear must be what it applies last: that is tried on two inputs."""
    net = made if isinstance(made, Net) else _split(made, shape, what)
    if net.classifier.out_features != num_classes:
        raise ConfigError(
            f"{what} has {net.classifier.out_features} outputs for {num_classes} classes; give its nn.Linear as many"
        )
    return net


def _split(made: Any, shape: tuple[int, ...], what: str) -> Net:
    how = "return redgrape.Net(encoder, nn.Linear(features, classes))"
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{what} gives {type(made).__name__}, which is no net; {how}")
    linear = [(name, m) for name, m in made.named_modules() if type(m) is nn.Linear]
    if not linear or made is linear[-1][1]:
        raise ConfigError(f"{what} has no linear classifier after an encoder; {how}")
    place, classifier = linear[-1]
    numbers = torch.linspace(-1, 1, 2 * math.prod(shape)).reshape(2, *shape)
    before = _tried(made, numbers, what)
    made.set_submodule(place, nn.Identity())
    net = Net(made, classifier)
    try:
        same = before.is_meta or torch.equal(_tried(net, numbers, what), before)
    except ConfigError:
        same = False
    if not same:
        raise ConfigError(f"{what} does not end in its last nn.Linear, '{place}'; {how}")
    return net


def _tried(module: nn.Module, x: Tensor, what: str) -> Tensor:
    training = module.training
    try:
        with torch.no_grad():
            result: Tensor = module.eval()(x.to(next(module.parameters())))
            return result
    except Exception as error:  # it is the user's code
        raise ConfigError(
            f"{what} does not take examples of shape {list(x.shape[1:])}: {type(error).__name__}: {error}"
        ) from error
    finally:
        module.train(training)
