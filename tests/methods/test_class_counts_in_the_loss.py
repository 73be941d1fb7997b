"""The class-balanced loss and LDAM: weights and margins from class counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import redgrape as rg
from redgrape import methods, testing
from redgrape.learning.prior import effective_number_weights
from redgrape.method import Method
from redgrape.methods.class_balanced import ClassBalanced
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.ldam import LDAM, margins
from toys import VECTOR, close, federation

COUNTS = [5, 3, 0], [0, 4, 0], [2, 1, 3], [1, 0, 1]
PLAIN: dict[str, Any] = {"epochs": 1, "batch_size": 100, "momentum": 0.0, "lr": 0.5, "clip_norm": None}


def build() -> rg.Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return rg.Net(nn.Sequential(nn.Flatten(), nn.Linear(*VECTOR, 4), nn.Tanh()), nn.Linear(4, 3)).double()


def final(method: Method, rounds: int = 1, counts: Any = COUNTS) -> Any:
    return rg.train(method, federation(*counts), build, rounds=rounds).server


# Effective numbers.


def test_weights_worked_out_by_hand() -> None:
    """beta = 1/2: E_1 = 1, E_2 = 3/2, E_3 = 7/4; the inverses 1, 2/3, 4/7 add up to 47/21."""
    w = effective_number_weights(torch.tensor([3, 0, 1, 2]), 0.5)
    expected = torch.tensor([4 / 7, 0, 1, 2 / 3], dtype=torch.float64) * 3 / (47 / 21)
    torch.testing.assert_close(w, expected)


def test_weights_between_none_and_inverse_counts() -> None:
    counts = torch.tensor([1000, 10, 1, 0])
    assert effective_number_weights(counts, 0.0).tolist() == [1, 1, 1, 0]
    inverse = effective_number_weights(counts, 1 - 1e-12)
    torch.testing.assert_close(inverse[:3], torch.tensor([0.001, 0.1, 1.0]).double() * 3 / 1.101, rtol=1e-6, atol=0)


def test_weights_of_very_many_examples_are_finite() -> None:
    w = effective_number_weights(torch.tensor([10**9, 1, 0]), 0.9999)
    assert w.isfinite().all() and float(w.sum()) == pytest.approx(2)


def weighted_loss(z: Tensor, y: Tensor, counts: Tensor, beta: float) -> Tensor:
    """The sum over classes of (1 - beta) / (1 - beta^n) of their losses, class by class."""
    inverse = [(1 - beta) / (1 - beta ** int(n)) if n else 0.0 for n in counts]
    scale = sum(n > 0 for n in counts.tolist()) / math.fsum(inverse)
    log_p = torch.log_softmax(z, dim=1)
    return -torch.stack([scale * inverse[int(c)] * log_p[i, c] for i, c in enumerate(y)]).sum() / len(y)


@pytest.mark.parametrize("source", ["local", "global"])
def test_class_balanced_is_a_plain_reading_of_its_formula(source: Any) -> None:
    data = federation(*COUNTS)
    total = torch.tensor(COUNTS).sum(dim=0)
    net, moved = build(), {name: torch.zeros_like(p) for name, p in build().named_parameters()}
    for k, counts in enumerate(COUNTS):
        part = data.client(k)
        x, y = part.inputs(torch.arange(len(part)), torch.float64), part.labels
        net.zero_grad()
        weighted_loss(net(x), y, total if source == "global" else torch.tensor(counts), 0.9).backward()
        for name, p in net.named_parameters():
            assert p.grad is not None
            moved[name] -= 0.5 * p.grad * len(y) / 20
    found = final(ClassBalanced(beta=0.9, counts=source, **PLAIN))["model"]
    close(found, {name: p.detach() + moved[name] for name, p in build().named_parameters()})


def test_class_balanced_without_weights_is_fedavg() -> None:
    for source in ("local", "global"):
        close(final(ClassBalanced(beta=0.0, counts=source), 3)["model"], final(FedAvg(), 3)["model"])
    bias, plain = (final(method)["model"]["classifier.bias"] for method in (ClassBalanced(), FedAvg()))
    assert not torch.allclose(bias, plain)


@pytest.mark.parametrize("method", [LDAM, ClassBalanced])
def test_counts_of_all_clients_are_not_those_of_one(method: type[Method]) -> None:
    """Each client has its own long tail, and together they have none."""
    ours, theirs = (final(method(counts=source), 2, [[7, 3, 1], [1, 3, 7]])["model"] for source in ("global", "local"))
    assert not torch.allclose(ours["classifier.weight"], theirs["classifier.weight"])


def test_counts_are_asked_for_only_if_they_are_of_all_clients() -> None:
    for name in ("class_balanced", "ldam"):
        method = methods.load(name)
        assert "class_counts" not in final(method(counts="local"))
        assert final(method(counts="global"))["class_counts"].tolist() == [8, 8, 4]


# LDAM.


def test_margins_worked_out_by_hand() -> None:
    """16^(1/4) = 2 and 81^(1/4) = 3; a class without examples does not become the rarest."""
    assert margins(torch.tensor([81, 16, 1, 0]), 0.5).tolist() == pytest.approx([0.5 / 3, 0.25, 0.5, 0])
    assert margins(torch.tensor([16, 0, 256]), 0.5).tolist() == pytest.approx([0.5, 0, 0.25])


def cosine(net: rg.Net, x: Tensor) -> Tensor:
    h, W = net.encoder(x), net.classifier.weight
    return (h @ W.T) / h.norm(dim=1, keepdim=True) / W.norm(dim=1)


def test_a_step_of_ldam_is_a_plain_reading_of_its_formula() -> None:
    """Both with the weights, which come in the second of two rounds, and without them."""
    counts = [5, 3, 1]
    model = {k: t.clone() for k, t in build().state_dict().items()}
    for share, weights in ((0.0, [1.0, 1.0, 1.0]), (1.0, [1 / (1 - 0.9**n) for n in counts])):
        server = final(LDAM(deferred=share, beta=0.9, **PLAIN), 1, [counts])
        net = build()
        net.load_state_dict(model)
        with torch.no_grad():
            net.classifier.weight.div_(net.classifier.weight.norm(dim=1, keepdim=True))
        part = federation(counts).client(0)
        y, z = part.labels, cosine(net, part.inputs(torch.arange(9), torch.float64))
        loss, total = torch.zeros(()).double(), 0.0
        for i, c in enumerate(y.tolist()):
            logits = 30 * z[i]
            own = 30 * (z[i, c] - 0.5 * (1 / counts[c]) ** 0.25)
            others = torch.cat([logits[:c], logits[c + 1 :]])
            loss = loss + weights[c] * (torch.logsumexp(torch.cat([others, own[None]]), 0) - own)
            total += weights[c]
        (loss / total).backward()
        for name, p in net.named_parameters():
            if name != "classifier.bias":
                assert p.grad is not None
                moved = p.detach() - 0.5 * p.grad
                wanted = moved / moved.norm(dim=1, keepdim=True) if name == "classifier.weight" else moved
                torch.testing.assert_close(server["model"][name], wanted)


def test_weights_are_deferred_to_the_last_share_of_the_rounds() -> None:
    """Of five rounds, with a fifth deferred, four are those without weights, and the last is not."""
    never, late = (list(_rounds(LDAM(deferred=share, beta=0.9, **PLAIN), 5)) for share in (0.0, 0.2))
    for t in range(4):
        assert torch.equal(never[t]["classifier.weight"], late[t]["classifier.weight"])
    assert not torch.allclose(never[4]["classifier.weight"], late[4]["classifier.weight"], atol=1e-4)


def _rounds(method: Method, rounds: int) -> Iterator[Any]:
    with rg.Training(method, federation(*COUNTS), build, rounds=rounds) as training:
        for step in training.steps():
            yield step.state.server["model"]


def test_the_deployed_classifier_decides_as_the_cosine() -> None:
    model = final(LDAM(epochs=3, lr=0.1), 3)["model"]
    torch.testing.assert_close(model["classifier.weight"].norm(dim=1), torch.ones(3).double())
    assert not model["classifier.bias"].any()
    net = build()
    net.load_state_dict(model)
    x = torch.randn(200, *VECTOR, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(net(x).argmax(dim=1), cosine(net, x).argmax(dim=1))
    assert len(net(x).argmax(dim=1).unique()) > 1


@pytest.mark.parametrize("clause", ["clients_of_one_class", "classes_that_nobody_holds", "every_kind_of_net"])
@pytest.mark.parametrize("name", ["class_balanced", "ldam"])
def test_local_counts_keep_the_contract(name: str, clause: str) -> None:
    testing.CHECKS[clause](methods.load(name)(counts="local", **({"deferred": 1.0} if name == "ldam" else {})))
