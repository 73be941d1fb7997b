"""Averages that a minority of malicious clients cannot carry away, as functions of the clients' updates.

    median          of every coordinate                                          Yin et al., ICML 2018
    trimmed mean    of every coordinate, without its f largest and f smallest    Yin et al., ICML 2018
    Krum            the update with the nearest n - f - 2 others                 Blanchard et al., NeurIPS 2017
    multi-Krum      the n - f - 2 updates with the best such scores
    norm clipping   no update longer than a bound                                Sun et al., 2019

n updates, of which f may be malicious. Clients count alike in all but the last two. Updates may lie on a disk and are
read tensor by tensor, in blocks of coordinates, so that memory holds a block of all clients and never all updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from redgrape.classifier_gradients import per_class
from redgrape.tree import Tensors, Tree

Rule: TypeAlias = Literal["mean", "median", "trimmed_mean", "krum", "multi_krum", "norm_clipping"]

_BLOCK = 1 << 24  # numbers of all clients that are held at once


def fewest_updates(rule: Rule, byzantine: int, update_norm: float | None) -> int:
    """How many updates a rule needs to withstand so many malicious ones; with fewer it would promise nothing."""
    if rule in ("krum", "multi_krum"):
        return 2 * byzantine + 3
    if rule in ("median", "trimmed_mean") or (rule == "norm_clipping" and update_norm is None):
        return 2 * byzantine + 1  # the honest must be the majority
    return 1


def most_counted(rule: Rule, byzantine: int, updates: int) -> int:
    """How many of so many updates enter the average."""
    return {"krum": 1, "multi_krum": updates - byzantine - 2}.get(rule, updates)


def fewest_holders(rule: Rule, byzantine: int) -> int:
    """How many clients must hold a class for the rules that average over its holders."""
    return 2 * byzantine + 1 if rule in ("median", "trimmed_mean") else 1


def median(groups: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """The median of every coordinate: of an even number of values, the mean of the two in the middle."""
    return _by_coordinate(groups, _middle)


def trimmed_mean(groups: Sequence[Mapping[str, Tensor]], trim: int) -> Tensors:
    """The mean of every coordinate without its `trim` largest and smallest values."""

    def mean_inside(values: Tensor) -> Tensor:
        inside = values[trim : len(values) - trim].double()
        return inside.div_(len(inside)).sum(dim=0)

    return _by_coordinate(groups, mean_inside)


def _middle(values: Tensor) -> Tensor:
    n = len(values)
    low, high = values[(n - 1) // 2], values[n // 2]
    return low.double() / 2 + high.double() / 2


def _by_coordinate(groups: Sequence[Mapping[str, Tensor]], reduce: Callable[[Tensor], Tensor]) -> Tensors:
    """`reduce` of the clients' values [n, block], which come in rising order: so the order of the clients is nothing
    to it."""
    reduced: Tensors = {}
    for name, first in groups[0].items():
        result = torch.empty(first.numel(), dtype=first.dtype)
        for rows, values in _blocks(groups, name):
            result[rows] = reduce(torch.from_numpy(np.sort(values.numpy(), axis=0))).to(first.dtype)
        reduced[name] = result.reshape(first.shape)
    return reduced


def _blocks(groups: Sequence[Mapping[str, Tensor]], name: str) -> Iterator[tuple[slice, Tensor]]:
    """A tensor's coordinates block by block: where they are, and every client's values [n, block]."""
    numbers = groups[0][name].numel()
    size = max(1, _BLOCK // len(groups))
    for start in range(0, numbers, size):
        rows = slice(start, min(start + size, numbers))
        yield rows, torch.stack([group[name].reshape(-1)[rows] for group in groups])


def directions(update: Tree) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """The groups of an update along which the server steps, by their names: `delta`, and others that begin so."""
    return ((name, update[name]) for name in sorted(update) if name.startswith("delta"))


def squared_distances(updates: Sequence[Tree]) -> Tensor:
    """Between any two updates, over all their directions together: [n, n] in float64."""
    n = len(updates)
    total = torch.zeros(n, n, dtype=torch.float64)
    for group, first in directions(updates[0]):
        groups = [update[group] for update in updates]
        for name in first:
            for _, values in _blocks(groups, name):
                exact = values.double()
                for i in range(n):
                    total[i, i + 1 :] += (exact[i + 1 :] - exact[i]).square().sum(dim=1)
    return total + total.T


def krum_scores(distances: Tensor, byzantine: int) -> Tensor:
    """For every update the sum of its n - f - 2 smallest squared distances to others."""
    n = len(distances)
    others = distances + torch.diag(torch.full((n,), math.inf, dtype=distances.dtype))
    nearest: Tensor = others.sort(dim=1).values[:, : n - byzantine - 2]
    return nearest.sum(dim=1)


def krum(updates: Sequence[Tree], byzantine: int, *, several: bool) -> list[int]:
    """The places of the chosen updates, in rising order: the best, or the n - f - 2 best. Of equal ones the first."""
    best = krum_scores(squared_distances(updates), byzantine).sort(stable=True).indices.tolist()
    return sorted(best[: len(updates) - byzantine - 2 if several else 1])


def norm(update: Tree) -> float:
    """The length of an update, over all its directions together."""
    total = math.fsum(
        float(t.double().square().sum()) for _, group in directions(update) for _, t in sorted(group.items())
    )
    return math.sqrt(total)


def clip(updates: Sequence[Tree], longest: float | None) -> list[Tree]:
    """The updates with none longer than `longest`, or than the median of their lengths."""
    norms = [norm(update) for update in updates]
    bound = float(np.median(norms)) if longest is None else longest
    return [
        update if length <= bound else _Scaled(update, bound / length)
        for update, length in zip(updates, norms, strict=True)
    ]


class _Scaled(Mapping[str, Any]):
    """An update whose directions are shortened when they are read."""

    def __init__(self, update: Tree, factor: float) -> None:
        self._update, self._factor = update, factor

    def __getitem__(self, name: str) -> Any:
        value = self._update[name]
        return _ScaledGroup(value, self._factor) if name.startswith("delta") else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._update)

    def __len__(self) -> int:
        return len(self._update)


class _ScaledGroup(Mapping[str, Tensor]):
    def __init__(self, group: Mapping[str, Tensor], factor: float) -> None:
        self._group, self._factor = group, factor

    def __getitem__(self, name: str) -> Tensor:
        return self._group[name] * self._factor

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)


def over_holders(
    sent: Sequence[Mapping[str, Tensor]],
    classifier: Tensors,
    byzantine: int,
    reduce: Callable[[Sequence[Mapping[str, Tensor]]], Tensors],
) -> tuple[Tensors, Tensor]:
    """As classifier_gradients.mean_over_holders, with another average than the mean. A class that fewer than 2 f + 1
    clients hold counts as held by nobody: the malicious could be the majority there."""
    C = len(classifier["weight"])
    means = {name: torch.zeros(C, *t.shape, dtype=t.dtype) for name, t in classifier.items()}
    held = torch.zeros(C, dtype=torch.bool)
    holders: list[list[tuple[int, int]]] = [[] for _ in range(C)]  # of each class: the client and its row
    for k, gradients in enumerate(sent):
        for row, c in enumerate(gradients["classes"].tolist()):
            holders[c].append((k, row))
    for c, places in enumerate(holders):
        if len(places) >= 2 * byzantine + 1:
            held[c] = True
            for name, mean in reduce([_Row(sent[k], row, classifier) for k, row in places]).items():
                means[name][c] = mean
    return means, held


class _Row(Mapping[str, Tensor]):
    """One class's gradients among those that a client sent."""

    def __init__(self, gradients: Mapping[str, Tensor], row: int, classifier: Tensors) -> None:
        self._gradients, self._row, self._names = gradients, row, list(classifier)

    def __getitem__(self, name: str) -> Tensor:
        return self._gradients[name][self._row]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def clip_by_class(sent: Sequence[Mapping[str, Tensor]], classifier: Tensors) -> Iterator[Tensors]:
    """The clients' class gradients with none longer than the median length among the holders of its class."""
    C = len(classifier["weight"])
    lengths = []
    of_class: list[list[float]] = [[] for _ in range(C)]
    for gradients in sent:
        squares = [gradients[name].double().flatten(start_dim=1).square().sum(dim=1) for name in classifier]
        lengths.append(torch.stack(squares).sum(dim=0).sqrt())
        for c, length in zip(gradients["classes"].tolist(), lengths[-1].tolist(), strict=True):
            of_class[c].append(length)
    bound = torch.tensor([float(np.median(values)) if values else 0.0 for values in of_class], dtype=torch.float64)
    for gradients, length in zip(sent, lengths, strict=True):
        classes = gradients["classes"]
        factor = torch.where(length > bound[classes], bound[classes] / length, 1.0)
        yield {"classes": classes} | {
            name: (gradients[name] * per_class(factor, gradients[name])).to(gradients[name].dtype)
            for name in classifier
        }
