"""The checkpoints of a run. They are written atomically and verified when they are read.

    checkpoints/round-NNNNNN/server.safetensors    the server's state
                             clients.safetensors   the index to the client states, if there are any
                             description.toml      a copy of experiment.toml at that time
                             manifest.json         their checksums, and one of the lines of metrics.jsonl so far
    clients/NNNNNN.states    client states (client_states.py)

The last two checkpoints are kept, and that of the best round if the experiment keeps its model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors

from redgrape import tree
from redgrape.errors import StorageError
from redgrape.rounds import RunState
from redgrape.runs import durable
from redgrape.runs.checksums import hash_of
from redgrape.runs.client_states import StateFiles, StateFolder, files_in_use
from redgrape.runs.experiment import Experiment
from redgrape.runs.values import read_toml

FORMAT = 3
KEPT = 2
COPY = "description.toml"  # copy of experiment.toml; with that name, a checkpoint would look like a run
FILES = {"server.safetensors", "clients.safetensors", COPY}
MANIFEST_KEYS = {"format", "round", "rounds", "experiment", "files", "metrics"}


class Checkpoints:
    def __init__(self, run: Path) -> None:
        self._run = run
        self._states = StateFolder(run / "clients")
        self.best_round = 0  # its checkpoint is kept as well; 0: none

    def states(self, num_clients: int) -> StateFiles:
        """The storage for the client states of a new run."""
        return StateFiles(self._states, num_clients)

    def save(self, state: RunState, experiment: Experiment, lines: Mapping[str, Any]) -> None:
        """Write the checkpoint of the state's round. `lines` is the digest of metrics.jsonl."""
        files = {"server.safetensors": tree.to_bytes(state.server), COPY: experiment.to_toml().encode()}
        if state.clients:
            assert isinstance(state.clients, StateFiles)
            self._states.commit()
            files["clients.safetensors"] = tree.to_bytes(state.clients.to_index())
        manifest = {
            "format": FORMAT,
            "round": state.round,
            "rounds": experiment.rounds,
            "experiment": hash_of({**read_toml(self._run / "experiment.toml"), "rounds": experiment.rounds}),
            "files": {name: _digest(data) for name, data in files.items()},
            "metrics": lines,
        }
        durable.create_folder(self._path(state.round), {**files, "manifest.json": durable.as_json(manifest)})
        self._remove_old()

    def latest(self) -> tuple[RunState | None, list[str]]:
        """The newest intact checkpoint, and what is wrong with the newer ones."""
        wrong: list[str] = []
        for path in reversed(self._paths()):
            try:
                return self._load(path), wrong
            except StorageError as error:
                wrong.append(str(error))
        if wrong:
            raise StorageError(f"'{self._run}' has no intact checkpoint: {wrong[0]}")
        return None, wrong

    def after(self, round: int) -> RunState:
        """The checkpoint of this round."""
        return self._load(self._path(round))

    def newest_round(self) -> int:
        """The round of the newest checkpoint, intact or not."""
        return max(map(_round_of, self._paths()), default=0)

    def copy(self) -> Path | None:
        """The newest copy of the experiment."""
        copies = [path / COPY for path in self._paths() if (path / COPY).exists()]
        return copies[-1] if copies else None

    def lines_until(self, round: int) -> int:
        """The size of metrics.jsonl when this checkpoint was written."""
        size: int = self._manifest(self._path(round))["metrics"]["bytes"] if round else 0
        return size

    def cut_after(self, round: int) -> None:
        """Remove what is newer than the newest good checkpoint, and what a kill right after a save has left."""
        for newer in [path for path in self._paths() if _round_of(path) > round]:
            durable.remove(newer)
        self._remove_old()

    def sweep(self) -> None:
        """Remove leftovers of a save that crashed."""
        for leftover in (self._run / "checkpoints").glob(".*.tmp"):
            durable.remove(leftover)
        self._remove_unused_states()

    def _path(self, round: int) -> Path:
        return self._run / "checkpoints" / f"round-{round:06d}"

    def _paths(self) -> list[Path]:
        return sorted((self._run / "checkpoints").glob("round-[0-9]*"), key=_round_of)

    def _remove_old(self) -> None:
        """Keep only the last checkpoints and the client states that they need."""
        for old in self._paths()[:-KEPT]:
            if _round_of(old) != self.best_round:
                durable.remove(old)
        self._remove_unused_states()

    def _remove_unused_states(self) -> None:
        """Remove the client state files that no checkpoint needs."""
        if self._states.path.exists():
            indices = [path / "clients.safetensors" for path in self._paths()]
            with (
                durable.storage_errors("read", self._run),
                suppress(StorageError),
            ):  # then it is unknown which are in use
                used = [files_in_use(index.read_bytes()) for index in indices if index.exists()]
                self._states.keep_only(set().union(*used))

    def _load(self, path: Path) -> RunState:
        manifest = self._manifest(path)
        data = {}
        for name, digest in manifest["files"].items():
            with durable.storage_errors("read", path / name):
                data[name] = (path / name).read_bytes()
            if _digest(data[name]) != digest:
                raise StorageError(f"'{path / name}' is damaged: its SHA-256 does not match the manifest")
        with durable.storage_errors("read", self._run / "metrics.jsonl"):
            lines = (self._run / "metrics.jsonl").read_bytes()
        covered = manifest["metrics"]
        if _digest(lines[: covered["bytes"]]) != covered:
            raise StorageError(f"'{self._run / 'metrics.jsonl'}' is damaged: its beginning does not match '{path}'")
        try:
            server = tree.from_bytes(data["server.safetensors"])
            index = tree.from_bytes(data["clients.safetensors"]) if "clients.safetensors" in data else None
        except (safetensors.SafetensorError, ValueError) as error:
            raise StorageError(f"'{path}' cannot be read: {error}") from error
        if index is None:
            return RunState(manifest["round"], server)
        try:
            return RunState(manifest["round"], server, StateFiles.from_index(self._states, index))
        except StorageError as error:
            raise StorageError(f"'{path}' is not intact: {error}") from error

    def _manifest(self, path: Path) -> dict[str, Any]:
        """Read and check the manifest of this checkpoint."""
        manifest = durable.read_json(path / "manifest.json")
        described = read_toml(self._run / "experiment.toml")  # not parsed: a later redgrape may know more keys
        if isinstance(manifest, dict) and isinstance(version := manifest.get("format"), int) and version != FORMAT:
            raise StorageError(
                f"'{path}' has format {version}, and this redgrape reads {FORMAT}; use the redgrape that wrote it"
            )
        try:
            digests = [manifest["metrics"], *manifest["files"].values()]
            whole = (
                manifest.keys() <= MANIFEST_KEYS
                and manifest["format"] == FORMAT
                and self._path(manifest["round"]) == path
                and {"server.safetensors"} <= manifest["files"].keys() <= FILES
                and all(digest["bytes"] >= 0 for digest in digests)
            )
            rounds = manifest.get("rounds", described["rounds"])
            same = hash_of({**described, "rounds": rounds}) == manifest["experiment"] and rounds <= described["rounds"]
        except (KeyError, TypeError, ValueError, AttributeError):
            whole = same = False
        if not whole:
            raise StorageError(f"'{path / 'manifest.json'}' is damaged")
        if not same:
            changes = differences(read_toml(path / COPY), described) if (path / COPY).exists() else {}
            words = f": {', '.join(changes.values())}" if changes else ""
            raise StorageError(f"'{path}' belongs to another experiment than experiment.toml{words}")
        checked: dict[str, Any] = manifest
        return checked


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Every key that differs, as {"method.lr": "method.lr was 0.1 and is 0.2"}."""
    found: dict[str, str] = {}
    for key in [*before, *[key for key in now if key not in before]]:
        old, new = before.get(key, "missing"), now.get(key, "missing")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= differences(old, new, f"{prefix}{key}.")
        elif old != new or type(old) is not type(new):
            found[f"{prefix}{key}"] = f"{prefix}{key} was {old} and is {new}"
    return found


def _round_of(checkpoint: Path) -> int:
    digits = checkpoint.name.removeprefix("round-")
    return int(digits) if digits.isdecimal() else 0


def _digest(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
