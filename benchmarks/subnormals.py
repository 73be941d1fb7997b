"""What numbers too small to be normal cost: FedAvg on a linear head, with them and with zeros in their place.

    python benchmarks/subnormals.py --rounds 6

A head of 100 classes on 1280 made-up features, as those of a pretrained encoder. With a learning rate of 0.1 its
probabilities soon underflow. Both ways alternate, on one thread. Prints the processor seconds of each round and their
ratio, as a Markdown table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

import redgrape as rg
from redgrape import determinism
from redgrape.methods.fedavg import FedAvg
from redgrape.training import Training

CLASSES, FEATURES, CLIENTS, EACH = 100, 1280, 2, 1000


def federation() -> rg.Federation:
    stream = np.random.default_rng(0)
    centres = stream.exponential(size=(CLASSES, FEATURES)).astype(np.float32)

    def draw() -> rg.Examples:
        shown, y = stream.integers(CLASSES, size=(2, EACH))
        y = np.where(stream.random(EACH) < 0.3, y, shown)  # three in ten labels are random, so that training goes on
        return rg.Examples(centres[shown] + stream.exponential(size=(EACH, FEATURES)).astype(np.float32), y)

    return rg.Federation([draw() for _ in range(CLIENTS)], draw(), CLASSES)


def rounds(data: rg.Federation, number: int) -> Iterator[float]:
    """The processor seconds of each round."""
    method = FedAvg(lr=0.1)
    with Training(
        method, data, lambda: rg.Net(nn.Identity(), nn.Linear(FEATURES, CLASSES)), rounds=number, seed=0
    ) as t:
        steps = t.steps()
        while True:
            start = time.process_time()
            if next(steps, None) is None:
                return
            yield time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, zeros = federation(), determinism._no_subnormals
    ways: dict[str, tuple[Any, Iterator[float]]] = {
        "kept": (nullcontext, rounds(data, options.rounds)),
        "zero": (zeros, rounds(data, options.rounds)),
    }
    print("| round | kept, s | zero, s | ratio |\n|---|---|---|---|")
    for number in range(1, options.rounds + 1):
        seconds = {}
        for name, (block, steps) in ways.items():
            determinism._no_subnormals = block
            seconds[name] = next(steps)
        print(f"| {number} | {seconds['kept']:.2f} | {seconds['zero']:.2f} | {seconds['kept'] / seconds['zero']:.1f} |")


if __name__ == "__main__":
    main()
