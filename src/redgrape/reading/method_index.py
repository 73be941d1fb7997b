"""A line on every method: what it does, its message sizes, what it needs and discloses, and its source.

The lines for the default net are in an index, so that a list needs no torch. A test compares it with the methods.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from redgrape import methods
from redgrape.errors import RedgrapeError

if TYPE_CHECKING:
    from redgrape.method import Method
    from redgrape.runs.experiment import Experiment

FILE = Path(methods.__file__).with_name("index.json")
NET, SHAPE, CLASSES = "cnn", (1, 28, 28), 10


@dataclass(frozen=True)
class Line:
    method: str
    what: str
    down: int  # bytes that a client receives in a round
    up: int  # bytes that it sends
    needs: tuple[str, ...]
    discloses: str  # what the server sees of a client, at best
    source: str

    @property
    def is_summable(self) -> bool:
        return self.discloses == SUMS


SUMS = "sums alone, if it aggregates securely"
ROWS = "which classes a client holds, and a row of each, unless floors keep them back"
SINGLE = "each client's update"


def lines(net: str = NET, shape: tuple[int, ...] = SHAPE, classes: int = CLASSES) -> list[Line]:
    """A line per method. Methods that are not in the index are measured, and so are all with another net or data."""
    known = _index() if (net, shape, classes) == (NET, SHAPE, CLASSES) else {}
    return [known.get(name) or measure(name, net, shape, classes) for name in methods.names()]


def line_of(experiment: Experiment) -> Line | None:
    """The line of an experiment's method with its own settings, and the sizes of a small net. None if that cannot be
    measured, or if it is a user's own method, whose code is not run."""
    name = experiment.method.name
    parts = [line for line in lines() if line.method in name.split("+")]
    if not parts:
        return None
    rounds = min(experiment.rounds, 2)  # some need two, and then the second is looked at
    try:
        own = _measured(name, experiment.method.create(), "mlp", (4,), 3, rounds)
    except RedgrapeError:
        return None
    in_order = [words for part in parts for words in part.needs]
    return replace(own, needs=tuple(sorted(own.needs, key=[*in_order, *own.needs].index)))


def measure(name: str, net: str = NET, shape: tuple[int, ...] = SHAPE, classes: int = CLASSES) -> Line:
    """Run a round of this method on synthetic data."""
    return _measured(name, methods.load(name)(), net, shape, classes)


@cache  # a table asks for every column and format
def _measured(name: str, method: Method, net: str, shape: tuple[int, ...], classes: int, rounds: int = 1) -> Line:
    from redgrape.runs.message_sizes import payload

    size = payload(method, net, shape, classes, rounds)
    needs = {
        "balanced data at the server": method.uses_auxiliary,
        "state at the clients": bool(size.kept),
        "the clients' summed class counts": size.surveyed,
    }
    return Line(
        method=name,
        what=(method.__doc__ or "").strip().partition("\n")[0],
        down=size.down,
        up=size.up,
        needs=tuple(words for words, holds in needs.items() if holds),
        discloses=SINGLE if method.needs_single() else ROWS if size.names_classes else SUMS,
        source=method.fidelity.partition(";")[0],
    )


def write() -> None:
    content = [asdict(measure(name)) for name in methods.names()]
    FILE.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _index() -> dict[str, Line]:
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return {line["method"]: Line(**{**line, "needs": tuple(line["needs"])}) for line in content}
