"""BalanceFL: where it coincides with other methods, its noise, and a plain reading of its loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import redgrape as rg
import toys
from redgrape import methods, tree
from redgrape.learning.class_draws import equally_often
from redgrape.method import ClientSite
from redgrape.methods.balancefl import BalanceFL, drawn, spread, summed_entropy
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.over_sampling import OverSampling
from toys import close, net

C = 4
COMPLETE = [[5, 3, 1, 1], [2, 2, 3, 3], [1, 4, 4, 1]]
SKEWED = [[9, 4, 1, 0], [0, 7, 3, 0], [4, 0, 0, 0]]
LOCAL: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 4}
BARE: dict[str, Any] = {"lam": 0.0, "entropy": 0.0, "noise": 0.0}


def site(data: rg.Examples) -> ClientSite:
    return ClientSite(net, 1, C, 0, 1, 1, torch.device("cpu"), 0, data)


def model(method: rg.Method, counts: list[list[int]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = rg.train(method, toys.federation(*counts), net, rounds=2).server["model"]
    return found


def test_without_its_terms_it_is_over_sampling_without_missing_classes() -> None:
    """FedLC with tau = 0 leaves missing classes out of the softmax and does nothing else."""
    masked = methods.load("over_sampling+fedlc")(tau=0.0, **LOCAL)
    close(model(BalanceFL(**BARE, **LOCAL), SKEWED), model(masked, SKEWED))
    close(model(BalanceFL(**BARE, **LOCAL), COMPLETE), model(OverSampling(**LOCAL), COMPLETE))


def test_with_equal_counts_of_all_classes_it_is_fedavg() -> None:
    """Nothing is missing and no class is rare: one batch is all examples, so their order does not matter."""
    whole = {**LOCAL, "batch_size": 12}
    equal = [[3, 3, 3, 3]] * 2
    close(model(BalanceFL(entropy=0.0, **whole), equal), model(FedAvg(**whole), equal))


def test_a_whole_batch_of_the_client_has_its_classes() -> None:
    for batch_size, alike in ((14, True), (4, False)):
        local = {**LOCAL, "batch_size": batch_size}
        client, batch = (model(BalanceFL(**local, **present), SKEWED) for present in ({}, {"present": "batch"}))
        assert tree.equal(client, batch) == alike


def test_the_spread_is_the_mean_covariance_by_examples() -> None:
    data = toys.examples([9, 4, 1, 0])
    h = net().encoder(data.inputs(torch.arange(14), torch.float64)).detach()
    R = spread(net(), site(data), 4)
    expected = (9 * torch.cov(h[:9].T) + 4 * torch.cov(h[9:13].T)) / 14
    torch.testing.assert_close(R.T @ R, expected, rtol=1e-10, atol=1e-12)
    assert not spread(net(), site(data.take([13])), 4).any()


def test_the_spread_is_that_of_features_in_training() -> None:
    """Inputs a thousand times as far from each other: BatchNorm takes this back, and its buffers do not move."""
    data = toys.examples([9, 4, 1, 0])
    far = rg.Examples(1000 * data.x, data.y)
    norm = nn.BatchNorm1d(6)
    encoder = nn.Sequential(nn.Linear(5, 6, bias=False), norm).double()
    near, scaled = (spread(rg.Net(encoder, nn.Linear(6, C).double()), site(d), 14) for d in (data, far))
    torch.testing.assert_close(near.T @ near, scaled.T @ scaled, rtol=1e-3, atol=1e-3)
    assert norm.running_mean is not None and not norm.running_mean.any()


def test_noise_has_the_spread_and_comes_by_chance() -> None:
    root, random = toys.random(3, 6), torch.Generator().manual_seed(1)
    chance = torch.tensor([0.0, 1.0, 0.25], dtype=torch.float64).repeat_interleave(20_000)
    never, always, sometimes = drawn(root, chance, random).split(20_000)
    assert not never.any()
    torch.testing.assert_close(torch.cov(always.T), root.T @ root, rtol=0.05, atol=0.1)
    assert float((sometimes != 0).any(dim=1).double().mean()) == pytest.approx(0.25, abs=0.01)


def test_entropy_by_hand() -> None:
    z = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]], dtype=torch.float64)
    expected = math.log(2) + 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    assert float(summed_entropy(z)) == pytest.approx(expected, rel=1e-12)


def test_it_is_the_sum_of_its_terms() -> None:
    """Two full-batch steps of a single client, with the draws and the noise of its keys."""
    data, lr, T = toys.examples([5, 3, 0, 0]), 0.1, 2.0
    place, plain = site(data), net()
    root, noise, order = spread(plain, place, 8), place.generator("feature noise"), place.generator("batches")
    rare = torch.tensor([0.0, 1 - 3 / 5], dtype=torch.float64)
    for _ in range(2):
        rows = equally_often(data.labels, order)
        x, y = data.inputs(rows, torch.float64), data.labels[rows]
        h, e = plain.encoder(x), drawn(0.5 * root, rare[y], noise)
        assert e.any() and not e.all(dim=1).all()
        z, known = plain.classifier(h), (net()(x)[:, 2:].detach() / T).softmax(dim=1)
        total = F.cross_entropy(plain.classifier(h + e)[:, :2], y)
        total = total + 0.7 * (known * (known / (z[:, 2:] / T).softmax(dim=1)).log()).sum(dim=1).mean()
        p = z[:, :2].softmax(dim=1)
        total = total + 0.05 * (p * p.log()).sum()
        for w, g in zip(plain.parameters(), torch.autograd.grad(total, list(plain.parameters())), strict=True):
            w.data -= lr * g
    method = BalanceFL(lam=0.7, entropy=0.05, noise=0.5, lr=lr, momentum=0.0, epochs=2, batch_size=8)
    found = rg.train(method, rg.Federation([data], data, C), net, rounds=1).server["model"]
    close({name: p.detach() for name, p in plain.named_parameters()}, found)
