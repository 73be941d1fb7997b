"""The processes of a role: started in a group of their own, watched, and ended with all that they have started.

Flower's SuperLink and SuperNode start further processes, some in sessions of their own, which would outlive a kill. On
Linux they become children of the process here when their parent dies, so that none is lost from sight.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from redgrape.errors import ConfigError

GRACE = 8.0  # seconds to end in order, before they are killed
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
OFF = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
POLL = 0.2  # seconds between two looks of Flower for work


def environment(flower_home: Path, **more: str) -> dict[str, str]:
    """For Flower's processes: no telemetry, no update check, no installation; their commands from this Python."""
    here = str(Path(sys.executable).parent)
    passed = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    own = {
        "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(flower_home),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": str(POLL),
        "PYTHONUNBUFFERED": "1",
    }
    return passed | own | OFF | more


def require_flower() -> None:
    """Raise ConfigError where Flower is not installed."""
    from importlib.util import find_spec

    if find_spec("flwr") is None:
        raise ConfigError("this needs Flower; run `pip install redgrape[flower]`")


def adopt_orphans() -> None:
    """From now on what our processes leave behind becomes our child, where the system can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """End this process when the one that started it has ended, where the system can (Linux)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended already
            sys.exit(143)


class Owned:
    """One process with all that it starts. Its output goes to a file."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._before = descendants()
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(  # noqa: S603  # the command is ours
                command, env=dict(env), stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    def code(self) -> int | None:
        return self.process.poll()

    def last_words(self, lines: int = 3) -> str:
        """The end of what it has written."""
        text = self.log.read_bytes()[-8192:].decode(errors="replace")
        return " | ".join(line.strip() for line in text.splitlines() if line.strip())[-2000:] if lines else ""

    def stop(self) -> None:
        """End it and what it has started: first in order, then at once."""
        everything = {self.process.pid, *descendants(self.process.pid)}
        if self.process.poll() is None:
            self.process.terminate()
        ends = time.monotonic() + GRACE
        while time.monotonic() < ends and (self.process.poll() is None or _alive(everything - {self.process.pid})):
            time.sleep(0.05)
        everything |= descendants() - self._before
        for pid in _alive(everything):
            _kill(pid)
        self.process.wait(timeout=GRACE)
        _reap(everything)


def descendants(root: int | None = None) -> set[int]:
    """The ids of all processes that this one (or another) has started, directly or not. Linux alone tells."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children.setdefault(int(after_name[1]), []).append(int(entry.parent.name))
    found: set[int] = set()
    waiting = [os.getpid() if root is None else root]
    while waiting:
        new = [pid for pid in children.get(waiting.pop(), []) if pid not in found]
        found.update(new)
        waiting += new
    return found


def _alive(pids: set[int]) -> set[int]:
    """Those that run; one that has ended and waits to be noticed by its parent does not."""
    running = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                running.add(pid)
        except OSError:
            continue
    return running


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _reap(pids: set[int]) -> None:
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except (ChildProcessError, OSError):
            continue
