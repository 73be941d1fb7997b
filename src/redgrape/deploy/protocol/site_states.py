"""A client's states on its site's disk, by run and round: the server names the round that a state must be of.

A state is saved before its update is sent, and the server tells with its next question which of them counted. So a
server that was killed and goes back some rounds finds what it needs, and a site that was killed loses nothing.

    states/RUN/round-NNNNNN     SHA-256 of what follows, and the state in the safetensors format
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import safetensors

from redgrape import tree
from redgrape.errors import StorageError
from redgrape.runs import durable
from redgrape.tree import Tree

_DIGEST = hashlib.sha256().digest_size
_RUN = re.compile(r"[0-9a-f]{16}")


class SiteStates:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, run: str, round: int) -> Tree:
        path = self._file(run, round)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StorageError(
                f"this site has no state of round {round} of run {run} ({error.strerror}), which the server asks for; "
                "put its folder 'states' back or start a new run"
            ) from error
        if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
            raise StorageError(f"'{path}' is damaged: its SHA-256 is not what it was")
        try:
            return tree.from_bytes(data[_DIGEST:])
        except (safetensors.SafetensorError, ValueError) as error:
            raise StorageError(f"'{path}' cannot be read: {error}") from error

    def save(self, run: str, round: int, state: Tree, reach: int, start: int | None) -> None:
        """Keep it, and all that the server may still ask for: the state of the round `start` that it has just named,
        those of the `reach` rounds before this one, and the newest before these. What lies between `start` and this
        round was saved and did not count, since the server names the newest that does."""
        path = self._file(run, round)
        with durable.storage_errors("make", path.parent):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = tree.to_bytes(state)
        durable.replace_file(path, hashlib.sha256(data).digest() + data)
        before = [n for n in self.rounds(run) if n < round]
        counted = [n for n in before if start is not None and n <= start]
        older = [n for n in counted if n < round - reach]
        for n in [*older[:-1], *before[len(counted) :]]:
            durable.remove(self._file(run, n))

    def rounds(self, run: str) -> list[int]:
        names = [path.name.removeprefix("round-") for path in self._file(run, 0).parent.glob("round-*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def _file(self, run: str, round: int) -> Path:
        if not _RUN.fullmatch(run):  # it comes from the server and becomes a path
            raise StorageError(f"{run[:40]!r} is no name of a run")
        return self._folder / run / f"round-{round:06d}"
