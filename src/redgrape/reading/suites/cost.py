"""How long runs will take, about: a rough model, corrected by what runs on this machine have taken."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from redgrape.data import longtail
from redgrape.errors import RedgrapeError
from redgrape.reading.run_tables import RunView, find_runs
from redgrape.reading.suites.found_cells import Standing
from redgrape.runs.experiment import Experiment
from redgrape.runs.run import LAST

# Seconds for an example's way forth and back through the net, and training and test examples: of a core of a server of
# 2020. Rough, because the method's own work is not in it, and needed only until something has been run here.
SECONDS = {"cnn": 8e-4, "cnn_dropout": 1.5e-3, "resnet8": 1.5e-3, "resnet20": 4e-3, "resnet56": 1e-2, "mlp": 2e-5}
SIZES = {
    "digits": ([400] * 10, 1_000),
    "mnist": ([5_923, *[5_421] * 9], 10_000),
    "fashion_mnist": ([6_000] * 10, 10_000),
    "cifar10": ([5_000] * 10, 10_000),
    "cifar100": ([500] * 100, 10_000),
}
OVERHEAD = 0.1  # seconds of a round: broadcast, aggregation, checkpoint
START = 5.0  # seconds of a run: worker processes, data


@dataclass(frozen=True)
class Measured:
    """What a round of a run took, and would take by the model."""

    source: str
    net: str
    method: str
    ratio: float


def modelled(experiment: Experiment, workers: int) -> float | None:
    """Seconds of a round; None for data whose size is not known."""
    data = experiment.data
    if data.source not in SIZES:
        return None
    counts, test = SIZES[data.source]
    try:
        if data.imbalance == "exponential":
            examples = sum(longtail.exponential([max(counts)] * len(counts), data.ir, data.head_cap))
        elif data.imbalance == "binary":
            examples = sum(longtail.binary(counts, data.ir, data.tail_classes, data.head_cap))
        else:
            examples = sum(longtail.natural(counts, data.head_cap))
    except RedgrapeError:
        return None
    clients = experiment.clients_per_round or data.clients
    an_example = SECONDS.get(experiment.net.name, 1e-3)
    epochs = float(dict(experiment.method.create()).get("epochs", 1))
    training = examples * clients / data.clients * epochs * an_example / min(workers, clients)
    evaluated = min(1.0, 1 / experiment.evaluate_every + LAST / experiment.rounds)
    return OVERHEAD + training + evaluated * test * an_example / 3 / workers


def measure(folder: Path, workers: int) -> list[Measured]:
    """The runs of this folder that tell their times; `workers` is for those of before times told theirs."""
    found = []
    for path in find_runs(folder):
        try:
            lines = [json.loads(line) for line in (path / "times.jsonl").read_bytes().splitlines()]
            seconds = sum(line["train"] + line["evaluate"] for line in lines)
            described = RunView.read(path).experiment
            if described["method"]["name"].endswith(".py"):
                continue  # nobody's code is run for an estimate
            experiment = Experiment.parse(described)
        except (OSError, ValueError, KeyError, TypeError, RedgrapeError):
            continue  # a run without times, or one being written
        rounds = Counter(line.get("workers", workers) for line in lines)  # a run may go on with other workers
        models = {count: modelled(experiment, count) for count in rounds}
        model = sum(rounds[count] * seconds_a_round for count, seconds_a_round in models.items() if seconds_a_round)
        if seconds and model:
            found.append(Measured(experiment.data.source, experiment.net.name, experiment.method.name, seconds / model))
    return found


def seconds_left(standing: Standing, measured: Sequence[Measured], workers: int) -> float | None:
    """Of a cell: rounds left times the model, corrected by the runs that are most like it."""
    if not standing.rounds_left:
        return 0.0
    e = standing.cell.experiment
    model = modelled(e, workers)
    if model is None:
        return None
    alike = (
        [m for m in measured if (m.source, m.net, m.method) == (e.data.source, e.net.name, e.method.name)]
        or [m for m in measured if (m.net, m.method) == (e.net.name, e.method.name)]
        or [m for m in measured if m.net == e.net.name]
        or measured
    )
    correction = median(m.ratio for m in alike) if alike else 1.0
    return START + standing.rounds_left * model * correction


def total(estimates: Sequence[float | None], at_once: int = 1) -> float | None:
    """Of cells of which so many run at once; None where one is not known."""
    known = [seconds for seconds in estimates if seconds is not None]
    return sum(known) / at_once if len(known) == len(estimates) else None


def duration(seconds: float | None) -> str:
    """`about 3 h`, as fine as such an estimate deserves."""
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min"
    return f"about {round(seconds / 3600)} h" if seconds < 48 * 3600 else f"about {round(seconds / 86400)} days"
