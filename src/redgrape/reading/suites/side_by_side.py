"""Several cells at once: processes that do the same work, each passing over what another has in hand."""

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
    """How many cells at once, and with how many workers each.

    A round of K clients keeps K workers busy at most. So where there are 2 K of them, two cells at once are faster.
    """
    left = {s.cell.identity: s.cell.experiment for s in standings if not s.finished and not s.obstacle}
    most = max((e.clients_per_round or e.data.clients for e in left.values()), default=workers)
    cells = min(asked or workers // most, len(left)) or 1
    return cells, max(1, workers // cells)


def carry_out(work: Callable[..., object], arguments: Sequence[Any], processes: int) -> None:
    """Call `work` in so many processes. What goes wrong there is met again by whoever does the work afterwards."""
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
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: when the parent ends
    with suppress(KeyboardInterrupt, RedgrapeError):
        work(*arguments)
