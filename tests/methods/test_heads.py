"""LDA, NCM and Fed3R: heads without training, held against formulas on the pooled features."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import redgrape as rg
import toys
from redgrape import tree
from redgrape.data.federation import Declared
from redgrape.determinism import torch_stream
from redgrape.engines import ClientHalf, StateLost
from redgrape.engines.in_process import InProcess
from redgrape.errors import ConfigError
from redgrape.exchange import Exchange
from redgrape.exchange.checks import UNDECLARED, Inspection, UpdateRejected
from redgrape.exchange.plausible import measured, outliers
from redgrape.learning import class_statistics
from redgrape.methods.fed3r import Fed3R
from redgrape.methods.lda import LDA, VALUES
from redgrape.methods.ncm import NCM
from redgrape.training import Training

C, D = 4, 6
LONG_TAILED = [[30, 5, 0, 0], [3, 0, 9, 1], [10, 8, 2, 0], [6, 1, 1, 1]]
METHODS = [LDA(), LDA(g=0.2, rho=0.3, tau=0.5), NCM(), Fed3R(), Fed3R.preset("released")]


def net(bias: bool = True) -> rg.Net:
    """In float64. Its dropout shows whether features are those of evaluation mode."""
    torch.manual_seed(3)
    encoder = nn.Sequential(nn.Linear(D, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(0.5))
    return rg.Net(encoder, nn.Linear(7, C, bias=bias)).double()


def pooled(sizes: list[list[int]] = LONG_TAILED) -> rg.Examples:
    stream = np.random.default_rng(2)
    y = np.repeat(np.arange(C), np.sum(sizes, axis=0))
    return rg.Examples(stream.normal(size=(len(y), D)) + y[:, None], y)


def parted(data: rg.Examples, owner: Tensor) -> rg.Federation:
    clients = [data.take((owner == k).nonzero().flatten()) for k in range(int(owner.max()) + 1)]
    return rg.Federation(clients, data, C)


def in_turns(data: rg.Examples, clients: int = 3) -> rg.Federation:
    return parted(data, torch.arange(len(data)) % clients)


def trained(method: Any, data: rg.Federation, build: Callable[[], rg.Net] = net, **options: Any) -> list[Any]:
    with Training(method, data, build, **{"rounds": 1, "seed": 4, **options}) as training:
        return [step.state for step in training.steps()]


def head(state: Any) -> tuple[Tensor, Tensor]:
    return state.server["model"]["classifier.weight"], state.server["model"]["classifier.bias"]


def features(data: rg.Examples, build: Callable[[], rg.Net] = net) -> Tensor:
    with torch.no_grad():
        return build().eval().encoder(data.inputs(torch.arange(len(data)), torch.float64))


def scores(state: Any, h: Tensor) -> Tensor:
    W, b = head(state)
    return h @ W.T + b


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def centred(t: Tensor) -> Tensor:
    return t - t.mean(dim=0)


def textbook(h: Tensor, y: Tensor, g: float, rho: float, tau: float = 0.0) -> tuple[Tensor, Tensor]:
    """The head of all examples at one place, straight from the equations."""
    n, classes = torch.bincount(y).double(), int(y.max()) + 1
    mu = torch.stack([h[y == c].mean(dim=0) for c in range(classes)])
    S = (h - mu[y]).T @ (h - mu[y]) / (len(y) - classes)
    P = torch.linalg.inv((1 - g) * S + g * S.trace() / len(S) * torch.eye(len(S)).double())
    quadratic = torch.stack([m @ P @ m for m in mu])
    return mu @ P, -0.5 * (quadratic - rho * (P @ S).trace() / n) + tau * (n / n.sum()).log()


@pytest.mark.parametrize(("g", "rho", "tau"), [(0.5, 1.0, 0.0), (0.2, 0.5, 1.0), (1.0, 1.0, 0.0), (0.01, 0.0, 0.3)])
def test_lda_is_that_of_the_pooled_features(g: float, rho: float, tau: float) -> None:
    """Up to what all classes share, which changes no probability."""
    data = pooled()
    W, b = head(trained(LDA(g=g, rho=rho, tau=tau), in_turns(data))[0])
    expected_W, expected_b = textbook(features(data), data.labels, g, rho, tau)
    close(W, centred(expected_W))
    close(b, centred(expected_b))


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("summed", [False, True])
def test_any_partition_gives_the_same_head(method: Any, summed: bool) -> None:
    data = pooled()
    engine = partial(toys.Summing) if summed else None
    whole = head(trained(method, parted(data, torch.zeros(len(data))))[0])
    owners = [torch.arange(len(data)) % 5, data.labels, torch.arange(len(data)) // 20, torch.arange(len(data))]
    for owner in owners:
        for found, expected in zip(head(trained(method, parted(data, owner), engine=engine)[0]), whole, strict=True):
            close(found, expected, 1e-6 if summed else 1e-9)  # a secure sum rounds to whole numbers


@pytest.mark.parametrize("method", [LDA, NCM])
def test_the_correction_changes_no_decision_between_equal_counts_and_helps_rare_classes(method: Any) -> None:
    equal, tailed = in_turns(pooled([[12] * C])), in_turns(pooled())
    h = 3 * torch.randn(500, 7, dtype=torch.float64).relu()
    without, corrected = (scores(trained(method(rho=rho), equal)[0], h) for rho in (0.0, 1.0))
    close(corrected, without)
    without, corrected = (scores(trained(method(rho=rho), tailed)[0], h) for rho in (0.0, 1.0))
    gained = (corrected - without)[0]
    assert gained.argsort().tolist() == np.argsort(-tailed.class_counts).tolist()
    assert not torch.equal(corrected.argmax(dim=1), without.argmax(dim=1))


def test_a_matrix_on_which_one_lapack_gives_up_goes_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 examples with 1280 features, most of them zero, made MKL fail on one machine."""
    h = torch.from_numpy(np.random.default_rng(4).normal(size=(9, 6)))
    matrix = h.T @ h
    matrix[2:4] = matrix[:, 2:4] = 0
    values, vectors = class_statistics._eigh(matrix)

    def fails(_: Tensor) -> Tensor:
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    again, others = class_statistics._eigh(matrix)
    torch.testing.assert_close(again, values)
    torch.testing.assert_close(others @ torch.diag(again) @ others.T, vectors @ torch.diag(values) @ vectors.T)


def test_the_correction_makes_the_mean_distance_right() -> None:
    """Over many draws of 3 examples of a class, the mean of its score is that with its true mean."""
    torch.manual_seed(0)
    d, n, draws, x = 10, 3, 4000, torch.ones(10).double()
    means = torch.randn(draws, n, d, dtype=torch.float64).mean(dim=1)
    spread = class_statistics.Spread(
        torch.full((draws,), float(n)), means, torch.ones(d).double(), torch.eye(d).double()
    )
    for rho, bias in ((1.0, 0.0), (0.0, -d / (2 * n))):
        W, b = spread.discriminants([0.5], [rho])
        assert float((W[0] @ x + b[0, 0]).mean()) == pytest.approx(
            bias, abs=0.05
        )  # the true mean is zero, and so is its score


def test_ncm_is_lda_with_full_shrinkage_and_chooses_the_nearest_mean() -> None:
    data = pooled()
    ncm, lda = (trained(m, in_turns(data))[0] for m in (NCM(rho=0.0), LDA(g=1.0, rho=0.0)))
    for found, expected in zip(head(ncm), head(lda), strict=True):
        close(found, expected)
    h, other = features(data), torch.randn(300, 7, dtype=torch.float64)
    mu = torch.stack([h[data.labels == c].mean(dim=0) for c in range(C)])
    assert torch.equal(scores(ncm, other).argmax(dim=1), torch.cdist(other, mu).argmin(dim=1))


def test_fed3r_is_ridge_regression_to_the_labels() -> None:
    """The gradient of |Y - H W|^2 + r |W|^2 is zero, with and without a constant feature."""
    data = pooled()
    h, Y = features(data), torch.eye(C).double()[data.labels]
    sums = trained(Fed3R(), in_turns(data))[0].server["sums"]
    W, b = class_statistics.ridge(sums, 0.3, constant=False)
    close(h.T @ (h @ W.T - Y) + 0.3 * W.T, torch.zeros(7, C).double())
    assert not b.any()
    W, b = class_statistics.ridge(sums, 0.3, constant=True)
    residual = h @ W.T + b - Y
    close(h.T @ residual + 0.3 * W.T, torch.zeros(7, C).double())
    close(residual.sum(dim=0) + 0.3 * b, torch.zeros(C).double())
    found, _ = head(trained(Fed3R(r=0.3, constant=True), in_turns(data))[0])
    close(found, centred(W))
    released, _ = head(trained(Fed3R.preset("released", r=0.3), in_turns(data))[0])
    close(released, centred(W / W.norm(dim=1, keepdim=True)))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_class_that_nobody_has_gets_no_row_never_wins_and_is_told(method: Any) -> None:
    data = in_turns(pooled([[30, 0, 9, 3]]))
    with Training(method, data, net, rounds=1) as training:
        (step,) = training.steps()
    assert not head(step.state)[0][1].any()
    far = 1e3 * torch.randn(2000, 7, dtype=torch.float64)
    assert 1 not in scores(step.state, torch.cat([far, far / 1e6, torch.zeros(1, 7)])).argmax(dim=1)
    assert step.record["class_examples"] == [30, 0, 9, 3]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_classifier_without_a_bias_carries_it_on_a_constant(method: Any) -> None:
    """Exactly, if some combination of the features is constant."""

    def build(bias: bool) -> rg.Net:
        encoder = nn.Linear(D, 8).double()
        torch.manual_seed(1)
        nn.init.normal_(encoder.weight)
        nn.init.zeros_(encoder.bias)
        with torch.no_grad():
            encoder.weight[7] = 0  # the last feature is 2 for every example
            encoder.bias[7] = 2
        return rg.Net(encoder, nn.Linear(8, C, bias=bias).double())

    data = pooled()
    x = data.inputs(torch.arange(len(data)), torch.float64)
    results = []
    for bias in (True, False):
        state = trained(method, in_turns(data), partial(build, bias))[0]
        n = build(bias)
        n.load_state_dict(state.server["model"])
        results.append(n(x).detach())
    close(results[1], results[0], 1e-7)
    assert (results[0].argmax(dim=1) == data.labels).float().mean() > 0.5


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_sampled_clients_count_once_each(method: Any) -> None:
    """Of 5 clients 2 a round: the head is that of the clients seen so far, and nothing changes when they come again."""
    data = pooled()
    owner = torch.arange(len(data)) % 5
    seen: set[int] = set()
    for state in trained(method, parted(data, owner), rounds=12, clients_per_round=2):
        seen |= set(state.record["answered"])
        so_far = data.take(torch.isin(owner, torch.tensor(sorted(seen))).nonzero().flatten())
        for found, expected in zip(head(state), head(trained(method, in_turns(so_far, 1))[0]), strict=True):
            close(found, expected)
    assert len(seen) == 5


class Forgetting(InProcess):
    """Client 1 has lost its state when it is asked again."""

    def run_clients(self, broadcast: Any, clients: Any, states: Any, round: int) -> Any:
        for k in clients:
            if k == 1 and k in states:
                yield k, StateLost("its state is gone")
            else:
                yield from super().run_clients(broadcast, [k], states, round)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_clients_that_lost_their_states_are_not_counted_twice(method: Any) -> None:
    """All start anew, and their sums replace the old ones."""
    first, second = trained(method, in_turns(pooled()), rounds=2, engine=Forgetting)
    assert second.record["states_lost"] == {"1": "its state is gone"}
    assert tree.equal(first.server, second.server)


def test_the_encoder_may_be_the_identity_and_stays_as_it_is() -> None:
    data = pooled()
    build = partial(rg.nets.build, "linear", (D,), C, 0)
    W, b = head(trained(LDA(), in_turns(data), build)[0])
    x = data.inputs(torch.arange(len(data)), torch.float64)
    expected_W, expected_b = textbook(x, data.labels, 0.5, 1.0)
    close(W.double(), centred(expected_W), 1e-5)  # the net is in float32
    close(b.double(), centred(expected_b), 1e-5)
    before, after = net().state_dict(), trained(LDA(), in_turns(data))[0].server["model"]
    assert all(torch.equal(t, after[name]) for name, t in before.items() if name.startswith("encoder."))


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e6])
def test_examples_that_are_alike_or_far_give_finite_heads(method: Any, scale: float) -> None:
    """No spread within classes, next to none, and much; more features than examples."""
    x = torch.eye(C, 50).double()[torch.arange(C)] + scale * torch.randn(C, 50, dtype=torch.float64)
    data = rg.Federation([rg.Examples(x, torch.arange(C))] * 2, rg.Examples(x, torch.arange(C)), C)
    build = partial(rg.nets.build, "linear", (50,), C, 0)
    W, b = head(trained(method, data, build)[0])
    assert torch.isfinite(W).all() and torch.isfinite(b).all()
    if scale < 1:
        assert (x.float() @ W.T + b).argmax(dim=1).tolist() == [*range(C)]


def test_floors_hold_classes_back() -> None:
    """A client does not add examples of a class that it has too few of."""
    data = parted(pooled([[9, 4, 8, 3]]), torch.zeros(24))
    state = trained(LDA(), data, exchange=Exchange(min_count=5))[0]
    assert state.record["class_examples"] == [9, 0, 8, 0]
    nothing = trained(LDA(), data, exchange=Exchange(min_count=10))[0]
    assert torch.equal(head(nothing)[0], net().classifier.weight)  # nobody reports anything


@pytest.mark.parametrize("settings", [{"clip": 1.0}, {"rule": "krum"}, {"rule": "median"}, {"clip": 1.0, "noise": 1.0}])
def test_what_would_change_the_sums_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"running sum.*choose another method"):
        trained(LDA(), in_turns(pooled(), 8), exchange=Exchange(**settings))


# g and rho by held-out examples


def shares(data: rg.Federation, k: int) -> tuple[Tensor, Tensor]:
    """The rows of a client that make the heads, and those that judge them."""
    draws = torch.rand(data.size(k), generator=torch_stream(4, "held out", k))
    return (draws >= 0.3).nonzero().flatten(), (draws < 0.3).nonzero().flatten()


def test_usual_rho_depends_on_the_number_of_classes() -> None:
    assert [class_statistics.usual_rho(classes) for classes in (2, 20, 21, 100)] == [1.0, 1.0, 0.5, 0.5]


def test_a_class_without_a_row_in_the_heads_does_not_choose_between_them() -> None:
    """All examples of class 2 judge: its loss, whatever it is, says nothing about g and rho."""
    sums = {
        "examples": torch.tensor([9, 9, 1]),
        "judging": torch.tensor([3, 3, 1]),
        "losses": torch.tensor([[[3.0, 1.0]], [[3.0, 2.0]], [[0.0, 99.0]]], dtype=torch.float64),
    }
    assert LDA(held_out=0.3)._best(sums) == (0, 1)


def test_no_share_sends_sums_over_fewer_examples_than_the_floor() -> None:
    """Of 8 or 9 examples of a class, a share of 0.3 would often be a single one, whose features the sum would be."""
    data = in_turns(pooled([[80, 40, 9, 8]]), 1)
    half = ClientHalf(LDA(held_out=0.3), data, net, 0, 2, torch.device("cpu"), exchange=Exchange(min_count=8))
    model, state = net().state_dict(), None
    sent = torch.zeros(4, dtype=torch.int64)
    for t in (1, 2):
        answer = half.run(0, {"model": model}, state, t)
        state, examples = answer.state, answer.update["sums"]["examples"]
        assert all(n == 0 or n >= 8 for n in examples.tolist())
        sent += examples
    assert sent.tolist() == [80, 40, 9, 8] and examples[:2].all()


@pytest.mark.parametrize("summed", [False, True])
def test_the_head_with_the_smallest_mean_loss_of_a_class_is_taken(summed: bool) -> None:
    """Recomputed on the pooled shares: heads of one share, losses on the other, and the last head of both."""
    data = in_turns(pooled([[80, 40, 20, 9]]))
    first, second, third = trained(LDA(held_out=0.3), data, rounds=3, engine=partial(toys.Summing) if summed else None)
    clients = [data.client(k) for k in range(data.num_clients)]
    fitted, judging = ([client.take(shares(data, k)[which]) for k, client in enumerate(clients)] for which in (0, 1))
    h, y = (torch.cat(parts) for parts in zip(*((features(e), e.labels) for e in fitted), strict=True))
    held_h, held_y = (torch.cat(parts) for parts in zip(*((features(e), e.labels) for e in judging), strict=True))
    assert first.record["class_examples"] == torch.bincount(y).tolist()
    assert first.record["chosen"] == [0.5, 1.0]
    losses = {}
    for g, rho in itertools.product(VALUES[1:], VALUES):
        W, b = textbook(h, y, g, rho)
        each = nn.functional.cross_entropy(held_h @ W.T + b, held_y, reduction="none")
        losses[g, rho] = float(torch.stack([each[held_y == c].mean() for c in range(C)]).mean())
    g, rho = min(losses, key=lambda knobs: losses[knobs])
    assert second.record["chosen"] == [g, rho] != [0.5, 1.0]
    assert second.record["class_examples"] == [80, 40, 20, 9]
    for found, expected in zip(head(second), head(trained(LDA(g=g, rho=rho), data)[0]), strict=True):
        close(found, expected, 1e-6 if summed else 1e-9)
    assert tree.equal(second.server, third.server)


@pytest.mark.parametrize(("given", "kept"), [({"g": 0.25}, 0), ({"rho": 0.25}, 1), ({"g": 0.25, "rho": 0.25}, None)])
def test_what_is_given_is_not_chosen(given: dict[str, float], kept: int | None) -> None:
    chosen = trained(LDA(held_out=0.3, **given), in_turns(pooled()), rounds=2)[1].record["chosen"]
    assert chosen == [0.25, 0.25] if kept is None else chosen[kept] == 0.25 and chosen[1 - kept] in VALUES


def test_nobody_judges_a_head_that_its_own_held_out_examples_made() -> None:
    """With sampled clients too: what a client sends at its second visit is not yet in the heads that it gets then."""
    data = in_turns(pooled(), 5)
    visits = [0] * 5
    expected = torch.zeros(C, dtype=torch.int64)
    for state in trained(LDA(held_out=0.3), data, rounds=15, clients_per_round=2):
        for k in state.record["answered"]:
            if visits[k] < 2:
                rows = shares(data, k)[visits[k]]
                expected += torch.bincount(data.client(k).labels[rows], minlength=C)
            visits[k] += 1
        assert state.record["class_examples"] == expected.tolist()
    assert min(visits) >= 2 and expected.tolist() == list(data.class_counts)


# Lies


def sums_of(examples: list[int], number: float) -> dict[str, Any]:
    like = class_statistics.zeros(net().state_dict(), toys.server_site(3, C))
    filled = {name: torch.full_like(t, number) for name, t in like.items() if name != "examples"}
    return {"sums": {"examples": torch.tensor(examples), **filled}}


def test_counts_that_a_client_cannot_have_are_rejected() -> None:
    model = net().state_dict()
    parts = LDA().parts(model, toys.server_site(3, C))
    inspection = Inspection(parts, dict(model), C)
    known = Declared(9, torch.tensor([5, 4, 0, 0]))
    inspection.lengths(sums_of([5, 4, 0, 0], 1e9), known)  # as long as the data makes it
    for examples, declared in (
        ([5, 3, 1, 0], known),
        ([-1, 4, 0, 0], UNDECLARED),
        ([10, 0, 0, 0], Declared(9)),
        ([5, 5, 0, 0], Declared(9)),
    ):
        with pytest.raises(UpdateRejected, match="claims more examples of a class than this client can have"):
            inspection.lengths(sums_of(examples, 1.0), declared)


def test_sums_far_longer_than_those_of_others_are_rejected() -> None:
    """By example, so that a large client is not."""
    parts, model = LDA().parts(net().state_dict(), toys.server_site(3, C)), dict(net().state_dict())
    updates = [sums_of([2, 2, 0, 0], 40.0), sums_of([400, 0, 0, 0], 4e3), sums_of([1, 0, 0, 0], 1e4)]
    updates.append(sums_of([0, 0, 0, 0], 0.0))  # sent in an earlier round
    inspection = Inspection(parts, model, C)
    found = {k: measured(u, parts, inspection.lengths(u), None) for k, u in enumerate(updates)}
    reasons = outliers(found, parts, model)
    assert [*reasons] == [2]
    assert re.search("for each example that it counts; given the other clients, at most", str(reasons[2]))
