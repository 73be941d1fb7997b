"""Imbalance: how many examples each class keeps, and which ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from redgrape.determinism import numpy_stream
from redgrape.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]


def exponential(counts: Sequence[int], ir: float, head_cap: int | None = None) -> list[int]:
    """n_c = int(n_0 * IR^(-c / (C - 1))), classes in label order (Cui et al., CVPR 2019; Cao et al., NeurIPS 2019).

    n_0 is the size of class 0, or head_cap if that is smaller. A class may be empty if IR exceeds n_0.
    """
    _check(counts, ir, head_cap)
    n_0, last = _cap(counts[0], head_cap), len(counts) - 1
    sizes = [int(n_0 * ir ** (-c / last)) for c in range(last + 1)]
    for c, (size, available) in enumerate(zip(sizes, counts, strict=True)):
        if size > available:
            raise DataError(
                f"the long tail asks for {size} examples of class {c}, which has {available}; "
                f"set head_cap to {min(counts)} or raise ir above {ir:g}"
            )
    return sizes


def binary(counts: Sequence[int], ir: float, tail_classes: Sequence[int], head_cap: int | None = None) -> list[int]:
    """The tail classes keep 1/IR of their (capped) size, at least one example. The others keep all."""
    _check(counts, ir, head_cap)
    for c in tail_classes:
        if not 0 <= c < len(counts):
            raise ConfigError(f"tail class {c} is outside the classes 0 .. {len(counts) - 1}; change tail_classes")
    if not 0 < len(set(tail_classes)) < len(counts):
        raise ConfigError(f"tail_classes names {len(set(tail_classes))} of {len(counts)} classes; name some, not all")
    sizes = [_cap(count, head_cap) for count in counts]
    return [min(n, max(1, int(n / ir))) if c in tail_classes else n for c, n in enumerate(sizes)]


def natural(counts: Sequence[int], head_cap: int | None = None) -> list[int]:
    """The sizes unchanged, with an optional cap on every class."""
    _check(counts, 1.0, head_cap)
    return [_cap(count, head_cap) for count in counts]


def choose(labels: Rows, sizes: Sequence[int], seed: int, purpose: str = "long tail") -> Rows:
    """Sorted rows with sizes[c] examples of class c, drawn without replacement by the key (purpose, class)."""
    chosen = []
    for c, size in enumerate(sizes):
        rows = np.flatnonzero(labels == c)
        if size > len(rows):
            raise DataError(f"{size} examples of class {c} were asked for, but there are {len(rows)}")
        chosen.append(numpy_stream(seed, purpose, c).permutation(rows)[:size])
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def _cap(count: int, head_cap: int | None) -> int:
    return count if head_cap is None else min(count, head_cap)


def _check(counts: Sequence[int], ir: float, head_cap: int | None) -> None:
    if len(counts) < 2:
        raise ConfigError(f"imbalance is meaningless with {len(counts)} class; the data needs at least 2 classes")
    if not (math.isfinite(ir) and ir >= 1):
        raise ConfigError(f"ir is {ir:g}; the imbalance ratio must be a finite number of at least 1")
    if head_cap is not None and head_cap < 1:
        raise ConfigError(f"head_cap is {head_cap}; it must be at least 1")
