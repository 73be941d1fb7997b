"""Can the features of one example be computed from what clients send?

    python benchmarks/leak.py                      all tables
    python benchmarks/leak.py --tables sums        only what a server sees, with a secure sum and without

100 victims, each an example of the packaged digits at a client of its own, at a model that RedGrape has trained for ten
rounds. An exact guess has a relative error below 0.001, a near one below 0.1. Prints Markdown tables.

Sums: a federation of ten sites, each with 20 examples of one or two classes. The victim, of a tail class, is the only
example of its class at its site; H - 1 other sites have one of that class too. In round 1 all other sites take part, in
rounds 2 and 4 all ten, in round 3 the victim's and two others. The server knows the models, H, and has data of its own:

    single      no secure sum: the message of the victim's site in round 2
    sum         the sums over all ten sites, guesses averaged over rounds 2 and 4; of a running sum, the total so far
    few         the sum over the three sites of round 3
    difference  the sum of round 2 less that of round 1, where the victim's site was missing; of a running sum, what
                arrived in round 2

    ratio       row c of the classifier's gradient, divided by its bias
    unmixed     the same, after the gradients of the other examples were subtracted: mean class gradients on the
                server's own data, in the amounts that Vine's weights give, or else those that fit best (>= 0). Those of
                an update are at the classifier that its loss sees: W + W_hat of Vine, with the prior of the loss
    fit         as below, for the class rows of two or three sites

The attack with most near guesses counts. `no message` guesses the mean of the class in the server's own data.

Prototypes: the attacker has what the method gives it, the model and the prototypes, and nothing else:

    ratio       a row of the prototype divided by the same entry of its bias: exact for one example, Section
                "What prototypes give away" of docs/paper.md; for more a weighted mean of their features
    fit         knows how many examples n there are, and looks for n feature vectors that give the same prototype, by
                least squares from several starts within the prototype's row space; the one nearest to the victim counts

Beside them what the mean of the other clients' examples of the class gives, at the length that fits the victim best:
that needs nothing of the victim's client, so it is what chance gives.

Updates: the model's own update, which the server has with every method. The victim is the only example of its class at
a client with 20 others, and with the preset `private` no prototype of it is sent:

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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls
from torch import Tensor, nn

import redgrape as rg
from redgrape import determinism, nets, tree
from redgrape.data.prepare import DataOptions, prepare
from redgrape.engines import ClientHalf
from redgrape.exchange import Exchange
from redgrape.learning.classifier import class_mean_gradients, residual
from redgrape.learning.features import features
from redgrape.method import Method, ServerSite
from redgrape.methods.balanced_softmax import BalancedSoftmax
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.redgrape import RedGrape
from redgrape.methods.vine import Vine
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree

CPU = torch.device("cpu")
EXACT, NEAR = 1e-3, 0.1
TABLES = ("sums", "prototypes", "updates")
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


@dataclass(frozen=True)
class SumCase:
    """A method of the first table, and which part of its messages is attacked."""

    name: str
    method: Method
    part: str
    held: int = 1  # examples of the victim's class at its site; of several, their mean is looked for

    @property
    def of_update(self) -> bool:
        """The classifier's change in training, not a gradient at the received model."""
        return self.part.startswith("delta")


VINE = {"epochs": 1, "lr": 0.02}
SUMS = [
    SumCase("FedAvg", FEDAVG, "delta"),
    SumCase("RedGrape", REDGRAPE, "prototypes"),
    SumCase("Vine", Vine(**VINE), "gradient"),
    SumCase("Vine, stateless", Vine(memory=False, **VINE), "gradient"),
    SumCase("Vine, min_holders 3", Vine(min_holders=3, **VINE), "gradient"),
    SumCase("Vine, min_holders 3, update", Vine(min_holders=3, **VINE), "delta"),
    SumCase("Vine, min_holders 3, update; mean of 8, 20 sites", Vine(min_holders=3, **VINE), "delta", 8),
    SumCase("FedAvg; mean of 8, 20 sites", FEDAVG, "delta", 8),
    SumCase("balanced softmax", BalancedSoftmax(**VINE), "delta"),
]
HOLDERS = (1, 2, 3, 8)
SITES, OWN = 10, 20
ROUNDS = (range(1, SITES), range(SITES), range(3), range(SITES))  # the sites of each round; the victim's is the first
VIEWS = {"single": [1], "sum": [1, 3], "few": [2], "difference": [1]}  # the places of the rounds that are looked at
Guess = tuple[Tensor, Tensor]  # of the features, and the features


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


def sites_around(pool: rg.Examples, victim: int, holders: int, held: int = 1) -> tuple[list[rg.Examples], rg.Examples]:
    """The sites, the victim's first, and the server's own data: what is left of the pool."""
    c, labels = int(pool.labels[victim]), pool.labels.numpy()
    random = determinism.numpy_stream(0, "sites", victim)
    same = [victim, *(int(i) for i in random.permutation(np.flatnonzero(labels == c)) if i != victim)]
    rest = random.permutation(np.flatnonzero(labels != c))[: SITES * OWN]
    place = random.permutation(10)
    shards = np.split(rest[np.argsort(place[labels[rest]], kind="stable")], SITES)  # one or two classes in each
    of_class = [same[:held], *([i] for i in same[held : held + holders - 1]), *([] for _ in range(SITES - holders))]
    sites = [[*mine, *shard] for mine, shard in zip(of_class, shards, strict=True)]
    left = np.setdiff1d(np.arange(len(pool)), np.concatenate(sites))
    return [pool.take([int(i) for i in site]) for site in sites], pool.take(left.tolist())


def observed(case: SumCase, model: Tensors, build: Any, sites: Sequence[rg.Examples]) -> list[tuple[Tensors, Any]]:
    """Of each round the model that was sent, and what each of its sites adds to the sum."""
    method, exchange = case.method, PAPER
    half = ClientHalf(method, rg.Federation(sites, sites[0], 10), build, 0, len(ROUNDS), CPU)
    answers = [tree.flatten(answer) for _, answer in half.survey(range(SITES))]
    survey = tree.unflatten({name: sum(answer[name] for answer in answers) for name in answers[0]})
    site = ServerSite(build, SITES, 10, 0, 0, len(ROUNDS), CPU, survey=survey)
    server, states, seen = tree.ordered(method.init_server(model, site)), {}, []
    for t, clients in enumerate(ROUNDS, start=1):
        broadcast = tree.ordered(method.broadcast(server))
        found = {k: half.run(k, broadcast, states.get(k), t) for k in clients}
        updates = {k: answer.update for k, answer in found.items()}
        states |= {k: answer.state for k, answer in found.items()}
        attacked = trained_by(broadcast) if case.of_update else broadcast["model"]
        seen.append((attacked, {k: half.summand(k, broadcast, u, t) for k, u in updates.items()}))
        received = exchange.receive(updates, method.parts(broadcast["model"], site), site)
        server = tree.ordered(method.server_update(server, received, replace(site, round=t)))
    return seen


def trained_by(broadcast: Tree) -> Tensors:
    """The model with the classifier that the training loss sees: both streams of Vine, with the loss's prior."""
    model = dict(broadcast["model"])
    for name, t in broadcast.get("W_hat", {}).items():
        model[f"classifier.{name}"] = model[f"classifier.{name}"] + t
    shift = broadcast["prior"].log() if "prior" in broadcast else broadcast.get("home", 0)
    model["classifier.bias"] = model["classifier.bias"] + shift
    return model


def gradient(case: SumCase, summand: Any, c: int) -> NDArray[np.float64]:
    """The classifier's gradient [C, d + 1] in a message: of class c alone, or of all examples."""
    group, sign = summand[case.part], 1.0
    if case.of_update:  # with one local step, n delta = -lr times the sum over the examples
        sign = -1 / FEDAVG.lr
        group = {name.removeprefix("classifier."): t for name, t in group.items() if name.startswith("classifier.")}
        for name, t in summand.get("delta_W_hat", {}).items():  # without the pull; zero for a class at home
            group[name] = torch.where(t == 0, group[name], t)
    weight, bias = (group[n][c] if case.part == "prototypes" else group[n] for n in ("weight", "bias"))
    return sign * torch.cat([weight, bias[:, None]], dim=1).double().numpy()


def seen_in(case: SumCase, seen: Sequence[tuple[Tensors, Any]], view: str, c: int) -> list[NDArray[np.float64]]:
    """The gradients that the server has in each round of a view."""
    sums = [sum(gradient(case, s, c) for s in summands.values()) for _, summands in seen]
    running = case.part == "gradient" and case.method.memory  # type: ignore[attr-defined]  # only Vine sends one
    if view == "single":
        return [gradient(case, seen[1][1][0], c)]
    if view == "difference":
        return [sums[1] if running else sums[1] - sums[0]]
    if running and view == "sum":
        sums = list(np.cumsum(sums, axis=0))
    return [sums[t] for t in VIEWS[view]]


def attack_sums(
    case: SumCase, model: Tensors, build: Any, pool: rg.Examples, victim: int, holders: int
) -> dict[tuple[str, str], Guess]:
    """The guess and the victim's features, by view and attack."""
    c = int(pool.labels[victim])
    sites, known = sites_around(pool, victim, holders, case.held)
    seen = observed(case, model, build, sites)
    nets_seen = [loaded(build, sent) for sent, _ in seen]
    found: dict[tuple[str, str], Guess] = {}
    for view, rounds in VIEWS.items():
        guesses: dict[str, list[Tensor]] = {}
        for t, A in zip(rounds, seen_in(case, seen, view, c), strict=True):
            guesses.setdefault("ratio", []).append(by_bias(A, c))
            if case.part != "prototypes":
                shares = shares_of(case, A, class_gradients(nets_seen[t], known), view, c, holders)
                guesses.setdefault("unmixed", []).append(by_bias(A - shares, c))
            elif view in ("sum", "few") and 1 < (n := min(holders, len(ROUNDS[t]))) <= 3:
                W = nets_seen[t].classifier
                made = {"weight": torch.from_numpy(A[:, :-1] / n), "bias": torch.from_numpy(A[:, -1] / n)}
                fitted, h = fit(made, c, W, n, 5, victim), encoded(nets_seen[t], pool.take([victim]))[0]
                guesses.setdefault("fit", []).append(fitted[(fitted - h).norm(dim=1).argmin()])
        wanted = of_class(sites[0], c) if case.held > 1 else pool.take([victim])
        h = torch.stack([encoded(nets_seen[t], wanted).mean(dim=0) for t in rounds]).mean(dim=0)
        found |= {(view, name): (torch.stack(each).mean(dim=0), h) for name, each in guesses.items()}
    h = encoded(nets_seen[1], wanted).mean(dim=0)
    return found | {("no message", "mean"): (class_mean(nets_seen[1], of_class(known, c), c), h)}


def by_bias(A: NDArray[np.float64], c: int) -> Tensor:
    """Row c divided by its bias. A row that was left out is zero and says nothing."""
    return torch.from_numpy(A[c, :-1] / (A[c, -1] or 1.0)).float()


def class_gradients(net: Net, examples: rg.Examples) -> NDArray[np.float64]:
    """The mean gradient of each class [C, C, d + 1]."""
    batch = encoded(net, examples), examples.labels
    found = class_mean_gradients(net.classifier, [batch], torch.arange(10))
    return torch.cat([found["weight"], found["bias"][:, :, None]], dim=2).double().numpy()


def shares_of(
    case: SumCase, A: NDArray[np.float64], E: NDArray[np.float64], view: str, c: int, holders: int
) -> NDArray[np.float64]:
    """What all other examples have added to A, as far as the server can tell: sum_c a_c E_c."""
    a = np.ones(10)
    if view != "sum" or case.of_update:
        a, _ = nnls(E.reshape(10, -1).T, A.ravel())
    a[c] *= (holders - 1) / holders if view == "sum" else 0.0
    if case.part == "gradient" and holders < case.method.min_holders:  # type: ignore[attr-defined]  # only Vine's
        a[c] = 0.0
    return np.tensordot(a, E, axes=1)


def sums_table(model: Tensors, build: Any, pool: rg.Examples, victims: Sequence[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    print(f"| method | the server sees | {' | '.join(f'H = {H}' for H in HOLDERS)} |")
    print(f"|---|---|{'---|' * len(HOLDERS)}", flush=True)
    for case in SUMS:
        floor = 1 if case.of_update else getattr(case.method, "min_holders", 1)
        holders = [H for H in HOLDERS if floor == 1 or floor > H]  # from the floor on, it is Vine
        holders = holders if case.held == 1 else [1]
        tried = victims if case.held == 1 else victims[:20]  # their sites
        found = {H: [attack_sums(case, model, build, pool, v, H) for v in tried] for H in holders}
        for view in (*VIEWS, *(["no message"] if case.held > 1 or case is SUMS[-1] else [])):
            cells = []
            for H in holders:
                names = [name for seen, name in found[H][0] if seen == view]
                rows += [sum_row(case.name, view, name, H, [each[view, name] for each in found[H]]) for name in names]
                best = max(rows[-len(names) :], key=lambda r: (r["near"], r["cosine"]))
                cells.append(f"{best['exact']}, {best['near']}, {best['cosine']:.3f} ({best['attack']})")
            cells += ["" if case.of_update else "as Vine"] * (len(HOLDERS) - len(cells))
            print(f"| {case.name} | {view} | {' | '.join(cells)} |", flush=True)
    return rows


def sum_row(method: str, view: str, name: str, holders: int, guesses: Sequence[Guess]) -> dict[str, Any]:
    errors = [float((guess - h).norm() / h.norm()) for guess, h in guesses]
    return {
        "method": method,
        "view": view,
        "attack": name,
        "holders": holders,
        "exact": sum(error < EXACT for error in errors),
        "near": sum(error < NEAR for error in errors),
        "error": statistics.median(errors),
        "cosine": statistics.fmean(cosine(guess, h) for guess, h in guesses),
    }


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


def of_class(examples: rg.Examples, c: int) -> rg.Examples:
    return examples.take((examples.labels == c).nonzero().flatten().tolist())


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
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--net", default="mlp")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--starts", type=int, default=5, help="starts of the fit")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, federation, build = trained("digits", options.net, 0, options.rounds)
    pool = federation.test
    order = determinism.numpy_stream(0, "victims").permutation(len(pool))
    victims = [int(v) for v in order[: options.victims]]
    rare = [int(v) for v in order if int(pool.labels[v]) in federation.groups.tail][: options.victims]
    rows: list[dict[str, Any]] = []
    if "sums" in options.tables:
        rows += sums_table(model, build, pool, rare)
    if "prototypes" in options.tables:
        rows += prototypes_table(model, build, pool, victims, options.starts)
    if "updates" in options.tables:
        rows += updates_table(model, build, pool, victims)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def prototypes_table(
    model: Tensors, build: Any, pool: rg.Examples, victims: Sequence[int], starts: int
) -> list[dict[str, Any]]:
    head = "what is sent | attacker | attack | exact | near | median error | cosine | others: near | others: cosine"
    print(f"\n| {head} |\n|{'---|' * 9}")
    rows = []
    for case in CASES:
        r = row(case, [attack(case, model, build, pool, v, starts) for v in victims])
        rows.append(r)
        print(
            f"| {case.name} | {case.attacker} | {case.attack} | {r['exact']} of {len(victims)} | {r['near']} | "
            f"{r['error']:.2g} | {r['cosine']:.3f} | {r['others_near']} | {r['others']:.3f} |",
            flush=True,
        )
    return rows


def updates_table(model: Tensors, build: Any, pool: rg.Examples, victims: Sequence[int]) -> list[dict[str, Any]]:
    head = "update of | classes of the others | class found | false alarms | exact | near | median error | cosine"
    print(f"\n| {head} |\n|{'---|' * 8}")
    rows = []
    for update in UPDATES:
        r = update_row(update, [attack_update(update, model, build, pool, v) for v in victims])
        rows.append(r)
        print(
            f"| {update.name} | {', '.join(map(str, update.classes))} | {r['told']} of {len(victims)} | "
            f"{r['alarms']} of {r['absent']} | {r['exact']} | {r['near']} | {r['error']:.2g} | {r['cosine']:.3f} |",
            flush=True,
        )
    return rows


def row(case: Case, results: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    errors, cosines, others = zip(*results, strict=True)
    return {
        "case": case.name,
        "attacker": case.attacker,
        "attack": case.attack,
        "exact": sum(error < EXACT for error in errors),
        "near": sum(error < NEAR for error in errors),
        "error": statistics.median(errors),
        "cosine": statistics.fmean(cosines),
        "others_near": sum(math.sqrt(max(0.0, 1 - cos**2)) < NEAR for cos in others),  # at the best length
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
        "exact": sum(error < EXACT for error in errors),
        "near": sum(error < NEAR for error in errors),
        "error": statistics.median(errors),
        "cosine": statistics.fmean(cosines),
    }


if __name__ == "__main__":
    main()
