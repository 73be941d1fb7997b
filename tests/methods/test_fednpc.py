"""FedNPC: where it is FedAvg, one step by autograd, and the mean step in closed form."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import redgrape as rg
import toys
from redgrape import tree
from redgrape.learning import classifier
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.fednpc import FedNPC
from toys import net

C = 4
SKEWED = [[9, 4, 1, 0], [0, 7, 3, 0], [4, 0, 0, 0]]
LOCAL: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 4}


def server(method: rg.Method) -> Any:
    return rg.train(method, toys.federation(*SKEWED), net, rounds=3).server


def start(*rows: float) -> dict[str, Tensor]:
    """A model whose classifier has rows of these lengths."""
    unit = F.normalize(toys.random(len(rows), 5), dim=1)
    return {"classifier.weight": torch.tensor(rows).double()[:, None] * unit, "classifier.bias": toys.random(len(rows))}


def test_without_steps_it_is_fedavg_and_training_never_sees_them() -> None:
    plain = server(FedAvg(**LOCAL))["model"]
    assert tree.equal(server(FedNPC(noise_steps=0, **LOCAL))["model"], plain)
    ours = server(FedNPC(noise_samples=50, **LOCAL))
    assert tree.equal(ours["beneath"], classifier.of(plain))
    for name, t in plain.items():
        assert torch.equal(t, ours["model"][name]) == name.startswith("encoder.")


def test_two_steps_are_those_of_autograd() -> None:
    """With momentum: the second step goes along g_2 + m g_1."""
    method = FedNPC(noise_steps=2, noise_samples=30, noise_lr=0.5, noise_momentum=0.8)
    model, site = start(3.0, 1.0, 0.5, 2.0), toys.server_site(3, C)
    W, b = model["classifier.weight"].clone(), model["classifier.bias"].clone()
    random, velocity = site.generator("random features"), [torch.zeros_like(W), torch.zeros_like(b)]
    for _ in range(2):
        W.requires_grad_(), b.requires_grad_()
        y = torch.randint(C, (30,), generator=random)
        h = torch.empty(30, 5, dtype=torch.float64).normal_(generator=random)
        gradients = torch.autograd.grad(F.cross_entropy(h @ W.T + b, y), [W, b])
        velocity = [0.8 * v + g for v, g in zip(velocity, gradients, strict=True)]
        W, b = W.detach() - 0.5 * velocity[0], b.detach() - 0.5 * velocity[1]
    found = method.init_server(model, site)["model"]
    torch.testing.assert_close(found["classifier.weight"], W)
    torch.testing.assert_close(found["classifier.bias"], b)


def test_the_mean_step_is_the_closed_form() -> None:
    """Stein's identity for normal h: E[p h^T] = E[diag(p) - p p^T] W."""
    n, model, site = 400_000, start(3.0, 1.0, 0.5, 2.0), toys.server_site(3, C)
    W, b = model["classifier.weight"], model["classifier.bias"]
    h = torch.randn(n, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p = (h @ W.T + b).softmax(dim=1)
    mean = (torch.diag(p.mean(dim=0)) - p.T @ p / n) @ W
    method = FedNPC(noise_steps=1, noise_samples=n, noise_lr=1.0)
    found = method.init_server(model, site)["model"]
    torch.testing.assert_close(W - found["classifier.weight"], mean, rtol=0, atol=0.01)
    torch.testing.assert_close(b - found["classifier.bias"], p.mean(dim=0) - 1 / C, rtol=0, atol=0.01)


def test_long_rows_lose_most() -> None:
    model = start(4.0, 0.5, 0.5, 0.5)
    found = FedNPC().init_server(model, toys.server_site(3, C))["model"]["classifier.weight"]
    left = found.norm(dim=1) / model["classifier.weight"].norm(dim=1)
    assert left[0] < 1 and float(found.norm(dim=1).max() / found.norm(dim=1).min()) < 8


def test_a_classifier_without_bias_gets_none() -> None:
    model = {"classifier.weight": start(1.0, 2.0)["classifier.weight"]}
    assert set(FedNPC().init_server(model, toys.server_site(3, 2))["model"]) == {"classifier.weight"}
