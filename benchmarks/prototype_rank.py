"""What prototypes of a low rank, or in half precision, do to RedGrape's accuracy.

    python benchmarks/prototype_rank.py --data digits
    python benchmarks/prototype_rank.py --data cifar100 --data-root data

Real data with a long tail, several seeds; every way meets the same data, initial weights, clients and batches. Prints a
Markdown table, means over the seeds of

    error       relative error of the sum of prototypes that a client uses, weight and bias together, in the Frobenius
                norm: made in both ways at the models of the exact run, every tenth round, mean over the clients
    accuracy    of the last ten rounds, and that of the tail classes, with the standard deviation over the seeds
    difference  to exact in accuracy, seed by seed, with the standard error of its mean

FedAvg is there to show what prototypes and real examples bring at all.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import redgrape as rg
from redgrape import nets, tree
from redgrape.data.federation import Federation
from redgrape.data.prepare import DataOptions, prepare
from redgrape.engines import ClientHalf
from redgrape.method import Method
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.redgrape import RedGrape
from redgrape.numerics import same_bits_everywhere
from redgrape.tree import Tensors, Tree

SETTINGS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    # data, net, hyper-parameters; the digits have those of experiments/demo.toml
    "digits": ({"source": "digits", "ir": 50.0}, "mlp", {"lr": 0.02, "batch_size": 32}),
    "mnist": ({"source": "mnist", "ir": 100.0, "head_cap": 1000}, "cnn", {"lr": 0.02, "batch_size": 32, "epochs": 2}),
    "cifar100": (
        {"source": "cifar100", "ir": 100.0, "head_cap": 250},
        "mlp",
        {"lr": 0.05, "batch_size": 32, "epochs": 2, "threshold": 2},
    ),
}

WAYS: dict[str, dict[str, Any] | None] = {
    "fedavg": None,
    "exact": {},
    "half": {"prototype_precision": "half"},
    "rank 8": {"prototype_rank": 8},
    "rank 4": {"prototype_rank": 4},
    "rank 2": {"prototype_rank": 2},
    "rank 1": {"prototype_rank": 1},
}


def method_of(way: str, options: Mapping[str, Any]) -> Method:
    form = WAYS[way]
    if form is None:
        return FedAvg(**{name: value for name, value in options.items() if name in FedAvg.model_fields})
    return RedGrape(**options, **form)


def prototype_sums(method: RedGrape, server: Tree, half: ClientHalf, round: int) -> list[Tensors]:
    """The sum that each client would use, if all made their prototypes at the server's model."""
    sites = [half.site(k, round) for k in range(half.federation.num_clients) if half.federation.size(k)]
    updates = {s.client: {"prototypes": method._local_prototypes(s.load(server["model"]), s)} for s in sites}
    W = {name.removeprefix("classifier."): t for name, t in server["model"].items() if name.startswith("classifier.")}
    table, held = method._global_prototypes(method.form.none(W), updates)
    return [method.form.sum(table, held & ~method.real_classes(s), W["weight"].dtype) for s in sites]


def errors(server: Tree, half: ClientHalf, round: int, options: Mapping[str, Any]) -> dict[str, float]:
    """For every way of RedGrape the mean over the clients of the relative error of their sums."""
    with same_bits_everywhere():
        sums = {
            way: prototype_sums(RedGrape(**options, **form), server, half, round)
            for way, form in WAYS.items()
            if form is not None
        }

    def distance(a: Tensors, b: Tensors) -> float:
        return float(tree.norm([a[name] - b[name] for name in a]) / tree.norm(b.values()))

    exact = sums["exact"]
    return {
        way: statistics.mean(distance(a, b) for a, b in zip(found, exact, strict=True) if tree.norm(b.values()) > 0)
        for way, found in sums.items()
    }


def run(way: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The accuracies of the last ten rounds; with `exact` also the errors of all ways."""
    data, net, hyper_parameters = SETTINGS[options.data]
    federation: Federation = prepare(DataOptions(**data), seed, options.data_root)
    shape = tuple(federation.test.x.shape[1:])
    build = partial(nets.build, net, shape, federation.num_classes, seed)
    method = method_of(way, hyper_parameters)
    found: list[dict[str, float]] = []
    tests: list[dict[str, Any]] = []
    half = ClientHalf(method, federation, build, seed, options.rounds, torch.device("cpu"))
    with rg.Training(
        method,
        federation,
        build,
        rounds=options.rounds,
        seed=seed,
        workers=options.workers,
        evaluate_every=options.rounds,
    ) as training:
        for step in training.steps():
            if "test" in step.record:
                tests.append(step.record["test"])
            if way == "exact" and step.state.round % 10 == 0:
                found.append(errors(step.state.server, half, step.state.round, hyper_parameters))
    return {
        "way": way,
        "seed": seed,
        "accuracy": 100 * statistics.mean(t["accuracy"] for t in tests[-10:]),
        "tail": 100 * statistics.mean(t["tail"] for t in tests[-10:]),
        "errors": {w: statistics.mean(f[w] for f in found) for w in found[0]} if found else {},
    }


def with_spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values) if len(values) > 1 else 0:.2f}"


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    of = {way: [r for r in runs if r["way"] == way] for way in WAYS}
    lines = [
        "| prototypes | error of the sum | accuracy, % | tail, % | difference | difference, tail |",
        "|---|---|---|---|---|---|",
    ]
    for way, mine in of.items():
        if not mine:
            continue
        error = statistics.mean(r["errors"][way] for r in of["exact"]) if way != "fedavg" else None
        cells = [
            "" if error is None else f"{error:.1e}",
            *(with_spread([r[k] for r in mine]) for k in ("accuracy", "tail")),
        ]
        for key in ("accuracy", "tail"):
            gaps = [a[key] - b[key] for a, b in zip(mine, of["exact"], strict=True)]
            doubt = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
            cells.append("" if way == "exact" else f"{statistics.mean(gaps):+.2f} ± {doubt:.2f}")
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=SETTINGS, default="digits", help="(default: digits)")
    parser.add_argument("--data-root", type=Path, help="where the data lies that `redgrape data fetch` gets")
    parser.add_argument("--rounds", type=int, default=20, help="(default: 20)")
    parser.add_argument("--seeds", default="0,1,2", help="(default: 0,1,2)")
    parser.add_argument("--workers", type=int, default=1, help="(default: 1)")
    parser.add_argument("--json", type=Path, help="also write the figures of every run to this file")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in options.seeds.split(","):
        for way in WAYS:
            runs.append(run(way, int(seed), options))
            if options.json:  # after every run, so that a long measurement may be broken off
                figures = {"data": options.data, "rounds": options.rounds, "runs": runs}
                options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
