"""The sums of an evaluation, batch by batch. Nothing here is as large as C x C for a single batch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from redgrape.data.examples import Examples, place
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree

DENSE = 300  # with more classes, a confusion matrix is sparse
BATCH = 256  # fixed: a prediction's last bits may depend on its batch
TOP = 5
CALIBRATION_BINS = 15
FARTHEST = 20.0  # log-odds beyond +-20 are in the outermost bins of a histogram


def batch_starts(examples: Examples) -> range:
    return range(0, len(examples), BATCH)


@torch.inference_mode()
def logits(net: Net, examples: Examples, start: int, device: torch.device) -> Tensor:
    """The net's logits for the batch that starts at row `start`; the net is in evaluation mode."""
    rows = torch.arange(start, min(start + BATCH, len(examples)))
    z: Tensor = net(place(examples.inputs(rows, net.classifier.weight.dtype), device))
    return z.cpu()


def of_batches(net: Net, examples: Examples, starts: range, device: torch.device) -> Tensors:
    """The sums (`of_logits`) over the batches that start at these rows."""
    return of_logits((logits(net, examples, s, device), examples.labels[s : s + BATCH]) for s in starts)


def of_logits(batches: Iterable[tuple[Tensor, Tensor]], offsets: Tensor | None = None) -> Tensors:
    """cells: for each example its true class times C, plus its predicted class. top: of each class, how many examples
    have it among the five most probable. losses: the summed cross-entropy of each batch. `offsets` are added to the
    logits of the classes before one is chosen."""
    # Small tensors that outlive a batch would lie between its large ones, and keep their memory from being used again.
    cells, losses, top = array("q"), array("d"), torch.zeros(0, dtype=torch.int64)
    for z, y in batches:
        C = z.shape[1]
        top = top if len(top) else torch.zeros(C, dtype=torch.int64)
        judged = z if offsets is None else z + offsets
        cells.extend((y * C + judged.argmax(dim=1)).tolist())
        top += torch.bincount(y[rank(judged, y) < TOP], minlength=C)
        losses.append(float(F.cross_entropy(z.double(), y, reduction="sum")))
    whole, summed = torch.tensor(cells, dtype=torch.int64), torch.tensor(losses, dtype=torch.float64)
    return {"cells": whole, "top": top, "losses": summed}


def joined(parts: Sequence[Tree]) -> Tensors:
    """The sums of several parts, in their order. Losses are not added yet: the order of a sum decides its last bits."""
    together = {name: torch.cat([part[name] for part in parts]) for name in ("cells", "losses")}
    return together | {"top": torch.stack([part["top"] for part in parts]).sum(dim=0)}


def rank(z: Tensor, y: Tensor) -> Tensor:
    """How many classes are before the true one; of equal logits the class with the lower number is first."""
    own = z.gather(1, y[:, None])
    rank = (z > own).sum(dim=1)
    tied = ((z == own).sum(dim=1) > 1).nonzero().flatten()  # rare: most batches need no third pass
    before = torch.arange(z.shape[1]) < y[tied, None]
    return rank.index_add_(0, tied, ((z[tied] == own[tied]) & before).sum(dim=1))


def score_bins(C: int) -> int:
    """Bins of a histogram of scores: about a million in all, at least 100 and at most 10,000 for a class."""
    return min(max(10**6 // C, 100), 10_000)


def of_scores(z: Tensor, y: Tensor) -> Tensors:
    """The sums over a batch of logits for calibration and ranking; every entry may be added over batches and sites.

    brier     sum_i sum_c (p_ic - [c = y_i])^2
    held      in each of 15 bins of max p, ((b-1)/15, b/15]: the number of examples
    certainty in each of these bins: the sum of max p
    surplus   in each of these bins: the sum of [right] - max p
    positive  [C, bins]: histogram of the log-odds of p_c over the examples of class c, in bins of equal width
    negative  the same over all other examples
    """
    z = z.double()
    C, bins, p = z.shape[1], score_bins(z.shape[1]), z.softmax(dim=1)
    highest, predicted = p.amax(dim=1), z.argmax(dim=1)
    edges = torch.linspace(0, 1, CALIBRATION_BINS + 1, dtype=torch.float64)[1:-1]
    bucket, none = torch.bucketize(highest, edges), torch.zeros(CALIBRATION_BINS, dtype=torch.float64)
    certainty = none.index_add(0, bucket, highest)
    surplus = none.index_add(0, bucket, (predicted == y).double() - highest)
    held = torch.bincount(bucket, minlength=CALIBRATION_BINS)
    bin_of = ((torch.logit(p) / FARTHEST + 1) * (bins / 2)).clamp(0, bins - 1).long() + torch.arange(C) * bins
    own = bin_of.gather(1, y[:, None]).flatten()
    positive = torch.bincount(own, minlength=C * bins).reshape(C, bins)
    every = torch.bincount(bin_of.flatten(), minlength=C * bins).reshape(C, bins)
    brier = (p.square().sum(dim=1) - 2 * p.gather(1, y[:, None])[:, 0] + 1).sum()
    in_bins = {"held": held, "certainty": certainty, "surplus": surplus}
    return {"brier": brier, **in_bins, "positive": positive, "negative": every - positive}
