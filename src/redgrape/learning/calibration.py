"""Calibration on held-out examples: a temperature for the probabilities, and a threshold of each class for decisions.

With z the logits of an example, T the temperature and t_c the threshold of class c (sum_c t_c = 1):

    p = softmax(z / T)          T minimises the cross-entropy
    class = argmax_c p_c / t_c  t maximises the macro F1, one class after the other

With two classes, the second is chosen if p_2 > t_2. With equal thresholds, it is the argmax of p. Both are chosen from
sums over examples, weighted by class, so that sites can add them up and send no score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional

from redgrape.learning.sums import DENSE

UP_TO_10 = torch.logspace(-1, 1, 241, dtype=torch.float64)  # from 1/10; the one in the middle is 1
TEMPERATURES = torch.cat([UP_TO_10, 10 * UP_TO_10[121:]])  # up to 100: a head fitted to few examples is overconfident
OFFSETS = torch.arange(-200, 201, dtype=torch.float64) / 20  # candidates for -log t_c, up to a constant
PASSES = 5

Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Batches: TypeAlias = Iterable[tuple[Tensor, Tensor]]  # logits and labels


class Calibration(BaseModel):
    model_config = ConfigDict(frozen=True)

    temperature: Positive
    thresholds: tuple[Positive, ...]

    @property
    def offsets(self) -> Tensor:
        """-log t_c: added to log p_c, the largest sum decides."""
        return -torch.tensor(self.thresholds, dtype=torch.float64).log()

    def scaled(self, z: Tensor) -> Tensor:
        return z.double() / self.temperature


def fit(batches: Callable[[], Batches], class_weights: Tensor, temperature: float | None = None) -> Calibration:
    """Choose temperature and thresholds, or thresholds for a given temperature. `batches` gives the same examples each
    time. With more than 300 classes, the thresholds stay equal: there is a sum for every class."""
    C = len(class_weights)
    if temperature is None:
        total = torch.stack([losses(z, y, class_weights) for z, y in batches()]).sum(dim=0)
        temperature = best_temperature(total)
    offsets = torch.zeros(C, dtype=torch.float64)
    if C <= DENSE:
        held = sum(torch.bincount(y, minlength=C) for _, y in batches()) * class_weights
        offsets = _best_offsets(lambda: ((z.double() / temperature, y) for z, y in batches()), held, class_weights)
    thresholds = (-offsets).softmax(dim=0)
    return Calibration(temperature=temperature, thresholds=tuple(thresholds.tolist()))


def fit_what_gains(batches: Callable[[], Batches], class_weights: Tensor) -> Calibration:
    """The same, but the temperature stays 1 and the thresholds stay equal if they would not gain on other examples."""
    by_temperature, by_thresholds = gains(batches, class_weights)
    chosen = fit(batches, class_weights, None if by_temperature else 1.0)
    C = len(class_weights)
    return chosen if by_thresholds else chosen.model_copy(update={"thresholds": (1 / C,) * C})


def gains(batches: Callable[[], Batches], class_weights: Tensor) -> tuple[bool, bool]:
    """Whether a temperature that is chosen on half of the examples lowers the cross-entropy of the other half, both
    ways, and whether thresholds raise its macro F1. On few examples they fit noise, and fail this test."""
    C = len(class_weights)
    loss = torch.zeros(2, dtype=torch.float64)  # without and with a temperature
    held, right, predicted = (torch.zeros(2, C, dtype=torch.float64) for _ in range(3))  # without and with thresholds

    def half(of: int) -> list[tuple[Tensor, Tensor]]:
        return [(z[of::2], y[of::2]) for z, y in batches()]

    for fold in (0, 1):
        chosen = fit(partial(half, fold), class_weights)
        for z, y in half(1 - fold):
            weights = class_weights[y]
            for i, scaled in enumerate((z.double(), chosen.scaled(z))):
                loss[i] += functional.cross_entropy(scaled, y, reduction="none") @ weights
            for i, offsets in enumerate((torch.zeros(C), chosen.offsets)):
                said = (chosen.scaled(z) + offsets).argmax(dim=1)
                held[i].index_add_(0, y, weights)
                right[i].index_add_(0, y, weights * (said == y))
                predicted[i].index_add_(0, said, weights)
    f1 = (2 * right / (held + predicted))[:, held[0] > 0].mean(dim=1)
    return bool(loss[1] < loss[0]), bool(f1[1] > f1[0])


def weights_for(counts: Sequence[int], shares: Sequence[int]) -> Tensor:
    """Weights that make classes with these counts as frequent as in `shares`. Classes without an example have none."""
    of_all = [share / sum(shares) for share in shares]
    return torch.tensor([s / n if n else 0.0 for s, n in zip(of_all, counts, strict=True)], dtype=torch.float64)


def losses(z: Tensor, y: Tensor, class_weights: Tensor) -> Tensor:
    """The summed cross-entropy of a batch at each of the temperatures."""
    z, weights = z.double(), class_weights[y]
    own = z.gather(1, y[:, None])[:, 0]
    return torch.stack([((z / t).logsumexp(dim=1) - own / t) @ weights for t in TEMPERATURES.tolist()])


def best_temperature(summed: Tensor) -> float:
    """The temperature with the lowest loss; of equal ones, that nearest to 1."""
    from_one = TEMPERATURES.log().abs()
    lowest = (summed == summed.min()).nonzero().flatten()
    return float(TEMPERATURES[lowest[from_one[lowest].argmin()]])


def step_sums(z: Tensor, y: Tensor, c: int, offsets: Tensor, class_weights: Tensor) -> Tensor:
    """The sums over a batch for choosing the offset of class c, with those of the others fixed: histograms of the
    lowest offset at which class c is chosen.

    [0, j]  of the examples for which class j is chosen below it
    [1, j]  of those among them whose label is j
    [2, j]  of those among them whose label is c
    """
    C, bins, s = z.shape[1], len(OFFSETS) + 1, z + offsets
    s[:, c] = -math.inf
    highest, other = s.max(dim=1)
    bucket = torch.bucketize(highest - z[:, c], OFFSETS, right=True)  # chosen from OFFSETS[bucket] on
    weights = class_weights[y]

    def histogram(counted: Tensor) -> Tensor:
        return torch.bincount(other * bins + bucket, weights * counted, minlength=C * bins).reshape(C, bins)

    return torch.stack([histogram(torch.ones(len(y))), histogram(other == y), histogram(y == c)])


def macro_f1_of(summed: Tensor, c: int, held: Tensor) -> Tensor:
    """The macro F1 at each candidate for the offset of class c, from sums of `step_sums` over all examples. `held`: the
    weight of each class. F1 = 2 TP / (held + predicted)."""
    taken = summed.cumsum(dim=2)[:, :, :-1]  # by class c, at each candidate
    predicted, right = (summed[i].sum(dim=1, keepdim=True) - taken[i] for i in (0, 1))
    predicted[c], right[c] = taken[0].sum(dim=0), taken[2].sum(dim=0)
    f1 = 2 * right / (held[:, None] + predicted)
    return f1[held > 0].mean(dim=0)


def _best_offsets(batches: Callable[[], Batches], held: Tensor, class_weights: Tensor) -> Tensor:
    """Offsets for the highest macro F1, class by class, until no class gains. Classes without examples keep 0."""
    C = len(held)
    chosen = torch.full((C,), len(OFFSETS) // 2)
    for _ in range(PASSES):
        before = chosen.clone()
        for c in (held > 0).nonzero().flatten().tolist():
            summed = sum(step_sums(z, y, c, OFFSETS[chosen], class_weights) for z, y in batches())
            f1 = macro_f1_of(torch.as_tensor(summed), c, held)
            best = (f1 > f1.max() - 1e-12).nonzero().flatten()
            if f1.max() > f1[chosen[c]] + 1e-9:
                chosen[c] = best[(best - chosen[c]).abs().argmin()]
        if torch.equal(before, chosen):
            break
    return OFFSETS[chosen]
