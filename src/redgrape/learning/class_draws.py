"""Drawing examples class by class."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from redgrape.method import ClientSite


def balanced(
    site: ClientSite, limit: int, classes: Tensor, dtype: torch.dtype, draws: torch.Generator, views: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Inputs and labels of at most `limit` random examples per class, of these classes of a client, without
    replacement."""
    labels = site.data.labels
    rows = at_most(limit, labels, draws)
    rows = rows[torch.isin(labels[rows], classes)]
    return site.inputs(rows, dtype, views), labels[rows].to(site.device)


def at_most(limit: int, labels: Tensor, random: torch.Generator) -> Tensor:
    """Rows with at most `limit` random examples of each class, without replacement, in class order."""
    order = torch.randperm(len(labels), generator=random)
    order = order[labels[order].argsort(stable=True)]  # by class, shuffled within
    sorted_labels = labels[order].contiguous()
    rank = torch.arange(len(order)) - torch.searchsorted(sorted_labels, sorted_labels)
    return order[rank < limit]
