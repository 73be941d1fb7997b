"""Tables (mean ± std over seeds) and figures from run folders. Read-only; needs neither torch nor the data."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redgrape.errors import ConfigError, StorageError, install
from redgrape.reading import gap, judged, records, terminal
from redgrape.runs import checksums, durable
from redgrape.runs.checksums import hash_of
from redgrape.runs.figures import FIGURES, LONGEST, OF_MANY_CLASSES

EXTRA_DATA = " †"
ALWAYS = ("accuracy", "balanced", "head", "middle", "tail")  # by every redgrape
TELLTALE = ("experiment.toml", "environment.json", "metrics.jsonl")  # files of a run folder
TRIES = 3  # a run may be written to while it is read
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
POINTS = 100  # with very many classes, a figure shows the means of this many neighbourhoods


@dataclass(frozen=True)
class RunView:
    """A run folder or a record as a reader sees it, finished or not."""

    path: Path
    experiment: dict[str, Any]
    environment: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    summary: dict[str, Any] | None
    cost: dict[str, float | None] = field(default_factory=dict)  # of the run: bytes_down, bytes_up, seconds

    @classmethod
    def recorded(cls, path: Path) -> RunView:
        """Read a record, FILE/NAME. Of its rounds it has the evaluated ones."""
        known = records.read(path.parent)
        if path.name not in known:
            raise StorageError(f"'{path.parent}' has no record '{path.name}'")
        return cls(path, **known[path.name])

    @classmethod
    def read(cls, path: Path) -> RunView:
        """Read a run folder. All readers use this. It checks the files against their checksums and against each other.
        It raises StorageError if they do not match. It takes no lock and loads no method."""
        if path.parent.is_file():
            raise StorageError(f"'{path}' is a record, without weights and lists of clients; name the folder of a run")
        for _ in range(TRIES - 1):
            with suppress(StorageError):
                return cls._read(path)
        return cls._read(path)

    @classmethod
    def _read(cls, path: Path) -> RunView:
        try:
            manifests = _manifests(path)  # before the lines, which are written before their manifest
            experiment = tomllib.loads(_content(path / "experiment.toml").decode())
            summary = _json(_whole(path / "summary.json"))
            environment = _json(_whole(path / "environment.json"))
            lines = _whole(path / "metrics.jsonl") or b""
            metrics = [json.loads(line) for line in lines.split(b"\n")[:-1]]
            _check_experiment(path, experiment, [*manifests, *([] if summary is None else [summary])])
            _check_lines(path, lines, metrics, manifests)
            if summary is not None and summary["rounds"] != experiment["rounds"]:
                summary = None  # from before the run was extended
            if summary is not None:
                _check_summary(path, summary, metrics, environment)
            view = cls(path, experiment, environment, metrics, summary, _cost(path, metrics))
            view.row()
        except (OSError, ValueError, RecursionError) as error:
            raise StorageError(f"'{path}' cannot be read as a run: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise StorageError(f"'{path}' cannot be read as a run: missing or invalid entry: {error}") from error
        return view

    def row(self) -> dict[str, Any]:
        """A summary of the run, as a table row."""
        mean = self.summary["mean_of_last"] if self.summary else {}
        data = self.experiment["data"]
        return {
            "run": str(self.path),
            "method": self.label + (EXTRA_DATA if self.uses_extra_data else ""),
            "data": f"{Path(data['source']).stem} {data['imbalance']}" + _ratio(data),
            "seed": self.experiment["seed"],
            "done": self.rounds_done,
            "rounds": self.experiment["rounds"],
            "accuracy": mean.get("accuracy"),
            "tail": mean.get("tail"),
        }

    @property
    def rounds_done(self) -> int:
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    @property
    def label(self) -> str:
        return run_label(self.experiment["method"]) + gap.baseline(self.experiment) + started(self.experiment)

    @property
    def uses_extra_data(self) -> bool:
        return bool(self.summary and self.summary.get("extra_data"))


def _ratio(data: dict[str, Any]) -> str:
    return "" if data["imbalance"] == "natural" else f" IR {data['ir']:g}"


def run_label(method: dict[str, Any]) -> str:
    """The name of the method, with its preset unless that is `paper`."""
    name = Path(method["name"]).stem
    return name if method.get("preset", "paper") == "paper" else f"{name} ({method['preset']})"


def started(experiment: Mapping[str, Any]) -> str:
    """` on NAME` if the run started from the model of the run in the folder NAME, else empty."""
    return f" on {Path(experiment['start']).name}" if "start" in experiment else ""


def other_data(runs: Sequence[RunView]) -> dict[Path, str]:
    """Runs that must not be compared with others of the same seed and data options, because their split or examples
    differ, and why. The reference is the split and data that most runs have; if tied, those of the first run."""
    begun = [run for run in runs if run.environment is not None]
    names = set().union(*[run.experiment["data"] for run in begun])
    lacking = any(names - run.experiment["data"].keys() for run in begun)
    groups: dict[str, list[tuple[RunView, tuple[str, ...]]]] = {}
    for run in begun:
        options = {**(_data_defaults() if lacking else {}), **run.experiment["data"], "seed": run.experiment["seed"]}
        recorded = tuple(str((run.environment or {}).get(name, "")) for name in ("split", "data"))
        groups.setdefault(json.dumps(options, sort_keys=True, default=str), []).append((run, recorded))
    found = {}
    for group in groups.values():
        recorded_by_all = [recorded for _, recorded in group]
        usual = max(recorded_by_all, key=recorded_by_all.count)
        for run, recorded in group:
            for name, ours, theirs in zip(("split", "data"), recorded, usual, strict=True):
                if ours != theirs and ours and theirs and not (name == "data" and _is_public(run)):
                    beside = next(other.path for other, what in group if what == usual)
                    found[run.path] = f"its {name} is {ours[:12]}, and that of '{beside}' is {theirs[:12]}"
                    break
    return found


def _is_public(run: RunView) -> bool:
    """Whether the data is a public set with known checksums. An equal split then means equal data. The data fingerprint
    is not comparable here: the first redgrape computed it differently."""
    from redgrape.data.sources import DATASETS

    return run.experiment["data"]["source"] in DATASETS


def _data_defaults() -> dict[str, Any]:
    """Defaults for runs that are older than an option."""
    from redgrape.runs.experiment import Experiment

    defaults: dict[str, Any] = Experiment().resolved()["data"]
    return defaults


def find_runs(folder: Path) -> list[Path]:
    """Run folders at or below this one, up to two levels deep, even if their experiment.toml is missing. Then the
    records in this folder."""
    candidates = [folder, *sorted(folder.glob("*")), *sorted(folder.glob("*/*"))]
    runs = [path for path in candidates if any((path / name).is_file() for name in TELLTALE)]
    return [*runs, *(file / name for file in records.files(folder) for name in records.read(file))]


def view(path: Path) -> RunView:
    """The run or the record at this path."""
    return RunView.recorded(path) if path.parent.is_file() else RunView.read(path)


@dataclass(frozen=True)
class Result:
    """The runs of one method over seeds."""

    label: str
    runs: list[RunView]
    on: str = "test"  # or validation, for choosing hyper-parameters

    def values(self, figure: str) -> list[float]:
        """The figure for each seed. Clients that were trained alone give their mean."""
        by_seed: dict[int, list[float]] = {}
        for run in self.runs:
            by_seed.setdefault(run.experiment["seed"], []).extend(self.of_run(run, figure))
        return [sum(values) / len(values) for values in by_seed.values() if values]

    def of_run(self, run: RunView, figure: str) -> list[float]:
        """The figure of one run; none if no example decides it."""
        value = self._means(run).get(figure)  # older runs lack some figures
        return [] if value is None else [value]

    @property
    def seeds(self) -> int:
        return len({run.experiment["seed"] for run in self.runs})

    def _means(self, run: RunView) -> dict[str, Any]:
        means = _summary(run)["mean_of_last"] if self.on == "test" else _summary(run).get("validation")
        if means is None:
            raise ConfigError(f"'{run.path}' was run without a validation set; hold one out with -c data.validation=10")
        return dict(means)

    @property
    def title(self) -> str:
        """The label, marked if the method used extra data."""
        return self.label + (EXTRA_DATA if any(run.uses_extra_data for run in self.runs) else "")

    def per_class(self) -> list[list[float]]:
        """The accuracies of all seeds, for each class."""
        classes = zip(*[_summary(run)["per_class"] for run in self.runs], strict=True)
        return [[value for value in values if value is not None] for values in classes]


def counts(results: Sequence[Result]) -> list[int] | None:
    """The smallest number of evaluation examples of each class in any of these runs."""
    known = [judged.counts_of(run.environment, run.summary, r.on) for r in results for run in r.runs]
    return [min(of_class) for of_class in zip(*known, strict=True)] if known and all(known) else None


def notes(results: Sequence[Result]) -> list[str]:
    """Notes on classes with few examples or none, and on what federating gains."""
    environment = results[0].runs[0].environment or {}
    names = [terminal.printable(name) for name in environment.get("class_names", [])]
    few = judged.notes(names, counts(results), environment.get("class_counts"), results[0].on)
    over = judged.over_classes(counts(results))
    return [*few, *([f"{TITLES['balanced']} is over {over}"] if over else []), *gap.notes(results)]


def collect(runs: Iterable[tuple[str, RunView]], on: str = "test") -> list[Result]:
    """Group finished runs by label, in order of first appearance."""
    results: dict[str, Result] = {}
    for label, run in runs:
        results.setdefault(label, Result(label, [], on)).runs.append(run)
    return list(results.values())


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and the sample standard deviation. The latter is None for fewer than two values."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


def cell(values: Sequence[float]) -> str:
    """`95.3 ± 0.4`, in percent."""
    if not values:
        return "–"
    mean, std = mean_std(values)
    return f"{100 * mean:.1f}" + ("" if std is None else f" ± {100 * std:.1f}")


def many_classes(results: Sequence[Result]) -> bool:
    """Whether the runs have figures by the training examples of a class, and the top-5 accuracy."""
    return all(figure in r._means(run) for r in results for run in r.runs for figure in OF_MANY_CLASSES)


def caption(results: Sequence[Result]) -> str:
    rounds = sorted({len(_summary(run)["averaged_rounds"]) for r in results for run in r.runs})
    over = f"the last {rounds[0]} evaluated rounds" if len(rounds) == 1 else "the last evaluated rounds"
    over = f"mean of {'the last round' if rounds == [1] else over}"
    over = BEST if all("best_round" in _summary(run) for r in results for run in r.runs) else over
    seeds = ", mean ± standard deviation over seeds" if any(r.seeds > 1 for r in results) else ""
    extra = f";{EXTRA_DATA} uses extra balanced data at the server" if any(r.title != r.label for r in results) else ""
    return f"{results[0].on} accuracy in %, {over}{seeds}{extra}"


def print_table(results: Sequence[Result]) -> None:
    """Print the figures of finished runs."""
    for figures in (FIGURES, *([OF_MANY_CLASSES] if many_classes(results) else [])):
        rows = [[r.title, *[cell(r.values(figure)) for figure in figures]] for r in results]
        print(terminal.table(["method", *[SHORT[figure] for figure in figures]], rows))
    print(terminal.paragraph(caption(results)))
    for note in notes(results):
        print(terminal.paragraph(f"note: {note}"))


def draw_per_class(results: Sequence[Result], path: Path) -> None:
    """Plot accuracy per class from head to tail, one line per method (bars: std over seeds), above the class sizes."""
    plt = pyplot()
    environment = results[0].runs[0].environment or {}
    names = environment["class_names"]
    counts = environment["class_counts"] or [1] * len(names)  # in a deployment, only the sites know
    order = sorted(range(len(counts)), key=lambda c: (-counts[c], c))
    places = range(len(order))
    wide, size = len(order) > 30, -(-len(order) // POINTS) if len(order) > LONGEST else 1
    blocks = [order[start : start + size] for start in places[::size]]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(10 if wide else 8, 6), sharex=True, gridspec_kw={"height_ratios": [3, 1]}, layout="constrained"
    )
    for result, colour, marker in zip(results, colours(len(results)), "os^Dv<>phX*P" * 9, strict=False):
        per_class = result.per_class()
        values = [[value for c in block for value in per_class[c]] for block in blocks]
        pairs = [mean_std(known) if known else (math.nan, None) for known in values]
        errors = [100 * (std or 0.0) for _, std in pairs] if size == 1 and any(std for _, std in pairs) else None
        top.errorbar(
            [start + (len(block) - 1) / 2 for start, block in zip(places[::size], blocks, strict=True)],
            [100 * mean for mean, _ in pairs],
            yerr=errors,
            label=f"{terminal.printable(result.title)} (tail {cell(result.values('tail'))})".replace("$", r"\$"),
            color=colour,
            marker=None if wide else marker,
            capsize=3,
            linewidth=2,
        )
    top.set_ylabel("test accuracy, %" + (f", mean of {size} neighbouring classes" if size > 1 else ""))
    top.set_ylim(-3, 103)
    top.legend(loc="lower left")
    top.grid(alpha=0.3)
    groups = environment["groups"]
    for boundary in (len(groups["head"]), len(groups["head"]) + len(groups["middle"])):
        for axis in (top, bottom):
            axis.axvline(boundary - 0.5, color="grey", linestyle=":", linewidth=1)
    start = 0
    for name in ("head", "middle", "tail"):
        if groups[name]:
            middle = start + (len(groups[name]) - 1) / 2
            top.text(middle, 1.01, name, transform=top.get_xaxis_transform(), ha="center", va="bottom", color="grey")
            start += len(groups[name])
    if size > 1:
        bottom.fill_between(places, [counts[c] for c in order], color="lightgrey", edgecolor="grey")
    else:
        bottom.bar(places, [counts[c] for c in order], color="lightgrey", edgecolor="grey")
    bottom.set_yscale("log")
    bottom.set_ylabel("training\nexamples")
    step = max(1, len(order) // 25)
    labels = [terminal.printable(names[c]) for c in order][::step]
    if len(order) > 10:
        turn: dict[str, Any] = {"rotation": 90}
    elif len(order) * max(map(len, labels)) > 80:  # characters side by side
        turn = {"rotation": 20, "ha": "right"}
    else:
        turn = {}
    bottom.set_xticks(list(places)[::step], labels, parse_math=False, **turn)
    bottom.set_xlabel("class, from head to tail")
    figure.savefig(durable.ordinary(path), dpi=130)
    plt.close(figure)


COOLER = ("#4c78a8", "#f2a541", "#54a24b", "#9d755d", "#72b7b2", "#b279a2", "#5f6a72", "#d6a5c9")


def colours(count: int) -> list[str]:
    """Grape red for the last entry, cooler colours for the others."""
    return [*[COOLER[i % len(COOLER)] for i in range(count - 1)], "#8e1b3f"]


def pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError(f"figures need matplotlib; {install('plots')}") from error
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _summary(run: RunView) -> dict[str, Any]:
    if run.summary is None:
        raise StorageError(f"'{run.path}' is not finished; continue it with `redgrape resume {run.path}`")
    return run.summary


def plain(value: Any) -> Any:
    """Replace infinity, which JSON lacks, by the word that the command line accepts."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _content(path: Path) -> bytes:
    if path.is_symlink():
        raise StorageError(f"'{path}' is a link or a special file")
    return durable.ordinary(path).read_bytes()


def _whole(path: Path) -> bytes | None:
    """The verified content of the file, or None if it does not exist."""
    data = _content(path) if path.exists() or path.is_symlink() else None
    if data is not None and not checksums.fits(path.parent, path.name, data):
        raise StorageError(f"'{path}' is damaged: its SHA-256 does not match {checksums.NAME}")
    return data


def _cost(path: Path, metrics: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """What the run sent, over all clients and rounds, and the seconds of its rounds if their times can be read."""
    sent = {name: sum(record.get(name, 0) for record in metrics) for name in ("bytes_down", "bytes_up")}
    try:
        times = [json.loads(line) for line in (path / "times.jsonl").read_bytes().splitlines()]
        seconds = sum(line["train"] + line["evaluate"] for line in times) if len(times) == len(metrics) else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        seconds = None
    return {**sent, "seconds": seconds}


def _manifests(path: Path) -> list[dict[str, Any]]:
    """The manifests of the checkpoints. Damaged ones are skipped here, and reported when the model is loaded."""
    found = []
    for file in sorted((path / "checkpoints").glob("round-[0-9]*/manifest.json")):
        with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
            manifest = json.loads(_content(file))
            if len(manifest["metrics"]["sha256"]) == 64 and manifest["metrics"]["bytes"] >= 0:
                found.append(manifest)
    return found


def _check_experiment(path: Path, experiment: dict[str, Any], witnesses: Sequence[dict[str, Any]]) -> None:
    """Raise StorageError if the experiment does not match the summary or the checkpoints of the run, if there are any.
    They may date from before the run was extended. Another spelling of the same values is fine."""
    digest, name = hash_of(experiment), "experiment.toml"
    if any(witness["experiment"] == digest for witness in witnesses):
        return
    _whole(path / name)
    if witnesses and name not in checksums.read(path):
        before = [{**experiment, "rounds": witness.get("rounds", experiment["rounds"])} for witness in witnesses]
        if not any(w["experiment"] == hash_of(values) for w, values in zip(witnesses, before, strict=True)):
            raise StorageError(f"'{path / name}' was edited or is damaged: it does not match the result of the run")


def _check_lines(
    path: Path, lines: bytes, metrics: Sequence[dict[str, Any]], manifests: Sequence[dict[str, Any]]
) -> None:
    """Raise StorageError unless every round has exactly one line and the lines match each checkpoint."""
    if [record["round"] for record in metrics] != list(range(1, len(metrics) + 1)):
        raise StorageError(f"'{path / 'metrics.jsonl'}' is damaged: it does not have exactly one line per round")
    for manifest in manifests:
        size, digest = manifest["metrics"]["bytes"], manifest["metrics"]["sha256"]
        if len(lines) < size or checksums.digest_of(lines[:size]) != digest:
            raise StorageError(
                f"'{path / 'metrics.jsonl'}' is damaged: its beginning does not match the checkpoint of "
                f"round {manifest['round']}"
            )


def _check_summary(
    path: Path, summary: dict[str, Any], metrics: Sequence[dict[str, Any]], environment: dict[str, Any] | None
) -> None:
    """Raise StorageError if the summary does not match the metrics or the split."""
    evaluated = [record for record in metrics if "test" in record][-len(summary["averaged_rounds"]) :]
    if kept := summary.get("best_round"):
        evaluated = [record for record in metrics if record["round"] == kept]
    known = [figure for figure in FIGURES if figure in summary["mean_of_last"] or figure in ALWAYS]
    means = {figure: _mean([record["test"][figure] for record in evaluated]) for figure in known}
    if (
        len(metrics) != summary.get("stopped_after", summary["rounds"])
        or [record["round"] for record in evaluated] != summary["averaged_rounds"]
        or any(not _same(means[figure], summary["mean_of_last"][figure]) for figure in known)
    ):
        raise StorageError(f"'{path}' is damaged: summary.json does not match metrics.jsonl")
    if environment is None or environment["split"] != summary["split"]:
        raise StorageError(f"'{path}' is damaged: environment.json and summary.json have different splits")


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean_std(known)[0] if known else None


def _same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isclose(one, other, rel_tol=1e-9))


def _json(data: bytes | None) -> Any:
    return None if data is None else json.loads(data)
