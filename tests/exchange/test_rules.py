"""Robust averages: by hand, against NumPy, in any order of the clients, from a disk; and what they refuse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import redgrape as rg
import toys
from redgrape import methods, tree
from redgrape.engines.in_process import InProcess
from redgrape.engines.waiting_answers import Shelf
from redgrape.errors import ConfigError, TooFewClients
from redgrape.exchange import ClassRows, Count, Direction, Exchange, Parts, Received, Statistics, plausible, rules
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.redgrape import RedGrape
from redgrape.methods.scaffold import Scaffold
from redgrape.rounds import RunState, exchanged, rounds
from redgrape.runs.experiment import Experiment
from redgrape.testing import cases

RULES = ["median", "trimmed_mean", "krum", "multi_krum", "norm_clipping"]
MANY = cases.Case(tuple((3 + k, 2, k % 3, 1) for k in range(9)), clients_per_round=9, rounds=2)


def group(*values: float) -> dict[str, Tensor]:
    return {"w": torch.tensor(values, dtype=torch.float32)}


def update(*values: float, **groups: Sequence[float]) -> dict[str, Any]:
    return {"delta": group(*values)} | {name: group(*v) for name, v in groups.items()}


DIRECTIONS = ["delta", "delta_c"]


# By hand


def test_median() -> None:
    """Of 1, 9, 2 the 2; of 4, 4, -7 the 4. Of 1, 9, 2, 4 the mean of 2 and 4; of 0, 0, 1, 8 that of 0 and 1."""
    odd = [group(1, 4), group(9, 4), group(2, -7)]
    even = [group(1, 0), group(9, 0), group(2, 1), group(4, 8)]
    assert rules.median(odd)["w"].tolist() == [2, 4]
    assert rules.median(even)["w"].tolist() == [3, 0.5]


def test_trimmed_mean() -> None:
    """Without the largest and the smallest: (1 + 2 + 6) / 3, and (0 + 0 + 3) / 3; with two cut off, the middle one."""
    groups = [group(1, 0), group(100, 3), group(2, 0), group(6, 9), group(-50, -9)]
    assert rules.trimmed_mean(groups, 1)["w"].tolist() == [3, 1]
    assert rules.trimmed_mean(groups, 2)["w"].tolist() == [2, 0]


def test_krum() -> None:
    """Five on a line at 0, 1, 2, 4 and 100, of which one may be malicious: each counts its 5 - 1 - 2 = 2 nearest.
    0: 1 + 4 = 5; 1: 1 + 1 = 2; 2: 1 + 4 = 5; 4: 4 + 9 = 13; 100: 96^2 + 98^2 = 18820."""
    updates = [update(v) for v in (0, 1, 2, 4, 100)]
    scores = rules.krum_scores(rules.squared_distances(updates, ["delta"]), 1)
    assert scores.tolist() == [5, 2, 5, 13, 18820]
    assert rules.krum(updates, ["delta"], 1, several=False) == [1]
    assert rules.krum(updates, ["delta"], 1, several=True) == [0, 1]  # of the two with 5 the first


def test_distances_are_over_all_directions() -> None:
    """3^2 + 4^2 in delta and 12^2 in delta_c; buffers and counts have no part in it."""
    a = update(0, 0, delta_c=[0], buffers=[5]) | {"count": torch.tensor(1)}
    b = update(3, 4, delta_c=[12], buffers=[900]) | {"count": torch.tensor(7)}
    assert rules.squared_distances([a, b], DIRECTIONS).tolist() == [[0, 169], [169, 0]]
    assert rules.norm(b, DIRECTIONS) == 13


def test_norm_clipping() -> None:
    """Lengths 5, 1 and 10: to the median, 5, only the last is cut in half; to 2, the first to two fifths."""
    updates = [update(3, 4), update(0, 1), update(6, 8, buffers=[7])]
    assert [u["delta"]["w"].tolist() for u in rules.clip(updates, ["delta"], None)] == [[3, 4], [0, 1], [3, 4]]
    shorter = rules.clip(updates, ["delta"], 2.0)
    assert shorter[0]["delta"]["w"].tolist() == pytest.approx([1.2, 1.6])
    assert shorter[1]["delta"]["w"].tolist() == [0, 1]
    assert shorter[2]["buffers"]["w"].tolist() == [7]


LIKE = {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}
SENT = [toys.class_rows(rows, LIKE) for rows in ({0: 1.0, 1: 5.0}, {0: 2.0}, {0: 30.0, 1: 6.0})]


def received(updates: Sequence[Any], parts: Parts, **settings: Any) -> Received:
    return Exchange(**settings).receive(dict(enumerate(updates)), parts, toys.server_site(len(updates), 3))


def table_of(rule: Any) -> tuple[dict[str, Tensor], Tensor]:
    return received([{"rows": sent} for sent in SENT], {"rows": ClassRows(LIKE)}, rule=rule).table("rows")


def test_class_rows_over_holders() -> None:
    """Class 0 has three holders, 1, 2 and 30: the median is 2, the mean 11. Class 1 has two, too few against one
    malicious client, and class 2 none: neither is released."""
    for rule in ("median", "trimmed_mean"):
        means, released = table_of(rule)
        assert released.tolist() == [True, False, False]
        assert means["weight"].amax(dim=(1, 2)).tolist() == means["bias"].amin(dim=1).tolist() == [2, 0, 0]
    means, released = table_of("mean")
    assert released.tolist() == [True, True, False] and means["bias"][:, 0].tolist() == [11, 5.5, 0]


def test_class_rows_are_clipped_to_the_median_length_of_their_class() -> None:
    """Class 0: lengths in proportion to 1, 2 and 30, so 30 becomes 2: the mean is 5 / 3. Class 1: 5 and 6, to 5.5."""
    means, released = table_of("norm_clipping")
    assert released.tolist() == [True, True, False]
    assert means["bias"][:, 0].tolist() == pytest.approx([5 / 3, 5.25, 0])
    assert means["weight"][:, 2, 1].tolist() == pytest.approx([5 / 3, 5.25, 0])


def test_the_length_of_a_class_row_is_over_all_its_tensors() -> None:
    """(3, 4), (4.5, 0) and (0, 10) are 5, 4.5 and 10 long. The last is cut to 5: the mean is (2.5, 3)."""
    like = {"a": torch.zeros(()), "b": torch.zeros(())}
    sent = [
        {"classes": torch.tensor([0]), "a": torch.tensor([a]), "b": torch.tensor([b])}
        for a, b in ((3.0, 4.0), (4.5, 0.0), (0.0, 10.0))
    ]
    parts: Parts = {"rows": ClassRows(like)}
    means, _ = received([{"rows": rows} for rows in sent], parts, rule="norm_clipping").table("rows")
    assert (means["a"][0].item(), means["b"][0].item()) == pytest.approx((2.5, 3))


@pytest.mark.parametrize(("update_norm", "mean"), [(None, [2.25, 3]), (2.0, [0.9, 1.2])])
def test_a_given_length_clips_a_round(update_norm: float | None, mean: list[float]) -> None:
    """(3, 4), (0, 0) and (6, 8): the median length, 5, gives (3, 4), (0, 0) and (3, 4), of weights 1, 1 and 2; a length
    of 2 gives (1.2, 1.6), (0, 0) and (1.2, 1.6)."""
    answers = [update(*v) | {"count": torch.tensor(n)} for v, n in (((3, 4), 1), ((0, 0), 1), ((6, 8), 2))]
    parts: Parts = {"delta": Direction(group(0, 0)), "count": Count()}
    found = received(answers, parts, rule="norm_clipping", update_norm=update_norm).mean("delta")["w"]
    assert found.tolist() == pytest.approx(mean)


BUFFERS: Parts = {
    "delta": Direction(group(0)),
    "buffers": Statistics(group(0), {}),
    "count": Count(),
}


def test_statistics() -> None:
    """1, 2 and 90: the plain mean is carried away, the medians are not."""
    answers = [update(0, buffers=[mean]) | {"count": torch.tensor(1)} for mean in (1.0, 2.0, 90.0)]
    for rule in ("median", "trimmed_mean", "norm_clipping"):
        assert received(answers, BUFFERS, rule=rule).statistics()["w"].tolist() == [2]
    assert received(answers, BUFFERS).statistics()["w"].tolist() == [31]


@pytest.mark.parametrize("rule", ["krum", "multi_krum"])
def test_krum_takes_the_statistics_of_all(rule: Any) -> None:
    """Client 1 at 1 is chosen among 0, 1, 2, 4 and 100, and its variance is 50: the median of all is 3."""
    values = zip((0.0, 1.0, 2.0, 4.0, 100.0), (2.0, 50.0, 3.0, 4.0, 1.0), strict=True)
    found = received([update(d, buffers=[v]) | {"count": torch.tensor(1)} for d, v in values], BUFFERS, rule=rule)
    assert found.clients == ([1] if rule == "krum" else [0, 1])
    assert found.mean("delta")["w"].tolist() == ([1] if rule == "krum" else [0.5])
    assert found.statistics()["w"].tolist() == [3]


# Against NumPy, in any order, block by block, from a disk


def random_updates(n: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(n)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return [{"delta": {"a": draw(7, 5), "b": draw(), "none": draw(0, 3)}, "delta_c": {"a": draw(7)}} for _ in range(n)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_averages_agree_with_numpy(n: int, dtype: torch.dtype) -> None:
    updates = random_updates(n, dtype)
    groups = [u["delta"] for u in updates]
    trim = (n - 1) // 2
    for name in ("a", "b"):
        values = np.stack([g[name].double().numpy() for g in groups])
        expected = torch.from_numpy(np.asarray(np.median(values, axis=0))).to(dtype)
        assert torch.equal(rules.median(groups)[name], expected)
        inside = np.sort(values, axis=0)[trim : n - trim].mean(axis=0)
        torch.testing.assert_close(rules.trimmed_mean(groups, trim)[name], torch.as_tensor(inside).to(dtype))
    assert rules.median(groups)["none"].shape == (0, 3)
    flat = np.stack([np.concatenate([t.double().numpy().ravel() for t in tree.flatten(u).values()]) for u in updates])
    distances = ((flat[:, None] - flat[None]) ** 2).sum(axis=2)
    torch.testing.assert_close(rules.squared_distances(updates, DIRECTIONS), torch.from_numpy(distances))
    assert [rules.norm(u, DIRECTIONS) for u in updates] == pytest.approx(np.linalg.norm(flat, axis=1).tolist())


def results(updates: Sequence[Any]) -> dict[str, Any]:
    """What every rule makes of the updates; chosen ones by their contents, since places depend on the order."""
    groups = [u["delta"] for u in updates]
    several = rules.krum(updates, DIRECTIONS, 2, several=True)
    return {
        "median": tree.to_bytes(rules.median(groups)),
        "trimmed": tree.to_bytes(rules.trimmed_mean(groups, 2)),
        "krum": {tree.to_bytes(updates[i]) for i in rules.krum(updates, DIRECTIONS, 2, several=False)},
        "multi_krum": {tree.to_bytes(updates[i]) for i in several},
        "clipped": {tree.to_bytes(u) for u in rules.clip(updates, DIRECTIONS, None)},
    }


def test_the_order_of_the_clients_is_nothing() -> None:
    updates = random_updates(9)
    expected = results(updates)
    random = np.random.Generator(np.random.Philox(0))
    for _ in range(20):
        assert results([updates[i] for i in random.permutation(9)]) == expected


@pytest.mark.parametrize("block", [1, 9, 40, 1 << 24])
def test_blocks_and_files_give_the_same_bits(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = random_updates(9)
    whole = {name: value for name, value in results(updates).items() if name in ("median", "trimmed")}
    chosen = rules.krum(updates, DIRECTIONS, 2, several=True)
    monkeypatch.setattr(rules, "_BLOCK", block)
    shelf = Shelf(tmp_path, limit=0)
    stored = [shelf.put(u) for u in updates]
    assert not isinstance(stored[0], dict)
    assert {name: results(stored)[name] for name in whole} == whole
    assert rules.krum(stored, DIRECTIONS, 2, several=True) == chosen
    shelf.close()


def test_huge_numbers_carry_nothing_away() -> None:
    """Four honest near 1, one of the largest numbers there are."""
    for huge in (3e38, -3e38):
        updates = [update(1.0), update(1.1), update(huge), update(0.9), update(1.2)]
        groups = [u["delta"] for u in updates]
        assert 0.9 <= float(rules.median(groups)["w"]) <= 1.2
        assert 0.9 <= float(rules.trimmed_mean(groups, 1)["w"]) <= 1.2
        assert 2 not in rules.krum(updates, ["delta"], 1, several=True)
        assert all(abs(float(u["delta"]["w"])) <= 1.2 for u in rules.clip(updates, ["delta"], None))


# In a run


def run(method: FedAvg, **settings: Any) -> list[RunState]:
    return cases.run(cases.small(method), replace(MANY, exchange=Exchange(**settings)))


def test_mean_is_the_weighted_mean() -> None:
    """By examples, or alike, as the part says; a loss and the examples behind it are by examples."""
    counts = [1, 5, 2, 2, 9]
    updates = [{**u, "count": torch.tensor(n)} for u, n in zip(random_updates(5), counts, strict=True)]
    like = updates[0]
    parts: Parts = {"delta": Direction(like["delta"]), "delta_c": Direction(like["delta_c"], "alike"), "count": Count()}
    found = received(updates, parts)
    assert tree.equal(found.mean("delta"), tree.weighted_mean([u["delta"] for u in updates], counts))
    assert tree.equal(found.mean("delta_c"), tree.weighted_mean([u["delta_c"] for u in updates], [1] * 5))
    assert found.clients == [0, 1, 2, 3, 4]


def test_one_update_is_its_own_average() -> None:
    """All clients alike: whatever the rule, the round is what the mean makes of it, to rounding."""
    data = MANY._examples((3, 2, 2, 1), 0)
    twins = rg.Federation([data] * 5, data, cases.CLASSES)

    def build() -> rg.Net:
        return rg.nets.build("linear", cases.IMAGE, cases.CLASSES, seed=0)

    method = {"epochs": 1, "batch_size": 64, "lr": 0.1}
    plain = rg.train(FedAvg(**method), twins, build, rounds=2).server
    for rule in RULES:
        other = rg.train(FedAvg(**method), twins, build, rounds=2, exchange=Exchange(rule=rule)).server
        for name, t in plain["model"].items():
            torch.testing.assert_close(other["model"][name], t)


@pytest.mark.parametrize("rule", RULES)
def test_rules_differ_from_the_mean_and_take_every_group_along(rule: Any) -> None:
    plain, other = run(RedGrape()), run(RedGrape(), rule=rule, byzantine=2)
    for name in ("model", "W_hat", "prototypes"):
        assert not tree.equal({name: plain[-1].server[name]}, {name: other[-1].server[name]}), name
    first = other[0].record
    chosen = {"krum": 1, "multi_krum": 5}.get(rule, 9)
    assert len(first["answered"]) - len(first.get("left_out", [])) == chosen


def test_a_client_that_is_left_out_keeps_its_state() -> None:
    """SCAFFOLD's c is the mean of the clients' c_i, so that one that does not enter it must not move either."""
    first = run(Scaffold(), rule="multi_krum", byzantine=2)[0]
    assert sorted([*first.clients, *first.record["left_out"]]) == list(range(9))
    mean = {
        name: torch.stack([state["c_i"][name] for state in first.clients.values()]).sum(dim=0) / 9
        for name in first.server["c"]
    }
    for name, c in first.server["c"].items():
        torch.testing.assert_close(c, mean[name])


class Poisoning(InProcess):
    """The first two clients send the opposite, and a thousand times as far."""

    def run_clients(self, broadcast: Any, clients: Any, states: Any, round: int) -> Any:
        for k, answer in super().run_clients(broadcast, clients, states, round):
            if k < 2:
                flat = {n: t * -1000 if n.startswith("delta") else t for n, t in tree.flatten(answer.update).items()}
                answer = answer._replace(update=tree.unflatten(flat))
            yield k, answer


# CLIMB's clients claim their weights; those of the others add to a running sum.
SUMMING = ("vine", "lda", "ncm", "fed3r")
REFUSED = {
    *(("climb", "multi_krum"), ("climb", "norm_clipping")),
    *itertools.product(("feddyn", "scaffold"), ("median", "trimmed_mean", "norm_clipping")),  # states that would drift
    *itertools.product(SUMMING, RULES),
}


@pytest.mark.parametrize("name", methods.names())
def test_two_of_nine_cannot_carry_any_method_away(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far the poisoned model ends from the clean one of the same rule, beside how far the mean is carried, where no
    length is checked. FEDIC distils from every client's model, of which a rule by coordinates knows nothing: only Krum
    leaves them out."""
    monkeypatch.setattr(plausible, "STEP", math.inf)
    distance: dict[str, float] = {}
    for rule in ["mean", *RULES]:
        method, exchange = cases.small(methods.load(name)()), Exchange(rule=rule, byzantine=2)
        half, site = cases.client_half(method, MANY), replace(cases.server_site(MANY), rounds=1)
        if exchange.refuses(exchanged(method, site)[0]):
            assert (name, rule) in REFUSED
            continue
        options: dict[str, Any] = {"eligible": MANY.eligible, "clients_per_round": 9, "exchange": exchange}
        (clean,) = rounds(method, InProcess(half), site, **options)
        (poisoned,) = rounds(method, Poisoning(half), site, **options)
        group = "head" if name == "creff" else "model"  # CReFF deploys a classifier that it trains anew
        before, after = clean.server[group], poisoned.server[group]
        moved = tree.sub(before, {name: after[name] for name in before})
        distance[rule] = float(tree.norm(t for t in moved.values() if t.is_floating_point()))
    protecting = ["krum", "multi_krum"] if name == "fedic" else [rule for rule in RULES if rule in distance]
    limit = 0.7 if name == "fedopt" else 0.2  # a step of Adam is bounded, so that the mean is not carried far either
    for rule in protecting:
        assert distance[rule] < limit * distance["mean"], distance


# What is refused


@pytest.mark.parametrize(
    ("rule", "byzantine", "options", "needed"),
    [
        ("median", 2, {}, 5),
        ("trimmed_mean", 3, {}, 7),
        ("krum", 2, {}, 7),
        ("multi_krum", 1, {}, 5),
        ("norm_clipping", 2, {}, 5),
        ("norm_clipping", 2, {"update_norm": 1.0}, 1),
        ("mean", 9, {}, 1),
    ],
)
def test_a_rule_needs_so_many_clients(rule: Any, byzantine: int, options: dict[str, Any], needed: int) -> None:
    exchange = Exchange(rule=rule, byzantine=byzantine, **options)
    assert exchange.fewest_answers() == needed
    exchange.check_clients(needed)
    if needed > 1:
        with pytest.raises(ConfigError, match=f"^exchange.rule is {rule}, .*needs {needed} clients a round; there"):
            exchange.check_clients(needed - 1)


def test_settings_that_promise_nothing_are_refused_before_anything_is_read() -> None:
    values = {"data": {"source": "/nowhere.npz", "clients": 10}, "exchange": {"rule": "krum", "byzantine": 4}}
    says = r"^exchange.rule is krum, and against byzantine=4 it needs 11 clients a round; there are 10: lower"
    with pytest.raises(ConfigError, match=says):
        Experiment.parse(values)
    with pytest.raises(ConfigError, match="needs 7 clients a round; there are 6"):
        Experiment.parse({**values, "clients_per_round": 6, "exchange": {"rule": "krum", "byzantine": 2}})
    with pytest.raises(ConfigError, match="min_answers is 7, but a round has only 6 clients"):
        Experiment.parse({"clients_per_round": 6, "min_answers": 7})
    with pytest.raises(ConfigError, match="needs 11 clients a round; there are 9"):
        rg.Training(FedAvg(), MANY.federation, MANY.build, rounds=1, exchange=Exchange(rule="krum", byzantine=4))


class Dropping(InProcess):
    def run_clients(self, broadcast: Any, clients: Any, states: Any, round: int) -> Any:
        return (pair for pair in super().run_clients(broadcast, clients, states, round) if pair[0] < 6 or round == 1)


def test_a_round_with_fewer_answers_than_the_rule_needs_stops_the_run() -> None:
    """The malicious may all be among those that answered, so that their number does not shrink with the answers."""
    method, exchange = cases.small(FedAvg()), Exchange(rule="krum", byzantine=2)
    engine, site = Dropping(cases.client_half(method, MANY)), cases.server_site(MANY)
    made = rounds(method, engine, site, eligible=MANY.eligible, clients_per_round=9, exchange=exchange)
    assert next(made).round == 1
    with pytest.raises(TooFewClients, match=r"^6 of 9 clients gave an accepted answer in round 2, and 7 are needed$"):
        next(made)
