"""Class-balanced draws within a client."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

import redgrape as rg
from redgrape import methods, nets, tree
from redgrape.learning.class_draws import equally_often
from redgrape.method import ClientSite
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.over_sampling import OverSampling
from redgrape.methods.under_sampling import UnderSampling
from toys import VECTOR, examples, federation


def build() -> rg.Net:
    return nets.build("linear", VECTOR, 3, 0)


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def labels(counts: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def site(counts: list[int]) -> ClientSite:
    return ClientSite(build, 1, len(counts), 0, 1, 1, torch.device("cpu"), 0, examples(counts))


@hypothesis.settings(max_examples=50)
@hypothesis.given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.integers(0, 99))
def test_classes_take_turns_and_so_do_the_examples_of_a_class(counts: list[int], seed: int) -> None:
    y = labels(counts)
    rows = equally_often(y, stream(seed))
    held = [c for c, n in enumerate(counts) if n]
    of_class = torch.bincount(y[rows], minlength=len(counts))
    assert len(rows) == len(y)
    assert {int(of_class[c]) for c in held} <= {len(y) // len(held), -(-len(y) // len(held))}
    of_row = torch.bincount(rows, minlength=len(y))
    for c in held:
        assert int(of_row[y == c].max() - of_row[y == c].min()) <= 1


def test_a_pass_worked_out_by_hand() -> None:
    """Twelve rows of three classes are four of each: 4 of the 9 first, and each of the others 2 and 4 times."""
    y = labels([9, 2, 1])
    used = Counter(equally_often(y, stream()).tolist())
    assert sorted(used[row] for row in range(9)) == [0] * 5 + [1] * 4
    assert [used[9], used[10], used[11]] == [2, 2, 4]


def test_the_class_that_comes_once_more_is_drawn() -> None:
    """Seven rows of three classes: two of each, and one of any class more."""
    y = labels([5, 1, 1])
    once_more = [int(torch.bincount(y[equally_often(y, stream(seed))]).argmax()) for seed in range(30)]
    assert set(once_more) == {0, 1, 2}


def test_no_more_different_examples_than_allowed() -> None:
    y = labels([9, 4, 2])
    used = Counter(equally_often(y, stream(), most=2).tolist())
    assert [len({row for row in used if y[row] == c}) for c in range(3)] == [2, 2, 2]
    assert sum(used.values()) == 15


@pytest.mark.parametrize(("least", "different"), [(1, [2, 2, 2]), (3, [3, 3, 2]), (50, [5, 4, 2])])
def test_under_sampling_cuts_to_the_rarest_but_not_below_its_floor(least: int, different: list[int]) -> None:
    """Of fifteen rows each of the three classes has five."""
    rows = UnderSampling(least=least).order(site([9, 4, 2]), stream()).unique()
    assert torch.bincount(labels([9, 4, 2])[rows]).tolist() == different


def test_rows_come_in_no_order_of_their_classes() -> None:
    first = labels([50, 50])[equally_often(labels([50, 50]), stream())][:50]
    assert 10 < int(first.sum()) < 40


@pytest.mark.parametrize("name", ["over_sampling", "under_sampling"])
def test_with_equal_counts_every_pass_has_each_example_once(name: str) -> None:
    method = methods.load(name)(least=9) if name == "under_sampling" else methods.load(name)()
    assert sorted(method.order(site([4, 4, 0]), stream()).tolist()) == list(range(8))


@pytest.mark.parametrize("kind", [OverSampling, UnderSampling])
def test_the_number_of_steps_and_of_examples_stays(kind: type[FedAvg]) -> None:
    method, place = kind(epochs=3, batch_size=4), site([9, 1, 1])
    batches = list(method.batches(place, build()))
    assert len(batches) == method.steps(11) and sum(len(y) for _, y in batches) == 33
    update, _ = method.client_update({"model": build().state_dict()}, {}, place)
    assert int(update["count"]) == 11


def test_full_batches_weigh_every_class_alike() -> None:
    """One step on a whole pass follows the gradient of the mean over classes of their mean loss. The pass has two rows
    of each class."""
    data = replace(site([2, 1, 3]), build=lambda: build().double())
    method = OverSampling(epochs=1, batch_size=6, momentum=0.0, lr=1.0)
    net = build().double()
    rows = method.order(data, data.generator("batches"))
    x, y = data.data.inputs(rows, torch.float64), data.data.labels[rows]
    assert torch.bincount(y).tolist() == [2, 2, 2]
    loss = sum(torch.nn.functional.cross_entropy(net(x[y == c]), y[y == c]) for c in range(3)) / 3
    loss.backward()  # type: ignore[union-attr]
    wanted = {name: -p.grad for name, p in net.named_parameters() if p.grad is not None}
    update, _ = method.client_update({"model": net.state_dict()}, {}, data)
    for name, delta in wanted.items():
        torch.testing.assert_close(update["delta"][name], delta)


@pytest.mark.parametrize("name", ["over_sampling", "under_sampling"])
def test_stacked_clients_draw_as_each_of_them_does(name: str) -> None:
    data = federation([5, 2, 1], [1, 6, 1], [4, 0, 4])

    def final(stack: int) -> Any:
        method = methods.load(name)(epochs=2, batch_size=3)
        with rg.Training(method, data, build, rounds=2, stack=stack) as training:
            *_, last = training.steps()
        return tree.flatten(last.state.server)

    stacked = final(3)
    for tensor, t in final(1).items():
        torch.testing.assert_close(stacked[tensor], t, rtol=1e-5, atol=1e-6)
