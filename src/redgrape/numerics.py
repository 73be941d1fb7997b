"""Settings of the machine that decide about bits and speed."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def same_bits_everywhere() -> Iterator[None]:
    """One thread, because the number of threads changes a sum's last bits. Put back afterwards."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
def keep_freed_memory() -> None:
    """Tell glibc to keep large blocks instead of returning them to the system after every step, which costs thousands
    of page faults a step. Elsewhere nothing happens."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL("libc.so.6")
        for option, value in ((-3, 32 << 20), (-1, 1 << 30), (-2, 64 << 20)):  # mmap and trim thresholds, top pad
            libc.mallopt(option, value)
