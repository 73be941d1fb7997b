"""Class rows of several clients as tables with a row per class: means over the clients that report a class.

A table has the class as its first axis. Tables may be large, so means are computed over a few classes at a time, in
float64, in the order of the clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from redgrape.tree import Tensors, Tree

_BLOCK = 1 << 25  # numbers of a table averaged or summed at once


def per_class(values: Tensor, table: Tensor) -> Tensor:
    """One value per class, shaped to broadcast with a table."""
    return values.reshape(-1, *[1] * (table.dim() - 1))


def empty(like: Tensors, C: int) -> Tensors:
    return {name: t.new_zeros(C, *t.shape) for name, t in like.items()}


def contributors(sent: Sequence[Tree], C: int) -> Tensor:
    """The number of clients that report each class [C]."""
    total = torch.zeros(C, dtype=torch.int64)
    for rows in sent:
        total[rows["classes"]] += 1  # a client names a class once
    return total


def mean_over_holders(sent: Sequence[Tree], old: Tensors, weights: Sequence[Tensor] | None = None) -> Tensors:
    """The mean row of each class over the clients that report it; `old` if nobody does. `weights`: for each client a
    number per class it reports (None: equal weights)."""
    C = len(next(iter(old.values())))
    each = [torch.ones(len(s["classes"]), dtype=torch.float64) for s in sent]
    if weights is not None:
        each = [w.double() for w in weights]
    total = torch.zeros(C, dtype=torch.float64)
    for rows, w in zip(sent, each, strict=True):
        total.index_add_(0, rows["classes"], w)
    held = total > 0
    means: Tensors = {}
    for name, before in old.items():
        mean = before.clone()
        for block in blocks(C, before[0].numel()):
            sums = torch.zeros(block.stop - block.start, *before.shape[1:], dtype=torch.float64)
            for rows, w in zip(sent, each, strict=True):
                places, classes = _within(rows["classes"], block)
                mine = rows[name][places].double().mul_(per_class(w[places], sums))
                sums.index_add_(0, classes - block.start, mine)
            sums /= per_class(total[block].clamp(min=1), sums)
            mean[block] = torch.where(per_class(held[block], sums), sums.to(mean.dtype), mean[block])
        means[name] = mean
    return means


def over_holders(
    sent: Sequence[Tree], old: Tensors, fewest: int, reduce: Callable[[Sequence[Mapping[str, Tensor]]], Tensors]
) -> Tensors:
    """The same with another average than the mean. A class with fewer than `fewest` reporters counts as reported by
    nobody: malicious clients could be the majority."""
    C = len(next(iter(old.values())))
    means = {name: t.clone() for name, t in old.items()}
    holders: list[list[tuple[int, int]]] = [[] for _ in range(C)]  # per class: (client, row)
    for k, rows in enumerate(sent):
        for row, c in enumerate(rows["classes"].tolist()):
            holders[c].append((k, row))
    for c, places in enumerate(holders):
        if len(places) >= fewest:
            for name, mean in reduce([_Row(sent[k], row, old) for k, row in places]).items():
                means[name][c] = mean
    return means


class _Row(Mapping[str, Tensor]):
    """One class's row from a client's rows."""

    def __init__(self, rows: Tree, row: int, names: Mapping[str, Tensor]) -> None:
        self._rows, self._row, self._names = rows, row, list(names)

    def __getitem__(self, name: str) -> Tensor:
        t: Tensor = self._rows[name][self._row]
        return t

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def lengths(rows: Tree, names: Mapping[str, Tensor]) -> Tensor:
    """The length of each row, over its tensors together, in float64."""
    squares = [_flat(rows[name].double()).square().sum(dim=1) for name in names]
    return torch.stack(squares).sum(dim=0).sqrt()


def _flat(rows: Tensor) -> Tensor:
    """Each row as a vector [m, numbers], even if it is a single number."""
    return rows.unsqueeze(-1).flatten(start_dim=1)


def clip_by_class(sent: Sequence[Tree], like: Tensors, C: int) -> Iterator[Tensors]:
    """The clients' rows, each clipped to the median length among the reporters of its class."""
    of_each = [lengths(rows, like) for rows in sent]
    of_class: list[list[float]] = [[] for _ in range(C)]
    for rows, length in zip(sent, of_each, strict=True):
        for c, number in zip(rows["classes"].tolist(), length.tolist(), strict=True):
            of_class[c].append(number)
    bound = torch.tensor([float(np.median(values)) if values else 0.0 for values in of_class], dtype=torch.float64)
    for rows, length in zip(sent, of_each, strict=True):
        most = bound[rows["classes"]]
        factor = torch.where(length > most, most / length, 1.0)
        yield {"classes": rows["classes"]} | {
            name: (rows[name] * per_class(factor, rows[name])).to(rows[name].dtype) for name in like
        }


def clipped(rows: Tree, like: Tensors, longest: float) -> Tensors:
    """A client's rows in float64, clipped to the length `longest`."""
    exact = {name: rows[name].double() for name in like}
    numbers = {name: t for name, t in rows.items() if name not in like}
    of_each = torch.stack([torch.linalg.vector_norm(_flat(t), dim=1) for t in exact.values()])
    length = torch.linalg.vector_norm(of_each, dim=0)
    factor = torch.where(length > longest, longest / length, 1.0)
    return numbers | {name: t * per_class(factor, t) for name, t in exact.items()}


def dense(rows: Tree, like: Tensors, C: int) -> Tensors:
    """A client's rows as tables of all C classes, zero for classes it does not report. Each row is multiplied by its
    weight in the mean: one, or the client's examples of the class. `clients` is one for each reported class."""
    classes, counts = rows["classes"], rows.get("counts")

    def table(values: Tensor) -> Tensor:
        return values.new_zeros(C, *values.shape[1:]).index_copy(0, classes, values)

    weights = torch.ones_like(classes) if counts is None else counts
    summand = {name: table(rows[name].double() * per_class(weights, rows[name])) for name in like}
    numbers = {"clients": torch.ones_like(classes)} | ({} if counts is None else {"counts": counts})
    return summand | {name: table(t) for name, t in numbers.items()}


def blocks(count: int, size: int) -> Iterator[slice]:
    """Slices of bounded size over `count` items of `size` numbers each, with at least one item per slice."""
    step = max(1, _BLOCK // size)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _within(classes: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """The indices of a client's classes that lie in this block, and these classes."""
    rows = ((classes >= block.start) & (classes < block.stop)).nonzero().flatten()
    return rows, classes[rows]
