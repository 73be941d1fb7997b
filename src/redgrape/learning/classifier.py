"""The linear classifier W of a net: its initial weights, and the gradients of its cross-entropy in closed form.

For p = softmax(W h + b) the loss of an example (h, y) has the gradient (p - e_y) h^T for W and p - e_y for b. So one
forward pass gives the gradients for any grouping of examples, without a graph.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor, nn

from redgrape.exchange.parts import ClassRows
from redgrape.exchange.tables import blocks
from redgrape.learning.features import features, never_negative
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree

if TYPE_CHECKING:
    from redgrape.method import ClientSite, Site

_BATCH = 256
_BLOCK = 1 << 22  # numbers of the outer products held at once
_ROWS = 64  # sums over classes are split at multiples of this, which keeps the bits of the whole sum


@torch.no_grad()
def residual(classifier: nn.Linear, h: Tensor, y: Tensor, shift: Tensor | float = 0.0) -> Tensor:
    """p - e_y for each example: [n, C]. p is the softmax of the logits plus `shift`, a number for each class."""
    r = torch.softmax(classifier(h) + shift, dim=1)
    r[torch.arange(len(y), device=y.device), y] -= 1
    return r


@torch.no_grad()
def summed_gradient(classifier: nn.Linear, h: Tensor, y: Tensor, shift: Tensor | float = 0.0) -> Tensors:
    """sum_i (p_i - e_{y_i}) h_i^T and sum_i (p_i - e_{y_i}), by the names of the classifier's parameters."""
    r = residual(classifier, h, y, shift)
    gradient = {"weight": r.T @ h}
    if classifier.bias is not None:
        gradient["bias"] = r.sum(dim=0)
    return gradient


@torch.no_grad()
def weighted_gradient(
    classifier: nn.Linear,
    batches: Iterable[tuple[Tensor, Tensor]],
    class_weights: Tensor,
    shift: Tensor | float = 0.0,
) -> Tensors:
    """sum_i w_{y_i} (p_i - e_{y_i}) h_i^T and the same for the bias, over batches of features and labels."""
    total = {name: torch.zeros_like(p) for name, p in classifier.named_parameters()}
    for h, y in batches:
        r = residual(classifier, h, y, shift) * class_weights[y][:, None]
        total["weight"] += r.T @ h
        if "bias" in total:
            total["bias"] += r.sum(dim=0)
    return total


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


@torch.no_grad()
def local_class_gradients(
    net: Net, site: ClientSite, view: torch.Generator | None = None, *, counted: bool = False
) -> Tensors:
    """The mean gradient of each class that the client reports, at this net's classifier: `classes` [m], m gradients for
    each of the classifier's tensors and, if `counted`, `counts` [m], the examples behind each. One forward pass in
    evaluation mode; inputs are augmented if a generator is given."""
    classes = site.reported.nonzero().flatten()
    rows = site.reported[site.data.labels].nonzero().flatten()
    gradients = class_mean_gradients(net.classifier, encoded(net, site, rows, view), classes.to(site.device))
    found = {"classes": classes, **{name: g.cpu() for name, g in gradients.items()}}
    return found | ({"counts": site.class_counts[classes]} if counted else {})


def encoded(
    net: Net, site: ClientSite, rows: Tensor, view: torch.Generator | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features in evaluation mode and labels of these rows, batch by batch; augmented if a generator is given."""
    for batch in rows.split(_BATCH):
        x = site.inputs(batch, net.classifier.weight.dtype, view)
        yield features(net.encoder, x, "running"), site.data.labels[batch].to(site.device)


def gradient_rows(
    model: Tensors, site: Site, weights: Literal["uniform", "count"] = "uniform", drawn: int | None = None
) -> ClassRows:
    """The part of an update with the classifier's class gradients; `drawn`: of this many examples of a class."""
    signed = never_negative(site.load(model).encoder)
    return ClassRows(of(model), weights, gradient=True, signed=signed, drawn=drawn)


def of(model: Tensors) -> Tensors:
    """The tensors of W in the model, named `weight` and `bias`."""
    return {name.removeprefix("classifier."): t for name, t in model.items() if name.startswith("classifier.")}


def with_W(model: Tensors, W: Tensors) -> Tensors:
    """The model with this classifier."""
    return {**model, **{f"classifier.{name}": t for name, t in W.items()}}


def beneath_head(server: Tree) -> Tree:
    """The server state with the classifier that training continues with, if the deployed model has another head."""
    return {**server, "model": with_W(server["model"], server["beneath"])}


def fresh_classifier(like: Tensors, random: torch.Generator) -> Tensors:
    """A linear classifier initialised like nn.Linear: weight and bias uniform within 1 / sqrt(d)."""
    bound = 1 / math.sqrt(like["weight"].shape[1])
    drawn = (name for name in ("weight", "bias") if name in like)  # always in this order
    return {name: torch.empty_like(like[name]).uniform_(-bound, bound, generator=random) for name in drawn}


def equiangular(C: int, d: int, random: torch.Generator) -> Tensor:
    """A simplex equiangular tight frame: C unit vectors in R^d, the columns. Any two have the cosine
    -1 / (C - 1). It needs d >= C."""
    Q = torch.linalg.qr(torch.empty(d, C, dtype=torch.float64).normal_(generator=random))[0]
    E: Tensor = math.sqrt(C / (C - 1)) * (Q - Q.mean(dim=1, keepdim=True))
    return E.contiguous()  # LAPACK stores columns


Start: TypeAlias = Literal["default", "zeros", "copy"]


def first(like: Tensors, start: Start, random: torch.Generator) -> Tensors:
    """The initial second classifier: an independent nn.Linear, zeros, or a copy of the first."""
    match start:
        case "zeros":
            return {name: torch.zeros_like(t) for name, t in like.items()}
        case "copy":
            return {name: t.clone() for name, t in like.items()}
        case "default":
            return fresh_classifier(like, random)


def linear_like(classifier: nn.Linear, values: Tensors | None) -> nn.Linear:
    """A second classifier of the same shape with these values; it is not trained if there are none."""
    twin = copy.deepcopy(classifier)  # skip_init would import sympy, which takes longer than many rounds
    if values is None:
        return twin.requires_grad_(False)
    twin.load_state_dict(values)
    return twin


def empty_table(like: Tensors, C: int) -> Tensors:
    """A table without gradients: a zero row for every class."""
    return {name: t.new_zeros(C, *t.shape) for name, t in like.items()}


def table_sum(table: Tensors, classes: Tensor, dtype: torch.dtype) -> Tensors:
    """The sum of a table over the classes of this mask: weight [C, d] and bias [C]. It works in blocks of the second
    axis, so the chosen classes are never copied all at once."""
    sums: Tensors = {}
    for name, t in table.items():
        total = torch.zeros(t.shape[1:], dtype=dtype)
        groups = max(1, t.shape[1] // _ROWS)  # the last one also takes the remainder
        for block in blocks(groups, _ROWS * len(t) * t.shape[2:].numel()):
            rows = slice(block.start * _ROWS, None if block.stop == groups else block.stop * _ROWS)
            total[rows] = t[:, rows][classes].to(dtype).sum(dim=0)
        sums[name] = total
    return sums
