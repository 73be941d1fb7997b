"""Many classes: memory, messages, client states and seconds of a round.

    python benchmarks/many_classes.py
    python benchmarks/many_classes.py --classes 1000 --methods redgrape      # needs 7 GB

8142: embeddings with 512 features, counts like iNaturalist's (1,000 examples in the largest class, 6 in the smallest),
9,275 clients of which 20 a round, a linear head. There the model is the classifier.
1000: vectors, an encoder of 10 million parameters, 20 clients of which 5 a round.

The data is synthetic: noise around a mean of each class. Every measurement has a process of its own with one worker,
one local epoch, 3 rounds, and an evaluation after each. Client states lie in files, as in a run. So few rounds say
nothing of accuracy. The Markdown table shows: the peak resident memory; what a client receives and sends in a round, as
multiples of the model; one client's state, and all states after the last round; the seconds of the last round, and of
its evaluation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import redgrape as rg
from redgrape import determinism, methods, tree
from redgrape.data.longtail import exponential
from redgrape.data.partition import partition
from redgrape.method import Method
from redgrape.runs.client_states import StateFiles, StateFolder
from redgrape.runs.figures import packed

FEATURES, ROUNDS = 512, 3
MEMORY, TIMES_THE_MODEL = 4.0, 1.2  # what is asked for: GB, and multiples of the model each way
LIMITS = (f"{MEMORY:g} GB", f"{TIMES_THE_MODEL:g} models each way")
METHODS = ("fedavg", "logit_adjustment", "vine", "vine:memory=false", "vine:two_stream=false")

Problem = tuple[rg.Federation, Callable[[], rg.Net], int]  # the data, the net, and the clients of a round


def linear_head() -> Problem:
    """Every class has a place on a circle, and examples lie around it. A client holds an arc: few classes of many."""
    C, clients = 8142, 9275
    random = np.random.default_rng(0)
    sizes = (1000 * np.arange(1, C + 1) ** -0.56).astype(int)
    labels = np.repeat(np.arange(C), sizes)
    labels = labels[np.argsort((random.random(C)[labels] + random.normal(0, 0.05, len(labels))) % 1)]
    shares = random.lognormal(0, 1, clients)
    ends = (np.cumsum(shares) / shares.sum() * (len(labels) - clients)).astype(int) + np.arange(1, clients + 1)
    parts = np.split(np.arange(len(labels)), ends[:-1])
    data = _noise_around_means(labels, parts, C, FEATURES, tests=3)
    return data, lambda: _net([FEATURES], C), 20


def encoder() -> Problem:
    C, inputs = 1000, 256
    labels = np.repeat(np.arange(C), exponential([50] * C, ir=50.0))
    parts = partition(labels, "class_dirichlet", clients=20, alpha=0.1, seed=0)
    return _noise_around_means(labels, parts, C, inputs, tests=1), lambda: _net([inputs, 2560, 3072, FEATURES], C), 5


PROBLEMS = {"1000": encoder, "8142": linear_head}


def _noise_around_means(labels: Any, parts: Any, C: int, inputs: int, tests: int) -> rg.Federation:
    random = torch.Generator().manual_seed(0)
    means = torch.randn(C, inputs, generator=random)

    def examples(y: Tensor) -> rg.Examples:
        return rg.Examples(means[y].add_(torch.randn(len(y), inputs, generator=random)), y)

    train = examples(torch.from_numpy(labels))
    return rg.Federation.from_parts(train, parts, examples(torch.arange(C).repeat(tests)), C)


def _net(widths: list[int], C: int) -> rg.Net:
    with determinism.global_stream(determinism.key(0, "net")):
        layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        return rg.Net(nn.Sequential(*layers), nn.Linear(widths[-1], C))


def method_of(spec: str) -> Method:
    name, _, settings = spec.partition(":")
    values = {key: json.loads(value) for key, _, value in (s.partition("=") for s in filter(None, settings.split(",")))}
    return methods.load(name)(epochs=1, **values)


def measure(classes: str, spec: str, rounds: int) -> dict[str, Any]:
    data, build, sampled = PROBLEMS[classes]()
    records = []
    with (
        tempfile.TemporaryDirectory() as folder,
        rg.Training(method_of(spec), data, build, rounds=rounds, clients_per_round=sampled) as training,
    ):
        states = StateFiles(StateFolder(Path(folder) / "clients"), data.num_clients)
        for step in training.steps(states=states, spill=Path(folder)):
            records.append(step.record)
        model = tree.num_bytes(step.state.server["model"])
        sizes = [tree.num_bytes(step.state.clients[k]) for k in step.state.clients]
    answered = [len(record["answered"]) for record in records]
    return {
        "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,  # Linux counts kilobytes
        "down": max(record["bytes_down"] for record in records) / sampled / model,
        "up": max(r["bytes_up"] / n for r, n in zip(records, answered, strict=True)) / model,
        "state": max(sizes, default=0) / 1e6,
        "states": sum(sizes) / 1e9,
        "clients_with_state": len(sizes),
        "seconds": step.seconds["train"],
        "evaluation": step.seconds["evaluate"],
        "model": model / 1e6,
        "clients": data.num_clients,
        "examples": len(data.train),
        "line": len(json.dumps(packed(records[-1]))),  # bytes of a round in metrics.jsonl
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", default=METHODS, help=f"default: {' '.join(METHODS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.classes[0], options.methods[0], options.rounds)))
        return
    found = []
    print("| classes | method | GB | down | up | a state, MB | all, GB | s a round | s evaluation |")
    print(f"|---|{'---|' * 8}")
    for classes, spec in itertools.product(options.classes, options.methods):
        arguments = ["--classes", classes, "--methods", spec, "--rounds", str(options.rounds), "--one"]
        done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, check=True)
        m = {"classes": classes, "method": spec, **json.loads(done.stdout)}
        found.append(m)
        sizes = f"{m['gigabytes']:.2f} | {m['down']:.2f} | {m['up']:.2f} | {m['state']:.1f} | {m['states']:.2f}"
        seconds = f"{m['seconds']:.1f} | {m['evaluation']:.1f}"
        print(f"| {classes} | `{spec}` | {sizes} | {seconds} |", flush=True)
    for m in found:
        fits = m["gigabytes"] <= MEMORY, max(m["down"], m["up"]) <= TIMES_THE_MODEL
        within = [f"{'within' if fit else 'above'} {what}" for fit, what in zip(fits, LIMITS, strict=True)]
        print(f"{m['classes']} classes, {m['method']}: {', '.join(within)}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
