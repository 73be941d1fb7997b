"""Message sizes of a method, measured by running one round on synthetic data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from redgrape import nets, tree
from redgrape.data.examples import Examples
from redgrape.data.federation import Federation
from redgrape.errors import ConfigError
from redgrape.exchange.parts import class_rows
from redgrape.method import Method
from redgrape.rounds import RECORD, survey_like
from redgrape.training import Training

LARGEST_TRY = 1 << 28  # numbers: 1 GB of float32


@dataclass(frozen=True)
class Payload:
    """Bytes that a client with every class receives and sends in a round, and bytes of state that it keeps. Also:
    whether it answers a survey before the first round, whether it names its classes, and the record keys of
    the method."""

    down: int
    up: int
    kept: int
    surveyed: bool
    names_classes: bool
    logged: tuple[str, ...]


def payload(method: Method, net: str, shape: tuple[int, ...], num_classes: int, rounds: int = 1) -> Payload:
    """Measure a round with one client that has two examples of every class: the last of so many."""
    if 2 * num_classes * math.prod(shape) > LARGEST_TRY:
        raise ConfigError(f"{num_classes} classes of {'x'.join(map(str, shape))} inputs are too large to try")
    labels = torch.arange(num_classes).repeat(2)
    examples = Examples(torch.rand(len(labels), *shape, generator=torch.Generator().manual_seed(0)), labels)
    federation = Federation([examples], examples, num_classes, auxiliary=examples)
    tried = type(method)(**{**dict(method), **method.cheap, "epochs": 1})
    with Training(tried, federation, partial(nets.build, net, shape, num_classes, 0), rounds=rounds) as training:
        *_, step = training.steps()
        return Payload(
            step.record["bytes_down"],
            step.record["bytes_up"],
            sum(tree.num_bytes(state) for state in step.state.clients.values()),
            bool(survey_like(tried, training.site)),
            bool(class_rows(training.parts)),
            tuple(sorted(step.record.keys() - set(RECORD))),
        )
