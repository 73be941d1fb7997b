"""Vine: identities with RedGrape, the invariant of its running sum, and hand-derived numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import redgrape as rg
from redgrape import tree
from redgrape.determinism import same_bits_everywhere
from redgrape.engines import ClientHalf
from redgrape.errors import ConfigError
from redgrape.methods.redgrape import RedGrape
from redgrape.methods.vine import Vine
from redgrape.testing import engines as testing_engines
from redgrape.training import Training, exchanged

C, D = 4, 6
SIZES = [[12, 5, 0, 0], [3, 0, 9, 1], [0, 8, 2, 0], [6, 1, 1, 0], [9, 4, 0, 2]]
SMALL: dict[str, Any] = {"epochs": 2, "batch_size": 8, "lr": 0.05}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with same_bits_everywhere():
        yield


def net() -> rg.Net:
    """In float64, so that identities hold to rounding."""
    torch.manual_seed(3)
    return rg.Net(nn.Sequential(nn.Linear(D, 7), nn.ReLU()), nn.Linear(7, C)).double()


def federation(sizes: list[list[int]] = SIZES) -> rg.Federation:
    stream = np.random.default_rng(2)

    def draw(row: list[int]) -> rg.Examples:
        y = np.repeat(np.arange(C), row)
        return rg.Examples(stream.normal(size=(len(y), D)) + y[:, None], y)

    return rg.Federation([draw(row) for row in sizes], draw([3] * C), C)


def trained(method: Any, rounds: int = 5, **options: Any) -> list[Any]:
    with Training(method, federation(), net, rounds=rounds, seed=4, **options) as training:
        return [step.state for step in training.steps()]


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"two_stream": False}, {"norm": "per_tensor"}, {"lam": 0.0}])
def test_with_all_clients_it_is_redgrape_without_real_data(options: dict[str, Any]) -> None:
    """All clients sampled, no correction, T = inf: the same model to rounding, and G is the sum of the prototypes."""
    theirs = trained(RedGrape(threshold=float("inf"), **SMALL, **options))
    for memory in (True, False):
        for ours, other in zip(trained(Vine(memory=memory, **SMALL, **options)), theirs, strict=True):
            for name, t in other.server["model"].items():
                close(ours.server["model"][name], t)
            for name, table in other.server["prototypes"].items():
                close(ours.server["G"][name], table.sum(dim=0))


def test_prototypes_by_counts_are_weights_by_counts() -> None:
    theirs = trained(RedGrape(threshold=float("inf"), prototype_weights="count", **SMALL))
    ours = trained(Vine(weights="counts", **SMALL))
    for name, t in theirs[-1].server["model"].items():
        close(ours[-1].server["model"][name], t)


@pytest.mark.parametrize("summed", [False, True])
def test_G_is_the_sum_of_all_clients_latest_gradients(summed: bool) -> None:
    """Whoever was sampled: recomputed from scratch, at the model that each client last received."""

    method = Vine(**SMALL)
    models: dict[int, Any] = {}
    half = ClientHalf(method, federation(), net, 4, 8, torch.device("cpu"))
    with Training(
        method,
        federation(),
        net,
        rounds=8,
        clients_per_round=2,
        seed=4,
        engine=testing_engines.Summing if summed else None,
    ) as training:
        weights: Tensor | None = None
        received: Any = {name: t.clone() for name, t in net().state_dict().items()}
        for step in training.steps():
            state = step.state
            weights = state.server["class_weights"]
            models |= dict.fromkeys(state.record["answered"], received)
            expected = {name: torch.zeros_like(t) for name, t in state.server["G"].items()}
            for k, model in models.items():
                site = half.site(k, state.round)
                for name, g in method._summed_gradient(site.load(model), weights, site).items():
                    expected[name] += g
            for name, t in expected.items():
                close(state.server["G"][name], t, 1e-12)
            received = state.server["model"]
    assert 2 < len(models) <= len(SIZES)  # some came back, and one may never have come


def test_a_gradient_by_hand() -> None:
    """One client, W = 0 and two classes: p = 1/2. Of two examples of class 0 and one of class 1, each class with one
    holder, M = mean_0 (p - e_0) h + mean_1 (p - e_1) h, with (p - e_0) = (-1/2, 1/2)."""
    h = torch.tensor([[2.0, 0.0], [0.0, 4.0], [6.0, 6.0]])
    build = lambda: _linear(2)  # noqa: E731
    data = rg.Federation([rg.Examples(h, torch.tensor([0, 0, 1]))], rg.Examples(h, torch.tensor([0, 0, 1])), 2)
    site = ClientHalf(Vine(), data, build, 0, 1, torch.device("cpu")).site(0, 1)
    found = Vine()._summed_gradient(build(), torch.ones(2, dtype=torch.float64), site)
    close(found["weight"], torch.tensor([[-0.5 * 1 + 3, -0.5 * 2 + 3], [0.5 * 1 - 3, 0.5 * 2 - 3]]), 1e-6)
    close(found["bias"], torch.tensor([0.0, 0.0]), 1e-6)


def _linear(classes: int) -> rg.Net:
    made = rg.Net(nn.Identity(), nn.Linear(2, classes))
    nn.init.zeros_(made.classifier.weight)
    nn.init.zeros_(made.classifier.bias)
    return made


def test_classes_with_few_holders_are_left_out_by_everybody() -> None:
    """Class 3 is held by two of the five clients. From three on, no row of it pulls, and G knows nothing of it."""
    kept, left = trained(Vine(**SMALL)), trained(Vine(min_holders=3, **SMALL))
    assert kept[-1].server["class_weights"].tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 3, 1 / 2])
    assert left[-1].server["class_weights"].tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 3, 0.0])
    bias = left[-1].server["G"]["bias"]
    assert bias[3] > 0 > bias[2]  # examples of a class push its own bias up: only those of others push it down
    close(bias.sum(), torch.tensor(0.0, dtype=torch.float64))


def test_the_correction_is_zero_at_the_first_step() -> None:
    """One local step a round: the client's examples have not moved yet."""
    one_step = {"epochs": 1, "batch_size": 1000, "lr": 0.05}
    plain, corrected = (trained(Vine(correction=c, threshold=2, **one_step)) for c in ("none", "real"))
    assert tree.equal(plain[-1].server["model"], corrected[-1].server["model"])
    two = {**one_step, "epochs": 2}
    plain, corrected = (trained(Vine(correction=c, threshold=2, **two)) for c in ("none", "real"))
    assert not tree.equal(plain[-1].server["model"], corrected[-1].server["model"])


def test_no_drift_in_float32() -> None:
    """S_k is what arrived: after many rounds G is off by the rounding of one message a client, not of all."""
    build = lambda: net().float()  # noqa: E731
    method = Vine(**SMALL)
    data = federation()
    with Training(method, data, build, rounds=60, clients_per_round=2, seed=4) as training:
        *_, last = training.steps()
    sent = [state["sent"] for state in last.state.clients.values()]
    for name, g in last.state.server["G"].items():
        close(g, sum(s[name] for s in sent), 1e-12)


@pytest.mark.parametrize(
    ("exchange", "words"),
    [
        (rg.Exchange(rule="median"), "gives no sum"),
        (rg.Exchange(rule="norm_clipping"), "keep track"),
        (rg.Exchange(clip=1.0), "keep track"),
    ],
)
def test_what_a_running_sum_does_not_go_with(exchange: rg.Exchange, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Training(Vine(), federation(), net, rounds=1, exchange=exchange)
    if words == "keep track":  # without memory, nothing is remembered
        assert exchange.refuses(exchanged(Vine(memory=False), _site())[0]) is None


def _site() -> Any:
    return ClientHalf(Vine(), federation(), net, 0, 1, torch.device("cpu")).site(0, 1)


def test_it_is_as_large_as_the_classifier() -> None:
    """Down and up one more classifier than FedAvg, in the net's precision, and two with the second stream."""
    build = lambda: net().float()  # noqa: E731
    of: dict[str, Any] = {}
    for name, method in {"fedavg": rg.FedAvg(**SMALL), "one": Vine(two_stream=False, **SMALL)}.items():
        with Training(method, federation(), build, rounds=1) as training:
            (step,) = training.steps()
            of[name] = step.record
    classifier, clients = 4 * (7 * C + C), len(SIZES)
    assert of["one"]["bytes_up"] - of["fedavg"]["bytes_up"] == clients * classifier
    assert of["one"]["bytes_down"] - of["fedavg"]["bytes_down"] == clients * (classifier + 8 * C)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"clip_norm": 0.5}])
def test_the_two_streams_part_along_G(options: dict[str, Any]) -> None:
    """W and W_hat meet the same gradient, so what a client changes in one but not in the other is a multiple of G."""
    method = Vine(**SMALL, **options)
    state = trained(method)[2]
    half = ClientHalf(method, federation(), net, 4, 5, torch.device("cpu"))
    broadcast = method.broadcast(state.server)
    for k in range(len(SIZES)):
        update = half.run(k, broadcast, state.clients[k], 4).update
        apart = {name: update["delta"][f"classifier.{name}"] - t for name, t in update["delta_W_hat"].items()}
        inner = sum(float((apart[name] * g).sum()) for name, g in broadcast["G"].items())
        factor = inner / sum(float(g.square().sum()) for g in broadcast["G"].values())
        assert factor < -1e-4
        for name, g in broadcast["G"].items():
            close(apart[name], factor * g, 1e-12)
