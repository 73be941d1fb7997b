"""Arithmetic on named tensors.

`Tensors` is one named group, such as a model's parameters. A `Tree` nests groups. Nothing else passes between server,
engine and client. Its leaves are tensors, never Python numbers, so that every engine computes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import safetensors.torch
import torch
from torch import Tensor, nn

Tensors: TypeAlias = dict[str, Tensor]
Tree: TypeAlias = Mapping[str, Any]  # str -> Tensor | Tree; check_leaves() enforces this


def add(a: Tensors, b: Tensors, scale: float = 1.0) -> Tensors:
    """a + scale * b, name by name. Names only in `a` are kept unchanged."""
    return {name: torch.add(t, b[name], alpha=scale) if name in b else t for name, t in a.items()}


def sub(a: Tensors, b: Tensors) -> Tensors:
    return {name: t - b[name] for name, t in a.items()}


def parameters(module: nn.Module) -> Tensors:
    """A module's parameters in main memory, detached from the graph."""
    return {name: p.detach().cpu() for name, p in module.named_parameters()}


def weighted_mean(groups: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """sum_k w_k g_k / sum_k w_k, summed in the order given, in float64, and rounded once."""
    total = math.fsum(weights)
    mean: Tensors = {}
    for name, first in groups[0].items():
        accumulator = torch.zeros(first.shape, dtype=torch.float64)
        for group, weight in zip(groups, weights, strict=True):
            accumulator.add_(group[name], alpha=weight / total)
        mean[name] = accumulator.to(first.dtype)
    return mean


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """The Frobenius norm of all tensors together."""
    total: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in tensors]))
    return total


def flatten(tree: Tree, prefix: str = "") -> Tensors:
    """Nested groups -> one group with `/`-joined names, in a fixed order."""
    flat: Tensors = {}
    for name in sorted(tree):
        value = tree[name]
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def unflatten(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, tensor in flat.items():
        *groups, name = path.split("/")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
            if not isinstance(node, dict):
                raise ValueError(f"'{path}' lies in '{group}', which is a tensor")
        node[name] = tensor
    return tree


def ordered(tree: Tree) -> dict[str, Any]:
    """The tree with its names in a fixed order and without empty groups, as every engine and a resumed run give it."""
    return unflatten(flatten(tree))


def owned(tree: Tree) -> dict[str, Any]:
    """The tree, `ordered`, in its own memory: an update may lie in memory that the next round overwrites."""
    # Only a tensor on a buffer, such as shared memory, has a storage that cannot be resized.
    return unflatten({n: t if t.untyped_storage().resizable() else t.clone() for n, t in flatten(tree).items()})


def equal(a: Tree, b: Tree) -> bool:
    """Whether both have the same names, dtypes, shapes and bits (NaN equals itself, 0.0 is not -0.0)."""
    return to_bytes(a) == to_bytes(b)


def num_bytes(tree: Tree) -> int:
    return sum(t.numel() * t.element_size() for t in flatten(tree).values())


def to_bytes(tree: Tree) -> bytes:
    """The tree in the safetensors format: no code, no type names."""
    return bytes(safetensors.torch.save({name: t.detach().cpu().contiguous() for name, t in flatten(tree).items()}))


def from_bytes(data: bytes) -> dict[str, Any]:
    # Cloned, because a kernel's last bits depend on its input's alignment, which is arbitrary inside a buffer.
    return unflatten({name: t.clone() for name, t in sorted(safetensors.torch.load(data).items())})


def check_leaves(tree: Tree, where: str) -> None:
    """Raise TypeError at the first leaf that is not a tensor, or name that cannot be joined by `/`."""
    if not isinstance(tree, Mapping):
        raise TypeError(f"{where} is a {type(tree).__name__}; it must be a dict of tensors")
    for name, value in tree.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise TypeError(f"{where}: {name!r} is not a name without '/'")
        if isinstance(value, Mapping):
            check_leaves(value, f"{where}/{name}")
        elif not isinstance(value, Tensor):
            raise TypeError(f"{where}/{name} is a {type(value).__name__}; leaves must be tensors")
