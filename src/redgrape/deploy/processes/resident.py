"""A site's resident process keeps the data and the net's code in memory and answers over a local socket.

Flower starts a process for every message, which would have to load torch and the data each time. Instead it only passes
the question on (client_app.py). The socket lies in a folder that only the site's user can enter.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
from pathlib import Path

import torch

from redgrape.deploy.processes.supervision import end_with_parent
from redgrape.deploy.protocol import messages, wire
from redgrape.deploy.protocol.deadlines import PROMISE, Promise
from redgrape.deploy.protocol.site import DeployedSite
from redgrape.deploy.setup.folder import SiteFolder
from redgrape.errors import RedgrapeError

READ_DEADLINE = 60.0  # seconds for the rest of a question to arrive
BEAT = 5.0  # seconds between two signs of life of an idle process
SLACK = 3 * READ_DEADLINE  # seconds beyond its deadlines after which it counts as hung


def serve(site: DeployedSite, listening: socket.socket, promise: Promise) -> None:
    """Answer questions one after another, for ever, and promise each time when the answer will be ready."""
    listening.settimeout(BEAT)
    while True:
        promise.give(SLACK)
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        with connection:
            connection.settimeout(READ_DEADLINE)
            try:
                header, parts = wire.receive(connection)
                promise.give(messages.deadline_of(header) + SLACK)
                wire.send(connection, *site.answer(header, parts))
            except (OSError, wire.NotUnderstood) as error:  # the asker has gone; another may still come
                print(f"a question could not be answered: {error}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A site's resident process.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    options = parser.parse_args()
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    torch.set_num_threads(1)
    try:
        site = DeployedSite(SiteFolder(options.folder), options.data)
    except RedgrapeError as error:
        print(json.dumps({"error": str(error), "exit_code": error.exit_code}), flush=True)
        sys.exit(error.exit_code)
    with socket.socket(socket.AF_UNIX) as listening:
        options.socket.unlink(missing_ok=True)
        listening.bind(str(options.socket))
        options.socket.chmod(0o600)
        listening.listen(4)
        print(json.dumps({"ready": True, "counts": site.counts(), "test": len(site.test)}), flush=True)
        serve(site, listening, Promise(options.socket.with_name(PROMISE)))


if __name__ == "__main__":
    main()
