"""A suite: the cells of a table or figure, each an experiment."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from pydantic import Field

from redgrape.errors import ConfigError
from redgrape.reading.run_view import flat
from redgrape.runs.checksums import hash_of
from redgrape.runs.environment import file_digests
from redgrape.runs.experiment import Experiment
from redgrape.runs.values import put
from redgrape.validation import Strict

Label: TypeAlias = bool | int | float | str | list[Any]

EACH = "each client"  # data.alone of a cell that is a run for each client
UNDECISIVE = ("checkpoint_every", "evaluate_every")  # keys that change no result


class Rule(Strict):
    """Sets experiment keys for the cells whose labels or scale match `when`."""

    when: dict[str, Label] = Field(default_factory=dict)
    set: dict[str, Any] = Field(default_factory=dict)
    departure: str = Field(
        "", description="how this differs from the paper, or what it takes where the paper is silent"
    )

    def fits(self, labels: Mapping[str, Label]) -> bool:
        return all(axis in labels and labels[axis] in alternatives(wanted) for axis, wanted in self.when.items())


@dataclass(frozen=True)
class Cell:
    """One run of a suite."""

    labels: Mapping[str, Label]
    experiment: Experiment
    after: Cell | None = None  # the cell whose final model is the initial one of this
    started: str = ""  # the digest of that cell's final state, once it is known

    @cached_property
    def identity(self) -> str:
        known = identity(self.experiment, file_digests(self.experiment))
        if self.after is None or self.experiment.start is not None:
            return known
        return _started(known, self.started or self.after.identity)

    @property
    def seed(self) -> int:
        return self.experiment.seed

    @property
    def name(self) -> str:
        """A readable name, unique in the suite: the values on all axes, the client if it is alone, and the seed."""
        alone = self.experiment.data.alone
        client = [] if alone is None else [f"client {alone}"]
        labels = [label_text(axis, value) for axis, value in self.labels.items()]
        return ", ".join([*labels, *client, f"seed {self.seed}"])

    @property
    def folder(self) -> str:
        words = "-".join(text(value) for value in self.labels.values())
        return f"{re.sub(r'[^A-Za-z0-9.]+', '_', words).strip('_.')[:80].lower()}-seed{self.seed}-{self.identity[:8]}"


def identity(experiment: Experiment, file_hashes: Mapping[str, str]) -> str:
    """A hash that is equal for runs with equal results. It ignores how often they save or evaluate, and the name of the
    preset, whose values are all included. The last ten rounds are always evaluated. How often counts if evaluations
    decide which model is kept. Of a run that it starts from, the final state counts and not its path."""
    values = experiment.resolved()
    ignored = ["start", "checkpoint_every"] if experiment.is_validated else ["start", *UNDECISIVE]
    decisive = {name: value for name, value in values.items() if name not in ignored}
    method = {name: value for name, value in values["method"].items() if name != "preset"}
    files = {name: digest for name, digest in file_hashes.items() if name != experiment.start}
    own = hash_of({**decisive, "method": method, "files": files})
    return own if experiment.start is None else _started(own, file_hashes[experiment.start])


def _started(identity: str, state: str) -> str:
    return hash_of({"identity": identity, "start": state})


@dataclass(frozen=True)
class Suite:
    name: str
    title: str
    axes: Mapping[str, Sequence[Label]]
    rows: Sequence[str]
    columns: Sequence[str]
    measures: Sequence[str]
    claim: str = ""
    home: str = ""  # the suite whose folder holds the runs
    references: Sequence[str] = ()
    ranked: bool = False
    seeds: Mapping[str, Sequence[int]] = field(default_factory=dict)
    experiment: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)  # axes that are keys of the experiment
    rules: Sequence[Rule] = ()
    after: Mapping[str, str] = field(default_factory=dict)  # methods that start from the final model of another
    on: str = "test"  # the examples that the figures are of
    paper: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)

    def cells(self, scale: str, seeds: Sequence[int] | None = None, only: Sequence[str] = ()) -> list[Cell]:
        """The cells at this scale, with seeds innermost, and there the clients alone. `only` selects some of them."""
        every = [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]
        if self.seeds.get(scale) == []:
            raise ConfigError(f"'{self.name}' has no scale '{scale}'; choose another with --scale")
        seeds = self.seeds.get(scale, [0]) if seeds is None else seeds
        chosen = self._chosen(every, only)
        return [cell for labels in chosen for seed in seeds for cell in self._cells(labels, scale, seed)]

    def _cells(self, labels: Mapping[str, Label], scale: str, seed: int) -> list[Cell]:
        after = None
        if labels.get("method") in self.after:
            (after,) = self._cells({**labels, "method": self.after[str(labels["method"])]}, scale, seed)
        return [Cell(labels, experiment, after) for experiment in self._experiments(labels, scale, seed)]

    def _experiments(self, labels: Mapping[str, Label], scale: str, seed: int) -> list[Experiment]:
        """One, or one for each client alone."""
        values = {**self._values(labels, scale), "seed": seed}
        try:
            if flat(values).get("data.alone") != EACH:
                return [Experiment.parse(values)]
            first = Experiment.parse(_merged(values, {"data": {"alone": "0"}}))
            others = [_merged(values, {"data": {"alone": str(k)}}) for k in range(1, first.data.clients)]
            return [first, *map(Experiment.parse, others)]
        except ConfigError as error:
            named = ", ".join(label_text(axis, value) for axis, value in labels.items())
            raise ConfigError(f"{self.name}: {named}: {error}") from error

    def _values(self, labels: Mapping[str, Label], scale: str) -> dict[str, Any]:
        values = _merged({}, self.experiment)
        for rule in self.rules:
            if rule.fits({**labels, "scale": scale}):
                values = _merged(values, rule.set)
        for axis, label in labels.items():
            if axis in self.keys:
                put(values, self.keys[axis], label)
        return values

    def row(self, labels: Mapping[str, Label]) -> str:
        return ", ".join(text(labels[axis]) for axis in self.rows)

    def column(self, labels: Mapping[str, Label]) -> tuple[str, ...]:
        return tuple(label_text(axis, labels[axis]) for axis in self.columns)

    def all_rows(self) -> list[str]:
        return [", ".join(map(text, values)) for values in itertools.product(*[self.axes[axis] for axis in self.rows])]

    def all_columns(self) -> list[tuple[str, ...]]:
        return list(itertools.product(*[[label_text(axis, v) for v in self.axes[axis]] for axis in self.columns]))

    def paper_value(self, row: str, column: tuple[str, ...], measure: str) -> float | None:
        """The figure of the paper, in percent."""
        values = self.paper.get(measure, {}).get(row)
        return None if values is None else values[self.all_columns().index(column)]

    def cuts(self, scale: str, seeds: Sequence[int] | None = None, only: Sequence[str] = ()) -> list[str]:
        """How these cells differ from the scale `paper`, one line per key, found by comparing experiments."""
        here, there = self.cells(scale, [0], only), self.cells("paper", [0], only)
        found: dict[str, dict[tuple[str, str], list[Mapping[str, Label]]]] = {}
        for cell, full in zip(here, there, strict=True):
            values, paper = flat(cell.experiment.resolved()), flat(full.experiment.resolved())
            for key in values.keys() | paper.keys():
                pair = text(paper.get(key, "none")), text(values.get(key, "none"))
                found.setdefault(key, {}).setdefault(pair, []).append(cell.labels)
        lines = []
        for key, pairs in sorted(found.items()):
            changes = [
                f"{now} instead of {was}{self._among(labels, [c.labels for c in here])}"
                for (was, now), labels in pairs.items()
                if was != now and key not in UNDECISIVE
            ]
            lines += [f"{key}: {'; '.join(changes)}"] if changes else []
        ours = len(self.seeds.get(scale, [0]) if seeds is None else seeds)
        theirs = len(self.seeds.get("paper", [0]))
        return lines if ours == theirs else [*lines, f"seeds: {ours} instead of {theirs}"]

    def departures(self, scale: str, only: Sequence[str] = ()) -> list[str]:
        """How these cells differ from the paper at every scale, as their rules state. A rule counts unless later ones
        replace all that it sets."""
        cells = [cell.labels for cell in self.cells(scale, [0], only)]
        return [r.departure for r in self.rules if r.departure and any(self._holds(r, at, scale) for at in cells)]

    def _holds(self, rule: Rule, labels: Mapping[str, Label], scale: str) -> bool:
        """Whether the rule fits the cell and something that it sets, if anything, is there in the end."""
        values = flat(self._values(labels, scale))
        kept = not rule.set or any(values.get(key) == value for key, value in flat(rule.set).items())
        return kept and rule.fits({**labels, "scale": scale})

    def _among(self, some: Sequence[Mapping[str, Label]], every: Sequence[Mapping[str, Label]]) -> str:
        """Describe these cells with as few axes as possible."""
        if len(some) == len(every):
            return ""
        for count in range(1, len(self.axes) + 1):
            for axes in itertools.combinations(self.axes, count):
                kinds = list(dict.fromkeys(tuple(text(labels[axis]) for axis in axes) for labels in some))
                if sum(tuple(text(labels[axis]) for axis in axes) in kinds for labels in every) == len(some):
                    return f" ({', '.join(' '.join(kind) for kind in kinds)})"
        return ""

    def _chosen(self, every: list[dict[str, Label]], only: Sequence[str]) -> list[dict[str, Label]]:
        """Terms on the same axes are alternatives. Terms on different axes must all hold."""
        wanted: dict[tuple[str, ...], dict[str, set[str]]] = {}
        for term in only:
            matches = self._matches(term)
            group = wanted.setdefault(tuple(matches), {})
            for axis, labels in matches.items():
                group.setdefault(axis, set()).update(labels)
        return [
            labels
            for labels in every
            if all(any(text(labels[axis]) in good for axis, good in group.items()) for group in wanted.values())
        ]

    def _matches(self, term: str) -> dict[str, list[str]]:
        """The labels, by axis, that match a term such as `mnist` or `ir=100`: the label itself, or else those with this
        source or method, or else those that contain it."""
        axis, equals, value = term.partition("=")
        axes = [axis] if equals else list(self.axes)
        word = _plain(value if equals else term)
        found: dict[str, list[str]] = {}
        if word and set(axes) <= set(self.axes):
            names = {axis: {text(label): self._aliases(axis, label) for label in self.axes[axis]} for axis in axes}
            same = {axis: [t for t in names[axis] if word == _plain(t)] for axis in axes}
            equal = {axis: [t for t, words in names[axis].items() if word in words] for axis in axes}
            part = {axis: [t for t, words in names[axis].items() if any(word in w for w in words)] for axis in axes}
            best = next((matches for matches in (same, equal, part) if any(matches.values())), {})
            found = {axis: labels for axis, labels in best.items() if labels}
        if not found:
            there = "; ".join(f"{axis} {', '.join(map(text, values))}" for axis, values in self.axes.items())
            raise ConfigError(f"--only '{term}' names nothing of {self.name}; there is {there}")
        return found

    def _aliases(self, axis: str, label: Label) -> set[str]:
        """The label, and its source or method in the rules: `cifar10` is not a part of CIFAR-100-LT."""
        words = {_plain(text(label))}
        for rule in self.rules:
            if rule.when.keys() == {axis} and alternatives(rule.when[axis]) == [label]:
                words |= {
                    _plain(rule.set[section][key])
                    for section, key in (("data", "source"), ("method", "name"))
                    if key in rule.set.get(section, {})
                }
        return words


def text(label: Any) -> str:
    """A label as people write it: 100, not 100.0. Different labels stay different."""
    if isinstance(label, float) and math.isfinite(label):
        return f"{label:g}" if float(f"{label:g}") == label else repr(label)
    return str(label).lower() if isinstance(label, bool) else str(label)


def label_text(axis: str, label: Label) -> str:
    """The label, with its axis if the value alone is unclear."""
    if axis == "ir":
        return f"IR {text(label)}"
    return text(label) if isinstance(label, str) and "." not in axis else f"{axis} {text(label)}"


def alternatives(wanted: Any) -> list[Any]:
    return wanted if isinstance(wanted, list) else [wanted]


def _plain(word: str) -> str:
    """Normalise a name for comparison: fed_focal equals Fed-Focal."""
    return re.sub(r"[^a-z0-9.]", "", word.lower())


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge both, section by section. `changes` takes precedence."""
    merged = dict(values)
    for name, value in changes.items():
        old = merged.get(name, {})
        merged[name] = _merged(old if isinstance(old, dict) else {}, value) if isinstance(value, Mapping) else value
    return merged
