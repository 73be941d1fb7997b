"""Temperature and thresholds against brute force, by hand, and as sums over sites."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import Tensor

from redgrape.learning import calibration
from redgrape.learning.calibration import OFFSETS, TEMPERATURES, Calibration


def drawn(C: int, n: int, seed: int, true_temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits, and labels drawn from their softmax at this temperature; classes are frequent to rare."""
    random = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, C, generator=random, dtype=torch.float64) - 0.5 * torch.arange(C)
    return z, torch.multinomial((z / true_temperature).softmax(dim=1), 1, generator=random)[:, 0]


def macro_f1(z: Tensor, y: Tensor, offsets: Tensor, weights: Tensor) -> float:
    predicted = (z + offsets).argmax(dim=1)
    held = np.unique(y.numpy())
    return float(
        metrics.f1_score(y, predicted, labels=held, average="macro", zero_division=0, sample_weight=weights[y])
    )


@pytest.mark.parametrize("true", [0.5, 1.0, 2.5])
def test_the_temperature_of_the_labels_is_found(true: float) -> None:
    z, y = drawn(4, 4000, 0, true)
    found = calibration.best_temperature(calibration.losses(z, y, torch.ones(4, dtype=torch.float64)))
    assert found == pytest.approx(true, rel=0.1)
    p = (z / found).softmax(dim=1)
    assert metrics.log_loss(y, p.numpy()) <= metrics.log_loss(y, (z / (found * 1.03)).softmax(dim=1).numpy())


def test_logits_that_are_thirty_times_too_large_get_a_temperature_of_thirty() -> None:
    """A head that is fitted to few examples of many features, as by `fit`, has such logits."""
    z, y = drawn(4, 4000, 0)
    found = calibration.best_temperature(calibration.losses(30 * z, y, torch.ones(4, dtype=torch.float64)))
    assert found == pytest.approx(30, rel=0.1)


def test_losses_are_those_of_scikit_learn_with_weights() -> None:
    z, y = drawn(3, 200, 1)
    weights = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    summed = calibration.losses(z, y, weights)
    for i in (90, 120, 240):
        p = (z / TEMPERATURES[i]).softmax(dim=1).clamp(min=1e-300)
        exact = metrics.log_loss(y, p.numpy(), normalize=False, sample_weight=weights[y].numpy())
        assert float(summed[i]) == pytest.approx(exact, rel=1e-6)
    assert float(TEMPERATURES[120]) == 1.0


@pytest.mark.parametrize(("C", "seed"), [(2, 0), (3, 1), (6, 2)])
def test_histograms_give_the_macro_f1_of_every_candidate(C: int, seed: int) -> None:
    z, y = drawn(C, 300, seed)
    weights = torch.rand(C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    held = torch.bincount(y, minlength=C) * weights
    offsets = OFFSETS[torch.randint(150, 250, (C,), generator=torch.Generator().manual_seed(seed))]
    for c in range(C):
        parts = [
            calibration.step_sums(a, b, c, offsets, weights) for a, b in zip(z.split(70), y.split(70), strict=True)
        ]
        found = calibration.macro_f1_of(torch.stack(parts).sum(dim=0), c, held)
        for k in range(0, len(OFFSETS), 40):
            tried = offsets.clone()
            tried[c] = OFFSETS[k]
            assert float(found[k]) == pytest.approx(macro_f1(z, y, tried, weights), abs=1e-9)


def test_one_threshold_of_two_classes_is_the_best_of_all() -> None:
    """Two classes: brute force over the threshold. p > t decides, and scikit-learn judges."""
    z, y = drawn(2, 400, 3)
    weights = torch.tensor([1.0, 0.3], dtype=torch.float64)
    chosen = calibration.fit(lambda: [(z, y)], weights)
    p = chosen.scaled(z).softmax(dim=1)
    decided = (chosen.scaled(z) + chosen.offsets).argmax(dim=1)
    assert torch.equal(decided == 1, p[:, 1] > chosen.thresholds[1])
    assert sum(chosen.thresholds) == pytest.approx(1)

    def f1(decided: Tensor) -> float:
        return float(metrics.f1_score(y, decided, average="macro", sample_weight=weights[y]))

    best = max(f1((p[:, 1] > 1 / (1 + math.exp(float(o)))).long()) for o in OFFSETS)
    assert f1(decided) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_thresholds_never_lower_the_macro_f1_of_their_examples(seed: int) -> None:
    z, y = drawn(5, 150, seed)
    weights = torch.ones(5, dtype=torch.float64)
    chosen = calibration.fit(lambda: [(z, y)], weights)
    before, after = (macro_f1(chosen.scaled(z), y, o, weights) for o in (torch.zeros(5), chosen.offsets))
    assert after >= before - 1e-12 and (seed or after > before + 0.01)


def test_sites_with_one_class_add_up_to_the_same() -> None:
    z, y = drawn(4, 300, 4)
    weights = torch.ones(4, dtype=torch.float64)
    by_class = [(z[y == c], y[y == c]) for c in range(4)]
    one, other = (calibration.fit(lambda batches=batches: batches, weights) for batches in ([(z, y)], by_class))
    assert one == other


def test_thresholds_are_a_gain_only_where_there_is_something_to_gain() -> None:
    """Scores that favour the first class by far too much, and scores that are right already."""
    weights = torch.ones(3, dtype=torch.float64)
    z, y = drawn(3, 400, 8)
    assert calibration.gains(lambda: [(z + torch.tensor([4.0, 0.0, 0.0]), y)], weights)[1]
    random = torch.Generator().manual_seed(0)
    few = torch.randn(12, 3, generator=random, dtype=torch.float64), torch.arange(12) // 2 % 3
    sure = 9 * torch.eye(3, dtype=torch.float64)[few[1]] + few[0]
    assert not calibration.gains(lambda: [(sure, few[1])], weights)[1]


def test_a_temperature_is_a_gain_only_where_there_is_something_to_gain() -> None:
    """Logits that are five times too large, and halves that want the contrary: all of the first are right, and all of
    the second are wrong."""
    weights = torch.ones(2, dtype=torch.float64)
    z, y = drawn(2, 400, 9)
    assert calibration.gains(lambda: [(5 * z, y)], weights)[0]
    y = torch.arange(18) // 2 % 2
    z = torch.eye(2, dtype=torch.float64)[torch.where(torch.arange(18) % 2 == 0, y, 1 - y)]
    assert not calibration.gains(lambda: [(z, y)], weights)[0]
    assert calibration.fit(lambda: [(z, y)], weights).temperature > 9  # on all of them: as many are right as wrong
    chosen = calibration.fit_what_gains(lambda: [(z, y)], weights)
    assert chosen == Calibration(temperature=1.0, thresholds=(0.5, 0.5))


def test_thresholds_that_gain_are_those_for_the_temperature_that_is_kept() -> None:
    """The second class is rare and its logits are too small by 3, at a temperature that fits already."""
    weights = torch.ones(2, dtype=torch.float64)
    z, y = drawn(2, 300, 12)
    z = z - torch.tensor([0.0, 3.0])
    fixed = calibration.fit(lambda: [(z, y)], weights, 1.0)
    assert fixed.temperature == 1 and fixed.thresholds[1] < 0.5
    best = max(macro_f1(z, y, torch.tensor([0.0, float(o)]), weights) for o in OFFSETS)
    assert macro_f1(z, y, fixed.offsets, weights) == pytest.approx(best, abs=1e-9)


def test_a_class_without_examples_keeps_its_place() -> None:
    z, y = drawn(3, 200, 5)
    here = y != 2
    chosen = calibration.fit(lambda: [(z[here], y[here])], calibration.weights_for([5, 5, 0], [5, 5, 2]))
    assert all(math.isfinite(t) and t > 0 for t in (chosen.temperature, *chosen.thresholds))


def test_weights_by_hand() -> None:
    """Validation has 10 of each, training 90 and 10: an example of the first counts nine times as much."""
    assert calibration.weights_for([10, 10], [90, 10]).tolist() == pytest.approx([0.09, 0.01])
    assert calibration.weights_for([10, 0], [90, 10]).tolist() == pytest.approx([0.09, 0.0])


def test_many_classes_get_a_temperature_alone() -> None:
    z, y = drawn(301, 100, 6)
    chosen = calibration.fit(lambda: [(z, y)], torch.ones(301, dtype=torch.float64))
    assert len(set(chosen.thresholds)) == 1


def test_equal_thresholds_decide_as_before() -> None:
    z, _ = drawn(4, 50, 7)
    plain = Calibration(temperature=2.0, thresholds=(0.25,) * 4)
    assert torch.equal((plain.scaled(z) + plain.offsets).argmax(dim=1), z.argmax(dim=1))
