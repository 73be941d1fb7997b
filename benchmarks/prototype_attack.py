"""Can the features of one example be computed from what RedGrape sends?

    python benchmarks/prototype_attack.py

100 victims, each an example of the packaged digits at a client of its own, at a model that RedGrape has trained for ten
rounds. The attacker has what the method gives it, the model and the prototypes, and nothing else:

    ratio       a row of the prototype divided by the same entry of its bias: exact for one example, Section
                "What prototypes give away" of docs/paper.md; for more a weighted mean of their features
    fit         knows how many examples n there are, and looks for n feature vectors that give the same prototype, by
                LBFGS from several starts within the prototype's row space; counts as the one nearest to the victim

Prints a Markdown table: exact recoveries (relative error below 0.1), the median relative error, and the mean cosine to
the victim's features beside that of the class mean which the other clients' prototypes give, which needs nothing of the
victim's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import redgrape as rg
from redgrape import keys, nets, tree
from redgrape.classifier_gradients import residual
from redgrape.data.prepare import DataOptions, prepare
from redgrape.engines import ClientHalf, Task
from redgrape.features import features
from redgrape.method import ServerSite
from redgrape.methods.redgrape import RedGrape
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree

CPU = torch.device("cpu")
OTHERS = 4  # clients beside the victim's


@dataclass(frozen=True)
class Case:
    """A row of the table: what the method keeps back, who attacks, and how many examples of the class the clients
    hold: the victim's client, each of the others."""

    name: str
    attacker: str
    preset: str
    held: int
    others: int
    attack: str = "ratio"


CASES = [
    Case("paper, the only example of its client", "server", "paper", 1, 8),
    Case("paper, and of all clients", "any client", "paper", 1, 0),
    Case("private, the only example of its client", "server", "private", 1, 8),
    Case("private, one of 8", "server", "private", 8, 8),
    Case("private, one of 8", "server", "private", 8, 8, "fit"),
    Case("private, one of 8 at each of 5 clients", "any client", "private", 8, 8),
]


def trained(data: str, net: str, seed: int, rounds: int) -> tuple[Tensors, rg.Federation, Any]:
    federation = prepare(DataOptions.model_validate({"source": data, "ir": 50.0}), seed)
    build = partial(nets.build, net, tuple(federation.train.x.shape[1:]), federation.num_classes, seed)
    method = RedGrape(lr=0.02, batch_size=32)
    return rg.train(method, federation, build, rounds=rounds, seed=seed).server["model"], federation, build


def ratio(prototype: Tensors, c: int) -> Tensor:
    """The row of the class itself, where p - e is farthest from zero."""
    return prototype["weight"][c] / prototype["bias"][c]


def fit(prototype: Tensors, c: int, W: nn.Linear, n: int, starts: int, seed: int) -> list[Tensor]:
    """n feature vectors h = M V in the row space V of the prototype whose residuals give its columns: M is n x r."""
    G, b = prototype["weight"].double(), prototype["bias"].double()
    U, S, V = torch.linalg.svd(G, full_matrices=False)
    r = min(n, int(S.gt(1e-6 * S[0]).sum()))
    V = V[:r]
    left = torch.cat([U[:, :r] * S[:r], b[:, None]], dim=1) / S[0]  # what (1/n) R^T [M, 1] must be
    classifier = nn.Linear(W.in_features, W.out_features).double()
    classifier.load_state_dict({name: t.double() for name, t in W.state_dict().items()})
    logits, bias = V @ classifier.weight.detach().T, classifier.bias.detach()
    target = torch.full((n,), c)
    mean = ratio({"weight": G, "bias": b}, c) @ V.T

    def misfit(M: Tensor) -> Tensor:
        R = torch.softmax(M @ logits + bias, dim=1) - nn.functional.one_hot(target, len(b))
        made = R.T @ torch.cat([M, torch.ones(n, 1, dtype=M.dtype)], dim=1) / n / S[0]
        return (made - left).square().sum() / left.square().sum()

    found = []
    for start in range(starts):
        random = keys.torch_stream(seed, "fit", start)
        M = mean + 0.5 * mean.norm() * r**-0.5 * torch.randn(n, r, generator=random, dtype=torch.float64)
        M = minimized(M, misfit)
        found.append((float(misfit(M)), M))
    return list((min(found, key=lambda pair: pair[0])[1] @ V).float())


def minimized(M: Tensor, misfit: Callable[[Tensor], Tensor]) -> Tensor:
    M = M.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([M], max_iter=400, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = misfit(M)
        value.backward()
        return value

    optimizer.step(closure)
    return M.detach()


def attack(
    case: Case, model: Tensors, build: Any, pool: rg.Examples, victim: int, starts: int
) -> tuple[float, float, float]:
    """Relative error, cosine, and the cosine of what the other clients give."""
    method = RedGrape.preset(case.preset, epochs=1, lr=0.02)
    c = int(pool.labels[victim])
    random = keys.numpy_stream(0, "attack", victim)
    same = [int(i) for i in random.permutation((pool.labels == c).nonzero().flatten().numpy()) if i != victim]
    rest = random.permutation((pool.labels != c).nonzero().flatten().numpy())
    clients, used = [], case.held - 1
    for k in range(OTHERS + 1):
        mine = [victim, *same[: case.held - 1]] if k == 0 else same[used : used + max(case.others, 8)]
        used += 0 if k == 0 else max(case.others, 8)
        kept = mine if k == 0 or case.others else []
        clients.append(pool.take([*kept, *rest[20 * k : 20 * k + 20].tolist()]))
    net = build()
    net.load_state_dict(model)
    net.eval()
    h = encoded(net, pool.take([victim]))[0]
    others = class_mean(net, pool.take(same[case.held - 1 : used]), c)
    federation = rg.Federation(clients, pool, 10)
    half = ClientHalf(method, federation, build, 0, 2, CPU)
    site = ServerSite(build, len(clients), 10, 0, 1, 2, CPU)
    server = tree.ordered(method.init_server(model, site))
    updates = {k: half.run(k, method.broadcast(server), Task(), 1).update for k in range(len(clients))}
    seen = sent_by_victim(updates[0], c) if case.attacker == "server" else released(method, server, updates, site, c)
    if seen is None:
        guess = others
    elif case.attack == "ratio":
        guess = ratio(seen, c)
    else:
        found = fit(seen, c, net.classifier, case.held, starts, victim)
        guess = min(found, key=lambda g: float((g - h).norm()))
    return float((guess - h).norm() / h.norm()), cosine(guess, h), cosine(others, h)


def sent_by_victim(update: Tree, c: int) -> Tensors | None:
    sent = update["prototypes"]
    rows = (sent["classes"] == c).nonzero().flatten()
    return {name: sent[name][rows[0]] for name in ("weight", "bias")} if len(rows) else None


def released(method: RedGrape, server: Tree, updates: Any, site: ServerSite, c: int) -> Tensors | None:
    broadcast = method.broadcast(method.server_update(server, updates, site))
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
    victims = keys.numpy_stream(0, "victims").permutation(len(pool))[: options.victims]
    print("| what is sent | attacker | attack | exact | median error | cosine | cosine of the others' mean |")
    print("|---|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for case in CASES:
        results = [attack(case, model, build, pool, int(v), options.starts) for v in victims]
        rows.append(row(case, results))
        r = rows[-1]
        print(
            f"| {case.name} | {case.attacker} | {case.attack} | {r['exact']} of {len(results)} | {r['error']:.2g} | "
            f"{r['cosine']:.3f} | {r['others']:.3f} |",
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
        "exact": sum(error < 0.1 for error in errors),
        "error": statistics.median(errors),
        "cosine": statistics.fmean(cosines),
        "others": statistics.fmean(others),
    }


if __name__ == "__main__":
    main()
