"""What several tests are made of."""

from __future__ import annotations

import torch
from torch import Tensor


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64, by their seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
