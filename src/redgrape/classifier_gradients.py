"""Gradients of the cross-entropy with respect to a linear classifier, in closed form.

For p = softmax(W h + b) the loss of an example (h, y) has the gradient (p - e_y) h^T for W and p - e_y for b. So one
forward pass gives the gradients of any grouping of examples, without a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from redgrape.tree import Tensors, Tree

_BLOCK = 1 << 22  # numbers of the outer products that are held at once
_TABLE_BLOCK = 1 << 25  # numbers of a table that are averaged or summed at once
_ROWS = 64  # sums over classes are cut at multiples of it, which leaves their bits as those of the uncut sum


@torch.no_grad()
def residual(classifier: nn.Linear, h: Tensor, y: Tensor) -> Tensor:
    """p - e_y for each example: [n, C]."""
    r = torch.softmax(classifier(h), dim=1)
    r[torch.arange(len(y), device=y.device), y] -= 1
    return r


@torch.no_grad()
def summed_gradient(classifier: nn.Linear, h: Tensor, y: Tensor) -> Tensors:
    """sum_i (p_i - e_{y_i}) h_i^T and sum_i (p_i - e_{y_i}), by the names of the classifier's parameters."""
    r = residual(classifier, h, y)
    gradient = {"weight": r.T @ h}
    if classifier.bias is not None:
        gradient["bias"] = r.sum(dim=0)
    return gradient


@torch.no_grad()
def class_mean_gradients(classifier: nn.Linear, batches: Iterable[tuple[Tensor, Tensor]], classes: Tensor) -> Tensors:
    """The mean gradient of each class on its own examples: weight [m, C, d] and bias [m, C] for the m `classes`.

    `batches` yields features and labels; every label must be one of `classes`.
    """
    weight, device = classifier.weight, classifier.weight.device
    C, d = weight.shape
    slot = torch.full((C,), -1, dtype=torch.int64, device=device)
    slot[classes] = torch.arange(len(classes), device=device)
    count = torch.zeros(len(classes), dtype=weight.dtype, device=device)
    weights = torch.zeros(len(classes), C, d, dtype=weight.dtype, device=device)
    biases = torch.zeros(len(classes), C, dtype=weight.dtype, device=device)
    block = max(1, _BLOCK // (C * d))
    for h, y in batches:
        r, s = residual(classifier, h, y), slot[y]
        biases.index_add_(0, s, r)
        count.index_add_(0, s, torch.ones_like(s, dtype=weight.dtype))
        for start in range(0, len(y), block):
            rows = slice(start, start + block)
            weights.index_add_(0, s[rows], r[rows, :, None] * h[rows, None, :])
    gradients = {"weight": weights.div_(count[:, None, None])}
    if classifier.bias is not None:
        gradients["bias"] = biases.div_(count[:, None])
    return gradients


def mean_over_holders(
    sent: Iterable[Tree], classifier: Tensors, weights: Sequence[Tensor] | None = None, old: Tensors | None = None
) -> tuple[Tensors, Tensor]:
    """The mean of the clients' class gradients over those that hold a class, and which classes somebody holds.

    Each client sent `classes` [m] with weight [m, C, d] and bias [m, C]; the mean is over all C classes.
    Where nobody holds one it is that of `old`, or zero. `weights`: for each client a number for each of its classes
    (None: all clients count alike). Means are made in float64, of some classes at a time.
    """
    sent, C = list(sent), len(next(iter(classifier.values())))  # weight and bias have a row for each class
    each, total = weights_of_holders(sent, C, weights)
    held = total > 0
    means: Tensors = {}
    for name, like in classifier.items():
        mean = like.new_zeros(C, *like.shape) if old is None else old[name].clone()
        for block in table_blocks(C, like.numel()):
            sums = torch.zeros(block.stop - block.start, *like.shape, dtype=torch.float64)
            for gradients, w in zip(sent, each, strict=True):
                rows, classes = rows_within(gradients["classes"], block)
                mine = gradients[name][rows].double().mul_(per_class(w[rows], sums))
                sums.index_add_(0, classes - block.start, mine)
            sums /= per_class(total[block].clamp(min=1), sums)
            mean[block] = torch.where(per_class(held[block], sums), sums.to(mean.dtype), mean[block])
        means[name] = mean
    return means, held


def table_sum(table: Tensors, classes: Tensor, dtype: torch.dtype) -> Tensors:
    """The sum of a table over the classes of this mask: weight [C, d] and bias [C]. By blocks of the second axis,
    so that the chosen classes are never copied all at once."""
    sums: Tensors = {}
    for name, t in table.items():
        total = torch.zeros(t.shape[1:], dtype=dtype)
        groups = max(1, t.shape[1] // _ROWS)  # the last one also has what is left over
        for block in table_blocks(groups, _ROWS * len(t) * t.shape[2:].numel()):
            rows = slice(block.start * _ROWS, None if block.stop == groups else block.stop * _ROWS)
            total[rows] = t[:, rows][classes].to(dtype).sum(dim=0)
        sums[name] = total
    return sums


def weights_of_holders(sent: Sequence[Tree], C: int, weights: Sequence[Tensor] | None) -> tuple[list[Tensor], Tensor]:
    """What each client counts for each of its classes, and the sum over the clients for every class [C]."""
    each = [torch.ones(len(s["classes"]), dtype=torch.float64) for s in sent]
    if weights is not None:
        each = [w.double() for w in weights]
    total = torch.zeros(C, dtype=torch.float64)
    for gradients, w in zip(sent, each, strict=True):
        total.index_add_(0, gradients["classes"], w)
    return each, total


def table_blocks(count: int, size: int) -> Iterator[slice]:
    """`count` things of `size` numbers each, in slices of bounded size, though of at least one thing."""
    step = max(1, _TABLE_BLOCK // size)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def rows_within(classes: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """The rows at which a client's classes lie in this block, and these classes."""
    rows = ((classes >= block.start) & (classes < block.stop)).nonzero().flatten()
    return rows, classes[rows]


def per_class(values: Tensor, table: Tensor) -> Tensor:
    """One value a class, shaped to go with a table whose first axis is the class."""
    return values.reshape(-1, *[1] * (table.dim() - 1))
