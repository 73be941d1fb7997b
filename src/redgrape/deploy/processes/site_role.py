"""`redgrape deploy site`: starts, watches and ends a site's resident process together with its SuperNode."""

from __future__ import annotations

import email.utils
import json
import os
import re
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import IO, Any

from redgrape.deploy.processes import fork_server
from redgrape.deploy.processes.launch import NOT_RUN
from redgrape.deploy.processes.supervision import APP, LOOK, POLL, SOCKET, Owned, environment, free_port, require_flower
from redgrape.deploy.protocol.deadlines import PROMISE, Promise
from redgrape.deploy.protocol.wire import REFUSED
from redgrape.deploy.setup import certificates
from redgrape.deploy.setup.folder import SiteFolder
from redgrape.errors import BY_EXIT_CODE, BusyError, ConfigError, RedgrapeError
from redgrape.runs import durable
from redgrape.runs.folder import try_lock

START_DEADLINE = 600.0  # seconds to read and check the data
CONNECT_DEADLINE = 20.0
PATIENCE = 120.0  # seconds to retry if the server refuses: a killed site still counts as connected for a while
AGAIN = 3.0
REPORT_EVERY = 300.0  # seconds between two messages of a site that waits for its server
BROKEN_LOOKS = 20  # looks in a row at a broken promise: after the machine was suspended it may just not be renewed yet
AHEAD, BEHIND = 4.0, 290.0  # seconds that a site's clock may be off; Flower refuses it from 5 and 305 on
SKEW = 60.0  # seconds behind that are worth a message
LOOKS_A_SECOND = 20.0  # polls for messages by all sites together, so that many sites do not keep the server busy
_COLOUR = re.compile(r"\x1b\[\d*m")
_ERROR = re.compile(r"ERROR *: +(?:Exit Code: \d+ \| )?(.*?)(?: \| (?:INFO|WARNING|ERROR|For more information)|$)")


class SiteRole:
    resident: Sequence[str] = (sys.executable, "-m", "redgrape.deploy.processes.resident")
    node: Sequence[str] = (sys.executable, "-m", "redgrape.deploy.processes.launch", "supernode")
    forks = True  # whether processes for messages are forked (fork_server.py)
    poll = POLL

    def __init__(self, folder: SiteFolder, data: Path, say: Callable[[str], None]) -> None:
        self._folder, self._data, self._say = folder, data.resolve(), say
        self._sockets = tempfile.TemporaryDirectory(prefix="redgrape-site-")  # a socket's path must be short
        self._resident: Owned | None = None
        self._warm: Owned | None = None
        self._node: Owned | None = None
        self._lock: IO[bytes] | None = None
        self._promise = Promise(Path(self._socket).with_name(PROMISE))
        self._broken = 0
        self._other_app = ""
        self._refusals: set[str] = set()

    def start(self) -> dict[str, Any]:
        """Read and check the data, then connect. Return what the site holds, for the site only."""
        require_flower()
        if not self._folder.options.plain:
            certificates.check_private(self._folder.key)
            certificates.days_left(self._folder.authority)
        self._lock_folder()
        facts = self._start_resident()
        self._start_warm()
        self._await_server()
        self._start_node()
        return facts

    def _lock_folder(self) -> None:
        """A second process of this site would take its logs. The system releases the lock when this process ends."""
        path = self._folder.path
        with durable.storage_errors("lock", path):
            self._lock = (path / "lock").open("ab")
            if not try_lock(self._lock.fileno()):
                raise BusyError(f"site '{self._folder.options.name}' already runs from '{path}'; end that process")

    def _start_resident(self) -> dict[str, Any]:
        log = self._folder.path / "resident.log"
        log.unlink(missing_ok=True)
        command = [*self.resident, str(self._folder.path), "--data", str(self._data)]
        env = environment(self._folder.flower_home)
        self._promise.withdraw()
        self._broken = 0
        self._resident = Owned([*command, "--socket", self._socket], env, log)
        ends = time.monotonic() + START_DEADLINE
        while time.monotonic() < ends:
            code, said = self._resident.code(), _first_json(log)
            if "ready" in said:
                return said
            if "error" in said:
                raise BY_EXIT_CODE.get(int(said["exit_code"]), RedgrapeError)(str(said["error"]))
            if code is not None:
                raise RedgrapeError(
                    f"the site's process has ended with code {code}: {self._resident.last_words()[-300:]}"
                )
            time.sleep(0.1)
        raise RedgrapeError(
            f"the data was not read within {START_DEADLINE:g} seconds; `redgrape doctor {self._folder.path} --data "
            f"{self._data}` reads it without a limit, and the site then uses the images that it has decoded"
        )

    def _start_warm(self) -> None:
        """Start it without waiting: until it answers, Flower's own command is run."""
        if not self.forks:
            return
        scripts = Path(self._sockets.name) / "bin"
        scripts.mkdir(exist_ok=True)
        listens_at = Path(self._sockets.name) / "warm"
        listens_at.unlink(missing_ok=True)
        fork_server.write_script(scripts, listens_at)
        command = [sys.executable, "-m", "redgrape.deploy.processes.launch", "clientapps", str(listens_at)]
        self._warm = Owned(command, self._environment(), self._folder.path / "clientapp.log")

    def _environment(self) -> dict[str, str]:
        look = max(self.poll, self._folder.options.sites / LOOKS_A_SECOND)
        variables = {SOCKET: self._socket, LOOK: str(look), APP: self._folder.options.app}
        env = environment(self._folder.flower_home, variables, self.poll)
        return env | {"PATH": f"{self._sockets.name}/bin{os.pathsep}{env['PATH']}"}

    @property
    def _socket(self) -> str:
        return str(Path(self._sockets.name) / "socket")

    def _await_server(self, *, again: bool = False) -> None:
        """Wait until the server answers with a certificate that this site trusts. A wrong one is an error at once,
        unless the site was connected before: it may have expired, for example, and will be renewed."""
        last_reason, since = "", time.monotonic()
        while (reason := self._why_not(again)) is not None:
            if reason != last_reason or time.monotonic() - since >= REPORT_EVERY:
                self._say(f"waiting for the server {self._folder.options.server} ({reason})")
                last_reason, since = reason, time.monotonic()
            time.sleep(AGAIN)
        with suppress(OSError, ValueError):  # the server has just ended again; the SuperNode will notice
            if wrong := why_clock_is_wrong(clock_ahead(self._folder)):
                self._say(f"the clock of this machine is {wrong}")

    def _why_not(self, again: bool) -> str | None:
        try:
            return check_server(self._folder)
        except ConfigError as error:
            if not again:
                raise
            return f"NOT TRUSTED, nothing is sent to it: {error}"

    def _start_node(self) -> None:
        options, log = self._folder.options, self._folder.path / "supernode.log"
        command = [*self.node, "--superlink", options.server]
        command += ["--host", "127.0.0.1", "--port", str(free_port()), "--max-wait-time", str(CONNECT_DEADLINE)]
        command += ["--node-config", f"partition-id={options.index} num-partitions={options.sites}"]
        if options.plain:
            command += ["--insecure"]
        else:
            command += ["--root-certificates", str(self._folder.authority)]
            command += ["--auth-supernode-private-key", str(self._folder.key)]
        self._folder.flower_home.mkdir(mode=0o700, exist_ok=True)
        log.unlink(missing_ok=True)
        self._node = Owned(command, self._environment(), log)

    def watch(self, until: Callable[[], bool] = lambda: False) -> None:
        """Watch until interrupted. Restart processes that ended, unless the server refuses this site."""
        refused_since: float | None = None
        while not until():
            assert self._resident is not None
            assert self._node is not None
            self._broken = self._broken + 1 if self._promise.is_broken() else 0
            if self._resident.code() is not None or self._broken >= BROKEN_LOOKS:
                what = "has ended" if self._resident.code() is not None else "hangs"
                self._say(f"the site's process {what}; starting it again")
                self._resident.stop()
                self._start_resident()
            node_ended = self._node.code() is not None
            if self._warm is not None and (node_ended or self._warm.code() is not None):
                self._warm.stop()  # with its forks, which would try for ever to reach the ended SuperNode
                self._start_warm()
            if node_ended:
                reason = _reason(self._node.last_words())
                self._node.stop()
                if "[code:" in reason:  # the server's own answer; else it was not reached
                    reason = (
                        f"the server does not accept the key of site '{self._folder.options.name}': is it registered "
                        f"there, and used by nobody else? {reason}"
                    )
                    refused_since = refused_since or time.monotonic()
                    if time.monotonic() - refused_since > PATIENCE:
                        raise ConfigError(reason)
                else:
                    refused_since = None
                self._say(f"not connected; trying again ({reason})")
                time.sleep(AGAIN)
                self._await_server(again=True)
                self._start_node()
            else:
                said = self._node.last_words()
                refused_since = None if "SuperNode ID" in said else refused_since
                self._report_other_app(said)
            self._report_refusals()
            time.sleep(0.5)

    def _report_other_app(self, said: str) -> None:
        """Report each other app once, if the SuperNode said that it did not run it."""
        words = said.rpartition(NOT_RUN)[2].partition(" | ")[0] if NOT_RUN in said else self._other_app
        if words != self._other_app:
            self._other_app = words
            self._say(f"NOT RUN: {words}")

    def _report_refusals(self) -> None:
        """Report each reason once for which the resident process has refused a question."""
        assert self._resident is not None
        lines = self._resident.log.read_bytes()[-65536:].decode(errors="replace").split("\n")[:-1]
        for line in dict.fromkeys(line for line in lines if line.startswith(REFUSED)):
            if line not in self._refusals:
                self._refusals.add(line)
                self._say(line)

    def stop(self) -> None:
        for owned in (self._node, self._warm, self._resident):
            if owned is not None:
                owned.stop()
        if self._lock is not None:
            self._lock.close()
        self._sockets.cleanup()


def _reason(said: str) -> str:
    """What a SuperNode gives as the reason of its end, among all that it prints."""
    found = _ERROR.findall(_COLOUR.sub("", said))
    return (found[-1].replace(" | ", " ") if found else said)[-300:]


def check_server(folder: SiteFolder) -> str | None:
    """None if the right server answers; the reason if nobody answers. ConfigError if somebody answers who is not the
    server of this deployment."""
    options = folder.options
    host, _, port = options.server.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            if options.plain:
                return None
            context = ssl.create_default_context(cafile=str(folder.authority))
            with context.wrap_socket(connection, server_hostname=host):
                return None
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"{options.server} is not the server of this deployment: {error.verify_message}; ask the server's people "
            "for the right ca.crt or address"
        ) from error
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # as from a server that is ending or just starting
        return "it closed the connection"
    except ssl.SSLError as error:
        raise ConfigError(
            f"{options.server} does not speak TLS as it should ({error.reason}); nothing was sent"
        ) from error
    except OSError as error:
        return str(error.strerror or error)


def clock_ahead(folder: SiteFolder) -> float:
    """Seconds that this machine's clock is ahead of the server's; OSError or ValueError if they cannot be found."""
    host, _, port = folder.options.server.rpartition(":")
    host = host.strip("[]")
    connection: HTTPConnection
    if folder.options.plain:
        connection = HTTPConnection(host, int(port), timeout=5)
    else:
        context = ssl.create_default_context(cafile=str(folder.authority))
        connection = HTTPSConnection(host, int(port), timeout=5, context=context)
    try:
        connection.request("GET", "/health/live")
        date = connection.getresponse().getheader("date")
    except HTTPException as error:
        raise OSError(f"the server's answer is not understood ({type(error).__name__})") from error
    finally:
        connection.close()
    if not date:
        raise OSError("the server tells no time")
    # The server gives whole seconds, truncated, so the difference is up to one too large.
    return time.time() - email.utils.parsedate_to_datetime(date).timestamp() - 0.5


def why_clock_is_wrong(ahead: float) -> str | None:
    """Why the clock is wrong, or None. It matters because a site's signatures carry the time."""
    words = f"{abs(ahead):.0f} seconds {'ahead of' if ahead > 0 else 'behind'} the server's"
    if not -BEHIND <= ahead <= AHEAD:
        return f"{words}, and Flower refuses what a site signs so; set it"
    return f"{words}; set it" if -ahead > SKEW else None


def _first_json(log: Path) -> dict[str, Any]:
    for line in log.read_bytes().splitlines():
        if line.startswith(b"{"):
            try:
                said = json.loads(line)
            except ValueError:
                return {}  # half written
            return said if isinstance(said, dict) else {}
    return {}
