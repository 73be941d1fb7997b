"""Which updates are plausible: each by itself, and compared with the other clients of its round.

An answer is measured when it arrives, since it may then wait on disk. The measures are compared once all are in, so the
order of arrival does not matter. n_k: a client's examples; S: its local steps; theta: the sent model.

    direction    |d_k| <= max(1, |theta|, 25 median_j |d_j|, 25 n_k median_j (|d_j| / n_j))
    class rows   f_k = max_c |G_c| / |b_c| <= 20 max(1, median_j f_j), if they are gradients
                 G_c = mean (p - e_c) h^T and b_c = mean (p - e_c), so |G_c| <= |b_c| max |h|: each number of
                 p - e_c has the same sign for all examples of class c
    statistics   x_k = old + (new - old) / (1 - (1 - m)^S), the statistic that the client's data must have had;
                 max |x_k| <= 100 max(1, max |old|, lower median_j max |x_j|)
    variances    new >= (1 - m)^(2 S) old: data only adds to it, in at most two passes per step
    data sums    |s_k| / n_k <= 100 max(1, lower median_j |s_j| / n_j), with n_k the examples that it counts
    scalars      |f_k| <= 10 max(log C, lower median_j |f_j|); a larger one is replaced by the bound

A median over one or two clients rejects no direction: nobody can tell who lies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from redgrape import tree
from redgrape.exchange.checks import UpdateRejected
from redgrape.exchange.parts import ClassRows, Direction, Parts, Statistics, Sum
from redgrape.tree import Tensors, Tree

K = TypeVar("K")  # a client

STEP, FEATURE, STATISTIC, SCALAR = 25.0, 20.0, 100.0, 10.0  # times what is typical in the round
LARGEST = 1e12  # times the broadcast statistic: rejected without comparing clients
_NOTHING = 1e-30  # what rounding makes of a zero


@dataclass(frozen=True)
class Measures:
    """The numbers that compare an answer with others, by the names of parts and tensors. Statistics that did not move,
    such as those of a client with a single example, have none; so have sums over no example."""

    examples: int
    directions: Mapping[str, float]
    features: Mapping[str, float]
    statistics: Mapping[str, float]
    sums: Mapping[str, float] = field(default_factory=dict)


def measured(update: Tree, parts: Parts, lengths: Mapping[str, float], steps: int | None) -> Measures:
    """The measures of an update with parts of these lengths. Its statistics are compared at once with those sent, which
    the part holds: UpdateRejected names the tensor. `steps`: S, if known."""
    found: dict[str, float] = {}
    for name, part in parts.items():
        if isinstance(part, Statistics):
            found |= _statistics(name, update[name], part, steps)
    return Measures(
        int(update.get("count", 1)),
        {name: lengths[name] for name, part in parts.items() if isinstance(part, Direction)},
        {name: longest_feature(update[name]) for name, p in parts.items() if isinstance(p, ClassRows) and p.gradient},
        found,
        {
            name: lengths[name] / n
            for name, part in parts.items()
            if isinstance(part, Sum) and part.counted and (n := int(update[name][part.counted].sum()))
        },
    )


def _statistics(part: str, values: Tensors, described: Statistics, steps: int | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, new in values.items():
        old, momentum, whole = described.like[name], described.momentum.get(name, 1.0), f"{part}/{name}"
        if name.endswith("running_var") and steps is not None:
            check_variance(whole, new, old, (1 - momentum) ** (2 * steps))
        if torch.equal(new, old):
            continue
        share = 1.0 if steps is None else max(_NOTHING, 1 - (1 - momentum) ** steps)
        found[whole] = largest(old.double() + (new.double() - old.double()) / share)
        if found[whole] > (bound := LARGEST * max(1.0, largest(old))):
            raise UpdateRejected(_too_large(whole, found[whole], bound))
    return found


def check_variance(name: str, new: Tensor, old: Tensor, left: float) -> None:
    """Raise UpdateRejected if a running variance is below the share `left` that must remain of the old one."""
    if (new.double() < 0.999 * left * old.double() - _NOTHING).any():
        raise UpdateRejected(
            f"tensor '{name}' is below {left:.3g} times the variance sent, the least that its steps can leave"
        )


def largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def longest_feature(rows: Tree) -> float:
    """max_c |G_c| / |b_c|: some example has a feature vector at least this long. Without a bias it is max_c |G_c|, at
    most sqrt(2) times that length. Zero if there are no rows."""
    weight, bias = rows["weight"], rows.get("bias")
    if not len(weight):
        return 0.0
    length = torch.linalg.vector_norm(weight.double().flatten(start_dim=1), dim=1)
    if bias is not None:
        length = length / torch.linalg.vector_norm(bias.double(), dim=1).clamp(min=_NOTHING)
    return float(length.max())


def outliers(measures: Mapping[K, Measures], parts: Parts, model: Tensors) -> dict[K, UpdateRejected]:
    """The clients with updates far larger than the others of the round, each with the reason."""
    found: dict[K, UpdateRejected] = {}
    checks = _long_steps(measures, model), _long_features(measures), _large_statistics(measures, parts)
    for reasons in (*checks, _large_sums(measures)):
        for client, reason in reasons:
            found.setdefault(client, UpdateRejected(reason))
    return found


def _long_steps(measures: Mapping[K, Measures], model: Tensors) -> Iterator[tuple[K, str]]:
    own = tree.norm(t.double() for name, t in model.items() if t.is_floating_point() and "running_" not in name)
    for part, lengths in _by_name({k: m.directions for k, m in measures.items()}):
        usual = statistics.median(lengths.values())
        an_example = statistics.median(length / measures[k].examples for k, length in lengths.items())
        for k, length in lengths.items():
            bound = max(1.0, float(own), STEP * usual, STEP * an_example * measures[k].examples)
            if length > bound:
                yield k, f"'{part}' has length {length:.3g}; given the other clients, at most {bound:.3g} is plausible"


def _long_features(measures: Mapping[K, Measures]) -> Iterator[tuple[K, str]]:
    for part, lengths in _by_name({k: m.features for k, m in measures.items()}):
        bound = FEATURE * max(1.0, statistics.median(lengths.values()))
        for k, length in lengths.items():
            if length > bound:
                reason = f"'{part}' comes from a feature vector of length {length:.3g}; "
                yield k, f"{reason}given the other clients, at most {bound:.3g} is plausible"


def _large_statistics(measures: Mapping[K, Measures], parts: Parts) -> Iterator[tuple[K, str]]:
    sent = {f"{p}/{n}": t for p, part in parts.items() if isinstance(part, Statistics) for n, t in part.like.items()}
    for name, numbers in _by_name({k: m.statistics for k, m in measures.items()}):
        bound = STATISTIC * max(1.0, largest(sent[name]), statistics.median_low(numbers.values()))
        for k, number in numbers.items():
            if number > bound:
                yield k, _too_large(name, number, bound)


def _large_sums(measures: Mapping[K, Measures]) -> Iterator[tuple[K, str]]:
    for part, lengths in _by_name({k: m.sums for k, m in measures.items()}):
        bound = STATISTIC * max(1.0, statistics.median_low(lengths.values()))
        for k, length in lengths.items():
            if length > bound:
                reason = f"'{part}' has length {length:.3g} for each example that it counts; "
                yield k, f"{reason}given the other clients, at most {bound:.3g} is plausible"


def _too_large(name: str, number: float, bound: float) -> str:
    return f"tensor '{name}' comes from data with a statistic of {number:.3g}; at most {bound:.3g} is plausible"


def _by_name(numbers: Mapping[K, Mapping[str, float]]) -> Iterator[tuple[str, dict[K, float]]]:
    for name in sorted({name for of_client in numbers.values() for name in of_client}):
        yield name, {k: of_client[name] for k, of_client in numbers.items() if name in of_client}


def most(scalars: Sequence[float], num_classes: int) -> float:
    """The largest plausible loss, given a round's losses."""
    return SCALAR * max(math.log(num_classes), statistics.median_low(abs(number) for number in scalars))
