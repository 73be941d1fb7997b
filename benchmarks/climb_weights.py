"""Whom CLIMB listens to: how much of what its weights let through comes from the tail.

python benchmarks/climb_weights.py --data-root DATA runs/CLIMB
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from redgrape.data.prepare import prepare
from redgrape.methods.climb import client_weights
from redgrape.reading.run_view import RunView
from redgrape.runs.experiment import Experiment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--data-root", type=Path)
    options = parser.parse_args()
    run = RunView.read(options.run)
    experiment = Experiment.parse(run.experiment)
    federation = prepare(experiment.data, experiment.seed, options.data_root)
    labels = [federation.client(k).labels for k in range(federation.num_clients)]
    tail = torch.tensor([torch.isin(y, torch.tensor(federation.groups.tail)).sum().item() for y in labels])
    sizes = torch.tensor([len(y) for y in labels])
    dual = torch.tensor(run.metrics[-1]["dual"], dtype=torch.float64)
    weights = torch.tensor(client_weights(dual, torch.arange(len(labels)), sizes.tolist())) / sizes
    print(f"clients without weight after round {run.rounds_done}: {int((weights == 0).sum())} of {len(labels)}")
    print(f"share of the tail in all examples: {100 * tail.sum() / sizes.sum():.1f} %")
    print(f"each example weighted as its client is: {100 * (weights * tail).sum() / (weights * sizes).sum():.1f} %")


if __name__ == "__main__":
    main()
