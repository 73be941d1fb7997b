"""Vine: identities with RedGrape, the invariant of its running sum, and hand-derived numbers."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import redgrape as rg
from redgrape import methods, tree
from redgrape.engines import ClientHalf
from redgrape.engines.in_process import InProcess
from redgrape.errors import ConfigError
from redgrape.method import ServerSite
from redgrape.methods.redgrape import RedGrape
from redgrape.methods.vine import Balance, Vine
from redgrape.rounds import exchanged, first_state
from redgrape.testing import engines as testing_engines
from redgrape.training import Training

C, D = 4, 6
SIZES = [[12, 5, 0, 0], [3, 0, 9, 1], [0, 8, 2, 0], [6, 1, 1, 0], [9, 4, 0, 2]]
SMALL: dict[str, Any] = {"epochs": 2, "batch_size": 8, "lr": 0.05}
AS_REDGRAPE: dict[str, Any] = {"margin": 0.0, "extra_init": "default", "length": "batch"}


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


def trained(method: Any, rounds: int = 5, sizes: list[list[int]] = SIZES, **options: Any) -> list[Any]:
    with Training(method, federation(sizes), net, rounds=rounds, seed=4, **options) as training:
        return [step.state for step in training.steps()]


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options", [{}, {"two_stream": False}, {"norm": "per_tensor"}, {"lam": 0.0}, {"extra_init": "copy"}]
)
def test_with_all_clients_it_is_redgrape_without_real_data(options: dict[str, Any]) -> None:
    """All clients sampled, no correction, T = inf: the same model to rounding, and G is the sum of the prototypes."""
    theirs = trained(RedGrape(threshold=float("inf"), **SMALL, **options))
    for memory in (True, False):
        vine = Vine(memory=memory, **{**AS_REDGRAPE, **SMALL, **options})
        for ours, other in zip(trained(vine), theirs, strict=True):
            for name, t in other.server["model"].items():
                close(ours.server["model"][name], t)
            for name, table in other.server["prototypes"].items():
                close(ours.server["G"][name], table.sum(dim=0))


def test_prototypes_by_counts_are_weights_by_counts() -> None:
    theirs = trained(RedGrape(threshold=float("inf"), prototype_weights="count", **SMALL))
    ours = trained(Vine(weights="counts", **AS_REDGRAPE, **SMALL))
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
        received: Any = {name: t.clone() for name, t in net().state_dict().items()}
        for step in training.steps():
            state = step.state
            models |= dict.fromkeys(state.record["answered"], received)
            expected = {name: torch.zeros_like(t) for name, t in state.server["G"].items()}
            for k, model in models.items():
                site = half.site(k, state.round)
                for name, g in method._summed_gradient(site.load(model), state.server, site).items():
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
    found = Vine()._summed_gradient(build(), {"class_weights": torch.ones(2, dtype=torch.float64)}, site)
    close(found["weight"], torch.tensor([[-0.5 * 1 + 3, -0.5 * 2 + 3], [0.5 * 1 - 3, 0.5 * 2 - 3]]), 1e-6)
    close(found["bias"], torch.tensor([0.0, 0.0]), 1e-6)


def _linear(classes: int) -> rg.Net:
    made = rg.Net(nn.Identity(), nn.Linear(2, classes))
    nn.init.zeros_(made.classifier.weight)
    nn.init.zeros_(made.classifier.bias)
    return made


@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_classes_with_few_holders_have_no_part_in_the_sum(margin: float) -> None:
    """Class 3 is held by two of the five clients. From three on, G knows nothing of it: its row is zero, and the other
    rows are those of a softmax without it."""
    kept, left = (trained(Vine(min_holders=n, margin=margin, **SMALL)) for n in (1, 3))
    assert kept[-1].server["class_weights"].tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 3, 1 / 2])
    assert left[-1].server["class_weights"].tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 3, 0.0])
    assert kept[-1].server["G"]["bias"][3] != 0
    for g in left[-1].server["G"].values():
        close(g[3], torch.zeros_like(g[3]), 0)
    close(left[-1].server["G"]["bias"].sum(), torch.tensor(0.0, dtype=torch.float64))


def test_what_clients_send_of_a_class_at_home_is_nothing() -> None:
    """In round 1 the summed gradient is the same whatever the examples of class 3 are."""
    sent = []
    for shift in (0.0, 100.0):
        data = federation()
        data.train.x[data.train.y == 3] += shift
        with Training(Vine(min_holders=3, **SMALL), data, net, rounds=1, seed=4) as training:
            (step,) = training.steps()
        sent.append(step.state.server["G"])
    assert tree.equal(*sent)


def test_clients_without_a_class_at_home_train_it_with_its_prior() -> None:
    """By hand: there are 30, 18, 12 and 3 examples. Class 3 stays at home: log 3 less the mean of log 30, 18 and 12;
    the total cancels. The other classes get nothing. Clients 1 and 4 hold class 3 and add nothing."""
    shift = math.log(3) - (math.log(30) + math.log(18) + math.log(12)) / 3
    method = Vine(min_holders=3, **SMALL)
    (state,) = trained(method, rounds=1)
    assert state.server["home"].tolist() == pytest.approx([0, 0, 0, shift])
    half = ClientHalf(method, federation(), net, 4, 1, torch.device("cpu"))
    z, y = torch.randn(5, C, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 0])
    for k, times in ((1, 0), (4, 0), (2, 1)):
        prior = torch.tensor([0, 0, 0, times * shift], dtype=torch.float64)
        expected = nn.functional.cross_entropy(z + prior, y)
        close(method.criterion(method.broadcast(state.server), half.site(k, 1))(z, y), expected)
    assert "home" not in trained(Vine(**SMALL), rounds=1)[-1].server
    nobodys = trained(Vine(min_holders=3, **SMALL), sizes=[[*row[:3], 0] for row in SIZES])[-1].server
    assert nobodys["home"].tolist() == [0, 0, 0, 0] and bool(nobodys["model"]["classifier.bias"].isfinite().all())


def test_a_class_at_home_has_one_stream() -> None:
    """Its row of W_hat is zero in every round, so that W alone has its whole logit; G has no part in it."""
    for state in trained(Vine(min_holders=3, **SMALL)):
        for t in state.server["W_hat"].values():
            close(t[3], torch.zeros_like(t[3]), 0)
            assert bool(t[:3].any())


@pytest.mark.parametrize("two_stream", [True, False])
def test_if_all_clients_hold_all_classes_and_none_is_shared_it_is_fedavg(two_stream: bool) -> None:
    sizes = [[6, 3, 2, 1], [4, 4, 1, 1], [3, 5, 2, 2]]
    vine = trained(Vine(min_holders=100, two_stream=two_stream, **SMALL), sizes=sizes)[-1]
    for name, t in trained(rg.FedAvg(**SMALL), sizes=sizes)[-1].server["model"].items():
        close(vine.server["model"][name], t)


def test_a_loss_of_a_combination_replaces_the_prior_of_classes_at_home() -> None:
    """Balanced softmax has the prior of all classes; twice would be too much."""
    z, y = torch.randn(5, C, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 3])
    method = methods.load("vine+balanced_softmax")(min_holders=3, **SMALL)
    (state,) = trained(method, rounds=1)
    pi = torch.tensor([30.0, 18, 12, 3], dtype=torch.float64) / 63
    loss = method.criterion(method.broadcast(state.server), _site())(z, y)
    close(loss, nn.functional.cross_entropy(z + pi.log(), y))


def test_a_margin_is_the_gradient_of_logit_adjusted_losses() -> None:
    """Against autograd: G is the gradient of the classes' mean losses CE(z + tau log pi, y), weighted by pi^tau, whose
    mean is scaled to 1."""
    method = Vine(margin=0.7, **SMALL)
    (state,) = trained(method, rounds=1)
    data, model = federation(), net()
    counts = torch.tensor(SIZES).sum(dim=0).double()
    share = (counts / counts.sum()) ** 0.7
    loss = torch.zeros((), dtype=torch.float64)
    for k in range(len(SIZES)):
        mine = data.client(k)
        x, y = mine.inputs(torch.arange(len(mine)), torch.float64), mine.labels
        each = nn.functional.cross_entropy(model(x) + share.log(), y, reduction="none")
        for c in y.unique():
            loss = loss + each[y == c].mean() * share[c] / share.mean() * state.server["class_weights"][c]
    gradients = torch.autograd.grad(loss, list(model.classifier.parameters()))
    for name, g in zip(("weight", "bias"), gradients, strict=True):
        close(state.server["G"][name], g)


def test_a_margin_changes_nothing_if_classes_are_equally_frequent() -> None:
    """A constant added to all logits leaves the softmax as it is."""
    without, with_margin = (
        trained(Vine(margin=tau, **SMALL), sizes=[[6, 1, 0, 3], [0, 5, 6, 3]]) for tau in (0.0, 1.0)
    )
    for name, t in without[-1].server["model"].items():
        close(with_margin[-1].server["model"][name], t)


def test_the_correction_is_zero_at_the_first_step() -> None:
    """One local step a round: the client's examples have not moved yet."""
    one_step = {"epochs": 1, "batch_size": 1000, "lr": 0.05}
    plain, corrected = (trained(Vine(correction=c, threshold=2, **one_step)) for c in ("none", "real"))
    assert tree.equal(plain[-1].server["model"], corrected[-1].server["model"])
    two = {**one_step, "epochs": 2}
    plain, corrected = (trained(Vine(correction=c, threshold=2, **two)) for c in ("none", "real"))
    assert not tree.equal(plain[-1].server["model"], corrected[-1].server["model"])


def test_the_correction_is_the_gradient_on_the_drawn_examples() -> None:
    """Against autograd: the sum over L_bal of pi_c^tau times the mean of CE(z + tau log pi, c) over T examples."""
    method = Vine(correction="real", threshold=2, margin=0.7, **SMALL)
    (state,) = trained(method, rounds=1)
    broadcast = method.broadcast(state.server)
    site = ClientHalf(method, federation(), net, 4, 2, torch.device("cpu")).site(1, 2)
    model = method.load_for_training(broadcast["model"], site)
    balance = Balance(method, broadcast, model, site)
    assert balance.drawn is not None
    x, y = balance.drawn
    assert torch.bincount(y, minlength=C).tolist() == [2, 0, 2, 0]  # client 1 has 3, 0, 9 and 1
    share = (torch.tensor(SIZES).sum(dim=0).double() / sum(map(sum, SIZES))) ** 0.7

    def by_autograd() -> dict[str, Tensor]:
        each = nn.functional.cross_entropy(model(x) + share.log(), y, reduction="none")
        loss = (each * share[y] / share.mean()).sum() / 2
        gradients = torch.autograd.grad(loss, list(model.classifier.parameters()))
        return dict(zip(("weight", "bias"), gradients, strict=True))

    received = by_autograd()
    with torch.no_grad():
        model.classifier.weight[0] += 0.3
    for name, now in by_autograd().items():
        close(balance.received[name], received[name])
        close(balance._sum()[name], broadcast["G"][name] + now - received[name])


def test_without_memory_the_sampled_clients_stand_for_all() -> None:
    """G = K / |S| sum of M_k, with two of five clients."""
    method = Vine(memory=False, **SMALL)
    (state,) = trained(method, rounds=1, clients_per_round=2)
    half = ClientHalf(method, federation(), net, 4, 1, torch.device("cpu"))
    sampled = [method._summed_gradient(net(), state.server, half.site(k, 1)) for k in state.record["answered"]]
    assert len(sampled) == 2
    for name, g in state.server["G"].items():
        close(g, 5 / 2 * sum(M_k[name] for M_k in sampled))


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
        *[(rg.Exchange(rule=rule), "malicious client") for rule in ("krum", "multi_krum", "norm_clipping")],
        (rg.Exchange(clip=1.0), "keep track"),
    ],
)
def test_a_running_sum_is_neither_clipped_nor_robust(exchange: rg.Exchange, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{words}.*; choose method.preset=stateless"):
        Training(Vine(), federation(), net, rounds=1, exchange=exchange)
    assert exchange.refuses(exchanged(Vine(memory=False), _site())[0]) is None


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_rules_by_coordinate_give_no_sum(rule: Any) -> None:
    with pytest.raises(ConfigError, match="gives no sum"):
        Training(Vine(memory=False), federation(), net, rounds=1, exchange=rg.Exchange(rule=rule))


def test_clients_alike_need_no_survey() -> None:
    """Where all clients hold all classes, H_c = K: the same bits, and nobody was asked."""
    full = federation([[3, 5, 2, 1], [1, 1, 4, 2], [6, 2, 1, 1]])
    found = []
    for weights in ("holders", "alike"):
        with Training(Vine(weights=weights, margin=0.0, **SMALL), full, net, rounds=3, seed=4) as training:
            found.append([step.state.server for step in training.steps()][-1])
    assert tree.equal(*found)
    assert exchanged(Vine(weights="alike", margin=0.0), _site())[1] == {}
    with pytest.raises(ConfigError, match="weights=alike asks nobody"):
        Vine(weights="alike", margin=0.0, min_holders=2)
    with pytest.raises(ConfigError, match=r"margin is 0\.5, and weights=alike asks nobody"):
        Vine(weights="alike")


def test_noise_covers_the_summed_gradient_in_one_mechanism() -> None:
    """Update and gradient are clipped together, and get noise of the same deviation: one Gaussian mechanism a round."""
    pytest.importorskip("dp_accounting")
    exchange = rg.Exchange(clip=0.5, noise=2.0, randomness="seed")
    method = Vine(memory=False, weights="alike", margin=0.0, **SMALL)
    with pytest.raises(ConfigError, match="survey is released without noise"):
        Training(Vine(memory=False), federation(), net, rounds=1, exchange=exchange)
    parts = exchanged(method, _site())[0]
    assert [(m.multiplier, m.times) for m in exchange.mechanisms(parts, C)] == [(2.0, 1)]
    half = ClientHalf(method, federation(), net, 4, 1, torch.device("cpu"), exchange=exchange)
    start = first_state(method, InProcess(half), ServerSite(net, 5, C, 4, 0, 1, torch.device("cpu")), range(5)).server
    broadcast = tree.ordered(method.broadcast(start))
    total = torch.zeros(C, 7, dtype=torch.float64)
    for k in range(5):
        sent = half.summand(k, broadcast, half.run(k, broadcast, None, 1).update, 1)
        groups = [sent[name] for name in ("delta", "delta_W_hat", "gradient")]
        assert float(tree.norm(t for group in groups for t in group.values())) <= 0.5 + 1e-9
        total += sent["gradient"]["weight"]
    (state,) = trained(method, rounds=1, exchange=exchange)
    noise = state.server["G"]["weight"] - total  # all clients: K / |S| = 1
    assert 0.5 < float(noise.std()) < 1.5  # of deviation clip * noise = 1, 28 numbers


class LyingInRound(InProcess):
    """Client 1 adds NaN to the sum, or a huge number to a stateless one, in this round only."""

    def __init__(self, half: ClientHalf, lie: float, round: int) -> None:
        super().__init__(half)
        self._lie, self._round = lie, round

    def run_clients(self, broadcast: Any, clients: Any, states: Any, round: int) -> Any:
        for k, answer in super().run_clients(broadcast, clients, states, round):
            if k == 1 and round == self._round:
                gradient = {name: g + self._lie for name, g in answer.update["gradient"].items()}
                answer = answer._replace(update={**answer.update, "gradient": gradient})
            yield k, answer


def test_a_rejected_message_enters_neither_G_nor_what_the_client_has_sent() -> None:
    """Client 1 is rejected in round 2 and honest in the others. G stays the sum of what was accepted, so the client's
    next message makes up for the one that was lost."""
    states = trained(Vine(**SMALL), engine=lambda half: LyingInRound(half, math.nan, 2))
    assert [list(state.record["rejected"]) for state in states] == [[], ["1"], [], [], []]
    first, second, third = (state.clients[1]["sent"]["weight"] for state in states[:3])
    assert torch.equal(first, second) and not torch.equal(second, third)
    for state in states:
        for name, g in state.server["G"].items():
            close(g, sum(client["sent"][name] for client in state.clients.values()), 1e-12)


@pytest.mark.parametrize("rule", ["krum", "multi_krum"])
def test_krum_sees_the_sum_of_the_stateless_form(rule: Any) -> None:
    """A lie in the summed gradient alone is left out, and G is made of the chosen clients."""
    options: dict[str, Any] = {"exchange": rg.Exchange(rule=rule), "engine": lambda half: LyingInRound(half, 1e3, 1)}
    (state,) = trained(Vine(memory=False, **SMALL), rounds=1, **options)
    assert 1 in state.record["left_out"] and float(state.server["G"]["weight"].abs().max()) < 100
    (fooled,) = trained(Vine(memory=False, **SMALL), rounds=1, engine=options["engine"])
    assert float(fooled.server["G"]["weight"].abs().max()) > 900


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
    assert of["one"]["bytes_down"] - of["fedavg"]["bytes_down"] == clients * (classifier + 16 * C)


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


def test_a_pull_by_the_mean_gradient_of_the_round() -> None:
    """Steps with gradients (3, 0), (-3, 0) and (0, 6) have the means (3, 0), 0 and (0, 2). With lambda 1 and G along
    (0, 1), the pulls are 3, 0 and 2 of that. Measured by the batch they are 3, 3 and 6."""

    def pulls(length: Literal["batch", "mean"]) -> list[list[float]]:
        pair = rg.Examples(torch.ones(2, 2), torch.tensor([0, 1]))
        data = rg.Federation([pair], pair, 2)
        site = ClientHalf(Vine(), data, lambda: _linear(2), 0, 3, torch.device("cpu")).site(0, 2)
        one = _linear(2)
        G = {"weight": torch.tensor([[0.0, 5.0], [0.0, 0.0]]), "bias": torch.zeros(2)}
        balance = Balance(Vine(lam=1.0, length=length), {"G": G}, one, site)
        found = []
        for gradient in ([3.0, 0.0], [-3.0, 0.0], [0.0, 6.0]):
            one.classifier.weight.grad = torch.tensor([gradient, [0.0, 0.0]])
            one.classifier.bias.grad = torch.zeros(2)
            pulled = balance.pull()["weight"]
            one.classifier.weight.grad += pulled  # as training does: it must not count as a local gradient
            found.append(pulled[0].tolist())
        return found

    assert pulls("mean") == [[0.0, 3.0], [0.0, 0.0], [0.0, 2.0]]
    assert pulls("batch") == [[0.0, 3.0], [0.0, 3.0], [0.0, 6.0]]
