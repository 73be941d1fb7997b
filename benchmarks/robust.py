"""Robust averages under attack, and what they do to honest clients that are different.

    python benchmarks/robust.py                            10 clients of which 2 are malicious, 10 rounds, 3 seeds
    python benchmarks/robust.py --clients 20 --malicious 4 --seeds 0 1
    python benchmarks/robust.py --tail-only                an honest client with tail classes alone, without attack
    python benchmarks/robust.py --cost                     only what the check of the updates and each average take

The packaged digits with the data of experiments/demo.toml (IR 50, Dirichlet 1) and the mlp, three local epochs with a
learning rate of 0.1. All clients take part in every round, and figures are means over the last three rounds and the
seeds. Every rule is told how many clients are malicious. All checks of updates are in place, so that some attacks are
refused. `clean` is the plain mean without any attack. An attack counts as withstood where accuracy is at least 90 % of
clean and tail recall at least 80 %.

    label flip      trained on labels C - 1 - y            ALIE             mean - 1.5 deviations of the honest
    x5              the client's own step, five times      inner product    -4 times the mean of the honest
    sign flip       the client's own step, turned round    tail rows        -5 times that in the tail's classifier rows
    prototypes rotated xK    features in another order, K times as long; all signs are right

The client with tail classes alone holds half of their examples and nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from redgrape import methods, nets, tree
from redgrape.data.examples import Examples
from redgrape.data.federation import Federation
from redgrape.data.prepare import DataOptions, prepare
from redgrape.determinism import same_bits_everywhere
from redgrape.engines import Answer, ClientHalf, Lost
from redgrape.engines.in_process import InProcess
from redgrape.exchange import Exchange, plausible, rules
from redgrape.exchange.checks import Inspection
from redgrape.method import Method
from redgrape.training import Step, Training
from redgrape.tree import Tensors

RULES: tuple[rules.Rule, ...] = get_args(rules.Rule)


Attack = Callable[[Tensors, list[Tensors], Sequence[int]], Tensors]
# of a malicious client's own update, the honest clients' and the tail classes, by the tensors' joined names


def scaled(factor: float, groups: str = "delta") -> Attack:
    """The tensors of the groups that begin so times the factor; class numbers stay."""
    return lambda own, honest, tail: {
        name: t * factor if name.startswith(groups) and t.is_floating_point() else t for name, t in own.items()
    }


def of_honest(combine: Callable[[Tensor, Tensor], Tensor]) -> Attack:
    """Every direction from the mean and the deviation of the honest clients'."""

    def attack(own: Tensors, honest: list[Tensors], tail: Sequence[int]) -> Tensors:
        stacked = {name: torch.stack([h[name] for h in honest]) for name in own if name.startswith("delta")}
        return own | {name: combine(t.mean(dim=0), t.std(dim=0)) for name, t in stacked.items()}

    return attack


def tail_rows(own: Tensors, honest: list[Tensors], tail: Sequence[int]) -> Tensors:
    """The opposite of the honest mean, five times, in the rows of the classifiers that belong to tail classes."""
    changed = dict(own)
    for name, t in own.items():
        if name.startswith("delta") and name.rpartition("classifier.")[2].rpartition("/")[2] in ("weight", "bias"):
            changed[name] = t.clone()
            changed[name][list(tail)] = -5 * torch.stack([h[name] for h in honest]).mean(dim=0)[list(tail)]
    return changed


def rotated(factor: float) -> Attack:
    """The prototypes' features in another order, which keeps every sign, and their weights this many times as long."""
    return lambda own, honest, tail: {
        name: factor * t.roll(t.shape[-1] // 2, dims=-1) if name == "prototypes/weight" else t
        for name, t in own.items()
    }


# What a malicious client sends. Flipped labels are in the data instead.
ATTACKS: dict[str, Attack] = {
    "none": scaled(1),
    "label flip": scaled(1),
    "x5": scaled(5),
    "sign flip": scaled(-1),
    "ALIE": of_honest(lambda mean, deviation: mean - 1.5 * deviation),
    "inner product": of_honest(lambda mean, deviation: -4 * mean),
    "tail rows": tail_rows,
    "prototypes rotated": rotated(1),
    "prototypes rotated x15": rotated(15),
    "prototypes rotated x1000": rotated(1000),
}


class Attacked(InProcess):
    """An engine some of whose clients are malicious. It keeps a round's answers, to be looked at."""

    def __init__(self, half: ClientHalf, malicious: list[int], attack: Attack, tail: Sequence[int]) -> None:
        super().__init__(half)
        self._malicious, self._attack, self._tail = malicious, attack, tail
        self.answers: dict[int, Any] = {}

    def run_clients(self, broadcast: Any, clients: Any, states: Any, round: int) -> Iterator[tuple[int, Answer | Lost]]:
        self.answers = dict(super().run_clients(broadcast, clients, states, round))
        flat = {k: tree.flatten(answer.update) for k, answer in self.answers.items()}
        honest = [t for k, t in flat.items() if k not in self._malicious]
        for k in self._malicious:
            update = tree.unflatten(self._attack(flat[k], honest, self._tail))
            self.answers[k] = self.answers[k]._replace(update=update)
        yield from self.answers.items()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--malicious", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--last", type=int, default=3, help="rounds at the end whose mean is told")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=["redgrape", "fedavg"])
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES)
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--tail-only", action="store_true", help="only the honest client with tail classes alone")
    parser.add_argument("--cost", action="store_true", help="only what check and averages take")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.cost:
        print_cost(options)
        return
    figures: dict[str, Any] = {}
    for name in options.methods:
        if options.tail_only:
            figures[name] = tail_only(name, options)
            print_tail_only(name, figures[name])
        else:
            figures[name] = under_attack(name, options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


@cache
def data(clients: int, seed: int) -> Federation:
    return prepare(DataOptions(source="digits", ir=50.0, partition="class_dirichlet", alpha=1.0, clients=clients), seed)


def made(name: str, options: argparse.Namespace) -> Method:
    return methods.load(name)(lr=options.lr, epochs=options.epochs, batch_size=32)


def exchanges(options: argparse.Namespace) -> dict[rules.Rule, Exchange]:
    return {rule: Exchange(rule=rule, byzantine=options.malicious) for rule in options.rules}


def with_clients(federation: Federation, clients: list[Examples]) -> Federation:
    return Federation(clients, federation.test, federation.num_classes, tail=federation.groups.tail)


def train(
    method: Method,
    exchange: Exchange,
    federation: Federation,
    seed: int,
    rounds: int,
    malicious: list[int],
    attack: Attack,
) -> Iterator[tuple[Step, dict[int, Any]]]:
    build = partial(nets.build, "mlp", tuple(federation.train.x.shape[1:]), federation.num_classes, seed)
    kept: list[Attacked] = []

    def engine(half: ClientHalf) -> Attacked:
        kept.append(Attacked(half, malicious, attack, federation.groups.tail))
        return kept[0]

    with Training(
        method, federation, build, rounds=rounds, seed=seed, evaluate_every=rounds, exchange=exchange, engine=engine
    ) as training:
        for step in training.steps():
            yield step, kept[0].answers


def under_attack(name: str, options: argparse.Namespace) -> dict[str, dict[str, list[dict[str, float]]]]:
    """By attack and rule: accuracy and tail recall of every seed. Each row of the table is printed when it is there."""
    print(f"\n### {name}: {options.malicious} of {options.clients} clients malicious, accuracy / tail recall in %\n")
    print(f"| attack | {' | '.join(options.rules)} |\n|{'---|' * (len(options.rules) + 1)}", flush=True)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for attack in options.attacks:
        if attack.startswith("prototypes") and name != "redgrape":
            continue
        for rule, exchange in exchanges(options).items():
            found.setdefault(attack, {})[rule] = [
                attacked_once(made(name, options), exchange, attack, seed, options) for seed in options.seeds
            ]
        clean = mean_figures(found["none"]["mean"]) if "mean" in found.get("none", {}) else None
        print(f"| {attack} | {' | '.join(cell(seeds, clean) for seeds in found[attack].values())} |", flush=True)
    return found


def attacked_once(
    method: Method, exchange: Exchange, attack: str, seed: int, options: argparse.Namespace
) -> dict[str, float]:
    federation = data(options.clients, seed)
    random = np.random.Generator(np.random.Philox(seed))
    malicious = sorted(random.choice(options.clients, size=options.malicious, replace=False).tolist())
    if attack == "label flip":
        clients = [federation.client(k) for k in range(options.clients)]
        for k in malicious:
            x = federation.client(k)
            clients[k] = Examples(
                x.x if x.rows is None else x.x[x.rows], federation.num_classes - 1 - x.labels, x.pixels, x.augment
            )
        federation = with_clients(federation, clients)
    last: list[dict[str, Any]] = []
    try:
        for step, _ in train(method, exchange, federation, seed, options.rounds, malicious, ATTACKS[attack]):
            if step.state.round > options.rounds - options.last:
                last.append(step.record["test"])
    except Exception as error:  # a run that the attack brought down
        if type(error).__name__ not in ("Diverged", "TooFewClients"):
            raise
        return {"accuracy": 0.0, "tail": 0.0}
    return {figure: statistics.fmean(test[figure] for test in last) for figure in ("accuracy", "tail")}


def cell(seeds: list[dict[str, float]], clean: dict[str, float] | None) -> str:
    figures = mean_figures(seeds)
    stands = clean and figures["accuracy"] >= 0.9 * clean["accuracy"] and figures["tail"] >= 0.8 * clean["tail"]
    return f"{100 * figures['accuracy']:.1f} / {100 * figures['tail']:.1f}{' ✓' if stands else ''}"


def mean_figures(seeds: list[dict[str, float]]) -> dict[str, float]:
    return {figure: statistics.fmean(seed[figure] for seed in seeds) for figure in ("accuracy", "tail")}


def tail_only(name: str, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """By rule: how often the honest client that holds only tail classes is left out, cut off or shortened, and how
    often the other clients are, in every round."""
    found: dict[str, dict[str, list[float]]] = {}
    method = made(name, options)
    for rule, exchange in exchanges(options).items():
        own: list[float] = []
        others: list[float] = []
        tail: list[float] = []
        for seed in options.seeds:
            federation = with_tail_only_client(data(options.clients - 1, seed))
            odd = federation.num_clients - 1
            for step, answers in train(method, exchange, federation, seed, options.rounds, [], ATTACKS["none"]):
                share = thrown_out(rule, options.malicious, step, {k: a.update for k, a in answers.items()})
                own.append(share[odd])
                others.append(statistics.fmean(s for k, s in share.items() if k != odd))
                if step.state.round > options.rounds - options.last:
                    tail.append(step.record["test"]["tail"])
        found[rule] = {"tail_only": own, "others": others, "tail_recall": tail}
    return found


def with_tail_only_client(federation: Federation) -> Federation:
    """One client more, with every second example of the tail classes, which the others then lack."""
    labels = federation.train.labels.numpy()
    given = [part[np.isin(labels[part], federation.groups.tail)][::2] for part in federation.parts]
    parts = [np.setdiff1d(part, gone) for part, gone in zip(federation.parts, given, strict=True)]
    parts.append(np.sort(np.concatenate(given)))
    return Federation.from_parts(
        federation.train, parts, federation.test, federation.num_classes, tail=federation.groups.tail
    )


def thrown_out(rule: str, f: int, step: Step, updates: dict[int, Any]) -> dict[int, float]:
    """Of each client: 1 where it was left out; else the share of its update that had no part in the result (median: all
    that is not in the middle; trimmed mean: what was cut off), or by which it was shortened (norm clipping)."""
    left_out = step.record.get("left_out", [])
    n = len(updates)
    if rule in ("krum", "multi_krum"):
        return {k: float(k in left_out) for k in updates}
    if rule == "norm_clipping":
        names = sorted(name for name in updates[0] if name.startswith("delta"))
        lengths = {k: rules.norm(update, names) for k, update in updates.items()}
        bound = float(np.median(list(lengths.values())))
        return {k: 1 - min(1.0, bound / length) for k, length in lengths.items()}
    if rule in ("median", "trimmed_mean"):
        names = sorted(updates[0]["delta"])
        flat = torch.stack([torch.cat([u["delta"][name].flatten() for name in names]) for u in updates.values()])
        place = flat.argsort(dim=0, stable=True).argsort(dim=0, stable=True)
        low, high = ((n - 1) // 2, n // 2) if rule == "median" else (f, n - 1 - f)
        used = (place >= low) & (place <= high)
        return {k: 1 - float(used[i].double().mean()) for i, k in enumerate(updates)}
    return dict.fromkeys(updates, 0.0)


def print_tail_only(name: str, found: dict[str, dict[str, list[float]]]) -> None:
    print(f"\n### {name}: an honest client with tail classes only, no attack; share thrown out in %\n")
    print("| rule | the tail-only client | the other clients | tail recall |\n|---|---|---|---|")
    for rule, figures in found.items():
        own, others, recall = (statistics.fmean(figures[key]) for key in ("tail_only", "others", "tail_recall"))
        print(f"| {rule} | {100 * own:.0f} | {100 * others:.0f} | {100 * recall:.1f} |", flush=True)


def print_cost(options: argparse.Namespace) -> None:
    """Processor time of the check of all updates and of each average beside that of a whole round, on the mlp."""
    seed = options.seeds[0]
    federation = data(options.clients, seed)
    print("| method | round, ms | check of the updates, ms | share |\n|---|---|---|---|")
    for name in options.methods:
        method = made(name, options)
        build = partial(nets.build, "mlp", tuple(federation.train.x.shape[1:]), federation.num_classes, seed)
        training = Training(method, federation, build, rounds=30, seed=seed)
        steps = train(
            method, training.exchange, federation, seed, 30, [], ATTACKS["none"]
        )  # none of the first is evaluated
        seconds, checks = [], []
        for _ in range(8):
            begin = time.process_time()
            step, answers = next(steps)
            seconds.append(time.process_time() - begin)
            with same_bits_everywhere():
                begin = time.process_time()
                model, measures = step.state.server["model"], {}
                parts = method.parts(model, training.site)
                inspection = Inspection(parts, model, federation.num_classes)
                for k, answer in answers.items():
                    lengths = inspection.lengths(answer.update, federation.declared(k))
                    measures[k] = plausible.measured(answer.update, parts, lengths, None)
                plausible.outliers(measures, parts, model)
                checks.append(time.process_time() - begin)
        whole, check = statistics.median(seconds[1:]), statistics.median(checks[1:])
        print(f"| {name} | {1e3 * whole:.1f} | {1e3 * check:.2f} | {100 * check / whole:.2f} % |")
    print("\n| average | ms a round |\n|---|---|")
    updates = {k: answer.update for k, answer in answers.items()}
    for rule, exchange in exchanges(options).items():
        taken = []
        for _ in range(5):
            with same_bits_everywhere():
                begin = time.process_time()
                method.server_update(step.state.server, exchange.receive(updates, parts, training.site), training.site)
                taken.append(time.process_time() - begin)
        print(f"| {rule} | {1e3 * statistics.median(taken):.1f} |")


if __name__ == "__main__":
    main()
