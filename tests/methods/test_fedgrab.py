"""Fed-GraB: its controllers by hand, where it is FedAvg with sigmoids, and a plain reading of its loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import redgrape as rg
import toys
from redgrape.method import ClientSite
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.fedgrab import FedGraB, response
from redgrape.tree import Tree
from toys import close, net

C = 4
SKEWED = [[9, 4, 1, 0], [0, 7, 3, 0], [4, 0, 0, 0]]
LOCAL: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 4}
OFF: dict[str, Any] = {"proportional": 0.0, "integral": 0.0, "derivative": 0.0}


def last(method: rg.Method, data: rg.Federation, rounds: int = 2) -> Any:
    with rg.Training(method, data, net, rounds=rounds) as training:
        *_, step = training.steps()
    return step.state


class Sigmoids(FedAvg):
    """FedAvg with a binary cross-entropy for each class."""

    def criterion(self, broadcast: Tree, site: ClientSite) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda z, y: C * F.binary_cross_entropy_with_logits(z, torch.eye(C).double()[y])


def test_the_response_by_hand() -> None:
    u = torch.tensor([0.0, 2 * math.log(9), -2 * math.log(9), 100.0, -100.0], dtype=torch.float64)
    assert response(u).tolist() == pytest.approx([1, 5, 10 / 82, 10, 0], abs=1e-12)


def test_the_controller_by_hand() -> None:
    """Gaps -1, then -3: e = 1, 3, their sums 1, 4, and their changes 1, 2."""
    balance: Any = {name: torch.zeros(1).double() for name in ("gap", "summed", "last")}
    found = []
    for gap in (-1.0, -3.0):
        u, balance = FedGraB().control({**balance, "gap": torch.tensor([gap]).double()})
        found.append(float(u))
    assert found == pytest.approx([10 + 0.01 + 0.1, 30 + 0.04 + 0.2], rel=1e-12)


def test_without_control_it_is_fedavg_with_sigmoids() -> None:
    data = toys.federation(*SKEWED)
    close(last(FedGraB(**OFF, **LOCAL), data).server["model"], last(Sigmoids(**LOCAL), data).server["model"])


def test_it_is_a_plain_reading_over_two_rounds() -> None:
    """One client, a full-batch step a round: the second has the weights of the first one's gap, which is kept."""
    data, lr = toys.examples([5, 3, 1, 0]), 0.1
    x, y, plain = data.inputs(torch.arange(9), torch.float64), data.labels, net()
    positive, gap, summed, before = y[:, None] == torch.arange(C), torch.zeros(C).double(), 0.0, 0.0
    for _ in range(2):
        error = -gap
        summed = summed + error
        u = 10 * error + 0.01 * summed + 0.1 * (error - before)
        before = error
        up, down = (10 / 9 / (1 / 9 + torch.exp(s * u / 2)) for s in (-1, 1))
        z = plain(x)
        s = z.sigmoid()
        total = -(up * s.log() * positive + down * (1 - s).log() * ~positive).sum() / 9
        gap = gap + ((up * (1 - s) * positive).sum(dim=0) - (down * s * ~positive).sum(dim=0)).detach() / 9
        for p, g in zip(plain.parameters(), torch.autograd.grad(total, list(plain.parameters())), strict=True):
            p.data -= lr * g
    state = last(FedGraB(lr=lr, momentum=0.0, epochs=1, batch_size=9), rg.Federation([data], data, C))
    close({name: p.detach() for name, p in plain.named_parameters()}, state.server["model"])
    torch.testing.assert_close(state.clients[0]["balance"]["gap"], gap)


def test_it_closes_the_gap_between_both_pushes() -> None:
    """Of classes that the client holds. One that it lacks is pushed down less than without control."""
    data = toys.examples([30, 6, 2, 0])
    gaps = [
        last(FedGraB(**gains, **LOCAL), rg.Federation([data], data, C), 4).clients[0]["balance"]["gap"].abs()
        for gains in ({}, OFF)
    ]
    assert (gaps[0] < gaps[1]).all() and float(gaps[0].max()) < 0.5 * float(gaps[1].max())
