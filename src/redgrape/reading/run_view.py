"""A run folder or a record as a reader sees it, checked. Read-only; needs neither torch nor the data."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redgrape.errors import StorageError
from redgrape.reading import gap, records
from redgrape.runs import checksums, durable
from redgrape.runs.checksums import hash_of
from redgrape.runs.figures import FIGURES, mean_of_known

EXTRA_DATA = " †"
ALWAYS = ("accuracy", "balanced", "head", "middle", "tail")  # by every redgrape
TELLTALE = ("experiment.toml", "environment.json", "metrics.jsonl")  # files of a run folder
TRIES = 3  # a run may be written to while it is read


@dataclass(frozen=True)
class RunView:
    """A run folder or a record as a reader sees it, finished or not."""

    path: Path
    experiment: dict[str, Any]
    environment: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    summary: dict[str, Any] | None
    cost: dict[str, float | None] = field(default_factory=dict)  # of the run: bytes_down, bytes_up, seconds
    times: list[dict[str, Any]] = field(default_factory=list)  # seconds and workers of each round, if readable

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
        if path.parent.is_file() and records.read(path.parent):
            raise StorageError(f"'{path}' is a record, without weights and lists of clients; name the folder of a run")
        for _ in range(TRIES - 1):
            with suppress(StorageError):
                return cls._read(path)
        return cls._read(path)

    @classmethod
    def _read(cls, path: Path) -> RunView:
        try:
            durable.check_is_run(path)
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
            times = _times(path)
            view = cls(path, experiment, environment, metrics, summary, _cost(times, metrics), times)
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
        ratio = "" if data["imbalance"] == "natural" else f" IR {data['ir']:g}"
        return {
            "run": str(self.path),
            "method": self.label + (EXTRA_DATA if self.uses_extra_data else ""),
            "data": f"{Path(data['source']).stem} {data['imbalance']}{ratio}",
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
    def client(self) -> str:
        """The client that was trained alone, or `none`."""
        return str(self.experiment["data"].get("alone", "none"))

    @property
    def uses_extra_data(self) -> bool:
        return bool(self.summary and self.summary.get("extra_data"))


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


def machines(named: Sequence[tuple[str, RunView]]) -> list[str]:
    """Notes on versions and machines, if the runs that record them differ, and on a smaller precision."""
    from redgrape.engines.devices import IN_BFLOAT16
    from redgrape.runs.environment import DECIDING

    lines = []
    for name in DECIDING:
        made: dict[str, list[str]] = {}
        for of_run, run in named:
            if (recorded := (run.environment or {}).get(name)) is not None:
                made.setdefault(str(recorded), []).append(of_run)
        if len(made) > 1:
            *few, most = sorted(made, key=lambda value: len(made[value]))
            which = " · ".join(f"{value} ({'; '.join(made[value])})" for value in few)
            what = "figures" if name == "device" else "last bits"
            lines.append(f"not all made with {name} {most}, so that {what} may differ: {name} {which}")
        rounded = sum(len(runs) for value, runs in made.items() if value.endswith(IN_BFLOAT16))
        if rounded:
            lines.append(f"the encoder multiplied in bfloat16 (--precision): {rounded} of {len(named)} runs")
    return lines


def find_runs(folder: Path) -> list[Path]:
    """Run folders at or below this one, up to two levels deep, even if their experiment.toml is missing. Then the
    records in this folder. A damaged file of records stands for them: its reader is told what is wrong with it."""
    candidates = [folder, *sorted(folder.glob("*")), *sorted(folder.glob("*/*"))]
    candidates = [path for path in candidates if not durable.is_leftover(path)]
    runs = [path for path in candidates if any((path / name).is_file() for name in TELLTALE)]
    return [*runs, *(path for file in records.files(folder) for path in _records_in(file))]


def _records_in(file: Path) -> list[Path]:
    try:
        return [file / name for name in records.read(file)]
    except StorageError:
        return [file]


def view(path: Path) -> RunView:
    """The run or the record at this path."""
    if path.is_file() and records.read(path):
        raise StorageError(f"'{path}' holds several records; name one, as in `redgrape show {path}/NAME`")
    return RunView.recorded(path) if path.parent.is_file() else RunView.read(path)


def plain(value: Any) -> Any:
    """Replace infinity, which JSON lacks, by the word that the command line accepts."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values by their whole keys, as in {"method.lr": 0.1}."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


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


def _times(path: Path) -> list[dict[str, Any]]:
    """The lines of times.jsonl. Damaged ones are left out, since times change no result."""
    found = []
    with suppress(OSError):
        for line in durable.ordinary(path / "times.jsonl").read_bytes().split(b"\n"):
            with suppress(ValueError, RecursionError):
                if isinstance(values := json.loads(line), dict):
                    found.append(values)
    return found


def _cost(times: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """What the run sent, over all clients and rounds, and the seconds of its rounds if all their times are known."""
    sent = {name: sum(record.get(name, 0) for record in metrics) for name in ("bytes_down", "bytes_up")}
    seconds = None
    with suppress(KeyError, TypeError):
        seconds = sum(line["train"] + line["evaluate"] for line in times) if len(times) == len(metrics) else None
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
    means = {figure: mean_of_known([record["test"][figure] for record in evaluated]) for figure in known}
    if (
        len(metrics) != summary.get("stopped_after", summary["rounds"])
        or [record["round"] for record in evaluated] != summary["averaged_rounds"]
        or any(not _same(means[figure], summary["mean_of_last"][figure]) for figure in known)
    ):
        raise StorageError(f"'{path}' is damaged: summary.json does not match metrics.jsonl")
    if environment is None or environment["split"] != summary["split"]:
        raise StorageError(f"'{path}' is damaged: environment.json and summary.json have different splits")


def _same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isclose(one, other, rel_tol=1e-9))


def _json(data: bytes | None) -> Any:
    return None if data is None else json.loads(data)
