"""The second term of RedGrape's Eq. (12): a pull on W along the gradient g_bal of balanced data.

lambda g_bal ||g_local|| / ||g_bal||
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from redgrape import tree
from redgrape.tree import Tensors

Norm: TypeAlias = Literal["joint", "per_tensor"]  # one ratio for weight and bias together, or one for each

_TINY = 1e-12  # a balanced gradient below this norm has no direction


def pull(lam: float, g_local: Tensors, g_bal: Tensors, norm: Norm) -> Tensors:
    if norm == "per_tensor":
        return {name: _scaled(lam, g, g_local[name].norm(), g.norm()) for name, g in g_bal.items()}
    local, balanced = tree.norm(g_local.values()), tree.norm(g_bal.values())
    return {name: _scaled(lam, g, local, balanced) for name, g in g_bal.items()}


def _scaled(lam: float, g_bal: Tensor, local: Tensor, balanced: Tensor) -> Tensor:
    """Zero if g_bal has no direction."""
    usable = torch.isfinite(balanced) & (balanced >= _TINY)
    return torch.where(usable, lam * (local / balanced.clamp(min=_TINY)) * g_bal, torch.zeros_like(g_bal))
