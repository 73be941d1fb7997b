"""The processes of a role: started in their own group, watched, and ended with all that they started.

Flower's SuperLink and SuperNode start further processes, some in their own sessions, which would outlive a kill.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from redgrape.errors import ConfigError, install

GRACE = 8.0  # seconds to end cleanly before they are killed
_PR_SET_PDEATHSIG = 1
OFF = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# Passed to the parties' processes in the environment: an app's settings would disclose the paths to everybody.
DEPLOYMENT = "REDGRAPE_DEPLOYMENT"  # the server's folder
SOCKET = "REDGRAPE_SITE_SOCKET"  # where a site's resident process listens
SIMULATED_DATA = "REDGRAPE_SIMULATED_DATA"  # the data of all sites, if they are simulated here
APP = "REDGRAPE_APP"  # the hash of the app that a site runs
LOOK = "REDGRAPE_LOOK"  # seconds between two polls of a SuperNode for messages
POLL = 0.2  # seconds between two polls of Flower for work; each costs the server some milliseconds


def environment(flower_home: Path, more: Mapping[str, str] | None = None, poll: float = POLL) -> dict[str, str]:
    """For Flower's processes: no telemetry, no update check, no installation; their commands from this Python."""
    here = str(Path(sys.executable).parent)
    passed = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    own = {
        "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(flower_home),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": str(poll),
        "PYTHONUNBUFFERED": "1",
    }
    return {**passed, **own, **OFF, **(more or {})}


def require_flower() -> None:
    """Raise ConfigError if Flower is not installed."""
    from importlib.util import find_spec

    if find_spec("flwr") is None:
        raise ConfigError(f"this needs Flower; {install('flower')}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_with_parent() -> None:
    """End this process when its parent has ended, if the system supports it (Linux)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended already
            sys.exit(143)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class Owned:
    """One process with all that it starts. Its output goes to a file. A mark in the environment identifies what it
    starts. Processes that leave the group or lose their parent inherit it too."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._mark = f"REDGRAPE_OWNED={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        with open(log, "ab", opener=_private) as file:
            self.process = subprocess.Popen(  # noqa: S603  # the command is ours
                command,
                env={**env, name: value},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                umask=0o077,  # its files may disclose a party's data
            )

    def code(self) -> int | None:
        return self.process.poll()

    def last_words(self) -> str:
        """The end of its output, on one line."""
        text = self.log.read_bytes()[-8192:].decode(errors="replace")
        return " | ".join(line.strip() for line in text.splitlines() if line.strip())[-2000:]

    def stop(self) -> None:
        """End it and what it has started: first cleanly, then by force."""
        ends = time.monotonic() + GRACE
        self._signal(signal.SIGTERM)
        while self._running() and time.monotonic() < ends:
            time.sleep(0.1)
        self._signal(signal.SIGKILL)
        self.process.wait(timeout=GRACE)

    def _signal(self, number: int) -> None:
        for pid in self._running():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _running(self) -> set[int]:
        """The process and those it has started that have not ended. The latter are known only on Linux."""
        return marked(self._mark) | ({self.process.pid} if self.process.poll() is None else set())


def identity(pid: int) -> str:
    """Distinguishes a process from a later one with the same number, by the start times of the machine and the process.
    Empty if it has ended or the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{boot} {fields[19]}"


def marked(mark: str) -> set[int]:
    """The running processes with this mark in their environment."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in entry.read_bytes().split(b"\0"):
                found.add(int(entry.parent.name))
        except OSError:  # it has just ended, or belongs to another user
            continue
    return found
