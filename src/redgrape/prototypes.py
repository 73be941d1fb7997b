"""Tables of gradient prototypes: for each class c a matrix g_c [C, d] and a vector b_c [C], in one of two forms.

Exact: weight [C, C, d] and bias [C, C].

LowRank, of rank r: left [C, C, r] and right [C, r, d] with g_c ~ left_c right_c, and bias [C, C], which stays exact. A
prototype is a mean of outer products, g_c = 1/n sum_i (p_i - e_c) h_i^T = A B with the columns of A [C, n] and the rows
of B [n, d], so that its rank is at most n, and at most C - 1, because p_i - e_c sums to zero. Its best approximation of
rank r, in the Frobenius norm, is what the r largest singular values leave (Eckart and Young). For n < min(C, d) they
are found without forming g_c:

    A = Q_A R_A,   B^T = Q_B R_B,   R_A R_B^T = U S V^T  (n x n)      =>  A B = (Q_A U) S (Q_B V)^T
    left = Q_A U S,   right = (Q_B V)^T, both cut to r                    |error|^2 = sum of S_i^2 for i > r

The mean over clients is the same again, with the clients' factors side by side: sum_k w_k left_k right_k = A B with
A = [w_1 left_1, w_2 left_2, ...] and B = [right_1; right_2; ...]. All this is done in float64, class by class.

What a client sends are singular vectors, never A and B: these are its examples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from redgrape.classifier_gradients import (
    class_mean_gradients,
    mean_over_holders,
    residual,
    rows_within,
    table_blocks,
    weights_of_holders,
)
from redgrape.half_precision import unpack
from redgrape.tree import Tensors, Tree

_ROWS = 64  # sums over classes are cut at multiples of it, which leaves their bits as those of the uncut sum


class Prototypes(Protocol):
    """What a form of prototypes can do. Where a table comes from the wire, its parts may be packed."""

    def none(self, W: Tensors) -> Tensors:
        """The table before the first round: zeros."""
        ...

    def local(self, classifier: nn.Linear, batches: Iterable[tuple[Tensor, Tensor]], classes: Tensor) -> Tensors:
        """The mean gradients of these m classes, from batches of features and labels; in place of C the first axis has
        the length m."""
        ...

    def mean(self, sent: Sequence[Tree], old: Tensors, weights: Sequence[Tensor] | None) -> tuple[Tensors, Tensor]:
        """A new table: the mean over the clients that hold a class, the old prototype where nobody does; and which
        classes somebody holds."""
        ...

    def sum(self, table: Tree, classes: Tensor, dtype: torch.dtype) -> Tensors:
        """The sum over the classes of this mask: weight [C, d] and bias [C]."""
        ...


@dataclass(frozen=True)
class Exact:
    def none(self, W: Tensors) -> Tensors:
        return {name: w.new_zeros(len(w), *w.shape) for name, w in W.items()}

    def local(self, classifier: nn.Linear, batches: Iterable[tuple[Tensor, Tensor]], classes: Tensor) -> Tensors:
        return {name: g.cpu() for name, g in class_mean_gradients(classifier, batches, classes).items()}

    def mean(self, sent: Sequence[Tree], old: Tensors, weights: Sequence[Tensor] | None) -> tuple[Tensors, Tensor]:
        return mean_over_holders(sent, {name: g[0] for name, g in old.items()}, weights, old)

    def sum(self, table: Tree, classes: Tensor, dtype: torch.dtype) -> Tensors:
        return {name: _sum_over_classes(g, classes, dtype) for name, g in table.items()}


@dataclass(frozen=True)
class LowRank:
    rank: int

    def none(self, W: Tensors) -> Tensors:
        C, d = W["weight"].shape
        shapes = {"left": (C, C, self.rank), "right": (C, self.rank, d)} | ({"bias": (C, C)} if "bias" in W else {})
        return {name: W["weight"].new_zeros(shape) for name, shape in shapes.items()}

    def local(self, classifier: nn.Linear, batches: Iterable[tuple[Tensor, Tensor]], classes: Tensor) -> Tensors:
        C, d = classifier.weight.shape
        parts = [(classifier.weight.new_zeros(0, d), classes[:0]), *batches]  # a client may hold none of the classes
        h, y = torch.cat([h for h, _ in parts]), torch.cat([y for _, y in parts])
        sent = {
            "left": torch.zeros(len(classes), C, self.rank, dtype=h.dtype),
            "right": torch.zeros(len(classes), self.rank, d, dtype=h.dtype),
            "bias": torch.zeros(len(classes), C, dtype=h.dtype),
        }
        for i, c in enumerate(classes):
            h_c, y_c = h[y == c], y[y == c]
            r = residual(classifier, h_c, y_c)
            sent["left"][i], sent["right"][i] = truncated(r.T.cpu() / len(r), h_c.cpu(), self.rank)
            sent["bias"][i] = r.mean(dim=0)
        return sent if classifier.bias is not None else {name: sent[name] for name in ("left", "right")}

    def mean(self, sent: Sequence[Tree], old: Tensors, weights: Sequence[Tensor] | None) -> tuple[Tensors, Tensor]:
        C, d = len(old["left"]), old["right"].shape[2]
        each, total = weights_of_holders(sent, C, weights)
        new = {"left": old["left"].clone(), "right": old["right"].clone()}
        for block in table_blocks(C, len(sent) * self.rank * (C + d)):
            A, B = defaultdict(list), defaultdict(list)  # the clients' parts of them, for each class of the block
            for factors, w in zip(sent, each, strict=True):
                rows, classes = rows_within(factors["classes"], block)
                lefts, rights = (unpack(factors[name], torch.float64, rows) for name in ("left", "right"))
                for i, c in enumerate(classes.tolist()):
                    A[c].append(w[rows[i]] / total[c] * lefts[i])
                    B[c].append(rights[i])
            for c in A:
                new["left"][c], new["right"][c] = truncated(torch.cat(A[c], dim=1), torch.cat(B[c]), self.rank)
        if "bias" in old:
            new |= mean_over_holders(sent, {"bias": old["bias"][0]}, weights, {"bias": old["bias"]})[0]
        return new, total > 0

    def sum(self, table: Tree, classes: Tensor, dtype: torch.dtype) -> Tensors:
        left, right = (unpack(table[name], dtype, classes) for name in ("left", "right"))
        # The classes' factors side by side: one product of [C, m r] and [m r, d].
        summed = {"weight": left.permute(1, 0, 2).flatten(1) @ right.flatten(0, 1)}
        if "bias" in table:
            summed["bias"] = _sum_over_classes(table["bias"], classes, dtype)
        return summed


def truncated(A: Tensor, B: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation of A B of this rank, as factors [C, r] and [r, d] in float64.

    The left one carries the singular values, largest first; the largest number of each left vector is positive. Where
    A B has a lower rank, the rest is zero. What is not finite gives NaN, so that it is noticed.
    """
    A, B = A.double(), B.double()
    (C, n), d = A.shape, B.shape[1]
    left, right = A.new_zeros(C, rank), A.new_zeros(rank, d)
    if not (torch.isfinite(A).all() and torch.isfinite(B).all()):
        return left.fill_(torch.nan), right.fill_(torch.nan)
    if n < min(C, d):
        (Q_A, R_A), (Q_B, R_B) = torch.linalg.qr(A), torch.linalg.qr(B.T)
        U, S, Vh = torch.linalg.svd(R_A @ R_B.T)
        U, Vh = Q_A @ U, Vh @ Q_B.T
    else:
        U, S, Vh = torch.linalg.svd(A @ B, full_matrices=False)
    rounding = S[0] * max(C, d) * torch.finfo(S.dtype).eps
    r = min(rank, int(S.gt(rounding).sum()))
    U, S, Vh = U[:, :r], S[:r], Vh[:r]
    sign = U.gather(0, U.abs().argmax(dim=0, keepdim=True)).sign()
    left[:, :r], right[:r] = U * (S * sign), Vh * sign.T
    return left, right


def _sum_over_classes(table: Tensor | Tensors, classes: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first axis, by rows of the second, so that the chosen classes are never copied all at once."""
    shape = (table if isinstance(table, Tensor) else table["half"]).shape
    total = torch.zeros(shape[1:], dtype=dtype)
    groups = max(1, shape[1] // _ROWS)  # the last one also has what is left over
    for block in table_blocks(groups, _ROWS * shape[0] * shape[2:].numel()):
        rows = slice(block.start * _ROWS, None if block.stop == groups else block.stop * _ROWS)
        total[rows] = unpack(table, dtype, classes, rows).sum(dim=0)
    return total
