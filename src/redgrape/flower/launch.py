"""Flower's own SuperLink, SuperNode and commands with the settings of a deployment: the first word tells which.

Three things cannot be set by their options, and are set here. The first must hold: where it cannot be set, nothing is
started.

- The SuperLink answers everything on one port: to sites, but also to whoever wants to register a key, start a run or
  take the server's part in one, and asks them for nothing. Here only the sites' part of it is open to other machines.
- A SuperNode looks for messages every three seconds, which is most of a short round.
- A site that was killed counts as connected for a minute, and is refused as long.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from redgrape.flower.processes import LOOK, POLL, end_with_parent

HEARTBEAT = 10  # seconds; the least that the SuperLink accepts
END = "\x1e"
OPEN_TO_SITES = ("/v1/fleet/", "/health")


class SitesOnly:
    """Answers other machines only what is meant for sites; the rest is for this machine alone."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(OPEN_TO_SITES) and not _is_from_here(scope):
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"for the server's own machine only"})
            return
        await self._app(scope, receive, send)


def _is_from_here(scope: Any) -> bool:
    """Whether both ends of the connection have the same address, as no other machine can bring about."""
    client, server = scope.get("client"), scope.get("server")
    return client is not None and server is not None and client[0] == server[0]


def superlink() -> None:
    theirs = import_module("flwr.superlink.cli.flower_superlink")  # the package has a function of the module's name
    guard(theirs)
    theirs.flower_superlink()


def guard(flower: Any) -> None:
    """Put `SitesOnly` around what this module of Flower's serves."""
    run = getattr(getattr(flower, "uvicorn", None), "run", None)
    if run is None:
        sys.exit("this version of Flower serves in an unknown way, and could not be closed to other machines")

    def serve(app: Any, **options: Any) -> None:
        # An address from a header would be whatever the other side likes.
        run(SitesOnly(app), **{**options, "proxy_headers": False})

    flower.uvicorn = SimpleNamespace(run=serve)


def supernode() -> None:
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection, start_client_internal
    from flwr.supernode.cli import flower_supernode

    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    patient = SimpleNamespace(**{name: getattr(time, name) for name in dir(time) if not name.startswith("_")})
    look = float(os.environ.get(LOOK, POLL))
    patient.sleep = lambda seconds: time.sleep(min(seconds, look))
    start_client_internal.time = patient
    flower_supernode()


def clientapps() -> None:
    from redgrape.flower import warm

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the business of who started it
    warm.serve(Path(sys.argv[1]))


def commands() -> None:
    """Several `flwr` commands in one process, which takes seconds to start: lists of words from standard input; what
    each has printed, with END after it."""
    from flwr.cli.app import app

    for words in json.load(sys.stdin):
        try:
            app(words, standalone_mode=False)
        except (Exception, SystemExit) as error:
            print(f"{type(error).__name__}: {error}")
        print(END, flush=True)


if __name__ == "__main__":
    end_with_parent()
    role = sys.argv.pop(1)
    {"superlink": superlink, "supernode": supernode, "clientapps": clientapps, "commands": commands}[role]()
