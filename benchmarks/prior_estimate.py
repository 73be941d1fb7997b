"""How far `prior=estimated` is from the true class prior, on the digits (IR 50, 10 clients).

    python benchmarks/prior_estimate.py [--seeds 0,1]

Prints the total variation distance after the first round, from which the estimate is made.
"""

from __future__ import annotations

import argparse
import functools

import torch

import redgrape as rg
from redgrape import nets
from redgrape.data.prepare import DataOptions, prepare
from redgrape.methods.balanced_softmax import BalancedSoftmax

SETTINGS = {"lr 0.01, batches of 64": {}, "lr 0.02, batches of 32": {"lr": 0.02, "batch_size": 32}}


def distance(net: str, seed: int, options: dict[str, float]) -> float:
    federation = prepare(DataOptions(), seed)
    build = functools.partial(nets.build, net, (1, 28, 28), 10, seed)
    method = BalancedSoftmax(prior="estimated", **options)
    estimate = rg.train(method, federation, build, rounds=1, seed=seed).server["prior"]
    truth = torch.from_numpy(federation.class_counts / federation.class_counts.sum())
    return float((estimate - truth).abs().sum() / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1")
    seeds = [int(s) for s in parser.parse_args().seeds.split(",")]
    print("| net | " + " | ".join(SETTINGS) + " |\n|---|" + "---|" * len(SETTINGS))
    for net in ("mlp", "cnn", "linear"):
        cells = [", ".join(f"{distance(net, s, options):.2f}" for s in seeds) for options in SETTINGS.values()]
        print(f"| {net} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
