"""What averaging methods send and how the server averages it.

An update of theirs holds `delta` (new minus old, trained parameters only), `buffers` (values such as BatchNorm's
running statistics), `count` (examples trained on) and `loss` (their mean training loss).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from redgrape import tree
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree

if TYPE_CHECKING:
    from redgrape.method import Site


def delta(net: Net, start: Tensors) -> Tensors:
    """theta_k - theta, for the parameters that were trained."""
    return {name: p.detach().cpu() - start[name] for name, p in net.named_parameters() if p.requires_grad}


def buffers(net: Net) -> Tensors:
    """Values that are not trained but follow the training, such as running statistics; none of a frozen encoder."""
    if not net.encoder.training or next(net.buffers(), None) is None:
        return {}
    parameters = {name for name, _ in net.named_parameters()}
    return {name: t.detach().cpu().clone() for name, t in net.state_dict().items() if name not in parameters}


def client_report(net: Net, start: Tensors, count: int, loss: Tensor) -> dict[str, Any]:
    """The update of an averaging method, to which it may add groups of its own."""
    return {
        "delta": delta(net, start),
        "buffers": buffers(net),
        "count": torch.tensor(count),
        "loss": loss.detach().cpu(),
    }


def mean_delta(updates: Sequence[Tree], weights: Sequence[float], group: str = "delta") -> Tensors:
    """The average of one group of the updates, in the order of the clients' ids."""
    return tree.weighted_mean([u[group] for u in updates], weights)


def mean_buffers(updates: Sequence[Tree], weights: Sequence[float]) -> Tensors:
    """Running statistics averaged like parameters; integers (BatchNorm's batch counter) by their maximum."""
    groups: list[Tensors] = [u.get("buffers", {}) for u in updates]
    integers = [name for name, t in groups[0].items() if not t.is_floating_point()]
    floats = [{name: t for name, t in g.items() if t.is_floating_point()} for g in groups]
    return tree.weighted_mean(floats, weights) | {
        name: torch.stack([g[name] for g in groups]).amax(dim=0) for name in integers
    }


def zeros_like_parameters(model: Tensors, site: Site) -> Tensors:
    """A zero for every parameter of the model, and none for its buffers."""
    return {name: torch.zeros_like(model[name]) for name, _ in site.load(model).named_parameters()}


def sample_weights(updates: Sequence[Tree]) -> list[float]:
    """n_k, the examples that each client trained on."""
    return [float(update["count"]) for update in updates]
