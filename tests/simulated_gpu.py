"""A GPU that is not there. Its tensors say `cuda:0` and hold their numbers on the CPU.

Each operation is first judged by the rule of torch's fake tensors: a GPU refuses a tensor that was left on the CPU.
Then it runs on the numbers, so that what depends on them works, and results can be compared with those of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

GPU = torch.device("cuda:0")
CPU = torch.device("cpu")
META = torch.device("meta")  # what autograd takes the GPU for: a build for CPUs has no gradients on CUDA
aten: Any = torch.ops.aten

# A GPU takes these from anywhere: copies, and indices on the CPU.
MIXED = {aten._to_copy.default, aten.copy_.default, aten.index.Tensor, aten.index_put_.default, aten.index_put.default}


class OnGpu(Tensor):
    """A tensor of the simulated GPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnGpu:
        options = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        new: OnGpu = Tensor._make_wrapper_subclass(cls, held.shape, device=META, **options)
        new.held = held
        return new

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnGpu({self.held})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("a tensor of the GPU has no numpy(); call .cpu() first")

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(operation, args, kwargs or {})


class Simulation(TorchDispatchMode):
    """Sees every operation, also those that make a tensor."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(operation, args, kwargs or {})


def dispatched(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_flatten((args, kwargs))[0]
    if not any(isinstance(leaf, OnGpu) or (isinstance(leaf, torch.device) and leaf != CPU) for leaf in leaves):
        return operation(*args, **kwargs)
    place = device_of(operation, leaves, kwargs.get("device"))
    if place == GPU and kwargs.get("generator") is not None:
        raise RuntimeError(f"{operation}: a generator of the CPU cannot draw on the GPU")
    held_args, held_kwargs = tree_map(_held, (args, kwargs))
    found = operation(*held_args, **held_kwargs)
    if place == CPU:
        return args[0] if operation is aten.copy_.default else found
    wrapped = tree_map(lambda t: OnGpu(t) if isinstance(t, Tensor) else t, found)
    return return_and_correct_aliasing(operation, args, kwargs, wrapped)


def device_of(operation: Any, leaves: list[Any], asked: torch.device | None) -> torch.device:
    """Where the result lies, or the error that a GPU would raise."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if asked is not None:
        return GPU if asked in (GPU, META) else CPU
    if operation in MIXED:
        return tensors[0].device
    return FakeTensor._find_common_device(operation, [fake(t.device, t.dim() == 0) for t in tensors])[0]


@cache
def fake(device: torch.device, is_scalar: bool) -> Tensor:
    """Torch's rule asks for no more than these two."""
    with FakeTensorMode():
        return torch.empty(() if is_scalar else (1,), device=device)


def _held(value: Any) -> Any:
    if isinstance(value, OnGpu):
        return value.held
    return CPU if isinstance(value, torch.device) else value


@contextmanager
def simulated_gpu() -> Iterator[torch.device]:
    """A context with one GPU of 1 GB."""
    memory = mock.patch("torch.cuda.mem_get_info", return_value=(1 << 30, 1 << 30))
    with mock.patch("torch.cuda._lazy_init"), memory, Simulation():
        yield GPU
