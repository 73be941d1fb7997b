"""Drawing examples class by class."""

from __future__ import annotations

import torch
from torch import Tensor


def at_most(limit: int, labels: Tensor, random: torch.Generator) -> Tensor:
    """Rows with at most so many random examples of each class, without replacement, in the order of the classes."""
    order = torch.randperm(len(labels), generator=random)
    order = order[labels[order].argsort(stable=True)]  # by class, shuffled within
    sorted_labels = labels[order].contiguous()
    rank = torch.arange(len(order)) - torch.searchsorted(sorted_labels, sorted_labels)
    return order[rank < limit]
