"""Loaded only by the server process that forks the workers. That process always ends with the coordinator.

It takes the workers with it, even one that hangs (see `PR_SET_PDEATHSIG` in pool.py). It also removes the temporary
folder of its socket, which a killed coordinator cannot remove.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import signal
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any


@atexit.register
def _remove_socket() -> None:
    server: Any = forkserver._forkserver
    address = getattr(server, "_forkserver_address", None)
    if isinstance(address, str) and (folder := Path(address).parent).name.startswith("pymp-"):
        shutil.rmtree(folder, ignore_errors=True)


COORDINATOR, SERVER = os.getppid(), os.getpid()


def _end(*_: object) -> None:
    if os.getpid() == SERVER and os.getppid() != COORDINATOR:  # the signal also comes when one of its threads ends
        _remove_socket()
        os._exit(0)


if sys.platform == "linux":
    for number in (signal.SIGCONT, signal.SIGTERM):
        signal.signal(number, _end)
    ctypes.CDLL(None).prctl(1, signal.SIGCONT)  # PR_SET_PDEATHSIG: at the parent's end; also wakes a stopped process
