"""Turns a party's own examples into what clients train on: the features of a pretrained encoder, or scaled columns.

The columns of a table are scaled by sums over all sites, which are exact: single sites and secure sums give the same
bits. No test row is in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from redgrape.data.columns import LARGEST, Column, Columns
from redgrape.data.examples import Examples
from redgrape.exchange import fixed_point
from redgrape.exchange.checks import MOST_EXAMPLES, UpdateRejected
from redgrape.runs.embedded import embedder, for_encoder
from redgrape.runs.experiment import NetOptions
from redgrape.tree import Tensors, Tree


def change(
    net: NetOptions, shape: tuple[int, ...], columns: Columns | None, cache: Path
) -> Callable[[Examples], Examples]:
    """What makes inputs of the examples that `site_data` gives. Embeddings stay in the cache."""
    if columns is not None:
        return partial(_scaled, columns)
    if not net.is_pretrained:
        return lambda examples: examples
    embed = embedder(net, shape, cache) if net.is_frozen else lambda examples: examples
    return lambda examples: embed(for_encoder(net.name, examples))


def _scaled(columns: Columns, examples: Examples) -> Examples:
    """The bits of `Columns.inputs`."""
    x = examples.x.numpy().copy()
    for column, at in _numbers(columns):
        x[:, at] = np.where(x[:, at + 1] == 1, 0.0, (x[:, at] - column.mean) / column.std)
    inputs: Any = x.astype(np.float32)
    return Examples(inputs, examples.y, rows=examples.rows)


def _numbers(columns: Columns) -> list[tuple[Column, int]]:
    return [(column, at) for column, at in columns.places() if column.categories is None]


def sums(columns: Columns, examples: Examples) -> Tensors:
    """What a site sends of its training rows: for each column of numbers how many are known, their sum, and that of
    their squares."""
    rows = torch.arange(len(examples))
    x = examples.inputs(rows, torch.float64).numpy()
    known = [x[x[:, at + 1] == 0, at] for _, at in _numbers(columns)]
    return {
        "known": torch.tensor([len(values) for values in known], dtype=torch.int64),
        "totals": fixed_point.exact([math.fsum(values) for values in known]),
        "squares": fixed_point.exact([math.fsum(values * values) for values in known]),
    }


def checked(sent: Tree, columns: Columns) -> Tensors:
    """The sums of a site, or of all; UpdateRejected if they cannot be sums of numbers."""
    number = len(_numbers(columns))
    shapes = {"known": (number,), "totals": (number, fixed_point.PIECES), "squares": (number, fixed_point.PIECES)}
    for name, shape in shapes.items():
        t = sent.get(name)
        if not (isinstance(t, torch.Tensor) and t.shape == shape and t.dtype == torch.int64):
            raise UpdateRejected(f"'{name}' must be {' by '.join(map(str, shape))} whole numbers")
    made = {name: sent[name] for name in shapes}
    totals, squares = (fixed_point.of_exact(made[name]) for name in ("totals", "squares"))
    for n, total, square in zip(made["known"].tolist(), totals, squares, strict=True):
        if not 0 <= n <= MOST_EXAMPLES or abs(total) > 2 * n * LARGEST or not 0 <= square <= 2 * n * LARGEST**2:
            raise UpdateRejected("its sums over the columns of its table are impossible")
    return made


def fitted(columns: Columns, summed: Tensors) -> Columns:
    """The columns, scaled by the sums over all sites. One without a known value stays as it is."""
    totals, squares = (fixed_point.of_exact(summed[name]) for name in ("totals", "squares"))
    found = zip(summed["known"].tolist(), totals, squares, strict=True)
    scaled = {
        column.name: column.scaled(known, total, square)
        for (column, _), (known, total, square) in zip(_numbers(columns), found, strict=True)
        if known
    }
    return columns.model_copy(update={"columns": [scaled.get(column.name, column) for column in columns.columns]})
