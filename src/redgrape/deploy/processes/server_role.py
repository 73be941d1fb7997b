"""`redgrape deploy server`: starts the SuperLink, watches it, and ends it with all its processes."""

from __future__ import annotations

import errno
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from redgrape.deploy.processes.superlink import START_DEADLINE, Link, wait_until
from redgrape.deploy.processes.supervision import DEPLOYMENT, Owned, environment, require_flower
from redgrape.deploy.setup import certificates
from redgrape.deploy.setup.folder import Deployment
from redgrape.errors import BusyError, ConfigError, RedgrapeError
from redgrape.runs import durable

RESTARTS = 5  # failures in a row before giving up
LOOK_EVERY = 10.0  # seconds between two checks that it answers
UNANSWERED = 12  # failed checks in a row after which it counts as hung
IN_MEMORY = ":flwr-in-memory:"  # on disk, single sites' messages would outlast their deletion
STEADY = 60.0  # seconds after which a start counts as successful


class Server:
    """`simulation`: no site can connect; Flower simulates them on this machine or a cluster, with Ray."""

    def __init__(self, deployment: Deployment, say: Callable[[str], None], *, simulation: bool = False) -> None:
        self.deployment, self._say, self._simulation = deployment, say, simulation
        self.link = Link(deployment)
        self._owned: Owned | None = None

    def start(self, **more: str) -> None:
        """Start, and return once it answers and knows the sites' keys."""
        require_flower()
        options, server = self.deployment.options, self.deployment.server
        check_port(options.bind, options.port)
        for database in server.glob("superlink.db*"):  # from a version that kept one
            database.unlink()
        self.link.write_connection()
        command = [sys.executable, "-m", "redgrape.deploy.processes.launch", "superlink"]
        command += ["--host", options.bind, "--port", str(options.port), "--database", IN_MEMORY]
        command += ["--simulation"] if self._simulation else []
        if options.plain or self._simulation:
            command += ["--insecure"]
        else:
            self._check_certificates()
            command += ["--ssl-ca-certfile", str(server / "ca.crt"), "--ssl-certfile", str(server / "server.crt")]
            command += ["--ssl-keyfile", str(server / "server.key"), "--enable-supernode-auth"]
        env = environment(self.deployment.flower_home, {DEPLOYMENT: str(self.deployment.path), **more})
        log = server / "superlink.log"
        log.unlink(missing_ok=True)
        self._owned = Owned(command, env, log)
        owned = self._owned
        if not wait_until(lambda: owned.code() is not None or self.link.is_up(), START_DEADLINE):
            raise RedgrapeError(f"the server did not answer within {START_DEADLINE:g} seconds; see {log}")
        if owned.code() is not None:
            raise RedgrapeError(
                f"the server has ended with code {owned.code()}: {owned.last_words()[-300:]}; see {log}"
            )
        if not options.plain and not self._simulation:
            self.link.register({name: self.deployment.site(name) / "key.pub" for name in options.sites})

    def _check_certificates(self) -> None:
        server = self.deployment.server
        for name in ("ca.crt", "server.crt"):
            if certificates.days_left(server / name) < 0:
                raise ConfigError(
                    f"'{server / name}' has expired; `redgrape deploy renew {self.deployment.path}` makes a new one"
                )
        check_names(self.deployment)
        certificates.check_private(server / "server.key")

    def watch(self) -> None:
        """Watch until interrupted. A SuperLink that ends or stops answering is started again."""
        failures, begun = 0, time.monotonic()
        looked, unanswered = begun, 0
        while True:
            assert self._owned is not None
            code = self._owned.code()
            if code is None and time.monotonic() - looked >= LOOK_EVERY:
                unanswered = 0 if self.link.is_up() else unanswered + 1
                looked = time.monotonic()
            if code is not None or unanswered >= UNANSWERED:
                what = f"has not answered {unanswered} times" if code is None else f"has ended with code {code}"
                failures = 1 if time.monotonic() - begun > STEADY else failures + 1
                if failures > RESTARTS:
                    raise RedgrapeError(
                        f"the SuperLink {what}; that is {failures} failures in a row; see {self._owned.log}"
                    )
                self._say(f"the SuperLink {what}; starting it again")
                self.stop()
                begun = looked = time.monotonic()
                unanswered = 0
                self.start()
            time.sleep(0.5)

    def stop(self) -> None:
        if self._owned is not None:
            self._owned.stop()


def check_names(deployment: Deployment) -> None:
    """Raise ConfigError if the server's certificate is not for the addresses in deploy.toml, which may have changed."""
    certificate = deployment.server / "server.crt"
    for host in (deployment.options.host, Link(deployment).host):
        if not certificates.is_for(certificate, host):
            raise ConfigError(
                f"'{certificate}' is not for '{host}'; `redgrape deploy renew {deployment.path}` makes one that is"
            )


def check_port(bind: str, port: int) -> None:
    """Raise if the port is in use, or the address does not belong to this machine."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno != errno.EADDRINUSE:
            raise ConfigError(f"cannot listen on {bind}:{port}: {error.strerror}; set bind in deploy.toml") from error
        raise BusyError(f"port {port} of {bind} is in use; end what uses it, or set another in deploy.toml") from error


@contextmanager
def running(server: Server, **more: str) -> Iterator[Server]:
    """Run a server for the duration of a block."""
    with durable.storage_errors("use", server.deployment.server):
        try:
            server.start(**more)
            yield server
        finally:
            server.stop()
