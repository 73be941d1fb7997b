"""Sums over features by class, and the linear heads that follow from them without training.

    N_c, s_c = sum h over class c, Q = sum h h^T over all        added up over clients, they are those of all data
    mu_c = s_c / N_c,   S = (Q - sum_c N_c mu_c mu_c^T) / (N - C)

A head has scores z_c = w_c h + b_c. A softmax does not see what all classes share, so rows and biases are centred over
the classes with examples. A class without examples gets no row: its scores are 0 h - 30, and the largest of scores with
mean zero is at least zero, so it never wins. Everything is in float64; the head is rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
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


def part(model: Tensors, site: Site) -> Sum:
    """The sums as a part of an update. Each client adds its own once."""
    return Sum(zeros(model, site), running=True, counted="examples")


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
        values, vectors = torch.linalg.eigh(within / (n.sum() - len(n)).clamp(min=1))
        return cls(n, means, values.clamp(min=0), vectors)  # below zero is rounding

    def discriminant(self, g: float, rho: float) -> tuple[Tensor, Tensor]:
        """LDA for equally likely classes, as W [H, d] and b [H].

            P = ((1 - g) S + g tr(S)/d I)^-1,   d_eff = tr(P S)
            w_c = P mu_c,   b_c = -1/2 (mu_c^T P mu_c - rho d_eff / N_c)

        A mean of n examples is longer than the true one: E |mu_hat|^2 = |mu|^2 + tr(S) / n. Without the last term the
        score of a rare class would be too low by d_eff / (2 n). If the examples of each class are all alike, P = I.
        """
        shrunk = (1 - g) * self.values + g * self.values.mean()
        inverse = 1 / shrunk.clamp(min=_FLAT * float(shrunk.max())) if shrunk.any() else torch.ones_like(shrunk)
        W = (self.means @ self.vectors * inverse) @ self.vectors.T
        return W, -0.5 * ((W * self.means).sum(dim=1) - rho * (inverse * self.values).sum() / self.examples)


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


def with_head(model: Tensors, sums: Tensors, W: Tensor, b: Tensor) -> Tensors:
    """The model with the head W [H, d], b [H] of the classes that have examples.

    A classifier without a bias gets W + b u^T with u = Q^+ sum_c s_c, the least-squares solution of u h = 1. This is
    exact if some combination of the features is constant.
    """
    held = sums["examples"] > 0
    weight = torch.zeros_like(sums["first"])
    bias = torch.full((len(held),), _ABSENT, dtype=torch.float64)
    weight[held], bias[held] = W - W.mean(dim=0), b - b.mean()
    if "classifier.bias" not in model:
        u = torch.linalg.pinv(second_moment(sums), hermitian=True) @ sums["first"].sum(dim=0)
        weight += bias[:, None] * u
    head = {"classifier.weight": weight, "classifier.bias": bias}
    return {name: head[name].to(t.dtype) if name in head else t for name, t in model.items()}
