"""Progress of a run: a live bar in a terminal, plain lines elsewhere, JSON lines for machines."""

from __future__ import annotations

import json
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from redgrape.reading.terminal import printable

if TYPE_CHECKING:
    from redgrape.training import Step


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


class Progress:
    def __init__(self, label: str, done: int, rounds: int, *, as_json: bool = False, quiet: bool = False) -> None:
        self._label, self._rounds, self._json, self._quiet = printable(label), rounds, as_json, quiet
        self._bar: Any = None
        self._task: Any = None
        self._embedding: Any = None
        if sys.stderr.isatty() and not as_json and not quiet:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description:<28}", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}", markup=False),
            )
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(self._label, total=rounds, completed=done, figures="starting")

    def step(self, step: Step) -> None:
        record = step.record
        if self._quiet:
            return
        if self._json:
            print(json.dumps({"run": self._label, **record, "seconds": step.seconds}), flush=True)
        elif self._bar is not None:
            self._bar.update(self._task, completed=record["round"], figures=self._figures(record))
        else:
            seconds = sum(step.seconds.values())
            line = f"{self._label}  round {record['round']}/{self._rounds}  {self._figures(record)}  {seconds:.1f} s"
            print(line, file=sys.stderr, flush=True)

    def embedding(self, done: int, total: int) -> None:
        """Examples whose features are computed before the first round."""
        if self._bar is not None:
            if self._embedding is None:
                self._embedding = self._bar.add_task("embedding", figures="")
            self._bar.update(self._embedding, completed=done, total=total, visible=done < total)
        elif done == total and not self._json and not self._quiet:
            print(f"{self._label}  embedded {total} examples", file=sys.stderr, flush=True)

    def _figures(self, record: dict[str, Any]) -> str:
        loss = record.get("train_loss")
        parts = [] if loss is None else [f"loss {loss:.3f}"]
        if record.get("rejected"):
            parts += [f"{len(record['rejected'])} rejected"]
        if "test" in record:
            parts += [f"{name} {percent(record['test'][name])}" for name in ("accuracy", "tail")]
        return "  ".join(parts)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
