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
    order = _by_class(labels, random)
    sorted_labels = labels[order].contiguous()
    rank = torch.arange(len(order)) - torch.searchsorted(sorted_labels, sorted_labels)
    return order[rank < limit]


def equally_often(labels: Tensor, random: torch.Generator, most: int | None = None) -> Tensor:
    """As many rows as there are labels, shuffled, in which every class that has examples comes equally often (some once
    more, if it does not come out even). No example of a class comes again before all others of it have come. `most`:
    how many different examples of a class are used."""
    order, n = _by_class(labels, random), len(labels)
    _, counts = labels.unique(return_counts=True)
    turns = torch.full_like(counts, n // len(counts))
    turns[torch.randperm(len(counts), generator=random)[: n % len(counts)]] += 1
    place = torch.repeat_interleave(turns)  # of the class of each row
    turn = torch.arange(n) - (turns.cumsum(0) - turns)[place]
    used = counts if most is None else counts.clamp(max=most)
    rows = order[(counts.cumsum(0) - counts)[place] + turn % used[place]]
    return rows[torch.randperm(n, generator=random)]


def _by_class(labels: Tensor, random: torch.Generator) -> Tensor:
    """All rows in class order, shuffled within each class."""
    order = torch.randperm(len(labels), generator=random)
    return order[labels[order].argsort(stable=True)]
