"""The user's own grids as suites. Each axis is written as `key=v1,v2`."""

from __future__ import annotations

import tomllib
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from redgrape.errors import ConfigError
from redgrape.reading.suites.cells import Label, Suite
from redgrape.runs.figures import FIGURES
from redgrape.runs.values import override


def suite(
    name: str,
    experiment: Mapping[str, Any],
    assignments: Sequence[str],
    seeds: Sequence[int],
    reference: str | None = None,
) -> Suite:
    """All combinations of the values, one row each. Rows are compared with the reference, by default the first row."""
    axes: dict[str, Sequence[Label]] = {}
    for assignment in assignments:
        key = new_key(assignment, axes)
        axes[key] = labels(assignment)
    if not axes:
        raise ConfigError("a grid needs at least one axis, for example method.lam=0.01,0.1,1")
    made = Suite(
        name=name,
        title=f"Sweep over {', '.join(axes)}",
        axes=axes,
        rows=list(axes),
        columns=[],
        measures=FIGURES,
        home=name,
        seeds={"sweep": seeds},
        experiment=experiment,
        keys={key: key for key in axes},
    )
    rows = made.all_rows()
    if reference is not None and reference not in rows:
        raise ConfigError(f"--reference '{reference}' is none of the rows: {'; '.join(rows)}")
    return replace(made, references=[reference or rows[0]])


def tuning(axes: Mapping[str, Sequence[Label]]) -> list[str]:
    """A warning if a grid over hyper-parameters is evaluated on the test set."""
    varied = [key for key, values in axes.items() if len(values) > 1 and key.startswith(("method.", "net."))]
    chosen = ", ".join(key for key in varied if key != "method.name")
    advice = "choose with -c data.validation=10 --on validation"
    return [f"choosing {chosen} by test accuracy is tuning on the test set; {advice}"] if chosen else []


def new_key(assignment: str, known: Container[str]) -> str:
    """The key of `method.lam=0.1,1`, which is none of the known ones."""
    key, _, text = map(str.strip, assignment.partition("="))
    if not key or not text:
        raise ConfigError(f"'{assignment}' is not of the form key=value,value, for example method.lam=0.01,0.1,1")
    if key in known:
        raise ConfigError(f"'{key}' is named twice; give all of its values at once, {key}=v1,v2")
    if key == "seed":
        raise ConfigError("seeds are no axis of a grid; pass them with --seeds 0,1,2")
    return key


def labels(assignment: str) -> list[Label]:
    """The values of `method.lam=0.1,1`. Each is read as by -c."""
    key, _, text = assignment.partition("=")
    values = [value(key, part) for part in split(text)]
    if len({repr(v) for v in values}) < len(values):
        raise ConfigError(f"'{assignment}' names a value twice")
    return values


def value(key: str, text: str) -> Label:
    read: dict[str, Any] = {}
    override(read, f"value={text.strip()}")
    found = read["value"]
    if not isinstance(found, bool | int | float | str | list):
        raise ConfigError(f"'{text}' is no value for {key}")
    return found


def split(text: str) -> list[str]:
    """Split at commas, except inside brackets or quotes: `[0,1],[2]` is two values."""
    parts, part = [], ""
    for piece in text.split(","):
        part = f"{part},{piece}" if part else piece
        if _is_whole(part):
            parts.append(part)
            part = ""
    return [*parts, part] if part else parts


def _is_whole(text: str) -> bool:
    if not text.strip().startswith(("[", '"', "'")):
        return True
    try:
        tomllib.loads(f"value = {text}")
    except ValueError:
        return False
    return True
