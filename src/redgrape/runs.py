"""Runs: an experiment carried out in its folder, from the beginning or from where it was left."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import redgrape
from redgrape import tree
from redgrape.data.federation import Federation
from redgrape.data.prepare import prepare
from redgrape.errors import ConfigError, DataError, StorageError
from redgrape.experiment import Experiment
from redgrape.numerics import same_bits_everywhere
from redgrape.store import RunFolder
from redgrape.training import RunState, Step, Training
from redgrape.tree import Tree

LAST = 10  # a run's result is the mean over this many last evaluations, as in the paper
FIGURES = ("accuracy", "balanced", "head", "middle", "tail")


class Run:
    """One run in its folder. `steps()` carries it out; what was done before is not done again.

    for step in Run(RunFolder.open(path), workers=2).steps():
        ...
    """

    def __init__(self, folder: RunFolder, *, workers: int, device: str = "cpu", data_root: Path | None = None) -> None:
        self.folder = folder
        self.experiment = folder.experiment()
        self.workers, self.device, self.data_root = workers, device, data_root
        self.notes: list[str] = []  # what a person should know, such as a damaged checkpoint that was passed over

    def steps(self) -> Iterator[Step]:
        """The rounds that are still to be done, each committed before it is yielded."""
        with self.folder.locked():
            self.folder.sweep()
            self._check_files()
            state, wrong = self.folder.latest()
            self.notes += [f"{reason}; going on from round {state.round if state else 0}" for reason in wrong]
            self.folder.cut_after(state.round if state else 0)
            confusion = self._known_confusion(state)
            if confusion is None:
                federation = self._federation()
                with self._training(federation) as training:
                    model = self.experiment.first_model(federation) if state is None else None
                    states = self.folder.states(federation.num_clients)
                    for step in training.steps(state, model, states, self.folder.path):
                        self.folder.append(step.record, step.seconds)
                        last = step.state.round == self.experiment.rounds
                        if last or step.state.round % self.experiment.checkpoint_every == 0:
                            self.folder.save(step.state, self.experiment)
                        state = step.state
                        yield step
                    assert state is not None  # there is at least one round
                    confusion = training.engine.evaluate(state.server["model"], "test").confusion.tolist()
            assert state is not None
            self.folder.write_summary(summarize(self.folder, self.experiment, state, confusion))

    def _check_files(self) -> None:
        """Raise ConfigError where the method's own file is not what it was when the run began."""
        if (self.folder.path / "environment.json").exists():
            before, here = self.folder.environment().get("files", {}), file_digests(self.experiment)
            for name, digest in here.items():
                if before.get(name, digest) != digest:
                    raise ConfigError(
                        f"'{name}' has changed since '{self.folder.path}' began; start a new run with --out, or put "
                        "the old file back"
                    )

    def _training(self, federation: Federation) -> Training:
        e = self.experiment
        return Training(
            e.method.create(),
            federation,
            e.builder(federation),
            rounds=e.rounds,
            clients_per_round=e.clients_per_round,
            seed=e.seed,
            workers=self.workers,
            device=self.device,
            evaluate_every=e.evaluate_every,
        )

    def _federation(self) -> Federation:
        federation = prepare(self.experiment.data, self.experiment.seed, self.data_root)
        here = environment(self.device, federation) | {"files": file_digests(self.experiment)}
        path = self.folder.path / "environment.json"
        if path.exists():
            before = self.folder.environment()
            changed = [name for name in ("redgrape", "torch", "machine", "device") if before.get(name) != here[name]]
            self.notes += [f"{name} was {before.get(name)} and is {here[name]}: bits may differ" for name in changed]
            for name in ("split", "data"):
                if before.get(name, here[name]) != here[name]:
                    raise DataError(
                        f"the data of '{self.folder.path}' has changed since it began: the {name} was "
                        f"{before[name][:12]} and is {here[name][:12]}; put the old data back or start a new run"
                    )
        else:
            self.folder.write_partition(federation)
            self.folder.write_environment(here)
        return federation

    def _known_confusion(self, state: RunState | None) -> list[list[int]] | None:
        """The final model's confusion matrix, where the run is finished and its summary has it. It is in the summary
        alone: in every round's line it would swell the metrics."""
        if state is None or state.round < self.experiment.rounds:
            return None
        try:
            summary = self.folder.summary() or {}
            confusion: list[list[int]] | None = summary.get("confusion")
            return confusion if summary.get("state") == _digest(state) else None
        except (StorageError, AttributeError):  # damaged; it is written anew
            return None

    def extend(self, rounds: int) -> None:
        """Let the run go on to this many rounds."""
        with self.folder.locked():
            self.experiment = self.experiment.with_rounds(rounds)
            self.folder.write_experiment(self.experiment)


def file_digests(experiment: Experiment) -> dict[str, str]:
    """SHA-256 of the file of one's own method, which is code and so no part of the description."""
    path = Path(experiment.method.name)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()} if path.suffix == ".py" else {}


def environment(device: str, federation: Federation) -> dict[str, Any]:
    """What could change bits, or explain a difference; and what a reader of the run must know of the data."""
    train = federation.train
    pixels = train.x.dtype == torch.uint8
    return {
        "redgrape": redgrape.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": sys.platform,
        "machine": platform.machine(),
        "device": device,
        "split": federation.fingerprint(),
        "data": contents(federation),
        "input": {
            "shape": list(train.x.shape[1:]),
            "dtype": "uint8" if pixels else "float",
            "pixels": {"divided_by": 255, "mean": train.pixels.mean, "std": train.pixels.std} if pixels else None,
        },
        "class_names": federation.class_names,
        "class_counts": federation.class_counts.tolist(),
        "client_counts": federation.client_counts.tolist(),
        "groups": {
            "head": federation.groups.head,
            "middle": federation.groups.middle,
            "tail": federation.groups.tail,
        },
    }


def contents(federation: Federation) -> str:
    """SHA-256 over what the split's rows hold, the clients' and those for evaluation."""
    digest = hashlib.sha256()
    clients = federation.train.take(np.concatenate(federation.parts))  # one after another
    for examples in (clients, federation.test, federation.validation, federation.auxiliary):
        if examples is not None:
            digest.update(examples.labels.numpy().astype("<i8").tobytes())
            for start in range(0, len(examples), 4096):  # in blocks: x may be larger than memory
                rows = torch.arange(start, min(start + 4096, len(examples)))
                rows = rows if examples.rows is None else examples.rows[rows]
                digest.update(examples.x[rows].contiguous().numpy().tobytes())
    return digest.hexdigest()


def summarize(folder: RunFolder, experiment: Experiment, state: RunState, confusion: list[list[int]]) -> dict[str, Any]:
    """The run's result: means over the last evaluations, and what explains the final model's mistakes."""
    evaluated = [record for record in folder.metrics() if "test" in record][-LAST:]
    tests = [record["test"] for record in evaluated]
    return {
        "experiment": experiment.hash(),
        "method": experiment.method.name,
        "extra_data": experiment.method.create().uses_auxiliary,
        "seed": experiment.seed,
        "rounds": experiment.rounds,
        "split": folder.environment()["split"],
        "state": _digest(state),
        "averaged_rounds": [record["round"] for record in evaluated],
        "mean_of_last": _means(tests),
        "validation": _means([record["validation"] for record in evaluated if "validation" in record]) or None,
        "per_class": [_mean(values) for values in zip(*[test["per_class"] for test in tests], strict=True)],
        "last": tests[-1],
        "confusion": confusion,
        "classifier_norms": classifier_norms(state.server),
    }


def classifier_norms(server: Tree) -> dict[str, list[float]]:
    """The norm of each class's weights in the deployed classifier (`model`), and in those that serve training only."""
    deployed = server["model"]["classifier.weight"]
    classifiers = {"model": deployed}
    for name, group in server.items():
        weight = group.get("weight") if isinstance(group, Mapping) else None
        if isinstance(weight, torch.Tensor) and weight.shape == deployed.shape and not torch.equal(weight, deployed):
            classifiers[name] = weight
    with same_bits_everywhere():
        return {name: w.double().norm(dim=1).tolist() for name, w in classifiers.items()}


def _digest(state: RunState) -> str:
    return hashlib.sha256(tree.to_bytes(state.server)).hexdigest()


def _means(scores: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    return {figure: _mean([score[figure] for score in scores]) for figure in FIGURES} if scores else {}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
