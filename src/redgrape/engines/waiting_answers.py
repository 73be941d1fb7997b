"""Stores a round's answers in bounded memory until all have arrived.

Clients answer in any order, but the server reduces in order of their ids, so early answers have to wait. Up to `limit`
bytes wait in memory. The rest wait in an unnamed file, which disappears however the process ends. They are read tensor
by tensor on request.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from redgrape import tree
from redgrape.runs.durable import storage_errors
from redgrape.tree import Tree

IN_MEMORY = 512 << 20  # bytes of answers that wait in memory


class Shelf:
    """`folder`: where the file goes once it is needed (None: the system's temporary folder)."""

    def __init__(self, folder: Path | None = None, limit: int = IN_MEMORY) -> None:
        self._folder = folder if folder is not None else Path(tempfile.gettempdir())
        self._limit, self._in_memory, self._end = limit, 0, 0
        self._file: IO[bytes] | None = None

    def put(self, answer: Tree) -> Tree:
        """The same tree, in memory or in the file."""
        size = tree.num_bytes(answer)
        if self._in_memory + size <= self._limit:
            self._in_memory += size
            return answer
        with storage_errors("write a temporary file in", self._folder):
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  # close() closes it
            return _InFile(
                self._file, tree.unflatten({name: self._write(t) for name, t in tree.flatten(answer).items()})
            )

    def _write(self, t: Tensor) -> Any:
        assert self._file is not None
        array = t.detach().cpu().contiguous()
        raw = _bytes_of(array)
        place = _Place(self._end, array.shape, array.dtype)
        while len(raw):
            written = os.pwrite(self._file.fileno(), raw, self._end)
            self._end, raw = self._end + written, raw[written:]
        return place

    def clear(self) -> None:
        """Forget all answers, to make room for the next round's."""
        self._in_memory = self._end = 0
        if self._file is not None:
            self._file.truncate(0)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _Place(NamedTuple):
    offset: int
    shape: torch.Size
    dtype: torch.dtype


class _InFile(Mapping[str, Any]):
    """A tree, or a group of one. Its tensors are read from the file at each lookup."""

    def __init__(self, file: IO[bytes], node: dict[str, Any]) -> None:
        self._file, self._node = file, node

    def __getitem__(self, name: str) -> Any:
        value = self._node[name]
        return _InFile(self._file, value) if isinstance(value, dict) else self._read(value)

    def _read(self, place: _Place) -> Tensor:
        t = torch.empty(place.shape, dtype=place.dtype)
        raw = _bytes_of(t)
        offset = place.offset
        while len(raw):
            read = os.preadv(self._file.fileno(), [raw], offset)
            if not read:
                raise EOFError("an answer was read after the end of its round")
            offset, raw = offset + read, raw[read:]
        return t

    def __iter__(self) -> Iterator[str]:
        return iter(self._node)

    def __len__(self) -> int:
        return len(self._node)


def _bytes_of(t: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    array: Any = t.reshape(-1).view(torch.uint8).numpy() if t.numel() else b""
    return memoryview(array)
