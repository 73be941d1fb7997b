"""Your own data and net: three sites with imbalanced vectors, FedAvg against RedGrape, the recall of every class.

    python examples/bring_your_own_data.py

The data is made up, so the script needs no files: vectors of 20 measurements in four classes. One class is rare and one
is very rare. To use your own data, replace `sites` and `test`. rg.Examples takes NumPy arrays or tensors: x as floats
[n, ...] or uint8 pixels [n, channels, height, width], y as class numbers from 0.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import redgrape as rg
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.redgrape import RedGrape

CLASSES = ["normal", "worn", "cracked", "broken"]
FEATURES = 20
COUNTS = {  # examples of each class at each site: no site has many of the last two, and two sites lack one of them
    "north": [400, 120, 12, 0],
    "south": [250, 30, 0, 6],
    "west": [150, 60, 8, 4],
}


def measurements(counts: list[int], seed: int) -> rg.Examples:
    """This many vectors of each class, around the centre of the class."""
    centres = np.random.default_rng(0).normal(size=(len(CLASSES), FEATURES)) * 0.6
    y = np.repeat(np.arange(len(CLASSES)), counts)
    x = centres[y] + np.random.default_rng(seed).normal(size=(len(y), FEATURES))
    return rg.Examples(x.astype(np.float32), y)


def make_net() -> rg.Net:
    """Any encoder that returns one vector for each example, and a linear classifier."""
    torch.manual_seed(0)  # the same initial weights in every call
    encoder = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
    return rg.Net(encoder, nn.Linear(16, len(CLASSES)))


def main() -> None:
    sites = [measurements(counts, seed) for seed, counts in enumerate(COUNTS.values(), start=1)]
    test = measurements([250] * len(CLASSES), seed=99)
    federation = rg.Federation(sites, test, len(CLASSES), class_names=CLASSES)

    recall = {}
    for name, method in {
        "FedAvg": FedAvg(lr=0.05, batch_size=32),
        "RedGrape": RedGrape(lr=0.05, batch_size=32),
    }.items():
        result = rg.train(method, federation, make_net, rounds=10, workers=1)
        recall[name] = result.history[-1]["test"]["per_class"]

    print(f"{'class':<10}{'examples':>10}" + "".join(f"{name:>10}" for name in recall) + "   recall in %")
    for c, name in enumerate(CLASSES):
        figures = "".join(f"{100 * values[c]:>10.1f}" for values in recall.values())
        print(f"{name:<10}{federation.class_counts[c]:>10}{figures}")


if __name__ == "__main__":
    main()
