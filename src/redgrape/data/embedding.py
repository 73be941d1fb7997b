"""Embeddings: the features of a frozen encoder, computed once for each example and mapped from a cache file."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from redgrape.data import array_cache
from redgrape.data.examples import Examples, Pixels, place
from redgrape.data.sources import data_root
from redgrape.determinism import keep_freed_memory, same_bits_everywhere
from redgrape.errors import StorageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

BATCH = 32
Progress: TypeAlias = Callable[[int, int], None]  # (examples done, all examples)


class Embedder:
    """Replaces the inputs of examples by their features.

    encoder: from network inputs to features, in evaluation mode. identity: a text that tells it from all others.
    Both the long-tailed subsets and the held-out test sets of all seeds are rows of one array, which is embedded whole.
    """

    def __init__(
        self, encoder: nn.Module, features: int, identity: str, root: Path | None, progress: Progress | None = None
    ) -> None:
        self.features = features
        self._encoder = encoder.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in stubs
        self._identity, self._folder, self._progress = identity, data_root(root) / "embedded", progress
        self._known: list[tuple[Tensor, Any]] = []

    def __call__(self, examples: Examples) -> Examples:
        embedded: Any = next((known for x, known in self._known if x is examples.x), None)
        if embedded is None:
            embedded = self._embedded(examples)
            self._known.append((examples.x, embedded))
        return Examples(embedded, examples.y, rows=examples.rows)

    def _embedded(self, examples: Examples) -> NDArray[np.float32]:
        n = len(examples.x)
        path = self._folder / f"{self._key(examples.x, examples.pixels)}.npy"
        try:
            return array_cache.mapped(path, n, 2, (np.float32,))
        except (OSError, ValueError, EOFError):  # missing or damaged
            try:
                array_cache.write(path, (n, self.features), np.float32, self._blocks(examples))
                return array_cache.mapped(path, n, 2, (np.float32,))
            except OSError as error:
                raise StorageError(f"cannot write {error.filename or path}: {error.strerror or error}") from error

    def _key(self, x: Tensor, pixels: Pixels) -> str:
        """Everything that the bits of the features depend on."""
        where = f"{torch.__version__} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        key = hashlib.sha256(f"1 {self._identity} {pixels} {tuple(x.shape)} {x.dtype} {where}\n".encode())
        for start in range(0, len(x), 4096):  # in blocks: x may be larger than memory
            key.update(x[start : start + 4096].contiguous().numpy().tobytes())
        return key.hexdigest()[:32]

    def _blocks(self, examples: Examples) -> Iterator[NDArray[np.float32]]:
        everything = replace(examples, rows=None)
        n = len(everything)
        keep_freed_memory()
        with torch.inference_mode(), same_bits_everywhere():
            for start in range(0, n, BATCH):
                rows = torch.arange(start, min(start + BATCH, n))
                inputs = place(everything.inputs(rows, torch.float32), torch.device("cpu"))
                yield self._encoder(inputs).numpy()
                if self._progress is not None:
                    self._progress(int(rows[-1]) + 1, n)
