"""FedReLa: chances by hand, which labels change, and where it is FedAvg."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import redgrape as rg
import toys
from redgrape import methods, tree
from redgrape.methods.balanced_softmax import BalancedSoftmax
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.fedrela import FedReLa, drawn, flip_chances, labelled
from toys import net

C = 4
SKEWED = [[40, 4, 1, 0], [3, 17, 30, 0], [4, 0, 0, 0]]
EQUAL = [[3, 3, 3, 3]] * 3
LOCAL: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 4}


def states(method: rg.Method, counts: list[list[int]] = SKEWED, rounds: int = 4) -> list[Any]:
    with rg.Training(method, toys.federation(*counts), net, rounds=rounds) as training:
        return [(step.state.server["model"], dict(step.state.clients)) for step in training.steps()]


def test_chances_by_hand() -> None:
    """Class 0 has four examples, class 1 one, class 2 none: rarities 0, 3/4, 1. Of p_2 = .1, .1, .1, .5 the mean is .2
    and the deviation .3 / sqrt(3): z = -1/sqrt(3) three times, and sqrt(3). With q = 0.2, one of the five z is above
    the threshold, which is the next: that of the single example of class 1, z = 0."""
    p = torch.tensor([[0.8, 0.1, 0.1], [0.8, 0.1, 0.1], [0.8, 0.1, 0.1], [0.4, 0.1, 0.5], [0.2, 0.7, 0.1]]).double()
    chances = flip_chances(p, torch.tensor([0, 0, 0, 0, 1]), torch.tensor([4, 1, 0]), 0.2)
    assert float(chances[3, 2]) == pytest.approx(math.tanh(math.sqrt(3)), rel=1e-9)
    assert float(chances[0, 2]) == pytest.approx(math.tanh(-1 / math.sqrt(3)), rel=1e-9)
    assert float(chances[4, 2]) == 0 and not chances[:, 0].any()
    second = flip_chances(p[:, [0, 2, 1]], torch.tensor([0, 0, 0, 0, 1]), torch.tensor([4, 1, 0]), 0.2)
    assert float(second[3, 1]) == pytest.approx(0.75 * math.tanh(math.sqrt(3)), rel=1e-9)
    assert not flip_chances(p, torch.tensor([0, 0, 1, 1, 2]), torch.tensor([2, 2, 2]), 0.2).any()


def test_labels_are_drawn_by_their_chances_and_the_largest_wins() -> None:
    y, chances = torch.zeros(60_000, dtype=torch.int64), torch.zeros(60_000, 3).double()
    chances[:, 0], chances[:, 1], chances[:, 2] = -0.5, 0.2, 0.5
    shares = torch.bincount(drawn(y, chances, torch.Generator().manual_seed(1))) / len(y)
    assert shares.tolist() == pytest.approx([0.8 * 0.5, 0.2 * 0.5, 0.5], abs=0.01)


def test_examples_get_other_labels_also_in_a_view() -> None:
    data = toys.examples([3, 2]).take([4, 0, 1])
    site = rg.ClientSite(net, 1, 2, 0, 1, 1, torch.device("cpu"), 0, data)
    changed = labelled(site, torch.tensor([0, 1, 1])).data
    assert changed.labels.tolist() == [0, 1, 1] and data.labels.tolist() == [1, 0, 0]
    rows = torch.arange(3)
    assert torch.equal(changed.inputs(rows, torch.float64), data.inputs(rows, torch.float64))


def test_without_late_rounds_or_rare_classes_it_is_fedavg() -> None:
    plain = states(FedAvg(**LOCAL))[-1][0]
    assert tree.equal(states(FedReLa(share=0.0, **LOCAL))[-1][0], plain)
    late = states(FedReLa(share=0.5, lr_factor=1.0, **LOCAL))
    assert tree.equal(late[1][0], states(FedAvg(**LOCAL))[1][0]) and not tree.equal(late[-1][0], plain)
    equal = FedReLa(share=0.5, lr_factor=1.0, **LOCAL)
    assert tree.equal(states(equal, EQUAL)[-1][0], states(FedAvg(**LOCAL), EQUAL)[-1][0])


def test_late_rounds_have_a_smaller_learning_rate() -> None:
    rates = [FedReLa(lr=0.5).learning_rate(toys.server_site(3, C, round)) for round in (1, 4, 5)]
    assert rates == pytest.approx([0.5, 0.5, 0.05])


def test_labels_move_to_rarer_classes_once() -> None:
    """Drawn in the third of four rounds and kept in the fourth."""
    _, (_, second), (_, third), (_, fourth) = states(FedReLa(share=0.5, exceed=0.5, **LOCAL))
    assert not any("labels" in state for state in second.values())
    assert sorted(third) == sorted(fourth) == [0, 1, 2]
    moved = 0
    for k, held in enumerate(SKEWED):
        old, new = toys.examples(held, k).labels, third[k]["labels"]
        assert torch.equal(new, fourth[k]["labels"])
        counts = torch.tensor(held)
        assert (counts[new] <= counts[old]).all()
        moved += int((new != old).sum())
    assert moved > 3


def test_it_goes_with_a_loss() -> None:
    joined = methods.load("fedrela+balanced_softmax")
    plain = states(BalancedSoftmax(**LOCAL))[-1][0]
    assert tree.equal(states(joined(share=0.0, **LOCAL))[-1][0], plain)
    assert not tree.equal(states(joined(share=0.5, **LOCAL))[-1][0], plain)
