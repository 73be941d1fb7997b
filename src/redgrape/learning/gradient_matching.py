"""Finds features whose classifier gradients match given ones, without double backward.

For the features F [n, d] of one class c, p = softmax(W F^T + b) [C, n] and R = (p - e_c) / n, the mean cross-entropy
has the gradients g_W = R F and g_b = R 1. With A = dD/dg_W and a = dD/dg_b of a distance D to the given gradients,

    dD/dF = R^T A + [ p * (Q - sum_j p_j Q_j) / n ]^T W,      Q = A F^T + a 1^T

All classes are computed at once. Examples are the last axis because torch's softmax is ten times slower over a short
last axis.

Each row of dD/dF is a sum of rows of F, of W and of the given gradient. So the features never leave the span of these
n + 2 C rows. If it has fewer dimensions than the features, the steps are taken in an orthonormal basis of it. Inner
products are the same there, and only these enter D.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from redgrape.tree import Tensors

Distance: TypeAlias = Literal["rows", "whole"]

_EPS = 1e-6


def class_gradients(features: Tensor, classes: Tensor, W: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p [m, C, n], R [m, C, n] and the gradients g_W [m, C, d], g_b [m, C] of the features [m, n, d] of m classes.
    W is [C, d], or [m, C, d] with one for each of these classes.
    """
    p = torch.softmax(W @ features.transpose(1, 2) + b[:, None], dim=1)
    R = (p - torch.eye(len(b), dtype=W.dtype)[classes, :, None]).div_(features.shape[1])
    return p, R, R @ features, R.sum(dim=2)


def _one_minus_cosine(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """1 - u.v / (|u| |v| + eps) over the last axis, and its gradient with respect to u."""
    dot = (u * v).sum(dim=-1, keepdim=True)
    size_u, size_v = u.norm(dim=-1, keepdim=True), v.norm(dim=-1, keepdim=True)
    below = size_u * size_v + _EPS
    gradient = -v / below + dot * size_v * u / (size_u.clamp(min=1e-30) * below.square())
    return (1 - dot / below).squeeze(-1), gradient


def distance(g_W: Tensor, g_b: Tensor, target: Tensors, kind: Distance) -> tuple[Tensor, Tensor, Tensor]:
    """D [m] between gradients and targets, with its gradients A [m, C, d] and a [m, C]. `rows`: the sum over output
    rows of 1 - cosine, with the bias as one more row. `whole`: 1 - cosine of weight and bias as one vector.
    """
    if kind == "rows":
        rows, A = _one_minus_cosine(g_W, target["weight"])
        bias, a = _one_minus_cosine(g_b, target["bias"])
        return rows.sum(dim=1) + bias, A, a
    m, C, d = g_W.shape
    whole, both = _one_minus_cosine(
        torch.cat([g_W.reshape(m, -1), g_b], dim=1), torch.cat([target["weight"].reshape(m, -1), target["bias"]], dim=1)
    )
    return whole, both[:, : C * d].reshape(m, C, d), both[:, C * d :]


@torch.no_grad()
def matching_gradient(
    features: Tensor, classes: Tensor, W: Tensor, b: Tensor, target: Tensors, kind: Distance
) -> tuple[Tensor, Tensor]:
    """The summed distance, and dD/dF [m, n, d]."""
    p, R, g_W, g_b = class_gradients(features, classes, W, b)
    D, A, a = distance(g_W, g_b, target, kind)
    Q = torch.baddbmm(a[:, :, None], A, features.transpose(1, 2))
    through_softmax = Q.sub_((p * Q).sum(dim=1, keepdim=True)).mul_(p).div_(features.shape[1])
    return D.sum(), (through_softmax.transpose(1, 2) @ W).baddbmm_(R.transpose(1, 2), A)


@torch.no_grad()
def match(
    features: Tensor, classes: Tensor, W: Tensor, b: Tensor, target: Tensors, kind: Distance, steps: int, lr: float
) -> Tensor:
    """The features after this many gradient steps on D."""
    n, C, d = features.shape[1], *W.shape
    if steps == 0 or n + 2 * C >= d:
        return _descend(features, classes, W, b, target, kind, steps, lr)
    rows = torch.cat([features, W.expand(len(features), C, d), target["weight"]], dim=1)
    basis, coordinates = torch.linalg.qr(rows.transpose(1, 2))  # [m, d, n + 2 C] and [m, n + 2 C, n + 2 C]
    features, W, gradient = (part.contiguous() for part in coordinates.transpose(1, 2).split([n, C, C], dim=1))
    moved = _descend(features, classes, W, b, {**target, "weight": gradient}, kind, steps, lr)
    return torch.bmm(moved, basis.transpose(1, 2))


def _descend(
    features: Tensor, classes: Tensor, W: Tensor, b: Tensor, target: Tensors, kind: Distance, steps: int, lr: float
) -> Tensor:
    features = features.clone()
    for _ in range(steps):
        features.sub_(matching_gradient(features, classes, W, b, target, kind)[1], alpha=lr)
    return features
