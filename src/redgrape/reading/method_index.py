"""A line on every method: what it does, its message sizes, what it needs and discloses, and its source.

The lines for the default net are in an index, so that a list needs no torch. A test compares it with the methods.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from redgrape import methods

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
_SEEN = (SUMS, ROWS, SINGLE)  # from the least to the most


def lines(net: str = NET, shape: tuple[int, ...] = SHAPE, classes: int = CLASSES) -> list[Line]:
    """A line per method. Methods that are not in the index are measured, and so are all with another net or data."""
    known = _index() if (net, shape, classes) == (NET, SHAPE, CLASSES) else {}
    return [known.get(name) or measure(name, net, shape, classes) for name in methods.names()]


def line(name: str) -> Line | None:
    """The line of a method. A combination needs what its parts need, and discloses what the least private one does."""
    parts = [line for line in lines() if line.method in name.split("+")]
    if len(parts) < 2:
        return parts[0] if parts else None
    needs = tuple(dict.fromkeys(words for part in parts for words in part.needs))
    return replace(parts[0], method=name, needs=needs, discloses=max((p.discloses for p in parts), key=_SEEN.index))


def measure(name: str, net: str = NET, shape: tuple[int, ...] = SHAPE, classes: int = CLASSES) -> Line:
    """Run a round of this method on synthetic data."""
    from redgrape.runs.message_sizes import payload

    method = methods.load(name)
    size = payload(method(), net, shape, classes)
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
        discloses=SINGLE if method().needs_single() else ROWS if size.names_classes else SUMS,
        source=method.fidelity.partition(";")[0],
    )


def write() -> None:
    content = [asdict(measure(name)) for name in methods.names()]
    FILE.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _index() -> dict[str, Line]:
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return {line["method"]: Line(**{**line, "needs": tuple(line["needs"])}) for line in content}
