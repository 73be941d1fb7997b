"""What the messages of a method give away, and what floors and noise keep back."""

from __future__ import annotations

import importlib.util
import json
import math
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import redgrape as rg
import toys
from redgrape import methods, nets, tree
from redgrape.cli import main as cli
from redgrape.engines import ClientHalf
from redgrape.errors import ConfigError, StorageError
from redgrape.exchange import ClassRows, Count, Direction, Exchange, Parts, Received
from redgrape.exchange import exchange as exchange_module
from redgrape.exchange.parts import class_rows, directions
from redgrape.learning.classifier import class_mean_gradients
from redgrape.method import ClientSite, ServerSite
from redgrape.methods.creff import CReFF
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.redgrape import RedGrape
from redgrape.methods.scaffold import Scaffold
from redgrape.privacy import account, noise
from redgrape.privacy.account import Mechanism, epsilon
from redgrape.privacy.disclosure import disclosures
from redgrape.privacy.ledger import PrivacyLedger
from redgrape.reading.learned import disclosed
from redgrape.reading.learned_in_words import in_words, leak_in_one_line
from redgrape.reading.run_view import RunView
from redgrape.rounds import PLAIN, RunState, exchanged
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run
from redgrape.testing import cases, comparing
from redgrape.testing import engines as testing_engines

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
C, SHAPE = 4, (1, 6, 6)

needs_accountant = pytest.mark.skipif(
    importlib.util.find_spec("dp_accounting") is None, reason="the extra redgrape[dp] is not installed"
)


def build(net: str = "mlp") -> rg.Net:
    return nets.build(net, SHAPE, C, 0)


def federation(counts: Sequence[Sequence[int]]) -> rg.Federation:
    return toys.federation(*counts, shape=SHAPE)


def site_of(clients: int, round: int = 1, **more: Any) -> ServerSite:
    return ServerSite(build, clients, C, 0, round, 5, CPU, **more)


class Round(NamedTuple):
    """The server's state before a round of all clients, their updates, what the server got of them, its new state."""

    before: dict[str, Any]
    updates: dict[int, Any]
    received: Received
    after: dict[str, Any]


def one_round(
    method: Any, counts: Sequence[Sequence[int]], server: Any = None, round: int = 1, **settings: Any
) -> Round:
    exchange = Exchange(**settings)
    half = ClientHalf(method, federation(counts), build, 0, 5, CPU, exchange=exchange)
    site = site_of(len(counts), round)
    before = tree.ordered(method.init_server(build().state_dict(), site)) if server is None else server
    broadcast = tree.ordered(method.broadcast(before))
    updates = {k: half.run(k, broadcast, None, round).update for k in range(len(counts)) if sum(counts[k])}
    received = exchange.receive(updates, method.parts(broadcast["model"], site), site)
    return Round(before, updates, received, tree.ordered(method.server_update(before, received, site)))


def parts_of(method: Any, C: int = C) -> Parts:
    return exchanged(method, toys.server_site(3, C))[0]


def features_of(model: Any, example: rg.Examples) -> Tensor:
    net = build()
    net.load_state_dict(model)
    with torch.no_grad():
        return net.eval().encoder(example.inputs(torch.arange(len(example)), torch.float32))


def small(**options: Any) -> dict[str, Any]:
    return {"epochs": 1, "batch_size": 4, "lr": 0.05, **options}


# The attack on the paper's mode


def test_one_example_gives_its_features_to_the_server_and_to_every_client() -> None:
    """Class 3: client 0 has one example of it, nobody else any. A row of its prototype over the same entry of the bias
    is the example's feature vector: for the server in the update, for every client in the next broadcast."""
    counts = [[6, 2, 0, 1], [4, 5, 3, 0], [3, 3, 2, 0]]
    method = RedGrape(**small())
    before, updates, _, after = one_round(method, counts)
    victim = federation(counts).client(0).take([8])
    h = features_of(before["model"], victim)[0]
    assert int(victim.labels[0]) == 3 and float(h.norm()) > 0.1
    sent = updates[0]["prototypes"]
    row = sent["classes"].tolist().index(3)
    broadcast = method.broadcast(after)
    assert bool(broadcast["seen"][3])
    for j in range(C):
        for weight, bias in (
            (sent["weight"][row], sent["bias"][row]),
            (broadcast["prototypes"]["weight"][3], broadcast["prototypes"]["bias"][3]),
        ):
            recovered = weight[j] / bias[j]
            assert float((recovered - h).norm() / h.norm()) < 1e-5


def test_the_private_preset_sends_and_releases_nothing_of_it() -> None:
    counts = [[16, 9, 8, 1], [9, 8, 7, 0], [8, 2, 8, 0]]
    method = RedGrape(**small())
    _, updates, _, after = one_round(method, counts, preset="private")
    assert [u["prototypes"]["classes"].tolist() for u in updates.values()] == [[0, 1, 2], [0, 1], [0, 2]]
    assert after["seen"].tolist() == [True, False, False, False]  # only class 0 has three clients
    for name in ("weight", "bias"):
        assert after["prototypes"][name][0].any()
        assert not after["prototypes"][name][1:].any()
        assert not method.broadcast(after)["prototypes"][name][1:].any()


def _attacks() -> Any:
    pytest.importorskip("scipy")
    spec = importlib.util.spec_from_file_location("leak", ROOT / "benchmarks" / "leak.py")
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = benchmark  # dataclasses look their module up
    spec.loader.exec_module(benchmark)
    return benchmark


@pytest.mark.parametrize("name", ["private", "fedavg"])
def test_the_model_s_own_update_tells_of_a_single_example(name: str) -> None:
    """Where no other example is taken for its class, row c of the gradient is (p_c - 1) h / n, its bias (p_c - 1) / n:
    the bias rises, those of classes that are not there fall, and one division gives h."""
    benchmark = _attacks()
    random = torch.Generator().manual_seed(0)
    x = torch.rand(40, 1, 4, 4, generator=random)
    labels = torch.tensor([7, *[0] * 39])
    build = partial(nets.build, "linear", (1, 4, 4), 10, 0)
    model = {key: t.clone() for key, t in build().state_dict().items()}
    model["classifier.bias"] = torch.tensor([0.0] + [-12.0] * 9)
    (case,) = [case for case in benchmark.UPDATES if (case.name, case.classes) == (name, (0,))]
    told, alarms, absent, error, cosine = benchmark.attack_update(case, model, build, rg.Examples(x, labels), 0)
    assert told and (alarms, absent) == (0, 8)
    assert error < 0.01 and cosine > 0.999


def test_a_newcomer_stands_out_of_a_secure_sum() -> None:
    """With memory the sum of a round is the difference of two sums without. With one new site, it is nearly that site's
    own gradient; the sum over all ten sites is far from it."""
    benchmark = _attacks()
    random = torch.Generator().manual_seed(0)
    x, labels = torch.rand(400, 1, 4, 4, generator=random), torch.arange(400) % 10
    build = partial(nets.build, "linear", (1, 4, 4), 10, 0)
    sites, known = benchmark.sites_around(rg.Examples(x, labels), 7, 2)
    assert [int((site.labels == 7).sum()) for site in sites] == [1, 1, *[0] * 8]
    assert len(known) == 400 - 10 * 20 - 2
    cases = {case.name: case for case in benchmark.SUMS}
    found = {}
    for name in ("Vine", "Vine, stateless"):
        seen = benchmark.observed(cases[name], build().state_dict(), build, sites)
        for view in ("single", "difference", "sum"):
            found[name, view] = torch.from_numpy(benchmark.seen_in(cases[name], seen, view, 7)[0])
    for view in ("single", "difference", "sum"):
        torch.testing.assert_close(found["Vine", view], found["Vine, stateless", view], rtol=1e-4, atol=1e-5)
    single = found["Vine", "single"]
    assert (found["Vine", "difference"] - single).norm() < 0.2 * single.norm()
    assert (found["Vine", "sum"] - single).norm() > 0.5 * single.norm()


def test_floors_alone_do_not_stop_a_server_that_solves_for_the_features() -> None:
    """Of n < C examples a prototype has as many equations as unknowns: all n feature vectors come out."""
    benchmark = _attacks()
    random = torch.Generator().manual_seed(0)
    classifier = torch.nn.Linear(20, 10)
    torch.nn.init.normal_(classifier.weight, std=0.3, generator=random)
    torch.nn.init.zeros_(classifier.bias)
    h = torch.rand(4, 20, generator=random)
    labels = torch.full((4,), 3)
    sent = class_mean_gradients(classifier, [(h, labels)], torch.tensor([3]))
    prototype = {name: t[0] for name, t in sent.items()}
    found = benchmark.fit(prototype, 3, classifier, 4, 50, 0)  # about half of the starts end in another minimum
    errors = (torch.cdist(found, h) / h.norm(dim=1)).min(dim=0).values
    assert int((errors < 0.1).sum()) == 4


# Floors


@pytest.mark.parametrize("form", [{}, {"class_clip": 1e9}])
def test_a_class_with_too_few_clients_keeps_its_last_release(form: dict[str, Any]) -> None:
    method = RedGrape(**small())
    first = one_round(method, [[5, 4, 3, 0], [4, 4, 0, 2], [3, 0, 0, 0]], min_clients=2, **form).after
    assert first["seen"].tolist() == [True, True, False, False]
    counts = [[5, 0, 3, 2], [4, 4, 2, 0]]
    second = one_round(method, counts, first, round=2, min_clients=2, **form).after
    assert second["seen"].tolist() == [True, True, True, False]
    assert second["age"].tolist() == [0, 1, 0, 0]
    again, released = one_round(method, counts, first, round=2, **form).received.table("prototypes")
    assert released.tolist() == [True] * 4
    for name, table in second["prototypes"].items():
        assert torch.equal(table[1], first["prototypes"][name][1])  # one client: the last release stays
        assert not torch.equal(table[0], first["prototypes"][name][0])
        assert not table[3].any()
        for c in (0, 2):  # what is released is what it would be without the floor
            torch.testing.assert_close(table[c], again[name][c])


def test_no_release_of_too_few_clients_in_many_rounds() -> None:
    """10,000 class-rounds with random reports: the new table has a class's mean where enough report it, and the bits of
    the old one where not."""
    random = np.random.default_rng(0)
    classes, least, tries, releases = 100, 3, 0, 0
    exchange, site = Exchange(min_clients=least), toys.server_site(6, classes)
    parts: Parts = {"rows": ClassRows({"weight": torch.zeros(classes, 2), "bias": torch.zeros(classes)})}
    table = {"weight": torch.zeros(classes, classes, 2), "bias": torch.zeros(classes, classes)}
    for _ in range(100):
        held = torch.from_numpy(random.random((6, classes)) < 0.35)
        numbers = torch.from_numpy(random.normal(size=(6, classes, classes, 3))).float()
        updates = {}
        for k in range(6):
            rows = held[k].nonzero().flatten()
            mine = {"weight": numbers[k, rows, :, :2], "bias": numbers[k, rows, :, 2]}
            updates[k] = {"rows": {"classes": rows, **mine}}
        new, released = exchange.receive(updates, parts, site).table("rows", table)
        enough = held.sum(dim=0) >= least
        assert torch.equal(released, enough)
        mean = (numbers * held[:, :, None, None]).sum(dim=0) / held.sum(dim=0).clamp(min=1)[:, None, None]
        torch.testing.assert_close(new["weight"][enough], mean[enough][..., :2])
        assert torch.equal(new["weight"][~enough], table["weight"][~enough])
        assert torch.equal(new["bias"][~enough], table["bias"][~enough])
        table, tries, releases = new, tries + classes, releases + int(enough.sum())
    assert tries == 10_000 and 1000 < releases < 9000


def test_creff_reports_and_uses_what_the_floors_let_through() -> None:
    counts = [[9, 3, 8, 0], [8, 9, 1, 0], [9, 8, 0, 2]]
    before, updates, received, after = one_round(CReFF(**small(**CReFF.cheap)), counts, preset="private")
    assert [u["class_gradients"]["classes"].tolist() for u in updates.values()] == [[0, 2], [0, 1], [0, 1]]
    changed = (after["features"] != before["features"]).flatten(1).any(dim=1)
    assert changed.tolist() == [True, False, False, False]
    assert received.contributors("class_gradients").tolist() == [3, 2, 1, 0]
    method = CReFF(**small(**CReFF.cheap, gradient_draw="all"))
    everything, some = one_round(method, counts).updates, one_round(method, counts, min_count=8).updates
    for k, rows in ((0, [0, 2]), (1, [0, 1]), (2, [0, 1])):
        all_of = everything[k]["class_gradients"]
        for name in ("weight", "bias"):
            torch.testing.assert_close(some[k]["class_gradients"][name], all_of[name][rows])


def test_min_count_decides_what_a_client_reports() -> None:
    counts = [9, 8, 5, 2]
    for least in (1, 5, 8, 10):
        site = ClientSite(build, 1, C, 0, 2, 5, CPU, 0, toys.examples(counts, shape=SHAPE), least)
        assert site.reported.tolist() == [n >= least for n in counts]
    assert not class_rows(parts_of(RedGrape(use_prototypes=False)))


def test_robust_rules_keep_the_floor() -> None:
    counts = [[5, 4, 3, 0], [4, 4, 0, 2], [3, 4, 2, 0], [3, 0, 2, 0]]
    for rule in ("median", "trimmed_mean", "norm_clipping"):
        after = one_round(RedGrape(**small()), counts, rule=rule, min_clients=4).after
        assert after["seen"].tolist() == [True, False, False, False]
        assert not after["prototypes"]["weight"][1:].any()


def test_the_number_of_contributors_is_recorded() -> None:
    record = one_round(RedGrape(**small()), [[5, 4, 2, 0], [4, 1, 0, 3]], min_count=3, min_clients=2).received.record()
    assert record["class_contributors"] == [2, 1, 0, 1]
    assert record["class_released"] == [True, False, False, False]


# Noise

NOISY = Exchange(clip=1.0, noise=0.5, class_clip=1.0, class_noise=0.5, randomness="seed")


def test_noise_is_standard_normal() -> None:
    """Mean 0, variance 1 and the shares of a normal distribution within one, two and three deviations, in 600,000
    numbers (standard errors below 0.002)."""
    z = noise.gaussian(b"stream", 600_001)
    assert z.shape == (600_001,) and z.dtype == torch.float64
    assert abs(float(z.mean())) < 0.008 and abs(float(z.var()) - 1) < 0.012
    for k, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
        assert abs(float((z.abs() < k).double().mean()) - share) < 0.004
    assert abs(float((z[:-1] * z[1:]).mean())) < 0.008
    half = len(z) // 2
    assert abs(float((z[:half] * z[half : 2 * half]).mean())) < 0.01
    assert len(z.unique()) == len(z)


def test_noise_hangs_on_key_purpose_and_value() -> None:
    value = torch.arange(8.0)
    made = [
        noise.with_noise(value, 1.0, b"key", "a", 1) - value,
        noise.with_noise(value, 1.0, b"other", "a", 1) - value,
        noise.with_noise(value, 1.0, b"key", "b", 1) - value,
        noise.with_noise(value, 1.0, b"key", "a", 2) - value,
        noise.with_noise(value + 1, 1.0, b"key", "a", 1) - (value + 1),  # the difference must not be bare
    ]
    for i, first in enumerate(made):
        for other in made[i + 1 :]:
            assert float((first - other).abs().min()) > 1e-4
    assert torch.equal(made[0], noise.with_noise(value, 1.0, b"key", "a", 1) - value)
    assert torch.equal(noise.with_noise(value, 0.0, b"key"), value)
    assert noise.gaussian(b"", 0).shape == (0,)


def test_noise_needs_a_secret_or_the_seed() -> None:
    """Both the model and the second classifier get it; another secret gives other noise, and no print shows it."""
    method, noise = RedGrape(**small()), {"clip": 0.1, "noise": 3.0}
    before, updates, _, clean = one_round(method, [[5, 4, 3, 0], [4, 4, 0, 2], [4, 4, 2, 2]], clip=0.1)
    parts = method.parts(before["model"], site_of(3))

    def made(site: ServerSite, **more: Any) -> Any:
        return method.server_update(before, Exchange(**noise, **more).receive(updates, parts, site), site)

    with pytest.raises(ConfigError, match="needs a secret"):
        made(site_of(3))
    sites = [site_of(3, secret=bytes([i]) * 32) for i in (1, 2)]
    found = [made(site_of(3), randomness="seed"), *(made(site) for site in sites)]
    assert tree.equal(found[0], made(site_of(3), randomness="seed")) and tree.equal(found[1], made(sites[0]))
    assert "secret" not in repr(sites[0]) and repr(bytes([1]) * 32) not in repr(sites[0])
    for group, name in (("model", "classifier.weight"), ("W_hat", "weight")):
        released = [state[group][name] for state in [clean, *found]]
        for i, one in enumerate(released):
            assert not any(torch.equal(one, other) for other in released[i + 1 :])


def test_noise_on_class_rows_falls_on_sums_and_numbers() -> None:
    """Of 40 clients with one class: mean = (sum + noise) / (40 + noise); a class that nobody has is held back."""
    exchange = Exchange(min_clients=3, class_clip=2.0, class_noise=0.5, randomness="seed")
    parts: Parts = {"rows": ClassRows({"weight": torch.zeros(C, 30)})}
    updates = {k: {"rows": {"classes": torch.tensor([1]), "weight": torch.full((1, C, 30), 0.05)}} for k in range(40)}
    scales, added, empty = [], [], 0
    for round in range(1, 41):
        table, released = exchange.receive(updates, parts, site_of(40, round)).table("rows")
        assert bool(released[1])
        empty += int(released[[0, 2, 3]].sum())
        scale = float(table["weight"][1].mean()) / 0.05
        scales.append(scale)
        added.append((table["weight"][1] / scale - 0.05) * 40)
    assert empty == 0
    assert np.mean(scales) == pytest.approx(1, abs=0.02)
    assert float(torch.stack(added).std()) == pytest.approx(0.5 * 2.0, rel=0.05)


def test_numbers_of_clients_are_released_with_noise_alone() -> None:
    """Of ten clients with a row of length 2, in 400 rounds. The number, 10 + noise, is at least 10 in half of them. The
    mean row is (20 + 2 noise) / (10 + noise). So it varies by sqrt(2) 0.5 / 10 of itself, and without noise on the
    number by 0.5 / 10. All figures are within four standard errors."""
    parts: Parts = {"rows": ClassRows({"w": torch.zeros(1)})}
    updates = {k: {"rows": {"classes": torch.tensor([1]), "w": torch.tensor([[2.0]])}} for k in range(10)}
    found: dict[int, list[float]] = {1: [], 10: []}
    for least, means in found.items():
        exchange = Exchange(min_clients=least, class_clip=2.0, class_noise=0.5, randomness="seed")
        for round in range(1, 401):
            received = exchange.receive(updates, parts, replace(site_of(10, round), rounds=400))
            table, released = received.table("rows")
            assert received.record()["class_released"][1] == bool(released[1])
            means += [float(table["w"][1])] if released[1] else []
    assert len(found[1]) == 400 and 160 < len(found[10]) < 240
    assert np.mean(found[1]) == pytest.approx(2, rel=0.012)
    assert np.std(found[1]) == pytest.approx(2 * 2**0.5 * 0.05, rel=0.12)


@needs_accountant
def test_running_statistics_are_refused() -> None:
    net = partial(nets.build, "resnet8", (3, 8, 8), C, 0)
    x = torch.rand(8, 3, 8, 8)
    data = rg.Federation([rg.Examples(x, torch.arange(8) % C)], rg.Examples(x, torch.arange(8) % C), C)
    with pytest.raises(ConfigError, match="running statistics"):
        rg.Training(FedAvg(), data, net, rounds=1, exchange=NOISY)
    rg.Training(FedAvg(freeze_encoder=True), data, net, rounds=1, exchange=NOISY).close()


def test_a_missing_accountant_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[dp\]'"):
        account.check_installed()


def test_noise_keeps_the_contract() -> None:
    """A second run, and one resumed after any round, have the same bits; any clients may be missing."""
    run = partial(cases.run, cases.small(RedGrape()), replace(cases.named_net("mlp"), exchange=NOISY))
    straight = run()
    comparing.must_equal(straight, run(), "a second run")
    for state in straight[:-1]:
        stored = RunState(state.round, tree.from_bytes(tree.to_bytes(state.server)), state.clients)
        comparing.must_equal(straight[state.round :], run(start=stored), f"the run resumed after round {state.round}")
    comparing.check_accepted(run(partial(testing_engines.Dropping, keep=[1])), "one answer a round")


# Epsilon


def gaussian_delta(epsilon: float, mu: float) -> float:
    """delta of a mu-GDP mechanism at this epsilon, in closed form (Balle and Wang 2018; Dong et al. 2019)."""
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)
    a, b = (
        float(normal.cdf(torch.tensor(x, dtype=torch.float64))) for x in (mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu)
    )
    return a - math.exp(epsilon) * b


def closed_form(mechanisms: Sequence[Mechanism], rounds: int, delta: float) -> float:
    """Gaussians compose to one: mu^2 = rounds sum count / multiplier^2; epsilon by bisection."""
    mu = math.sqrt(rounds * sum(m.times / m.multiplier**2 for m in mechanisms))
    low, high = 0.0, 700.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, mu) > delta else (low, middle)
    return high


@needs_accountant
@pytest.mark.parametrize("rounds", [1, 10, 100])
@pytest.mark.parametrize(("model", "prototypes"), [(1.0, 10.0), (5.0, 20.0), (20.0, 100.0)])
def test_epsilon_is_that_of_the_closed_form(model: float, prototypes: float, rounds: int) -> None:
    """Never below the exact value, and at most 12 % above, which the step from Renyi divergence costs."""
    exchange = Exchange(clip=1.0, noise=model, class_clip=1.0, class_noise=prototypes)
    mechanisms = exchange.mechanisms(parts_of(RedGrape()), 10)
    exact = closed_form(mechanisms, rounds, 1e-5)
    found = epsilon(mechanisms, rounds, 1e-5)
    assert exact - 1e-6 <= found <= 1.12 * exact
    assert closed_form(mechanisms, rounds, 1e-3) - 1e-6 <= epsilon(mechanisms, rounds, 1e-3) < found


def test_the_client_with_the_most_rounds_decides() -> None:
    """Clients 1 and 2 took part in two of the three releases, all others in one."""
    assert account.most_rounds([{"clients": clients} for clients in ([0, 1], [1, 2], [2, 3])]) == 2
    assert account.most_rounds([]) == 0


@needs_accountant
def test_a_later_line_takes_back_nothing_that_was_spent(tmp_path: Path) -> None:
    """Whatever mechanisms and clients come later."""
    ledger = PrivacyLedger(tmp_path)
    first = ledger.spend(1, [0], "a", [Mechanism("model", 1.0, 1)], 1e-5)
    assert ledger.spend(2, [1], "b", [Mechanism("model", 50.0, 1)], 1e-5) == first
    assert ledger.spend(3, [0], "c", [], 1e-5) is None
    assert ledger.spend(4, [1], "d", [Mechanism("model", 50.0, 1)], 1e-5) is None


@pytest.mark.parametrize("name", methods.names())
def test_mechanisms_follow_from_the_parts(name: str) -> None:
    """The model once, whatever number of directions are clipped together. Of each class of class rows the sum and the
    number of clients. Noise on one of them alone counts the other as bare, and none at all counts nothing."""
    parts = parts_of(methods.load(name)())
    tables = {"redgrape": "prototypes", "creff": "class_gradients", "fednh": "means", "rucr": "means"}
    rows = [(tables[name], 5.0, 14)] if name in tables else []
    assert Exchange(clip=1.0, class_clip=1.0).mechanisms(parts, 7) == []
    both = Exchange(clip=1.0, noise=2.0, class_clip=1.0, class_noise=5.0).mechanisms(parts, 7)
    assert both == [("model", 2.0, 1), *rows]
    alone = Exchange(class_clip=1.0, class_noise=5.0).mechanisms(parts, 7)
    assert alone == ([("model", 0.0, 1), *rows] if rows else [])
    if name == "scaffold":
        assert directions(parts) == ["delta", "delta_c"]


@needs_accountant
def test_class_rows_and_model_are_counted_together() -> None:
    def spent(method: Any, rounds: int = 5, **settings: Any) -> float:
        exchange = Exchange(clip=1.0, class_clip=1.0, **settings)
        return epsilon(exchange.mechanisms(parts_of(method), 10), rounds, 1e-5)

    both = spent(RedGrape(), noise=2.0, class_noise=10.0)
    without = spent(RedGrape(use_prototypes=False), noise=2.0)
    assert without < both < math.inf
    assert spent(RedGrape(), noise=2.0) == spent(RedGrape(), class_noise=2.0) == math.inf  # the other part has none
    assert spent(FedAvg(), noise=2.0) == spent(Scaffold(), noise=2.0) == without
    assert spent(FedAvg()) == math.inf
    assert spent(FedAvg(), rounds=0, noise=2.0) == 0


def test_in_a_secure_sum_a_lying_site_is_not_bounded() -> None:
    """The server clips (30, 40) to length 1. In a sum nobody sees it, and a site that does not clip counts in full."""
    parts: Parts = {"delta": Direction({"w": torch.zeros(2)}), "count": Count()}
    exchange, site = Exchange(clip=1.0), toys.server_site(2, C)
    honest, long = ({"delta": {"w": torch.tensor(w)}, "count": torch.tensor(1)} for w in ([0.0, 0.0], [30.0, 40.0]))
    plain = exchange.receive({0: honest, 1: long}, parts, site).mean("delta")["w"]
    added = [exchange.summand(honest, parts, C), exchange.summand(long, parts, C)]
    lie = [added[0], PLAIN.summand(long, parts, C)]
    summed, lied = (
        exchange.receive_sum(testing_engines.summed(s), [0, 1], parts, {"w": torch.ones(2)}, site).mean("delta")["w"]
        for s in (added, lie)
    )
    assert plain.tolist() == summed.tolist() == pytest.approx([0.3, 0.4]) and lied.tolist() == [15, 20]
    assert "A lying client is then not bounded" in str(exchange_module.__doc__)


# The ledger


def private_run(tiny: Callable[..., dict[str, Any]], **more: Any) -> dict[str, Any]:
    values = tiny(rounds=4, method__name="redgrape", clients_per_round=2)
    return values | {"exchange": {"clip": 1.0, "noise": 2.0, "class_clip": 1.0, "class_noise": 5.0, **more}}


def carried_out(path: Path, values: dict[str, Any], rounds: int | None = None) -> RunFolder:
    folder = (
        RunFolder.open(path)
        if (path / "experiment.toml").exists()
        else RunFolder.create(path, Experiment.parse(values))
    )
    for step in Run(folder, workers=1).steps():
        if step.state.round == rounds:
            break
    return folder


@needs_accountant
def test_epsilon_is_on_the_disk_before_the_round_is(tiny: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """The line of a round is there before its checkpoint and its metrics; epsilon grows and is what the accountant
    says for the client that took part most often."""
    folder = RunFolder.create(tmp_path / "run", Experiment.parse(private_run(tiny)))
    run = Run(folder, workers=1)
    seen: list[float] = []

    def append(record: Any, seconds: Any) -> None:
        releases = PrivacyLedger(folder.path).releases()
        assert [r["round"] for r in releases] == list(range(1, record["round"] + 1))
        assert record["epsilon"] == releases[-1]["epsilon"]
        seen.append(record["epsilon"])
        RunFolder.append(folder, record, seconds)

    folder.append = append  # type: ignore[method-assign]
    for _ in run.steps():
        pass
    assert len(seen) == 4 and seen == sorted(seen)
    releases = PrivacyLedger(folder.path).releases()
    mechanisms = folder.experiment().exchange.mechanisms(parts_of(RedGrape()), 4)
    took_part = [k for r in releases for k in r["clients"]]
    most = max(took_part.count(k) for k in took_part)
    assert releases[-1]["most_rounds"] == most
    assert seen[-1] == epsilon(mechanisms, most, 1e-5)


class SummedRun(Run):
    """A run of clients whose answers come as secure sums."""

    def _engine(self) -> Any:
        return toys.Summing


@needs_accountant
def test_a_secure_sum_spends_what_updates_spend(tiny: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """The clip is at the sites then, and goes together with noise. The ledger has the same lines but for digests."""
    ledgers = []
    for kind in (Run, SummedRun):
        folder = RunFolder.create(tmp_path / kind.__name__, Experiment.parse(private_run(tiny)))
        records = [step.record for step in kind(folder, workers=1).steps()]
        releases = PrivacyLedger(folder.path).releases()
        assert [record["epsilon"] for record in records] == [release["epsilon"] for release in releases]
        bits = ("digest", "checksum")
        ledgers.append([{key: value for key, value in r.items() if key not in bits} for r in releases])
    assert ledgers[0] == ledgers[1] and len(ledgers[0]) == 4 and 0 < ledgers[0][-1]["epsilon"] < math.inf


@needs_accountant
def test_the_key_is_the_owners_alone_and_gives_the_same_bits_again(
    tiny: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    folder = carried_out(tmp_path / "a", private_run(tiny), rounds=2)
    key = folder.path / "noise.key"
    assert len(key.read_bytes()) == 32
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    (tmp_path / "b").mkdir(mode=0o700)
    for name in ("experiment.toml", "noise.key"):
        (tmp_path / "b" / name).write_bytes((folder.path / name).read_bytes())
    (tmp_path / "b/noise.key").chmod(0o600)
    resumed, straight = carried_out(folder.path, {}), carried_out(tmp_path / "b", {})
    assert resumed.summary()["state"] == straight.summary()["state"]  # type: ignore[index]
    assert (resumed.path / "metrics.jsonl").read_bytes() == (straight.path / "metrics.jsonl").read_bytes()
    assert len(PrivacyLedger(resumed.path).releases()) == 4
    other = carried_out(tmp_path / "c", private_run(tiny))
    assert other.summary()["state"] != straight.summary()["state"]  # type: ignore[index]
    for path in resumed.path.rglob("*"):
        if path.is_file() and path.name != "noise.key":
            assert key.read_bytes() not in path.read_bytes()
            assert key.read_bytes().hex().encode() not in path.read_bytes()


@needs_accountant
def test_a_lost_or_open_key_stops_the_run(tiny: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    folder = carried_out(tmp_path / "run", private_run(tiny), rounds=2)
    key = folder.path / "noise.key"
    for mode in (0o640, 0o604):
        key.chmod(mode)
        with pytest.raises(StorageError, match="can be read by others"):
            carried_out(folder.path, {})
    key.chmod(0o600)
    content = key.read_bytes()
    key.write_bytes(content[:31])
    with pytest.raises(StorageError, match="31 bytes"):
        carried_out(folder.path, {})
    key.unlink()
    with pytest.raises(StorageError, match="missing"):
        carried_out(folder.path, {})


@needs_accountant
def test_epsilon_never_decreases_when_rounds_are_done_again(
    tiny: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Checkpoints every third round only: rounds are repeated after a stop. With the same answers they are the same
    releases; with others they are more, and cost more."""
    values = private_run(tiny) | {"checkpoint_every": 3, "rounds": 5}
    folder = carried_out(tmp_path / "run", values, rounds=2)  # stopped before any checkpoint
    ledger = PrivacyLedger(folder.path)
    before = ledger.releases()
    carried_out(folder.path, {}, rounds=4)
    assert ledger.releases()[:2] == before
    assert [r["round"] for r in ledger.releases()] == [1, 2, 3, 4]
    mechanisms = [Mechanism("model", 2.0, 1)]
    spent = ledger.releases()[-1]["epsilon"]
    again = ledger.spend(4, [0, 1, 2], "other answers", mechanisms, 1e-5)
    assert again is not None and again >= spent
    assert len(ledger.releases()) == 5
    assert ledger.spend(2, before[1]["clients"], before[1]["digest"], mechanisms, 1e-5) == before[1]["epsilon"]
    assert len(ledger.releases()) == 5
    epsilons = [r["epsilon"] for r in ledger.releases()]
    assert epsilons == sorted(epsilons)


@needs_accountant
def test_a_run_does_not_go_on_where_its_ledger_lost_rounds(tiny: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Or epsilon would begin again, too small."""
    folder = carried_out(tmp_path / "run", private_run(tiny) | {"rounds": 5}, rounds=3)
    lines = folder.path / "privacy.jsonl"
    whole = lines.read_bytes()
    lines.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    with pytest.raises(StorageError, match="has no record of round 3"):
        carried_out(folder.path, {})
    lines.unlink()
    with pytest.raises(StorageError, match="has no record of round 1"):
        carried_out(folder.path, {})
    lines.write_bytes(whole)
    carried_out(folder.path, {})
    assert [r["round"] for r in PrivacyLedger(folder.path).releases()] == [1, 2, 3, 4, 5]


KILLED_IN_TURN = """
import os, shutil, sys
from pathlib import Path
from redgrape.runs.run import Run
from redgrape.runs.folder import RunFolder
folder = Path(sys.argv[1])
for n in (5, 12, 4):
    child = os.fork()
    if child == 0:
        os.environ["REDGRAPE_CRASH_AT"] = f"{'write' if n % 2 else 'fsync'}:{n}"
        for _ in Run(RunFolder.open(folder), workers=1).steps():
            pass
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    shutil.copytree(folder, folder.with_name(f"{n} ended with {code}"))
"""


@needs_accountant
def test_epsilon_survives_kills_at_every_write(tiny: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """The process ends at the n-th write or fsync. What was let out (a metrics line) always has its line of epsilon,
    epsilon never decreases, and the run ends as one that was never killed."""
    values = private_run(tiny) | {"rounds": 3}
    straight = carried_out(tmp_path / "straight", values)
    folder = RunFolder.create(tmp_path / "run", Experiment.parse(values))
    (folder.path / "noise.key").write_bytes((straight.path / "noise.key").read_bytes())
    (folder.path / "noise.key").chmod(0o600)
    subprocess.run([sys.executable, "-c", KILLED_IN_TURN, str(folder.path)], check=True)
    spent, kills = 0.0, len(list(tmp_path.glob("* ended with 137")))
    for n in (5, 12, 4):
        (left,) = tmp_path.glob(f"{n} ended with *")
        releases = PrivacyLedger(left).releases()
        now = releases[-1]["epsilon"] if releases else 0.0
        assert now >= spent
        spent = now
        metrics = left / "metrics.jsonl"
        lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
        assert all(json.loads(line)["round"] <= len(releases) for line in lines)
    assert kills >= 2
    carried_out(folder.path, {})
    assert PrivacyLedger(folder.path).releases() == PrivacyLedger(straight.path).releases()
    assert folder.summary()["state"] == straight.summary()["state"]  # type: ignore[index]


def test_a_damaged_ledger_is_noticed_and_a_torn_line_is_cut(tmp_path: Path) -> None:
    ledger, lines = PrivacyLedger(tmp_path), tmp_path / "privacy.jsonl"
    for round in (1, 2, 3):
        assert ledger.spend(round, [0, round], f"{round}", [], 1e-5) is None  # no noise: infinite
    whole = lines.read_bytes()
    assert [r["most_rounds"] for r in ledger.releases()] == [1, 2, 3]
    lines.write_bytes(whole[:-9])
    assert len(ledger.releases()) == 2
    ledger.spend(3, [0, 3], "3", [], 1e-5)
    assert lines.read_bytes() == whole
    for damaged in (whole.replace(b'"round": 2', b'"round": 4'), b"\n".join(whole.split(b"\n")[1:]), b"{}\n", b"[]\n"):
        lines.write_bytes(damaged)
        with pytest.raises(StorageError, match="damaged"):
            ledger.releases()
    lines.write_bytes(b"torn")
    ledger.spend(1, [0, 1], "1", [], 1e-5)
    assert lines.read_bytes() == whole.split(b"\n")[0] + b"\n"


@needs_accountant
def test_noise_of_the_seed_needs_no_key(tiny: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    values = private_run(tiny, randomness="seed") | {"rounds": 2}
    one, two = carried_out(tmp_path / "one", values), carried_out(tmp_path / "two", values)
    assert not (one.path / "noise.key").exists()
    assert one.summary()["state"] == two.summary()["state"]  # type: ignore[index]
    assert "is meaningless" in " ".join(in_words(disclosed(RunView.read(one.path)))["differential privacy"])


def test_a_run_without_noise_has_no_ledger(tiny: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    folder = carried_out(tmp_path / "run", tiny(method__name="redgrape"))
    assert not (folder.path / "noise.key").exists() and not (folder.path / "privacy.jsonl").exists()
    assert "epsilon" not in folder.metrics()[0]


# The report


def by_hand(folder: RunFolder, least: int, clients: int) -> dict[str, int]:
    """Counts from the federation's own table, client by client and class by class."""
    counts = folder.environment()["client_counts"]
    found = dict.fromkeys(("reports", "single", "releases", "alone", "of_one", "solvable"), 0)
    for record in folder.metrics():
        for c in range(len(counts[0])):
            holders = [k for k in record["answered"] if counts[k][c] >= least]
            found["reports"] += len(holders)
            found["single"] += sum(counts[k][c] == 1 for k in holders)
            if holders and len(holders) >= clients:
                found["releases"] += 1
                found["alone"] += len(holders) == 1
                found["of_one"] += len(holders) == 1 and counts[holders[0]][c] == 1
                found["solvable"] += sum(counts[k][c] for k in holders) < len(counts[0])
    return found


@pytest.mark.parametrize(("least", "clients"), [(1, 1), (3, 1), (2, 2)])
def test_the_report_counts_what_happened(
    tiny: Callable[..., dict[str, Any]], tmp_path: Path, least: int, clients: int
) -> None:
    values = tiny(rounds=5, method__name="redgrape", data__clients=8, data__alpha=0.3, clients_per_round=3, seed=5)
    values["exchange"] = {"min_count": least, "min_clients": clients}
    folder = carried_out(tmp_path / "run", values)
    expected = by_hand(folder, least, clients)
    facts = disclosed(RunView.read(folder.path))
    reports = facts["class_reports"]
    assert reports["server"]["reports"] == expected["reports"]
    assert reports["server"]["single_example_reports"] == expected["single"]
    assert reports["clients"]["releases"] == expected["releases"]
    assert reports["clients"]["releases_from_one_client"] == expected["alone"]
    assert reports["clients"]["releases_of_one_example"] == expected["of_one"]
    assert reports["clients"]["solvable_releases"] == expected["solvable"]
    if least == 1:
        assert expected["single"] > 0 and expected["alone"] > 0  # else this data shows nothing
        assert "could compute the exact features of" in str(leak_in_one_line(facts))
    else:
        assert expected["single"] == 0
        assert leak_in_one_line(facts) is None
    counts = folder.environment()["client_counts"]
    answered = {k for record in folder.metrics() for k in record["answered"]}
    few = [counts[k][c] for k in answered for c in range(4) if least <= counts[k][c] < 4]
    assert (reports["server"]["solvable_pairs"], reports["server"]["solvable_examples"]) == (len(few), sum(few))
    assert reports["server"]["classes_of_clients"] == {
        str(k): [c for c, n in enumerate(counts[k]) if n >= least] for k in sorted(answered)
    }


def test_the_report_of_real_sites_tells_only_what_the_server_knows(
    tiny: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Without the counts of the clients, which only they know, the records have to do."""
    folder = carried_out(tmp_path / "run", tiny(rounds=3, method__name="redgrape"))
    known = disclosed(RunView.read(folder.path))["class_reports"]
    path = folder.path / "environment.json"
    environment = json.loads(path.read_text())
    del environment["client_counts"]
    path.write_text(json.dumps(environment))
    (folder.path / "SHA256SUMS").unlink()
    facts = disclosed(RunView.read(folder.path))
    assert facts["class_reports"]["server"] == {"reports": known["server"]["reports"]}
    assert facts["class_reports"]["clients"] == known["clients"] | {
        "releases_of_one_example": None,
        "solvable_releases": None,
    }
    assert "only the clients know" in " ".join(in_words(facts)["the server"])
    assert leak_in_one_line(facts) is None


@pytest.mark.parametrize(
    ("asked", "words"),
    [(1, "a single client answered, that client's own change"), (3, "fewest answers in a round were 3")],
)
def test_the_report_tells_the_fewest_answers_behind_a_round(
    tiny: Callable[..., dict[str, Any]], tmp_path: Path, asked: int, words: str
) -> None:
    folder = carried_out(tmp_path / "run", tiny(rounds=2, clients_per_round=asked, method__name="fedavg"))
    facts = disclosed(RunView.read(folder.path))
    assert facts["fewest_answers"] == asked
    assert words in " ".join(in_words(facts)["the clients"])


def test_the_command(
    tiny: Callable[..., dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    folder = carried_out(tmp_path / "run", tiny(rounds=2, method__name="redgrape"))
    assert cli.run(["privacy", "run"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for party in ("the server", "the clients", "differential privacy"):
        assert f"\n{party}\n- " in text
    assert "exact feature vector" in " ".join(text.split())
    assert cli.run(["privacy", str(folder.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(disclosed(RunView.read(folder.path))))
    assert cli.run(["privacy", str(tmp_path / "none")]) == 74
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("method", "word"),
    [
        ("fedavg", "no class by name"),
        ("lda", "answers, without an update of the model"),
        ("lda", "how many examples of each class it holds, and their mean feature vector. The sum of a single example"),
        ("creff", "what the server makes of class rows of 4 of 4 classes"),
        ("balanced_softmax", "each client was asked for its class_counts. The method needs the sum alone"),
    ],
)
def test_other_methods_are_told_of_too(
    tiny: Callable[..., dict[str, Any]], tmp_path: Path, method: str, word: str
) -> None:
    values = tiny(rounds=1, method__name=method)
    values["method"] |= {"prior": "global"} if method == "balanced_softmax" else methods.load(method).cheap
    folder = carried_out(tmp_path / "run", values)
    words = in_words(disclosed(RunView.read(folder.path)))
    assert word in " ".join(sentence for party in words.values() for sentence in party)


@pytest.mark.parametrize(
    ("data", "words"),
    [({"pooled": True}, "all examples: they are in one place"), ({"alone": "1"}, "nothing is exchanged")],
)
def test_without_a_federation_there_are_no_messages(
    tiny: Callable[..., dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    data: dict[str, Any],
    words: str,
) -> None:
    """Not even those of RedGrape, which sends a row for each class."""
    values = tiny(rounds=1, method__name="redgrape", clients_per_round=1)
    folder = carried_out(tmp_path / "run", values | {"data": values["data"] | data})
    facts = disclosed(RunView.read(folder.path))
    assert (facts["method"], facts["baseline"]) == (f"redgrape@{next(iter(data))}", next(iter(data)))
    assert facts["answers"] == 0 and facts["class_reports"] is None and leak_in_one_line(facts) is None
    assert cli.run(["privacy", str(folder.path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert words in text and f"({facts['method']}, " in text
    assert "the server -" not in text and "updates" not in text and "class" not in text


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({}, "a single row has; they come from sums over the clients, and the server sees each client's own"),
        ({"sites": ["N", "S"]}, "as agreed before; they come from sums over the clients, and the server sees each"),
        ({"secure_aggregation": True}, "a single row has; they come from sums over the clients"),
    ],
)
def test_the_columns_of_a_table_are_told_of(tmp_path: Path, more: dict[str, Any], end: str) -> None:
    """A column of the test set is no input. One of the four colours has a single row."""
    colours = ["red", "green", "blue"] * 20 + ["violet"]
    lines = [f"{i % 7},{i % 5},{c},{'mf'[i % 2]},{'NS'[i % 2]},{'ab'[i % 3 % 2]}" for i, c in enumerate(colours)]
    (tmp_path / "rows.csv").write_text("\n".join(["age,fold,colour,sex,site,kind", *lines]))
    data = {"source": str(tmp_path / "rows.csv"), "label": "kind", "site": "site", "test": "fold=1"}
    folder = carried_out(tmp_path / "run", {"rounds": 1, "data": data, "method": {"name": "fedavg", "lr": 0.1}})
    path = folder.path / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    (folder.path / "SHA256SUMS").unlink()
    facts = disclosed(RunView.read(folder.path))
    assert facts["columns"] == {
        "numbers": 1,
        "categories": 2,
        "most_values": {"column": "colour", "values": 4},
        "agreed": "sites" in more,
    }
    (told,) = in_words(facts)["anyone who gets the model"]
    beginning = "means and deviations of 1 column of numbers; every value of 2 columns of categories (most: 'colour', "
    assert told.startswith(f"{beginning}4 values), ") and end in told
    assert ("each client's own" in told) == ("secure_aggregation" not in more)


def test_noise_is_refused_where_columns_are_scaled_without_it(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("\n".join(["age,kind", *[f"{i % 7},{'ab'[i % 2]}" for i in range(60)]]))
    data = {"source": str(tmp_path / "rows.csv"), "label": "kind", "clients": 2}
    noise = {"clip": 1.0, "noise": 1.0, "randomness": "seed"}
    with pytest.raises(ConfigError, match="columns of a table are scaled by means and deviations"):
        carried_out(tmp_path / "run", {"rounds": 1, "data": data, "method": {"name": "fedavg"}, "exchange": noise})


def test_what_is_disclosed_follows_from_the_parts() -> None:
    """Gradients of fewer examples than classes can be solved for them, other rows of one alone; counts, a survey and a
    look at single updates are named."""
    delta: Parts = {"delta": Direction({"w": torch.zeros(1)}), "count": Count()}
    like = {"weight": torch.zeros(C, 2), "bias": torch.zeros(C)}
    assert disclosures(PLAIN, delta, {}, "", C) == {
        "averages": True,
        "beyond_averaging": "",
        "class_reports": None,
        "randomness": "secret",
    }
    asked = disclosures(PLAIN, delta, {"holders": 1}, "it runs each model", C)["beyond_averaging"]
    assert "asked for its holders" in asked and "The server looks at single updates: it runs each model." in asked
    floors = Exchange(min_count=3, min_clients=2, rule="median", byzantine=2, randomness="seed")
    told = disclosures(floors, {**delta, "g": ClassRows(like, "count", gradient=True)}, {}, "", C)
    assert told["class_reports"] == {
        "min_count": 3,
        "min_clients": 2,
        "fewest_contributors": 5,
        "solvable_up_to": C - 1,
        "beside_gradients": ["the number of examples behind every class that is reported"],
    }
    assert told["randomness"] == "seed"
    for words in ("the classifier's gradient on each of its classes ('g')", "how many examples of", "at least 3"):
        assert words in told["beyond_averaging"]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, []),
        ({"prototype_weights": "count"}, ["of each client: the number of examples behind every class"]),
    ],
)
def test_what_clients_tell_beside_their_gradients_is_in_the_report(
    tiny: Callable[..., dict[str, Any]], tmp_path: Path, options: dict[str, Any], words: list[str], known: bool
) -> None:
    values = tiny(rounds=1, method__name="redgrape")
    values["method"] |= options
    folder = carried_out(tmp_path / "run", values)
    if not known:  # as at real sites
        path = folder.path / "environment.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"client_counts": None}))
        (folder.path / "SHA256SUMS").unlink()
    told = [
        sentence
        for sentence in in_words(disclosed(RunView.read(folder.path)))["the server"]
        if "of each client: " in sentence
    ]
    assert len(told) == len(words) and all(w in sentence for w, sentence in zip(words, told, strict=True))


def test_a_run_in_the_papers_mode_says_what_it_gives_away(
    tiny: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(name: str, *options: str, **exchange: Any) -> list[str]:
        values = tiny(rounds=1, method__name="redgrape") | {"exchange": exchange}
        folder = RunFolder.create(tmp_path / name, Experiment.parse(values))
        assert cli.run(["resume", str(folder.path), "--workers", "1", *options]) == 0
        return [line for line in capsys.readouterr().err.splitlines() if "privacy" in line]

    assert len(told("paper")) == 1
    assert told("quiet", "--quiet") == []
    assert told("private", min_count=2) == []
