"""How long the command line takes to start, and what a run does before its first round.

    python benchmarks/startup.py

`redgrape --help` and `redgrape ls` against `import torch`, in processes of their own that take turns; then the steps of
a small run up to its first round. Medians of seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMANDS = {
    "import torch": ["-c", "import torch"],
    "redgrape --help": ["-m", "redgrape", "--help"],
    "redgrape ls": ["-m", "redgrape", "ls"],
    "redgrape methods": ["-m", "redgrape", "methods"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps-only", action="store_true", help="print the steps of one start, as JSON")
    options = parser.parse_args()
    if options.steps_only:
        print(json.dumps(steps_of_a_run()))
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "runs").mkdir()
        seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for _ in range(options.repeats):
            for name, arguments in COMMANDS.items():
                begin = time.perf_counter()
                subprocess.run([sys.executable, *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)
                seconds[name].append(time.perf_counter() - begin)
        torch = statistics.median(seconds["import torch"])
        print("| command | seconds | of `import torch` |\n|---|---|---|")
        for name, values in seconds.items():
            median = statistics.median(values)
            print(f"| `{name}` | {median:.2f} | {median / torch:.2f} |")
        starts = [
            json.loads(
                subprocess.run([sys.executable, __file__, "--steps-only"], capture_output=True, check=True).stdout
            )
            for _ in range(3)
        ]
    print("\n| before the first round of a small run | seconds |\n|---|---|")
    for name in starts[0]:
        print(f"| {name} | {statistics.median(start[name] for start in starts):.2f} |")


def steps_of_a_run() -> dict[str, float]:
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        value = work()
        seconds[name] = time.perf_counter() - begin
        return value

    def imports() -> None:
        import torch  # noqa: F401  # it is the import that is timed

    timed("import torch", imports)

    def own_imports() -> None:
        import redgrape.runs.run  # noqa: F401  # the same

    timed("import redgrape's own modules", own_imports)
    from redgrape.data.prepare import prepare
    from redgrape.runs.environment import about
    from redgrape.runs.experiment import Experiment
    from redgrape.training import Training

    experiment = timed("check the experiment", lambda: Experiment.parse({"rounds": 2, "net": {"name": "mlp"}}))
    federation = timed("load and divide the data", lambda: prepare(experiment.data, experiment.seed, Path()))
    timed("fingerprint the data", lambda: about(federation))
    build = experiment.builder(federation)
    training = timed(
        "start two workers",
        lambda: Training(experiment.method.create(), federation, build, rounds=2, workers=2, evaluate_every=9),
    )
    with training:
        rounds = training.steps(model=experiment.first_model(federation))
        timed("the first round", lambda: next(rounds))
        timed("the second round", lambda: next(rounds))
    return seconds


if __name__ == "__main__":
    main()
