"""The file of a suite. Those of the paper are in experiments/suites."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError

from redgrape.errors import ConfigError, unknown
from redgrape.reading.suites import files
from redgrape.reading.suites.cells import Label, Rule, Suite, alternatives, text
from redgrape.runs.figures import FIGURES
from redgrape.runs.values import read_toml
from redgrape.validation import Strict, one_line

Scale: TypeAlias = Literal["paper", "study", "quick"]
M = TypeVar("M", bound=BaseModel)

SCALES: tuple[str, ...] = get_args(Scale)


class Settings(Strict):
    """Settings that all suites of a folder share."""

    experiment: dict[str, Any] = Field(default_factory=dict)
    keys: dict[str, str] = Field(default_factory=dict)
    seeds: dict[str, list[int]] = Field(default_factory=dict)
    rules: list[Rule] = Field(default_factory=list)


class Description(Strict):
    """The file of a suite."""

    title: str
    claim: str = Field("", description="what the paper says")
    cells_of: str | None = Field(None, description="the suite whose cells these are; then this one has no axes")
    axes: dict[str, list[Label]] = Field(default_factory=dict)
    methods: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="labels of the axis `method`, each with the keys that it sets, last of all; `after` names the one "
        "whose final model it starts from",
    )
    methods_of: str | None = Field(None, description="the suite whose methods these are")
    rows: list[str] = Field(default_factory=list, description="the axes that tell the rows apart")
    columns: list[str] = Field(default_factory=list, description="the axes that tell the columns apart")
    measures: list[str]
    references: list[str] = Field(default_factory=list, description="the rows that others are compared with")
    on: Literal["test", "validation"] = Field("test", description="the examples that the figures are of")
    ranked: bool = Field(False, description="one table for each column, the best row first, with costs and needs")
    seeds: dict[str, list[int]] = Field(default_factory=dict)
    rules: list[Rule] = Field(default_factory=list)
    paper: dict[str, dict[str, list[float]]] = Field(
        default_factory=dict, description="the paper's figures: by measure and row, in the order of the columns"
    )


def load(name: str) -> Suite:
    """Load the suite of this name, or your own by its file."""
    if name.endswith(".toml"):
        return read(Path(name))
    if name not in files.names():
        raise unknown("suite", name, files.names())
    return read(files.folder() / f"{name}.toml")


def read(path: Path) -> Suite:
    """Read a suite from its file. Other files that it names, and the shared settings, are beside it or redgrape's."""

    def other(name: str) -> Path:
        beside = path.with_name(f"{name}.toml")
        return beside if beside.is_file() else files.folder() / beside.name

    settings = _parsed(other(files.SETTINGS), Settings)
    described = _parsed(path, Description)
    cells = described if described.cells_of is None else _parsed(other(described.cells_of), Description)
    named = cells if cells.methods_of is None else _parsed(other(cells.methods_of), Description)
    rows = [
        Rule(when={"method": label}, set={key: value for key, value in keys.items() if key != "after"})
        for label, keys in named.methods.items()
    ]
    suite = Suite(
        name=path.stem,
        title=described.title,
        claim=described.claim,
        home=described.cells_of or path.stem,
        axes={**cells.axes, **({"method": [*cells.axes.get("method", []), *named.methods]} if named.methods else {})},
        rows=cells.rows,
        columns=cells.columns,
        measures=described.measures,
        references=cells.references,
        ranked=described.ranked,
        seeds={**settings.seeds, **cells.seeds},
        experiment=settings.experiment,
        keys=settings.keys,
        rules=[*settings.rules, *cells.rules, *rows],
        after={label: keys["after"] for label, keys in named.methods.items() if "after" in keys},
        on=described.on,
        paper=described.paper,
    )
    _check(suite, path)
    return suite


def _check(suite: Suite, path: Path) -> None:
    """Raise ConfigError if the parts of a suite are inconsistent."""

    def require(holds: bool, message: str) -> None:
        if not holds:
            raise ConfigError(f"'{path}': {message}")

    for axis, labels in suite.axes.items():
        require(bool(labels), f"axis '{axis}' has no values")
        shown = axis in (*suite.rows, *suite.columns)
        require(shown or len(labels) == 1, f"axis '{axis}' tells neither rows nor columns apart")
        named = [value for rule in suite.rules for value in alternatives(rule.when.get(axis, []))]
        for label in labels:
            require(axis in suite.keys or label in named, f"no rule says what {axis} '{text(label)}' means")
    for axis in (*suite.rows, *suite.columns):
        require(axis in suite.axes, f"there is no axis '{axis}'")
    for measure in (*suite.measures, *suite.paper):
        require(measure in FIGURES, f"'{measure}' is no measure; choose from {', '.join(FIGURES)}")
    for label, first in suite.after.items():
        known = first in suite.axes["method"] and first not in suite.after
        require(known, f"'{label}' starts from '{first}', which is no line of [methods] that starts by itself")
    for row in suite.references:
        require(row in suite.all_rows(), f"the reference '{row}' is none of the rows")
    for measure, rows in suite.paper.items():
        others = sorted(set(rows) - set(suite.all_rows()))
        require(not others, f"paper.{measure} names no row of the table: {', '.join(others)}")
        for row, values in rows.items():
            require(len(values) == len(suite.all_columns()), f"paper.{measure}.{row} has {len(values)} figures")


def _parsed(path: Path, model: type[M]) -> M:
    try:
        return model.model_validate(read_toml(path))
    except ValidationError as error:
        raise one_line(error, model, path.name) from error
