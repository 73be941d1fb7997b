"""How the cost of a round grows: seconds and memory against clients, examples, classes, features and workers.

    python benchmarks/growth.py --plot docs/images/growth.png --json growth.json

Every point is a run of a few rounds in a process of its own, on random data, with one worker except where workers are
counted: the median of three, in turns. Seconds: the median round after the first. Memory: the highest resident memory
of the run, data included, over that of a process that has only imported what it needs, sampled twenty times a second;
what processes share counts once. Exponents are fitted to the upper half of each line, where what does not grow has lost
its weight: 1 means proportional.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scale import figures

LINES: dict[str, tuple[str, list[int]]] = {
    "all": ("clients in all, 20 of them sampled", [100, 1000, 10_000, 100_000]),
    "sampled": ("clients sampled a round", [10, 30, 100, 300, 1000]),
    "examples": ("examples of a client", [16, 64, 256, 1024, 4096]),
    "classes": ("classes (RedGrape)", [10, 30, 100, 300]),
    "features": ("features (RedGrape)", [64, 256, 1024, 4096]),
    "workers": ("workers", [1, 2, 4]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", nargs="+", default=list(LINES), choices=list(LINES))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        line, value = options.point
        print(point(line, int(value)))
        return
    found: dict[str, list[dict[str, float]]] = {}
    for line in options.lines:
        turns = [[measured(line, value) for value in LINES[line][1]] for _ in range(3)]
        found[line] = [
            {name: statistics.median(p[name] for p in same) for name in same[0]} for same in zip(*turns, strict=True)
        ]
        print(f"{line}: {turns}", file=sys.stderr)
    print("| grows | from, to | seconds a round | exponent | MB | exponent |\n|---|---|---|---|---|---|")
    for line, points in found.items():
        ends = points[0], points[-1]
        print(
            f"| {LINES[line][0]} | {ends[0]['value']:,}, {ends[1]['value']:,} "
            f"| {ends[0]['seconds']:.3f}, {ends[1]['seconds']:.3f} | {exponent(points, 'seconds'):.2f} "
            f"| {ends[0]['memory'] / 2**20:.0f}, {ends[1]['memory'] / 2**20:.0f} | {exponent(points, 'memory'):.2f} |"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.plot:
        draw(found, options.plot)


def measured(line: str, value: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--point", line, str(value)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        imported = highest = figures(process.pid)["resident"]
        process.stdin.write("go on\n")
        process.stdin.flush()
        while process.poll() is None:
            highest = max(highest, figures(process.pid)["resident"])
            time.sleep(0.05)
        if process.returncode:
            sys.exit(f"{line} {value} ended with code {process.returncode}")
        seconds = float(process.stdout.read())
    return {"value": value, "seconds": seconds, "memory": highest - imported}


def point(line: str, value: int) -> float:
    """Seconds of a round. Says when everything is imported, and waits to be told to go on."""
    from redgrape.data.examples import Examples
    from redgrape.data.federation import Federation
    from redgrape.methods.fedavg import FedAvg
    from redgrape.methods.redgrape import RedGrape
    from redgrape.training import Training

    setting = {"all": 1000, "sampled": 20, "examples": 20, "classes": 10, "features": 64, "workers": 1, "rounds": 5}
    if line == "sampled":
        setting["all"] = 2000
    if line == "workers":
        setting |= {"examples": 2000, "sampled": 12, "features": 512}
    if line in ("classes", "features"):
        setting |= {"all": 20, "sampled": 5, "examples": 100}
    if line == "features":
        setting["classes"] = 30
    setting[line] = value
    training_options: dict[str, Any] = {"epochs": 1, "batch_size": 16, "lr": 0.01}
    method: FedAvg = FedAvg(**training_options)
    if line in ("classes", "features"):
        method = RedGrape(**training_options)
    print("imported", flush=True)
    sys.stdin.readline()
    random = np.random.default_rng(0)
    count = setting["all"] * setting["examples"]
    x, y = random.random((count, 32), dtype=np.float32), random.integers(0, setting["classes"], count)
    federation = Federation.from_parts(
        Examples(x, y), np.split(np.arange(count), setting["all"]), Examples(x[:256], y[:256]), setting["classes"]
    )
    build = partial(net, setting["features"], setting["classes"])
    with Training(
        method,
        federation,
        build,
        rounds=setting["rounds"],
        clients_per_round=setting["sampled"],
        workers=setting["workers"],
        evaluate_every=100,
    ) as training:
        seconds = [step.seconds["train"] for step in training.steps()]
    return statistics.median(seconds[1:])


def net(features: int, classes: int) -> Any:
    from torch import nn

    from redgrape.nets.net import Net

    return Net(nn.Sequential(nn.Linear(32, features), nn.ReLU()), nn.Linear(features, classes))


def exponent(points: list[dict[str, float]], name: str) -> float:
    upper = points[len(points) // 2 - (len(points) < 4) :]
    return float(np.polyfit(np.log([p["value"] for p in upper]), np.log([p[name] for p in upper]), 1)[0])


def draw(found: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(found), figsize=(2.1 * len(found), 5), sharex="col", sharey="row", squeeze=False, constrained_layout=True
    )
    rows = (("seconds", 1.0, "#0072B2"), ("memory", 2.0**20, "#D55E00"))
    for column, (line, points) in zip(axes.T, found.items(), strict=True):
        values = [p["value"] for p in points]
        for axis, (name, unit, colour) in zip(column, rows, strict=True):
            measured = [p[name] / unit for p in points]
            axis.loglog(values, measured, "o-", color=colour)
            proportional = [measured[-1] * value / values[-1] for value in values]
            axis.loglog(values, proportional, ":", color="#8d99a6", zorder=1)
            axis.set_title(f"~ n^{exponent(points, name):.2f}", fontsize=9)
            axis.set_xticks(values, [f"{value:,}" for value in values], rotation=90, fontsize=7)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        column[1].set_xlabel(LINES[line][0].replace(", ", ",\n").replace(" (", "\n(", 1), fontsize=8)
    for axis, label, (low, high) in zip(axes[:, 0], ("seconds a round", "MB"), ((0.005, 5), (10, 2000)), strict=True):
        axis.set_ylabel(label)
        axis.set_ylim(low, high)
    figure.suptitle("The cost of a round (dotted: proportional)", fontsize=10)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
