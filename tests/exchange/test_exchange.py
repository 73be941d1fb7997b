"""The exchange: what it makes of parts by hand, what it refuses, and a method that gets all of it for its parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import redgrape as rg
import toys
from redgrape import methods, nets, testing, tree
from redgrape.engines import ClientHalf
from redgrape.engines.in_process import InProcess
from redgrape.errors import ConfigError
from redgrape.exchange import (
    ClassRows,
    Count,
    Direction,
    Exchange,
    Parts,
    Received,
    Scalar,
    Statistics,
    Sum,
)
from redgrape.exchange.checks import LONGEST, TooLong
from redgrape.learning.features import features
from redgrape.methods.fedavg import FedAvg
from redgrape.privacy.disclosure import disclosures
from redgrape.rounds import PLAIN, RunState, exchanged
from redgrape.testing import engines as testing_engines
from redgrape.training import Training
from redgrape.tree import Tree

CPU = torch.device("cpu")


# A method of one's own, which has no line for anything but its mathematics


class ClassMeans(FedAvg):
    """FedAvg whose clients also send the mean feature vector of each of their classes. The server keeps the table."""

    def parts(self, model, site):
        return {**super().parts(model, site), "means": ClassRows({"feature": model["classifier.weight"][0]})}

    def init_server(self, model, site):
        return {**super().init_server(model, site), "means": {"feature": torch.zeros_like(model["classifier.weight"])}}

    def client_update(self, broadcast, state, site):
        net = site.load(broadcast["model"])
        x = site.inputs(torch.arange(len(site.data)), net.classifier.weight.dtype)
        with torch.no_grad():
            h = features(net.encoder, x, "running")
        classes = site.data.labels.unique()
        means = torch.stack([h[site.data.labels == c].mean(dim=0) for c in classes])
        update, state = super().client_update(broadcast, state, site)
        return {**update, "means": {"classes": classes, "feature": means}}, state

    def server_update(self, server, received, site):
        means, _ = received.table("means", server["means"])
        return {**super().server_update(server, received, site), "means": means}


@pytest.mark.parametrize("clause", testing.CHECKS)
def test_class_means_keep_the_contract(clause: str) -> None:
    testing.CHECKS[clause](ClassMeans())


# Class 0 is everybody's, class 1 is held by three, class 2 by one.
HELD = [[9, 4, 0], [5, 0, 0], [6, 2, 0], [4, 0, 1], [3, 5, 0]]
C = len(HELD[0])


def linear() -> rg.Net:
    return nets.build("linear", toys.VECTOR, C, seed=0).double()


class Wild(InProcess):
    """Client 0 sends something else in place of its class means."""

    def __init__(self, half: ClientHalf, change: Callable[[Tree], Tree]) -> None:
        super().__init__(half)
        self._change = change

    def run_clients(self, broadcast: Any, clients: Any, states: Any, round: int) -> Any:
        for k, answer in super().run_clients(broadcast, clients, states, round):
            update = answer.update
            yield k, answer._replace(update={**update, "means": self._change(update["means"])}) if k == 0 else answer


def after(engine: Callable[[ClientHalf], Any] = InProcess, **settings: Any) -> RunState:
    """The state after a round of class means under these settings of the exchange."""
    method, exchange = ClassMeans(epochs=1, lr=0.1), Exchange(**settings)
    with Training(method, toys.federation(*HELD), linear, rounds=1, engine=engine, exchange=exchange) as training:
        return next(iter(training.steps())).state


def table(state: RunState) -> Tensor:
    means: Tensor = state.server["means"]["feature"]
    return means


def own_means(c: int, least: int = 1) -> Tensor:
    """The clients' means of a class, which a linear net has as its features, from this many examples on."""
    data = toys.federation(*HELD)
    each = [data.client(k) for k in range(len(HELD)) if HELD[k][c] >= least]
    return torch.stack([d.inputs((d.labels == c).nonzero().flatten(), torch.float64).mean(dim=0) for d in each])


def test_class_means_are_averaged_over_their_holders() -> None:
    state = after()
    assert state.record["class_contributors"] == [5, 3, 1]
    for c in range(C):
        torch.testing.assert_close(table(state)[c], own_means(c).mean(dim=0), rtol=0, atol=1e-14)


def test_a_class_below_min_count_is_not_sent() -> None:
    half = ClientHalf(ClassMeans(epochs=1), toys.federation(*HELD), linear, 0, 1, CPU, exchange=Exchange(min_count=3))
    sent = [half.run(k, {"model": linear().state_dict()}, None, 1).update["means"] for k in range(len(HELD))]
    assert [rows["classes"].tolist() for rows in sent] == [[0, 1], [0], [0], [0], [0, 1]]
    assert [len(rows["feature"]) for rows in sent] == [2, 1, 1, 1, 2]
    state = after(min_count=3)
    assert state.record["class_contributors"] == [5, 2, 0]
    torch.testing.assert_close(table(state)[1], own_means(1, least=3).mean(dim=0), rtol=0, atol=1e-14)
    assert not table(state)[2].any()


def test_a_class_below_min_clients_is_not_released() -> None:
    plain, state = after(), after(min_clients=4)
    assert state.record["class_contributors"] == [5, 3, 1]
    assert state.record["class_released"] == [True, False, False]
    assert torch.equal(table(state)[0], table(plain)[0]) and not table(state)[1:].any()


def test_the_median_withstands_one_wild_client() -> None:
    """Class 0 stays between the means of honest clients; the mean is carried away. Class 2 has too few reporters."""
    wild = functools.partial(Wild, change=lambda rows: {**rows, "feature": torch.full_like(rows["feature"], 500)})
    honest = own_means(0)[1:]
    found = table(after(wild, rule="median"))
    assert ((found[0] >= honest.amin(dim=0)) & (found[0] <= honest.amax(dim=0))).all()
    assert (table(after(wild))[0] > 90).all()
    assert found[1].any() and not found[2].any()


def test_noise_moves_the_table() -> None:
    """Every number of a class, and the model; the same seed gives the same noise."""
    pytest.importorskip("dp_accounting")
    clip = {"clip": 1.0, "class_clip": 1.0, "randomness": "seed"}
    clean, noisy = after(**clip), after(**clip, noise=0.5, class_noise=0.5)
    assert (table(noisy)[0] != table(clean)[0]).all()
    assert not torch.equal(noisy.server["model"]["classifier.bias"], clean.server["model"]["classifier.bias"])
    assert tree.equal(noisy.server, after(**clip, noise=0.5, class_noise=0.5).server)


class Long(InProcess):
    """Client 0 sends a very long step."""

    def run_clients(self, broadcast: Any, clients: Any, states: Any, round: int) -> Any:
        for k, answer in super().run_clients(broadcast, clients, states, round):
            delta = {name: t + 1e2 * (k == 0) for name, t in answer.update["delta"].items()}
            yield k, answer._replace(update={**answer.update, "delta": delta})


def test_with_noise_no_client_decides_whether_others_count() -> None:
    """Epsilon assumes that a client changes the sum by its own clipped update only. A comparison with the others'
    lengths would let it remove them, so that only without noise is the long one rejected."""
    pytest.importorskip("dp_accounting")
    clip = {"clip": 1.0, "class_clip": 1.0, "randomness": "seed"}
    assert after(Long, **clip).record["rejected"].keys() == {"0"}
    assert not after(Long, **clip, noise=0.5, class_noise=0.5).record["rejected"]


@pytest.mark.parametrize("settings", [{}, {"min_count": 3, "min_clients": 2}, {"clip": 0.1, "class_clip": 0.5}])
def test_a_secure_sum_is_the_plain_mean(settings: dict[str, Any]) -> None:
    plain, summed = after(**settings), after(testing_engines.Summing, **settings)
    for name, t in tree.flatten(plain.server).items():
        torch.testing.assert_close(tree.flatten(summed.server)[name], t, rtol=0, atol=1e-9)
    assert summed.record["class_released"] == plain.record["class_released"]


BAD: dict[str, Callable[[Tree], Tree]] = {
    "tensor 'means/feature' is [2, 4]; each of its rows must be [5]": lambda r: {**r, "feature": r["feature"][:, :4]},
    "tensor 'means/feature' has 1 rows for 2 classes": lambda r: {**r, "feature": r["feature"][:1]},
    "tensor 'means/feature' is torch.float32; it must be torch.float64": lambda r: {
        **r,
        "feature": r["feature"].float(),
    },
    "tensor 'means/feature' is not finite": lambda r: {**r, "feature": r["feature"] / 0},
    "'means/classes' names class 2, which this client lacks": lambda r: {**r, "classes": torch.tensor([0, 2])},
    "tensor 'means/feature' is missing": lambda r: {"classes": r["classes"]},
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_row_is_rejected_by_name(reason: str) -> None:
    state = after(functools.partial(Wild, change=BAD[reason]))
    assert state.record["rejected"] == {"0": reason} and state.record["answered"] == [1, 2, 3, 4]
    torch.testing.assert_close(table(state)[0], own_means(0)[1:].mean(dim=0), rtol=0, atol=1e-14)


def test_class_means_are_disclosed_by_name() -> None:
    """A row of one example is that example's features; a mean of more cannot be solved for them."""
    method, site = ClassMeans(), toys.server_site(5, C)
    parts, survey = exchanged(method, site)
    told = disclosures(PLAIN, parts, survey, method.needs_single(), C)
    assert "a row for each of its classes ('means')" in told["beyond_averaging"]
    assert "that example's exact feature vector follows from it" in told["beyond_averaging"]
    assert told["class_reports"]["solvable_up_to"] == 1
    floors = disclosures(Exchange(preset="private"), parts, survey, "", C)
    assert "Only classes with at least 8 examples were sent" in floors["beyond_averaging"]
    assert (floors["class_reports"]["min_count"], floors["class_reports"]["fewest_contributors"]) == (8, 3)
    assert [m.name for m in Exchange(clip=1.0, noise=1.0).mechanisms(parts, C)] == ["model", "means"]


# By hand


def vector(*values: float) -> dict[str, Tensor]:
    return {"w": torch.tensor(values, dtype=torch.float32)}


def rows(classes: Sequence[int], values: Sequence[Sequence[float]], **counts: Sequence[int]) -> dict[str, Tensor]:
    numbers = {name: torch.tensor(n) for name, n in counts.items()}
    return {"classes": torch.tensor(classes), "w": torch.tensor(values), **numbers}


def sum_of(exchange: Exchange, updates: Sequence[Tree], parts: Parts, classes: int = 3) -> Tree:
    return testing_engines.summed([exchange.summand(update, parts, classes) for update in updates])


def both(updates: Sequence[Tree], parts: Parts, **settings: Any) -> tuple[Received, Received]:
    """What a server gets of these updates, one by one and as a secure sum."""
    exchange, site, clients = Exchange(**settings), toys.server_site(len(updates), 3), list(range(len(updates)))
    total = sum_of(exchange, updates, parts)
    plain = exchange.receive(dict(enumerate(updates)), parts, site)
    return plain, exchange.receive_sum(total, clients, parts, vector(1.0), site)


PARTS: Parts = {
    "delta": Direction(vector(0, 0)),
    "control": Direction(vector(0, 0), "alike"),
    "tally": Sum({"n": torch.tensor(0), "x": torch.tensor(0.0)}),
    "buffers": Statistics({"running_mean": torch.tensor([0.0])}, {}),
    "loss": Scalar(torch.tensor(0.0)),
    "count": Count(),
    "rows": ClassRows({"w": torch.zeros(1)}, "count"),
}
TWO: list[dict[str, Any]] = [
    {
        "delta": vector(3, 4),
        "control": vector(1, 0),
        "tally": {"n": torch.tensor(2), "x": torch.tensor(0.5)},
        "buffers": {"running_mean": torch.tensor([1.0])},
        "loss": torch.tensor(2.0),
        "count": torch.tensor(1),
        "rows": rows([0], [[1.0]], counts=[1]),
    },
    {
        "delta": vector(0, 1),
        "control": vector(0, 3),
        "tally": {"n": torch.tensor(5), "x": torch.tensor(-2.0)},
        "buffers": {"running_mean": torch.tensor([5.0])},
        "loss": torch.tensor(6.0),
        "count": torch.tensor(3),
        "rows": rows([0, 2], [[5.0], [7.0]], counts=[2, 1]),
    },
]


def test_a_summand_is_the_weighted_update() -> None:
    """The second client has three examples: three times its delta, statistics and loss, its control and tally as they
    are, and its rows times their examples, with zeros for class 1, which it lacks."""
    found = tree.flatten(Exchange().summand(TWO[1], PARTS, 3))
    assert {name: t.tolist() for name, t in found.items()} == {
        "delta/w": [0, 3],
        "control/w": [0, 3],
        "tally/n": 5,
        "tally/x": -2,
        "buffers/running_mean": [15],
        "loss": 18,
        "count": 3,
        "rows/w": [[10], [0], [7]],
        "rows/counts": [2, 0, 1],
        "rows/clients": [1, 0, 1],
    }
    assert {name: t.dtype for name, t in found.items()} == {
        name: torch.int64 if name in ("tally/n", "count", "rows/counts", "rows/clients") else torch.float64
        for name in found
    }


def test_updates_and_their_sum_give_the_same_reductions() -> None:
    """By examples: delta ((3, 4) + 3 (0, 1)) / 4, statistics (1 + 3 * 5) / 4, loss (2 + 3 * 6) / 4. Alike: control
    ((1, 0) + (0, 3)) / 2. Class 0: (1 * 1 + 2 * 5) / 3; class 1: nobody's, so its old row; class 2: 7."""
    for received in both(TWO, PARTS):
        assert received.mean("delta")["w"].tolist() == [0.75, 1.75]
        assert received.mean("control")["w"].tolist() == [0.5, 1.5]
        assert received.statistics()["running_mean"].tolist() == [4]
        assert {name: t.item() for name, t in received.total("tally").items()} == {"n": 7, "x": -1.5}
        assert received.total("tally")["n"].dtype == torch.int64
        means, released = received.table("rows", {"w": torch.full((3, 1), 9.0)})
        assert means["w"].flatten().tolist() == pytest.approx([11 / 3, 9, 7])
        assert released.tolist() == [True, False, True]
        assert received.contributors("rows").tolist() == [2, 0, 1]
        moved = received.moved({**vector(10, 10), "running_mean": torch.zeros(1)}, 2.0)
        assert [t.tolist() for t in moved.values()] == [[11.5, 13.5], [4]]
        assert received.record() == {
            "train_loss": 5,
            "class_contributors": [2, 0, 1],
            "class_released": [True, False, True],
        }
        assert received.clients == [0, 1]


CLIPPED: Parts = {"delta": Direction(vector(0, 0)), "tally": Sum({"x": torch.tensor(0.0)}), "count": Count()}
LONG = [
    {"delta": vector(3, 4), "tally": {"x": torch.tensor(12.0)}, "count": torch.tensor(900)},
    {"delta": vector(0, 1), "tally": {"x": torch.tensor(2.0)}, "count": torch.tensor(1)},
]


@pytest.mark.parametrize("noise", [{}, {"noise": 0.5, "randomness": "seed"}], ids=["clip", "clip and noise"])
def test_a_clip_at_the_site_is_that_at_the_server(noise: dict[str, Any]) -> None:
    """The first update is sqrt(9 + 16 + 144) = 13 long, and half of it counts with clip 6.5. The second counts as it
    is, and both alike, though one has 900 examples. The noise is the same as well."""
    plain, summed = both(LONG, CLIPPED, clip=6.5, **noise)
    assert torch.equal(plain.mean("delta")["w"], summed.mean("delta")["w"])
    assert torch.equal(plain.total("tally")["x"], summed.total("tally")["x"])
    if not noise:
        assert plain.mean("delta")["w"].tolist() == [0.75, 1.5] and plain.total("tally")["x"].item() == 8
    else:
        assert plain.mean("delta")["w"].tolist() != [0.75, 1.5] and plain.total("tally")["x"].item() != 8


def test_noise_on_means_and_totals_has_the_size_that_is_asked_for() -> None:
    """Of four updates of zeros: deviation 3 * 2 on a total, and a quarter of it on a mean."""
    like = {"w": torch.zeros(20_000)}
    parts: Parts = {"delta": Direction(like), "tally": Sum(like), "count": Count()}
    updates = [{"delta": like, "tally": like, "count": torch.tensor(1)} for _ in range(4)]
    for received in both(updates, parts, clip=2.0, noise=3.0, randomness="seed"):
        assert float(received.mean("delta")["w"].std()) == pytest.approx(1.5, rel=0.03)
        assert float(received.total("tally")["w"].std()) == pytest.approx(6, rel=0.03)
        assert abs(float((received.mean("delta")["w"] * received.total("tally")["w"]).mean())) < 0.3


def test_class_rows_are_clipped_class_by_class_at_the_server_and_at_the_site() -> None:
    """Over its tensors together (3, 4) is five times too long and (0, 0.5) is not: their mean is (0.3, 0.65). (0, 2)
    becomes (0, 1). A clip that nothing reaches changes nothing."""
    parts: Parts = {"rows": ClassRows({"w": torch.zeros(1), "b": torch.zeros(())})}
    updates = [
        {"rows": rows([0], [[3.0]]) | {"b": torch.tensor([4.0])}},
        {"rows": rows([0, 1], [[0.0], [0.0]]) | {"b": torch.tensor([0.5, 2.0])}},
    ]
    for longest, w, b in ((1.0, [0.3, 0, 0], [0.65, 1, 0]), (9.0, [1.5, 0, 0], [2.25, 2, 0])):
        for received in both(updates, parts, class_clip=longest):
            means, released = received.table("rows")
            assert means["w"][:, 0].tolist() == pytest.approx(w) and means["b"].tolist() == pytest.approx(b)
            assert released.tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("settings", "mean"),
    [({}, 11), ({"rule": "median"}, 2), ({"rule": "norm_clipping"}, 5 / 3), ({"class_clip": 1.5}, 4 / 3)],
)
def test_a_class_row_may_be_one_number(settings: dict[str, Any], mean: float) -> None:
    """1, 2 and 30: their mean, their median, with none above the median, and with none above 1.5."""
    parts: Parts = {"rows": ClassRows({"loss": torch.tensor(0.0)})}
    updates = {
        k: {"rows": {"classes": torch.tensor([1]), "loss": torch.tensor([v])}} for k, v in enumerate((1.0, 2.0, 30.0))
    }
    means, released = Exchange(**settings).receive(updates, parts, toys.server_site(3, 3)).table("rows")
    assert means["loss"].tolist() == pytest.approx([0, mean, 0]) and released.tolist() == [False, True, False]


def test_clients_without_a_count_count_alike() -> None:
    """(2 + 4) / 2 and (1 + 5) / 2, one by one and as a sum."""
    parts: Parts = {"delta": Direction(vector(0)), "loss": Scalar(torch.tensor(0.0))}
    updates = [{"delta": vector(2), "loss": torch.tensor(1.0)}, {"delta": vector(4), "loss": torch.tensor(5.0)}]
    for received in both(updates, parts):
        assert received.mean("delta")["w"].tolist() == [3]
        assert received.record() == {"train_loss": 3}


def test_a_sum_is_held_to_the_length_of_one_update() -> None:
    """Three updates that are taken one by one are taken as a sum; three that are not, are not."""
    parts: Parts = {"tally": Sum(vector(0))}
    both([{"tally": vector(0.9 * LONGEST)}] * 3, parts)
    with pytest.raises(TooLong, match="'tally' has length"):
        both([{"tally": vector(1.1 * LONGEST)}] * 3, parts)


def test_a_secure_sum_has_no_single_updates() -> None:
    plain, summed = both(TWO, PARTS)
    assert [u["w"].tolist() for u in plain.each("delta").values()] == [[3, 4], [0, 1]]
    with pytest.raises(AssertionError, match="no single updates"):
        summed.each("delta")


# What does not go together

DELTA: Parts = {"delta": Direction(vector(0)), "count": Count()}
GRADIENTS: Parts = {**DELTA, "rows": ClassRows({"w": torch.zeros(1)}, gradient=True)}
COUNTED: Parts = {**DELTA, "rows": ClassRows({"w": torch.zeros(1)}, "count")}
REAL: Parts = {**DELTA, "tally": Sum(vector(0))}
RUNNING: Parts = {**DELTA, "tally": Sum(vector(0), running=True)}
WHOLE: Parts = {**DELTA, "tally": Sum({"n": torch.tensor(0)})}
STATISTICS: Parts = {**DELTA, "buffers": Statistics({"running_mean": torch.zeros(1)}, {})}
WEIGHING: Parts = {**DELTA, "f": Scalar(torch.tensor(0.0), least=0.0, weighs=True)}
KEPT: Parts = {"delta": Direction(vector(0), kept=True)}
NOISE = {"clip": 1.0, "noise": 1.0}
SINGLE = {"single": "the server looks at each"}

REFUSED: list[tuple[dict[str, Any], Parts, dict[str, Any], str]] = [
    ({}, DELTA, {**SINGLE, "summed": True}, "a secure sum shows no single updates, and the server looks at each"),
    *[
        ({"rule": rule}, DELTA, {"summed": True}, f"a secure sum shows no single updates, and exchange.rule={rule} com")
        for rule in ("median", "trimmed_mean", "krum", "multi_krum", "norm_clipping")
    ],
    ({"rule": "norm_clipping"}, WEIGHING, {}, "exchange.rule=norm_clipping keeps the clients' weights"),
    ({"rule": "multi_krum"}, WEIGHING, {}, "exchange.rule=multi_krum keeps the clients' weights"),
    ({"rule": "median"}, REAL, {}, "the server adds parts of the updates up, and exchange.rule=median gives no sum"),
    ({"rule": "trimmed_mean"}, WHOLE, {}, "the server adds parts of the updates up, and exchange.rule=trimmed_mean gi"),
    *[
        (
            {"rule": rule},
            RUNNING,
            {},
            f"a running sum keeps what a malicious client once added, and exchange.rule={rule} ",
        )
        for rule in ("median", "trimmed_mean", "krum", "multi_krum", "norm_clipping")
    ],
    ({"clip": 1.0}, RUNNING, {}, "clients keep track of what they add to a running sum"),
    ({"rule": "norm_clipping"}, WHOLE, {}, "the server sums whole numbers of the updates"),
    ({"clip": 1.0}, WHOLE, {}, "the server sums whole numbers of the updates"),
    (
        {"class_clip": 1.0},
        COUNTED,
        {},
        "class rows are weighted by their examples, and exchange.class_clip needs equal",
    ),
    (NOISE, STATISTICS, {}, "this net has running statistics"),
    (NOISE, DELTA, SINGLE, "exchange.noise hides single updates in an average, and the server looks at each"),
    (NOISE, DELTA, {"surveys": True}, "the method's survey is released without noise"),
    ({"class_clip": 1.0, "class_noise": 1.0}, GRADIENTS, {"surveys": True}, "the method's survey is released without"),
    *[
        (settings, KEPT, {}, f"clients keep what they send in their states, and exchange.{name} changes it")
        for settings, name in (
            ({"clip": 1.0}, "clip"),
            *(({"rule": rule}, f"rule={rule}") for rule in ("median", "trimmed_mean", "norm_clipping")),
        )
    ],
    ({"clip": 1.0}, WEIGHING, {}, "the method weighs clients in its own way, and exchange.clip weighs all alike"),
    (NOISE, DELTA, {"scaled": True}, "the columns of a table are scaled by means and deviations of the clients' rows"),
]


@pytest.mark.parametrize(("settings", "parts", "asked", "words"), REFUSED, ids=[words[:40] for *_, words in REFUSED])
def test_what_does_not_go_together_is_refused_in_one_line(
    settings: dict[str, Any], parts: Parts, asked: dict[str, Any], words: str
) -> None:
    reason = Exchange(**settings).refuses(parts, **asked)
    assert reason is not None and reason.startswith(words) and "\n" not in reason


TOGETHER: list[tuple[dict[str, Any], Parts, dict[str, Any]]] = [
    ({}, {**PARTS, **WEIGHING}, {"surveys": True, **SINGLE}),
    ({}, PARTS, {"surveys": True, "scaled": True, "summed": True}),
    ({"preset": "private"}, PARTS, {"summed": True}),
    ({"clip": 1.0, "class_clip": 1.0}, GRADIENTS | STATISTICS | REAL, {"summed": True, "surveys": True}),
    ({**NOISE, "class_clip": 1.0, "class_noise": 1.0}, GRADIENTS | REAL, {"summed": True}),
    (NOISE, {**DELTA, "buffers": Statistics({}, {})}, {}),
    ({"class_clip": 1.0, "class_noise": 1.0}, STATISTICS, SINGLE),  # there are no class rows to hide
    *[({"rule": rule}, COUNTED | STATISTICS, SINGLE) for rule in ("median", "trimmed_mean", "norm_clipping")],
    *[({"rule": rule}, {**WHOLE, **REAL, **KEPT}, {}) for rule in ("krum", "multi_krum")],
    ({"rule": "norm_clipping"}, REAL, {}),
    *[({"rule": rule}, WEIGHING, {}) for rule in ("median", "trimmed_mean", "krum")],
]


@pytest.mark.parametrize(("settings", "parts", "asked"), TOGETHER, ids=[" ".join(s) or "plain" for s, *_ in TOGETHER])
def test_all_else_goes_together(settings: dict[str, Any], parts: Parts, asked: dict[str, Any]) -> None:
    assert Exchange(**settings).refuses(parts, **asked) is None


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("climb", {}, "a dual variable of its own"),
        ("fedic", {}, "the server runs each client's own model"),
        ("balanced_softmax", {"prior": "estimated"}, "prior=estimated"),
        ("logit_adjustment", {"prior": "estimated"}, "prior=estimated"),
    ],
)
def test_methods_that_need_single_updates_say_why(name: str, options: dict[str, Any], words: str) -> None:
    method = methods.load(name)(**options)
    parts, _ = exchanged(method, toys.server_site(3, C))
    reason = PLAIN.refuses(parts, single=method.needs_single(), summed=True)
    assert reason is not None and words in reason


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"noise": 1.0}, "noise is 1, but updates are not bounded; set clip as well"),
        ({"class_noise": 1.0}, "class_noise is 1, but class rows are not bounded; set class_clip as well"),
        ({"clip": 1.0, "rule": "median"}, "rule is median, and clip bounds a mean"),
        ({"class_clip": 1.0, "rule": "krum"}, "rule is krum, and class_clip bounds a mean"),
        ({"min_clients": 0}, "exchange.min_clients is 0"),
        ({"delta": 1.0}, "exchange.delta is 1"),
        ({"preset": "secret"}, "exchange.preset is 'secret'"),
        ({"aggregation": "median"}, "exchange.aggregation"),
    ],
)
def test_settings_that_promise_nothing_are_refused_in_one_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Exchange(**settings)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_presets() -> None:
    """`plain` is where all settings start; what is given goes before the preset."""
    assert Exchange(preset="plain") == Exchange()
    assert (Exchange().min_count, Exchange().min_clients, Exchange().rule, Exchange().clip) == (1, 1, "mean", None)
    private = Exchange(preset="private")
    assert dict(private) == {**dict(Exchange()), "preset": "private", "min_count": 8, "min_clients": 3}
    assert dict(Exchange(preset="private", min_count=2)) == {**dict(private), "min_count": 2}


@pytest.mark.parametrize(
    ("settings", "clients", "counted"),
    [
        ({"min_clients": 3}, 2, 2),
        ({"min_clients": 2, "rule": "krum"}, 9, 1),
        ({"min_clients": 7, "rule": "multi_krum"}, 9, 6),
    ],
)
def test_a_floor_that_no_round_can_reach_is_refused(settings: dict[str, Any], clients: int, counted: int) -> None:
    exchange = Exchange(**settings)
    says = f"{counted} of a round's {clients} clients count: no class would ever be released"
    with pytest.raises(ConfigError, match=says):
        exchange.check_fits(GRADIENTS, clients)
    exchange.check_fits(DELTA, clients)
    Exchange(**{**settings, "min_clients": counted}).check_fits(GRADIENTS, clients)
