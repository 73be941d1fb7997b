"""The parts of an update. A method names them; each knows its shape, and the exchange works by that.

    Direction    the server steps along its mean: weighted by examples, by the clients' Weight or equally, clipped,
                 averaged by the rule, noised
    Sum          tensors that are added up: statistics, counts, a change of a running sum
    Statistics   BatchNorm's running values: a plain average
    Scalar       one number, such as a loss
    Count        the number of examples that the client trained on, its weight in averages
    Weight       the client's weight in the means of directions that ask for it
    ClassRows    a row for each class that the client reports, averaged over the clients that report it

In an update a part is a tensor (Scalar, Count, Weight) or a group of named tensors. ClassRows hold `classes` [m], in
ascending order, and for each tensor of `like` the m rows of these classes. With `weights="count"` they also hold
`counts` [m], the examples of each class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from redgrape.tree import Tensors

Weights: TypeAlias = Literal["examples", "alike", "sent"]  # sent: the part `weight`


@dataclass(frozen=True)
class Direction:
    """The server steps along its mean. `kept`: the client adds it to its state as sent, and the server's mean must stay
    the mean of these states."""

    like: Tensors
    weights: Weights = "examples"
    kept: bool = False


@dataclass(frozen=True)
class Sum:
    """Tensors that are added up in float64. `running`: they are the change of a sum that the client keeps track of, so
    they must be added as sent. `instead`: what to choose where that is refused. `counted`: the name of its tensor that
    counts the examples of each class; the others are then sums over these examples, as long as the data makes them.
    `min_holders`: classes have equal weight in the sum, so one example can show; a class that fewer clients hold is
    left out."""

    like: Tensors
    running: bool = False
    instead: str = "choose another method"
    counted: str = ""
    min_holders: int | None = None


@dataclass(frozen=True)
class Statistics:
    """Running statistics: values, not steps. `momentum`: the share of a batch in each, by its name."""

    like: Tensors
    momentum: Mapping[str, float]


@dataclass(frozen=True)
class Scalar:
    """One number, averaged by examples. `least`: its lower bound; `weighs`: the server weights clients by it."""

    like: Tensor
    least: float | None = None
    weighs: bool = False


@dataclass(frozen=True)
class Count:
    """The number of examples that the client trained on."""


@dataclass(frozen=True)
class Weight:
    """The client's weight in means, in float64; the part has the name `weight`. It is above zero, and at most `most`
    for each example that the client trained on: a liar gains no more than that."""

    most: float


@dataclass(frozen=True)
class ClassRows:
    """A row like `like` for each class that the client reports. `gradient`: the row is the mean gradient of the
    cross-entropy of the class's examples, and must look like one. `signed`: its features are never negative.
    `drawn`: if a class has more examples than this, the row is of this many of them."""

    like: Tensors
    weights: Literal["uniform", "count"] = "uniform"
    gradient: bool = False
    signed: bool = False
    drawn: int | None = None


Part: TypeAlias = Direction | Sum | Statistics | Scalar | Count | Weight | ClassRows
Parts: TypeAlias = dict[str, Part]


def described(parts: Mapping[str, Part]) -> dict[str, Tensor]:
    """Every tensor of an update by its joined name, with its shape and dtype; for ClassRows a single row."""
    flat: dict[str, Tensor] = {}
    for name, part in parts.items():
        match part:
            case Count():
                flat[name] = torch.zeros((), dtype=torch.int64)
            case Weight():
                flat[name] = torch.zeros((), dtype=torch.float64)
            case Scalar(like=number):
                flat[name] = number
            case ClassRows():
                numbers = ("classes", "counts") if part.weights == "count" else ("classes",)
                flat |= {f"{name}/{number}": torch.zeros((), dtype=torch.int64) for number in numbers}
                flat |= {f"{name}/{tensor}": t for tensor, t in part.like.items()}
            case _:
                flat |= {f"{name}/{tensor}": t for tensor, t in part.like.items()}
    return flat


def class_rows(parts: Mapping[str, Part]) -> dict[str, ClassRows]:
    return {name: part for name, part in parts.items() if isinstance(part, ClassRows)}


def class_sums(parts: Mapping[str, Part]) -> list[str]:
    """The sums over the examples of each class. From a single client, they disclose as much as rows of its classes."""
    return [name for name, part in parts.items() if isinstance(part, Sum) and part.counted]


def of_data(parts: Mapping[str, Part]) -> list[str]:
    """The parts that say the same about a client's classes in every round: which it holds, and how many examples."""
    return [*class_sums(parts), *class_rows(parts), *(n for n, part in parts.items() if isinstance(part, Weight))]


def balanced_sums(parts: Mapping[str, Part]) -> dict[str, int]:
    """The sums in which classes have equal weight, however many examples they have, and how many clients must hold a
    class."""
    sums = {name: part.min_holders for name, part in parts.items() if isinstance(part, Sum)}
    return {name: least for name, least in sums.items() if least is not None}


def directions(parts: Mapping[str, Part]) -> list[str]:
    """The parts with a common bound on their length, ordered by name: those that the server steps along or adds up."""
    return sorted(name for name, part in parts.items() if isinstance(part, Direction | Sum))
