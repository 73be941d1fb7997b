"""A whole RedGrape round against a whole FedAvg round, side by side.

    python benchmarks/redgrape_cost.py --data-root DIR                 MNIST-LT, IR 100, 10 of 10 clients and 10 of 50
    python benchmarks/redgrape_cost.py --data-root DIR --head-cap 1000 --repeats 5

Local training as in the paper: McMahan's CNN, batches of 64, five epochs. Both methods have their own workers and take
turns, round by round, on the same clients; the first round of each, in which nothing is re-balanced yet, is not
counted. Beside the measured ratio stands the floor: the multiplications that RedGrape adds, which are a forward pass of
the balanced set in every local step (a third of a training step's) and one of all examples for the prototypes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from redgrape import nets
from redgrape.data.federation import Federation
from redgrape.data.prepare import DataOptions, prepare
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.redgrape import RedGrape
from redgrape.rounds import sample_clients
from redgrape.training import Step, Training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--source", default="mnist")
    parser.add_argument("--net", default="cnn")
    parser.add_argument("--head-cap", type=int)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measure(options, clients) for clients in options.clients]
    print("| clients | FedAvg, s a round | RedGrape, s a round | ratio (lowest to highest) | floor |")
    print("|---|---|---|---|---|")
    for row in rows:
        ratios = [b / a for a, b in zip(row["fedavg"], row["redgrape"], strict=True)]
        print(
            f"| 10 of {row['clients']} | {statistics.median(row['fedavg']):.2f} | "
            f"{statistics.median(row['redgrape']):.2f} | {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f}) | {row['floor']:.3f} |"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def measure(options: argparse.Namespace, clients: int) -> dict[str, object]:
    data = DataOptions(
        source=options.source, ir=100.0, partition="prior_dirichlet", clients=clients, head_cap=options.head_cap
    )
    federation = prepare(data, 0, options.data_root)
    build = partial(nets.build, options.net, tuple(federation.train.x.shape[1:]), federation.num_classes, 0)
    seconds: dict[str, list[float]] = {"fedavg": [], "redgrape": []}
    methods = {"fedavg": FedAvg(), "redgrape": RedGrape()}
    with contextlib.ExitStack() as stack:
        runs: dict[str, Iterator[Step]] = {}
        for name, method in methods.items():
            training = Training(
                method,
                federation,
                build,
                rounds=options.repeats + 1,
                clients_per_round=10,
                workers=options.workers,
                evaluate_every=options.repeats + 20,
            )
            stack.enter_context(training)
            runs[name] = training.steps()
        for t in range(options.repeats + 1):
            for name, steps in runs.items():
                taken = next(steps).seconds["train"]
                if t:
                    seconds[name].append(taken)
    rounds = [sample_clients(range(clients), 10, 0, t) for t in range(2, options.repeats + 2)]
    floor = statistics.median(flop_ratio(federation, methods["redgrape"], sampled) for sampled in rounds)
    return {"clients": clients, **seconds, "floor": floor}


def flop_ratio(federation: Federation, method: FedAvg, sampled: list[int]) -> float:
    """Forward passes of one example, where a training step makes three of each of its examples."""
    assert isinstance(method, RedGrape)
    plain = extra = 0
    for k in sampled:
        size = federation.size(k)
        balanced = int(np.count_nonzero(federation.client_counts[k] >= method.threshold)) * int(method.threshold)
        plain += 3 * method.epochs * size
        extra += method.steps(size) * balanced + size
    return (plain + extra) / plain


if __name__ == "__main__":
    main()
