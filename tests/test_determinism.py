"""What the deterministic block sets, and puts back."""

from __future__ import annotations

import torch

from redgrape.determinism import same_bits_everywhere

SUBNORMAL = torch.tensor([1e-40, 1.0])


def _kept() -> bool:
    return bool(SUBNORMAL.mul(1.0)[0] != 0)


def test_subnormal_numbers_are_zero_inside_and_kept_again_outside() -> None:
    assert _kept()
    with same_bits_everywhere():
        assert not _kept()
        with same_bits_everywhere():
            assert not _kept()
        assert not _kept()  # the inner block puts back what the outer one set
    assert _kept()


def test_gradients_have_no_subnormal_numbers() -> None:
    """The backward pass runs in the thread that asks for it, so the setting holds there, too."""
    z = torch.tensor([[0.0, 90.0]], requires_grad=True)
    with same_bits_everywhere():
        torch.nn.functional.cross_entropy(z, torch.tensor([1])).backward()
        assert z.grad is not None and z.grad[0, 0] == 0  # exp(-90) is 8e-40
    z.grad = None
    torch.nn.functional.cross_entropy(z, torch.tensor([1])).backward()
    assert z.grad is not None and z.grad[0, 0] != 0
