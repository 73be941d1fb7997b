"""Flower's own SuperLink, SuperNode and commands with the settings of a deployment. The first argument selects one.

Four things cannot be set by their options and are set here. The first two are required: if they cannot be set, nothing
is started.

- The SuperLink answers everything on one port: sites, but also anyone who wants to register a key, start a run or act
  as its server, without authentication. A SuperNode likewise answers anyone who wants to act in its place. Here only
  the sites' part is open, and the rest is only for processes of the same user (doors.py).
- A SuperNode runs whatever app the server sends. Here it runs only the one that its site.toml names.
- A SuperNode polls for messages every three seconds, which is most of a short round.
- A killed site counts as connected for a minute, and is refused for that time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from redgrape.deploy.processes.supervision import APP, LOOK, POLL, end_with_parent

HEARTBEAT = 10  # seconds; the minimum that the SuperLink accepts
END = "\x1e"
NOT_RUN = "not run: "  # prefix of a SuperNode's message about an app that is not the site's
OPEN_TO_SITES = ("/v1/fleet/", "/health")


def superlink() -> None:
    theirs = import_module("flwr.superlink.cli.flower_superlink")  # the package has a function with the module's name
    guard(theirs, "run", () if "--insecure" in sys.argv else OPEN_TO_SITES)
    theirs.flower_superlink()


def guard(flower: Any, name: str, open_to_sites: tuple[str, ...] = ()) -> None:
    """Put a door in front of what this Flower module serves by `uvicorn.run` or `uvicorn.Config`."""
    from redgrape.deploy.processes.doors import TABLES, Bounded, Door, signed_by_a_site

    serve = getattr(getattr(flower, "uvicorn", None), name, None)
    if serve is None:
        sys.exit("this version of Flower serves in an unknown way, and could not be closed to others")
    if not (TABLES / "tcp").exists():
        sys.exit(f"there is no {TABLES / 'tcp'}, which tells whose a connection is: this needs Linux")

    def behind_a_door(app: Any, **options: Any) -> Any:
        knows = signed_by_a_site(app.state.linkstate_factory.state) if open_to_sites else None
        # The other side could put any address into a header.
        own = {"http": Bounded, "ws": "none", "proxy_headers": False}
        return serve(Door(app, open_to_sites, knows), **{**options, **own})

    flower.uvicorn = SimpleNamespace(**{**vars(flower.uvicorn), name: behind_a_door})


def supernode() -> None:
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection, start_client_internal

    theirs = import_module("flwr.supernode.cli.flower_supernode")
    guard(theirs, "Config")
    pin(start_client_internal, os.environ[APP])
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    patient = SimpleNamespace(**{name: getattr(time, name) for name in dir(time) if not name.startswith("_")})
    look = float(os.environ.get(LOOK, POLL))
    patient.sleep = lambda seconds: time.sleep(min(seconds, look))
    start_client_internal.time = patient
    try:
        theirs.flower_supernode()
    finally:
        # Its HTTP server runs in a thread. If the SuperLink is away for too long, the SuperNode gives up. That thread
        # would keep the process alive, and nobody would start it again.
        logging.shutdown()
        os._exit(1)


class OtherApp(Exception):
    """The server sent an app that is not the site's; the message says which."""


def pin(flower: Any, app: str) -> None:
    """Let this Flower module accept only the app with this hash, and answer messages for another with an error. The
    run's name for its app decides the folder an installed app is loaded from, so that name must be the app's own."""
    from flwr.app import Error, Message
    from flwr.cli.config_utils import get_fab_metadata
    from flwr.common.constant import ErrorCode

    pull = getattr(flower, "_pull_and_store_message", None)
    if pull is None:
        sys.exit("this version of Flower takes apps in an unknown way, and could not be held to the site's own")

    def pull_pinned(*, state: Any, object_store: Any, receive: Any, get_run: Any, get_fab: Any, **more: Any) -> Any:
        messages, runs = [], []

        def received() -> Any:
            messages.append(receive())
            return messages[-1]

        def run_of(number: int) -> Any:
            runs.append(get_run(number))
            return runs[-1]

        def checked(name: str, run: int) -> Any:
            fab = get_fab(name, run)
            found = hashlib.sha256(fab.content).hexdigest()
            if found != app:
                raise OtherApp(f"the server's app is {found}, and this site runs only {app} (app in its site.toml)")
            named = fab.hash_str, runs[-1].fab_hash, runs[-1].fab_id, runs[-1].fab_version
            if named != (app, app, *get_fab_metadata(fab.content)):
                raise OtherApp("the server calls its app by another name than the app itself, which is not run")
            return fab

        own = {"receive": received, "get_run": run_of, "get_fab": checked}
        try:
            return pull(state=state, object_store=object_store, **own, **more)
        except OtherApp as error:
            message = messages[-1][0]
            print(f"{NOT_RUN}{error}", flush=True)
            answer = Message(Error(ErrorCode.INVALID_FAB, str(error)), reply_to=message)
            flower._insert_message(answer, state, object_store)
            return message.metadata.run_id

    flower._pull_and_store_message = pull_pinned


def clientapps() -> None:
    from redgrape.deploy.processes import fork_server

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    fork_server.serve(Path(sys.argv[1]))


def commands() -> None:
    """Run several `flwr` commands in one process, because a process takes seconds to start. Standard input holds a list
    of words for each. The output of each is followed by END."""
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
