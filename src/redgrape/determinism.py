"""Equal bits: random numbers by key, one thread, and no subnormal numbers.

Every draw comes from a stream named by (seed, purpose, path), the path usually (round, client): nothing depends on how
many numbers were drawn before, on the worker, or on a resume. The number of threads changes a sum's last bits, so there
is one.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import numpy as np
import torch


def key(seed: int, purpose: str, *path: int) -> int:
    """A 63-bit number that depends on all of its arguments."""
    text = "/".join([str(seed), purpose, *map(str, path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def torch_stream(seed: int, purpose: str, *path: int) -> torch.Generator:
    return torch.Generator().manual_seed(key(seed, purpose, *path))


def numpy_stream(seed: int, purpose: str, *path: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key(seed, purpose, *path)))


@contextmanager
def global_stream(value: int | None) -> Iterator[None]:
    """torch's global stream, which dropout and module constructors draw from, started at `value` (None: where it is)
    and put back afterwards."""
    before = torch.get_rng_state()
    try:
        if value is not None:
            torch.default_generator.manual_seed(value)
            if torch.cuda.is_available():  # dropout on an accelerator draws from its own stream
                torch.cuda.manual_seed_all(value)
        yield
    finally:
        torch.set_rng_state(before)


@contextmanager
def same_bits_everywhere() -> Iterator[None]:
    """One thread, because the number of threads changes a sum's last bits, and on a GPU kernels that give the same bits
    every time. Put back afterwards."""
    with _same_kernels() if torch.cuda.is_initialized() else nullcontext(), _no_subnormals():
        threads = torch.get_num_threads()
        if threads == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@contextmanager
def _no_subnormals() -> Iterator[None]:
    """Numbers below the smallest normal one are zero. The probabilities of a confident net underflow to such numbers,
    and a product of matrices that holds some takes ten times as long."""
    before = sys.float_info.min / 2 == 0.0  # torch cannot tell whether it is set; the half of the smallest normal can
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextmanager
def _same_kernels() -> Iterator[None]:
    """No kernel whose sums have no fixed order (torch refuses those), none chosen by a race, no rounding to TF32."""
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.benchmark, cudnn.allow_tf32
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark, cudnn.allow_tf32 = False, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        cudnn.benchmark, cudnn.allow_tf32 = before[1:]


@cache
def keep_freed_memory() -> None:
    """Tell glibc to keep large blocks instead of returning them to the system after every step, which costs thousands
    of page faults a step. Elsewhere nothing happens."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL("libc.so.6")
        for option, value in ((-3, 32 << 20), (-1, 1 << 30), (-2, 64 << 20)):  # mmap and trim thresholds, top pad
            libc.mallopt(option, value)
