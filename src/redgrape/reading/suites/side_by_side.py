"""Run several cells at once, in processes with the same work list. Each skips cells that another is running."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from redgrape.engines.pool import uninterrupted, without_main
from redgrape.errors import RedgrapeError
from redgrape.reading.suites.found_cells import Standing


def shares(standings: Sequence[Standing], workers: int, asked: int | None = None) -> tuple[int, int]:
    """The number of cells to run at once, and the workers for each.

    A round of K clients keeps at most K workers busy. So with 2 K workers, two cells at once are faster.
    """
    left = {s.cell.identity: s.cell.experiment for s in standings if not s.finished and not s.obstacle}
    most = max((e.clients_per_round or e.data.clients for e in left.values()), default=workers)
    cells = min(asked or workers // most, len(left)) or 1
    return cells, max(1, workers // cells)


def carry_out(work: Callable[..., object], arguments: Sequence[Any], processes: int) -> None:
    """Call `work` in this many processes. Errors are ignored: the caller repeats the work and meets them again."""
    context = multiprocessing.get_context("spawn")
    started = []
    try:
        for _ in range(processes):
            process = context.Process(target=_carry_out, args=(work, arguments), name="redgrape-cells")
            with uninterrupted(), without_main():
                process.start()
            started.append(process)
        for process in started:
            process.join()
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.join()


def _carry_out(work: Callable[..., object], arguments: Sequence[Any]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: signal sent when the parent ends
    with suppress(KeyboardInterrupt, RedgrapeError):
        work(*arguments)
