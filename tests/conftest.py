"""Shared by the tests of runs, of the run folder and of the command line: tiny data, a method with client state."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from redgrape.runs.experiment import Experiment

# A shell's background jobs ignore SIGINT, and so would every command that a test starts there and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Training sets one thread by itself. Around it torch would use one for each core, also for a handful of numbers, and
# they wait for each other in a loop: 2,000 calls of repeat_interleave on two busy cores took 3.2 s of CPU time with two
# threads, 0.02 s with one. That threads change nothing is tested on its own (clauses.py, runs/test_faults.py).
torch.set_num_threads(1)

hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one is late; that is no failure
hypothesis.settings.load_profile("any machine")

CLASS_SIZES = [24, 16, 10, 6]

# Its clients' states hold every kind of tensor and decide the result, so that a run that loses them is seen to.
# REDGRAPE_TEST_PAUSE makes a client slow, which decides nothing.
REMEMBERING = '''
"""FedAvg whose clients go smaller steps the more often they took part."""

import os
import time

import torch

from redgrape.methods.fedavg import FedAvg


class Remembering(FedAvg):
    """FedAvg whose clients count their rounds."""

    def init_client(self, broadcast):
        return {
            "visits": torch.tensor(0),
            "even": torch.tensor([True, False]),
            "inner": {"loss": torch.zeros(1, dtype=torch.float64), "deep": {"empty": torch.zeros(0, 3)}},
        }

    def client_update(self, broadcast, state, site):
        time.sleep(float(os.environ.get("REDGRAPE_TEST_PAUSE", "0")))
        update, _ = super().client_update(broadcast, {}, site)
        visits = state["visits"] + 1
        loss = state["inner"]["loss"] + update["loss"].double()
        update = {**update, "delta": {name: t / float(visits) for name, t in update["delta"].items()}}
        return update, {
            "visits": visits,
            "even": ~state["even"],
            "inner": {"loss": loss, "deep": state["inner"]["deep"]},
        }
'''


@pytest.fixture(autouse=True)
def same_random_numbers_every_time() -> None:
    """A net that a test builds without a seed is the same in every run, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def vectors(shared: Path) -> Path:
    """56 vectors of four classes, no two alike."""
    y = np.repeat(np.arange(len(CLASS_SIZES)), CLASS_SIZES)
    x = np.random.default_rng(0).normal(size=(len(y), 5)) + y[:, None]
    np.savez(shared / "vectors.npz", x=x.astype(np.float32), y=y)
    return shared / "vectors.npz"


@pytest.fixture(scope="session")
def remembering(shared: Path) -> Path:
    """A method file, of a method whose clients have a state."""
    path = shared / "remembering.py"
    path.write_text(REMEMBERING)
    return path


@pytest.fixture(scope="session")
def tiny(vectors: Path, remembering: Path) -> Callable[..., dict[str, Any]]:
    """The values of an experiment that takes a blink; keys such as `method__lr=0.5` or `rounds=3` change it."""
    values: dict[str, Any] = {
        "seed": 3,
        "rounds": 2,
        "clients_per_round": 2,
        "data": {"source": str(vectors), "clients": 3, "alpha": 5.0},
        "net": {"name": "linear"},
        "method": {"name": str(remembering), "lr": 0.1, "epochs": 1, "batch_size": 8},
    }

    def changed(**changes: Any) -> dict[str, Any]:
        new = copy.deepcopy(values)
        for key, value in changes.items():
            *sections, name = key.split("__")
            node = new
            for section in sections:
                node = node[section]
            node[name] = value
        return new

    return changed


@pytest.fixture(scope="session")
def toml(shared: Path, tiny: Callable[..., dict[str, Any]]) -> Path:
    """The file of the tiny experiment."""
    path = shared / "tiny.toml"
    path.write_text(Experiment.parse(tiny()).to_toml())
    return path


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def tally() -> Callable[..., None]:
    """Tells `scripts/faults` what was tried, in the file that REDGRAPE_FAULTS names, a JSON line each. Parts of a fault
    add up."""

    def write(fault: str, tries: int, survived: int, note: str = "", part: str = "") -> None:
        if path := os.environ.get("REDGRAPE_FAULTS"):
            entry = {"fault": fault, "part": part, "tries": tries, "survived": survived, "note": note}
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    return write
