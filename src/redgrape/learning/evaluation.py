"""Accuracy: overall, class-balanced, per class, and for groups of classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redgrape.data.federation import MANY, Groups
from redgrape.tree import Tensors, Tree

DENSE = 300  # with more classes, a confusion matrix is sparse


@dataclass(frozen=True)
class Scores:
    """Of each class: how many examples there are, how many are recognised, how often it is predicted, and how many
    examples have it among the five most probable. summed_loss: their cross-entropy. confusion[a, b]: examples of class
    a predicted as class b, sparse if there are many classes. None: not known."""

    tested: Tensor
    right: Tensor
    predicted: Tensor
    summed_loss: float
    top: Tensor | None = None
    confusion: Tensor | None = None

    @property
    def loss(self) -> float:
        return self.summed_loss / int(self.tested.sum())

    def _share(self, classes: Sequence[int], right: Tensor | None = None) -> float | None:
        """The share of correct predictions among examples of these classes; None if there are no examples."""
        total = int(self.tested[list(classes)].sum())
        right = self.right if right is None else right
        return int(right[list(classes)].sum()) / total if total else None

    @property
    def per_class(self) -> list[float | None]:
        pairs = zip(self.right.tolist(), self.tested.tolist(), strict=True)
        return [right / tested if tested else None for right, tested in pairs]

    def record(self, groups: Groups) -> dict[str, Any]:
        """The figures of one evaluation. Groups pool their classes' examples. `balanced` is the mean over classes,
        which differs from `accuracy` if the test set is not balanced. None: there are no examples."""
        known = [a for a in self.per_class if a is not None]
        every = range(len(self.tested))
        of_many = {name: self._share(classes) for name, classes in groups.by_shots.items()}
        return {
            "accuracy": self._share(every),
            "balanced": sum(known) / len(known) if known else None,
            "head": self._share(groups.head),
            "middle": self._share(groups.middle),
            "tail": self._share(groups.tail),
            **of_many,
            **({"top5": self._share(every, self.top)} if self.top is not None and len(every) >= MANY else {}),
            "loss": self.loss,
            "per_class": self.per_class,
        }

    def told(self) -> Tensors:
        """What a site tells of its evaluation: sums that have the same shapes at all sites."""
        known = {
            "confusion": self.confusion,
            "classes": torch.stack([self.tested, self.right, self.predicted]),
            "top": self.top,
        }
        told = {name: t for name in told_shapes(len(self.tested)) if (t := known[name]) is not None}
        return {**told, "loss": torch.tensor(self.summed_loss, dtype=torch.float64)}

    def is_possible(self) -> bool:
        """Whether predictions could give these counts."""
        top = self.tested if self.top is None else self.top
        bounds = ((self.right, self.predicted), (self.right, top), (top, self.tested))
        return all(bool((low <= high).all()) for low, high in bounds) and bool(
            self.tested.sum() == self.predicted.sum()
        )


def told_shapes(C: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the counts that a site tells. With many classes, there are three numbers of each class instead of a
    confusion matrix."""
    top: dict[str, tuple[int, ...]] = {"top": (C,)} if C >= MANY else {}
    return ({"confusion": (C, C)} if C <= DENSE else {"classes": (3, C)}) | top


def combine(parts: Sequence[Tree]) -> Scores:
    """Combine what `sums.of_batches` gives for parts of the examples, in their order, into the scores of all."""
    top = torch.stack([part["top"] for part in parts]).sum(dim=0)
    C = len(top)
    codes, counts = torch.cat([part["cells"] for part in parts]).unique(return_counts=True)
    indices = torch.stack([codes // C, codes % C])
    confusion = torch.sparse_coo_tensor(indices, counts, (C, C), check_invariants=True, is_coalesced=True)
    loss = sum(torch.cat([part["losses"] for part in parts]).tolist())
    return of_confusion(confusion if C > DENSE else confusion.to_dense(), loss, top)


def of_told(parts: Sequence[Tree]) -> Scores:
    """The scores of all examples from what sites tell of theirs."""
    total = {name: torch.stack([part[name] for part in parts]).sum(dim=0) for name in parts[0] if name != "loss"}
    loss, top = sum(float(part["loss"]) for part in parts), total.get("top")
    if "confusion" in total:
        return of_confusion(total["confusion"], loss, top)
    tested, right, predicted = total["classes"]
    return Scores(tested, right, predicted, loss, top)


def of_confusion(confusion: Tensor, summed_loss: float, top: Tensor | None = None) -> Scores:
    tested, predicted = (confusion.sum(dim=axis).to_dense() for axis in (1, 0))
    if confusion.is_sparse:
        (a, b), counts = confusion.indices(), confusion.values()
        right = torch.zeros_like(tested).index_add_(0, a[a == b], counts[a == b])
    else:
        right = confusion.diagonal()
    return Scores(tested, right, predicted, summed_loss, top, confusion)
