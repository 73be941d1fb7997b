"""Arrays in cache files that are mapped, not loaded. A file ends in the SHA-256 of its content, and appears only when
it is complete."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHA256 = 32  # bytes


def mapped(path: Path, rows: int, dimensions: int, dtypes: tuple[type[np.generic], ...]) -> NDArray[Any]:
    """The array in this file. Raise OSError or ValueError if it is missing, damaged or another one."""
    with path.open("rb") as file:
        digest = _digest_of(file, path.stat().st_size - SHA256)
        if file.read() != digest:
            raise ValueError(f"{path} is damaged")
    array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.ndim != dimensions or len(array) != rows or array.dtype not in dtypes:
        raise ValueError(f"{path} does not hold {rows} such rows")
    return array


def write(path: Path, shape: tuple[int, ...], dtype: type[np.generic], blocks: Iterable[NDArray[Any]]) -> None:
    """Write the blocks of rows one after the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.part")
    try:
        array = np.lib.format.open_memmap(partial, mode="w+", dtype=dtype, shape=shape)
        with partial.open("r+b") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk must not kill a write into a map
                os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)
            row = 0
            for block in blocks:
                array[row : row + len(block)] = block
                row += len(block)
            array.flush()
            file.write(_digest_of(file, partial.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _digest_of(file: BinaryIO, size: int) -> bytes:
    """The digest of the next `size` bytes, read in blocks: they may exceed memory."""
    digest = hashlib.sha256()
    while size > 0 and (block := file.read(min(size, 1 << 20))):
        digest.update(block)
        size -= len(block)
    return digest.digest()
