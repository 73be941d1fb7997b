"""The figures of an evaluation against scikit-learn, and against their definitions where it has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import Tensor

from redgrape.data.federation import Groups
from redgrape.exported.inference import evaluate_batches
from redgrape.learning import evaluation, sums

NO_GROUPS = Groups((), (), ())


def drawn(C: int, n: int, seed: int, *, coarse: bool = False) -> tuple[Tensor, Tensor]:
    """Logits that lean towards the label. `coarse`: many equal logits."""
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(0, C, (n,), generator=random)
    z = 2 * torch.randn(n, C, generator=random, dtype=torch.float64)
    z[torch.arange(n), y] += 1.5
    return (z.round() if coarse else z), y


def evaluated(z: Tensor, y: Tensor, groups: Groups = NO_GROUPS, size: int = 100) -> dict[str, Any]:
    batches = zip(z.split(size), y.split(size), strict=True)
    return evaluate_batches(batches, groups, [str(c) for c in range(z.shape[1])])


@pytest.mark.parametrize(
    ("C", "n", "seed"), [(2, 60, 0), (3, 500, 1), (10, 700, 2), (10, 30, 3), (120, 900, 4), (310, 900, 5)]
)
def test_scikit_learn_agrees(C: int, n: int, seed: int) -> None:
    z, y = drawn(C, n, seed)
    found, p = evaluated(z, y), z.softmax(dim=1).numpy()
    true, predicted, held = y.numpy(), z.argmax(dim=1).numpy(), np.unique(y.numpy())
    near = {"rel": 0, "abs": 1e-9}
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(true, predicted), **near)
    recall = metrics.recall_score(true, predicted, labels=held, average="macro", zero_division=0)
    assert found["balanced"] == pytest.approx(recall, **near)
    f1 = metrics.f1_score(true, predicted, labels=held, average="macro", zero_division=0)
    assert found["macro_f1"] == pytest.approx(f1, **near)
    assert found["nll"] == pytest.approx(metrics.log_loss(true, p, labels=range(C)), **near)
    one_hot = np.eye(C)[true]
    assert found["brier"] == pytest.approx(((p - one_hot) ** 2).sum(axis=1).mean(), **near)
    if C > 5:
        top = metrics.top_k_accuracy_score(true, p, k=5, labels=range(C))
        assert found["top5"] == pytest.approx(top, **near)
    for of_class, c in ((found["per_class"][c], c) for c in held):
        mine = (true == c, predicted == c)
        assert of_class["support"] == (true == c).sum()
        assert of_class["recall"] == pytest.approx(metrics.recall_score(*mine), **near)
        if mine[1].any():
            assert of_class["precision"] == pytest.approx(metrics.precision_score(*mine), **near)
        assert of_class["f1"] == pytest.approx(metrics.f1_score(*mine), **near)
    for of_class in (found["per_class"][c] for c in set(range(C)) - set(held.tolist())):
        assert of_class["precision"] is of_class["recall"] is of_class["f1"] is None  # however often it is predicted


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("C", "n", "seed"), [(2, 60, 0), (5, 4000, 1), (10, 30, 2), (310, 900, 3)])
def test_areas_are_within_their_bound(C: int, n: int, seed: int, coarse: bool) -> None:
    z, y = drawn(C, n, seed, coarse=coarse)
    p, one_hot = z.softmax(dim=1).numpy(), np.eye(C)[y.numpy()]
    more = sums.of_scores(z, y)
    areas = evaluation.areas(more["positive"], more["negative"])
    precisions = evaluation.average_precisions(more["positive"], more["negative"])
    for c in np.unique(y.numpy()):
        for exact, (value, within) in (
            (metrics.roc_auc_score(one_hot[:, c], p[:, c]), areas[c]),
            (metrics.average_precision_score(one_hot[:, c], p[:, c]), precisions[c]),
        ):
            assert value is not None and within is not None and abs(value - exact) <= within + 1e-12
    if n == 4000 and not coarse:
        assert (
            max(w for _, w in areas if w is not None) < 5e-4 and max(w for _, w in precisions if w is not None) < 2e-3
        )


def test_histograms_by_hand() -> None:
    """Three bins. AUROC: pairs (3 positives x 4 negatives): bin 2: 1 positive above 3 negatives and tied with 1: 3.5;
    bin 1: 2 positives above 1 and tied with 2: 2 * 2 = 4; together 7.5 of 12, of which 1 + 4 pairs are tied.
    Average precision: (1 / 3) (1 / 2) + (2 / 3) (3 / 6)."""
    positive, negative = torch.tensor([[0, 2, 1]]), torch.tensor([[1, 2, 1]])
    (area,) = evaluation.areas(positive, negative)
    assert area == pytest.approx((7.5 / 12, 2.5 / 12))
    ((value, within),) = evaluation.average_precisions(positive, negative)
    assert value == pytest.approx(1 / 6 + 1 / 3)
    best, worst = (1 + 2 / 3 + 3 / 4) / 3, (1 / 2 + 2 / 5 + 3 / 6) / 3
    assert within == pytest.approx(max(best - 0.5, 0.5 - worst))
    # Nine positives and a negative in one bin: the negative first is farther from 9 / 10 than the negative last.
    ((value, within),) = evaluation.average_precisions(torch.tensor([[9]]), torch.tensor([[1]]))
    assert value == pytest.approx(0.9)
    assert within == pytest.approx(0.9 - sum(j / (j + 1) for j in range(1, 10)) / 9)


def test_calibration_error_by_hand() -> None:
    """Three examples with p = 0.9, of which two are right, and two with 0.65 that both are: 3/5 |2/3 - 0.9| + 2/5 |1 -
    0.65| = 0.28. One bin is too sure and the other not sure enough, so with their signs they would cancel."""
    p = torch.tensor([0.9, 0.9, 0.9, 0.65, 0.65], dtype=torch.float64)
    z = torch.stack([p, 1 - p], dim=1).log()
    found = evaluated(z, torch.tensor([0, 0, 1, 0, 0]), size=2)
    assert found["ece"] == pytest.approx(0.28)
    filled = {b: row for b, row in enumerate(found["reliability"]) if row["examples"]}
    assert len(found["reliability"]) == 15 and filled.keys() == {9, 13}  # (9/15, 10/15] and (13/15, 14/15]
    for b, expected in ((9, (2, 0.65, 1.0)), (13, (3, 0.9, 2 / 3))):
        assert tuple(filled[b][name] for name in ("examples", "certainty", "accuracy")) == pytest.approx(expected)
    assert found["reliability"][0] == {"examples": 0, "certainty": None, "accuracy": None}


def test_offsets_decide_and_leave_the_probabilities() -> None:
    """Thresholds choose classes: predictions and the first five are by z + offset, the cross-entropy by z."""
    z, y = drawn(8, 300, 11)
    offsets = torch.linspace(-2, 2, 8, dtype=torch.float64)
    shifted = evaluate_batches([(z, y)], NO_GROUPS, [str(c) for c in range(8)], offsets=offsets)
    plain, moved = evaluated(z, y, size=300), evaluated(z + offsets, y, size=300)
    for name in ("accuracy", "macro_f1", "top5", "confusion"):
        assert shifted[name] == moved[name] != plain[name], name
    assert shifted["nll"] == plain["nll"] and shifted["brier"] == plain["brier"]


def test_classes_that_cannot_be_ranked_break_nothing() -> None:
    """A site with one class: no negatives of it, no positives of the others. Added to another site, all is there."""
    z, y = drawn(3, 200, 0)
    alone = y == 1
    found = evaluated(z[alone], y[alone])
    assert [row["auroc"] for row in found["per_class"]] == [None] * 3 and found["auroc"] is found["ap"] is None
    a, b = sums.of_scores(z[alone], y[alone]), sums.of_scores(z[~alone], y[~alone])
    for name, t in sums.of_scores(z, y).items():
        torch.testing.assert_close(a[name] + b[name], t)


def test_far_logits_are_counted() -> None:
    z = torch.tensor([[1000.0, -1000.0], [-1000.0, 1000.0], [0.0, 0.0]])
    found = evaluated(z, torch.tensor([0, 1, 1]))
    assert found["per_class"][0]["auroc"] == 1.0 and np.isfinite([found["brier"], found["ece"]]).all()


def test_batches_and_order_do_not_matter() -> None:
    z, y = drawn(10, 500, 7)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(1))
    one, other = evaluated(z, y), evaluated(z[order], y[order], size=7)
    for name in ("accuracy", "macro_f1", "auroc", "ap", "confusion", "per_class", "intervals"):
        assert one[name] == other[name], name
    for name in ("nll", "brier", "ece"):
        assert one[name] == pytest.approx(other[name], rel=1e-12)


def test_groups_pool_their_classes() -> None:
    z, y = drawn(4, 400, 8)
    found = evaluated(z, y, Groups((0, 1), (), (2, 3)))
    held, right = (y >= 2), z.argmax(dim=1) == y
    tail = found["groups"]["tail"]
    assert found["groups"].keys() == {"head", "tail"} and tail["examples"] == int(held.sum())
    assert tail["accuracy"] == found["tail"] == pytest.approx(float(right[held].double().mean()))
    assert tail["macro_f1"] == pytest.approx(np.mean([found["per_class"][c]["f1"] for c in (2, 3)]))


def test_intervals_are_those_of_drawing_examples() -> None:
    """Against a bootstrap that draws the examples themselves, and the normal approximation of a share. That of the
    macro F1 is wider, by sqrt(2) at most."""
    z, y = drawn(4, 300, 9)
    found = evaluated(z, y, Groups((0, 1), (), (2, 3)))
    random = np.random.default_rng(0)
    true, predicted = y.numpy(), z.argmax(dim=1).numpy()
    draws = [random.integers(0, 300, 300) for _ in range(1000)]
    recall = [metrics.recall_score(true[rows], predicted[rows], average="macro") for rows in draws]
    assert found["intervals"]["balanced"] == pytest.approx(np.quantile(recall, [0.025, 0.975]), abs=0.015)
    f1 = [metrics.f1_score(true[rows], predicted[rows], average="macro") for rows in draws]
    wide = np.ptp(found["intervals"]["macro_f1"]) / np.ptp(np.quantile(f1, [0.025, 0.975]))
    assert 1 <= wide <= 2**0.5
    share = found["accuracy"]
    half = 1.96 * (share * (1 - share) / 300) ** 0.5
    assert found["intervals"]["accuracy"] == pytest.approx([share - half, share + half], abs=0.01)
    assert found["intervals"].keys() == {"accuracy", "balanced", "macro_f1", "top5", "head", "tail"}


@pytest.mark.parametrize("right", [True, False])
def test_intervals_have_a_width_at_0_and_100_percent(right: bool) -> None:
    """30 examples and 2, all right or all wrong. Wilson: from n / (n + 1.96^2), which is 88.6 % of 30, 34.2 % of 2 and
    89.3 % of 32. Balanced: 1 - sqrt(0.1135^2 + 0.6576^2) / 2. Macro F1: 2 l / (1 + l) is 0.9398 and 0.5101, so that it
    is 1 - sqrt(2 (0.0602^2 + 0.4899^2)) / 2. With all wrong, the shares are mirrored."""
    y = torch.tensor([0] * 30 + [1] * 2)
    z = 5.0 * torch.eye(2)[y if right else 1 - y]
    found = evaluated(z, y, Groups((0,), (), (1,)))["intervals"]
    shares = {"head": 0.8865, "tail": 0.3424, "accuracy": 0.8928, "balanced": 0.6663}
    for name, low in shares.items():
        assert found[name] == pytest.approx([low, 1] if right else [0, 1 - low], abs=1e-4), name
    assert found["top5"] == pytest.approx([0.8928, 1], abs=1e-4)  # of two classes both are among the first five
    if right:
        assert found["macro_f1"] == pytest.approx([0.6510, 1], abs=1e-4)


def test_a_group_without_test_examples_has_no_interval() -> None:
    z, y = drawn(4, 60, 10)
    here = y != 3
    whole = evaluated(z[here], y[here], Groups((0, 1), (2,), (3,)))
    found = whole["intervals"]
    assert "tail" not in found and found["middle"][0] > 0
    for name in ("balanced", "macro_f1"):  # means over the classes with examples
        assert found[name][0] < whole[name] < found[name][1]
