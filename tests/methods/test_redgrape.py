"""The mathematics of RedGrape: prototypes, the balanced gradient, the two classifiers, and the choices there are."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import redgrape as rg
from redgrape import nets, tree
from redgrape.data.augment import Augment
from redgrape.errors import ConfigError
from redgrape.exchange import Exchange, Received
from redgrape.learning import classifier
from redgrape.learning.features import features
from redgrape.method import ClientSite, ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.redgrape import Balance, RedGrape
from toys import random

IMAGE, VECTOR, C = (1, 8, 8), (5,), 4
CPU = torch.device("cpu")


def examples(counts: Sequence[int], shape: tuple[int, ...] = VECTOR, seed: int = 1) -> rg.Examples:
    """So many examples of each class."""
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return rg.Examples(random(len(y), *shape, seed=seed) + y.reshape(-1, *[1] * len(shape)), y)


def double_net(name: str, shape: tuple[int, ...], classes: int = C) -> rg.Net:
    """A net in float64 whose BatchNorm statistics are not those of a fresh net."""
    net = nets.build(name, shape, classes, seed=3).double()
    for buffer_name, buffer in net.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(0.5 + random(*buffer.shape, seed=len(buffer_name)).abs())
    return net


def linear(classes: int = C) -> Any:
    return functools.partial(double_net, "linear", VECTOR, classes)


def client(
    build: Any, data: rg.Examples, *, classes: int = C, round: int = 2, rounds: int = 5, min_count: int = 1
) -> ClientSite:
    return ClientSite(
        build=build,
        num_clients=3,
        num_classes=classes,
        seed=0,
        round=round,
        rounds=rounds,
        device=CPU,
        client=0,
        data=data,
        min_count=min_count,
    )


def server_at(build: Any, *, classes: int = C) -> ServerSite:
    return ServerSite(build=build, num_clients=3, num_classes=classes, seed=0, round=0, rounds=5, device=CPU)


def start(method: RedGrape, build: Any, *, classes: int = C) -> dict[str, Any]:
    return dict(method.init_server(dict(build().state_dict()), server_at(build, classes=classes)))


def with_prototypes(server: dict[str, Any], seen: Sequence[int], seed: int = 5) -> dict[str, Any]:
    """The server after a round that brought random prototypes of these classes."""
    mask = torch.zeros_like(server["seen"])
    mask[list(seen)] = True
    table = {
        name: random(*g.shape, seed=seed).to(g.dtype) * mask.reshape(-1, *[1] * (g.dim() - 1))
        for name, g in server["prototypes"].items()
    }
    return server | {"prototypes": table, "seen": mask}


def W_of(server: Any) -> dict[str, Tensor]:
    return classifier.of(server["model"])


def norm(*tensors: Tensor) -> float:
    return math.sqrt(sum(float((t**2).sum()) for t in tensors))


def balance_with_gradient(
    method: RedGrape, server: dict[str, Any], site: ClientSite
) -> tuple[Balance, dict[str, Tensor]]:
    """The client's balance when a backward pass has left g_local at W."""
    net = method.load_for_training(server["model"], site)
    rows = torch.arange(len(site.data))
    F.cross_entropy(net(site.inputs(rows, torch.float64)), site.data.labels).backward()
    g_local = {name: p.grad.clone() for name, p in net.classifier.named_parameters()}
    return Balance(method, method.broadcast(server), net, site), g_local


# Prototypes


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", ["cnn", "resnet8"])
def test_prototypes_are_the_gradients_that_autograd_finds(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Eq. (10): in evaluation mode, of W alone, at the received model, though the client has trained since."""

    def build() -> rg.Net:
        return double_net(name, IMAGE).to(dtype)

    method, data = RedGrape(epochs=1, batch_size=4), examples([5, 3, 1, 0], IMAGE)
    update, _ = method.client_update(method.broadcast(start(method, build)), {}, client(build, data, round=1))
    sent, net = update["prototypes"], build().eval()
    assert sent["classes"].tolist() == [0, 1, 2]
    for i in range(3):
        rows = (data.labels == i).nonzero().flatten()
        loss = F.cross_entropy(net(data.inputs(rows, dtype)), data.labels[rows])
        weight, bias = torch.autograd.grad(loss, [net.classifier.weight, net.classifier.bias])
        torch.testing.assert_close(sent["weight"][i], weight, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(sent["bias"][i], bias, rtol=tolerance, atol=tolerance)


def test_prototypes_do_not_depend_on_how_the_examples_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    method, site = RedGrape(), client(linear(), examples([9, 4, 0, 2]))
    whole = method._local_prototypes(site.build(), site)
    monkeypatch.setattr(classifier, "_BATCH", 4)
    monkeypatch.setattr(classifier, "_BLOCK", 3 * C * VECTOR[0])  # three outer products at once
    cut = method._local_prototypes(site.build(), site)
    assert cut["classes"].tolist() == [0, 1, 3]
    for name in ("weight", "bias"):
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("view", ["plain", "augmented"])
def test_prototypes_are_of_plain_or_of_augmented_examples(view: Any) -> None:
    """With a crop that shifts by up to two pixels, from the client's key."""
    plain = examples([5, 3, 0, 0], IMAGE)
    site = client(
        functools.partial(double_net, "linear", IMAGE), rg.Examples(plain.x, plain.y, augment=Augment(crop=2))
    )
    sent = RedGrape(prototype_view=view)._local_prototypes(site.build(), site)
    x = plain.x if view == "plain" else Augment(crop=2)(plain.x, site.generator("prototype view"))
    net = site.build()
    loss = F.cross_entropy(net(x)[:5], plain.y[:5])
    torch.testing.assert_close(sent["weight"][0], torch.autograd.grad(loss, net.classifier.weight)[0])


def test_a_single_example_leaks_its_features() -> None:
    """(p - e) h^T divided row by row by p - e is h: a prototype of one example reveals its features, here the input
    itself. With two examples the rows are weighted means of both, and differ. This is why `min_count` exists."""
    data = examples([1, 2, 0, 0])
    site = client(linear(), data)
    sent = RedGrape()._local_prototypes(site.build(), site)
    rows = sent["weight"] / sent["bias"][:, :, None]
    for j in range(C):
        torch.testing.assert_close(rows[0, j], data.x[0], rtol=1e-12, atol=1e-12)
        assert (rows[1, j] - data.x[1]).norm() > 0.1
    floored = client(linear(), data, min_count=2)
    assert RedGrape()._local_prototypes(site.build(), floored)["classes"].tolist() == [1]


@pytest.mark.parametrize(("min_count", "classes"), [(1, [0, 1, 2]), (2, [0, 1]), (3, [0]), (9, [])])
def test_min_count_keeps_small_classes_from_being_sent(min_count: int, classes: list[int]) -> None:
    site = client(linear(), examples([3, 2, 1, 0]), min_count=min_count)
    sent = RedGrape()._local_prototypes(site.build(), site)
    assert sent["classes"].tolist() == classes
    assert sent["weight"].shape == (len(classes), C, VECTOR[0])


def test_no_prototype_is_sent_where_none_is_used() -> None:
    method, site = RedGrape(use_prototypes=False, epochs=1), client(linear(), examples([3, 2, 1, 0]))
    update, _ = method.client_update(method.broadcast(start(method, linear())), {}, site)
    assert "prototypes" not in tree.ordered(update)
    assert "prototypes" not in method.parts(dict(linear()().state_dict()), site)


# The server's table of prototypes


def reply(method: RedGrape, server: Any, values: dict[int, tuple[float, int]]) -> dict[str, Any]:
    """An update of one example that changes no parameter; `values`: class -> (every number of its prototype, count)."""
    classes = torch.tensor(sorted(values), dtype=torch.int64)
    numbers = torch.tensor([values[c][0] for c in sorted(values)], dtype=torch.float64)
    nothing = {name: torch.zeros_like(t) for name, t in server["model"].items()}
    prototypes = {
        "classes": classes,
        "weight": numbers[:, None, None].expand(-1, C, VECTOR[0]).clone(),
        "bias": numbers[:, None].expand(-1, C).clone(),
    }
    if method.prototype_weights == "count":
        prototypes["counts"] = torch.tensor([values[c][1] for c in sorted(values)])
    return {
        "delta": nothing,
        "buffers": {},
        "count": torch.tensor(1),
        "loss": torch.tensor(0.0),
        "prototypes": prototypes,
        "delta_W_hat": W_of({"model": nothing}),
    }


def after(method: RedGrape, server: Any, updates: Mapping[int, Any]) -> tuple[Any, Received]:
    """The server after these updates, and what it received of them."""
    site = server_at(linear())
    received = Exchange().receive(updates, method.parts(server["model"], site), site)
    return method.server_update(server, received, site), received


def table(server: Any) -> list[float]:
    """Every class's prototype, of which all numbers are equal."""
    for g in server["prototypes"].values():
        assert torch.equal(g, g.reshape(C, -1)[:, 0].reshape(-1, *[1] * (g.dim() - 1)).expand_as(g))
    assert torch.equal(server["prototypes"]["weight"][:, 0, 0], server["prototypes"]["bias"][:, 0])
    return server["prototypes"]["bias"][:, 0].tolist()


@pytest.mark.parametrize(("weights", "class_0"), [("uniform", 3.0), ("count", 2.0)])
def test_prototypes_are_averaged_over_their_holders(weights: Any, class_0: float) -> None:
    """Client 0 holds 3 examples of class 0 (prototype 1), client 2 holds 1 (prototype 5); client 1 holds none, and
    counts for nothing. Uniform: (1 + 5) / 2 = 3. By count: (3 * 1 + 1 * 5) / 4 = 2. Class 2 is client 1's alone: 7."""
    method = RedGrape(prototype_weights=weights)
    server = start(method, linear())
    answers = {0: {0: (1.0, 3)}, 1: {2: (7.0, 2)}, 2: {0: (5.0, 1)}}
    updates = {k: reply(method, server, values) for k, values in answers.items()}
    new, _ = after(method, server, updates)
    assert table(new) == [class_0, 0.0, 7.0, 0.0]
    assert new["seen"].tolist() == [True, False, True, False]


def test_prototypes_of_an_absent_class_stay_and_age() -> None:
    """Class 0 is held in rounds 1 and 3, class 1 in round 1 only, class 2 from round 2 on, class 3 never."""
    method = RedGrape()
    server, seen, ages, tables = start(method, linear()), [], [], []
    for values in ({0: (1.0, 1), 1: (2.0, 1)}, {2: (3.0, 1)}, {0: (4.0, 1), 2: (5.0, 1)}):
        server, received = after(method, server, {1: reply(method, server, values)})
        seen.append(server["seen"].int().tolist())
        ages.append(server["age"].tolist())
        tables.append(table(server))
    assert tables == [[1.0, 2.0, 0.0, 0.0], [1.0, 2.0, 3.0, 0.0], [4.0, 2.0, 5.0, 0.0]]
    assert seen == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
    assert [age[:2] for age in ages] == [[0, 0], [1, 1], [0, 2]]
    assert [age[2] for age in ages[1:]] == [0, 0]
    assert method.log(server, received)["prototype_age"].tolist() == ages[-1]


@pytest.mark.parametrize(
    ("max_age", "usable"), [(None, [1, 1, 1, 0]), (3, [1, 1, 1, 0]), (2, [0, 1, 1, 0]), (0, [0, 1, 0, 0])]
)
def test_old_prototypes_are_not_used(max_age: int | None, usable: list[int]) -> None:
    """Prototypes of classes 0, 1 and 2 that are three, no and one round old, and none of class 3."""
    method = RedGrape(max_age=max_age)
    server = with_prototypes(start(method, linear()), [0, 1, 2]) | {"age": torch.tensor([3, 0, 1, 4])}
    assert method.broadcast(server)["seen"].int().tolist() == usable


# The balanced gradient and its pull


@pytest.mark.parametrize("norm_mode", ["joint", "per_tensor"])
@pytest.mark.parametrize(("counts", "seen"), [([9, 3, 1, 0], [0, 1, 2, 3]), ([1, 1, 0, 0], [2, 3]), ([9, 8, 8, 9], [])])
def test_the_pull_has_lambda_times_the_norm_of_the_local_gradient(
    norm_mode: Any, counts: list[int], seen: list[int]
) -> None:
    method = RedGrape(lam=0.3, norm=norm_mode)
    server = with_prototypes(start(method, linear()), seen)
    balance, g_local = balance_with_gradient(method, server, client(linear(), examples(counts)))
    pull = balance.pull()
    assert norm(*g_local.values()) > 0.1
    if norm_mode == "joint":
        assert norm(*pull.values()) == pytest.approx(0.3 * norm(*g_local.values()), rel=1e-12)
    else:
        for name, g in g_local.items():
            assert norm(pull[name]) == pytest.approx(0.3 * norm(g), rel=1e-12)


def direction(pull: dict[str, Tensor]) -> dict[str, Tensor]:
    """The pull divided by its joint norm."""
    return {name: g / norm(*pull.values()) for name, g in pull.items()}


def mean_gradient(net: rg.Net, x: Tensor, c: int) -> dict[str, Tensor]:
    """grad_W CE(W f(x; P), c), by autograd."""
    loss = F.cross_entropy(net.classifier(net.encoder(x).detach()), torch.full((len(x),), c))
    weight, bias = torch.autograd.grad(loss, [net.classifier.weight, net.classifier.bias])
    return {"weight": weight, "bias": bias}


@pytest.mark.parametrize(("unseen", "factor"), [("skip", 1.0), ("mean", 5 / 3)])
def test_classes_that_nobody_has_seen(unseen: Any, factor: float) -> None:
    """Six classes: class 0 is served by real examples, classes 1, 2 and 3 by prototypes, 4 and 5 were never seen. With
    `skip`, g_bal is proportional to g_0 + sum of the three; with `mean` the two get the mean of the three, which makes
    the sum 1 + 2/3 = 5/3 times as long. T = n, so that D_bal is all of class 0."""
    build, data = linear(6), examples([2, 1, 0, 0, 0, 0])
    method = RedGrape(threshold=2, unseen=unseen)
    server = with_prototypes(start(method, build, classes=6), [1, 2, 3])
    balance, _ = balance_with_gradient(method, server, client(build, data, classes=6))
    real = mean_gradient(build(), data.x[:2], 0)
    expected = {name: g + factor * server["prototypes"][name].sum(dim=0) for name, g in real.items()}
    found = direction(balance.pull())
    for name, g in direction(expected).items():
        torch.testing.assert_close(found[name], g, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("unseen", ["skip", "mean"])
def test_without_examples_and_prototypes_there_is_no_pull(unseen: Any) -> None:
    method = RedGrape(unseen=unseen)
    balance, _ = balance_with_gradient(method, start(method, linear()), client(linear(), examples([3, 1, 0, 0])))
    assert all(not g.any() for g in balance.pull().values())


def test_an_infinite_threshold_leaves_prototypes_only() -> None:
    """However many examples the client has: the pull points along the sum of the prototypes."""
    method = RedGrape(threshold=math.inf)
    server = with_prototypes(start(method, linear()), [0, 1, 3])
    balance, _ = balance_with_gradient(method, server, client(linear(), examples([30, 20, 10, 40])))
    found = direction(balance.pull())
    for name, g in direction({name: g.sum(dim=0) for name, g in server["prototypes"].items()}).items():
        torch.testing.assert_close(found[name], g, rtol=1e-12, atol=1e-12)


def test_with_enough_of_every_class_prototypes_have_no_influence() -> None:
    """T = n = 3: the pull is that of the real examples, and the update is the same whatever the prototypes hold."""
    method, data = RedGrape(threshold=3, epochs=2), examples([3, 3, 3, 3])
    server = start(method, linear())
    site = client(linear(), data)
    balance, _ = balance_with_gradient(method, server, site)
    gradients = [mean_gradient(site.build(), data.x[data.labels == c], c) for c in range(C)]
    found = direction(balance.pull())
    for name, g in direction({name: sum(g[name] for g in gradients) for name in found}).items():
        torch.testing.assert_close(found[name], g, rtol=1e-12, atol=1e-12)
    garbage = server | {
        "prototypes": {name: torch.full_like(g, math.nan) for name, g in server["prototypes"].items()},
        "seen": torch.ones(C, dtype=torch.bool),
    }
    clean, _ = method.client_update(method.broadcast(server), {}, site)
    dirty, _ = method.client_update(method.broadcast(garbage), {}, site)
    assert tree.equal(clean, dirty)


@pytest.mark.parametrize("value", [0.0, 1e-14, math.inf])
@pytest.mark.parametrize("norm_mode", ["joint", "per_tensor"])
def test_a_balanced_gradient_without_direction_does_not_pull(norm_mode: Any, value: float) -> None:
    method = RedGrape(threshold=math.inf, norm=norm_mode)
    server = start(method, linear())
    table = {name: torch.full_like(g, value) for name, g in server["prototypes"].items()}
    server |= {"prototypes": table, "seen": torch.ones(C, dtype=torch.bool)}
    balance, _ = balance_with_gradient(method, server, client(linear(), examples([3, 1, 0, 0])))
    for g in balance.pull().values():
        assert torch.equal(g, torch.zeros_like(g))


def test_a_local_gradient_of_zero_is_not_pulled() -> None:
    method = RedGrape()
    server = with_prototypes(start(method, linear()), [0, 1])
    balance, _ = balance_with_gradient(method, server, client(linear(), examples([3, 1, 0, 0])))
    for p in balance.net.classifier.parameters():
        p.grad.zero_()
    assert all(torch.equal(g, torch.zeros_like(g)) for g in balance.pull().values())


def drawn(method: RedGrape, counts: list[int], times: int) -> tuple[list[list[int]], list[list[int]]]:
    """The examples and the labels of D_bal, as often as asked; an example is known by its first number."""
    y = torch.repeat_interleave(torch.arange(C), torch.tensor(counts))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x = torch.arange(len(y), dtype=torch.float64)[:, None].expand(-1, VECTOR[0])
    site = client(linear(), rg.Examples(x, y[order]))
    balance = Balance(method, method.broadcast(start(method, linear())), site.build(), site)
    draws = []
    for _ in range(times):
        balance._balanced_gradient()
        assert balance.drawn is not None
        draws.append(balance.drawn)
    for found, labels in draws:
        assert torch.equal(y[order][found[:, 0].long()], labels)
    return [x[:, 0].long().tolist() for x, _ in draws], [y.tolist() for _, y in draws]


@pytest.mark.parametrize(("threshold", "classes"), [(1, [0, 1, 2]), (3, [0, 2]), (6, [2]), (4.0, [2])])
def test_the_balanced_set_has_T_distinct_examples_of_each_class(threshold: float, classes: list[int]) -> None:
    """Of 3, 1, 6 and 0 examples; a class that reaches T is in."""
    rows, labels = drawn(RedGrape(threshold=threshold), [3, 1, 6, 0], times=1)
    T = int(threshold)
    assert len(set(rows[0])) == len(rows[0]) == T * len(classes)
    assert labels[0] == [c for c in classes for _ in range(T)]


def test_the_balanced_set_is_drawn_once_a_round_or_for_every_step() -> None:
    """Out of 30 and 20 examples, two draws of 8 each are alike only if they are the same draw."""
    once, _ = drawn(RedGrape(balanced_draw="round"), [30, 20, 0, 0], times=3)
    anew, _ = drawn(RedGrape(balanced_draw="step"), [30, 20, 0, 0], times=3)
    assert once[0] == once[1] == once[2] == anew[0]
    assert len({tuple(sorted(rows)) for rows in anew}) == 3


def test_every_example_can_be_drawn() -> None:
    rows, _ = drawn(RedGrape(balanced_draw="step", threshold=2), [5, 1, 4, 0], times=60)
    assert len({row for draw in rows for row in draw}) == 9


# BatchNorm


@pytest.mark.parametrize(("statistics", "moves"), [("running", False), ("batch", False), ("batch_update", True)])
def test_running_statistics_move_only_where_asked(statistics: Any, moves: bool) -> None:
    """Neither the prototypes nor the balanced forward pass touch BatchNorm's buffers, but for `batch_update`; and the
    net is left in training mode."""
    build = functools.partial(double_net, "resnet8", IMAGE)
    method = RedGrape(balanced_stats=statistics, threshold=3)
    site = client(build, examples([4, 3, 1, 0], IMAGE))
    server = start(method, build)
    net = method.load_for_training(server["model"], site)
    before = {name: b.clone() for name, b in net.named_buffers()}
    method._local_prototypes(net, site)
    assert all(torch.equal(before[name], b) for name, b in net.named_buffers())
    for p in net.classifier.parameters():
        p.grad = torch.ones_like(p)
    pull = Balance(method, method.broadcast(server), net, site).pull()
    assert any(g.any() for g in pull.values())
    assert all(torch.equal(before[name], b) != moves for name, b in net.named_buffers())
    assert all(m.training for m in net.modules())


def test_batch_statistics_are_those_of_training() -> None:
    """`batch` and `batch_update` see what a training step sees, `running` what evaluation sees."""
    net, x = double_net("resnet8", IMAGE), random(6, *IMAGE)
    evaluated, trained = net.eval().encoder(x), net.train().encoder(x)
    assert torch.equal(features(net.encoder, x, "batch"), trained)
    assert torch.equal(features(net.encoder, x, "batch_update"), trained)
    net = double_net("resnet8", IMAGE)
    assert torch.equal(features(net.encoder, x, "running"), evaluated)
    assert not torch.allclose(trained, evaluated)


# The two classifiers


def trained(method: FedAvg, build: Any, clients: list[rg.Examples], rounds: int = 3) -> rg.Result:
    federation = rg.Federation(clients, examples([1] * C, tuple(clients[0].x.shape[1:])), C)
    return rg.train(method, federation, build, rounds=rounds)


MANY = [[9, 3, 1, 0], [0, 8, 4, 0], [2, 0, 9, 1]]


def test_without_lambda_a_copy_of_W_stays_a_copy() -> None:
    """They get the same gradient, momentum and average: bit for bit, in float32."""
    method = RedGrape(lam=0.0, extra_init="copy", lr=0.01, batch_size=4)
    build = functools.partial(nets.build, "cnn", IMAGE, C, seed=0)
    server = trained(method, build, [examples(counts, IMAGE, seed=k) for k, counts in enumerate(MANY)]).server
    assert tree.equal(W_of(server), server["W_hat"])
    assert not tree.equal(W_of(server), classifier.of(build().state_dict()))


@pytest.mark.parametrize("extra_init", ["default", "zeros"])
def test_without_lambda_both_classifiers_move_alike(extra_init: Any) -> None:
    method = RedGrape(lam=0.0, extra_init=extra_init, lr=0.1, batch_size=4, clip_norm=1.0)
    first = start(method, linear())
    last = trained(method, linear(), [examples(counts, seed=k) for k, counts in enumerate(MANY)]).server
    for name, w in W_of(last).items():
        moved = w - W_of(first)[name]
        assert norm(moved) > 0.01
        torch.testing.assert_close(moved, last["W_hat"][name] - first["W_hat"][name], rtol=1e-12, atol=1e-12)


def test_without_lambda_the_sum_of_the_classifiers_is_fedavg_at_twice_the_learning_rate() -> None:
    """d(W + W_hat) = -2 eta g, where g is the gradient at the logits (W + W_hat) h: FedAvg's step with 2 eta. The
    linear net has no encoder whose rate would differ, and W_hat starts at zero, so that both start alike."""
    options = {"momentum": 0.0, "batch_size": 4, "epochs": 2}
    clients = [examples(MANY[0])]
    both = trained(RedGrape(lam=0.0, extra_init="zeros", lr=0.1, **options), linear(), clients).server
    plain = trained(FedAvg(lr=0.2, **options), linear(), clients).server
    for name, w in W_of(plain).items():
        torch.testing.assert_close(W_of(both)[name] + both["W_hat"][name], w, rtol=1e-12, atol=1e-12)
        assert (W_of(both)[name] - w).abs().max() > 0.01


def test_the_first_W_hat() -> None:
    """`default` is an nn.Linear's start, independent of W: uniform within 1 / sqrt(d), variance 1 / (3 d)."""
    build = functools.partial(nets.build, "linear", (400,), 50, seed=0)
    first = {mode: start(RedGrape(extra_init=mode), build, classes=50) for mode in ("zeros", "copy", "default")}
    assert not any(w.any() for w in first["zeros"]["W_hat"].values())
    assert tree.equal(first["copy"]["W_hat"], W_of(first["copy"]))
    for name, w in first["default"]["W_hat"].items():
        assert w.shape == W_of(first["default"])[name].shape
        assert w.abs().max() <= 1 / 20
    weight = first["default"]["W_hat"]["weight"]
    assert float(weight.std()) == pytest.approx(1 / math.sqrt(3 * 400), rel=0.02)
    correlation = torch.corrcoef(torch.stack([weight.flatten(), W_of(first["default"])["weight"].flatten()]))[0, 1]
    assert abs(float(correlation)) < 0.03


def test_one_stream_has_no_second_classifier() -> None:
    method = RedGrape(two_stream=False, epochs=1)
    server = trained(method, linear(), [examples(counts, seed=k) for k, counts in enumerate(MANY)]).server
    assert "W_hat" not in server


def moved_apart(method: RedGrape, server: dict[str, Any], site: ClientSite) -> dict[str, Tensor]:
    """(W - W_hat) - (W_0 - W_hat_0) after the client's round."""
    update, _ = method.client_update(method.broadcast(server), {}, site)
    return {name: g - update["delta_W_hat"][name] for name, g in W_of({"model": update["delta"]}).items()}


@pytest.mark.parametrize("norm_mode", ["joint", "per_tensor"])
@pytest.mark.parametrize(
    ("placement", "clip_norm"), [("after_step", None), ("after_step", 0.05), ("in_gradient", None)]
)
def test_one_step_moves_the_classifiers_apart_by_lambda_times_the_local_gradient(
    norm_mode: Any, placement: Any, clip_norm: float | None
) -> None:
    """Both get the instance gradient; only W gets the pull, of norm lam ||g_local||. After one step of learning rate
    eta they are eta lam ||g_local|| apart, where g_local is not clipped. (In the first step momentum has no effect.)"""
    method = RedGrape(
        lam=0.5, lr=0.2, norm=norm_mode, placement=placement, clip_norm=clip_norm, epochs=1, batch_size=64, threshold=3
    )
    site = client(linear(), examples([3, 2, 1, 0]))
    server = with_prototypes(start(method, linear()), [1, 3])
    net = site.build()
    z = net(site.data.x) + F.linear(site.data.x, server["W_hat"]["weight"], server["W_hat"]["bias"])
    loss = F.cross_entropy(z, site.data.labels)
    g_local = dict(zip(("weight", "bias"), torch.autograd.grad(loss, list(net.classifier.parameters())), strict=True))
    apart = moved_apart(method, server, site)
    if norm_mode == "joint":
        assert norm(*apart.values()) == pytest.approx(0.2 * 0.5 * norm(*g_local.values()), rel=1e-10)
    else:
        for name, g in g_local.items():
            assert norm(apart[name]) == pytest.approx(0.2 * 0.5 * norm(g), rel=1e-10)


@pytest.mark.parametrize("placement", ["after_step", "in_gradient"])
def test_the_pull_goes_as_far_as_the_learning_rate_of_its_round(placement: Any) -> None:
    """A quarter of the rate gives a quarter of the distance after the first step."""
    server = with_prototypes(start(RedGrape(), linear()), [1, 3])
    found = {}
    for lr_schedule in ("constant", "linear"):
        method = RedGrape(lr=0.2, lr_schedule=lr_schedule, lr_final=0.25, placement=placement, epochs=1, batch_size=64)
        found[lr_schedule] = moved_apart(method, server, client(linear(), examples([3, 2, 1, 0]), round=5, rounds=5))
    for name, far in found["constant"].items():
        torch.testing.assert_close(found["linear"][name], far / 4, rtol=1e-10, atol=1e-14)


def test_after_many_steps_the_classifiers_are_apart_by_the_sum_of_the_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    """W_i - W_hat_i = (W_0 - W_hat_0) - eta sum of the pulls, whatever momentum and clipping do to both alike."""
    method = RedGrape(lam=0.5, lr=0.2, placement="after_step", clip_norm=0.1, epochs=3, batch_size=4, threshold=3)
    pulls: list[dict[str, Tensor]] = []
    original = Balance.pull
    monkeypatch.setattr(Balance, "pull", lambda self: pulls.append(original(self)) or pulls[-1])
    server = with_prototypes(start(method, linear()), [1, 3])
    apart = moved_apart(method, server, client(linear(), examples([5, 3, 1, 0])))
    assert len(pulls) == 3 * math.ceil(9 / 4)
    for name, g in apart.items():
        torch.testing.assert_close(g, -0.2 * sum(pull[name] for pull in pulls), rtol=1e-12, atol=1e-12)


# Hyper-parameters


@pytest.mark.parametrize(
    ("schedule", "round", "lam"),
    [
        ("constant", 5, 0.4),
        ("linear", 1, 0.4),
        ("linear", 3, 0.22),  # 0.4 (1 - 0.9 / 2)
        ("linear", 5, 0.04),
        ("cosine", 2, 0.4 * (0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)),  # a quarter of the way: cos(pi / 4)
        ("cosine", 3, 0.22),  # 0.4 (0.1 + 0.9 / 2)
        ("cosine", 5, 0.04),
        ("exponential", 3, 0.4 * math.sqrt(0.1)),
        ("exponential", 5, 0.04),
    ],
)
def test_lambda_decays_to_its_final_fraction(schedule: Any, round: int, lam: float) -> None:
    """Five rounds from 0.4 to a tenth of it; the pull is that long. Constant lambda does not look at lam_final."""
    method = RedGrape(lam=0.4, lam_schedule=schedule, lam_final=0.1)
    server = with_prototypes(start(method, linear()), [0, 1])
    site = client(linear(), examples([3, 1, 0, 0]), round=max(round, 2))
    balance, g_local = balance_with_gradient(method, server, site)
    if round > 1:
        assert norm(*balance.pull().values()) == pytest.approx(lam * norm(*g_local.values()), rel=1e-12)
    else:
        first = client(linear(), examples([3, 1, 0, 0]), round=1)
        assert Balance(method, method.broadcast(server), site.build(), first).lam == pytest.approx(lam)


def test_presets() -> None:
    paper = {
        "lam": 0.1,
        "lam_schedule": "constant",
        "threshold": 8,
        "placement": "in_gradient",
        "norm": "joint",
        "clip_norm": None,
        "extra_init": "default",
        "unseen": "skip",
        "balanced_draw": "round",
        "balanced_stats": "batch",
        "prototype_weights": "uniform",
        "prototype_view": "plain",
        "max_age": None,
        "use_prototypes": True,
        "use_real_data": True,
        "two_stream": True,
        "optimizer": "sgd",
        "momentum": 0.9,
        "weight_decay": 0.0,
        "batch_size": 64,
        "epochs": 5,
        "server_lr": 1.0,
        "lr_schedule": "constant",
        "freeze_encoder": False,
    }
    released = {
        "placement": "after_step",
        "norm": "per_tensor",
        "clip_norm": 1.0,
        "unseen": "mean",
        "balanced_stats": "batch_update",
        "prototype_view": "augmented",
    }
    not_used = {"lr", "lr_final", "lr_milestones", "lr_warmup", "lam_final"}
    assert RedGrape() == RedGrape.preset("paper")
    assert {k: v for k, v in dict(RedGrape.preset("paper")).items() if k not in not_used} == paper
    assert {k: v for k, v in dict(RedGrape.preset("released")).items() if k not in not_used} == paper | released
    assert RedGrape.preset("released", clip_norm=None, lam=0.5) == RedGrape(**{**released, "clip_norm": None}, lam=0.5)
    with pytest.raises(ConfigError, match="unknown preset 'papr'; did you mean 'paper'"):
        RedGrape.preset("papr")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"threshold": 2.5}, "threshold.* is 2.5, but it is a number of examples"),
        ({"threshold": 0}, "threshold is 0"),
        ({"threshold": math.nan}, "threshold"),
        ({"lamda": 0.1}, "lamda"),
        ({"lam": -0.1}, "lam is -0.1"),
        ({"lam": math.inf}, "lam"),
        ({"lam": "0.1"}, "lam"),
        ({"placement": "before_step"}, "placement"),
        ({"max_age": -1}, "max_age is -1"),
    ],
)
def test_what_cannot_be_is_refused(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RedGrape(**bad)


def test_whole_and_infinite_thresholds_are_accepted() -> None:
    assert RedGrape(threshold=math.inf).threshold == math.inf
    assert RedGrape(threshold=2).threshold == RedGrape(threshold=2.0).threshold == 2
