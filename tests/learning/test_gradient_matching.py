"""CReFF's mathematics: the matching gradient against double backward, the clients' class gradients, the re-training."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import redgrape as rg
from redgrape.data.augment import Augment
from redgrape.engines import ClientHalf
from redgrape.engines.in_process import InProcess
from redgrape.errors import ConfigError
from redgrape.learning import classifier, gradient_matching
from redgrape.learning.classifier import class_mean_gradients
from redgrape.method import ClientSite, ServerSite
from redgrape.methods import creff
from redgrape.methods.creff import CReFF
from redgrape.methods.fedavg import FedAvg
from redgrape.rounds import RunState, rounds
from redgrape.testing.cases import CLASSES, IMAGE, float64_net
from toys import random

CPU, C = torch.device("cpu"), CLASSES
TINY: dict[str, Any] = {"features_per_class": 3, "match_steps": 2, "retrain_epochs": 2, "epochs": 1, "batch_size": 4}


def published_distance(
    features: Tensor, c: int, W: Tensor, b: Tensor, g_W: Tensor, g_b: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    """D of one class and its gradient, by differentiating the classifier's gradient: `rows` is a cosine for every
    output row of the weight and one for the bias, `whole` one for both together; 1e-6 is added below."""
    features, W, b = (t.clone().requires_grad_() for t in (features, W, b))
    loss = F.cross_entropy(features @ W.T + b, torch.full((len(features),), c))
    weight, bias = torch.autograd.grad(loss, [W, b], create_graph=True)
    if kind == "rows":
        pairs = [*zip(weight, g_W, strict=True), (bias, g_b)]
    else:
        pairs = [(torch.cat([weight.flatten(), bias]), torch.cat([g_W.flatten(), g_b]))]
    D = torch.zeros((), dtype=features.dtype)
    for u, v in pairs:
        D = D + 1 - u.dot(v) / (u.norm() * v.norm() + 1e-6)
    return D.detach(), torch.autograd.grad(D, features)[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
@pytest.mark.parametrize("kind", ["rows", "whole"])
def test_the_matching_gradient_is_the_double_backward(kind: Any, dtype: torch.dtype, tolerance: float) -> None:
    """Of classes 3, 0 and 4 of five, with 7 features each in 6 dimensions; errors relative to the largest entry."""
    classes, (n, d) = torch.tensor([3, 0, 4]), (7, 6)
    features, W, b = random(3, n, d).to(dtype), random(5, d, seed=1).to(dtype), random(5, seed=2).to(dtype)
    target = {"weight": random(3, 5, d, seed=3).to(dtype), "bias": random(3, 5, seed=4).to(dtype)}
    D, gradient = gradient_matching.matching_gradient(features, classes, W, b, target, kind)
    total = 0.0
    for i, c in enumerate(classes.tolist()):
        D_c, expected = published_distance(features[i], c, W, b, target["weight"][i], target["bias"][i], kind)
        total += float(D_c)
        assert float((gradient[i] - expected).abs().max() / expected.abs().max()) < tolerance
    assert float(D) == pytest.approx(total, rel=10 * tolerance)


@pytest.mark.parametrize("kind", ["rows", "whole"])
def test_the_small_number_below_matters_where_gradients_vanish(kind: Any) -> None:
    """A class that is fit well has gradients of 1e-4 and less, whose products are near the 1e-6."""
    features, W, b = random(1, 5, 4), random(3, 4, seed=1), random(3, seed=2)
    target = {"weight": 1e-4 * random(1, 3, 4, seed=3), "bias": 1e-4 * random(1, 3, seed=4)}
    _, gradient = gradient_matching.matching_gradient(features, torch.tensor([1]), W, b, target, kind)
    _, expected = published_distance(features[0], 1, W, b, target["weight"][0], target["bias"][0], kind)
    torch.testing.assert_close(gradient[0], expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("kind", ["rows", "whole"])
def test_zero_gradients_give_finite_numbers(kind: Any) -> None:
    """A target of zero has no direction: D is 1 for each cosine, whatever the features, and they stay."""
    features, W, b = random(2, 3, 4), random(3, 4, seed=1), random(3, seed=2)
    target = {"weight": torch.zeros(2, 3, 4).double(), "bias": torch.zeros(2, 3).double()}
    D, gradient = gradient_matching.matching_gradient(features, torch.tensor([0, 2]), W, b, target, kind)
    assert float(D) == 2 * (4 if kind == "rows" else 1)
    assert not gradient.any()
    far = 1e4 * torch.eye(3, 4).double()[:, None, :]  # whose own gradient is zero, for it is classified with certainty
    some = {"weight": random(3, 3, 4, seed=5), "bias": random(3, 3, seed=6)}
    moved = gradient_matching.match(far, torch.arange(3), torch.eye(3, 4).double(), b, some, kind, 3, 0.1)
    assert torch.isfinite(moved).all()


def test_matching_is_gradient_descent() -> None:
    """Three steps of 0.2, one after another by double backward; what was passed stays as it was."""
    features, W, b = random(2, 4, 3), random(3, 3, seed=1), random(3, seed=2)
    target = {"weight": random(2, 3, 3, seed=3), "bias": random(2, 3, seed=4)}
    expected, before = [features[0].clone(), features[1].clone()], features.clone()
    for _ in range(3):
        for i, c in enumerate((2, 0)):
            expected[i] -= (
                0.2 * published_distance(expected[i], c, W, b, target["weight"][i], target["bias"][i], "rows")[1]
            )
    found = gradient_matching.match(features, torch.tensor([2, 0]), W, b, target, "rows", 3, 0.2)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-10, atol=1e-12)
    assert torch.equal(features, before)
    assert torch.equal(gradient_matching.match(features, torch.tensor([2, 0]), W, b, target, "rows", 0, 0.2), before)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("kind", ["rows", "whole"])
def test_matching_in_the_span_is_matching(kind: Any, dtype: torch.dtype, tolerance: float) -> None:
    """With 12 dimensions and 4 + 2 x 3 rows the steps are taken in a basis of the rows. A row of W is zero and a target
    stands twice, so the rows have fewer dimensions still."""
    features, W, b = random(2, 4, 12).to(dtype), random(3, 12, seed=1).to(dtype), random(3, seed=2).to(dtype)
    W[1] = 0
    target = {"weight": random(2, 3, 12, seed=3).to(dtype), "bias": random(2, 3, seed=4).to(dtype)}
    target["weight"][0, 2] = target["weight"][0, 0]
    classes, expected = torch.tensor([2, 0]), features.clone()
    for _ in range(20):
        expected -= 0.2 * gradient_matching.matching_gradient(expected, classes, W, b, target, kind)[1]
    found = gradient_matching.match(features, classes, W, b, target, kind, 20, 0.2)
    assert float((expected - features).abs().max()) > 0.1  # they moved
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_matched_features_have_the_gradients_they_were_matched_to() -> None:
    """The cosine distance of gradients that some features really have falls near zero."""
    W, b, classes = random(4, 5, seed=1), random(4, seed=2), torch.arange(4)
    _, _, g_W, g_b = gradient_matching.class_gradients(random(4, 8, 5, seed=3) + 1, classes, W, b)
    target = {"weight": g_W, "bias": g_b}
    start = random(4, 8, 5, seed=4)
    moved = gradient_matching.match(start, classes, W, b, target, "whole", 400, 1.0)
    before, after = (
        float(gradient_matching.matching_gradient(f, classes, W, b, target, "whole")[0]) for f in (start, moved)
    )
    assert before > 1 and after < 0.02 * before


# The clients' class gradients


def awkward_net() -> rg.Net:
    """BatchNorm with statistics that are not those of a fresh net, and dropout, in float64."""
    net = float64_net()
    net.encoder[2].running_mean.copy_(random(6, seed=8))
    net.encoder[2].running_var.copy_(0.5 + random(6, seed=9).abs())
    return net


def client(counts: list[int], augment: Augment | None = None) -> ClientSite:
    y = torch.repeat_interleave(torch.arange(C), torch.tensor(counts))
    data = rg.Examples(random(len(y), *IMAGE, seed=1), y, augment=augment or Augment())
    return ClientSite(awkward_net, 3, C, 0, 1, 5, CPU, 0, data)


def psi_of(seed: int) -> dict[str, Tensor]:
    return {"weight": random(C, 6, seed=seed), "bias": random(C, seed=seed + 1)}


@pytest.mark.parametrize("draw", ["all", "repeated"])
def test_class_gradients_are_those_of_psi_in_evaluation_mode(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No class has more than 32 examples, so that every draw holds all of them; batches of five, to see the cuts. The
    received classifier is not psi."""
    monkeypatch.setattr(classifier, "_BATCH", 5)
    site, psi = client([9, 3, 0, 1]), psi_of(20)
    broadcast = {"model": dict(awkward_net().state_dict()), "psi": psi}
    update, _ = CReFF(gradient_draw=draw, **TINY).client_update(broadcast, {}, site)
    sent = update["class_gradients"]
    assert sent["classes"].tolist() == [0, 1, 3]
    net = awkward_net().eval()
    net.classifier.load_state_dict(psi)
    for i, c in enumerate((0, 1, 3)):
        loss = F.cross_entropy(net(site.data.x[site.data.y == c]), site.data.y[site.data.y == c])
        weight, bias = torch.autograd.grad(loss, [net.classifier.weight, net.classifier.bias])
        torch.testing.assert_close(sent["weight"][i], weight, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(sent["bias"][i], bias, rtol=1e-11, atol=1e-13)


def test_repeated_draws_are_ten_of_at_most_32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of 40 gives 32 different ones of its examples, drawn anew each time, a class of 5 all of its own."""
    seen: list[list[int]] = []
    at_most = creff.at_most

    def spy(*arguments: Any) -> Tensor:
        rows = at_most(*arguments)
        seen.append(sorted(rows.tolist()))
        return rows

    monkeypatch.setattr(creff, "at_most", spy)
    site = client([40, 0, 5, 32])
    CReFF(**TINY)._class_gradients({"model": dict(awkward_net().state_dict()), "psi": psi_of(20)}, site)
    assert len(seen) == 10
    for rows in seen:
        assert len(set(rows)) == len(rows) == 32 + 5 + 32
        assert set(range(40, 77)) <= set(rows)
    assert len({tuple(rows) for rows in seen}) == 10


def test_every_draw_has_a_view_of_its_own() -> None:
    """With one example, the ten draws differ by their augmentation alone: ten crops of an image are hardly all alike,
    and the mean over them is not the gradient of any one."""
    site = client([1, 0, 0, 0], Augment(crop=3))
    broadcast = {"model": dict(awkward_net().state_dict()), "psi": psi_of(20)}
    found = CReFF(**TINY)._class_gradients(broadcast, site)["weight"][0]
    net = awkward_net().eval()
    net.classifier.load_state_dict(broadcast["psi"])
    view = site.generator("gradient view")
    one_by_one = []
    for _ in range(10):
        h = net.encoder(site.inputs(torch.tensor([0]), torch.float64, view)).detach()
        one_by_one.append(
            class_mean_gradients(net.classifier, [(h, torch.tensor([0]))], torch.tensor([0]))["weight"][0]
        )
    assert min(float((g - found).norm()) for g in one_by_one) > 1e-3
    torch.testing.assert_close(found, torch.stack(one_by_one).mean(dim=0))


def mean_gradients(sent: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    """The table that the server makes of what clients send, and the classes that it has."""
    site = ServerSite(awkward_net, 3, C, 0, 1, 5, CPU)
    parts = CReFF().parts(dict(awkward_net().state_dict()), site)
    received = rg.Exchange().receive({k: {"class_gradients": rows} for k, rows in enumerate(sent)}, parts, site)
    return received.table("class_gradients")


def test_the_server_takes_the_plain_mean_over_the_holders() -> None:
    """Class 1 is held by clients 0 and 2 with 1 and 5: 3. Class 3 by client 1 alone with 7. Nobody has 0 or 2."""

    def sends(values: dict[int, float]) -> dict[str, Any]:
        numbers = torch.tensor(list(values.values())).double()
        classes = {"classes": torch.tensor(list(values)), "bias": numbers[:, None].expand(-1, C).clone()}
        return {**classes, "weight": numbers[:, None, None].expand(-1, C, 6).clone()}

    means, held = mean_gradients([sends({1: 1.0}), sends({3: 7.0}), sends({1: 5.0})])
    assert held.nonzero().flatten().tolist() == [1, 3]
    for t in means.values():
        assert [t[c].unique().tolist() for c in range(4)] == [[0.0], [3.0], [0.0], [7.0]]


# The server


def federation(*counts: tuple[int, ...]) -> rg.Federation:
    clients = []
    for k, numbers in enumerate(counts):
        y = torch.repeat_interleave(torch.arange(C), torch.tensor(numbers))
        clients.append(rg.Examples(random(len(y), *IMAGE, seed=50 + k) + y[:, None, None, None], y))
    return rg.Federation(clients, clients[0], C)


def run(method: rg.Method, data: rg.Federation, count: int) -> list[RunState]:
    site = ServerSite(awkward_net, data.num_clients, C, 0, 0, count, CPU)
    with InProcess(ClientHalf(method, data, awkward_net, 0, count, CPU)) as engine:
        return list(rounds(method, engine, site, eligible=range(data.num_clients), clients_per_round=2))


@pytest.mark.parametrize("preset", ["paper", "released"])
def test_encoder_and_head_are_those_of_fedavg(preset: str) -> None:
    """Whatever the server does with psi: bit for bit, in every round."""
    data = federation((5, 2, 1, 0), (0, 6, 3, 0), (1, 1, 4, 2))
    plain = run(FedAvg.preset(preset, epochs=2, batch_size=4), data, 3)
    for ours, theirs in zip(run(CReFF.preset(preset, **TINY | {"epochs": 2}), data, 3), plain, strict=True):
        for name, t in theirs.server["model"].items():
            if name.startswith("classifier."):
                assert torch.equal(ours.server["head"][name.removeprefix("classifier.")], t)
                kept = preset == "released" and name == "classifier.bias"  # that code replaces the weight alone
                deployed = ours.server["head" if kept else "psi"][name.removeprefix("classifier.")]
                assert torch.equal(ours.server["model"][name], deployed)
            else:
                assert torch.equal(ours.server["model"][name], t)


def test_features_of_absent_classes_stay() -> None:
    """Nobody has class 3; every other class moves by the matching at the psi that the clients had."""
    data = federation((5, 2, 1, 0), (3, 6, 3, 0))
    method = CReFF(**TINY | {"match_lr": 1.0}, gradient_draw="all")
    first, second = run(method, data, 2)
    before, after = first.server["features"], second.server["features"]
    assert torch.equal(after[3], before[3])
    half = ClientHalf(method, data, awkward_net, 0, 2, CPU)
    updates = {k: half.run(k, method.broadcast(first.server), None, 2).update for k in (0, 1)}
    target, held = mean_gradients([u["class_gradients"] for u in updates.values()])
    psi = first.server["psi"]
    for c in held.nonzero().flatten().tolist():
        expected = before[c].clone()
        for _ in range(2):
            expected -= published_distance(
                expected, c, psi["weight"], psi["bias"], target["weight"][c], target["bias"][c], "rows"
            )[1]
        torch.testing.assert_close(after[c], expected, rtol=1e-9, atol=1e-11)
        assert not torch.allclose(after[c], before[c], rtol=0, atol=1e-3)


def test_features_begin_as_a_normal_sample() -> None:
    """4 classes of 2,500 features in 6 dimensions are 60,000 numbers: mean 0 +- 0.004, variance 1 +- 0.006."""
    site = ServerSite(awkward_net, 3, C, 0, 0, 5, CPU)
    features = CReFF(features_per_class=2500).init_server(dict(awkward_net().state_dict()), site)["features"]
    assert features.shape == (C, 2500, 6) and features.dtype == torch.float64
    assert abs(float(features.mean())) < 0.02 and abs(float(features.var()) - 1) < 0.03


@pytest.mark.parametrize(
    ("batch", "retrain_lr", "lr"), [(32, 0.5, 0.01), (5, 0.5, 0.01), (1, 0.05, 0.01), (5, None, 0.3)]
)
def test_retraining_is_plain_sgd_on_the_features(batch: int, retrain_lr: float | None, lr: float) -> None:
    """By nn.Linear and torch's SGD, from the same start and in the same order. Seven features of each of three classes:
    21 in batches of 5 leave one over, whose step is a mean over one. `none` is the local learning rate."""
    method = CReFF(retrain_epochs=4, retrain_batch=batch, retrain_lr=retrain_lr, lr=lr)
    features, site = random(3, 7, 5), ServerSite(awkward_net, 3, 3, 0, 2, 5, CPU)
    net, stream = nn.Linear(5, 3).double(), site.generator("re-training")
    for p in (net.weight, net.bias):
        p.data.uniform_(-(5**-0.5), 5**-0.5, generator=stream)
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=lr if retrain_lr is None else retrain_lr)
    h, y = features.reshape(21, 5), torch.tensor([0] * 7 + [1] * 7 + [2] * 7)
    for _ in range(4):
        for rows in torch.randperm(21, generator=stream).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(net(h[rows]), y[rows]).backward()
            optimizer.step()
    found = method._retrained(features, start, site)
    for name, p in net.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-11, atol=1e-13)
        assert not torch.allclose(found[name], start[name], atol=1e-3)


def test_every_round_trains_a_fresh_classifier() -> None:
    """With a learning rate of nearly nothing what comes back is the start: nn.Linear's, and another in every round."""
    features = random(3, 2, 16)
    method = CReFF(retrain_epochs=1, retrain_lr=1e-30)
    sites = [ServerSite(awkward_net, 3, 3, 0, t, 5, CPU) for t in (1, 2)]
    like = {"weight": random(3, 16), "bias": random(3)}
    first, second = (method._retrained(features, like, site) for site in sites)
    assert not torch.equal(first["weight"], second["weight"])
    for t in (*first.values(), *second.values()):
        assert t.abs().max() <= 0.25  # 1 / sqrt(16)
    assert torch.cat([first["weight"], second["weight"]]).abs().max() > 0.2


def test_a_net_without_bias_is_refused() -> None:
    build = functools.partial(biasless)
    data = federation((2, 2, 2, 2))
    with pytest.raises(ConfigError, match="creff needs a classifier with a bias"):
        rg.train(CReFF(), data, build, rounds=1)


def biasless() -> rg.Net:
    return rg.Net(nn.Flatten(), nn.Linear(64, C, bias=False).double())
