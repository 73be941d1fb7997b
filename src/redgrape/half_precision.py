"""Numbers in 16 bits on the wire: for each class, float16 and one exponent.

float16 ends at 65,504, and has its full 11 bits only above 6e-5; many gradients of a trained classifier are smaller. So
the numbers of a class are divided by a power of two of their own, 2^e, that brings the largest between 2^14 and 2^15:

    x  ~  2^e half(x / 2^e)          |error| <= 2^-11 |x|   where |x| >= 2^-28 max |x|, and 2^-39 max |x| below

Dividing by a power of two rounds nothing. What has been rounded once does not change when it is rounded again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from redgrape.tree import Tensors

_TOP = 15  # the largest number of a class comes to lie below 2^15, half of float16's range
_MOST = 1000  # no number of float64 needs more
_LEAST = -100  # exponents below it (numbers below 1e-30) would need a factor beyond float32's range


def pack(table: Tensor) -> Tensors:
    """`half` in the shape of the table, whose first axis is the class, and `exponent`, one for each class."""
    largest = torch.linalg.vector_norm(table.flatten(1), math.inf, dim=1)
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa 2^exponent, 0.5 <= mantissa < 1
    exponent = (exponent + (mantissa.half() == 1) - _TOP).clamp(min=_LEAST)  # the mantissa may round up to one
    exponent = torch.where(torch.isfinite(largest), exponent, 0)  # what is not finite stays so, and is seen to be
    half = torch.empty(table.shape, dtype=torch.float16, device=table.device)
    for c, e in enumerate(exponent.tolist()):
        half[c] = table[c] * math.ldexp(1.0, -e)
    return {"half": half, "exponent": exponent.to(torch.int16)}


def unpack(
    table: Tensor | Mapping[str, Tensor], dtype: torch.dtype, classes: Tensor | None = None, rows: slice | None = None
) -> Tensor:
    """The table, packed or not, in this dtype: all of it, or only these classes of its first axis and these rows of its
    second."""
    if isinstance(table, Tensor):
        return _part(table, classes, rows).to(dtype)
    numbers = _part(table["half"], classes, rows).to(dtype)
    exponent: Sequence[int] = _part(table["exponent"], classes, None).tolist()
    scale = torch.tensor([math.ldexp(1.0, e) for e in exponent], dtype=dtype, device=numbers.device)
    return numbers.mul_(scale.reshape(-1, *[1] * (numbers.dim() - 1)))


def length(packed: Mapping[str, Tensor]) -> float:
    """The norm of all numbers together, infinite where a stranger's exponent lies beyond float64, also of zeros."""
    if (packed["exponent"] > _MOST).any():
        return math.inf
    rows = torch.linalg.vector_norm(packed["half"].double().flatten(1), dim=1)
    return float(torch.linalg.vector_norm(torch.ldexp(rows, packed["exponent"])))


def round_(table: Tensor) -> Tensor:
    """Each number in its place replaced by what would arrive if it were sent."""
    for c in range(len(table)):
        table[c : c + 1] = unpack(pack(table[c : c + 1]), table.dtype)
    return table


def _part(table: Tensor, classes: Tensor | None, rows: slice | None) -> Tensor:
    table = table if rows is None else table[:, rows]
    return table if classes is None else table[classes]
