"""Sums over features by class, and the linear heads that follow from them without training.

    N_c, s_c = sum h over class c, Q = sum h h^T over all        added up over clients, they are those of all data
    mu_c = s_c / N_c,   S = (Q - sum_c N_c mu_c mu_c^T) / (N - C)

A head has scores z_c = w_c h + b_c. A softmax does not see what all classes share, so rows and biases are centred over
the classes with examples. A class without examples gets no row: its scores are 0 h - 30, and the largest of scores with
mean zero is at least zero, so it never wins. Everything is in float64; the head is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from redgrape.exchange.parts import Sum
from redgrape.learning.classifier import encoded
from redgrape.nets.net import Net
from redgrape.tree import Tensors

if TYPE_CHECKING:
    from redgrape.method import ClientSite, Site

_ABSENT = -30.0  # the score of a class without examples; the mean score of the others is zero
_FLAT = 1e-12  # of the largest eigenvalue: below it a direction has no spread


def zeros(model: Tensors, site: Site) -> Tensors:
    """The sums over no example. Q is symmetric: its upper triangle is kept, row by row."""
    C, d = site.num_classes, model["classifier.weight"].shape[1]
    sums = {"first": torch.zeros(C, d, dtype=torch.float64), "second": torch.zeros(d * (d + 1) // 2).double()}
    return {"examples": torch.zeros(C, dtype=torch.int64), **sums}


def part(sums: Tensors) -> Sum:
    """Sums like these as a part of an update. Each client adds its own once."""
    return Sum(sums, running=True, counted="examples")


def of_rows(net: Net, site: ClientSite, rows: Tensor) -> Tensors:
    """N, s and Q of these rows of a client's data, in evaluation mode."""
    C, d, device = site.num_classes, net.classifier.in_features, site.device
    first = torch.zeros(C, d, dtype=torch.float64, device=device)
    second = torch.zeros(d, d, dtype=torch.float64, device=device)
    for features, y in encoded(net, site, rows):
        h = features.double()
        first.index_add_(0, y, h)
        second += h.T @ h
    examples = torch.bincount(site.data.labels[rows], minlength=C)
    i, j = torch.triu_indices(d, d)
    return {"examples": examples, "first": first.cpu(), "second": second.cpu()[i, j]}


def class_means(net: Net, site: ClientSite, rows: Tensor, *, unit: bool = False) -> Tensor:
    """The mean feature vector of each class over these rows of a client's data, in evaluation mode: [C, d] in float64,
    zero for a class without rows. `unit`: of feature vectors scaled to length 1."""
    first = torch.zeros(site.num_classes, net.classifier.in_features, dtype=torch.float64, device=site.device)
    for h, y in encoded(net, site, rows):
        first.index_add_(0, y, (F.normalize(h, dim=1) if unit else h).double())
    examples = torch.bincount(site.data.labels[rows], minlength=site.num_classes).clamp(min=1)
    return first.cpu() / examples[:, None]


def reported_rows(site: ClientSite) -> Tensor:
    """The examples of the classes that the client reports."""
    return site.reported[site.data.labels].nonzero().flatten()


def added(sums: Tensors, more: Tensors) -> Tensors:
    return {name: t + more[name] for name, t in sums.items()}


def second_moment(sums: Tensors) -> Tensor:
    """Q [d, d], from its upper triangle."""
    d = sums["first"].shape[1]
    i, j = torch.triu_indices(d, d)
    Q = sums["second"].new_zeros(d, d)
    Q[i, j] = sums["second"]
    Q[j, i] = sums["second"]
    return Q


def usual_rho(num_classes: int) -> float:
    """rho if nothing is known. With many classes the largest of many noisy scores wins, and less correction is best."""
    return 1.0 if num_classes <= 20 else 0.5


class Spread(NamedTuple):
    """The classes that have examples, and S = vectors diag(values) vectors^T."""

    examples: Tensor  # N_c [H]
    means: Tensor  # mu_c [H, d]
    values: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, sums: Tensors) -> Spread:
        held = sums["examples"] > 0
        n = sums["examples"][held].double()
        means = sums["first"][held] / n[:, None]
        within = second_moment(sums) - means.T @ (n[:, None] * means)
        values, vectors = _eigh(within / (n.sum() - len(n)).clamp(min=1))
        return cls(n, means, values.clamp(min=0), vectors)  # below zero is rounding

    def discriminants(self, g: Sequence[float], rho: Sequence[float]) -> tuple[Tensor, Tensor]:
        """LDA for equally likely classes, for each g and rho: W [G, H, d] and b [G, R, H].

            P = ((1 - g) S + g tr(S)/d I)^-1,   d_eff = tr(P S)
            w_c = P mu_c,   b_c = -1/2 (mu_c^T P mu_c - rho d_eff / N_c)

        A mean of n examples is longer than the true one: E |mu_hat|^2 = |mu|^2 + tr(S) / n. Without the last term the
        score of a rare class would be too low by d_eff / (2 n). If the examples of each class are all alike, P = I.
        """
        shrunk = torch.stack([(1 - v) * self.values + v * self.values.mean() for v in g])
        largest = shrunk.amax(dim=1, keepdim=True)
        inverse = torch.where(largest > 0, 1 / torch.maximum(shrunk, _FLAT * largest), 1.0)
        W = (self.means @ self.vectors * inverse[:, None]) @ self.vectors.T
        excess = (inverse @ self.values)[:, None, None] / self.examples * W.new_tensor(rho)[:, None]
        return W, -0.5 * ((W * self.means).sum(dim=2)[:, None] - excess)


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors. MKL gives up on some matrices with many zero rows, as few examples with many features
    have; the LAPACK of NumPy does not."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # it is documented there
        values, vectors = map(torch.from_numpy, np.linalg.eigh(matrix.numpy()))
    return values, vectors


def ridge(sums: Tensors, r: float, *, constant: bool) -> tuple[Tensor, Tensor]:
    """w_c = (Q + r I)^-1 s_c of the classes that have examples, as W [H, d] and b [H]. With a constant feature, b holds
    its weights; else b is zero."""
    held = sums["examples"] > 0
    n, s, Q = sums["examples"][held].double(), sums["first"][held], second_moment(sums)
    if not constant:
        return torch.linalg.solve(Q + r * torch.eye(len(Q)).double(), s.T).T, torch.zeros_like(n)
    edge = s.sum(dim=0)
    Q = torch.cat([torch.cat([Q, edge[:, None]], dim=1), torch.cat([edge, n.sum()[None]])[None]])
    solved = torch.linalg.solve(Q + r * torch.eye(len(Q)).double(), torch.cat([s, n[:, None]], dim=1).T).T
    return solved[:, :-1], solved[:, -1]


def class_losses(net: Net, site: ClientSite, rows: Tensor, heads: Tensors) -> Tensor:
    """The cross-entropy of each head, of weight [G, C, d] and bias [G, R, C], summed over these rows of each class:
    [C, G, R]."""
    W, b = (heads[name].to(site.device) for name in ("weight", "bias"))
    total = torch.zeros(W.shape[1], *b.shape[:2], dtype=torch.float64, device=site.device)
    for h, y in encoded(net, site, rows):
        for g in range(len(W)):
            z = (h @ W[g].T)[:, None] + b[g]
            own = z.gather(2, y[:, None, None].expand(-1, b.shape[1], 1))[:, :, 0]
            total[:, g].index_add_(0, y, (z.logsumexp(dim=2) - own).double())
    return total.cpu()


def of_all_classes(examples: Tensor, W: Tensor, b: Tensor) -> Tensors:
    """weight [..., C, d] and bias [..., C] from those of the H classes that have examples."""
    held = examples > 0
    weight = W.new_zeros(*W.shape[:-2], len(held), W.shape[-1])
    bias = b.new_full((*b.shape[:-1], len(held)), _ABSENT)
    weight[..., held, :], bias[..., held] = W - W.mean(dim=-2, keepdim=True), b - b.mean(dim=-1, keepdim=True)
    return {"weight": weight, "bias": bias}


def with_head(model: Tensors, sums: Tensors, W: Tensor, b: Tensor) -> Tensors:
    """The model with the head W [H, d], b [H] of the classes that have examples.

    A classifier without a bias gets W + b u^T with u = Q^+ sum_c s_c, the least-squares solution of u h = 1. This is
    exact if some combination of the features is constant.
    """
    head = of_all_classes(sums["examples"], W, b)
    if "classifier.bias" not in model:
        u = torch.linalg.pinv(second_moment(sums), hermitian=True) @ sums["first"].sum(dim=0)
        head["weight"] += head.pop("bias")[:, None] * u
    return {**model, **{f"classifier.{name}": t.to(model[f"classifier.{name}"].dtype) for name, t in head.items()}}
