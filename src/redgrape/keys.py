"""Randomness by key. Every draw comes from a stream named by (seed, purpose, path), where the path is usually
(round, client): nothing depends on how many numbers were drawn before, on the worker, or on a resume."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

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
