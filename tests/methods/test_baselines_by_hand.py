"""Numbers derived by hand for equations that are a method's own.

The smallest federation: one feature, always 1, and two classes. The net is z = W x + b from zeros, so weight and bias
get the same gradient, and what happens to class 0 happens to class 1 with the other sign. All numbers are those of
W[0, 0]. With lr 1 and one example of class 0, a first plain step goes to 1/2, because p_0 = 1/2. Then z = (1, -1),
p_0 = sigmoid(2) = 0.880797, and a second step adds 0.119203: 0.619203.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import redgrape as rg
from redgrape.learning.gradient_matching import distance
from redgrape.learning.prior import post_hoc_shift
from redgrape.methods.balanced_softmax import BalancedSoftmax
from redgrape.methods.feddyn import FedDyn
from redgrape.methods.fedprox import FedProx
from redgrape.methods.logit_adjustment import LogitAdjustment
from redgrape.methods.scaffold import Scaffold

TWO_STEPS: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "epochs": 2, "batch_size": 1}
SECOND = 1 / (1 + math.exp(2))  # 0.119203, what a second step adds


def from_zeros() -> rg.Net:
    classifier = nn.Linear(1, 2, dtype=torch.float64)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    return rg.Net(nn.Flatten(), classifier)


def one_example(y: int) -> rg.Examples:
    return rg.Examples(torch.ones(1, 1, dtype=torch.float64), torch.tensor([y]))


def trained(method: rg.Method, labels: list[int], rounds: int = 1) -> Any:
    """The server after so many rounds of clients with one example each."""
    federation = rg.Federation([one_example(y) for y in labels], one_example(0), 2)
    return rg.train(method, federation, from_zeros, rounds=rounds).server


def first(tensors: Any) -> float:
    return float(tensors["classifier.weight"][0, 0])


def test_fedprox() -> None:
    """The term is zero in the first step and pulls by 0.2 * 1/2 in the second: 1/2 + 0.119203 - 0.1 = 0.519203."""
    assert first(trained(FedProx(mu=0.2, **TWO_STEPS), [0])["model"]) == pytest.approx(0.5 + SECOND - 0.1, rel=1e-12)


def test_feddyn() -> None:
    """The first round goes as FedProx with mu = alpha = 0.2 to 0.519203, since g is zero. Then h = -0.2 * 0.519203 for
    the only client, and the server's model is 0.519203 - h / 0.2 = 1.038405."""
    server = trained(FedDyn(alpha=0.2, **TWO_STEPS), [0])
    assert first(server["h"]) == pytest.approx(-0.2 * 0.519203, abs=1e-6)
    assert first(server["model"]) == pytest.approx(1.038406, abs=1e-6)


def test_feddyn_remembers_the_linear_term() -> None:
    """Two clients, of class 0 and of class 1: their models are 0.519203 and -0.519203, the mean and h are 0, so both
    start at 0 again, now with g = -0.103841 and 0.103841. Client 0's first step is 1/2 + g = 0.396159 (the gradient of
    -<g, theta> is -g). Then z = (0.792319, -0.792319), p_0 = sigmoid(1.584637) = 0.829866, alpha (theta - 0) is
    0.079232, and it arrives at 0.396159 + 0.170134 - 0.079232 - 0.103841 = 0.383221. Client 1 mirrors it."""
    method = FedDyn(alpha=0.2, **TWO_STEPS)
    federation = rg.Federation([one_example(0), one_example(1)], one_example(0), 2)
    with rg.Training(method, federation, from_zeros, rounds=2) as training:
        one, two = [step.state for step in training.steps()]
    assert first(one.clients[0]["g"]) == pytest.approx(-0.103841, abs=1e-6)
    assert first(two.server["model"]) == pytest.approx(0.0, abs=1e-12)
    # g moves by -alpha (theta_k - theta^t)
    assert first(two.clients[0]["g"]) == pytest.approx(-0.103841 - 0.2 * 0.383221, abs=1e-6)


def test_scaffold() -> None:
    """Two clients, of class 0 and of class 1. In the first round they go to 0.619203 and -0.619203 in two steps, so
    that c_0 = -0.619203 / 2 = -0.309601 = -c_1 and c = 0 (lines 12 and 17). In the second the correction c - c_0 =
    0.309601 slows client 0: its first step is 1/2 - 0.309601 = 0.190399; then z = (0.380797, -0.380797), p_0 =
    sigmoid(0.761594) = 0.681700, and 0.190399 + 0.318300 - 0.309601 = 0.199097. So c_0 becomes c_0 - c - 0.199097
    / 2 = -0.409150."""
    federation = rg.Federation([one_example(0), one_example(1)], one_example(0), 2)
    with rg.Training(Scaffold(**TWO_STEPS), federation, from_zeros, rounds=2) as training:
        one, two = [step.state for step in training.steps()]
    assert first(one.clients[0]["c_i"]) == pytest.approx(-(0.5 + SECOND) / 2, rel=1e-12)
    assert first(one.server["c"]) == pytest.approx(0.0, abs=1e-12)
    assert first(two.clients[0]["c_i"]) == pytest.approx(-0.409150, abs=1e-6)


def test_scaffolds_server_variate_counts_all_clients() -> None:
    """One of two clients answers, with c_0 = -0.309601: c moves by half of it (line 17 divides by N)."""
    federation = rg.Federation([one_example(0), one_example(0)], one_example(0), 2)
    server = rg.train(Scaffold(**TWO_STEPS), federation, from_zeros, rounds=1, clients_per_round=1).server
    assert first(server["c"]) == pytest.approx(-(0.5 + SECOND) / 4, rel=1e-12)


def test_logit_adjustment_and_balanced_softmax() -> None:
    """Three examples of class 0 and one of class 1, equal logits: the adjusted softmax of tau = 1 is the prior, so an
    example of class 1 costs -log(1/4); with tau = 2 it is 1/16 against 9/16, -log(1/10)."""
    labels = torch.tensor([0, 0, 0, 1])
    federation = rg.Federation([rg.Examples(torch.ones(4, 1).double(), labels)], one_example(0), 2)
    half_site = rg.ClientSite(from_zeros, 1, 2, 0, 1, 1, torch.device("cpu"), 0, federation.client(0))
    prior = torch.tensor([0.75, 0.25], dtype=torch.float64)
    z, y = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([1])
    for method, loss in (
        (BalancedSoftmax(prior="local"), math.log(4)),
        (BalancedSoftmax(prior="global"), math.log(4)),
        (LogitAdjustment(tau=1.0), math.log(4)),
        (LogitAdjustment(tau=2.0), math.log(10)),
    ):
        assert float(method.criterion({"prior": prior}, half_site)(z, y)) == pytest.approx(loss, rel=1e-12)
    assert post_hoc_shift(prior).tolist() == pytest.approx([math.log(0.75), math.log(0.25)], rel=1e-12)
    assert float(F.cross_entropy(z, y)) == pytest.approx(math.log(2))  # without adjustment


def test_creffs_distance() -> None:
    """Rows (3, 4) and (1, 0) against (4, 3) and (0, 2): cosines 24/25 and 0. Biases (1, 1) against (1, -1): cosine 0.
    By rows: 0.04 + 1 + 1. As one vector: the products sum to 24, the squares to 25 + 1 + 2 = 28 and 25 + 4 + 2 =
    31: 1 - 24 / sqrt(868)."""
    g_W, g_b = torch.tensor([[[3.0, 4.0], [1.0, 0.0]]]).double(), torch.tensor([[1.0, 1.0]]).double()
    target = {
        "weight": torch.tensor([[[4.0, 3.0], [0.0, 2.0]]]).double(),
        "bias": torch.tensor([[1.0, -1.0]]).double(),
    }
    assert float(distance(g_W, g_b, target, "rows")[0]) == pytest.approx(2.04, abs=1e-6)
    assert float(distance(g_W, g_b, target, "whole")[0]) == pytest.approx(1 - 24 / math.sqrt(868), abs=1e-6)
