"""What a run depends on besides its description: the machine, the user's files and the data.

All of it is compared before a stored result is used again.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import redgrape
from redgrape import own_code
from redgrape.data.examples import WHITE, Pixels
from redgrape.data.federation import FederatedData, Federation
from redgrape.data.prepare import prepare
from redgrape.data.sources import DATASETS
from redgrape.engines import devices
from redgrape.nets import pretrained
from redgrape.runs.experiment import Experiment
from redgrape.runs.finished import digest_of_state, last_state
from redgrape.runs.folder import RunFolder

MACHINE = ("redgrape", "torch", "numpy", "platform", "machine", "cpu", "device", "stack")
DECIDING = (*MACHINE, *pretrained.PACKAGES.values())  # what could change bits
MOST_COUNTS = 10**6  # a larger table of clients and classes is not recorded
REMEDY = "restore the original, choose another folder with --out, or run it again with --overwrite"


def file_digests(experiment: Experiment) -> dict[str, str]:
    """SHA-256 of the user's code, of the initial weights or the run that gives them, and of a pretrained encoder. The
    description has only their names."""
    started: dict[str, str] = {}
    if experiment.start is not None:
        started[experiment.start] = digest_of_state(last_state(RunFolder.open(Path(experiment.start))))
    return _digests(experiment, with_weights=True) | started


def still_needed(experiment: Experiment) -> dict[str, str]:
    """SHA-256 of the files that a run needs again to continue: all code, and a frozen encoder."""
    return _digests(experiment, with_weights=experiment.net.is_frozen)


def _digests(experiment: Experiment, with_weights: bool) -> dict[str, str]:
    net = experiment.net
    encoder = {net.name: pretrained.digest(net.name, net.weights)} if with_weights and net.is_pretrained else {}
    weights = [Path(net.weights)] if with_weights and net.weights is not None else []
    return own_code.digests([*experiment.code(), *weights]) | encoder


class Present:
    """The data, files and machine that a run would record if it began now. Data is read once per split."""

    def __init__(
        self, device: str, precision: str, stack: int, data_root: Path | None, *, allow_changes: bool = False
    ) -> None:
        self._machine = machine(device, precision) | {"stack": stack}
        self._data_root, self._allow_changes = data_root, allow_changes
        self._splits: dict[str, dict[str, str]] = {}

    def changes(self, experiment: Experiment, environment: Mapping[str, Any], *, is_record: bool = False) -> list[str]:
        """Every difference between this run and one that began now, as `the split was 0a1b and is 2c3d`. For a record,
        the machine is not compared: its figures are published, and a table says where it was made."""
        before = {**environment, **_as_files(environment.get("files", {}))}
        now = {**self._split(experiment), **_as_files(file_digests(experiment))}
        if not is_record and not self._allow_changes:
            now |= {name: self._machine[name] for name in MACHINE} | pretrained.version(experiment.net.name)
        return [
            f"the {name} was {str(before[name])[:12]} and is {str(value)[:12]}"
            for name, value in now.items()
            if before.get(name, value) != value
        ]

    def _split(self, experiment: Experiment) -> dict[str, str]:
        key = f"{experiment.seed} {experiment.data.model_dump_json()}"
        if key not in self._splits:
            federation = prepare(experiment.data, experiment.seed, self._data_root)
            public = experiment.data.source in DATASETS  # its files are verified, so the split is enough
            recorded = {} if public else {"data": contents(federation)}
            self._splits[key] = {"split": federation.fingerprint(), **recorded}
        return self._splits[key]


def _as_files(digests: Mapping[str, str]) -> dict[str, str]:
    return {f"file '{name}'": digest for name, digest in digests.items()}


def machine(device: str, precision: str = "float32") -> dict[str, Any]:
    """Everything that could change bits or explain a difference."""
    return {
        "redgrape": redgrape.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": sys.platform,
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),  # the widest instruction set that torch uses
        "device": devices.recorded(device, precision),
    }


def about(federation: Federation) -> dict[str, Any]:
    """Facts about the data that a reader of the run needs."""
    train = federation.train
    is_small = federation.num_clients * federation.num_classes <= MOST_COUNTS
    return {
        "split": federation.fingerprint(),
        "data": contents(federation),
        "input": input_of(federation.input_shape, train.pixels, WHITE.get(train.x.dtype))
        | ({} if federation.columns is None else {"table": federation.columns.model_dump()}),
        "class_names": federation.class_names,
        "class_counts": federation.class_counts.tolist(),
        "test_counts": federation.counts("test"),
        "validation_counts": federation.counts("validation"),
        "client_names": federation.client_names,
        "client_counts": federation.client_counts.tolist() if is_small else None,
        "groups": groups_of(federation),
    }


def input_of(shape: tuple[int, ...], pixels: Pixels | None, white: int | None = 255) -> dict[str, Any]:
    """The format of raw inputs. `white`: the largest pixel; None for floats."""
    if pixels is None or white is None:
        return {"shape": list(shape), "dtype": "float", "pixels": None}
    return {
        "shape": list(shape),
        "dtype": "uint16" if white == 65535 else "uint8",
        "pixels": {"divided_by": white, "mean": pixels.mean, "std": pixels.std},
    }


def groups_of(federation: FederatedData) -> dict[str, Any]:
    groups = federation.groups
    return {"head": groups.head, "middle": groups.middle, "tail": groups.tail, **groups.by_shots}


def contents(federation: Federation) -> str:
    """SHA-256 of the examples in the split: those of the clients, and those for evaluation."""
    digest = hashlib.sha256()
    clients = federation.train.take(np.concatenate(federation.parts))  # client after client
    for examples in (clients, federation.test, federation.validation, federation.auxiliary):
        if examples is not None:
            digest.update(examples.labels.numpy().astype("<i8").tobytes())
            for start in range(0, len(examples), 4096):  # in blocks: x may be larger than memory
                rows = torch.arange(start, min(start + 4096, len(examples)))
                rows = rows if examples.rows is None else examples.rows[rows]
                digest.update(examples.x[rows].contiguous().numpy().tobytes())
    return digest.hexdigest()
