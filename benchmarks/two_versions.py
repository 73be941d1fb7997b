"""Two installations of redgrape side by side: does a change make anything slower?

    python benchmarks/two_versions.py --before OLD/.venv/bin/python --after .venv/bin/python --data-root DIR

Each case runs in a process of its own, and the two installations take turns. `cnn` is local training as in the paper
(McMahan's CNN on MNIST-LT, batches of 64, five epochs, ten clients). `linear` is a net so small that a round is nearly
all overhead (digits, 20 of 200 clients, evaluation in every round). `start` is `redgrape --help`. The table shows
median seconds and the median of the ratios within a repetition, with the range of the repetitions. A ratio above one
says that the new installation is slower. The machine must be idle.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

CASES = ("start", "linear fedavg", "linear redgrape", "cnn fedavg", "cnn redgrape")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", help="the Python of the first installation")
    parser.add_argument("--after", default=sys.executable, help="the Python of the second installation")
    parser.add_argument("--data-root", type=Path, help="the folder with MNIST")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(seconds_a_round(options.case, options.data_root))
        return
    print("| case | before, s | after, s | ratio (lowest to highest) |")
    print("|---|---|---|---|")
    for case in CASES:
        before, after = [], []
        for _ in range(options.repetitions):
            before.append(measure(options.before, case, options.data_root))
            after.append(measure(options.after, case, options.data_root))
        ratios = [new / old for old, new in zip(before, after, strict=True)]
        print(
            f"| {case} | {statistics.median(before):.3f} | {statistics.median(after):.3f} | "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |",
            flush=True,
        )


def measure(python: str, case: str, data_root: Path) -> float:
    if case == "start":
        began = time.perf_counter()
        subprocess.run([python, "-m", "redgrape", "--help"], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began
    command = [python, __file__, "--case", case, "--data-root", str(data_root)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def seconds_a_round(case: str, data_root: Path) -> float:
    """Median over the rounds of one training, without the first two: RedGrape re-balances from the second on."""
    from functools import partial

    from redgrape import nets
    from redgrape.data.prepare import DataOptions, prepare
    from redgrape.methods.fedavg import FedAvg
    from redgrape.methods.redgrape import RedGrape
    from redgrape.training import Training

    net, name = case.split()
    method = {"fedavg": FedAvg, "redgrape": RedGrape}[name]()
    if net == "cnn":
        data = DataOptions(source="mnist", ir=100.0, partition="prior_dirichlet", clients=10, head_cap=1000)
    else:
        data = DataOptions(source="digits", ir=10.0, partition="prior_dirichlet", clients=200)
    federation = prepare(data, 0, data_root)
    build = partial(nets.build, net, tuple(federation.train.x.shape[1:]), federation.num_classes, 0)
    rounds, each = (4, 10) if net == "cnn" else (22, 20)
    with Training(
        method,
        federation,
        build,
        rounds=rounds,
        clients_per_round=each,
        workers=2 if net == "cnn" else 1,
        evaluate_every=rounds if net == "cnn" else 1,
    ) as training:
        took = [sum(step.seconds.values()) for step in training.steps()]
    return statistics.median(took[2:-1])


if __name__ == "__main__":
    main()
