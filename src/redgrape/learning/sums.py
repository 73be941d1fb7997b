"""What an evaluation adds up, batch by batch. Nothing here is as large as C x C for a single batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from redgrape.data.examples import Examples, place
from redgrape.nets.net import Net
from redgrape.tree import Tensors

BATCH = 256  # fixed: a prediction's last bits may depend on its batch
TOP = 5


def batch_starts(examples: Examples) -> range:
    return range(0, len(examples), BATCH)


@torch.inference_mode()
def logits(net: Net, examples: Examples, start: int, device: torch.device) -> Tensor:
    """The net's logits for the batch that starts at row `start`; the net is in evaluation mode."""
    rows = torch.arange(start, min(start + BATCH, len(examples)))
    z: Tensor = net(place(examples.inputs(rows, net.classifier.weight.dtype), device))
    return z.cpu()


def of_batches(net: Net, examples: Examples, starts: range, device: torch.device) -> Tensors:
    """cells: for each example its true class times C, plus its predicted class. top: of each class, how many examples
    have it among the five most probable. losses: the summed cross-entropy of each batch."""
    C = net.classifier.out_features
    cells, losses, top = [], [], torch.zeros(C, dtype=torch.int64)
    for start in starts:
        z, y = logits(net, examples, start, device), examples.labels[start : start + BATCH]
        cells.append(y * C + z.argmax(dim=1))
        top += torch.bincount(y[rank(z, y) < TOP], minlength=C)
        losses.append(F.cross_entropy(z.double(), y, reduction="sum"))
    return {"cells": torch.cat(cells), "top": top, "losses": torch.stack(losses)}


def rank(z: Tensor, y: Tensor) -> Tensor:
    """How many classes are before the true one; of equal logits the class with the lower number is first."""
    own = z.gather(1, y[:, None])
    rank = (z > own).sum(dim=1)
    tied = ((z == own).sum(dim=1) > 1).nonzero().flatten()  # rare: most batches need no third pass
    before = torch.arange(z.shape[1]) < y[tied, None]
    return rank.index_add_(0, tied, ((z[tied] == own[tied]) & before).sum(dim=1))
