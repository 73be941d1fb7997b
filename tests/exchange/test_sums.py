"""Secure sums: a run by sums is that by updates, sums that cannot be are not applied, and numbers survive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import toys
from redgrape import nets, testing, tree
from redgrape.engines import ClientHalf
from redgrape.engines.in_process import InProcess
from redgrape.errors import Diverged, RedgrapeError, TooFewClients
from redgrape.exchange import ClassRows, Count, Exchange, Parts, checks, fixed_point
from redgrape.method import Method
from redgrape.methods.balanced_softmax import BalancedSoftmax
from redgrape.methods.creff import CReFF
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.fedopt import FedOpt
from redgrape.methods.logit_adjustment import LogitAdjustment
from redgrape.methods.redgrape import RedGrape
from redgrape.methods.scaffold import Scaffold
from redgrape.rounds import PLAIN, RunState
from redgrape.training import Training
from toys import Summing

C = 4
SIZES = [[30, 12, 3, 0], [20, 0, 9, 5], [8, 16, 1, 12]]
build = partial(nets.build, "mlp", toys.VECTOR, C, 0)


def trained(
    method: Method,
    engine: Callable[[ClientHalf], Any] = InProcess,
    rounds: int = 3,
    sizes: list[list[int]] = SIZES,
    exchange: Exchange = PLAIN,
) -> list[RunState]:
    with Training(method, toys.federation(*sizes), build, rounds=rounds, engine=engine, exchange=exchange) as training:
        return [step.state for step in training.steps()]


VARIANTS = [
    FedOpt(client_weights="count"),
    FedOpt.preset("yogi"),
    RedGrape(prototype_weights="count"),
    RedGrape(use_prototypes=False, two_stream=False),
    RedGrape.preset("released"),
    LogitAdjustment(stage="post_hoc"),
    LogitAdjustment(prior="local"),
    BalancedSoftmax(prior="local"),
    FedAvg(freeze_encoder=True),
]


@pytest.mark.parametrize("method", VARIANTS, ids=lambda m: type(m).__name__)
def test_options_take_other_ways_to_the_same_sums(method: Method) -> None:
    assert method.needs_single() == ""
    testing.CHECKS["sums_are_enough_where_it_says_so"](method)


FLOORS, CLIPS = {"min_count": 3, "min_clients": 2}, {"clip": 0.05, "class_clip": 0.02}
SUMMED: list[tuple[Method, dict[str, Any]]] = [
    (FedAvg(), {}),
    (FedAvg(), {"clip": 0.05}),
    (Scaffold(), {}),
    (RedGrape(), FLOORS),
    (RedGrape(), CLIPS),
    (RedGrape(), FLOORS | CLIPS),
    (RedGrape(prototype_weights="count"), {"preset": "private"}),
    (CReFF(**CReFF.cheap), FLOORS),
]


@pytest.mark.parametrize(
    ("method", "settings"), SUMMED, ids=lambda v: " ".join(v) if isinstance(v, dict) else type(v).__name__
)
def test_a_run_by_sums_is_that_by_updates_to_rounding(method: Method, settings: dict[str, Any]) -> None:
    exchange = Exchange(**settings)
    plain_run, summed_run = (trained(method, engine, exchange=exchange) for engine in (InProcess, Summing))
    for plain, summed in zip(plain_run, summed_run, strict=True):
        theirs = tree.flatten(summed.server)
        for name, t in tree.flatten(plain.server).items():
            torch.testing.assert_close(theirs[name], t, rtol=1e-4, atol=1e-5, msg=f"{name} after round {plain.round}")
        for key in ("answered", "class_contributors", "class_released", "prototype_age", "prototype_seen"):
            assert plain.record.get(key) == summed.record.get(key)
        assert plain.record["train_loss"] == pytest.approx(summed.record["train_loss"], rel=1e-5)


def test_a_client_adds_the_same_shapes_whatever_it_holds() -> None:
    """One class, all of them, or none that it reports."""
    engines = []

    def engine(half: ClientHalf) -> Summing:
        engines.append(Summing(half))
        return engines[-1]

    trained(RedGrape(), engine, 1, [[9, 0, 0, 0], [5, 5, 5, 5], [0, 2, 1, 2]], Exchange(min_count=3))
    layouts = engines[0].layouts
    assert len(layouts) == 3 and layouts[0] == layouts[1] == layouts[2]
    assert ("prototypes/clients", "whole", [C]) in layouts[0]
    features = build().classifier.in_features
    assert ("prototypes/weight", "real", [C, C, features]) in layouts[0]


def test_floors_hold_in_sums() -> None:
    """Of three clients two report class 0, all class 1, one class 2, and none class 3, which one has too few of."""
    sizes = [[9, 9, 0, 0], [9, 9, 0, 4], [4, 9, 9, 0]]
    [state] = trained(RedGrape(), Summing, 1, sizes, Exchange(min_count=8, min_clients=2))
    assert state.record["class_contributors"] == [2, 3, 1, 0]
    assert state.server["seen"].tolist() == [True, True, False, False]
    assert not state.server["prototypes"]["weight"][2:].any()


def _set(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    def spoil(total: dict[str, Any]) -> None:
        *groups, name = path.split("/")
        node = total
        for group in groups:
            node = node[group]
        node[name] = change(node[name])

    return spoil


LIES: dict[str, tuple[Callable[[dict[str, Any]], Any], type[RedgrapeError], str]] = {
    "no examples": (_set("count", torch.zeros_like), TooFewClients, "'count' is 0 in all; 3 clients"),
    "examples below zero": (_set("count", torch.neg), TooFewClients, "in all; 3 clients have at least one"),
    "too few examples": (_set("count", lambda t: t * 0 + 2), TooFewClients, "'count' is 2 in all; 3 clients"),
    "too many clients": (_set("prototypes/clients", lambda t: t + 3), TooFewClients, "cannot be those of 3"),
    "clients below zero": (_set("prototypes/clients", lambda t: t - 3), TooFewClients, "cannot be those of 3"),
    "beyond all measure": (_set("delta/classifier.bias", lambda t: t + 1e9), Diverged, "has length"),
    "not finite": (_set("delta/classifier.bias", lambda t: t / 0), Diverged, "is not finite"),
    "another shape": (_set("delta/classifier.bias", lambda t: t[:1]), TooFewClients, "it must be"),
    "another dtype": (_set("delta/classifier.bias", lambda t: t.float()), TooFewClients, "it must be torch.float64"),
    "turned prototypes": (_set("prototypes/bias", torch.neg), TooFewClients, "not a gradient of a cross-entropy"),
    "a tensor too few": (lambda total: total["delta"].pop("classifier.bias"), TooFewClients, "is missing"),
    "a tensor too many": (lambda total: total.update(more=torch.ones(1)), TooFewClients, "is not part of this update"),
}


def test_a_sum_counts_an_example_at_least_of_each_client_that_reports_a_class() -> None:
    """Two clients report class 0, with three examples together or with two, but not with one."""
    parts: Parts = {"count": Count(), "rows": ClassRows({"w": torch.zeros(1)}, "count")}
    like = Exchange().summand(checks.nothing(parts), parts, 1)
    for counts in (3, 2, 1):
        rows = {"w": torch.ones(1, 1).double(), "clients": torch.tensor([2]), "counts": torch.tensor([counts])}
        with pytest.raises(checks.UpdateRejected, match="cannot be those of 2") if counts < 2 else nullcontext():
            checks.check_sum({"count": torch.tensor(5), "rows": rows}, like, parts, 2)


@pytest.mark.parametrize("lie", LIES)
def test_a_sum_that_cannot_be_is_not_applied(lie: str) -> None:
    spoil, kind, words = LIES[lie]
    with pytest.raises(kind, match=f"the sum over the clients of round 1 was rejected: .*{words}.*; nothing of it was"):
        trained(RedGrape(), lambda half: Summing(half, spoil), 1)


def test_numbers_come_back_within_the_bound() -> None:
    """Whole numbers exactly, reals to n 2^-29; the figure is in docs/privacy.md."""
    stream = torch.Generator().manual_seed(0)
    for sites in (3, 10, 100):
        values = [
            {
                "x": {
                    "small": 1e-3 * torch.randn(500, generator=stream),
                    "large": 1e6 * torch.randn(9, generator=stream),
                },
                "n": torch.randint(-(10**12), 10**12, (3, 2), generator=stream),
                "one": torch.tensor(k),
            }
            for k in range(sites)
        ]
        encoded = [fixed_point.encode(value, sites) for value in values]
        total = fixed_point.decode(encoded[0][0], np.sum([numbers for _, numbers in encoded], axis=0))
        assert torch.equal(total["n"], torch.stack([v["n"] for v in values]).sum(dim=0))
        assert int(total["one"]) == sites * (sites - 1) // 2
        for name in ("small", "large"):
            exact = torch.stack([v["x"][name].double() for v in values]).sum(dim=0)
            rounding = 1e-15 * float(exact.abs().max())
            error = float((total["x"][name] - exact).abs().max())
            assert error <= fixed_point.error_of_sum(sites) + rounding
    assert fixed_point.error_of_sum(3) == 3 * 2**-29 < 5.6e-9


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tensor([1.0, torch.nan]), "not finite"),
        (torch.tensor([torch.inf]), "not finite"),
        (torch.tensor(2.0**33 / 3), "not below 2.86e\\+09"),
        (torch.tensor(-(2.0**33)), "not below 2.86e\\+09"),
        (torch.tensor(2**61), "not below 7.69e\\+17"),
        (torch.tensor(-(2**63)), "not below"),
    ],
)
def test_nothing_is_cut_off_silently(value: torch.Tensor, words: str) -> None:
    with pytest.raises(Diverged, match=f"'a/x' has a number that is .*{words}"):
        fixed_point.encode({"a": {"x": value}}, 3)


LAYOUTS: list[Any] = [
    None,
    3,
    [["a", "real"]],
    [["a", "odd", [1]]],
    [["a", "real", [-1]]],
    [["a", "real", ["x"]]],
    [["a", "real", [float("inf")]]],
    [["a", "real", [1]], ["a", "real", [1]]],
    [["a", "real", [1]], ["a/b", "real", [1]]],
    [["a//b", "real", [1]]],
    [["/".join("a" * 9999), "real", [1]]],
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_is_none_is_refused(layout: Any) -> None:
    with pytest.raises(ValueError, match="layout"):
        fixed_point.checked_layout(layout)
