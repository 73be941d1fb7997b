"""Bars of what run.py wrote: seconds of a round, training and evaluation, of every contestant.

python benchmarks/peers/draw.py compute.json overhead.json --out docs/images/peers.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

WARM_UP = 1  # rounds that are not timed, as in run.py

TITLES = {
    ("compute", "cnn"): "CNN, 10 clients, 14,694 examples",
    ("overhead", "mlp"): "MLP, 100 clients of 20 examples",
    ("overhead", "linear"): "linear, 100 clients of 20 examples",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    measured = [json.loads(path.read_text()) for path in options.files]
    panels = [(run, net, found["rows"]) for run in measured for net, found in run["nets"].items()]
    columns, lines = min(2, len(panels)), -(-len(panels) // 2)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4.8 * columns, 2.8 * lines), squeeze=False, constrained_layout=True
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (run, net, rows) in zip(axes.flat, panels, strict=False):
        names = list(rows)
        train, evaluate = (
            [
                statistics.median(r[part] for process in rows[name]["rounds"] for r in process[WARM_UP:])
                for name in names
            ]
            for part in ("train", "evaluate")
        )
        if run["setting"] == "overhead":  # nothing is evaluated there but once at the end
            evaluate = [0.0] * len(names)
        colours = ["#8a1538" if name.startswith("redgrape") else "#8d99a6" for name in names]
        axis.barh(names, train, color=colours, label="training")
        axis.barh(names, evaluate, left=train, color=colours, alpha=0.45, label="evaluation")
        for i, (a, b) in enumerate(zip(train, evaluate, strict=True)):
            axis.text(a + b, i, f" {a + b:.3g}", va="center", fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(right=1.15 * max(a + b for a, b in zip(train, evaluate, strict=True)))
        axis.set_xlabel("seconds a round (lighter: evaluation)" if any(evaluate) else "seconds a round")
        epochs = f", {run['epochs']} epoch{'s' * (run['epochs'] != 1)}" if run["setting"] == "compute" else ""
        axis.set_title(TITLES[run["setting"], net] + epochs, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
