"""Estimate how long runs take: a rough model, corrected by the times of runs on this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from redgrape.data import longtail
from redgrape.errors import RedgrapeError
from redgrape.nets import pretrained
from redgrape.reading.run_view import RunView, find_runs
from redgrape.reading.suites.found_cells import Standing
from redgrape.reading.terminal import duration
from redgrape.runs.experiment import Experiment
from redgrape.runs.figures import LAST

# Seconds for the forward and backward pass of one example on one core of a 2020 server, and the numbers of training and
# test examples. This is rough: it ignores the work of the method. It is used only until something has been run here.
SECONDS = {
    "cnn": 8e-4,
    "cnn_dropout": 1.5e-3,
    "resnet8": 1.5e-3,
    "resnet8x4": 1.4e-2,
    "resnet20": 4e-3,
    "resnet56": 1e-2,
    "mlp": 2e-5,
}
HEAD = 2e-5  # on the stored features of a pretrained encoder
SIZES = {
    "digits": ([400] * 10, 1_000),
    "mnist": ([5_923, *[5_421] * 9], 10_000),
    "fashion_mnist": ([6_000] * 10, 10_000),
    "cifar10": ([5_000] * 10, 10_000),
    "cifar100": ([500] * 100, 10_000),
}
OVERHEAD = 0.1  # seconds per round: broadcast, aggregation, checkpoint
START = 5.0  # seconds per run: worker processes, data


@dataclass(frozen=True)
class Measured:
    """The measured time of a round, and the time that the model predicts."""

    source: str
    net: str
    method: str
    ratio: float


def modelled(experiment: Experiment, workers: int) -> float | None:
    """Seconds per round. None if the size of the data is unknown."""
    data = experiment.data
    if data.source not in SIZES:
        return None
    counts, test = SIZES[data.source]
    try:
        if data.imbalance == "exponential":
            examples = sum(longtail.exponential([max(counts)] * len(counts), data.ir, data.head_cap))
        elif data.imbalance == "binary":
            tail = [c for c in data.tail_classes if isinstance(c, int)]  # names are known with the data alone
            examples = sum(longtail.binary(counts, data.ir, tail, data.head_cap))
        else:
            examples = sum(longtail.natural(counts, data.head_cap))
    except RedgrapeError:
        return None
    clients = experiment.clients_per_round or data.clients
    name = experiment.net.name
    an_example = HEAD if pretrained.is_pretrained(name) else SECONDS.get(name, 1e-3)
    epochs = float(dict(experiment.method.create()).get("epochs", 1))
    training = examples * clients / data.clients * epochs * an_example / min(workers, clients)
    evaluated = min(1.0, 1 / experiment.evaluate_every + LAST / experiment.rounds)
    return OVERHEAD + training + evaluated * test * an_example / 3 / workers


def measure(folder: Path, workers: int) -> list[Measured]:
    """The timed runs of this folder. `workers` applies to older runs, which do not record it."""
    found = []
    for path in find_runs(folder):
        try:
            view = RunView.read(path)
            lines, described = view.times, view.experiment
            seconds = sum(line["train"] + line["evaluate"] for line in lines)
            if described["method"]["name"].endswith(".py"):
                continue  # an estimate must not run user code
            experiment = Experiment.parse(described)
        except (KeyError, TypeError, RedgrapeError):
            continue  # a run without times, or one that is being written
        rounds = Counter(line.get("workers", workers) for line in lines)  # a run may resume with other workers
        models = {count: modelled(experiment, count) for count in rounds}
        model = sum(rounds[count] * seconds_a_round for count, seconds_a_round in models.items() if seconds_a_round)
        if seconds:
            ratio = seconds / (model or len(lines))  # without a model, seconds per round
            found.append(Measured(experiment.data.source, experiment.net.name, experiment.method.name, ratio))
    return found


def seconds_left(standing: Standing, measured: Sequence[Measured], workers: int) -> float | None:
    """The time left for a cell: remaining rounds times the model, corrected by the most similar runs."""
    if not standing.rounds_left:
        return 0.0
    e = standing.cell.experiment
    model = modelled(e, workers)
    of_source = [m for m in measured if m.source == e.data.source]
    if model is None:
        if not of_source:
            return None
        model, measured = 1.0, of_source
    else:
        measured = [m for m in measured if m.source in SIZES]
    alike = (
        [m for m in of_source if (m.net, m.method) == (e.net.name, e.method.name)]
        or [m for m in measured if (m.net, m.method) == (e.net.name, e.method.name)]
        or [m for m in measured if m.net == e.net.name]
        or measured
    )
    correction = median(m.ratio for m in alike) if alike else 1.0
    return START + standing.rounds_left * model * correction


def total(estimates: Sequence[float | None], at_once: int = 1) -> float | None:
    """The total time of cells if this many run at once. None if one estimate is unknown."""
    known = [seconds for seconds in estimates if seconds is not None]
    return sum(known) / at_once if len(known) == len(estimates) else None


def in_words(seconds: float | None) -> str:
    """Text such as `about 3 h`."""
    return "unknown" if seconds is None else f"about {duration(seconds, step=5)}"
