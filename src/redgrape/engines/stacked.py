"""Trains several small clients as one: every parameter of the net has the client as its first axis.

A small net spends its time on kernel launches, not in the kernels. Clients with equal numbers of examples make the same
local steps, so one step of a stack of nets is a step of each: `client_update` runs once, on tensors with one more axis,
and its results are split by client. A method marks its client half as `@stackable` if it holds for such tensors too: it
works element by element, or through the net, the loss of a batch and the optimizer. The order of summation differs from
that of a single client, so results agree to rounding, not bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from redgrape import tree
from redgrape.errors import ConfigError
from redgrape.learning.local_training import holds_for_stacks
from redgrape.method import ClientSite, Method
from redgrape.nets.cloning import new_net
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree


class StackedNet(Net):
    """Takes the batches of all clients, concatenated, and returns their logits in the same order."""

    def __init__(self, plain: Net, like: Net, size: int) -> None:
        """`plain` does the arithmetic of one client. `like`, another such net, provides this net's modules."""
        super().__init__(like.encoder, like.classifier)
        for module in self.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    stacked = p.detach().expand(size, *p.shape).clone()
                    module._parameters[name] = nn.Parameter(stacked, p.requires_grad)
        self._size = size
        self._layers = _layers(nn.Sequential(self.encoder, self.classifier))
        self._of_one = lambda parameters, x: functional_call(plain, parameters, (x,))

    def forward(self, x: Tensor) -> Tensor:
        of_each = x.unflatten(0, (self._size, -1))
        if self._layers is None:
            z: Tensor = vmap(self._of_one)(dict(self.named_parameters()), of_each)
        else:
            z = reduce(_apply, self._layers, of_each)
        z = z.flatten(0, 1)
        if z.requires_grad:
            # The loss is the mean over all clients' batches; each client's own loss is the mean over its batch.
            z.register_hook(lambda gradient: gradient * self._size)
        return z


# Layers that do the same to every number, whatever the axes.
_ELEMENTWISE = {nn.ELU, nn.GELU, nn.Identity, nn.LeakyReLU, nn.ReLU, nn.Sigmoid, nn.SiLU, nn.Tanh}


def _layers(module: nn.Module) -> list[nn.Module] | None:
    """The layers in order, if the module is a plain chain of layers that `_apply` knows; else None. This avoids vmap,
    which takes longer than the arithmetic of a small net."""
    if type(module) is nn.Sequential:
        chains = [_layers(part) for part in module]
        return None if None in chains else [layer for chain in chains for layer in chain or []]
    flattens_all = type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
    return [module] if type(module) in {nn.Linear, *_ELEMENTWISE} or flattens_all else None


def _apply(x: Tensor, layer: nn.Module) -> Tensor:
    """The outputs of all clients' layers for their batches."""
    if isinstance(layer, nn.Flatten):
        return x.flatten(2)
    if not isinstance(layer, nn.Linear):
        return cast(Tensor, layer(x))
    # x W^T + b as (W x^T)^T + b: the gradient of W then has the memory layout of W and needs no extra copy.
    z = (layer.weight @ x.mT).mT
    return z if layer.bias is None else z + layer.bias.unsqueeze(1)


@dataclass(frozen=True)
class StackedSite(ClientSite):
    """The site of several clients, the `members`. `client` is the first of them."""

    @classmethod
    def of(cls, members: Sequence[ClientSite]) -> StackedSite:
        first = members[0]
        fields = {name: getattr(first, name) for name in first.__dataclass_fields__}
        return cls(**{**fields, "data": _Length(sum(len(m.data) for m in members)), "members": members})

    def load(self, model: Tensors) -> Net:
        net = StackedNet(new_net(self.build, model), new_net(self.build, model), len(self.members))
        return net if self.device.type == "cpu" else net.to(self.device)


class _Length:
    """All that a stacking method may ask of the data itself."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


def check(method: Method, net: Net) -> None:
    """Raise ConfigError if clients cannot be stacked with this method and net."""
    if not holds_for_stacks(method):
        raise ConfigError(f"clients of the method '{type(method).__name__}' cannot be stacked; leave --stack out")
    if method.clip_norm is not None:
        raise ConfigError("clip_norm is the norm of one client's gradient; with it clients cannot be stacked")
    if len(list(net.named_parameters(remove_duplicate=False))) > len(list(net.parameters())):
        raise ConfigError("a net with one parameter under two names cannot be stacked; leave --stack out")
    if next(net.buffers(), None) is not None or any(
        isinstance(m, nn.modules.dropout._DropoutNd) for m in net.modules()
    ):
        raise ConfigError("a net with BatchNorm or dropout cannot be stacked; leave --stack out")


def run(
    method: Method, broadcast: Tree, states: Sequence[Tree], sites: Sequence[ClientSite]
) -> list[tuple[Tree, Tree]]:
    """Each client's update and new state. Clients of equal size with the same names in their states run together."""
    together: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for i, (state, site) in enumerate(zip(states, sites, strict=True)):
        together.setdefault((len(site.data), tuple(tree.flatten(state))), []).append(i)
    found: dict[int, tuple[Tree, Tree]] = {}
    for places in together.values():
        site = StackedSite.of([sites[i] for i in places])
        update, state = method.client_update(broadcast, _stack([states[i] for i in places]), site)
        names = set(broadcast["model"])
        parts = zip(_unstack(update, len(places), names), _unstack(state, len(places), names), strict=True)
        found.update(zip(places, parts, strict=True))
    return [found[i] for i in range(len(sites))]


def _stack(trees: Sequence[Tree]) -> Tree:
    """Stack trees with the same names into one. The first axis of its tensors is the tree."""
    flat = [tree.flatten(t) for t in trees]
    return tree.unflatten({name: torch.stack([f[name] for f in flat]) for name in flat[0]})


def _unstack(stacked: Tree, size: int, parameters: set[str]) -> list[dict[str, Any]]:
    """Split a stacked update or state by client. Each gets its slice of tensors shaped like the parameters, an equal
    share of the count, and the rest (the mean loss) unchanged."""
    flat = tree.flatten(stacked)
    parts: list[Tensors] = [{} for _ in range(size)]
    for name, t in flat.items():
        for b, part in enumerate(parts):
            if name.rpartition("/")[2] in parameters:
                part[name] = t[b]
            else:
                part[name] = t // size if name == "count" else t
    return [tree.unflatten(part) for part in parts]
