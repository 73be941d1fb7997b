"""Waits with a deadline: for a call that may never return, and for a process that may never answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from redgrape.errors import RedgrapeError

T = TypeVar("T")

PROMISE = "promise"  # the file of a site's resident process, beside its socket


def within(seconds: float, call: Callable[[], T], otherwise: str) -> T:
    """The result of the call; RedgrapeError with these words if it does not return in time. It cannot be interrupted.
    It is left in a daemon thread, which keeps no process from ending."""
    came: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            came.put((call(), None))
        except BaseException as error:
            came.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        value, error = came.get(timeout=seconds)
    except Empty:
        raise RedgrapeError(otherwise) from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


class Promise:
    """A file in which a process promises a sign of life by some time. Another process checks it. The time is that of
    the monotonic clock, which nobody sets."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def give(self, seconds: float) -> None:
        temporary = self._file.with_name(f"{self._file.name}.new")
        temporary.write_text(str(time.monotonic() + seconds), encoding="utf-8")
        temporary.replace(self._file)

    def withdraw(self) -> None:
        self._file.unlink(missing_ok=True)

    def is_broken(self) -> bool:
        """False also if none was given."""
        try:
            return time.monotonic() > float(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
