"""Methods whose server half needs only sums over the clients: the sums, what stands in for updates, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from redgrape.acceptance import UpdateRejected

import redgrape as rg
from redgrape import methods, nets, testing, tree
from redgrape.engines import Answer, ClientHalf, Lost, ShareOfSum
from redgrape.engines.in_process import InProcess
from redgrape.errors import Diverged, RedgrapeError, TooFewClients
from redgrape.exchange import fixed_point
from redgrape.method import ClientSite, Method
from redgrape.methods.balanced_softmax import BalancedSoftmax
from redgrape.methods.creff import Creff
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.fedopt import FedOpt
from redgrape.methods.logit_adjustment import LogitAdjustment
from redgrape.methods.redgrape import RedGrape
from redgrape.methods.scaffold import Scaffold
from redgrape.training import RunState, Training
from redgrape.tree import Tree

C, d = 4, 6
SIZES = [[30, 12, 3, 0], [20, 0, 9, 5], [8, 16, 1, 12]]
build = partial(nets.build, "mlp", (d,), C, 0)


def _federation(sizes: list[list[int]] = SIZES) -> rg.Federation:
    stream = np.random.default_rng(1)

    def draw(row: list[int]) -> rg.Examples:
        y = np.repeat(np.arange(C), row)
        return rg.Examples((stream.normal(size=(len(y), d)) + 1.5 * y[:, None]).astype(np.float32), y)

    return rg.Federation([draw(row) for row in sizes], draw([10] * C), C)


class Summing(InProcess):
    """Clients of this process, whose updates come as a secure sum of sites gives them: by way of whole numbers."""

    def __init__(self, half: ClientHalf, spoil: Callable[[dict[str, Any]], Any] = lambda total: total) -> None:
        super().__init__(half)
        self._spoil = spoil
        self.layouts: list[fixed_point.Layout] = []

    def run_clients(
        self, broadcast: Tree, clients: Sequence[int], states: Mapping[int, Tree], round: int
    ) -> Iterator[tuple[int, Answer | Lost]]:
        answers = {k: a for k, a in super().run_clients(broadcast, clients, states, round) if isinstance(a, Answer)}
        method = self._half.method
        encoded = [fixed_point.encode(method.summand(a.update), len(answers)) for a in answers.values()]
        self.layouts += [layout for layout, _ in encoded]
        total = fixed_point.decode(encoded[0][0], np.sum([numbers for _, numbers in encoded], axis=0))
        self._spoil(total)
        updates = method.stand_ins(total, list(answers), torch.float32)
        for k, a in answers.items():
            yield k, ShareOfSum(updates[k], a.state, round)


def _trained(
    method: Method, engine: Callable[[ClientHalf], Any] = InProcess, rounds: int = 3, sizes: list[list[int]] = SIZES
) -> list[RunState]:
    with Training(method, _federation(sizes), build, rounds=rounds, engine=engine) as training:
        return [step.state for step in training.steps()]


VARIANTS = [
    FedOpt(client_weights="count"),
    FedOpt.preset("yogi"),
    RedGrape(prototype_weights="count"),
    RedGrape(min_count=3, min_clients=2),
    RedGrape(min_clients=3),
    RedGrape(use_prototypes=False, two_stream=False),
    RedGrape.preset("released"),
    Creff(min_count=2, min_clients=2),
    LogitAdjustment(stage="post_hoc"),
    LogitAdjustment(prior="local"),
    BalancedSoftmax(prior="local"),
    FedAvg(freeze_encoder=True),
]


@pytest.mark.parametrize("method", VARIANTS, ids=lambda m: type(m).__name__)
def test_options_take_other_ways_to_the_same_sums(method: Method) -> None:
    assert method.why_not_summed() is None
    testing.CHECKS["sums_are_enough_where_it_says_so"](method)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("climb", {}, "dual variable"),
    ("fedic", {}, "every client's own model"),
    ("balanced_softmax", {"prior": "estimated"}, "prior=estimated"),
    ("logit_adjustment", {"prior": "estimated"}, "prior=estimated"),
    ("redgrape", {"prototype_clip": 1.0}, "prototype_clip"),
    ("redgrape", {"dp_clip": 1.0}, "dp_clip"),
    ("fedavg", {"dp_clip": 1.0}, "dp_clip"),
    *[("fedavg", {"aggregation": rule}, f"aggregation={rule}") for rule in ("median", "trimmed_mean", "norm_clipping")],
    *[("scaffold", {"aggregation": rule}, f"aggregation={rule}") for rule in ("krum", "multi_krum")],
    ("redgrape", {"aggregation": "median"}, "aggregation=median"),
]


@pytest.mark.parametrize(("name", "options", "words"), REFUSED)
def test_what_needs_single_updates_says_why(name: str, options: dict[str, Any], words: str) -> None:
    reason = methods.load(name)(**options).why_not_summed()
    assert reason is not None
    assert words in reason and "\n" not in reason


def test_an_heir_must_say_itself_that_sums_are_enough() -> None:
    class Heir(FedAvg):
        pass

    assert "more of the clients than sums" in str(Heir().why_not_summed())


SUMMED = [FedAvg(), Scaffold(), RedGrape(), RedGrape(min_count=8, min_clients=3), Creff(**Creff.cheap)]


@pytest.mark.parametrize("method", SUMMED, ids=lambda m: type(m).__name__)
def test_a_run_by_sums_is_that_by_updates_to_rounding(method: Method) -> None:
    for plain, summed in zip(_trained(method), _trained(method, Summing), strict=True):
        theirs = tree.flatten(summed.server)
        for name, t in tree.flatten(plain.server).items():
            torch.testing.assert_close(theirs[name], t, rtol=1e-4, atol=1e-5, msg=f"{name} after round {plain.round}")
        for key in ("answered", "class_contributors", "prototype_age", "prototype_seen"):
            assert plain.record.get(key) == summed.record.get(key)
        assert plain.record["train_loss"] == pytest.approx(summed.record["train_loss"], rel=1e-5)


def test_a_client_adds_the_same_shapes_whatever_it_holds() -> None:
    """One class, all of them, or none that it reports."""
    engines = []

    def engine(half: ClientHalf) -> Summing:
        engines.append(Summing(half))
        return engines[-1]

    _trained(RedGrape(min_count=3), engine, 1, [[9, 0, 0, 0], [5, 5, 5, 5], [0, 2, 1, 2]])
    layouts = engines[0].layouts
    assert len(layouts) == 3 and layouts[0] == layouts[1] == layouts[2]
    assert ("prototypes/clients", "whole", [C]) in layouts[0]
    features = build().classifier.in_features
    assert ("prototypes/weight", "real", [C, C, features]) in layouts[0]


def test_floors_hold_in_sums() -> None:
    """Of three clients two report class 0, all class 1, one class 2, and none class 3, which one has too few of."""
    sizes = [[9, 9, 0, 0], [9, 9, 0, 4], [4, 9, 9, 0]]
    [state] = _trained(RedGrape(min_count=8, min_clients=2), Summing, 1, sizes)
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


LIES: dict[str, tuple[Callable[[dict[str, Any]], Any], type[RedgrapeError] | type[UpdateRejected], str]] = {
    "no examples": (_set("count", torch.zeros_like), UpdateRejected, "'count' is 0 in all"),
    "examples below zero": (_set("count", torch.neg), UpdateRejected, "in all; 3 clients"),
    "too many clients": (_set("prototypes/clients", lambda t: t + 3), UpdateRejected, "cannot be those of 3"),
    "clients below zero": (_set("prototypes/clients", lambda t: t - 3), UpdateRejected, "cannot be those of 3"),
    "beyond all measure": (_set("delta/classifier.bias", lambda t: t + 1e9), Diverged, "has the length"),
    "another shape": (_set("delta/classifier.bias", lambda t: t[:1]), TooFewClients, "it must be"),
    "turned prototypes": (_set("prototypes/bias", torch.neg), TooFewClients, "no gradient of a cross-entropy"),
    "a tensor too few": (lambda total: total["delta"].pop("classifier.bias"), TooFewClients, "is missing"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_sum_that_cannot_be_is_not_applied(lie: str) -> None:
    spoil, kind, words = LIES[lie]
    with pytest.raises(kind, match=words) as caught:
        _trained(RedGrape(), lambda half: Summing(half, spoil), 1)
    if kind is not UpdateRejected:  # which the engine of real sites turns into the same words
        assert "the sum over the clients of round 1 is not taken" in str(caught.value)
        assert "nothing of it was applied" in str(caught.value)


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
    [["a", "real", [1]], ["a", "real", [1]]],
    [["a", "real", [1]], ["a/b", "real", [1]]],
    [["a//b", "real", [1]]],
    [["/".join("a" * 9999), "real", [1]]],
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_is_none_is_refused(layout: Any) -> None:
    with pytest.raises(ValueError, match="layout"):
        fixed_point.checked_layout(layout)


def test_what_a_client_adds_is_its_weighted_update() -> None:
    """n_k times delta and buffers, by FedAvg; the control variates of SCAFFOLD count alike."""
    federation = _federation()
    half = ClientHalf(Scaffold(), federation, build, 0, 1, torch.device("cpu"))
    site: ClientSite = half.site(0, 1)
    model = build().state_dict()
    broadcast = {"model": model, "c": {name: torch.zeros_like(t) for name, t in model.items()}}
    update, _ = Scaffold().client_update(broadcast, Scaffold().init_client(broadcast), site)
    added = Scaffold().summand(update)
    assert int(added["count"]) == len(site.data) == 45
    assert float(added["loss"]) == 45 * float(update["loss"])
    assert torch.equal(added["delta_c"]["classifier.bias"], update["delta_c"]["classifier.bias"].double())
    by_count = FedAvg().summand({name: group for name, group in update.items() if name != "delta_c"})
    assert torch.equal(by_count["delta"]["classifier.bias"], 45 * update["delta"]["classifier.bias"].double())
