"""Flower's own SuperLink, SuperNode and commands with the settings of a deployment: the first word tells which.

Four things cannot be set by their options, and are set here. The first two must hold: where they cannot be set, nothing
is started.

- The SuperLink answers everything on one port: to sites, but also to whoever wants to register a key, start a run or
  take the server's part in one, and asks them for nothing; so does a SuperNode to whoever wants to answer in its place.
  Here only the sites' part is open, and the rest is for processes of the same user (doors.py).
- A SuperNode runs whatever app the server sends. Here it runs the one that its site.toml names.
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


def superlink() -> None:
    theirs = import_module("flwr.superlink.cli.flower_superlink")  # the package has a function of the module's name
    guard(theirs, "run", () if "--insecure" in sys.argv else OPEN_TO_SITES)
    theirs.flower_superlink()


def guard(flower: Any, name: str, open_to_sites: tuple[str, ...] = ()) -> None:
    """Put a door before what this module of Flower's serves by `uvicorn.run` or `uvicorn.Config`."""
    from redgrape.flower.doors import TABLES, Bounded, Door, signed_by_a_site

    serve = getattr(getattr(flower, "uvicorn", None), name, None)
    if serve is None:
        sys.exit("this version of Flower serves in an unknown way, and could not be closed to others")
    if not (TABLES / "tcp").exists():
        sys.exit(f"there is no {TABLES / 'tcp'}, which tells whose a connection is: this needs Linux")

    def behind_a_door(app: Any, **options: Any) -> Any:
        knows = signed_by_a_site(app.state.linkstate_factory.state) if open_to_sites else None
        # An address from a header would be whatever the other side likes.
        own = {"http": Bounded, "ws": "none", "proxy_headers": False}
        return serve(Door(app, open_to_sites, knows), **{**options, **own})

    flower.uvicorn = SimpleNamespace(**{**vars(flower.uvicorn), name: behind_a_door})


def supernode() -> None:
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection, start_client_internal

    theirs = import_module("flwr.supernode.cli.flower_supernode")
    guard(theirs, "Config")
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    patient = SimpleNamespace(**{name: getattr(time, name) for name in dir(time) if not name.startswith("_")})
    look = float(os.environ.get(LOOK, POLL))
    patient.sleep = lambda seconds: time.sleep(min(seconds, look))
    start_client_internal.time = patient
    theirs.flower_supernode()


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
