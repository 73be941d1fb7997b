"""Arrays that several processes read without a copy, and named tensors passed from one process to another.

An array mapped from a file is mapped again from the same file. Any other array is copied once into anonymous memory.
Its only handle is a file descriptor passed to the workers, so nothing is left behind however a process ends.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections import deque
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redgrape import tree
from redgrape.data.examples import Examples
from redgrape.data.federation import Federation
from redgrape.tree import Tensors, Tree

_HAS_FD_PASSING = hasattr(reduction, "DupFd")  # not on Windows, where workers get a copy
_ALIGNED = 64  # bytes


class SharedArray:
    """Can be pickled only while a worker starts, because only then can file descriptors be passed."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._shape, self._dtype = array.shape, array.dtype.str
        size = max(1, array.nbytes)
        self._fd = _anonymous_file(size)
        with mmap.mmap(self._fd, size) as memory:
            target: NDArray[Any] = np.frombuffer(memory, dtype=array.dtype, count=array.size).reshape(array.shape)
            np.copyto(target, array)
            del target  # the map cannot be closed while an array is a view of it

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (reduction.DupFd(self._fd), self._shape, self._dtype)

    def close(self) -> None:
        os.close(self._fd)


class Mailbox:
    """Passes trees from one process, which writes, to another, which reads. Only the places of the tensors go through a
    pipe. The tensors stay until the writer clears the box, and the reader views them without a copy. A letter with no
    room below `limit` is overwritten by the next, so the reader copies it, and the writer waits for that."""

    def __init__(self, limit: int = 0, fd: int | None = None) -> None:
        self._fd = _anonymous_file(1) if fd is None else fd
        self._limit, self._end = limit, 0
        self._used: deque[int] = deque(maxlen=4)  # bytes between clearings; training and evaluation clear once each
        self._size = os.fstat(self._fd).st_size  # as the writer left it
        self.is_full = False  # at both ends: the next letter overwrites the last
        self._memory: mmap.mmap | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_mailbox, (self._limit, *([reduction.DupFd(self._fd)] if _HAS_FD_PASSING else []))

    def clear(self) -> None:
        """Start at the front again; nobody reads the earlier letters any more. Keep as much memory as was used lately.
        Keeping the most ever used would let the total over all boxes grow and grow."""
        self._used.append(self._end)
        self._end = 0
        if self._size > max(self._used):
            self._size = max(1, *self._used)
            os.ftruncate(self._fd, self._size)

    def write(self, content: Tree) -> Any:
        """A letter for `read`."""
        if not _HAS_FD_PASSING:  # the pipe carries the letters themselves
            return tree.to_bytes(content)
        flat, places, end = tree.flatten(content), [], self._end
        for name, t in flat.items():
            places.append((name, t.dtype, tuple(t.shape), end))
            end += -(-t.numel() * t.element_size() // _ALIGNED) * _ALIGNED
        if end > self._size:
            self._size = max(end, min(2 * end, self._limit))
            os.ftruncate(self._fd, self._size)
        memory = self._mapped(end)
        for t, place in zip(flat.values(), places, strict=True):
            if t.numel():
                _look(memory, place).copy_(t.detach())
        self.is_full = end > self._limit
        if not self.is_full:
            self._end = end
        return not self.is_full, places

    def read(self, letter: Any) -> dict[str, Any]:
        if not _HAS_FD_PASSING:
            return tree.from_bytes(letter)
        stays, places = letter
        self.is_full = not stays
        flat: Tensors = {}
        for place in places:
            name, dtype, shape, offset = place
            size = math.prod(shape) * dtype.itemsize
            if not size:
                flat[name] = torch.empty(shape, dtype=dtype)
            else:
                there = _look(self._mapped(offset + size), place)
                flat[name] = there if stays else torch.empty(shape, dtype=dtype).copy_(there)
        return tree.unflatten(flat)

    def _mapped(self, size: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < size:
            self._memory = mmap.mmap(self._fd, 0)
        return self._memory

    def close(self) -> None:
        self._memory = None
        os.close(self._fd)


def _look(memory: mmap.mmap, place: tuple[str, torch.dtype, tuple[int, ...], int]) -> Tensor:
    _, dtype, shape, offset = place
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)


def _open_mailbox(limit: int, handle: Any = None) -> Mailbox:
    return Mailbox(limit, None if handle is None else handle.detach())


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("redgrape", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


def _attach(handle: Any, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    fd = handle.detach()
    try:
        memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    count = int(np.prod(shape, dtype=np.int64))
    array: NDArray[Any] = np.frombuffer(memory, dtype=np.dtype(dtype), count=count).reshape(shape)
    return array


@dataclass(frozen=True)
class MappedArray:
    """A part of a file, to be mapped by the process that needs it."""

    path: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: NDArray[Any]) -> MappedArray | None:
        """The array's place in a file if it is a view of a mapped array, else None."""
        if array.size == 0:
            return None
        root: Any = array
        while isinstance(root, np.ndarray) and not (isinstance(root, np.memmap) and isinstance(root.base, mmap.mmap)):
            root = root.base
        if not isinstance(root, np.memmap) or root.filename is None or any(s < 0 for s in array.strides):
            return None
        if root.mode == "c":  # changes in memory are not in the file
            return None
        # np.memmap maps from a page boundary, and its offset is that of the root array's first byte.
        offset = root.offset + array.ctypes.data - root.ctypes.data
        return cls(str(root.filename), offset, array.shape, array.strides, array.dtype.str)

    def open(self) -> NDArray[Any]:
        dtype = np.dtype(self.dtype)
        extent = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + dtype.itemsize
        raw = np.memmap(self.path, dtype=np.uint8, mode="r", offset=self.offset, shape=(extent,))
        return np.ndarray(self.shape, dtype, buffer=raw, strides=self.strides)


@dataclass(frozen=True)
class WorkerData:
    """A federation's data in a worker, for running clients and evaluating models."""

    num_classes: int
    train: Examples
    parts: list[NDArray[np.int64]]
    test: Examples
    validation: Examples | None

    @property
    def num_clients(self) -> int:
        return len(self.parts)

    def client(self, k: int) -> Examples:
        return self.train.take(self.parts[k])

    def size(self, k: int) -> int:
        return len(self.parts[k])


class SharedFederation:
    """A federation in the form sent to a worker."""

    def __init__(self, federation: Federation) -> None:
        self._open: dict[tuple[Any, ...], SharedArray] = {}  # by place in memory: splits are views of one array
        rows = np.concatenate(federation.parts)
        self._fields: dict[str, Any] = {
            "num_classes": federation.num_classes,
            "train": self._examples(federation.train),
            "test": self._examples(federation.test),
            "validation": self._examples(federation.validation),
            "rows": self._share(rows),
            "ends": np.cumsum([len(part) for part in federation.parts]),
        }

    def _share(self, array: NDArray[Any]) -> Any:
        if mapped := MappedArray.of(array):
            return mapped
        if not _HAS_FD_PASSING:
            return array
        place = (array.ctypes.data, array.shape, array.strides, array.dtype.str)
        if place not in self._open:
            self._open[place] = SharedArray(array)
        return self._open[place]

    def _examples(self, examples: Examples | None) -> tuple[Any, ...] | None:
        if examples is None:
            return None
        rows = None if examples.rows is None else self._share(examples.rows.numpy())
        x = examples.source if examples.source is not None else examples.x.numpy()
        return self._share(x), self._share(examples.y.numpy()), examples.pixels, examples.augment, rows

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_federation, (self._fields,)

    def close(self) -> None:
        for array in self._open.values():
            array.close()
        self._open.clear()


def _open_federation(fields: dict[str, Any]) -> WorkerData:
    """In the worker: the data as views of the shared arrays."""
    f: dict[str, Any] = {name: _opened(value) for name, value in fields.items()}
    validation = None if f["validation"] is None else _look_into(f["validation"])
    parts = np.split(f["rows"], f["ends"][:-1])
    return WorkerData(f["num_classes"], _look_into(f["train"]), parts, _look_into(f["test"]), validation)


def _look_into(fields: tuple[Any, ...]) -> Examples:
    x, y, pixels, augment, rows = map(_opened, fields)
    return Examples(x, y, pixels, augment, None if rows is None else torch.tensor(rows))


def _opened(value: Any) -> Any:
    return value.open() if isinstance(value, MappedArray) else value
