"""Sgd against torch.optim.SGD, bit for bit."""

from __future__ import annotations

import pytest
import torch

from redgrape.learning.sgd import Sgd


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.01), (0.9, 0.01)])
def test_the_same_bits_as_torch(momentum: float, weight_decay: float) -> None:
    """Over steps, where some parameters have no gradient in some of them, the first included. One of torch's for each
    parameter: it cannot begin some velocities later than others."""
    random = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=random) for shape in ((7, 5), (5,), (3, 2, 4), ())]
    ours = [t.clone().requires_grad_() for t in start]
    theirs = [t.clone().requires_grad_() for t in start]
    mine = Sgd(ours, 0.1, momentum, weight_decay)
    options = {"lr": 0.1, "momentum": momentum, "weight_decay": weight_decay, "fused": True}
    references = [torch.optim.SGD([t], **options) for t in theirs]
    for missing in ([1, 3], [], [0], [3], []):
        mine.zero_grad()
        for reference in references:
            reference.zero_grad()
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if i not in missing:
                a.grad = torch.randn(a.shape, generator=random)
                b.grad = a.grad.clone()
        if not missing:
            for optimizer in (mine, *references):
                optimizer.param_groups[0]["lr"] = 0.05
        mine.step()
        for reference in references:
            reference.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def test_zero_grad_takes_the_gradients_away() -> None:
    p = torch.ones(2, requires_grad=True)
    p.grad = torch.ones(2)
    optimizer = Sgd([p], 1.0)
    optimizer.zero_grad()
    assert p.grad is None
    optimizer.step()
    assert torch.equal(p, torch.ones(2))
