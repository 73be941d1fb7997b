"""Examples: inputs and labels, kept as on disk (uint8 pixels stay uint8) and converted to network inputs batch by
batch."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redgrape.data.augment import NO_AUGMENTATION, Augment
from redgrape.errors import DataError

_KEPT_CONVERTED = 1 << 23  # numbers: 32 MB of float32


WHITE = {torch.uint8: 255, torch.uint16: 65535}  # the largest pixel


@dataclass(frozen=True)
class Pixels:
    """Converts pixels to floats: (x / 255 - mean) / std, with numbers per channel or one for all. Pixels of 16 bits are
    divided by 65535."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.to(dtype, copy=True).div_(WHITE[x.dtype])
        if self != Pixels():  # (x - 0) / 1 is x
            shape = (1, -1) + (1,) * (x.dim() - 2)
            x.sub_(torch.tensor(self.mean, dtype=dtype, device=x.device).reshape(shape))
            x.div_(torch.tensor(self.std, dtype=dtype, device=x.device).reshape(shape))
        return x


@dataclass(frozen=True, eq=False)
class Examples:
    """x: [n, ...] floats, or pixels as uint8 or uint16; y: [n] class numbers. NumPy arrays are used without a copy.

    `rows` makes a view: these examples are x[rows], y[rows] of a larger array. It is never copied, so it may be mapped
    from a file larger than memory.
    """

    x: Tensor
    y: Tensor
    pixels: Pixels = field(default_factory=Pixels)
    augment: Augment = NO_AUGMENTATION
    rows: Tensor | None = None
    source: Any = None  # the NumPy array behind x; it knows the file it is mapped from, if any

    def __post_init__(self) -> None:
        if isinstance(self.x, np.ndarray):
            object.__setattr__(self, "source", self.x)
        x, y = _tensor(self.x), _tensor(self.y)
        if y.dim() != 1 or len(x) != len(y):
            raise DataError(
                f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}; y must hold one label for each row of x"
            )
        if 0 in x.shape[1:]:
            raise DataError(f"x has shape {tuple(x.shape)}; an example must hold at least one number")
        if y.is_floating_point() or y.dtype == torch.bool:
            raise DataError(f"labels are {y.dtype}; they must be whole numbers 0 .. classes-1")
        if x.dtype not in (torch.float16, torch.float32, torch.float64, *WHITE):
            raise DataError(f"inputs are {x.dtype}; pass float16, float32 or float64, or pixels as uint8 or uint16")
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "y", y.long())

    def __repr__(self) -> str:
        kind = str(self.x.dtype).removeprefix("torch.")
        return f"Examples({len(self)} of shape {'x'.join(map(str, self.x.shape[1:])) or 'scalar'}, {kind})"

    def __len__(self) -> int:
        return len(self.y) if self.rows is None else len(self.rows)

    @property
    def labels(self) -> Tensor:
        return self.y if self.rows is None else self.y[self.rows]

    def take(self, rows: Any) -> Examples:
        """The view of these rows."""
        rows = torch.as_tensor(np.asarray(rows), dtype=torch.int64)
        rows = rows if self.rows is None else self.rows[rows]
        return Examples(self.x, self.y, self.pixels, self.augment, rows, self.source)

    def inputs(self, rows: Tensor, dtype: torch.dtype, augment: torch.Generator | None = None) -> Tensor:
        """Network inputs for these rows in freshly allocated memory, augmented if a generator is given."""
        rows = rows if self.rows is None else self.rows[rows]
        same_place = rows.device == self.x.device  # then there is a way that is three times as fast
        x = self.x.index_select(0, rows) if same_place else self.x[rows].contiguous()
        x = self.pixels(x, dtype) if x.dtype in WHITE else x.to(dtype)
        return x if augment is None else self.augment(x, augment)

    def converted(self, dtype: torch.dtype) -> Examples:
        """The same examples already converted to network inputs, if they are few enough to keep in memory."""
        numbers = len(self) * math.prod(self.x.shape[1:])
        if numbers > _KEPT_CONVERTED or (self.x.dtype == dtype and self.rows is None):
            return self
        return Examples(self.inputs(torch.arange(len(self)), dtype), self.labels, self.pixels, self.augment)

    def check(self, num_classes: int, what: str) -> None:
        """Raise DataError for a label outside the classes or an input that is not finite."""
        if len(self) == 0:
            return
        labels = self.labels
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= num_classes:
            raise DataError(f"{what}: label {low if low < 0 else high} is outside the classes 0 .. {num_classes - 1}")
        if self.x.is_floating_point():
            for start in range(0, len(self), 4096):  # in blocks: x may be larger than memory
                block = torch.arange(start, min(start + 4096, len(self)))
                finite = torch.isfinite(self.inputs(block, self.x.dtype).flatten(1)).all(dim=1)
                if not finite.all():
                    raise DataError(
                        f"{what}: example {start + int((~finite).nonzero()[0])} has a value that is NaN or infinite"
                    )


def place(x: Tensor, device: torch.device) -> Tensor:
    """Move to the device. Images get channels last, with which convolutions are fastest."""
    return (x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x).to(device)


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"an array of {array.dtype} cannot hold examples; convert inputs with astype('float32'), and number names "
            "of classes with names, y = np.unique(y, return_inverse=True)"
        )
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():  # torch warns that read-only arrays could be written to; we never write
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
