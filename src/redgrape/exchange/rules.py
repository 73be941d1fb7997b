"""Averages that a minority of malicious clients cannot control, as functions of the clients' updates.

    median          of every coordinate                                          Yin et al., ICML 2018
    trimmed mean    of every coordinate, without its f largest and f smallest    Yin et al., ICML 2018
    Krum            the update with the nearest n - f - 2 others                 Blanchard et al., NeurIPS 2017
    multi-Krum      the n - f - 2 updates with the best such scores
    norm clipping   no update longer than a bound                                Sun et al., 2019

Of n updates, f may be malicious. Clients have equal weights in all but the last two. Updates may lie on disk. They are
read tensor by tensor, in blocks of coordinates: memory holds a block of all clients, never all updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from redgrape.tree import Tensors, Tree

Rule: TypeAlias = Literal["mean", "median", "trimmed_mean", "krum", "multi_krum", "norm_clipping"]

_BLOCK = 1 << 24  # numbers held at once, over all clients


def fewest_updates(rule: Rule, byzantine: int, update_norm: float | None) -> int:
    """The number of updates a rule needs to withstand this many malicious ones; with fewer it guarantees nothing."""
    if rule in ("krum", "multi_krum"):
        return 2 * byzantine + 3
    if rule in ("median", "trimmed_mean") or (rule == "norm_clipping" and update_norm is None):
        return 2 * byzantine + 1  # honest clients must be the majority
    return 1


def most_counted(rule: Rule, byzantine: int, updates: int) -> int:
    """The number of updates, out of `updates`, that enter the average."""
    return {"krum": 1, "multi_krum": updates - byzantine - 2}.get(rule, updates)


def fewest_holders(rule: Rule, byzantine: int) -> int:
    """The number of clients that must report a class, for rules that average over its reporters."""
    return 2 * byzantine + 1 if rule in ("median", "trimmed_mean") else 1


def median(groups: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """The median of every coordinate; for an even number of values the mean of the middle two."""
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
    """`reduce` applied to the clients' sorted values [n, block]; the order of the clients does not matter."""
    reduced: Tensors = {}
    for name, first in groups[0].items():
        result = torch.empty(first.numel(), dtype=first.dtype)
        for rows, values in _blocks(groups, name):
            result[rows] = reduce(torch.from_numpy(np.sort(values.numpy(), axis=0))).to(first.dtype)
        reduced[name] = result.reshape(first.shape)
    return reduced


def _blocks(groups: Sequence[Mapping[str, Tensor]], name: str) -> Iterator[tuple[slice, Tensor]]:
    """A tensor's coordinates in blocks: the slice, and every client's values [n, block]."""
    numbers = groups[0][name].numel()
    size = max(1, _BLOCK // len(groups))
    for start in range(0, numbers, size):
        rows = slice(start, min(start + size, numbers))
        yield rows, torch.stack([group[name].reshape(-1)[rows] for group in groups])


def squared_distances(updates: Sequence[Tree], directions: Sequence[str]) -> Tensor:
    """The squared distances between updates, over all their directions together: [n, n] in float64."""
    n = len(updates)
    total = torch.zeros(n, n, dtype=torch.float64)
    for part in directions:
        groups = [update[part] for update in updates]
        for name in groups[0]:
            for _, values in _blocks(groups, name):
                exact = values.double()
                for i in range(n):
                    total[i, i + 1 :] += (exact[i + 1 :] - exact[i]).square().sum(dim=1)
    return total + total.T


def krum_scores(distances: Tensor, byzantine: int) -> Tensor:
    """For each update, the sum of its n - f - 2 smallest squared distances to others."""
    n = len(distances)
    others = distances + torch.diag(torch.full((n,), math.inf, dtype=distances.dtype))
    nearest: Tensor = others.sort(dim=1).values[:, : n - byzantine - 2]
    return nearest.sum(dim=1)


def krum(updates: Sequence[Tree], directions: Sequence[str], byzantine: int, *, several: bool) -> list[int]:
    """The indices of the chosen updates, ascending: the best, or the n - f - 2 best. The first wins a tie."""
    best = krum_scores(squared_distances(updates, directions), byzantine).sort(stable=True).indices.tolist()
    return sorted(best[: len(updates) - byzantine - 2 if several else 1])


def norm(update: Tree, directions: Sequence[str]) -> float:
    """The length of an update, over all its directions together."""
    tensors = (t for part in directions for _, t in sorted(update[part].items()) if t.is_floating_point())
    return math.sqrt(math.fsum(float(t.double().square().sum()) for t in tensors))


def clip(updates: Sequence[Tree], directions: Sequence[str], longest: float | None) -> list[Tree]:
    """The updates clipped to the length `longest`, or to their median length."""
    norms = [norm(update, directions) for update in updates]
    bound = float(np.median(norms)) if longest is None else longest
    return [
        update if length <= bound else _Scaled(update, directions, bound / length)
        for update, length in zip(updates, norms, strict=True)
    ]


class _Scaled(Mapping[str, Any]):
    """An update with directions that are scaled when they are read."""

    def __init__(self, update: Tree, directions: Sequence[str], factor: float) -> None:
        self._update, self._directions, self._factor = update, directions, factor

    def __getitem__(self, name: str) -> Any:
        value = self._update[name]
        return _ScaledGroup(value, self._factor) if name in self._directions else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._update)

    def __len__(self) -> int:
        return len(self._update)


class _ScaledGroup(Mapping[str, Tensor]):
    def __init__(self, group: Mapping[str, Tensor], factor: float) -> None:
        self._group, self._factor = group, factor

    def __getitem__(self, name: str) -> Tensor:
        t = self._group[name]
        return t * self._factor if t.is_floating_point() else t

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)
