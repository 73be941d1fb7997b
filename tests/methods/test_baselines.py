"""The mathematics of the methods beside RedGrape: each against a plain reading of its formulas, where they coincide
with one another, and numbers worked out by hand. CReFF and the class priors have files of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import redgrape as rg
from redgrape import methods, tree
from redgrape.data.prepare import DataOptions, prepare
from redgrape.engines import ClientHalf
from redgrape.engines.in_process import InProcess
from redgrape.errors import ConfigError
from redgrape.exchange import Exchange, Received
from redgrape.method import ClientSite, ServerSite
from redgrape.methods import climb, fedic
from redgrape.methods.climb import CLIMB
from redgrape.methods.fed_focal import FedFocal, focal_loss
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.fedavgm import FedAvgM
from redgrape.methods.feddyn import FedDyn
from redgrape.methods.fedic import FEDIC
from redgrape.methods.fedopt import FedOpt
from redgrape.methods.fedprox import FedProx
from redgrape.methods.ratio_loss import RatioLoss, class_ratios
from redgrape.methods.scaffold import Scaffold
from redgrape.reading import run_tables, run_view
from redgrape.rounds import RunState, rounds, sample_clients
from redgrape.testing.cases import IMAGE, float64_net
from toys import random

CPU, C = torch.device("cpu"), 3
Named = dict[str, Tensor]


def examples(counts: Sequence[int], seed: int = 0, shape: tuple[int, ...] = (4,)) -> rg.Examples:
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return rg.Examples(random(len(y), *shape, seed=seed) + y.reshape(-1, *[1] * len(shape)), y)


def net() -> rg.Net:
    """A small net with a curved loss, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return rg.Net(nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, C)).double()


# Four clients of 9, 4, 6 and 2 examples, of which three answer a round.
COUNTS = (5, 3, 1), (0, 4, 0), (2, 1, 3), (1, 0, 1)
AUXILIARY = (3, 4, 2)


def federation(*counts: Sequence[int], shape: tuple[int, ...] = (4,)) -> rg.Federation:
    clients = [examples(c, k, shape) for k, c in enumerate(counts or COUNTS)]
    return rg.Federation(clients, clients[0], C, auxiliary=examples(AUXILIARY, 77, shape))


def run(
    method: rg.Method,
    data: rg.Federation | None = None,
    build: Callable[[], rg.Net] = net,
    *,
    count: int = 3,
    asked: int = 3,
) -> list[RunState]:
    """The states after each round, in this process."""
    data = data or federation()
    site = ServerSite(build, data.num_clients, C, 0, 0, count, CPU, data.auxiliary)
    with InProcess(ClientHalf(method, data, build, 0, count, CPU)) as engine:
        return list(rounds(method, engine, site, eligible=range(data.num_clients), clients_per_round=asked))


def answered(data: rg.Federation, t: int, asked: int = 3) -> list[int]:
    return sample_clients(range(data.num_clients), asked, 0, t)


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor], tolerance: float = 1e-10) -> None:
    assert a.keys() == b.keys()
    for name, t in a.items():
        torch.testing.assert_close(t, b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def differ(a: Mapping[str, Tensor], b: Mapping[str, Tensor], by: float = 1e-4) -> None:
    assert max(float((t - b[name]).abs().max()) for name, t in a.items() if t.is_floating_point()) > by


# A plain reading: full batches, one gradient after another, numbers by name.


def whole(data: rg.Federation, k: int) -> tuple[Tensor, Tensor]:
    part = data.client(k)
    return part.inputs(torch.arange(len(part)), torch.float64), part.labels


def parameters() -> Named:
    return {name: p.detach().clone() for name, p in net().named_parameters()}


def outputs(theta: Named, x: Tensor) -> Tensor:
    z: Tensor = torch.func.functional_call(net(), theta, (x,))
    return z


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    return (torch.logsumexp(z, dim=1) - z[torch.arange(len(y)), y]).mean()


def gradient(theta: Named, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy) -> Named:
    leaves = {name: p.clone().requires_grad_() for name, p in theta.items()}
    found = torch.autograd.grad(loss(outputs(leaves, x), y), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def descend(
    theta: Named,
    x: Tensor,
    y: Tensor,
    steps: int,
    lr: float,
    momentum: float = 0.0,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    extra: Callable[[Named], Named] | None = None,
) -> Named:
    """theta after so many steps on the loss; `extra` is what a method adds to the gradient at theta."""
    velocity = {name: torch.zeros_like(p) for name, p in theta.items()}
    for _ in range(steps):
        g = gradient(theta, x, y, loss)
        added = extra(theta) if extra else {name: torch.zeros_like(t) for name, t in g.items()}
        velocity = {name: momentum * velocity[name] + g[name] + added[name] for name in g}
        theta = {name: p - lr * velocity[name] for name, p in theta.items()}
    return theta


def plus(*terms: tuple[float, Named]) -> Named:
    """The sum of these multiples."""
    return {name: torch.stack([factor * t[name] for factor, t in terms]).sum(dim=0) for name in terms[0][1]}


def averaged(theta: Named, locals_: Mapping[int, Named], weights: Mapping[int, float], lr: float = 1.0) -> Named:
    total = sum(weights[k] for k in locals_)
    deltas = [(lr * weights[k] / total, plus((1, theta_k), (-1, theta))) for k, theta_k in locals_.items()]
    return plus((1, theta), *deltas)


FULL = {"epochs": 4, "batch_size": 64, "lr": 0.3}
SIZES = dict(enumerate(sum(c) for c in COUNTS))


# FedProx


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedprox_is_its_formula(momentum: float) -> None:
    """Gradient steps on f_k + mu/2 ||theta - theta^t||^2."""
    data, theta = federation(), parameters()
    for t, state in enumerate(run(FedProx(mu=0.7, momentum=momentum, **FULL), data), start=1):
        start = theta
        locals_ = {
            k: descend(
                start, *whole(data, k), 4, 0.3, momentum, extra=lambda now, at=start: plus((0.7, now), (-0.7, at))
            )
            for k in answered(data, t)
        }
        theta = averaged(start, locals_, SIZES)
        same(state.server["model"], theta)


def test_fedprox_without_mu_is_fedavg() -> None:
    """Bit for bit, with BatchNorm and dropout."""
    data = federation(shape=IMAGE)
    options: dict[str, Any] = {"epochs": 2, "batch_size": 4, "lr": 0.1}
    for a, b in zip(
        run(FedProx(mu=0.0, **options), data, image_net), run(FedAvg(**options), data, image_net), strict=True
    ):
        assert tree.equal(a.server, b.server)


def image_net() -> rg.Net:
    encoder = float64_net().encoder
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return rg.Net(encoder, nn.Linear(6, C).double())


# FedAvgM and FedOpt: the server's optimizer


def answer(delta: float, count: int = 1, **more: Any) -> dict[str, Any]:
    """An update that changes one number."""
    return {"delta": one_number(delta), "buffers": {}, "count": torch.tensor(count), **more}


def site(num_clients: int = 4, round: int = 1) -> ServerSite:
    return ServerSite(net, num_clients, C, 0, round, 5, CPU)


def one_number(value: float) -> Named:
    return {"w": torch.tensor([value], dtype=torch.float64)}


def received(method: rg.Method, updates: Mapping[int, Any], here: ServerSite) -> Received:
    return Exchange().receive(updates, method.parts(parameters(), here), here)


def test_fedavgm_by_hand() -> None:
    """From 10, beta 0.5, server_lr 0.5. Clients of 1 and 3 examples change 1 and 5: Delta = (1 + 15) / 4 = 4, v = 4,
    10 + 0.5 * 4 = 12. Then Delta = 1: v = 0.5 * 4 + 1 = 3, 12 + 0.5 * 3 = 13.5."""
    method = FedAvgM(beta=0.5, server_lr=0.5)
    server: Any = {"model": one_number(10.0), "velocity": one_number(0.0)}
    server = method.server_update(server, received(method, {0: answer(1.0, 1), 3: answer(5.0, 3)}, site()), site())
    assert (float(server["model"]["w"]), float(server["velocity"]["w"])) == (12.0, 4.0)
    server = method.server_update(server, received(method, {1: answer(1.0, 7)}, site()), site())
    assert (float(server["model"]["w"]), float(server["velocity"]["w"])) == (13.5, 3.0)


def test_fedavgm_without_beta_is_fedavg() -> None:
    data = federation(shape=IMAGE)
    options: dict[str, Any] = {"epochs": 2, "batch_size": 4, "lr": 0.1, "server_lr": 0.7}
    for a, b in zip(
        run(FedAvgM(beta=0.0, **options), data, image_net), run(FedAvg(**options), data, image_net), strict=True
    ):
        assert tree.equal(a.server["model"], b.server["model"])


def test_fedavgm_keeps_momentum_of_parameters_only() -> None:
    """Running statistics are averaged, not stepped along."""
    server = FedAvgM().init_server(dict(image_net().state_dict()), ServerSite(image_net, 3, C, 0, 0, 3, CPU))
    assert server["velocity"].keys() == dict(image_net().named_parameters()).keys()
    assert not any(t.any() for t in server["velocity"].values())


ROOT = math.sqrt
OPTIMIZERS = [
    # v: 1 + 3 = 4, 4 + 5 = 9, 9 + 7 = 16
    ("adagrad", [ROOT(3), -ROOT(5), ROOT(7)], [2.0, 3.0, 4.0]),
    # v: (1 + 7) / 2 = 4, (4 + 14) / 2 = 9, (9 + 23) / 2 = 16
    ("adam", [ROOT(7), -ROOT(14), ROOT(23)], [2.0, 3.0, 4.0]),
    # v: 1 < 6, so 1 + 6 / 2 = 4; 4 > 3.5, so 4 - 3.5 / 2 = 2.25; 2.25 is Delta^2, so it stays
    ("yogi", [ROOT(6), -ROOT(3.5), 1.5], [2.0, 1.5, 1.5]),
]


@pytest.mark.parametrize(("name", "deltas", "roots"), OPTIMIZERS)
def test_fedopt_by_hand(name: Any, deltas: list[float], roots: list[float]) -> None:
    """Three steps with beta_1 = beta_2 = 0.5, tau = 1, eta = 0.1, from theta = 0, m = 0, v = tau^2 = 1, chosen so that
    sqrt(v) is a plain number: m <- (m + Delta) / 2, theta <- theta + 0.1 m / (sqrt(v) + 1). The two clients count
    alike, whatever they have: they change Delta - 1 and Delta + 1."""
    method = FedOpt(server_optimizer=name, beta_1=0.5, beta_2=0.5, tau=1.0, server_lr=0.1)
    server: Any = {"model": one_number(0.0), "m": one_number(0.0), "v": one_number(1.0)}
    theta = m = 0.0
    for delta, root in zip(deltas, roots, strict=True):
        server = method.server_update(
            server, received(method, {0: answer(delta - 1, 1), 1: answer(delta + 1, 9)}, site()), site()
        )
        m = (m + delta) / 2
        theta += 0.1 * m / (root + 1)
        assert float(server["v"]["w"]) == pytest.approx(root**2, rel=1e-12)
        assert float(server["m"]["w"]) == pytest.approx(m, rel=1e-12)
        assert float(server["model"]["w"]) == pytest.approx(theta, rel=1e-12)


@pytest.mark.parametrize(("weights", "delta"), [("uniform", 3.0), ("count", 4.0)])
def test_fedopt_weights(weights: Any, delta: float) -> None:
    """Changes 1 and 5 of 1 and 3 examples: (1 + 5) / 2 = 3 or (1 + 15) / 4 = 4; m is a tenth of it."""
    server: Any = {"model": one_number(0.0), "m": one_number(0.0), "v": one_number(1.0)}
    method, updates = FedOpt(client_weights=weights), {0: answer(1.0, 1), 1: answer(5.0, 3)}
    new = method.server_update(server, received(method, updates, site()), site())
    assert float(new["m"]["w"]) == pytest.approx(0.1 * delta)


def test_fedopt_starts_at_tau_squared_and_has_no_bias_correction() -> None:
    """The first step of adam from v = tau^2 = 1e-6: Delta = 1 gives m = 0.1, v = 0.99e-6 + 0.01."""
    model = dict(net().state_dict())
    server = FedOpt().init_server(model, site(round=0))
    assert all(not t.any() for t in server["m"].values())
    assert all((t == 1e-6).all() for t in server["v"].values())
    updates = {0: {"delta": {n: torch.ones_like(t) for n, t in model.items()}, "buffers": {}, "count": torch.tensor(1)}}
    new = FedOpt().server_update(server, received(FedOpt(), updates, site()), site())
    step = 0.01 * 0.1 / (math.sqrt(0.99e-6 + 0.01) + 1e-3)
    same(new["model"], {name: t + step for name, t in model.items()}, 1e-12)


@pytest.mark.parametrize("weights", ["uniform", "count"])
def test_fedopt_of_a_huge_tau_is_averaging(weights: Any) -> None:
    """sqrt(v) = sqrt(tau^2 + Delta^2) is tau but for 1e-12, so that theta moves by eta Delta / (2 tau): by Delta for
    eta = 2 tau. By counts it is FedAvg; uniformly, FedAvg of clients of equal size."""
    data = federation() if weights == "count" else federation((4, 0, 2), (1, 2, 3), (2, 2, 2), (0, 5, 1))
    method = FedOpt(server_optimizer="adagrad", beta_1=0.0, tau=1e5, server_lr=2e5, client_weights=weights, **FULL)
    for a, b in zip(run(method, data), run(FedAvg(**FULL), data), strict=True):
        same(a.server["model"], b.server["model"], 1e-9)


# SCAFFOLD


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_scaffold_is_its_formula(momentum: float) -> None:
    """Option II over four rounds in which three of four clients take part: S steps of g + c - c_i, c_i+ = c_i - c +
    (x - y) / (S eta_l), and clients that count alike. With momentum m the S steps go as far as the sum of
    (1 - m^s) / (1 - m) plain ones: 1 + 1.9 + 2.71 + 3.439 = 9.049 for m = 0.9."""
    data, x = federation(), parameters()
    zero = {name: torch.zeros_like(t) for name, t in x.items()}
    c, c_i = zero, dict.fromkeys(range(4), zero)
    walked = 0.3 * (4 if momentum == 0 else 9.049)
    for t, state in enumerate(run(Scaffold(momentum=momentum, server_lr=0.8, **FULL), data, count=4), start=1):
        locals_, changes = {}, []
        for k in answered(data, t):
            correction = plus((1, c), (-1, c_i[k]))
            y = descend(x, *whole(data, k), 4, 0.3, momentum, extra=lambda _, added=correction: added)
            new = plus((1, c_i[k]), (-1, c), (1 / walked, x), (-1 / walked, y))
            changes.append((1 / 4, plus((1, new), (-1, c_i[k]))))
            locals_[k], c_i = y, {**c_i, k: new}
        x, c = averaged(x, locals_, dict.fromkeys(range(4), 1.0), lr=0.8), plus((1, c), *changes)
        same(state.server["model"], x)
        same(state.server["c"], c)
        for k, stored in state.clients.items():
            same(stored["c_i"], c_i[k])


def test_scaffolds_first_round_is_unweighted_fedavg() -> None:
    """c and c_i are zero: the clients train as in FedAvg, but count alike, though they hold 9, 4, 6 and 2 examples."""
    data = federation()
    options: dict[str, Any] = {"epochs": 2, "batch_size": 3, "lr": 0.2}
    half = ClientHalf(FedAvg(momentum=0.0, **options), data, net, 0, 3, CPU)
    start = parameters()
    deltas = [half.run(k, {"model": start}, None, 1).update["delta"] for k in range(4)]
    first = run(Scaffold(**options), data, count=3, asked=4)[0].server["model"]
    same(first, plus((1, start), *[(1 / 4, delta) for delta in deltas]), 1e-14)
    differ(first, run(FedAvg(momentum=0.0, **options), data, count=3, asked=4)[0].server["model"])


@pytest.mark.parametrize("asked", [4, 2])
def test_scaffolds_server_variate_is_the_mean_of_the_clients(asked: int) -> None:
    """c = 1/N sum_i c_i after every round; whoever did not take part yet has c_i = 0."""
    states = run(Scaffold(epochs=2, batch_size=3, lr=0.2), federation(), count=4, asked=asked)
    for state in states:
        terms = [(1 / 4, s["c_i"]) for s in state.clients.values()]
        same(state.server["c"], plus(*terms), 1e-13)
    differ(states[-1].server["c"], {name: torch.zeros_like(t) for name, t in states[-1].server["c"].items()})


def test_scaffolds_variate_after_one_step_is_the_gradient() -> None:
    """S = 1: y = x - eta (g + c - c_i), so c_i+ = c_i - c + g + c - c_i = g at the received model, whatever c and c_i
    are; with a decayed learning rate too, which is 0.05 here, half of 0.1 in the second of three rounds."""
    method = Scaffold(epochs=1, batch_size=64, lr=0.1, lr_schedule="exponential", lr_final=0.25)
    data, theta = federation(), parameters()
    c, c_i = ({name: random(*t.shape, seed=s) for name, t in theta.items()} for s in (1, 2))
    here = ClientSite(net, 4, C, 0, 2, 3, CPU, 0, data.client(0))
    assert method.learning_rate(here) == pytest.approx(0.05)
    update, state = method.client_update({"model": theta, "c": c}, {"c_i": c_i}, here)
    g = gradient(theta, *whole(data, 0))
    same(state["c_i"], g, 1e-12)
    same(update["delta_c"], plus((1, g), (-1, c_i)), 1e-12)
    same(update["delta"], plus((-0.05, g), (-0.05, c), (0.05, c_i)), 1e-12)


@pytest.mark.parametrize(
    ("momentum", "steps", "effective"), [(0.0, 3, 3.0), (0.5, 3, 4.25), (0.9, 3, 5.61), (0.9, 0, 0.0)]
)
def test_effective_steps(momentum: float, steps: int, effective: float) -> None:
    """The velocity of a constant gradient is 1, 1 + m, 1 + m + m^2 times it: for m = 0.5 in all 1 + 1.5 + 1.75."""
    assert FedAvg(momentum=momentum).effective_steps(steps) == pytest.approx(effective)


@pytest.mark.parametrize(("count", "steps"), [(1, 5), (64, 5), (65, 10), (640, 50)])
def test_steps(count: int, steps: int) -> None:
    """Five epochs in batches of 64, of which the last may be small."""
    assert FedAvg().steps(count) == steps


# FedDyn


@pytest.mark.parametrize("asked", [4, 3])
def test_feddyn_is_its_formula(asked: int) -> None:
    """f_k - <g_k, theta> + a/2 ||theta - theta^t||^2; g_k <- g_k - a (theta_k - theta^t); h <- h - a/N sum (theta_k -
    theta^t); theta <- mean theta_k - h / a."""
    data, theta, a = federation(), parameters(), 0.4
    zero = {name: torch.zeros_like(t) for name, t in theta.items()}
    h, g = zero, dict.fromkeys(range(4), zero)
    for t, state in enumerate(run(FedDyn(alpha=a, **FULL), data, count=4, asked=asked), start=1):
        chosen, at, locals_ = answered(data, t, asked), theta, {}
        for k in chosen:
            pull = plus((-a, at), (-1, g[k]))
            locals_[k] = descend(at, *whole(data, k), 4, 0.3, extra=lambda now, p=pull: plus((a, now), (1, p)))
            g = {**g, k: plus((1, g[k]), (-a, locals_[k]), (a, at))}
        h = plus((1, h), *[(-a / 4, plus((1, locals_[k]), (-1, at))) for k in chosen])
        theta = plus(*[(1 / len(chosen), theta_k) for theta_k in locals_.values()], (-1 / a, h))
        same(state.server["model"], theta)
        same(state.server["h"], h)
        for k, stored in state.clients.items():
            same(stored["g"], g[k])


def test_feddyns_server_by_hand() -> None:
    """Two of four clients answer, with 1 and 3 (and any numbers of examples); a = 0.5. h = 0 - 0.5 / 4 (1 + 3) = -0.5,
    theta = 10 + 2 + 0.5 / 0.5 = 13. Then one answers with -2: h = -0.5 + 0.25 = -0.25, theta = 13 - 2 + 0.5 = 11.5."""
    method = FedDyn(alpha=0.5)
    server: Any = {"model": one_number(10.0), "h": one_number(0.0)}
    server = method.server_update(server, received(method, {0: answer(1.0, 8), 2: answer(3.0, 1)}, site(4)), site(4))
    assert (float(server["h"]["w"]), float(server["model"]["w"])) == (-0.5, 13.0)
    server = method.server_update(server, received(method, {1: answer(-2.0)}, site(4)), site(4))
    assert (float(server["h"]["w"]), float(server["model"]["w"])) == (-0.25, 11.5)


def test_feddyns_first_round_is_a_doubled_fedprox_step() -> None:
    """g_k = h = 0: the clients do FedProx with mu = a; h = -a mean delta, so theta moves by twice the mean delta where
    all take part. g_k = -a delta_k."""
    data = federation()
    options: dict[str, Any] = {"epochs": 2, "batch_size": 3, "lr": 0.2, "momentum": 0.0}
    start = parameters()
    half = ClientHalf(FedProx(mu=0.3, **options), data, net, 0, 3, CPU)
    deltas = {k: half.run(k, {"model": start}, None, 1).update["delta"] for k in range(4)}
    state = run(FedDyn(alpha=0.3, **options), data, count=3, asked=4)[0]
    same(state.server["model"], plus((1, start), *[(2 / 4, d) for d in deltas.values()]), 1e-12)
    for k, d in deltas.items():
        same(state.clients[k]["g"], plus((-0.3, d)), 1e-13)


# The fixed point of clients that differ


def flat_net() -> rg.Net:
    net = rg.Net(nn.Flatten(), nn.Linear(2, C).double())
    for p in net.parameters():
        nn.init.zeros_(p)
    return net


def overlapping(counts: Sequence[int], shift: tuple[float, float], seed: int) -> rg.Examples:
    """Classes around three points that overlap, so that the best classifier is finite."""
    y = torch.repeat_interleave(torch.arange(C), torch.tensor(counts))
    means = 0.7 * torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    return rg.Examples(random(len(y), 2, seed=seed) + means[y] + torch.tensor(shift, dtype=torch.float64), y)


def best(clients: Sequence[rg.Examples]) -> Named:
    """Where the mean of the clients' losses is least, by L-BFGS."""
    net = flat_net()
    optimizer = torch.optim.LBFGS(
        net.parameters(), max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = torch.stack([F.cross_entropy(net(c.x), c.y) for c in clients]).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert all(p.grad is not None and p.grad.abs().max() < 1e-7 for p in net.parameters())
    return {name: p.detach() for name, p in net.named_parameters()}


@pytest.mark.parametrize(
    ("method", "reached"), [(Scaffold(), 1e-6), (FedDyn(alpha=0.1), 1e-6), (FedAvg(momentum=0.0), None)]
)
def test_what_corrects_the_drift_finds_the_optimum(method: FedAvg, reached: float | None) -> None:
    """Two clients of twenty examples with different classes and shifted features, twenty full-batch steps a round. The
    mean of what each drifts to is not where the mean loss is least: FedAvg stops short of it by more than 0.1."""
    clients = [overlapping((12, 6, 2), (0.5, 0.0), 1), overlapping((2, 4, 14), (-0.3, 0.8), 2)]
    optimum = best(clients)
    method = type(method)(**{**dict(method), "epochs": 20, "batch_size": 64, "lr": 0.3})
    states = run(method, rg.Federation(clients, clients[0], C), flat_net, count=130, asked=2)
    off = [max(float((s.server["model"][n] - t).abs().max()) for n, t in optimum.items()) for s in states[-2:]]
    if reached is None:
        assert off[1] > 0.1
        assert off[1] == pytest.approx(off[0], rel=1e-4)  # and there it stays
    else:
        assert off[1] < reached


# Fed-Focal Loss


def test_focal_by_hand() -> None:
    """p = 1/2: 0.5^2 log 2. p = 1/4 of logits (0, log 3): 0.75^2 log 4. Their mean."""
    z = torch.tensor([[0.0, 0.0], [0.0, math.log(3)]], dtype=torch.float64)
    expected = (0.25 * math.log(2) + 0.5625 * math.log(4)) / 2
    assert float(focal_loss(z, torch.tensor([1, 0]), 2.0)) == pytest.approx(expected, rel=1e-14)
    assert float(focal_loss(z[:1], torch.tensor([0]), 1.0)) == pytest.approx(0.5 * math.log(2), rel=1e-14)


def plain_focal(gamma: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros((), dtype=z.dtype)
        for row, label in zip(z, y.tolist(), strict=True):
            p = torch.exp(row[label]) / torch.exp(row).sum()
            total = total - (1 - p) ** gamma * torch.log(p)
        return total / len(y)

    return loss


def test_fed_focal_is_its_formula() -> None:
    data, theta = federation(), parameters()
    for t, state in enumerate(run(FedFocal(gamma=1.5, momentum=0.0, **FULL), data), start=1):
        locals_ = {k: descend(theta, *whole(data, k), 4, 0.3, loss=plain_focal(1.5)) for k in answered(data, t)}
        theta = averaged(theta, locals_, SIZES)
        same(state.server["model"], theta)


def test_focal_without_gamma_is_fedavg() -> None:
    options: dict[str, Any] = {"epochs": 2, "batch_size": 4, "lr": 0.1}
    for a, b in zip(run(FedFocal(gamma=0.0, **options)), run(FedAvg(**options)), strict=True):
        same(a.server["model"], b.server["model"], 1e-12)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_focal_is_finite_where_a_class_is_certain(gamma: float, dtype: torch.dtype) -> None:
    """p_y = 1 to the last bit, and p_y = 0: 1 - p can round below 0, log p is not log 0."""
    z = torch.tensor([[200.0, 0.0], [-200.0, 0.0], [16.0, 0.0]], dtype=dtype, requires_grad=True)
    loss = focal_loss(z, torch.tensor([0, 0, 0]), gamma)
    loss.backward()
    assert torch.isfinite(loss) and z.grad is not None and torch.isfinite(z.grad).all()
    assert float(loss.detach()) == pytest.approx(200 / 3, rel=1e-4)


# CLIMB


def climb_answers(losses: Mapping[int, float], deltas: Mapping[int, float], counts: Mapping[int, int]) -> Any:
    return {k: answer(deltas[k], counts[k], received_loss=torch.tensor(losses[k], dtype=torch.float64)) for k in losses}


def test_climb_by_hand() -> None:
    """The duals are zero at first, so that with 1, 2 and 1 examples changes of 11, 22 and 33 give (11 + 44 + 33) / 4,
    which is 22. Losses 1, 2 and 6 have the mean 3; eps 1, eta_D 0.5: 0.5 (f - 4) is -1.5, -1 and 1, so lambda is
    (0, 0, 1), its mean 1/3 and w = (2, 2, 5) / 3 in the second round. The same answers now weigh 2 : 4 : 5 and give
    (22 + 88 + 165) / 11 = 25, and lambda_2 grows to 2. In the third client 2 alone answers, with a loss that is the
    mean of itself: its weight is all, and lambda_2 = 2 + 0.5 (0 - 1) = 1.5."""
    method = CLIMB(eps=1.0, dual_lr=0.5)
    server: Any = {"model": one_number(0.0), "dual": torch.zeros(3).double()}
    updates = climb_answers({0: 1.0, 1: 2.0, 2: 6.0}, {0: 11.0, 1: 22.0, 2: 33.0}, {0: 1, 1: 2, 2: 1})
    server = method.server_update(server, received(method, updates, site(3)), site(3))
    assert server["dual"].tolist() == [0.0, 0.0, 1.0]
    assert float(server["model"]["w"]) == pytest.approx(22.0, rel=1e-14)
    server = method.server_update(server, received(method, updates, site(3)), site(3))
    assert server["dual"].tolist() == [0.0, 0.0, 2.0]
    assert float(server["model"]["w"]) == pytest.approx(22.0 + 25.0, rel=1e-14)
    server = method.server_update(server, received(method, climb_answers({2: 9.0}, {2: 1.0}, {2: 5}), site(3)), site(3))
    assert server["dual"].tolist() == [0.0, 0.0, 1.5]
    assert float(server["model"]["w"]) == pytest.approx(48.0, rel=1e-14)


def test_climbs_duals_stay_between_0_and_100() -> None:
    """eta_D 1000 with losses 1 and 3: 1000 (-1) and 1000 (+1)."""
    server: Any = {"model": one_number(0.0), "dual": torch.tensor([50.0, 50.0, 7.0]).double()}
    method = CLIMB(eps=0.0, dual_lr=1000.0)
    updates = climb_answers({0: 1.0, 1: 3.0}, {0: 1.0, 1: 1.0}, {0: 1, 1: 1})
    new = method.server_update(server, received(method, updates, site(3)), site(3))
    assert new["dual"].tolist() == [0.0, 100.0, 7.0]


def test_climb_never_walks_against_a_client() -> None:
    """lambda = (0, 9): the mean is 4.5, w = (-3.5, 5.5) would go up client 0's loss; it gets no weight instead. If
    that holds for all who answered, they count by their examples."""
    dual = torch.tensor([0.0, 9.0]).double()
    assert climb.client_weights(dual, torch.tensor([0, 1]), [3.0, 2.0]) == [0.0, 11.0]
    assert climb.client_weights(dual, torch.tensor([0]), [3.0]) == [3.0]


@hypothesis.given(
    dual=st.lists(st.floats(0, 100, allow_subnormal=False), min_size=2, max_size=6),
    losses=st.lists(st.floats(0, 50, allow_subnormal=False), min_size=6, max_size=6),
    counts=st.lists(st.integers(1, 1000), min_size=6, max_size=6),
    present=st.lists(st.booleans(), min_size=6, max_size=6),
    eps=st.floats(0, 2, allow_subnormal=False),
    dual_lr=st.floats(0, 5, allow_subnormal=False),
)
@hypothesis.settings(max_examples=100)
def test_climbs_weights_are_a_mean_that_favours_high_losses(
    dual: list[float], losses: list[float], counts: list[int], present: list[bool], eps: float, dual_lr: float
) -> None:
    """The server's step from 0 is a mean of the clients' changes. With a one in turn for each, it shows their shares in
    the round after the losses were told: none is negative, they sum to one; of two with the same dual and size the one
    with the higher loss has no less, and more where its dual has grown more and leaves it any weight."""
    N = len(dual)
    clients = [k for k in range(N) if present[k]] or [0]
    sizes = {k: 5 if k < 2 else counts[k] for k in range(N)}
    duals = torch.tensor([dual[0], dual[0], *dual[2:]], dtype=torch.float64)
    method, shares = CLIMB(eps=eps, dual_lr=dual_lr), {}
    for k in clients:
        deltas = {j: float(j == k) for j in clients}
        updates = climb_answers({j: losses[j] for j in clients}, deltas, sizes)
        new: Any = method.server_update(
            {"model": one_number(0.0), "dual": duals}, received(method, updates, site(N)), site(N)
        )
        after: Any = method.server_update(
            {"model": one_number(0.0), "dual": new["dual"]}, received(method, updates, site(N)), site(N)
        )
        shares[k] = float(after["model"]["w"])
    assert min(shares.values()) >= 0
    assert sum(shares.values()) == pytest.approx(1)
    assert ((new["dual"] >= 0) & (new["dual"] <= 100)).all()
    if {0, 1} <= shares.keys():
        low, high = sorted((0, 1), key=lambda k: losses[k])
        assert shares[high] >= shares[low] - 1e-12
        w = 1 + float(new["dual"][high] - new["dual"].mean())
        if float(new["dual"][high] - new["dual"][low]) > 1e-6 and w > 1e-6:
            assert shares[high] > shares[low]


def test_climb_of_equal_losses_is_fedavg() -> None:
    """Three clients with the same examples have the same loss, and their duals stay at zero. Bit for bit."""
    data = rg.Federation([examples((3, 2, 4), 1)] * 3, examples((1, 1, 1)), C)
    ours = run(CLIMB(epochs=2, batch_size=3, lr=0.2), data, count=4)
    for a, b in zip(ours, run(FedAvg(epochs=2, batch_size=3, lr=0.2), data, count=4), strict=True):
        assert tree.equal(a.server["model"], b.server["model"])
        assert a.server["dual"].tolist() == [0.0, 0.0, 0.0]


def test_climb_is_its_formula() -> None:
    """Four rounds with three of four clients; the loss that counts is that of the received model on all of a client's
    examples."""
    data, theta = federation(), parameters()
    dual = dict.fromkeys(range(4), 0.0)
    method = CLIMB(eps=0.05, dual_lr=3.0, momentum=0.0, server_lr=0.7, **FULL)
    for t, state in enumerate(run(method, data, count=4), start=1):
        chosen = answered(data, t)
        f = {k: float(cross_entropy(outputs(theta, whole(data, k)[0]), whole(data, k)[1])) for k in chosen}
        mean = sum(f.values()) / len(chosen)
        w = {k: max(0.0, 1 + dual[k] - sum(dual.values()) / 4) * SIZES[k] for k in chosen}
        for k in chosen:
            dual[k] = min(100.0, max(0.0, dual[k] + 3.0 * (f[k] - mean - 0.05)))
        theta = averaged(theta, {k: descend(theta, *whole(data, k), 4, 0.3) for k in chosen}, w, lr=0.7)
        same(state.server["model"], theta)
        assert state.server["dual"].tolist() == pytest.approx(list(dual.values()), abs=1e-10)
    assert max(dual.values()) > 0.1


def test_climb_measures_in_evaluation_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """By running statistics and without dropout, cut into batches of any size, and before training."""
    monkeypatch.setattr(climb, "_BATCH", 4)
    data = federation(shape=IMAGE)
    method = CLIMB(epochs=1, batch_size=4)
    half = ClientHalf(method, data, image_net, 0, 1, CPU)
    model = dict(image_net().state_dict())
    update = half.run(0, {"model": model}, None, 1).update
    x, y = whole(data, 0)
    expected = float(F.cross_entropy(image_net().eval()(x), y).detach())
    assert float(update["received_loss"]) == pytest.approx(expected, rel=1e-12)


# Ratio Loss


def test_ratios_by_hand() -> None:
    """Two classes, entries (0,0): 4 against 1, class 0's. (0,1): -1 against 5, class 1's. (1,0): 2 against 1.8, which
    is 0.9 of it, nobody's. (1,1): 3 against 2, class 0's. R_0 = |4 + 3| / |1 + 2| = 7/3, R_1 = |5| / |-1| = 5."""
    movements = torch.tensor([[[4.0, -1.0], [2.0, 3.0]], [[1.0, 5.0], [1.8, 2.0]]], dtype=torch.float64)
    assert class_ratios(movements).tolist() == pytest.approx([7 / 3, 5.0], rel=1e-14)


def test_ratios_of_three_classes_by_hand() -> None:
    """One row of three entries, (6, 2, -1), (1, 10, 1), (-3, 4, 5) for the three classes. Largest: 6 (class 0), 10
    (class 1), 5 (class 2), and no other reaches 0.8 of it. The others' means: (1 - 3) / 2 = -1, (2 + 4) / 2 = 3,
    (-1 + 1) / 2 = 0. R = 6 / |-1|, 10 / 3, and 10 where the denominator is 0."""
    rows = torch.tensor([[[6.0, 2.0, -1.0]], [[1.0, 10.0, 1.0]], [[-3.0, 4.0, 5.0]]], dtype=torch.float64)
    movements = torch.cat([rows, torch.zeros(3, 2, 3).double()], dim=1)
    assert class_ratios(movements).tolist() == pytest.approx([6.0, 10 / 3, 10.0], rel=1e-14)


@pytest.mark.parametrize(
    ("first", "second", "ratio"),
    [
        (5.0, 3.9, 5 / 3.9),  # 0.78 of the largest: distinct
        (5.0, 4.1, 10.0),  # 0.82: the entry is nobody's, and a class without entries has denominator 0
        (-5.0, 3.9, 10.0),  # the largest is the second's, and the first's magnitude reaches 0.8 of it: nobody's
        (3.9, -5.0, 10.0),  # the first's is the largest, but the second's magnitude is larger: nobody's
        (5.0, -3.9, 5 / 3.9),  # the largest by sign, and distinct by magnitude
        (5.0, 0.0, 10.0),  # the other does not move at all
        (5.0, 0.0005, 5000.0),  # 10,000 is cut off
        (5.0, 0.002, 2500.0),
        (0.0, 0.0, 10.0),
    ],
)
def test_the_rules_of_the_ratio(first: float, second: float, ratio: float) -> None:
    """Two classes that move one entry, of which the first is looked at."""
    movements = torch.tensor([first, second], dtype=torch.float64).reshape(2, 1, 1).expand(2, 2, 1).clone()
    movements[:, 1] = 0
    assert float(class_ratios(movements)[0]) == pytest.approx(ratio, rel=1e-12)


def plain_ratios(movements: Tensor) -> list[float]:
    """Entry by entry and class by class."""
    classes, rows, columns = movements.shape
    numerator, others = [0.0] * classes, [0.0] * classes
    for i in range(rows):
        for j in range(columns):
            entry = [float(movements[q, i, j]) for q in range(classes)]
            p = max(range(classes), key=lambda q: entry[q])
            if entry[p] == 0 or sum(abs(v) / abs(entry[p]) > 0.80 for v in entry) >= 2:
                continue
            numerator[p] += entry[p]
            others[p] += (sum(entry) - entry[p]) / (classes - 1)
    return [min(5000.0, abs(n) / abs(o)) if o else 10.0 for n, o in zip(numerator, others, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_ratios_are_their_formula(seed: int) -> None:
    movements = random(4, 4, 6, seed=seed)
    assert class_ratios(movements).tolist() == pytest.approx(plain_ratios(movements), rel=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_ratio_loss_is_its_formula(momentum: float) -> None:
    """Weights are 1 in the first round, then 0.8 + 0.3 R with R from copies of the model that the round began with,
    each trained two epochs on a class of the auxiliary set alone. The loss is a plain mean: not divided by the
    weights."""
    data, theta, weights = federation(), parameters(), torch.ones(C).double()
    assert data.auxiliary is not None
    auxiliary = data.auxiliary
    method = RatioLoss(alpha=0.8, beta=0.3, auxiliary_epochs=2, momentum=momentum, **FULL)
    for t, state in enumerate(run(method, data), start=1):

        def weighted(z: Tensor, y: Tensor, w: Tensor = weights) -> Tensor:
            return torch.stack([w[c] * cross_entropy(z[i : i + 1], y[i : i + 1]) for i, c in enumerate(y)]).mean()

        start = theta
        locals_ = {k: descend(start, *whole(data, k), 4, 0.3, momentum, loss=weighted) for k in answered(data, t)}
        theta = averaged(start, locals_, SIZES)
        movements = []
        for q in range(C):
            mine = auxiliary.y == q
            moved = descend(start, auxiliary.x[mine], auxiliary.y[mine], 2, 0.3, momentum)
            movements.append(moved["classifier.weight"] - start["classifier.weight"])
        weights = 0.8 + 0.3 * torch.tensor(plain_ratios(torch.stack(movements)), dtype=torch.float64)
        same(state.server["model"], theta)
        torch.testing.assert_close(state.server["class_weights"], weights, rtol=1e-8, atol=1e-10)
        assert state.record["class_weights"] == state.server["class_weights"].tolist()


def test_ratio_loss_without_beta_is_fedavg() -> None:
    options: dict[str, Any] = {"epochs": 2, "batch_size": 4, "lr": 0.1}
    for a, b in zip(run(RatioLoss(alpha=1.0, beta=0.0, **options)), run(FedAvg(**options)), strict=True):
        same(a.server["model"], b.server["model"], 1e-12)
        assert a.server["class_weights"].tolist() == [1.0] * C


def test_the_copies_leave_a_frozen_encoder_alone() -> None:
    """It encodes by its running statistics, as at the clients: one step of -0.3 (p - e) h^T, mean over the class."""
    data = federation(shape=IMAGE)
    assert data.auxiliary is not None
    here = ServerSite(image_net, 4, C, 0, 1, 1, CPU, data.auxiliary)
    method = RatioLoss(freeze_encoder=True, auxiliary_epochs=1, momentum=0.0, **FULL)
    movements = method._movements(dict(image_net().state_dict()), here)
    frozen = image_net().eval()
    for q in range(C):
        h = frozen.encoder(data.auxiliary.x[data.auxiliary.y == q]).detach()
        r = torch.softmax(frozen.classifier(h).detach(), dim=1) - torch.eye(C)[q]
        torch.testing.assert_close(movements[q], -0.3 * r.T @ h / len(h), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", [RatioLoss, FEDIC])
def test_an_auxiliary_set_must_have_every_class(method: type[FedAvg]) -> None:
    for counts, words in (((3, 0, 2), "no example of class 1"), ((0, 0, 0), "data.auxiliary=32")):
        here = ServerSite(net, 1, C, 0, 1, 1, CPU, examples(counts, 9))
        with pytest.raises(rg.RedgrapeError, match=words):
            method(**FULL).init_server(parameters(), here)


# FEDIC


def plain_adam(leaves: list[Tensor], loss: Callable[[], Tensor], steps: int, lr: float, decay: float = 0.0) -> None:
    """Adam by its formulas, in place: weight decay is added to the gradient."""
    first, second = [torch.zeros_like(p) for p in leaves], [torch.zeros_like(p) for p in leaves]
    for t in range(1, steps + 1):
        gradients = torch.autograd.grad(loss(), leaves)
        with torch.no_grad():
            for i, (p, g) in enumerate(zip(leaves, gradients, strict=True)):
                g = g + decay * p
                first[i], second[i] = 0.9 * first[i] + 0.1 * g, 0.999 * second[i] + 0.001 * g**2
                p -= lr * (first[i] / (1 - 0.9**t)) / ((second[i] / (1 - 0.999**t)).sqrt() + 1e-8)


def test_fedic_is_its_formula() -> None:
    """Batches of the whole auxiliary set, five steps of each phase. Three clients, so that their weights matter."""
    data, start, steps, lr, decay, T = federation(), parameters(), 5, 0.05, 0.02, 3.0
    assert data.auxiliary is not None
    x, y = data.auxiliary.x, data.auxiliary.y
    method = FEDIC(
        server_steps=steps, adam_lr=lr, adam_weight_decay=decay, temperature=T, labelled_batch=99, momentum=0.0, **FULL
    )
    found = run(method, data, count=1)[0].server["model"]

    locals_ = {k: descend(start, *whole(data, k), 4, 0.3) for k in answered(data, 1)}
    theta = averaged(start, locals_, SIZES)
    fine = {name: t.clone().requires_grad_() for name, t in theta.items()}
    plain_adam(list(fine.values()), lambda: cross_entropy(outputs(fine, x), y), steps, lr, decay)
    z_2 = outputs(fine, x).detach()

    z = [outputs(theta_k, x) for theta_k in locals_.values()]
    encoders = [torch.tanh(x @ t["encoder.1.weight"].T + t["encoder.1.bias"]) for t in locals_.values()]
    h = sum(encoders[1:], encoders[0]) / len(encoders)
    s, b_0, scale, bias, w, w_0 = (
        torch.full((n,), value, dtype=torch.float64, requires_grad=True)
        for n, value in ((C, 1.0), (1, 0.0), (C, 1.0), (C, 0.0), (5, 0.0), (1, 0.0))
    )

    def teacher() -> Tensor:
        rows = []
        for i in range(len(y)):
            a = [torch.sigmoid(z_j[i].dot(s) + b_0) for z_j in z]
            total = sum(a[1:], a[0])
            ensemble = torch.stack([a_j / total * z_j[i] for a_j, z_j in zip(a, z, strict=True)]).sum(dim=0)
            g = torch.sigmoid(w.dot(h[i]) + w_0)
            rows.append(g * (ensemble * scale + bias) + (1 - g) * z_2[i])
        return torch.stack(rows)

    plain_adam([s, b_0, scale, bias, w, w_0], lambda: cross_entropy(teacher(), y), steps, lr)
    target = torch.softmax(teacher().detach() / T, dim=1)
    student = {name: t.clone().requires_grad_() for name, t in theta.items()}

    def distillation() -> Tensor:
        z_s = outputs(student, x)
        kl = (target * (torch.log(target) - torch.log_softmax(z_s / T, dim=1))).sum() / len(y)
        return 0.5 * kl + 0.5 * cross_entropy(z_s, y)

    plain_adam(list(student.values()), distillation, steps, lr, decay)
    same(found, {name: t.detach() for name, t in student.items()}, 1e-8)
    differ(found, theta, 0.05)


def test_fedics_teacher_by_hand() -> None:
    """Two clients with logits (2, 2, 2) and (-2, -2, -2): s = 1 weights them by sigmoid(6) and sigmoid(-6), which sum
    to one, so that the ensemble is 2 (sigmoid(6) - sigmoid(-6)) = 2 tanh(3). A gate of 1/2 and a fine-tuned model with
    logits 1 make it tanh(3) + 1/2."""
    z = torch.tensor([2.0, -2.0]).double().reshape(2, 1, 1).expand(2, 6, C)
    calibration = fedic.first_calibration(C, 5, torch.float64)
    teacher = fedic.teacher_logits(calibration, z, random(6, 5), torch.ones(6, C).double())
    torch.testing.assert_close(
        teacher, torch.full((6, C), math.tanh(3) + 0.5, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )


def test_fedics_teacher_is_finite_far_out() -> None:
    """Two clients with logits of -1000: the sigmoids are zero, and their shares a half each."""
    calibration = fedic.first_calibration(C, 5, torch.float32)
    z = torch.full((2, 6, C), -1000.0)
    teacher = fedic.teacher_logits(calibration, z, torch.zeros(6, 5), torch.zeros(6, C))
    torch.testing.assert_close(teacher, torch.full((6, C), -500.0))


def test_fedic_trains_its_calibration_over_the_rounds() -> None:
    """Every step of Adam moves a number by about its learning rate, so two rounds of five steps go further than one
    could: the calibration of a round starts from that of the last."""
    lr = 0.01
    states = run(FEDIC(server_steps=5, adam_lr=lr, labelled_batch=99, **FULL), count=3)
    walked = [float((state.server["calibration"]["scale"] - 1).abs().max()) for state in states]
    assert walked[0] <= 5 * lr * 1.01
    assert walked[0] < walked[1] < walked[2]
    assert walked[2] > 5 * lr * 1.01


def test_fedic_of_no_learning_is_fedavg() -> None:
    """All three phases with a learning rate of nearly nothing."""
    options: dict[str, Any] = {"epochs": 2, "batch_size": 4, "lr": 0.1}
    ours = run(FEDIC(server_steps=2, adam_lr=1e-14, **options))
    for a, b in zip(ours, run(FedAvg(**options)), strict=True):
        same(a.server["model"], b.server["model"], 1e-11)


def test_fedic_draws_batches_of_the_size_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nine auxiliary examples: 4 labelled a step, 6 to distil on, never one twice."""
    seen: list[list[int]] = []
    inputs = ServerSite.inputs

    def spy(self: ServerSite, rows: Tensor, dtype: torch.dtype) -> Tensor:
        seen.append(rows.tolist())
        return inputs(self, rows, dtype)

    monkeypatch.setattr(ServerSite, "inputs", spy)
    run(FEDIC(server_steps=2, labelled_batch=4, transfer_batch=6, **FULL), count=1)
    assert all(len(set(rows)) == len(rows) for rows in seen)
    # outputs of three clients; two steps of fine-tuning; its outputs; two steps on transfer and labelled batches
    assert [len(rows) for rows in seen] == [9, 9, 9, 4, 4, 9, 6, 4, 6, 4]
    assert len({tuple(rows) for rows in seen}) == 7


# Auxiliary data


@pytest.mark.parametrize("method", [RatioLoss(), FEDIC()])
def test_without_auxiliary_data_the_option_is_named(method: rg.Method) -> None:
    assert type(method).uses_auxiliary
    data = rg.Federation([examples((3, 2, 1))], examples((1, 1, 1)), C)
    with pytest.raises(ConfigError, match="data.auxiliary") as error:  # noqa: RUF043
        rg.train(method, data, net, rounds=1)
    assert "\n" not in str(error.value)


def test_only_these_two_methods_need_auxiliary_data() -> None:
    assert [name for name in methods.names() if methods.load(name).uses_auxiliary] == ["fedic", "ratio_loss"]


def contents(part: rg.Examples | None) -> list[tuple[float, ...]]:
    return [] if part is None else [tuple(v) for v in part.inputs(torch.arange(len(part)), torch.float64).tolist()]


@pytest.mark.parametrize("validation", [0, 2])
@pytest.mark.parametrize("head_cap", [None, 5])
def test_no_client_holds_an_auxiliary_example(vectors: Path, validation: int, head_cap: int | None) -> None:
    """56 vectors, no two alike, of 24, 16, 10 and 6 examples; three of each class are the server's, or half of what is
    there."""
    options = DataOptions(
        source=str(vectors), auxiliary=3, validation=validation, head_cap=head_cap, clients=3, imbalance="natural"
    )
    data = prepare(options, seed=1)
    assert data.auxiliary is not None
    held = [vector for k in range(3) for vector in contents(data.client(k))]
    sets = [set(held), set(contents(data.auxiliary)), set(contents(data.validation)), set(contents(data.test))]
    assert len(held) + len(data.auxiliary) == sum(len(s) for s in sets[:2])
    for i, first in enumerate(sets):
        assert all(first.isdisjoint(other) for other in sets[:i])
    assert np.bincount(data.auxiliary.labels.numpy(), minlength=4).max() == 3
    assert prepare(DataOptions(source=str(vectors)), seed=1).auxiliary is None


def test_training_hands_the_auxiliary_set_to_the_server() -> None:
    result = rg.train(RatioLoss(epochs=1), federation(), net, rounds=1)
    assert result.server["class_weights"].tolist() != [1.0] * C


# What all share


@pytest.mark.parametrize("name", methods.names())
def test_a_frozen_encoder_stays(name: str) -> None:
    """Its parameters and its running statistics, bit for bit, whatever the server trains; the classifier moves."""
    method = methods.load(name)
    cheap = dict(method.cheap)
    data = federation(shape=IMAGE)
    states = run(method(freeze_encoder=True, epochs=1, batch_size=4, **cheap), data, image_net, count=2)
    start, end = image_net().state_dict(), states[-1].server["model"]
    for key, t in start.items():
        assert torch.equal(end[key], t) == key.startswith("encoder."), key


@pytest.mark.parametrize("name", methods.names())
def test_the_start_draws_no_global_random_numbers(name: str) -> None:
    """Also where `build` draws its weights from them, as it does in most people's code."""

    def build() -> rg.Net:
        return rg.Net(nn.Flatten(), nn.Linear(4, C).double())

    method, data = methods.load(name)(), federation()
    _, survey = next(ClientHalf(method, data, build, 0, 3, CPU).survey([0]))
    here = ServerSite(build, 4, C, 0, 0, 3, CPU, data.auxiliary, survey)
    model = dict(build().state_dict())
    before = torch.get_rng_state()
    method.init_server(model, here)
    assert torch.equal(before, torch.get_rng_state())


def test_scaffold_keeps_its_variates_where_the_learning_rate_is_zero() -> None:
    """Decayed to nothing in the last round, no way is gone that a gradient could be measured by."""
    states = run(Scaffold(lr_schedule="linear", lr_final=0.0, **FULL), count=2)
    assert tree.equal(states[-1].server["model"], states[-2].server["model"])
    assert tree.equal({"c": states[-1].server["c"]}, {"c": states[-2].server["c"]})


def test_extra_data_is_marked_wherever_a_method_stands(tmp_path: Path) -> None:
    """In the table, in the list of runs and in the figures for machines."""
    runs = []
    for name, extra in (("fedavg", False), ("fedic", True)):
        summary = {"mean_of_last": dict.fromkeys(run_tables.FIGURES, 0.5), "averaged_rounds": [1], "extra_data": extra}
        experiment = {"data": {"source": "x", "imbalance": "natural"}, "method": {"name": name}, "seed": 0, "rounds": 1}
        runs.append((name, run_view.RunView(tmp_path, experiment, None, [], summary)))
    results = run_tables.collect(runs)
    assert [result.title for result in results] == ["fedavg", "fedic †"]
    assert "† uses extra balanced data" in run_tables.caption(results)
    assert "†" not in run_tables.caption(results[:1])
    assert [run.row()["method"] for _, run in runs] == ["fedavg", "fedic †"]
