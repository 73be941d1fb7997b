"""The figures of an evaluation, from sums over examples: overall, per class, and for groups of classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from redgrape.data.federation import MANY, Groups
from redgrape.learning import sums
from redgrape.tree import Tensors, Tree

if TYPE_CHECKING:
    from numpy.typing import NDArray

Z = 1.959964  # 95 % of a normal distribution lie within this many deviations
BY_SITE = ("accuracy", "balanced", "macro_f1", "head", "middle", "tail")


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

    @property
    def f1(self) -> list[float | None]:
        """2 TP / (2 TP + FP + FN) of each class; None for a class without examples."""
        counts = zip(self.right.tolist(), self.tested.tolist(), self.predicted.tolist(), strict=True)
        return [2 * right / (tested + predicted) if tested else None for right, tested, predicted in counts]

    def _macro_f1(self, classes: Sequence[int]) -> float | None:
        f1 = self.f1
        return _mean([f1[c] for c in classes])

    def record(self, groups: Groups) -> dict[str, Any]:
        """The figures of one evaluation. Groups pool their classes' examples. `balanced` and `macro_f1` are means over
        the classes with examples. None: there are no examples."""
        every = range(len(self.tested))
        of_many = {name: self._share(classes) for name, classes in groups.by_shots.items()}
        return {
            "accuracy": self._share(every),
            "balanced": _mean(self.per_class),
            "macro_f1": self._macro_f1(every),
            "head": self._share(groups.head),
            "middle": self._share(groups.middle),
            "tail": self._share(groups.tail),
            **of_many,
            **({"top5": self._share(every, self.top)} if self.top is not None and len(every) >= MANY else {}),
            "loss": self.loss,
            "per_class": self.per_class,
        }

    def confusion_cells(self) -> Any:
        """The confusion matrix in JSON types: its rows, or if there are many classes its cells that are not 0."""
        matrix = self.confusion
        if matrix is None or not matrix.is_sparse:
            return None if matrix is None else matrix.tolist()
        true, predicted = matrix.indices().tolist()
        return {"classes": len(matrix), "true": true, "predicted": predicted, "examples": matrix.values().tolist()}

    def group(self, classes: Sequence[int]) -> dict[str, Any]:
        """The figures of some classes together."""
        return {
            "classes": len(classes),
            "examples": int(self.tested[list(classes)].sum()),
            "accuracy": self._share(classes),
            "macro_f1": self._macro_f1(classes),
        }

    def shared(self) -> Tensors:
        """What a site sends of its evaluation: sums that have the same shapes at all sites."""
        known = {
            "confusion": self.confusion,
            "classes": torch.stack([self.tested, self.right, self.predicted]),
            "top": self.top,
        }
        shared = {name: t for name in shared_shapes(len(self.tested)) if (t := known[name]) is not None}
        return {**shared, "loss": torch.tensor(self.summed_loss, dtype=torch.float64)}

    def is_possible(self) -> bool:
        """Whether predictions could give these counts."""
        top = self.tested if self.top is None else self.top
        bounds = ((self.right, self.predicted), (self.right, top), (top, self.tested))
        return all(bool((low <= high).all()) for low, high in bounds) and bool(
            self.tested.sum() == self.predicted.sum()
        )


def shared_shapes(C: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the counts that a site sends. With many classes, there are three numbers of each class instead of a
    confusion matrix."""
    top: dict[str, tuple[int, ...]] = {"top": (C,)} if C >= MANY else {}
    return ({"confusion": (C, C)} if C <= sums.DENSE else {"classes": (3, C)}) | top


def combine(parts: Sequence[Tree]) -> Scores:
    """Combine what `sums.of_batches` gives for parts of the examples, in their order, into the scores of all."""
    total = sums.joined(parts)
    loss = sum(total["losses"].tolist())
    return of_confusion(_confusion(total["cells"], len(total["top"])), loss, total["top"])


def _confusion(cells: Tensor, C: int) -> Tensor:
    codes, counts = cells.unique(return_counts=True)
    indices = torch.stack([codes // C, codes % C])
    confusion = torch.sparse_coo_tensor(indices, counts, (C, C), check_invariants=True, is_coalesced=True)
    return confusion if C > sums.DENSE else confusion.to_dense()


def by_site(cells: Tensor, sites: NDArray[np.str_], groups: Groups, C: int) -> list[dict[str, Any]]:
    """The figures of each site, from the cells of `sums.of_logits`. Examples without a site belong to none."""
    rows = []
    for name in np.unique(sites[sites != ""]):
        scores = of_confusion(_confusion(cells[torch.from_numpy(sites == name)], C), 0.0)
        record = scores.record(groups)
        numbers = {"examples": int(scores.tested.sum()), "classes": int((scores.tested > 0).sum())}
        rows.append({"site": str(name), **numbers, **{figure: record[figure] for figure in BY_SITE}})
    return rows


def worst_sites(rows: Sequence[dict[str, Any]], enough: int) -> dict[str, dict[str, Any]]:
    """The lowest value of each figure over the sites with `enough` examples, else over all, and the first site that has
    it."""
    judged = [row for row in rows if row["examples"] >= enough] or rows
    known = {figure: [row for row in judged if row[figure] is not None] for figure in BY_SITE}
    lowest = {figure: min(having, key=lambda row: row[figure]) for figure, having in known.items() if having}
    return {figure: {"site": row["site"], "value": row[figure]} for figure, row in lowest.items()}


def of_shared(parts: Sequence[Tree]) -> Scores:
    """The scores of all examples from what the sites send of theirs."""
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


def detailed(scores: Scores, more: Tensors, groups: Groups, class_names: Sequence[str]) -> dict[str, Any]:
    """All figures of an evaluation, from `sums.of_batches` and `sums.of_scores`. With p the probabilities of an example
    and y its label:

    nll    mean of -log p_y
    brier  mean of sum_c (p_c - [c = y])^2
    ece    sum over 15 bins of max p of the share of examples in it * |accuracy - mean max p|
    auroc  of each class against all others, and the mean over classes; ap likewise: average precision

    `reliability` has a row for each of these bins: its examples, the mean of max p, and the accuracy of the class with
    the highest p. auroc and ap come from histograms, and `within` bounds their distance from the exact values.
    precision, recall and f1 are None for a class without examples, and precision also for a class that is never
    predicted. `intervals`: 95 % intervals over the test examples.
    """
    n = int(scores.tested.sum())
    record = scores.record(groups)
    del record["per_class"], record["loss"]
    auroc, ap = areas(more["positive"], more["negative"]), average_precisions(more["positive"], more["negative"])
    counts = zip(scores.tested.tolist(), scores.right.tolist(), scores.predicted.tolist(), strict=True)
    rows = [
        {
            "class": name,
            "support": tested,
            "precision": right / predicted if tested and predicted else None,
            "recall": recall,
            "f1": f1,
            "auroc": auroc[c][0],
            "auroc_within": auroc[c][1],
            "ap": ap[c][0],
            "ap_within": ap[c][1],
        }
        for c, (name, (tested, right, predicted), recall, f1) in enumerate(
            zip(class_names, counts, scores.per_class, scores.f1, strict=True)
        )
    ]
    every = range(len(rows))
    return {
        "examples": n,
        **record,
        "top5": None if scores.top is None else scores._share(every, scores.top),
        "auroc": _mean([area for area, _ in auroc]),
        "auroc_within": _mean([within for _, within in auroc]),
        "ap": _mean([area for area, _ in ap]),
        "ap_within": _mean([within for _, within in ap]),
        "nll": scores.loss,
        "brier": float(more["brier"]) / n,
        "ece": float(more["surplus"].abs().sum()) / n,
        "reliability": _reliability(more),
        "groups": {name: scores.group(classes) for name, classes in groups.named().items()},
        "intervals": intervals(scores, groups),
        "per_class": rows,
    }


def _reliability(more: Tensors) -> list[dict[str, Any]]:
    bins = zip(*(more[name].tolist() for name in ("held", "certainty", "surplus")), strict=True)
    return [
        {"examples": n, "certainty": p / n if n else None, "accuracy": (p + surplus) / n if n else None}
        for n, p, surplus in bins
    ]


def areas(positive: Tensor, negative: Tensor) -> list[tuple[float | None, float | None]]:
    """One-vs-rest AUROC of each class from histograms [C, bins] of its score, and how far it may be from the exact
    value. Pairs in one bin count 1/2; the exact value counts each of them 0, 1/2 or 1."""
    p, n = positive.double(), negative.double()
    pairs = p.sum(dim=1) * n.sum(dim=1)
    below, tied = n.cumsum(dim=1) - n, (p * n).sum(dim=1) / 2
    area, within = ((p * below).sum(dim=1) + tied) / pairs, tied / pairs
    return _known(area, within, pairs > 0)


def average_precisions(positive: Tensor, negative: Tensor) -> list[tuple[float | None, float | None]]:
    """sum_b (R_b - R_{b-1}) P_b of each class over the bins from the highest score, and how far it may be from the
    value without bins: within a bin, all p positives may be before the n negatives, or after. With a positives and m
    examples above the bin, sum_{j=1..p} (a + j) / (m + j) = p - (m - a) (H_{m+p} - H_m), H the harmonic numbers."""
    p, n = positive.flip(1).double(), negative.flip(1).double()
    total = p.sum(dim=1)
    a, m = p.cumsum(dim=1) - p, (p + n).cumsum(dim=1) - p - n

    def ordered(before: Tensor) -> Tensor:
        return p - (before - a) * (torch.digamma(before + p + 1) - torch.digamma(before + 1))

    value = (p * (a + p) / (m + p + n).clamp(min=1)).sum(dim=1) / total
    high, low = ordered(m).sum(dim=1) / total, ordered(m + n).sum(dim=1) / total
    within = torch.maximum(high - value, value - low).clamp(min=0)
    known = (total > 0) & (n.sum(dim=1) > 0)
    return _known(value, within, known)


def _known(values: Tensor, within: Tensor, known: Tensor) -> list[tuple[float | None, float | None]]:
    triples = zip(values.tolist(), within.tolist(), known.tolist(), strict=True)
    return [(value, bound) if is_known else (None, None) for value, bound, is_known in triples]


def intervals(scores: Scores, groups: Groups) -> dict[str, list[float]]:
    """95 % intervals over the test examples. At 0 and 100 % they have a width too.

    share        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)  (Wilson's score interval)
    mean over C  m - sqrt(sum_c (v_c - low_c)^2) / C to m + sqrt(sum_c (high_c - v_c)^2) / C, from those of the classes
    macro F1     likewise, as F1 = 2 J / (1 + J) and J = TP / (TP + FP + FN) is a share. A mistake is in the F1 of two
                 classes. That doubles the variance at most, and here it is doubled
    """
    every, has = range(len(scores.tested)), scores.tested > 0
    found = {}
    for name, classes in {"accuracy": every, **groups.named()}.items():
        right, tested = scores.right[list(classes)].sum(), scores.tested[list(classes)].sum()
        if tested:
            found[name] = torch.stack(_wilson(right, tested))
    if scores.top is not None:
        found["top5"] = torch.stack(_wilson(scores.top.sum(), scores.tested.sum()))
    right, tested, predicted = (t[has].double() for t in (scores.right, scores.tested, scores.predicted))
    found["balanced"] = _around_mean(right / tested, *_wilson(right, tested))
    union = tested + predicted - right
    f1, low, high = (2 * j / (1 + j) for j in (right / union, *_wilson(right, union)))
    found["macro_f1"] = _around_mean(f1, low, high, shared=2)
    return {name: ends.clamp(0, 1).tolist() for name, ends in found.items()}


def _wilson(hits: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
    n, p = of.double(), hits.double() / of
    half = Z * (p * (1 - p) / n + Z**2 / (4 * n**2)).sqrt()
    middle, scale = p + Z**2 / (2 * n), 1 + Z**2 / n
    return (middle - half) / scale, (middle + half) / scale


def _around_mean(values: Tensor, low: Tensor, high: Tensor, shared: int = 1) -> Tensor:
    below, above = (((end - values) ** 2).sum() * shared for end in (low, high))
    return values.mean() + torch.stack([-below.sqrt(), above.sqrt()]) / len(values)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
