"""What clients compute on: the CPU, or GPUs, one worker on each or several. docs/gpu.md says what has been tested."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import torch
from torch import Tensor

from redgrape.data.examples import Examples
from redgrape.data.federation import ClientData
from redgrape.errors import ConfigError

CPU = torch.device("cpu")
IN_BFLOAT16 = ", bfloat16"  # behind the kind of device in the record of a run


def gpus() -> list[torch.device]:
    """The GPUs that PyTorch sees."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def chosen(name: str) -> list[torch.device]:
    """auto: all GPUs, or the CPU if there is none; cuda: all GPUs; cuda:1: the second; cpu."""
    known = re.fullmatch(r"auto|cpu|cuda(?::(\d{1,4}))?", name)
    if known is None:
        raise ConfigError(
            f"device '{name}' cannot be used here: choose auto, cpu, cuda (all GPUs) or cuda:0 (the first)"
        )
    if name == "cpu":
        return [CPU]
    found = gpus()
    if name == "auto" and not found:
        return [CPU]
    if not found:
        raise ConfigError(f"device '{name}' cannot be used here: PyTorch {torch.__version__} sees no GPU; try 'cpu'")
    if known[1] is not None and int(known[1]) >= len(found):
        raise ConfigError(f"device '{name}' cannot be used here: the last GPU is 'cuda:{len(found) - 1}'")
    # cuBLAS gives the same bits every time only with this setting, which it reads when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return found if known[1] is None else [found[int(known[1])]]


def recorded(name: str, precision: str) -> str:
    """What decides bits, for the record of a run: not which GPU it is, but of what kind."""
    device = chosen(name)[0]
    kind = "cpu" if device == CPU else f"cuda: {torch.cuda.get_device_name(device)}"
    return kind if precision == "float32" else kind + IN_BFLOAT16


class NearData:
    """A federation whose inputs lie on a GPU, copied there once, as far as half of its free memory goes. What does not
    fit is copied batch by batch. Labels stay on the CPU, where rows are drawn."""

    def __init__(self, federation: ClientData, device: torch.device, sharing: int = 1) -> None:
        self._federation, self._device = federation, device
        self._room = torch.cuda.mem_get_info(device)[0] // (2 * sharing)
        self._arrays: dict[int, Tensor] = {}  # by place in memory: clients are views of one array

    def _near(self, examples: Examples) -> Examples:
        place = examples.x.data_ptr()
        if place not in self._arrays:
            fits = examples.x.nbytes <= self._room
            self._room -= examples.x.nbytes if fits else 0
            self._arrays[place] = examples.x.to(self._device) if fits else examples.x
        return replace(examples, x=self._arrays[place])

    @property
    def num_clients(self) -> int:
        return self._federation.num_clients

    @property
    def num_classes(self) -> int:
        return self._federation.num_classes

    @property
    def test(self) -> Examples:
        return self._near(self._federation.test)

    @property
    def validation(self) -> Examples | None:
        validation = self._federation.validation
        return None if validation is None else self._near(validation)

    def client(self, k: int) -> Examples:
        return self._near(self._federation.client(k))

    def size(self, k: int) -> int:
        return self._federation.size(k)


def near(federation: ClientData, device: torch.device, sharing: int = 1) -> ClientData:
    """The federation with its data where it is used."""
    return federation if device == CPU else NearData(federation, device, sharing)
