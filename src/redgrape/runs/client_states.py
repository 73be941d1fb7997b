"""Client states of a run, stored on disk, so memory does not grow with the number of clients.

    clients/NNNNNN.states    concatenated states, each in the safetensors format

A file holds the states that arrived between two checkpoints. It never changes after the second one. An index gives the
position of each client's newest state; the checkpoint stores it. If less than half of a file is in use, the states in
use are copied to the newest file. The folder thus holds at most about twice the size of the states. Files that no
checkpoint needs are removed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray

from redgrape import tree
from redgrape.errors import StorageError
from redgrape.method import ClientId
from redgrape.rounds import ClientStates
from redgrape.runs import durable
from redgrape.tree import Tensors, Tree

MOST_CLIENTS = 10**8  # an index with more clients is damaged
_ENTRY = np.dtype([("file", "<i8"), ("offset", "<i8"), ("bytes", "<i8"), ("sha256", "V32")])
_Index = NDArray[Any]  # of _ENTRY, one per client; file 0: no state yet


class StateFolder:
    """The state files. At most one of them is open for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.current: int | None = None

    def file(self, number: int) -> Path:
        return self.path / f"{number:06d}.states"

    def numbers(self) -> list[int]:
        return sorted(int(p.stem) for p in self.path.glob("*.states") if p.stem.isdecimal())

    def size(self, number: int) -> int:
        with durable.storage_errors("read", self.file(number)):
            return self.file(number).stat().st_size

    def append(self, states: Iterable[tuple[ClientId, bytes]]) -> Iterator[tuple[ClientId, bytes, int, int]]:
        """Append the clients' states, and yield each with its file number and offset."""
        with durable.storage_errors("write", self.path):
            if self.current is None:
                if not self.path.exists():
                    self.path.mkdir()
                    durable.sync_folder(self.path.parent)
                self.current = max(self.numbers(), default=0) + 1
            with self.file(self.current).open("ab") as file:
                for client, data in states:
                    durable.fault_point("write")
                    offset = file.tell()
                    file.write(data)
                    yield client, data, self.current, offset

    def read(self, number: int, offset: int, size: int) -> bytes:
        if min(offset, size) < 0 or offset + size > self.size(number):
            raise StorageError(f"'{self.file(number)}' is damaged: it does not have {size} bytes at offset {offset}")
        with durable.storage_errors("read", self.file(number)), self.file(number).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def commit(self) -> None:
        """Flush everything written since the last commit to disk. Later states go to a new file."""
        if self.current is not None:
            with durable.storage_errors("write", self.path):
                with self.file(self.current).open("rb") as file:
                    durable.fault_point("fsync")
                    os.fsync(file.fileno())
                durable.sync_folder(self.path)
            self.current = None

    def keep_only(self, used: set[int]) -> None:
        for number in self.numbers():
            if number not in used:
                durable.remove(self.file(number))


class StateFiles(ClientStates):
    """The client states after a round."""

    def __init__(self, folder: StateFolder, num_clients: int, index: _Index | None = None) -> None:
        self._folder = folder
        self._index: _Index = np.zeros(num_clients, _ENTRY) if index is None else index

    def updated(self, new: Mapping[ClientId, Tree]) -> StateFiles:
        index = self._index.copy()
        self._put(index, ((k, tree.to_bytes(new[k])) for k in sorted(new)))
        live = np.bincount(index["file"], weights=index["bytes"])
        for number in self._folder.numbers():
            in_use = live[number] if number < len(live) else 0
            if number != self._folder.current and 0 < 2 * in_use < self._folder.size(number):
                moving = np.flatnonzero(index["file"] == number).tolist()
                self._put(index, ((k, self._data(index[k])) for k in moving))
        return StateFiles(self._folder, len(index), index)

    def emptied(self) -> StateFiles:
        return StateFiles(self._folder, len(self._index))

    def _put(self, index: _Index, states: Iterable[tuple[ClientId, bytes]]) -> None:
        for k, data, number, offset in self._folder.append(states):
            index[k] = (number, offset, len(data), hashlib.sha256(data).digest())

    def _data(self, entry: Any) -> bytes:
        return self._folder.read(int(entry["file"]), int(entry["offset"]), int(entry["bytes"]))

    def __getitem__(self, client: ClientId) -> Tree:
        if not 0 <= client < len(self._index) or not self._index[client]["file"]:
            raise KeyError(client)
        return tree.from_bytes(self._data(self._index[client]))

    def __iter__(self) -> Iterator[ClientId]:
        return iter(np.flatnonzero(self._index["file"]).tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self._index["file"]))

    def to_index(self) -> Tensors:
        """The positions of the states, to be stored in a checkpoint."""
        clients = np.flatnonzero(self._index["file"])
        held = self._index[clients]
        digests = np.frombuffer(held["sha256"].tobytes(), np.uint8).reshape(-1, 32)
        return {
            "num_clients": torch.tensor(len(self._index)),
            "client": torch.from_numpy(clients),
            "sha256": torch.from_numpy(digests.copy()),
            **{name: torch.from_numpy(held[name].copy()) for name in ("file", "offset", "bytes")},
        }

    @classmethod
    def from_index(cls, folder: StateFolder, stored: Mapping[str, Any]) -> StateFiles:
        """The states of a checkpoint. Each one is verified."""
        try:
            clients = stored["client"].numpy()
            if not len(clients) <= int(stored["num_clients"]) <= MOST_CLIENTS:
                raise ValueError(f"it has {int(stored['num_clients'])} clients")
            index = np.zeros(int(stored["num_clients"]), _ENTRY)
            for name in ("file", "offset", "bytes"):
                if stored[name].dtype != torch.int64:
                    raise ValueError(f"'{name}' is {stored[name].dtype}")
                index[name][clients] = stored[name].numpy()
            index["sha256"][clients] = np.frombuffer(stored["sha256"].numpy().tobytes(), "V32")
        except (KeyError, ValueError, IndexError, AttributeError, TypeError, RuntimeError) as error:
            raise StorageError(f"the index of client states in '{folder.path}' is damaged: {error}") from error
        states = cls(folder, len(index), index)
        for k in np.argsort(index, order=("file", "offset"), kind="stable").tolist():  # in the order on disk
            entry = index[k]
            if entry["file"] and hashlib.sha256(states._data(entry)).digest() != entry["sha256"].tobytes():
                raise StorageError(
                    f"'{folder.file(int(entry['file']))}' is damaged: the state of client {k} has changed"
                )
        return states


def files_in_use(stored: bytes) -> set[int]:
    """The numbers of the files that the index of a checkpoint uses."""
    try:
        return set(tree.from_bytes(stored)["file"].tolist())
    except (safetensors.SafetensorError, KeyError, ValueError, AttributeError) as error:
        raise StorageError(f"an index of client states is damaged: {error}") from error
