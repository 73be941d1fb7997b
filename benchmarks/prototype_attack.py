"""Can the features of one example be computed from what RedGrape sends?

    python benchmarks/prototype_attack.py

100 victims, each an example of the packaged digits at a client of its own, at a model that RedGrape has trained for ten
rounds. The attacker has what the method gives it, the model and the prototypes, and nothing else:

    ratio       a row of the prototype divided by the same entry of its bias: exact for one example, Section
                "What prototypes give away" of docs/paper.md; for more a weighted mean of their features
    fit         knows how many examples n there are, and looks for n feature vectors that give the same prototype, by
                least squares from several starts within the prototype's row space; the one nearest to the victim counts

Prints a Markdown table: exact recoveries (relative error below 0.01), near ones (below 0.1), the median relative error,
and the mean cosine to the victim's features. Beside them what the mean of the other clients' examples of the class
gives, at the length that fits the victim best: that needs nothing of the victim's client, so it is what chance gives.

A second table is of the model's own update, which the server has with every method. The victim is the only example
of its class at a client with 20 others, and with the preset `private` no prototype of it is sent:

    class       the bias of a class rises in training where the client holds it, and it is not yet well known; a false
                alarm is a class that the client does not hold
    features    the class's row of the classifier's change, divided by the change of its bias
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares
from torch import Tensor, nn

import redgrape as rg
from redgrape import determinism, nets, tree
from redgrape.data.prepare import DataOptions, prepare
from redgrape.engines import ClientHalf
from redgrape.exchange import Exchange
from redgrape.learning.classifier import residual
from redgrape.learning.features import features
from redgrape.method import Method, ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.redgrape import RedGrape
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree

CPU = torch.device("cpu")
OTHERS = 4  # clients beside the victim's


@dataclass(frozen=True)
class Case:
    """A row of the table: the exchange, who attacks, by which attack, and how many examples of the class the victim's
    client holds, and each of the others."""

    name: str
    exchange: Exchange
    attacker: str
    attack: str
    held: int
    others: int = 8


def floors(count: int) -> Exchange:
    return Exchange(min_count=count, min_clients=3)


REDGRAPE = RedGrape(epochs=1, lr=0.02)
PAPER, PRIVATE = Exchange(), Exchange(preset="private")
CASES = [
    Case("paper; the only example at its client", PAPER, "server", "ratio", 1),
    Case("paper; the only example at all", PAPER, "any client", "ratio", 1, 0),
    Case("min_count 2; one of 2", floors(2), "server", "fit", 2),
    Case("min_count 4; one of 4", floors(4), "server", "fit", 4),
    Case("private; the only example at its client", PRIVATE, "server", "ratio", 1),
    Case("private; one of 8", PRIVATE, "server", "ratio", 8),
    Case("private; one of 8", PRIVATE, "server", "fit", 8),
    Case("private; one of 8 at each of 5 clients", PRIVATE, "any client", "ratio", 8),
]


@dataclass(frozen=True)
class UpdateCase:
    """A row of the second table: the method, and of which classes the other examples at the victim's client are."""

    name: str
    method: Method
    classes: tuple[int, ...]


FEDAVG = FedAvg(epochs=1, lr=0.02)
UPDATES = [
    UpdateCase(name, method, classes)
    for classes in (tuple(range(10)), (0, 1), (0,))  # the first are the commonest in training
    for name, method in (("private", REDGRAPE), ("fedavg", FEDAVG))
]


def trained(data: str, net: str, seed: int, rounds: int) -> tuple[Tensors, rg.Federation, Any]:
    federation = prepare(DataOptions.model_validate({"source": data, "ir": 50.0}), seed)
    build = partial(nets.build, net, tuple(federation.train.x.shape[1:]), federation.num_classes, seed)
    method = RedGrape(lr=0.02, batch_size=32)
    return rg.train(method, federation, build, rounds=rounds, seed=seed).server["model"], federation, build


def ratio(prototype: Tensors, c: int) -> Tensor:
    """The row of the class itself, where p - e is farthest from zero."""
    return prototype["weight"][c] / prototype["bias"][c]


def fit(prototype: Tensors, c: int, W: nn.Linear, n: int, starts: int, seed: int) -> Tensor:
    """n feature vectors h = M V in the row space V of the prototype, whose residuals R = softmax(W h + b) - e_c give
    its columns: (1/n) R^T [M, 1] = [U S, bias]. M is n x r, so these are n r unknowns in C (r + 1) equations."""
    G = prototype["weight"].double().numpy()
    U, S, V = np.linalg.svd(G, full_matrices=False)
    r = min(n, int(np.greater(S, 1e-6 * S[0]).sum()))
    V = V[:r]
    wanted = np.concatenate([U[:, :r] * S[:r], prototype["bias"].double().numpy()[:, None]], axis=1)
    logits, bias = V @ W.weight.detach().double().numpy().T, W.bias.detach().double().numpy()
    mean = V @ ratio(prototype, c).double().numpy()

    def misfit(flat: NDArray[np.float64]) -> NDArray[np.float64]:
        M = flat.reshape(n, r)
        z = M @ logits + bias
        p = np.exp(z - z.max(axis=1, keepdims=True))
        R = p / p.sum(axis=1, keepdims=True)
        R[:, c] -= 1
        made = R.T @ np.concatenate([M, np.ones((n, 1))], axis=1) / n
        return np.concatenate([(made - wanted).ravel(), np.zeros(max(0, n * r - made.size))])

    random = determinism.numpy_stream(seed, "fit")
    spread = np.linalg.norm(mean) * r**-0.5
    best: Any = None
    for _ in range(starts):
        start = (mean + 0.5 * spread * random.normal(size=(n, r))).ravel()
        found = least_squares(misfit, start, method="lm", max_nfev=20_000)
        best = found if best is None or found.cost < best.cost else best
        if best.cost < 1e-12 * (wanted**2).sum():
            break
    return torch.from_numpy(best.x.reshape(n, r) @ V).float()


def attack(
    case: Case, model: Tensors, build: Any, pool: rg.Examples, victim: int, starts: int
) -> tuple[float, float, float]:
    """Relative error, cosine, and the cosine of what the other clients give."""
    c = int(pool.labels[victim])
    random = determinism.numpy_stream(0, "attack", victim)
    same = [int(i) for i in random.permutation((pool.labels == c).nonzero().flatten().numpy()) if i != victim]
    rest = random.permutation((pool.labels != c).nonzero().flatten().numpy())
    clients, used = [], case.held - 1
    for k in range(OTHERS + 1):
        mine = [victim, *same[: case.held - 1]] if k == 0 else same[used : used + max(case.others, 8)]
        used += 0 if k == 0 else max(case.others, 8)
        kept = mine if k == 0 or case.others else []
        clients.append(pool.take([*kept, *rest[20 * k : 20 * k + 20].tolist()]))
    net = loaded(build, model)
    h = encoded(net, pool.take([victim]))[0]
    others = class_mean(net, pool.take(same[case.held - 1 : used]), c)
    asked = [0] if case.attacker == "server" else range(len(clients))
    server, site, updates = one_round(REDGRAPE, case.exchange, model, build, clients, asked)
    seen = (
        sent_by_victim(updates[0], c)
        if case.attacker == "server"
        else released(case.exchange, server, updates, site, c)
    )
    if seen is None:
        guess = others
    elif case.attack == "ratio":
        guess = ratio(seen, c)
    else:
        found = fit(seen, c, net.classifier, case.held, starts, victim)
        guess = found[(found - h).norm(dim=1).argmin()]
    return float((guess - h).norm() / h.norm()), cosine(guess, h), cosine(others, h)


def loaded(build: Any, model: Tensors) -> Net:
    net: Net = build()
    net.load_state_dict(model)
    return net.eval()


def one_round(
    method: Method,
    exchange: Exchange,
    model: Tensors,
    build: Any,
    clients: Sequence[rg.Examples],
    asked: Iterable[int],
) -> tuple[Tree, ServerSite, dict[int, Tree]]:
    """The server's state, its site, and what the clients that are asked send."""
    half = ClientHalf(method, rg.Federation(clients, clients[0], 10), build, 0, 2, CPU, exchange=exchange)
    site = ServerSite(build, len(clients), 10, 0, 1, 2, CPU)
    server = tree.ordered(method.init_server(model, site))
    return server, site, {k: half.run(k, method.broadcast(server), None, 1).update for k in asked}


def attack_update(
    case: UpdateCase, model: Tensors, build: Any, pool: rg.Examples, victim: int
) -> tuple[bool, int, int, float, float]:
    """Whether the victim's class is told, false alarms, classes that could give one, relative error, cosine."""
    c = int(pool.labels[victim])
    random = determinism.numpy_stream(0, "attack", victim)
    labels = pool.labels.numpy()
    rest = random.permutation(np.flatnonzero(np.isin(labels, case.classes) & (labels != c)))[:20]
    client = pool.take([victim, *rest.tolist()])
    h = encoded(loaded(build, model), pool.take([victim]))[0]
    delta = one_round(case.method, PRIVATE, model, build, [client] * (OTHERS + 1), [0])[2][0]["delta"]
    weight, bias = delta["classifier.weight"], delta["classifier.bias"]
    absent = torch.bincount(client.labels, minlength=10) == 0
    guess = weight[c] / bias[c]
    error = float((guess - h).norm() / h.norm())
    return bool(bias[c] > 0), int((absent & (bias > 0)).sum()), int(absent.sum()), error, cosine(guess, h)


def sent_by_victim(update: Tree, c: int) -> Tensors | None:
    sent = update["prototypes"]
    rows = (sent["classes"] == c).nonzero().flatten()
    return {name: t[rows[0]] for name, t in sent.items()} if len(rows) else None


def released(exchange: Exchange, server: Tree, updates: Any, site: ServerSite, c: int) -> Tensors | None:
    received = exchange.receive(updates, REDGRAPE.parts(server["model"], site), site)
    broadcast = REDGRAPE.broadcast(REDGRAPE.server_update(server, received, site))
    return {name: g[c] for name, g in broadcast["prototypes"].items()} if broadcast["seen"][c] else None


@torch.no_grad()
def encoded(net: Net, examples: rg.Examples) -> Tensor:
    rows = torch.arange(len(examples))
    return features(net.encoder, examples.inputs(rows, net.classifier.weight.dtype), "running")


def class_mean(net: Net, examples: rg.Examples, c: int) -> Tensor:
    """What the prototype of these examples alone gives by the same ratio."""
    h = encoded(net, examples)
    r = residual(net.classifier, h, examples.labels)
    return (r[:, c] @ h) / r[:, c].sum()


def cosine(a: Tensor, b: Tensor) -> float:
    return float(nn.functional.cosine_similarity(a, b, dim=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victims", type=int, default=100)
    parser.add_argument("--net", default="mlp")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--starts", type=int, default=5, help="starts of the fit")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, federation, build = trained("digits", options.net, 0, options.rounds)
    pool = federation.test
    victims = determinism.numpy_stream(0, "victims").permutation(len(pool))[: options.victims]
    print("| what is sent | attacker | attack | exact | near | median error | cosine | others: near | others: cosine |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for case in CASES:
        results = [attack(case, model, build, pool, int(v), options.starts) for v in victims]
        rows.append(row(case, results))
        r = rows[-1]
        print(
            f"| {case.name} | {case.attacker} | {case.attack} | {r['exact']} of {len(results)} | {r['near']} | "
            f"{r['error']:.2g} | {r['cosine']:.3f} | {r['others_near']} | {r['others']:.3f} |",
            flush=True,
        )
    print("\n| update of | classes of the others | class told | false alarms | exact | near | median error | cosine |")
    print("|---|---|---|---|---|---|---|---|")
    for update in UPDATES:
        found = [attack_update(update, model, build, pool, int(v)) for v in victims]
        rows.append(update_row(update, found))
        r = rows[-1]
        print(
            f"| {update.name} | {', '.join(map(str, update.classes))} | {r['told']} of {len(found)} | {r['alarms']} of "
            f"{r['absent']} | {r['exact']} | {r['near']} | {r['error']:.2g} | {r['cosine']:.3f} |",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def row(case: Case, results: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    errors, cosines, others = zip(*results, strict=True)
    return {
        "case": case.name,
        "attacker": case.attacker,
        "attack": case.attack,
        "exact": sum(error < 0.01 for error in errors),
        "near": sum(error < 0.1 for error in errors),
        "error": statistics.median(errors),
        "cosine": statistics.fmean(cosines),
        "others_near": sum(math.sqrt(max(0.0, 1 - cos**2)) < 0.1 for cos in others),  # at the best length
        "others": statistics.fmean(others),
    }


def update_row(case: UpdateCase, results: Sequence[tuple[bool, int, int, float, float]]) -> dict[str, Any]:
    told, alarms, absent, errors, cosines = zip(*results, strict=True)
    return {
        "update of": case.name,
        "classes": case.classes,
        "told": sum(told),
        "alarms": sum(alarms),
        "absent": sum(absent),
        "exact": sum(error < 0.01 for error in errors),
        "near": sum(error < 0.1 for error in errors),
        "error": statistics.median(errors),
        "cosine": statistics.fmean(cosines),
    }


if __name__ == "__main__":
    main()
