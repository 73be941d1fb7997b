"""Processes for Flower's messages, forked from one that has already imported everything.

Flower starts the command `flwr-clientapp` for every message, and importing Flower takes seconds. At a site a script of
the same name comes first in its path. It passes its arguments to the process here, which forks. If that does not
answer, the script runs Flower's own command.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import NoReturn

from redgrape.deploy.processes.supervision import end_with_parent

_SCRIPT = """\
#!{python} -SE
import os, socket, sys
try:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(5)
        link.connect({socket!r})
        link.sendall("\\0".join(sys.argv[1:]).encode())
        link.shutdown(socket.SHUT_WR)
        taken = link.recv(1) == b"+"
except OSError:
    taken = False
if not taken:
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
"""
COMMAND = "flwr-clientapp"


def write_script(folder: Path, listens_at: Path) -> None:
    """Write the script that replaces Flower's command, in its own folder."""
    real = shutil.which(COMMAND, path=str(Path(sys.executable).parent)) or shutil.which(COMMAND)
    if real is None or " " in sys.executable:  # a shebang line cannot hold a path with a space
        return
    script = folder / COMMAND
    script.write_text(_SCRIPT.format(python=sys.executable, socket=str(listens_at), real=real), encoding="utf-8")
    script.chmod(0o700)


def serve(listens_at: Path) -> NoReturn:
    from flwr.supernode.cli import flwr_clientapp

    from redgrape.deploy.processes import client_app  # imported once for all forked processes

    assert client_app.app is not None
    assert threading.active_count() == 1, "a process with threads cannot be forked safely"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(listens_at))
        listening.listen(8)
        while True:
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(5)
                words = _words(connection)
                if words and os.fork() == 0:
                    end_with_parent()
                    listening.close()
                    connection.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    sys.argv = [COMMAND, *words]
                    flwr_clientapp()
                    os._exit(0)


def _words(connection: socket.socket) -> list[str]:
    try:
        data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        connection.sendall(b"+")
    except OSError:
        return []
    return data.decode().split("\0")
