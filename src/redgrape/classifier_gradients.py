"""Gradients of the cross-entropy with respect to a linear classifier, in closed form.

For p = softmax(W h + b) the loss of an example (h, y) has the gradient (p - e_y) h^T for W and p - e_y for b. So one
forward pass gives the gradients of any grouping of examples, without a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from redgrape.tree import Tensors

_BLOCK = 1 << 22  # numbers of the outer products that are held at once


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
    gradients = {"weight": weights / count[:, None, None]}
    if classifier.bias is not None:
        gradients["bias"] = biases / count[:, None]
    return gradients


def mean_over_holders(
    sent: Iterable[Tensors], classifier: Tensors, weights: Sequence[Tensor] | None = None
) -> tuple[Tensors, Tensor]:
    """The mean of the clients' class gradients over those that hold a class, and which classes somebody holds.

    Each client sent `classes` [m] with weight [m, C, d] and bias [m, C]; the mean is over all C classes, zero where
    nobody holds one. `weights`: for each client a number for each of its classes (None: all clients count alike).
    """
    C = len(classifier["weight"])
    total = {name: torch.zeros(C, *t.shape, dtype=torch.float64) for name, t in classifier.items()}
    weight = torch.zeros(C, dtype=torch.float64)
    for k, gradients in enumerate(sent):
        classes = gradients["classes"]
        w = torch.ones(len(classes), dtype=torch.float64) if weights is None else weights[k].double()
        weight.index_add_(0, classes, w)
        for name, t in total.items():
            t.index_add_(0, classes, per_class(w, t) * gradients[name].double())
    means = {name: (t / per_class(weight.clamp(min=1), t)).to(classifier[name].dtype) for name, t in total.items()}
    return means, weight > 0


def per_class(values: Tensor, table: Tensor) -> Tensor:
    """One value a class, shaped to go with a table whose first axis is the class."""
    return values.reshape(-1, *[1] * (table.dim() - 1))
