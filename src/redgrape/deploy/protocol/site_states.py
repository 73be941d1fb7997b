"""A client's states on its site's disk, by run and round.

    states/RUN/round-NNNNNN     SHA-256 of what follows, the state's key, the state in the safetensors format

What a client adds to a running sum at the server must match the state that it keeps. Otherwise the sum stays wrong in
all later rounds. This is how they stay together:

    1  The site saves its new state, flushed to disk, before it sends the update. The state gets a random key, which the
       site sends with the update.
    2  The server accepts the update, or not. If it does, its own state, and with the next checkpoint its disk, holds
       the round and the key of the site's state.
    3  The next question names that round and key. The site starts from exactly this state, or says that it does not
       have it.

So a state counts only if its update does, whichever process is killed, and when. A site that sent nothing, or whose sum
failed, is asked to start from the state before. A server that returns to a checkpoint names the states of that
checkpoint, which the site still has. A site may have lost its states, or have those of an older backup, or of another
attempt at the same round. Then it does not have the key, and training starts all client states anew
(`Method.sums_of_states`).

The key is random and not a hash: by a hash the server could test guesses about the state.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path

import safetensors

from redgrape import tree
from redgrape.errors import StorageError
from redgrape.runs import durable
from redgrape.tree import Tree

_DIGEST = hashlib.sha256().digest_size
_KEY = 8  # bytes
_RUN = re.compile(r"[0-9a-f]{16}")


class StateMissing(StorageError):
    """The site does not have the state that the server counts on. The message names no path."""


class SiteStates:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, run: str, round: int, key: int | None) -> Tree:
        """The state of this round with this key; StateMissing if it is not there, damaged, or another one."""
        path = self._file(run, round)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise _missing(run, round, str(error.strerror)) from error
        content = data[_DIGEST:]
        if hashlib.sha256(content).digest() != data[:_DIGEST]:
            raise _missing(run, round, "the file is damaged")
        if key is None or content[:_KEY] != key.to_bytes(_KEY, "big"):
            raise _missing(run, round, "the state there is not the one that the server counted")
        try:
            return tree.from_bytes(content[_KEY:])
        except (safetensors.SafetensorError, ValueError) as error:
            raise _missing(run, round, "the file cannot be read") from error

    def save(self, run: str, round: int, state: Tree, reach: int, start: int | None) -> int:
        """Save the state and return its key. Keep all that the server may still ask for: the state of the round `start`
        that it has just named, those of the `reach` rounds before this one, and the newest before these. States between
        `start` and this round did not count, since the server names the newest that does."""
        path, key = self._file(run, round), secrets.randbits(8 * _KEY - 1)
        with durable.storage_errors("make", path.parent):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = key.to_bytes(_KEY, "big") + tree.to_bytes(state)
        durable.replace_file(path, hashlib.sha256(content).digest() + content)
        before = [n for n in self.rounds(run) if n < round]
        counted = [n for n in before if start is not None and n <= start]
        older = [n for n in counted if n < round - reach]
        for n in [*older[:-1], *before[len(counted) :]]:
            durable.remove(self._file(run, n))
        return key

    def rounds(self, run: str) -> list[int]:
        names = [path.name.removeprefix("round-") for path in self._file(run, 0).parent.glob("round-*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def _file(self, run: str, round: int) -> Path:
        if not _RUN.fullmatch(run):  # it comes from the server and becomes a path
            raise StorageError(f"{run[:40]!r} is no name of a run")
        return self._folder / run / f"round-{round:06d}"


def _missing(run: str, round: int, why: str) -> StateMissing:
    return StateMissing(
        f"this site does not have its state of round {round} of run {run} ({why}); if you have a copy of its folder "
        "'states', put it back"
    )
