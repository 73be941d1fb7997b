"""Progress of a run: a live bar in a terminal, plain lines elsewhere, JSON lines for machines."""

from __future__ import annotations

import json
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from redgrape.reading.terminal import duration, printable

if TYPE_CHECKING:
    from redgrape.training import Step


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


class Progress:
    """`heading` stands above the bar or the lines. It is the label, unless there are several runs."""

    def __init__(
        self, label: str, done: int, rounds: int, *, heading: str = "", as_json: bool = False, quiet: bool = False
    ) -> None:
        self._label, self._rounds, self._json, self._quiet = printable(label), rounds, as_json, quiet
        self._heading = printable(heading)
        self._seconds: list[float] = []
        self._bar: Any = None
        self._task: Any = None
        self._embedding: Any = None
        if sys.stderr.isatty() and not as_json and not quiet:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            if done < rounds:
                self._heading = self._heading or self._label
            columns = (  # 80 columns hold all of it
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=12),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}", markup=False),
                TextColumn("{task.fields[figures]}", markup=False),
            )
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("round", total=rounds, completed=done, left="", figures="starting")

    def step(self, step: Step) -> None:
        record = step.record
        if self._quiet:
            return
        if self._json:
            print(json.dumps({"run": self._label, **record, "seconds": step.seconds}), flush=True)
            return
        self._seconds.append(sum(step.seconds.values()))
        left = self._left(record["round"])
        if self._bar is not None:
            self._bar.update(self._task, completed=record["round"], left=left, figures=self._figures(record))
        else:
            line = f"{self._label}  round {record['round']}/{self._rounds}  {self._figures(record)}"
            print(f"{line}  {self._seconds[-1]:.1f} s{left and f', {left}'}", file=sys.stderr, flush=True)

    def _left(self, round: int) -> str:
        """The time left, by the mean of the rounds so far. The first round also starts the workers."""
        timed = self._seconds[1:] or self._seconds
        seconds = (self._rounds - round) * sum(timed) / len(timed)
        return f"{duration(seconds)} left" if round < self._rounds else ""

    def embedding(self, done: int, total: int) -> None:
        """Examples whose features are computed before the first round."""
        if self._bar is not None:
            if self._embedding is None:
                self._embedding = self._bar.add_task("embedding", left="", figures="")
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
        if self._heading and not self._json and not self._quiet:
            print(self._heading, file=sys.stderr, flush=True)
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
