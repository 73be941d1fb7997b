"""Copies of a net that was built before, with other weights.

Building a net draws initial weights, which training replaces at once. For a small net that takes longer than a local
step. Copying a net that is never trained takes a fraction of that time.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from redgrape import determinism
from redgrape.nets.net import Net
from redgrape.tree import Tensors

_SIMPLE = (int, float, str, type(None), type, FunctionType)
_CONTAINERS = (dict, list, set, OrderedDict)  # most are empty: a new one is faster than a deep copy


def new_net(build: Callable[[], Net], weights: Tensors) -> Net:
    """A net from `build` with these weights, in training mode. Its memory format is channels last, with which
    convolutions are fastest. No random numbers are drawn."""
    template = _template(build)
    if template is None or not template.takes(weights):
        with determinism.global_stream(None):
            net = build()
        net.load_state_dict(weights)
        if any(p.dim() == 4 for p in net.parameters()):
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs
        return net.train()
    return template.copy(weights)


class _Piece(NamedTuple):
    """One module, taken apart."""

    module: nn.Module
    plain: dict[str, Any]  # attributes that copies may share
    others: list[str]  # attributes to copy deeply
    tensors: list[tuple[str, str, int]]  # in `_parameters` or `_buffers`, under this name, the i-th tensor
    children: list[tuple[str, int]]  # under this name, the i-th module


class _Template:
    def __init__(self, net: Net) -> None:
        net.train()
        modules = list(net.modules())
        place = {id(module): i for i, module in enumerate(modules)}
        self.tensors = list({id(t): t for m in modules for t in _own_tensors(m)}.values())
        slot = {id(t): i for i, t in enumerate(self.tensors)}
        self.names = {name: slot[id(t)] for name, t in net.state_dict(keep_vars=True).items()}
        self.pieces = [
            _Piece(
                m,
                {k: v for k, v in vars(m).items() if _is_simple(v)},
                [k for k, v in vars(m).items() if k not in _REGISTERS and not _is_simple(v)],
                [(kind, k, slot[id(t)]) for kind in _TENSORS for k, t in vars(m)[kind].items() if t is not None],
                [(k, place[id(child)]) for k, child in m._modules.items() if child is not None],
            )
            for m in modules
        ]

    def takes(self, weights: Tensors) -> bool:
        """Whether the weights fit as they are. If not, torch reports what does not fit."""
        return weights.keys() == self.names.keys() and all(
            t.shape == weights[name].shape and t.dtype == weights[name].dtype
            for name, t in ((name, self.tensors[i]) for name, i in self.names.items())
        )

    def copy(self, weights: Tensors) -> Net:
        given = {i: weights[name] for name, i in self.names.items()}
        tensors = [_like(t, given.get(i, t)) for i, t in enumerate(self.tensors)]
        modules = [piece.module.__new__(type(piece.module)) for piece in self.pieces]
        memo: dict[int, Any] | None = None
        for module, piece in zip(modules, self.pieces, strict=True):
            vars(module).update(piece.plain)
            for name in _REGISTERS:
                vars(module)[name] = dict.fromkeys(vars(piece.module)[name])
            for kind, name, i in piece.tensors:
                vars(module)[kind][name] = tensors[i]
            for name, i in piece.children:
                vars(module)["_modules"][name] = modules[i]
            for name in piece.others:
                if memo is None:  # references to a module or tensor become references to its copy
                    memo = {id(piece.module): m for piece, m in zip(self.pieces, modules, strict=True)}
                    memo |= {id(old): new for old, new in zip(self.tensors, tensors, strict=True)}
                value = vars(piece.module)[name]
                empty = type(value) in _CONTAINERS and not value
                vars(module)[name] = type(value)() if empty else copy.deepcopy(value, memo)
        return cast(Net, modules[0])


_TENSORS = ("_parameters", "_buffers")
_REGISTERS = (*_TENSORS, "_modules")
_templates: WeakKeyDictionary[Callable[[], Net], _Template | None] = WeakKeyDictionary()


def _template(build: Callable[[], Net]) -> _Template | None:
    """A template from the first net of this `build`; None if loading weights is more than replacing tensors."""
    if not isinstance(build, FunctionType | partial):
        return None
    if build not in _templates:
        with determinism.global_stream(None):
            net = build()
        _templates[build] = _Template(net) if _is_plain(net) else None
    return _templates[build]


def _is_plain(net: Net) -> bool:
    return all(
        type(m).get_extra_state is nn.Module.get_extra_state
        and (type(m)._load_from_state_dict is nn.Module._load_from_state_dict or type(m).__module__.startswith("torch"))
        and not any(getattr(m, hooks) for hooks in vars(m) if hooks.endswith("_hooks"))
        and "parametrizations" not in m._modules
        and all(type(t) is nn.Parameter for t in m._parameters.values() if t is not None)
        for m in net.modules()
    )


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [t for kind in _TENSORS for t in vars(module)[kind].values() if t is not None]


def _is_simple(value: Any) -> bool:
    return isinstance(value, _SIMPLE) or (isinstance(value, tuple) and all(map(_is_simple, value)))


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    fresh = value.detach().clone(memory_format=torch.channels_last if value.dim() == 4 else torch.preserve_format)
    return nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
