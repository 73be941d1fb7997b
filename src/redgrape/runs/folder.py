"""The run folder: everything about one run, in files that survive a crash.

    experiment.toml          the experiment, with every setting
    environment.json         versions, machine and data
    partition.safetensors    the training rows of each client
    metrics.jsonl            one line per round; bit-identical between equal runs; long lists are packed (figures.py)
    times.jsonl              wall-clock seconds and workers per round; a file of its own, because times always differ
    checkpoints/, clients/   the states of server and clients after the last rounds (checkpoints.py)
    summary.json             the result, written after the last round
    evaluation.json          calibration and sites of the final model, if `redgrape evaluate` was asked
    noise.key, privacy.jsonl the key and the spent privacy budget of a run with noise (privacy/ledger.py)
    SHA256SUMS               checksums of the files above; those of the .jsonl files are added when the run is finished
    lock                     held by the process that writes to the folder

A round is committed in this order: its line in metrics.jsonl, then its checkpoint. So a checkpoint never lacks a line.
Lines after the newest good checkpoint are removed before a run resumes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from redgrape import tree
from redgrape.data.examples import Examples
from redgrape.data.federation import Federation
from redgrape.errors import BusyError, ConfigError, StorageError
from redgrape.rounds import RunState
from redgrape.runs import checksums, durable
from redgrape.runs.checkpoints import Checkpoints, differences
from redgrape.runs.experiment import Experiment
from redgrape.runs.figures import packed, unpacked_record
from redgrape.runs.values import read_toml

LINES = ("metrics.jsonl", "times.jsonl")


class RunFolder:
    def __init__(self, path: Path, made: Sequence[Path] | None = None) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path)
        self._lines = hashlib.sha256()  # hash of metrics.jsonl; its length is below
        self._line_bytes = 0
        self._made = made  # folders made by `create`, innermost first; None if the run existed before

    @classmethod
    def create(cls, path: Path, experiment: Experiment) -> RunFolder:
        with durable.storage_errors("make", path):
            if path.exists() and (not path.is_dir() or not all(map(_is_leftover, path.iterdir()))):
                again = ", add --overwrite to begin it again" if cls.is_only_begun(path) else ""
                ways = f"continue it with `redgrape resume {path}`{again}, or choose another --out"
                raise ConfigError(f"'{path}' already exists; {ways}")
            durable.check_ordinary(path)
            shutil.rmtree(durable.aside(path.resolve()), ignore_errors=True)
            made = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = cls(path, made)
        try:
            with durable.storage_errors("make", path):
                for new in made:
                    durable.sync_folder(new.parent)
            folder.write_experiment(experiment)
        except StorageError:
            folder.discard()
            raise
        return folder

    @staticmethod
    def is_only_begun(path: Path) -> bool:
        """Whether this is a run without a finished round, such as one that failed in the first."""
        return (path / "experiment.toml").is_file() and not (path / "metrics.jsonl").exists()

    def discard(self) -> None:
        """Undo `create`, unless a round is finished. A run that existed before is left as it is."""
        if self._made is not None and not (self.path / "metrics.jsonl").exists():
            for path in self.path.iterdir():
                durable.remove(path)
            for folder in self._made:
                with suppress(OSError):  # another process may have added files
                    folder.rmdir()

    def remove(self) -> None:
        """Remove the whole run, unless another process uses it."""
        with self.locked():
            durable.remove_folder(self.path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        durable.check_is_run(path)
        durable.check_ordinary(path)
        return cls(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for one process. The system releases the lock when the process ends, however it ends."""
        with durable.storage_errors("lock", self.path):
            file = (self.path / "lock").open("ab+", buffering=0)  # unbuffered: a write that failed must not be retried
        with file:
            with durable.storage_errors("lock", self.path):
                if not try_lock(file.fileno()):
                    file.seek(0)
                    holder = file.read().decode(errors="replace").strip()
                    raise BusyError(f"'{self.path}' is in use by another process ({holder}); wait for it to end")
                file.truncate(0)
                file.write(f"process {os.getpid()}".encode())
            try:
                yield
            finally:
                file.truncate(0)

    def experiment(self) -> Experiment:
        path = self.path / "experiment.toml"
        try:
            return Experiment.read(path)
        except ConfigError as error:
            if checksums.is_whole(self.path, path.name):  # such as one of another redgrape version
                raise
            raise StorageError(f"'{path}' was edited or is damaged: {error}{self._copy()}") from error

    def write_experiment(self, experiment: Experiment) -> None:
        checksums.write(self.path, {"experiment.toml": experiment.to_toml().encode()})

    def check_experiment(self, may_differ: Sequence[str] = ()) -> None:
        """Raise StorageError if experiment.toml differs from what redgrape wrote."""
        if checksums.is_whole(self.path, "experiment.toml"):
            return
        path = self.path / "experiment.toml"
        copy = self.checkpoints.copy()
        if copy is None:
            raise StorageError(f"'{path}' was edited or is damaged; restore it, or start a new run with --out")
        changes = differences(read_toml(copy), read_toml(path))
        for key in may_differ:
            changes.pop(key, None)
        if changes:
            longer = "; use `redgrape resume --rounds` to extend a run" if changes.keys() == {"rounds"} else ""
            raise StorageError(f"'{path}' was edited: {', '.join(changes.values())}{longer}{self._copy()}")

    def _copy(self) -> str:
        """A hint at the newest copy of the experiment."""
        copy = self.checkpoints.copy()
        return "" if copy is None else f"; '{copy}' is the original"

    def environment(self) -> dict[str, Any]:
        if not (self.path / "environment.json").exists():
            raise StorageError(f"'{self.path / 'environment.json'}' is missing")
        if not checksums.is_whole(self.path, "environment.json"):
            raise StorageError(f"'{self.path / 'environment.json'}' is damaged: its SHA-256 does not match")
        environment: dict[str, Any] = durable.read_json(self.path / "environment.json")
        if not isinstance(environment, dict) or "split" not in environment:
            raise StorageError(f"'{self.path / 'environment.json'}' is damaged: it has no split")
        return environment

    def has_whole_times(self) -> bool:
        return checksums.is_whole(self.path, "times.jsonl")

    def has_partition(self) -> bool:
        """Whether the partition file exists and is intact."""
        path = self.path / "partition.safetensors"
        return path.exists() and checksums.is_whole(self.path, path.name)

    def write_environment(self, environment: Mapping[str, Any], federation: Federation | None) -> None:
        """Write the environment and the partition. The partition lists rows of the source file: client k has
        rows[ends[k-1]:ends[k]]. It also lists the rows held out for validation, and for the test if they come from the
        same file (empty if there are none). If `federation` is None, the partition is not known here.
        """
        split = {} if federation is None else {"partition.safetensors": _partition(federation)}
        checksums.write(self.path, {**split, "environment.json": durable.as_json(environment)})

    def is_partition(self, federation: Federation) -> bool:
        """Whether the partition file matches this federation."""
        with durable.storage_errors("read", self.path):
            return (self.path / "partition.safetensors").read_bytes() == _partition(federation)

    def append(self, record: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        checksums.remove(self.path, LINES)
        line = json.dumps(packed(record))
        durable.append_line(self.path / "metrics.jsonl", line)
        self._count_line(line.encode() + b"\n")
        durable.append_line(self.path / "times.jsonl", json.dumps({"round": record["round"], **seconds}))

    def _count_line(self, line: bytes) -> None:
        self._lines.update(line)
        self._line_bytes += len(line)

    def metrics(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        try:
            return [unpacked_record(record) for record in _read_lines(path)]
        except ValueError as error:
            raise StorageError(f"'{path}' is damaged: {error}") from error

    def times(self) -> list[dict[str, Any]]:
        return _read_lines(self.path / "times.jsonl")

    def cut_after(self, round: int) -> None:
        """Remove everything after the newest good checkpoint: damaged checkpoints, and lines that it does not cover."""
        self.checkpoints.cut_after(round)
        size = self.checkpoints.lines_until(round)
        self._lines, self._line_bytes = hashlib.sha256(), 0
        for name in LINES:
            path = self.path / name
            if path.exists():
                data = path.read_bytes()
                kept = data[:size] if name == "metrics.jsonl" else _times_up_to(round, data)
                if kept != data:
                    checksums.remove(self.path, LINES)
                    durable.replace_file(path, kept)
                if name == "metrics.jsonl":
                    self._count_line(kept)

    def save(self, state: RunState, experiment: Experiment) -> None:
        """Write the checkpoint of a round whose line is in metrics.jsonl."""
        self.checkpoints.save(state, experiment, {"bytes": self._line_bytes, "sha256": self._lines.hexdigest()})

    def sweep(self) -> None:
        """Remove leftovers of a write that crashed."""
        for leftover in self.path.glob(".*.tmp"):
            durable.remove(leftover)
        self.checkpoints.sweep()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary. The .jsonl files are final now, so their checksums are listed too."""
        checksums.add(self.path, LINES)
        checksums.write(self.path, {"summary.json": durable.as_json(summary)})

    def write_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        with self.locked():
            checksums.write(self.path, {"evaluation.json": durable.as_json(evaluation)})

    def summary(self) -> dict[str, Any] | None:
        path = self.path / "summary.json"
        if not checksums.is_whole(self.path, path.name):
            raise StorageError(f"'{path}' is damaged; write it again with `redgrape resume {self.path}`")
        return durable.read_json(path) if path.exists() else None


def try_lock(fd: int) -> bool:
    """Try to lock an open file. Return whether this process now holds the lock."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]  # exists on Windows only
        except OSError:
            return False
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_leftover(path: Path) -> bool:
    """Whether the path is a leftover of a write that crashed."""
    return durable.is_leftover(path) or path.name == checksums.NAME


def _partition(federation: Federation) -> bytes:
    rows = torch.from_numpy(np.concatenate(federation.parts))
    arrays = {
        "rows": rows if federation.train.rows is None else federation.train.rows[rows],
        "ends": torch.from_numpy(np.cumsum([len(part) for part in federation.parts])),
        "validation": _rows_of(federation.validation),
        "auxiliary": _rows_of(federation.auxiliary),
        "test": _rows_of(federation.test),
    }
    return tree.to_bytes(arrays)


def _rows_of(examples: Examples | None) -> torch.Tensor:
    return torch.zeros(0, dtype=torch.int64) if examples is None or examples.rows is None else examples.rows


def _times_up_to(round: int, data: bytes) -> bytes:
    """The lines up to this round, one per round. Damaged lines are left out."""
    kept: dict[int, bytes] = {}
    for line in data.split(b"\n")[:-1]:
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            number = json.loads(line)["round"]
            if number <= round:
                kept[number] = line + b"\n"
    return b"".join(kept.values())


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with durable.storage_errors("read", path):
        lines = path.read_bytes().split(b"\n")[:-1]  # text after the last line break is an incomplete line
    try:
        return [json.loads(line) for line in lines]
    except (ValueError, RecursionError) as error:
        raise StorageError(f"'{path}' is damaged: {error}") from error
