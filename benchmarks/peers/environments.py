"""The contestants, and for each peer a virtual environment of its own with pinned versions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
TORCH = "torch==2.13.0"  # exactly: another torch would be another benchmark


@dataclass(frozen=True)
class Contestant:
    """setups: the ways to use the machine, as (processes, threads in each), of which the fastest is taken."""

    name: str
    script: str
    setups: Sequence[tuple[int, int]]
    package: str | None = None  # the peer, pinned; None: it runs where redgrape is installed
    requirements: Sequence[str] | None = None  # what the peer imports, where its own requirements would break torch
    environ: Mapping[str, str] = field(default_factory=dict)
    stack: int = 1  # clients that redgrape trains as one

    def python(self, environments: Path) -> Path:
        return (
            environments / self.script.removesuffix(".py") / "bin" / "python" if self.package else Path(sys.executable)
        )


def contestants(cores: int) -> dict[str, Contestant]:
    threads, both = (1, cores), [(1, cores), (cores, 1)]
    return {
        "naive": Contestant("naive PyTorch loop", "naive_loop.py", [threads]),
        "flower": Contestant(
            "Flower simulation",
            "flower_simulation.py",
            both,
            "flwr[simulation]==1.41.0",
            environ={
                "FLWR_TELEMETRY_ENABLED": "0",
                "FLWR_DISABLE_UPDATE_CHECK": "1",
                "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
                "RAY_USAGE_STATS_ENABLED": "0",
            },
        ),
        # FedLab asks for torchvision, whose published wheel does not load beside a CPU build of torch.
        "fedlab": Contestant(
            "FedLab",
            "fedlab_simulation.py",
            [(1, 1), *both],
            "fedlab==1.3.0",
            ["numpy", "pandas", "pillow", "scikit-learn", "tqdm", "nvidia-ml-py"],
        ),
        "pfl": Contestant("pfl-research", "pfl_research.py", [(1, 1), *both], "pfl==0.6.0"),
        "redgrape": Contestant("redgrape", "redgrape_training.py", [(cores, 1)]),
        "stacked": Contestant("redgrape, stack 25", "redgrape_training.py", [(cores, 1)], stack=25),
    }


def set_up(contestant: Contestant, environments: Path) -> None:
    """Make the contestant's environment, unless it stands with these very pins. Raises CalledProcessError."""
    if contestant.package is None:
        return
    python = contestant.python(environments)
    folder = python.parent.parent
    own = [TORCH, *(contestant.requirements or [])]
    pins = "\n".join([contestant.package, *own])
    done = folder / "pins.txt"
    if done.is_file() and done.read_text() == pins:
        return
    print(f"setting up {folder}", file=sys.stderr)
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    install = [str(python), "-m", "pip", "install", "--quiet"]
    if contestant.requirements is None:
        _run([*install, contestant.package, *own])
    else:
        _run([*install, *own])
        _run([*install, "--no-deps", contestant.package])
    done.write_text(pins)


def versions(contestant: Contestant, environments: Path) -> list[str]:
    """What is installed where the contestant runs."""
    python = contestant.python(environments)
    freeze = _run([str(python), "-m", "pip", "list", "--format=freeze"])
    return sorted(line for line in freeze.splitlines() if "==" in line)


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
