"""Gaussian noise that only the holder of a key can predict.

The numbers come from SHAKE-256 by the Box-Muller formula in float64. Without the key, nobody can tell SHAKE-256's
output from chance. The numbers depend on the key, on their purpose, and on the value that they hide:

- A round repeated after a crash with the same answers gives the same bits: nothing new is disclosed.
- Repeated with other answers, it gets other noise. The same noise would expose the difference of the two.

torch's generators are not used, because their state can be computed from their output. This is no defence against
attacks on the last bits of floating-point noise (Mironov, CCS 2012).
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

_BLOCK = 1 << 18  # numbers made at once


def with_noise(value: Tensor, deviation: float, key: bytes, *purpose: object) -> Tensor:
    """The value plus Gaussian noise of this standard deviation, rounded to its dtype once."""
    exact = value.double().contiguous()
    path = "/".join(map(str, purpose)).encode()
    stream = hashlib.sha256(b"\0".join([key, path, hashlib.sha256(exact.numpy().tobytes()).digest()])).digest()
    return (exact + deviation * gaussian(stream, exact.numel()).reshape(exact.shape)).to(value.dtype)


def gaussian(stream: bytes, count: int) -> Tensor:
    """This many independent standard normal numbers, in float64."""
    blocks = [_pairs(stream, block, min(_BLOCK, count - block * _BLOCK)) for block in range(-(-count // _BLOCK))]
    return torch.from_numpy(np.concatenate([np.zeros(0), *blocks]))


def _pairs(stream: bytes, block: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    half = -(-count // 2)
    bits = hashlib.shake_256(stream + block.to_bytes(8, "big")).digest(16 * half)
    u = (np.frombuffer(bits, dtype="<u8") >> np.uint64(11)).astype(np.float64)
    radius = np.sqrt(-2 * np.log((u[:half] + 1) * 2.0**-53))  # the argument of log is in (0, 1]
    angle = 2 * math.pi * 2.0**-53 * u[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
