"""What RedGrape's accuracy pays for privacy: against min_count, min_clients and noise.

    python benchmarks/privacy_price.py --figure docs/images/privacy.png
    python benchmarks/privacy_price.py --data mnist --data-root data --only floors
    python benchmarks/privacy_price.py --only sums

Long-tailed data over ten clients, several seeds; every setting meets the same data, initial weights and batches. Prints
Markdown tables, mean and standard deviation over the seeds of the accuracy of the last ten rounds in %:

    floors    min_count 1, 2, 4, 8 with min_clients 1 and 3 (8 and 3 are the preset private); how many pairs of a client
              and a class are reported, and how many classes are ever released. Beside FedAvg, and RedGrape without
              prototypes
    noise     on the prototypes alone, and on prototypes and model, at floors of 1; multipliers count against the clips
              below. epsilon as the accountant gives it for the run (delta 1e-5, one client's whole data).
    sums      FedAvg, RedGrape with the preset private, and Vine, stateless and with weights alike, which starts and
              pulls as RedGrape does: clipped, and with
              noise on the sums. Not in the figure. Also with --clients 30 --per-round 6 --rounds 80

The noise is made from the seed, so that the figures can be repeated; a federation must not do that.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import redgrape as rg
from redgrape import nets
from redgrape.data.federation import Federation
from redgrape.data.prepare import DataOptions, prepare
from redgrape.exchange import Exchange
from redgrape.method import Method
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.redgrape import RedGrape
from redgrape.methods.vine import Vine
from redgrape.privacy.account import epsilon

SETTINGS: dict[str, tuple[dict[str, Any], str, dict[str, Any], int]] = {
    # data, net, hyper-parameters, rounds; the digits have those of experiments/demo.toml
    "digits": ({"source": "digits", "ir": 50.0}, "mlp", {"lr": 0.02, "batch_size": 32}, 20),
    "mnist": (
        {"source": "mnist", "ir": 100.0, "head_cap": 1000},
        "cnn",
        {"lr": 0.02, "batch_size": 32, "epochs": 2},
        25,
    ),
}
COUNTS = (1, 2, 4, 8)
CLIENTS = (1, 3)
NOISES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
SUM_NOISES = (0.0, 0.1, 0.3, 1.0)
CLIPS = {"clip": 1.0, "class_clip": 8.0}  # few updates, and hardly any prototype, are longer
PARTS = ("floors", "noise", "sums")


def ways(parts: Sequence[str], hyper: Mapping[str, Any]) -> dict[str, tuple[Method, Exchange]]:
    """Method and exchange by the name of the setting."""
    plain, redgrape = Exchange(), RedGrape(**hyper)
    found: dict[str, tuple[Method, Exchange]] = {}
    if "sums" in parts:
        as_redgrape: dict[str, Any] = {**hyper, "extra_init": "default", "length": "batch"}
        vine = {"memory": False, **as_redgrape}
        found["fedavg"] = FedAvg(**hyper), plain
        found["redgrape, private"] = redgrape, Exchange(preset="private")
        found["vine"] = Vine(**as_redgrape), plain
        found["vine stateless"] = Vine(**vine), plain
        summed = {"fedavg": FedAvg(**hyper), "vine stateless, alike": Vine(**vine, weights="alike", margin=0.0)}
        for name, method in summed.items():
            for z in SUM_NOISES:
                exchange = Exchange(clip=CLIPS["clip"], noise=z, randomness="seed")
                found[f"{name}, noise {z:g}"] = method, exchange
    if "floors" in parts:
        found["fedavg"] = FedAvg(**hyper), plain
        found["no prototypes"] = RedGrape(**hyper, use_prototypes=False), plain
        found |= {
            floors(n, m): (redgrape, Exchange(min_count=n, min_clients=m)) for m in CLIENTS for n in COUNTS
        }  # the last of them is the preset private
    if "noise" in parts:
        prototypes = {"class_clip": CLIPS["class_clip"], "randomness": "seed"}
        both = {**CLIPS, "randomness": "seed"}
        found |= {noisy("prototypes", z): (redgrape, Exchange(**prototypes, class_noise=z)) for z in NOISES}
        found |= {noisy("both", z): (redgrape, Exchange(**both, class_noise=z, noise=z)) for z in NOISES}
    return found


def floors(count: int, clients: int) -> str:
    return f"min_count {count}, min_clients {clients}"


def noisy(what: str, multiplier: float) -> str:
    return f"noise on {what}, {multiplier:g}"


def measured(
    method: Method,
    exchange: Exchange,
    federation: Federation,
    net: str,
    rounds: int,
    seed: int,
    per_round: int | None,
) -> dict[str, float]:
    build = partial(nets.build, net, tuple(federation.train.x.shape[1:]), federation.num_classes, seed)
    history: list[dict[str, Any]] = []
    options: dict[str, Any] = {"rounds": rounds, "seed": seed, "exchange": exchange, "clients_per_round": per_round}
    with rg.Training(method, federation, build, **options) as training:
        history.extend(step.record for step in training.steps())
        mechanisms = exchange.mechanisms(training.parts, federation.num_classes)
    last = [record["test"] for record in history[-10:]]
    found = {name: 100 * statistics.fmean(test[name] for test in last) for name in ("accuracy", "head", "tail")}
    if isinstance(method, RedGrape):
        counts = torch.from_numpy(federation.client_counts)
        found["reported"] = int((counts >= exchange.min_count).sum()) if method.use_prototypes else 0
        found["held"] = int((counts > 0).sum())
        found["released"] = sum(history[-1]["prototype_seen"])
    took_part = Counter(k for record in history for k in record["answered"])
    found["epsilon"] = epsilon(mechanisms, max(took_part.values()), exchange.delta) if mechanisms else math.inf
    return found


def mean_and_deviation(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def table(results: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    lines = [
        "| setting | overall | head | tail | pairs reported | classes released | epsilon |",
        "|---|---|---|---|---|---|---|",
    ]
    for way, seeds in results.items():
        figures = [mean_and_deviation([s[name] for s in seeds]) for name in ("accuracy", "head", "tail")]
        pairs = classes = ""
        if "reported" in seeds[0]:
            pairs = f"{sum(s['reported'] for s in seeds)} of {sum(s['held'] for s in seeds)}"
            classes = f"{statistics.fmean(s['released'] for s in seeds):.1f}"
        most = max(s["epsilon"] for s in seeds)
        spent = "infinite" if math.isinf(most) else f"{most:.3g}"
        lines.append(f"| {way} | {' | '.join(figures)} | {pairs} | {classes} | {spent} |")
    return "\n".join(lines)


def draw(results: Mapping[str, Sequence[Mapping[str, float]]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def line(axes: Any, x: Sequence[float], names: Sequence[str], figure: str, **style: Any) -> None:
        values = [[s[figure] for s in results[name]] for name in names]
        means = [statistics.fmean(v) for v in values]
        spread = [statistics.stdev(v) if len(v) > 1 else 0 for v in values]
        axes.errorbar(x, means, yerr=spread, capsize=3, marker="o", markersize=5, **style)

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), sharey=True)
    blue, red, grey = "#1f5fa8", "#b3263a", "#777777"
    for clients, style in ((1, "-"), (3, "--")):
        names = [floors(n, clients) for n in COUNTS]
        places = range(len(COUNTS))
        line(left, places, names, "head", color=blue, linestyle=style, label=f"head, min_clients {clients}")
        line(left, places, names, "tail", color=red, linestyle=style, label=f"tail, min_clients {clients}")
    for name, style in (("no prototypes", ":"), ("fedavg", "-.")):
        level = statistics.fmean(s["tail"] for s in results[name])
        label = "RedGrape without prototypes" if name == "no prototypes" else "FedAvg"
        for axes in (left, right):
            axes.axhline(level, color=grey, linestyle=style, linewidth=1.2, label=f"tail, {label}")
    left.set_xticks(range(len(COUNTS)), [str(n) for n in COUNTS])
    left.set_xlabel("min_count: a client reports a class from this many examples on")
    left.set_ylabel("test accuracy, last ten rounds (%)")
    left.set_title(f"floors, seeds: {len(results['fedavg'])}", loc="left")
    places = range(len(NOISES))
    for what, style in (("prototypes", "-"), ("both", "--")):
        names = [noisy(what, z) for z in NOISES]
        also = "prototypes" if what == "prototypes" else "prototypes and model"
        line(right, places, names, "head", color=blue, linestyle=style, label=f"head, noise on {also}")
        line(right, places, names, "tail", color=red, linestyle=style, label=f"tail, noise on {also}")
    spent = [results[noisy("both", z)][0]["epsilon"] for z in NOISES]
    marks = [f"{z:g}\n{'∞' if math.isinf(e) else f'{e:,.0f}'}" for z, e in zip(NOISES, spent, strict=True)]
    right.set_xticks(places, marks)
    right.set_xlabel("noise multiplier, and epsilon with noise on both (delta = 1e-5)")
    right.set_title(f"clipping and noise, seeds: {len(results[noisy('both', 0)])}", loc="left")
    for axes in (left, right):
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_ylim(0, 100)
        axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=SETTINGS, default="digits")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--noise-seeds", type=int, default=1, help="so many of the seeds for the part on noise (1)")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--per-round", type=int, help="so many of the clients in a round (all)")
    parser.add_argument("--figure", type=Path, help="also draw it (needs floors and noise)")
    parser.add_argument("--json", type=Path, help="keep the figures here, and take those that are here already")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, net, hyper, rounds = SETTINGS[options.data]
    rounds = options.rounds or rounds
    known: dict[str, dict[str, float]] = {}
    if options.json and options.json.exists():
        known = json.loads(options.json.read_text())
    results: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        chosen = DataOptions.model_validate({**data, "clients": options.clients})
        federation = prepare(chosen, seed, options.data_root)
        for way, (method, exchange) in ways(options.only, hyper).items():
            if way.startswith("noise") and seed >= options.noise_seeds:
                continue
            who = f"{options.per_round or options.clients} of {options.clients} clients"
            name = f"{options.data}, {who}, {rounds} rounds, seed {seed}: {way}"
            if name not in known:
                known[name] = measured(method, exchange, federation, net, rounds, seed, options.per_round)
                if options.json:
                    options.json.write_text(json.dumps(known, indent=1) + "\n")
            results.setdefault(way, []).append(known[name])
    print(table(results))
    if options.figure:
        draw(
            results,
            f"{options.data}, IR {data['ir']:g}, {options.clients} clients, {rounds} rounds",
            options.figure,
        )


if __name__ == "__main__":
    main()
