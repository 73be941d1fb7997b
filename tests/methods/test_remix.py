"""Remix: whose label a mixture gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import redgrape as rg
from redgrape import methods, testing
from redgrape.errors import ConfigError
from redgrape.method import ClientSite
from redgrape.methods.remix import Remix
from toys import VECTOR, examples, federation


def build() -> rg.Net:
    return rg.nets.build("mlp", VECTOR, 3, 0).double()


@pytest.mark.parametrize(
    ("lam", "n_i", "n_j", "share"),
    [
        (0.4, 90, 30, 0.0),  # 3 times as frequent, and less than half of the mixture
        (0.4, 89, 30, 0.4),
        (0.5, 90, 30, 0.5),  # half of it is not less than half
        (0.6, 30, 90, 1.0),
        (0.6, 30, 89, 0.6),
        (0.4, 30, 90, 0.4),  # the frequent class has more than half
        (0.6, 90, 30, 0.6),
        (0.1, 7, 7, 0.1),
    ],
)
def test_shares_of_the_label_worked_out_by_hand(lam: float, n_i: int, n_j: int, share: float) -> None:
    assert Remix().label_share(lam, torch.tensor([n_i]), torch.tensor([n_j])).tolist() == [share]


def test_it_does_not_matter_which_of_two_examples_comes_first() -> None:
    n = torch.tensor([1, 5, 30, 200])
    for lam in (0.0, 0.2, 0.49, 0.51, 0.8, 1.0):
        for tau in (0.0, 0.3, 0.5):
            method = Remix(tau=tau, kappa=2.0)
            torch.testing.assert_close(
                method.label_share(lam, n, n.flip(0)), 1 - method.label_share(1 - lam, n.flip(0), n)
            )


def test_without_tau_it_is_mixup() -> None:
    n = torch.tensor([1, 5, 30, 200])
    assert Remix(tau=0.0).label_share(0.2, n, n.flip(0)).tolist() == [0.2] * 4


@pytest.mark.parametrize("source", ["local", "global"])
def test_a_step_is_a_plain_reading_of_its_formula(source: Any) -> None:
    counts, total = [6, 2, 1], [6, 9, 9]
    data = examples(counts)
    site = ClientSite(build, 1, 3, 0, 1, 1, torch.device("cpu"), 0, data)
    method = Remix(counts=source, momentum=0.0, lr=0.5, epochs=1, batch_size=9)
    sent = {"model": build().state_dict(), "class_counts": torch.tensor(total)}
    update, _ = method.client_update(sent, {}, site)
    net, random = build(), site.generator("mixing")
    lam = float(torch.rand((), generator=random, dtype=torch.float64))
    partners = torch.randperm(9, generator=random).tolist()
    [(x, y)] = method.batches(site, net)
    n = counts if source == "local" else total
    loss = torch.zeros((), dtype=torch.float64)
    for i, j in enumerate(partners):
        a, b = int(y[i]), int(y[j])
        share = lam
        if n[a] / n[b] >= 3 and lam < 0.5:
            share = 0.0
        elif n[a] / n[b] <= 1 / 3 and 1 - lam < 0.5:
            share = 1.0
        z = net((lam * x[i] + (1 - lam) * x[j])[None])
        loss = loss + share * F.cross_entropy(z, y[i][None]) + (1 - share) * F.cross_entropy(z, y[j][None])
    (loss / 9).backward()
    for name, p in net.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(update["delta"][name], -0.5 * p.grad)


def test_every_batch_has_a_mixture_of_its_own_and_every_round_others() -> None:
    data = federation([6, 2, 1])
    first, second = (rg.train(Remix(), data, build, rounds=1, seed=seed).server["model"] for seed in (0, 1))
    assert not torch.equal(first["classifier.weight"], second["classifier.weight"])


def test_it_takes_no_loss() -> None:
    with pytest.raises(ConfigError, match="'remix' cannot be combined with 'fed_focal': its training takes no loss"):
        methods.load("remix+fed_focal")


@pytest.mark.parametrize(
    "clause", ["clients_of_one_class", "clients_of_one_example", "resumed_run_equals_straight_run"]
)
def test_local_counts_keep_the_contract(clause: str) -> None:
    testing.CHECKS[clause](Remix(counts="local"))
