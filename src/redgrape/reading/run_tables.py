"""Tables of runs: mean ± std over seeds. Needs neither torch nor the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redgrape.errors import ConfigError, StorageError
from redgrape.reading import gap, judged, terminal
from redgrape.reading.run_view import EXTRA_DATA, RunView
from redgrape.runs.figures import FIGURES, OF_MANY_CLASSES

TITLES = {
    "accuracy": "overall",
    "balanced": "class-balanced",
    "macro_f1": "macro F1",
    "head": "head",
    "middle": "middle",
    "tail": "tail",
    "many": "classes of > 100",
    "medium": "classes of 20 to 100",
    "few": "classes of < 20",
    "top5": "top 5",
}
SHORT = {**TITLES, "balanced": "balanced", "many": "> 100", "medium": "20 to 100", "few": "< 20"}  # in a terminal
BEST = "of the best round by validation"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class Result:
    """The runs of one method over seeds."""

    label: str
    runs: list[RunView]
    on: str = "test"  # or validation, for choosing hyper-parameters

    def by_seed(self, figure: str) -> dict[int, float]:
        return by_seed((run.experiment["seed"], run.client, self.of_run(run, figure)) for run in self.runs)

    def of_run(self, run: RunView, figure: str) -> float | None:
        return means(run, self.on).get(figure)

    @property
    def seeds(self) -> int:
        return len({run.experiment["seed"] for run in self.runs})

    @property
    def title(self) -> str:
        """The label, marked if the method used extra data."""
        return self.label + (EXTRA_DATA if any(run.uses_extra_data for run in self.runs) else "")

    def per_class(self) -> list[list[float]]:
        """The accuracies of all seeds, for each class."""
        classes = zip(*[_summary(run)["per_class"] for run in self.runs], strict=True)
        return [[value for value in values if value is not None] for values in classes]


def means(run: RunView, on: str = "test") -> dict[str, float | None]:
    """The figures of a finished run: None if no example decides it. Older runs lack some."""
    found = _summary(run)["mean_of_last"] if on == "test" else _summary(run).get("validation")
    if found is None:
        raise ConfigError(f"'{run.path}' was run without a validation set; hold one out with -c data.validation=10")
    return dict(found)


def by_seed(
    figures: Iterable[tuple[int, str, float | None]], together: Callable[[list[float]], float] = mean
) -> dict[int, float]:
    """The figure of each seed, from those of its runs: (seed, client alone, figure). Clients that were trained alone
    give their mean. A seed is left out if it has no figure of a client that another seed has."""
    every = list(figures)
    whole = {}
    for seed in dict.fromkeys(seed for seed, _, _ in every):
        known = [(client, value) for s, client, value in every if s == seed and value is not None]
        if {client for client, _ in known} == {client for _, client, _ in every}:
            whole[seed] = together([value for _, value in known])
    return whole


def counts(results: Sequence[Result]) -> list[int] | None:
    """The smallest number of evaluation examples of each class in any of these runs."""
    known = [judged.counts_of(run.environment, run.summary, r.on) for r in results for run in r.runs]
    return [min(of_class) for of_class in zip(*known, strict=True)] if known and all(known) else None


def notes(results: Sequence[Result]) -> list[str]:
    """Notes on classes with few examples or none, and on what federating gains."""
    environment = results[0].runs[0].environment or {}
    names = [terminal.printable(name) for name in environment.get("class_names", [])]
    few = judged.notes(names, counts(results), environment.get("class_counts"), results[0].on)
    data = results[0].runs[0].experiment["data"]
    if data["imbalance"] == "natural":  # else they are mostly of examples that the cut leaves out
        few += judged.taken(names, environment.get("validation_counts"), environment.get("class_counts"))
    over = judged.over_classes(counts(results))
    runs = [run for result in results for run in result.runs]
    late = [note for run in runs if (note := last_evaluated(run))]
    return [*few, *([f"{TITLES['balanced']} is over {over}"] if over else []), *late, *gap.notes(results)]


def last_evaluated(run: RunView) -> str:
    """A note on a run whose last rounds could not be evaluated."""
    summary, name = _summary(run), terminal.printable(run.path.name)
    if summary.get("best_round") or summary["averaged_rounds"][-1:] == [run.rounds_done]:
        return ""
    if not summary["averaged_rounds"]:
        return f"no round of {name} was evaluated"
    return f"the last round of {name} that was evaluated is {summary['averaged_rounds'][-1]} of {run.rounds_done}"


def collect(runs: Iterable[tuple[str, RunView]], on: str = "test") -> list[Result]:
    """Group finished runs by label, in order of first appearance."""
    results: dict[str, Result] = {}
    for label, run in runs:
        results.setdefault(label, Result(label, [], on)).runs.append(run)
    return list(results.values())


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and the sample standard deviation. The latter is None for fewer than two values."""
    m = mean(values)
    if len(values) < 2:
        return m, None
    return m, math.sqrt(sum((v - m) ** 2 for v in values) / (len(values) - 1))


def cell(by_seed: Mapping[int, float], seeds: int) -> str:
    """`95.3 ± 0.4`, in percent. `seeds`: how many there are."""
    if not by_seed:
        return "–"
    m, std = mean_std(list(by_seed.values()))
    return f"{100 * m:.1f}" + ("" if std is None else f" ± {100 * std:.1f}") + some_of(by_seed, seeds)


def some_of(by_seed: Mapping[int, float], seeds: int) -> str:
    """A mark on a figure that not all seeds have."""
    return "" if len(by_seed) == seeds else f" ({len(by_seed)} of {seeds} seeds)"


def many_classes(results: Sequence[Result]) -> bool:
    """Whether the runs have figures by the training examples of a class, and the top-5 accuracy."""
    return all(figure in means(run, r.on) for r in results for run in r.runs for figure in OF_MANY_CLASSES)


def caption(results: Sequence[Result]) -> str:
    rounds = sorted({len(_summary(run)["averaged_rounds"]) for r in results for run in r.runs} - {0})
    over = f"the last {rounds[0]} evaluated rounds" if len(rounds) == 1 else "the last evaluated rounds"
    over = f"mean of {'the last round' if rounds == [1] else over}"
    over = BEST if all("best_round" in _summary(run) for r in results for run in r.runs) else over
    seeds = ", mean ± standard deviation over seeds" if any(r.seeds > 1 for r in results) else ""
    extra = f";{EXTRA_DATA} uses extra balanced data at the server" if any(r.title != r.label for r in results) else ""
    return f"{results[0].on} accuracy in %, {over}{seeds}{extra}"


def print_table(results: Sequence[Result]) -> None:
    """Print the figures of finished runs."""
    for figures in (FIGURES, *([OF_MANY_CLASSES] if many_classes(results) else [])):
        rows = [[r.title, *[cell(r.by_seed(figure), r.seeds) for figure in figures]] for r in results]
        print(terminal.table(["method", *[SHORT[figure] for figure in figures]], rows))
    print(terminal.paragraph(caption(results)))
    for note in notes(results):
        print(terminal.paragraph(f"note: {note}"))


def _summary(run: RunView) -> dict[str, Any]:
    if run.summary is None:
        raise StorageError(f"'{run.path}' is not finished; continue it with `redgrape resume {run.path}`")
    return run.summary
