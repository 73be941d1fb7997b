"""Where the class prior comes from: each client's own counts, the sum over all clients, or an estimate."""

from __future__ import annotations

import functools
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import redgrape as rg
from redgrape import nets
from redgrape.engines import ClientHalf
from redgrape.engines.in_process import InProcess
from redgrape.engines.pool import Pool
from redgrape.errors import ConfigError, TooFewClients
from redgrape.learning import prior
from redgrape.method import ClientSite, ServerSite
from redgrape.methods.balanced_softmax import BalancedSoftmax
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.logit_adjustment import LogitAdjustment
from redgrape.rounds import RunState, rounds

C, CPU = 4, torch.device("cpu")
LINEAR = functools.partial(nets.build, "linear", (3,), C, seed=0)


def examples(counts: list[int], seed: int = 0, dimensions: int = 3, mean: float = 0.0) -> rg.Examples:
    """So many examples of each class, whose features say nothing about the class."""
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    noise = torch.randn(len(y), dimensions, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rg.Examples(mean + noise, y)


def federation(*counts: list[int], **options: Any) -> rg.Federation:
    clients = [examples(c, k, **options) for k, c in enumerate(counts)]
    return rg.Federation(clients, clients[0], len(counts[0]))


def client(counts: list[int]) -> ClientSite:
    return ClientSite(LINEAR, 3, C, 0, 1, 5, CPU, 0, examples(counts))


def server(survey: dict[str, Tensor] | None = None, round: int = 0) -> ServerSite:
    return ServerSite(LINEAR, 3, C, 0, round, 5, CPU, survey=survey or {})


def run(
    method: rg.Method,
    data: rg.Federation,
    build: Any = LINEAR,
    count: int = 1,
    engine: Any = InProcess,
    asked: int = 99,
) -> list[RunState]:
    site = ServerSite(build, data.num_clients, data.num_classes, 0, 0, count, CPU)
    eligible = [k for k in range(data.num_clients) if data.size(k)]
    with engine(ClientHalf(method, data, build, 0, count, CPU)) as running:
        return list(rounds(method, running, site, eligible=eligible, clients_per_round=asked, declared=data.declared))


def total_variation(a: Tensor, b: Any) -> float:
    """Half the sum of the differences of two distributions."""
    return float((a.double() - torch.as_tensor(b).double()).abs().sum() / 2)


# Counts


def test_log_prior() -> None:
    """Counts 6, 3, 1, 0 of ten: log 0.6, log 0.3, log 0.1, and log 1e-8 for the class without examples."""
    expected = [math.log(0.6), math.log(0.3), math.log(0.1), math.log(1e-8)]
    assert prior.log_prior(torch.tensor([6, 3, 1, 0])).tolist() == pytest.approx(expected, rel=1e-14)
    assert prior.log_prior(torch.tensor([0.6, 0.3, 0.1, 0.0], dtype=torch.float64)).tolist() == pytest.approx(
        expected, rel=1e-14
    )


@pytest.mark.parametrize("source", ["local", "global", "estimated"])
def test_only_the_global_prior_asks(source: Any) -> None:
    answer = prior.Prior(source).survey(client([4, 0, 1, 2]))
    assert {name: t.tolist() for name, t in answer.items()} == (
        {"class_counts": [4, 0, 1, 2]} if source == "global" else {}
    )


def test_the_server_starts_from_the_shares_or_from_nothing() -> None:
    """Counts 3, 5, 0, 2 are shares 0.3, 0.5, 0, 0.2; without them every class has 1/4."""
    counts = {"class_counts": torch.tensor([3, 5, 0, 2])}
    assert prior.Prior("global").first({}, server(counts)).tolist() == [0.3, 0.5, 0.0, 0.2]
    biased = {"classifier.bias": torch.zeros(4)}
    for source in ("local", "estimated"):
        assert prior.Prior(source).first(biased, server()).tolist() == [0.25] * 4  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [BalancedSoftmax, LogitAdjustment])
@pytest.mark.parametrize("option", [{"optimizer": "adam"}, {"clip_norm": 1.0}, {"weight_decay": 0.1}])
def test_an_estimate_that_would_be_wrong_is_refused(method: type[FedAvg], option: dict[str, Any]) -> None:
    """It reckons with the steps of plain sgd."""
    with pytest.raises(ConfigError, match="prior=estimated needs sgd without clip_norm or weight_decay"):
        method(prior="estimated", **option)


def test_a_client_trains_by_its_own_counts_or_by_the_servers_prior() -> None:
    site, known = client([1, 3, 0, 4]), torch.tensor([0.5, 0.25, 0.125, 0.125]).double()
    own = [1 / 8, 3 / 8, 1e-8, 4 / 8]
    for source, shares in (("local", own), ("global", known.tolist()), ("estimated", known.tolist())):
        found = prior.Prior(source).log(known, site)  # type: ignore[arg-type]
        assert found.tolist() == pytest.approx([math.log(p) for p in shares], rel=1e-14)


@pytest.mark.parametrize("engine", [InProcess, functools.partial(Pool, workers=2)])
@pytest.mark.parametrize("method", [BalancedSoftmax, LogitAdjustment])
def test_the_survey_is_summed_over_all_clients(engine: Any, method: Any) -> None:
    """One of four clients is asked in the round, but all that have examples were asked before it:
    (4, 2, 0, 0) + (1, 3, 0, 0) + (1, 1, 0, 8) = (6, 6, 0, 8), of 20. The fourth has none. It stays so."""
    data = federation([4, 2, 0, 0], [1, 3, 0, 0], [0, 0, 0, 0], [1, 1, 0, 8])
    for state in run(method(epochs=1), data, engine=engine, count=2, asked=1):
        assert len(state.record["answered"]) == 1
        assert state.server["prior"].tolist() == [0.3, 0.3, 0.0, 0.4]
        assert state.record["prior"] == [0.3, 0.3, 0.0, 0.4]


class Counting(FedAvg):
    """Answers with nested groups, and shows what reached the server."""

    def survey(self, site: ClientSite) -> Any:
        n = torch.tensor(len(site.data))
        return {"n": n, "inner": {"powers": torch.stack([n**2, n**3]).float()}}

    def init_server(self, model: Any, site: ServerSite) -> Any:
        assert site.round == 0
        return {"model": model, "n": site.survey["n"], "powers": site.survey["inner"]["powers"]}

    def server_update(self, server: Any, received: Any, site: ServerSite) -> Any:
        return {**server, **super().server_update(server, received, site)}


@pytest.mark.parametrize("engine", [InProcess, functools.partial(Pool, workers=2)])
def test_any_survey_reaches_init_server_as_a_sum(engine: Any) -> None:
    """Clients 0, 1 and 3 of 3, 5 and 2 examples: n = 10, the squares 9 + 25 + 4, the cubes 27 + 125 + 8."""
    data = federation([1, 1, 1, 0], [5, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1])
    state = run(Counting(epochs=1), data, engine=engine)[0]
    assert int(state.server["n"]) == 10
    assert state.server["powers"].tolist() == [38.0, 160.0]


class Surveyed(InProcess):
    """Client 1 answers something else."""

    lie: Any = None

    def survey(self, clients: Any) -> Any:
        for k, answer in super().survey(clients):
            yield k, self.lie(answer["class_counts"]) if k == 1 else answer


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (lambda n: {"class_counts": n.double() * torch.nan}, "torch.float64; it must be torch.int64"),
        (lambda n: {"class_counts": n - 10**9}, "must count examples"),
        (lambda n: {"class_counts": n * 2}, "must count examples, of which there are 4 at most"),
        (lambda n: {"class_counts": torch.tensor([2**62, 2**62, 2**62, 2**62])}, "must count examples"),
        (lambda n: {"class_counts": n.sum()}, r"is \[\]; it must be \[4\]"),
        (lambda n: {"counts": n}, "'class_counts' is missing"),
        (lambda n: {"class_counts": n, "more": n}, "'more' is not part of this answer"),
        (lambda n: {}, "empty"),
    ],
)
@pytest.mark.parametrize("method", [BalancedSoftmax, LogitAdjustment])
def test_an_answer_to_the_survey_that_cannot_be_stops_the_run(method: Any, lie: Any, words: str) -> None:
    data = federation([4, 2, 0, 0], [1, 3, 0, 0])

    def engine(half: Any) -> Any:
        made = Surveyed(half)
        made.lie = lie
        return made

    with pytest.raises(TooFewClients, match=f"the answer of client 1 to the survey .* was rejected: .*{words}"):
        run(method(epochs=1), data, engine=engine)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (torch.tensor([3, 2, -1, 0]), "must count examples"),
        (torch.tensor([0, 0, 0, 0]), "counts no example at all"),
        (torch.tensor([9, 9, 9, 9]), "of which there are 10 at most"),
    ],
)
def test_a_sum_of_surveys_that_cannot_be_stops_the_run(answer: Tensor, words: str) -> None:
    """Here the sum arrives as a secure sum does: of nobody."""

    class Summed(InProcess):
        def survey(self, clients: Any) -> Any:
            yield None, {"class_counts": answer}

    with pytest.raises(TooFewClients, match=f"the sum of the clients' answers to the survey was rejected: .*{words}"):
        run(BalancedSoftmax(epochs=1), federation([4, 2, 0, 0], [1, 3, 0, 0]), engine=Summed)


def test_any_survey_must_be_finite_and_like_that_of_an_empty_client() -> None:
    class Uneven(Counting):
        def survey(self, site: ClientSite) -> Any:
            return {"n": torch.ones(1 + site.client)}

    class Infinite(Counting):
        def survey(self, site: ClientSite) -> Any:
            return {"n": torch.tensor(math.inf)}

    data = federation([4, 2, 0, 0], [1, 3, 0, 0])
    with pytest.raises(TooFewClients, match=r"client 1 .*'n' is \[2\]; it must be \[1\]"):
        run(Uneven(epochs=1), data)
    with pytest.raises(TooFewClients, match=r"client 0 .*'n' is not finite"):
        run(Infinite(epochs=1), data)


# The losses


def tiny_net() -> rg.Net:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return rg.Net(nn.Sequential(nn.Flatten(), nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, C)).double()


def adjusted_descent(data: rg.Examples, shift: Tensor, steps: int, lr: float) -> dict[str, Tensor]:
    """Full-batch descent on the mean of -log(exp(z_y + s_y) / sum_c exp(z_c + s_c)), written out; what it changed."""
    net, before = tiny_net(), tiny_net().state_dict()
    x, y = data.inputs(torch.arange(len(data)), torch.float64), data.labels
    for _ in range(steps):
        z = net(x) + shift
        loss = (torch.logsumexp(z, dim=1) - z[torch.arange(len(y)), y]).mean()
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, g in zip(net.parameters(), gradients, strict=True):
                p -= lr * g
    return {name: p.detach() - before[name] for name, p in net.named_parameters()}


@pytest.mark.parametrize("source", ["local", "global"])
@pytest.mark.parametrize("tau", [None, 0.5, 2.0])
def test_training_with_the_prior_is_the_formula(source: Any, tau: float | None) -> None:
    """CE(z + tau log pi, y); balanced softmax has log n for tau log pi, which is another constant. Class 3 has no
    example at client 0, and none at all."""
    data = federation([6, 3, 1, 0], [1, 2, 2, 0])
    options = {"epochs": 3, "lr": 0.4, "momentum": 0.0, "prior": source}
    method = BalancedSoftmax(**options) if tau is None else LogitAdjustment(tau=tau, **options)
    server = run(method, data, tiny_net)[0].server
    counts = {0: [6, 3, 1, 0], 1: [1, 2, 2, 0]} if source == "local" else {0: [7, 5, 3, 0], 1: [7, 5, 3, 0]}
    deltas = []
    for k in (0, 1):
        log_share = [math.log(n / sum(counts[k]) if n else 1e-8) for n in counts[k]]
        shift = (1.0 if tau is None else tau) * torch.tensor(log_share, dtype=torch.float64)
        deltas.append(adjusted_descent(data.client(k), shift, 3, 0.4))
    for name, start in tiny_net().state_dict().items():
        expected = start + (10 * deltas[0][name] + 5 * deltas[1][name]) / 15
        torch.testing.assert_close(server["model"][name], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("source", ["local", "global", "estimated"])
def test_balanced_softmax_is_logit_adjustment_with_tau_1(source: Any) -> None:
    data = federation([6, 3, 1, 0], [1, 2, 2, 1], [0, 0, 0, 5])
    options = {"epochs": 2, "batch_size": 3, "lr": 0.2, "prior": source}
    ours = run(BalancedSoftmax(**options), data, tiny_net, 3)
    theirs = run(LogitAdjustment(tau=1.0, **options), data, tiny_net, 3)
    plain = run(FedAvg(epochs=2, batch_size=3, lr=0.2), data, tiny_net, 3)
    for a, b in zip(ours, theirs, strict=True):
        assert rg.tree.equal(a.server, b.server)
    assert not torch.allclose(ours[-1].server["model"]["classifier.bias"], plain[-1].server["model"]["classifier.bias"])


UNIFORM = [6, 3, 1, 2], [1, 4, 6, 5]  # 7 of each class, in all


def models_without_shift(states: list[RunState]) -> list[dict[str, Tensor]]:
    """The models; without what all biases have in common, which no softmax sees."""
    bias = "classifier.bias"
    return [{**s.server["model"], bias: s.server["model"][bias] - s.server["model"][bias].mean()} for s in states]


@pytest.mark.parametrize("change", [{"stage": "training"}, {"stage": "post_hoc"}, {"stage": "training", "tau": 0.0}])
def test_logit_adjustment_by_a_uniform_prior_is_fedavg(change: dict[str, Any]) -> None:
    """Also with tau = 0, whatever the prior."""
    data = federation(*(([9, 3, 1, 0], [1, 4, 0, 5]) if "tau" in change else UNIFORM))
    options = {"epochs": 2, "batch_size": 3, "lr": 0.2}
    ours = models_without_shift(run(LogitAdjustment(**options, **change), data, tiny_net, 3))
    for a, b in zip(ours, models_without_shift(run(FedAvg(**options), data, tiny_net, 3)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_post_hoc_trains_as_fedavg_and_shifts_the_deployed_bias() -> None:
    """Shares 0.5, 0.25, 0.125, 0.125 with tau 2: the deployed bias is the trained one minus 2 log share, for class 0
    2 log 2 more, for class 1 2 log 4, for the others 2 log 8. The clients never see the shift."""
    data = federation([8, 4, 1, 1], [0, 0, 1, 1])
    options = {"epochs": 2, "batch_size": 3, "lr": 0.2}
    states = run(LogitAdjustment(stage="post_hoc", tau=2.0, **options), data, tiny_net, 3)
    shift = 2 * torch.tensor([math.log(2), math.log(4), math.log(8), math.log(8)], dtype=torch.float64)
    for a, b in zip(states, run(FedAvg(**options), data, tiny_net, 3), strict=True):
        for name, t in b.server["model"].items():
            expected = t + shift if name == "classifier.bias" else t
            torch.testing.assert_close(a.server["model"][name], expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(a.server["trained_bias"], b.server["model"]["classifier.bias"])


def test_the_model_before_the_first_round_is_shifted_too() -> None:
    method = LogitAdjustment(stage="post_hoc")
    model = dict(tiny_net().state_dict())
    start = method.init_server(model, server({"class_counts": torch.tensor([2, 1, 1, 0])}))
    expected = [math.log(2), math.log(4), math.log(4), math.log(4)]  # a class that nobody has: as the rarest
    assert (start["model"]["classifier.bias"] - model["classifier.bias"]).tolist() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(method.broadcast(start)["model"]["classifier.bias"], model["classifier.bias"])


def test_post_hoc_with_local_counts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"post_hoc with a local prior.*choose global or estimated") as error:
        LogitAdjustment(stage="post_hoc", prior="local")
    assert "\n" not in str(error.value)


# The estimate


def walk(pi: Tensor, h: Tensor, lr: float, steps: int, momentum: float = 0.0) -> tuple[Tensor, Tensor]:
    """A linear softmax classifier from zero, on examples that all have the features h, by the gradient of the mean
    cross-entropy: the changes of its weights and its bias."""
    W, b = torch.zeros(len(pi), len(h)).double(), torch.zeros(len(pi)).double()
    v_W, v_b = torch.zeros_like(W), torch.zeros_like(b)
    for _ in range(steps):
        r = torch.softmax(W @ h + b, dim=0) - pi
        v_W, v_b = momentum * v_W + r[:, None] * h, momentum * v_b + r
        W, b = W - lr * v_W, b - lr * v_b
    return W, b


PRIORS = [[0.7, 0.2, 0.08, 0.02], [0.25] * 4, [0.97, 0.01, 0.01, 0.01], [0.5, 0.5, 0.0, 0.0]]


@pytest.mark.parametrize("pi", PRIORS)
@pytest.mark.parametrize("size", [0.0, 0.5, 3.0])
@pytest.mark.parametrize(("lr", "steps"), [(0.01, 10), (0.05, 40), (0.1, 200)])
def test_the_estimate_recovers_the_prior_where_features_say_nothing(
    pi: list[float], size: float, lr: float, steps: int
) -> None:
    """A short walk moves the bias by lr S (pi - 1/C); a long one arrives at log pi. Features of size 0 leave the bias
    alone at work, features of size 3 make a logit move ten times as far as its bias."""
    truth = torch.tensor(pi).double()
    h = size * torch.tensor([0.6, -0.8, 0.0]).double()
    found = prior.estimate_prior(*walk(truth, h, lr, steps), walked=lr * steps)
    assert torch.isfinite(found).all() and (found >= 0).all() and float(found.sum()) == pytest.approx(1)
    assert total_variation(found, truth) < 0.05


def test_the_first_step_by_hand() -> None:
    """One step of lr 0.01 from zero, prior (0.7, 0.3): p is (0.5, 0.5) all the way but for a thousandth, and the bias
    moves by 0.01 (0.2, -0.2), so that pi = bias / 0.01 + p = (0.7, 0.3)."""
    found = prior.estimate_prior(torch.zeros(2, 3), torch.tensor([0.002, -0.002]), walked=0.01)
    assert found.tolist() == pytest.approx([0.7, 0.3], abs=1e-3)


def test_a_classifier_that_did_not_move_says_nothing() -> None:
    nothing = torch.zeros(4), torch.full((4,), 0.3)  # all alike is no movement to a softmax
    for bias in nothing:
        assert prior.estimate_prior(torch.zeros(4, 2), bias, 1.0).tolist() == [0.25] * 4
    assert prior.estimate_prior(torch.ones(4, 2), torch.tensor([1.0, 0.0, 0.0, 0.0]), 0.0).tolist() == [0.25] * 4


@hypothesis.given(
    bias=st.lists(st.floats(-20, 20, allow_subnormal=False), min_size=3, max_size=3),
    scale=st.floats(-5, 5, allow_subnormal=False),
    walked=st.floats(1e-6, 1e3),
)
@hypothesis.settings(max_examples=25)
def test_any_movement_gives_a_distribution(bias: list[float], scale: float, walked: float) -> None:
    moved = torch.tensor(bias)
    found = prior.estimate_prior(scale * moved[:, None].expand(3, 2), moved, walked)
    assert torch.isfinite(found).all() and (found >= 0).all()
    assert float(found.sum()) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    "counts",
    [([280, 80, 32, 8], [60, 20, 8, 2]), ([240, 4, 0, 0], [4, 120, 32, 0]), ([20, 60, 20, 40], [60, 20, 60, 40])],
)
def test_the_server_estimates_the_prior_of_the_clients(counts: Any, momentum: float) -> None:
    """From the updates of the first round, weighted by the clients' examples, whether a class is everywhere, at one
    client or nowhere; and it keeps it. Features that say nothing about the class, with a mean of 0.5; the classifier
    starts at zero."""
    data = federation(*counts, mean=0.5)
    method = LogitAdjustment(prior="estimated", momentum=momentum, epochs=2, batch_size=16, lr=0.02)
    states = run(method, data, functools.partial(zero_net, C), 2)
    truth = torch.tensor(data.class_counts) / data.class_counts.sum()
    assert total_variation(states[0].server["prior"], truth) < 0.05
    assert torch.equal(states[0].server["prior"], states[1].server["prior"])


def zero_net(classes: int) -> rg.Net:
    """A linear classifier of zeros."""
    net = rg.Net(nn.Flatten(), nn.Linear(3, classes).double())
    for p in net.parameters():
        nn.init.zeros_(p)
    return net


def test_the_first_round_of_an_estimate_is_fedavg() -> None:
    data, options = federation([9, 3, 1, 0], [1, 4, 0, 5]), {"epochs": 2, "batch_size": 3, "lr": 0.2}
    first = run(BalancedSoftmax(prior="estimated", **options), data, tiny_net)[0].server["model"]
    torch.testing.assert_close(first, run(FedAvg(**options), data, tiny_net)[0].server["model"], rtol=1e-12, atol=1e-14)


def test_only_an_estimate_changes_the_prior_and_only_once() -> None:
    known, method = torch.tensor([0.4, 0.3, 0.2, 0.1]).double(), FedAvg()
    moved = {"classifier.weight": torch.zeros(C, 3), "classifier.bias": torch.tensor([0.03, 0.0, -0.01, -0.02])}
    updates = {0: {"delta": moved, "count": torch.tensor(10)}}
    sources: Any = (("global", 1), ("local", 1), ("estimated", 2), ("estimated", 1))
    found = []
    for source, round in sources:
        site = server(round=round)
        received = rg.Exchange().receive(updates, method.parts(LINEAR().state_dict(), site), site)
        found.append(prior.Prior(source).next(known, received, method, site))
    assert all(same is known for same in found[:-1])
    assert total_variation(found[-1], known) > 0.05


def test_estimates_are_weighted_by_the_clients_examples() -> None:
    """Two clients of one class each, of 30 and 10 examples, 100 full-batch steps of 0.1 from zero: the estimates are
    nearly (1, 0) and (0, 1), so their mean is nearly (0.75, 0.25)."""
    data = federation([30, 0], [0, 10])
    method = BalancedSoftmax(prior="estimated", epochs=100, batch_size=64, lr=0.1, momentum=0.0)
    assert total_variation(run(method, data, functools.partial(zero_net, 2))[0].server["prior"], [0.75, 0.25]) < 0.05


def test_an_estimate_needs_a_bias() -> None:
    build = functools.partial(biasless)
    with pytest.raises(ConfigError, match="prior=estimated needs a classifier with a bias"):
        run(BalancedSoftmax(prior="estimated", epochs=1), federation([3, 2, 1, 1]), build)
    with pytest.raises(ConfigError, match="this net has none; choose stage=training"):
        run(LogitAdjustment(stage="post_hoc", epochs=1), federation([3, 2, 1, 1]), build)


def biasless() -> rg.Net:
    return rg.Net(nn.Flatten(), nn.Linear(3, C, bias=False).double())


def test_classes_that_nobody_has_do_no_harm() -> None:
    """Their log prior is log 1e-8, so that their logits take no part, and gradients stay finite in float32."""
    z = torch.zeros(2, 3, requires_grad=True)
    shift = prior.log_prior(torch.tensor([3, 1, 0])).float()
    F.cross_entropy(z + shift, torch.tensor([0, 1])).backward()
    assert z.grad is not None and torch.isfinite(z.grad).all()
    assert float(z.grad[:, 2].abs().max()) < 1e-7


@pytest.mark.parametrize("source", ["global", "estimated"])
def test_a_post_hoc_shift_does_not_let_an_absent_class_win(source: str) -> None:
    """Three classes that the net learns to tell apart and a fourth that nobody has: it is hardly ever predicted."""
    data = federation([40, 30, 20, 0], [30, 40, 10, 0])
    method = LogitAdjustment(stage="post_hoc", prior=source, epochs=5, lr=0.1)  # type: ignore[arg-type]
    result = rg.train(method, data, functools.partial(tiny_net), rounds=5)
    with torch.no_grad():
        predicted = result.net(data.train.x.to(result.net.classifier.weight.dtype)).argmax(dim=1)
    assert float((predicted == 3).double().mean()) < 0.05
