"""Accuracy: overall, class-balanced, per class, and for head, middle and tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from redgrape.data.examples import Examples, place
from redgrape.data.federation import Groups
from redgrape.nets.net import Net

BATCH = 256  # fixed: a prediction's last bits may depend on its batch


@dataclass(frozen=True)
class Scores:
    """confusion[a, b]: examples of class a predicted as class b; loss: their mean cross-entropy."""

    confusion: Tensor
    loss: float

    def _share(self, classes: Sequence[int]) -> float | None:
        """The share of correct predictions among examples of these classes; None if there are no examples."""
        rows = self.confusion[list(classes)]
        total = int(rows.sum())
        return int(rows[range(len(classes)), list(classes)].sum()) / total if total else None

    @property
    def per_class(self) -> list[float | None]:
        return [self._share([c]) for c in range(len(self.confusion))]

    def record(self, groups: Groups) -> dict[str, Any]:
        """The figures of one evaluation. Head, middle and tail pool their classes' examples. `balanced` is the mean
        over classes, which differs from `accuracy` if the test set is not balanced. None: there are no examples."""
        known = [a for a in self.per_class if a is not None]
        return {
            "accuracy": self._share(range(len(self.confusion))),
            "balanced": sum(known) / len(known) if known else None,
            "head": self._share(groups.head),
            "middle": self._share(groups.middle),
            "tail": self._share(groups.tail),
            "loss": self.loss,
            "per_class": self.per_class,
        }


def batch_starts(examples: Examples) -> range:
    return range(0, len(examples), BATCH)


@torch.inference_mode()
def logits(net: Net, examples: Examples, start: int, device: torch.device) -> Tensor:
    """The net's logits for the batch that starts at row `start`; the net is in evaluation mode."""
    rows = torch.arange(start, min(start + BATCH, len(examples)))
    z: Tensor = net(place(examples.inputs(rows, net.classifier.weight.dtype), device))
    return z.cpu()


def batch_scores(net: Net, examples: Examples, start: int, device: torch.device) -> tuple[Tensor, float]:
    """The confusion counts and the summed loss of one batch."""
    z = logits(net, examples, start, device)
    C = z.shape[1]
    y = examples.labels[start : start + BATCH]
    confusion = torch.bincount(y * C + z.argmax(dim=1), minlength=C * C).reshape(C, C)
    return confusion, float(F.cross_entropy(z.double(), y, reduction="sum"))


def combine(parts: Sequence[tuple[Tensor, float]]) -> Scores:
    """Combine the scores of batches, given in order, into the scores of all examples."""
    confusion = torch.stack([c for c, _ in parts]).sum(dim=0)
    return Scores(confusion, sum(loss for _, loss in parts) / int(confusion.sum()))
