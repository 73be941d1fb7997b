"""FedLC, FedRS, FedRoD, FedLF and FedVLS: numbers by hand, where they coincide with other methods, plain readings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import redgrape as rg
import toys
from redgrape import tree
from redgrape.learning.margins import log_counts
from redgrape.learning.regularisers import decorrelation, distillation
from redgrape.methods.balanced_softmax import BalancedSoftmax
from redgrape.methods.balancefl import BalanceFL
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.fedlc import FedLC
from redgrape.methods.fedlf import FedLF
from redgrape.methods.fedrod import FedRoD
from redgrape.methods.fedrs import FedRS
from redgrape.methods.fedvls import FedVLS, suppression
from toys import close, net

C = 4
COMPLETE = [[5, 3, 1, 1], [2, 2, 3, 3], [1, 4, 4, 1]]  # every client holds every class
SKEWED = [[9, 4, 1, 0], [0, 7, 3, 0], [4, 0, 0, 0]]
LOCAL: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 4}


def after(method: rg.Method, counts: list[list[int]] = SKEWED, rounds: int = 2) -> Any:
    return rg.train(method, toys.federation(*counts), net, rounds=rounds)


def model(method: rg.Method, counts: list[list[int]] = SKEWED) -> dict[str, Tensor]:
    found: dict[str, Tensor] = after(method, counts).server["model"]
    return found


def criterion(method: FedAvg, counts: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
    site = rg.ClientSite(net, 1, len(counts), 0, 1, 1, torch.device("cpu"), 0, toys.examples(counts))
    return method.criterion({}, site)


def loss(method: FedAvg, counts: list[int], z: list[float], y: int) -> float:
    return float(criterion(method, counts)(torch.tensor([z]).double(), torch.tensor([y])))


def test_fedlc_by_hand() -> None:
    """16 examples have the margin 1/2 and one has 1. The class without examples has no share, whatever its logit."""
    assert loss(FedLC(), [16, 1, 0], [0, 0, 50], 1) == pytest.approx(math.log(1 + math.exp(0.5)), rel=1e-12)
    assert loss(FedLC(tau=2), [16, 1, 0], [0, 0, 50], 0) == pytest.approx(math.log(1 + math.exp(-1)), rel=1e-12)


def test_fedlc_is_bounded_below() -> None:
    """The true class is in the denominator: however large its logit, the loss is not negative."""
    assert loss(FedLC(), [16, 1, 3], [0, 100, 0], 1) >= 0


def test_fedlc_without_margins_is_fedavg() -> None:
    assert tree.equal(model(FedLC(tau=0.0, **LOCAL), COMPLETE), model(FedAvg(**LOCAL), COMPLETE))
    assert not tree.equal(model(FedLC(**LOCAL), COMPLETE), model(FedAvg(**LOCAL), COMPLETE))
    assert not tree.equal(model(FedLC(tau=0.0, **LOCAL)), model(FedAvg(**LOCAL)))  # missing classes are masked


def test_fedrs_by_hand() -> None:
    """Of 4, 2 and 0 examples: scales 1, 1, 1/2, or 1, 3/4, 1/2 in proportion."""
    e = math.exp
    found = loss(FedRS(), [4, 2, 0], [1, 2, 4], 0)
    assert found == pytest.approx(math.log(e(1) + e(2) + e(2)) - 1, rel=1e-12)
    found = loss(FedRS.preset("released"), [4, 2, 0], [1, 2, 4], 0)
    assert found == pytest.approx(math.log(e(1) + e(1.5) + e(2)) - 1, rel=1e-12)


@pytest.mark.parametrize("scale", ["missing", "proportional"])
def test_fedrs_without_restriction_is_fedavg(scale: Any) -> None:
    assert tree.equal(model(FedRS(alpha=1.0, scale=scale, **LOCAL)), model(FedAvg(**LOCAL)))


def test_fedrs_restricts_missing_classes_only() -> None:
    plain = model(FedAvg(**LOCAL), COMPLETE)
    assert tree.equal(model(FedRS(**LOCAL), COMPLETE), plain)
    assert not tree.equal(model(FedRS(scale="proportional", **LOCAL), COMPLETE), plain)


def test_fedrod_shares_what_balanced_softmax_learns() -> None:
    """Where every client holds every class: log n and log pi differ by a constant."""
    close(model(FedRoD(**LOCAL), COMPLETE), model(BalancedSoftmax(prior="local", **LOCAL), COMPLETE))
    assert log_counts(torch.tensor([3, 0, 1])).tolist() == pytest.approx([math.log(3), 0, 0])


@pytest.mark.parametrize("clip", [None, 0.1])
def test_personal_heads_change_nothing_that_is_shared(clip: float | None) -> None:
    with_heads, without = (after(FedRoD(personal=p, clip_norm=clip, **LOCAL)) for p in (True, False))
    assert tree.equal(with_heads.server, without.server)


def test_fedrods_personal_head_by_hand() -> None:
    """From zeros, one feature that is 1, an example of class 0, lr 1. The first step takes both heads to 1/2, with
    p = 1/2. The second sees the generic logits (1, -1) plus the personal ones, p_0 = sigmoid(4), and adds
    1 - sigmoid(4)."""

    def from_zeros() -> rg.Net:
        made = nn.Linear(1, 2).double()
        nn.init.zeros_(made.weight)
        nn.init.zeros_(made.bias)
        return rg.Net(nn.Flatten(), made)

    one = rg.Examples(torch.ones(1, 1).double(), torch.tensor([0]))
    method = FedRoD(lr=1.0, momentum=0.0, epochs=2, batch_size=1)
    with rg.Training(method, rg.Federation([one], one, 2), from_zeros, rounds=1) as training:
        (step,) = training.steps()
    personal = step.state.clients[0]["personal"]["weight"]
    assert float(personal[0, 0]) == pytest.approx(0.5 + 1 / (1 + math.exp(4)), rel=1e-12)
    assert float(step.state.server["model"]["classifier.weight"][0, 0]) == pytest.approx(0.5 + 1 / (1 + math.exp(2)))


def test_decorrelation_is_the_mean_square_of_correlations() -> None:
    h = toys.random(9, 5) * torch.tensor([1.0, 3.0, 0.2, 7.0, 1.0]).double() + 2
    for batch in (h, h[:4]):  # more examples than features, and fewer
        assert float(decorrelation(batch)) == pytest.approx(float(torch.corrcoef(batch.T).square().mean()), rel=1e-6)
    assert float(decorrelation(h[:1])) == 0
    dead = torch.cat([h, torch.zeros(9, 1).double()], dim=1).requires_grad_()  # a unit that never fires
    decorrelation(dead).backward()
    assert dead.grad is not None and torch.isfinite(dead.grad).all()


def test_fedlf_without_its_terms_is_fedrs() -> None:
    bare = FedLF(centre=0.0, decorrelate=0.0, **LOCAL)
    close(model(bare), model(FedRS(alpha=0.25, scale="proportional", **LOCAL)))
    close(model(FedLF(alpha=1.0, centre=0.0, decorrelate=0.0, **LOCAL)), model(FedAvg(**LOCAL)))


def test_fedlf_is_the_sum_of_its_terms() -> None:
    """Two full-batch steps of a single client; the centres are those of the start."""
    data, lr = toys.examples([5, 3, 1, 0]), 0.1
    x, y, counts = data.inputs(torch.arange(9), torch.float64), data.labels, torch.tensor([5, 3, 1, 0]).double()
    plain = net()
    with torch.no_grad():
        start = plain.encoder(x)
        centres = torch.stack([start[y == c].mean(dim=0) for c in range(3)])
    for _ in range(2):
        h = plain.encoder(x)
        total = F.cross_entropy(plain.classifier(h) * (0.25 + 0.75 * counts / 5), y)
        total = total + 0.3 * (h - centres[y]).square().mean() + 0.2 * torch.corrcoef(h.T).square().mean()
        for p, g in zip(plain.parameters(), torch.autograd.grad(total, list(plain.parameters())), strict=True):
            p.data -= lr * g
    method = FedLF(centre=0.3, decorrelate=0.2, lr=lr, momentum=0.0, epochs=2, batch_size=9)
    found = rg.train(method, rg.Federation([data], data, C), net, rounds=1).server["model"]
    for name, p in plain.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-6, atol=1e-8)  # a variance has 1e-8 added


def test_suppression_by_hand() -> None:
    """Two classes with pi = 1/2 each: log pi and log 1/C cancel, and class 0 sees z_10 only, class 1 z_01 only."""
    z, y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double(), torch.tensor([0, 1])
    assert float(suppression(z, y, torch.tensor([1, 1]))) == pytest.approx((3 + 2) / 2 - math.log(2), rel=1e-12)
    assert float(suppression(z, y, torch.tensor([5, 0]))) == pytest.approx(3 - 2 * math.log(2), rel=1e-12)
    same = torch.tensor([0, 0])  # no example of another class: class 0 adds nothing
    expected = (math.log(math.exp(2) + math.exp(4)) - math.log(2)) / 2
    assert float(suppression(z, same, torch.tensor([1, 1]))) == pytest.approx(expected, rel=1e-12)


def test_distillation_by_hand() -> None:
    """(1/2, 1/2) against (3/4, 1/4): 1/2 log(2/3) + 1/2 log 2 = 1/2 log(4/3). With T = 2, log 9 has those shares."""
    teacher = torch.zeros(2, 2).double()
    for T, logit in ((1.0, math.log(3)), (2.0, math.log(9))):
        z = torch.tensor([[logit, 0.0], [logit, 0.0]], dtype=torch.float64)
        assert float(distillation(z, teacher, T)) == pytest.approx(0.5 * math.log(4 / 3), rel=1e-12)
    assert float(distillation(teacher, teacher)) == 0


def test_fedvls_without_its_terms_is_balanced_softmax() -> None:
    close(model(FedVLS(lam=0.0, suppress=0.0, **LOCAL)), model(BalancedSoftmax(prior="local", **LOCAL)))


def test_fedvls_distils_two_or_more_vacant_classes() -> None:
    one_vacant, two_vacant = [[9, 4, 1, 0]], [[9, 4, 0, 0]]
    for counts, changes in ((COMPLETE, False), (one_vacant, False), (two_vacant, True)):
        without, with_it = (model(FedVLS(lam=lam, **LOCAL), counts) for lam in (0.0, 5.0))
        assert tree.equal(without, with_it) != changes


def test_fedvls_is_the_sum_of_its_terms() -> None:
    """Two full-batch steps of a single client with classes 2 and 3 vacant."""
    data, lr = toys.examples([5, 3, 0, 0]), 0.1
    x, y = data.inputs(torch.arange(8), torch.float64), data.labels
    pi, plain = torch.tensor([5 / 8, 3 / 8, 1e-8, 1e-8], dtype=torch.float64), net()
    with torch.no_grad():
        known = net()(x)[:, 2:].softmax(dim=1)
    for _ in range(2):
        z = plain(x)
        total = F.cross_entropy(z + pi.log(), y)
        for c in (0, 1):
            inside = (z[y != c, c] - pi[c].log() + math.log(1 / C)).exp().sum() / 8
            total = total + 0.3 * pi[c] * inside.log()
        total = total + 0.7 * (known * (known / z[:, 2:].softmax(dim=1)).log()).sum(dim=1).mean()
        for p, g in zip(plain.parameters(), torch.autograd.grad(total, list(plain.parameters())), strict=True):
            p.data -= lr * g
    method = FedVLS(lam=0.7, suppress=0.3, lr=lr, momentum=0.0, epochs=2, batch_size=8)
    found = rg.train(method, rg.Federation([data], data, C), net, rounds=1).server["model"]
    close({name: p.detach() for name, p in plain.named_parameters()}, found)


class Louder(nn.Module):
    """Doubles its input in training mode."""

    def forward(self, h: Tensor) -> Tensor:
        return 2 * h if self.training else h


def louder() -> rg.Net:
    made = net()
    return rg.Net(nn.Sequential(*made.encoder, Louder()), made.classifier)


@pytest.mark.parametrize("kind", [FedVLS, BalanceFL])
def test_the_received_model_distils_in_evaluation_mode(kind: Any) -> None:
    """In its first step a client has the received model. Distillation from it changes nothing, unless the two differ
    because one of them trains."""
    data = toys.examples([4, 4, 0, 0])

    def one_step(lam: float, build: Any) -> dict[str, Tensor]:
        method = kind(lam=lam, lr=0.1, momentum=0.0, epochs=1, batch_size=8)
        found: dict[str, Tensor] = rg.train(method, rg.Federation([data], data, C), build, rounds=1).server["model"]
        return found

    close(one_step(0.0, net), one_step(5.0, net))
    assert not torch.allclose(one_step(0.0, louder)["classifier.weight"], one_step(5.0, louder)["classifier.weight"])
