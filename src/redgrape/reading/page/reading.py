"""Run folders in any state: finished, in training, stopped or damaged. Read-only, takes no lock."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from redgrape.errors import StorageError
from redgrape.reading.run_view import RunView, view
from redgrape.runs import checksums, durable

FILES = (
    "experiment.toml",
    "environment.json",
    "metrics.jsonl",
    "times.jsonl",
    "summary.json",
    "evaluation.json",
    "SHA256SUMS",
)
PROC_LOCKS = Path("/proc/locks")

State = Literal["finished", "training", "stopped"]


@dataclass(frozen=True)
class Reading:
    """A readable run: its view, and what `redgrape evaluate` found out about its final model."""

    view: RunView
    evaluation: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Reading:
        for name in FILES:
            durable.ordinary(path / name)
        found = view(path)
        return cls(found, _evaluation(found))

    @property
    def state(self) -> State:
        """The state of the run: finished, or else whether a process is running it now."""
        if self.view.summary is not None:
            return "finished"
        return "training" if is_locked(self.view.path / "lock") else "stopped"


def is_locked(path: Path) -> bool:
    """Whether the process named in the lock file holds the lock. Trying the lock could keep a run from starting."""
    try:
        kind, _, number = path.read_text().partition(" ")
        inode = path.stat().st_ino
        pid = int(number) if kind == "process" else 0
    except (OSError, ValueError):
        return False
    if pid <= 0:
        return False
    try:
        held = [line.split() for line in PROC_LOCKS.read_text().splitlines()]
    except OSError:  # not Linux
        return _is_alive(pid)
    # 7: FLOCK ADVISORY WRITE <process> <major>:<minor>:<inode> 0 EOF
    return any(
        line[1:2] == ["FLOCK"] and line[4] == str(pid) and line[5].endswith(f":{inode}")
        for line in held
        if len(line) == 8
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _evaluation(view: RunView) -> dict[str, Any]:
    """Empty if there is none, or a damaged one, or one of another model, such as that before the run was extended."""
    path = view.path / "evaluation.json"
    try:
        found = json.loads(path.read_bytes()) if checksums.is_whole(view.path, path.name) else {}
    except (OSError, ValueError, RecursionError, StorageError):
        return {}
    is_current = isinstance(found, dict) and found.get("state") == (view.summary or {}).get("state", "")
    return found if is_current else {}
