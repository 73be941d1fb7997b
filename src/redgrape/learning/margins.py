"""Numbers from class counts, one for each class, that a training loss adds to the logits or multiplies them by.

These functions take counts n_c of examples, of a client or of all clients, and return float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEFT_OUT = -1e4  # added to a logit: its class has no share in the softmax, so nothing pulls its row


def quarter_margins(counts: Tensor) -> Tensor:
    """n_c^(-1/4), and 0 for a class without examples."""
    return torch.where(counts > 0, counts.double().clamp(min=1) ** -0.25, 0.0)


def log_counts(counts: Tensor) -> Tensor:
    """log n_c. A class without examples counts as one example."""
    return counts.double().clamp(min=1).log()


def missing_scales(counts: Tensor, alpha: float) -> Tensor:
    """alpha for a class without examples, 1 for the others."""
    return torch.where(counts > 0, 1.0, torch.tensor(alpha, dtype=torch.float64))


def proportional_scales(counts: Tensor, alpha: float) -> Tensor:
    """alpha + (1 - alpha) n_c / max_j n_j."""
    return alpha + (1 - alpha) * counts.double() / counts.max()
