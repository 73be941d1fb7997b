"""RedGrape with 1,000 classes and 512 features: memory, bytes and seconds of a round.

    python benchmarks/many_classes.py

An encoder of 10 million parameters on vectors, synthetic long-tailed data (IR 50), 20 clients, 5 sampled, 3 rounds, one
worker. Prints, as a Markdown table, the peak resident memory of the process; the bytes that a client receives and sends
in a round, on average and in multiples of the model's; the seconds of the last round; and whether memory stays within
4 GB, and both ways below five models.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import redgrape as rg
from redgrape import determinism, tree
from redgrape.data.longtail import exponential
from redgrape.data.partition import partition
from redgrape.methods.redgrape import RedGrape

CLASSES, FEATURES, INPUTS, HIDDEN = 1000, 512, 256, (2560, 3072)
HEAD, IR, CLIENTS, SAMPLED, ROUNDS = 50, 50.0, 20, 5, 3
MEMORY, TIMES_THE_MODEL = 4.0, 5.0  # what is asked for: GB, and multiples of the model each way


def build(seed: int = 0) -> rg.Net:
    widths = (INPUTS, *HIDDEN, FEATURES)
    with determinism.global_stream(determinism.key(seed, "net")):
        layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        return rg.Net(nn.Sequential(*layers), nn.Linear(FEATURES, CLASSES))


def federation(alpha: float) -> rg.Federation:
    """Noise around a mean of each class."""
    random = torch.Generator().manual_seed(0)
    labels = np.repeat(np.arange(CLASSES), exponential([HEAD] * CLASSES, ir=IR))
    means = torch.randn(CLASSES, INPUTS, generator=random)

    def examples(y: Tensor) -> rg.Examples:
        return rg.Examples(means[y] + torch.randn(len(y), INPUTS, generator=random), y)

    parts = partition(labels, "class_dirichlet", clients=CLIENTS, alpha=alpha, seed=0)
    clients = [examples(torch.from_numpy(labels[rows])) for rows in parts]
    return rg.Federation(clients, examples(torch.arange(CLASSES)), CLASSES)


def measure(alpha: float) -> dict[str, Any]:
    data = federation(alpha)
    held = [len(torch.unique(data.client(k).labels)) for k in range(CLIENTS)]
    method = RedGrape(epochs=1, threshold=8)
    records, seconds = [], 0.0
    with rg.Training(method, data, build, rounds=ROUNDS, clients_per_round=SAMPLED) as training:
        for step in training.steps():
            records.append(step.record)
            seconds = step.seconds["train"]
        model = tree.num_bytes(step.state.server["model"])
    return {
        "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,  # Linux counts kilobytes
        "down": max(r["bytes_down"] for r in records) / SAMPLED / model,
        "up": max(r["bytes_up"] for r in records) / SAMPLED / model,
        "seconds": seconds,
        "model": model,
        "classes_held": held,
        "accuracy": records[-1]["test"]["accuracy"],
    }


def meets(m: dict[str, Any]) -> bool:
    return m["gigabytes"] <= MEMORY and max(m["down"], m["up"]) < TIMES_THE_MODEL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--alpha", type=float, default=0.1, help="of the Dirichlet partition (default: 0.1)")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    options = parser.parse_args()
    m = measure(options.alpha)
    print("| peak memory, GB | down, x model | up, x model | s a round | meets it |")
    print("|---|---|---|---|---|")
    figures = f"{m['gigabytes']:.2f} | {m['down']:.2f} | {m['up']:.2f} | {m['seconds']:.0f}"
    print(f"| {figures} | {'yes' if meets(m) else 'no'} |")
    held = m["classes_held"]
    print(
        f"\nThe model has {m['model'] / 1e6:.1f} MB. A client holds {min(held)} to {max(held)} classes, "
        f"{np.mean(held):.0f} on average."
    )
    if options.json:
        options.json.write_text(json.dumps(m | {"meets": meets(m)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
