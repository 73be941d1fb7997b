"""Converts named tensors to whole numbers, which can be added modulo a power of two, and back.

Whole numbers stay unchanged. A real number x becomes the whole number nearest to 2^28 x. Over n sites

    |sum| < 2^61           so each adds at most 2^61 / n in whole numbers, and reals below 2^33 / n
    error of a sum         at most n 2^-29; of a mean by weights that add up to w, n 2^-29 / w

Nothing is clipped: a number out of range is an error at the site that has it.

Where a sum must be exact, a number of float64 becomes several whole numbers (`exact`): a multiple of 2^-1074, as all
such numbers are, in pieces of 48 bits. So it may be up to 2^270, with up to 512 sites.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redgrape import tree
from redgrape.errors import Diverged
from redgrape.tree import Tensors, Tree

FRACTION = 28  # bits after the point
BITS = 62  # of a number, with its sign
SMALLEST, PIECE, PIECES = 1074, 48, 28  # of exact sums

Numbers: TypeAlias = NDArray[np.int64]
Layout: TypeAlias = list[tuple[str, str, list[int]]]  # name, "real" or "whole", shape; equal at all sites


def error_of_sum(sites: int) -> float:
    """The largest error of a sum of real numbers over this many sites."""
    return sites * 0.5**FRACTION / 2


def encode(values: Tree, sites: int) -> tuple[Layout, Numbers]:
    """The layout and the numbers. Diverged if a number is not finite, or so large that a sum over this many sites could
    leave the range."""
    layout: Layout = []
    parts = [np.zeros(0, np.int64)]
    most = 2 ** (BITS - 1) // sites
    for name, t in tree.flatten(values).items():
        is_real = t.is_floating_point()
        scaled = torch.round(t.double() * 2**FRACTION) if is_real else t.long()
        if not bool(((scaled > -most) & (scaled < most)).all()):  # also catches NaN and infinity
            limit = most / 2**FRACTION if is_real else most
            raise Diverged(f"'{name}' has a number that is not finite or not below {limit:.3g}, the range of the sum")
        layout.append((name, "real" if is_real else "whole", list(t.shape)))
        parts.append(scaled.long().flatten().numpy())
    return layout, np.concatenate(parts)


def decode(layout: Layout, total: Numbers) -> dict[str, Any]:
    """The sum as named tensors, int64 and float64."""
    flat: Tensors = {}
    ends = 0
    for name, kind, shape in layout:
        begins, ends = ends, ends + math.prod(shape)
        values = torch.from_numpy(total[begins:ends].copy()).reshape(shape)
        flat[name] = values.double() / 2**FRACTION if kind == "real" else values
    return tree.unflatten(flat)


def exact(values: Sequence[float]) -> Tensor:
    """Whole numbers [values, pieces] whose sums over the sites lose nothing."""
    pieces = []
    for value in values:
        numerator, denominator = value.as_integer_ratio()
        whole, sign = abs(numerator) * (2**SMALLEST // denominator), -1 if value < 0 else 1
        if whole >> (PIECE * PIECES):
            raise Diverged(f"{value:.3g} is beyond the range of an exact sum")
        pieces += [sign * (whole >> (PIECE * i) & (2**PIECE - 1)) for i in range(PIECES)]
    return torch.tensor(pieces, dtype=torch.int64).reshape(len(values), PIECES)


def of_exact(pieces: Tensor) -> list[Fraction]:
    """The numbers from sums of their pieces."""
    rows: list[list[int]] = pieces.tolist()
    return [Fraction(sum(n << (PIECE * i) for i, n in enumerate(row)), 2**SMALLEST) for row in rows]


def length(layout: Layout) -> int:
    return sum(math.prod(shape) for _, _, shape in layout)


def checked_layout(sent: Any) -> Layout:
    """A layout as a site sent it; ValueError if it is invalid."""
    try:
        layout = [(str(name), str(kind), [int(n) for n in shape]) for name, kind, shape in sent]
        tree.check_leaves(tree.unflatten({name: torch.zeros(0) for name, _, _ in layout}), "its layout")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"its layout cannot be read: {error}") from error
    names = {name for name, _, _ in layout}
    if len(names) < len(layout) or any(
        kind not in ("real", "whole") or min(shape, default=0) < 0 for _, kind, shape in layout
    ):
        raise ValueError("its layout is invalid")
    return layout
