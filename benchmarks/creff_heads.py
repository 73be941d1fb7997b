"""What makes CReFF's re-trained classifier good or bad: variants of it side by side, on one run of FedAvg.

    python benchmarks/creff_heads.py --data-root DATA --rounds 500 --precision bfloat16
    python benchmarks/creff_heads.py --data-root DATA --heads paper "released, kept"

CReFF trains its encoder as FedAvg does, bit for bit; the server only re-trains the classifier. So one run of FedAvg
carries any number of heads, each with the clients, encoders and draws of a run of its own. The setting is MNIST-LT of
RedGrape's Table 2: IR 100, 10 of 50 clients. A head has one of CReFF's presets. `kept` also matches the last gradient
of a class that no client of the round holds, as RedGrape's released code does.

Every 25 rounds a line for each head: its accuracy, that of the tail, and for each class of the tail its recall, how
long its last gradient is, how long the imitated features are beside the real ones of the test set, and the cosine
between the means of the two.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import redgrape as rg
from redgrape import tree
from redgrape.data.federation import Federation
from redgrape.determinism import same_bits_everywhere
from redgrape.engines import ClientHalf
from redgrape.method import ServerSite
from redgrape.methods.creff import CReFF
from redgrape.tree import Tensors, Tree

HEADS = {  # preset, and whether gradients are kept
    "paper": ("paper", False),
    "paper, kept": ("paper", True),
    "released": ("released", False),
    "released, kept": ("released", True),
}


@dataclass
class Head:
    """The server half of CReFF, with gradients that the script hands it."""

    method: CReFF
    kept: bool
    server: Tree
    table: Tensors
    known: Tensor  # the classes with a gradient

    def update(self, half: ClientHalf, clients: Iterable[int], averaged: Tensors, site: ServerSite) -> None:
        sent = self.method.broadcast(self.server)
        sums = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in self.table.items()}
        holders = torch.zeros(site.num_classes)
        for k in clients:
            rows = self.method._class_gradients(sent, half.site(k, site.round))
            holders[rows["classes"]] += 1
            for name, total in sums.items():
                total[rows["classes"]] += rows[name]
        new = holders > 0
        for name, total in sums.items():
            mean = (total[new] / holders[new].view(-1, *[1] * (total.dim() - 1))).to(self.table[name].dtype)
            self.table[name][new] = mean
        self.known = self.known | new
        matched = self.known if self.kept else new
        received: Any = SimpleNamespace(moved=lambda *_: dict(averaged), table=lambda _: (self.table, matched))
        self.server = self.method.server_update(self.server, received, site)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=[*HEADS])
    options = parser.parse_args()
    federation = rg.data.load(
        "mnist", root=options.data_root, ir=100.0, clients=50, partition="prior_dirichlet", alpha=1.0, auxiliary=32
    )
    local = {"lr": 0.01, "momentum": 0.9, "batch_size": 64, "epochs": 5}
    training = rg.Training(
        rg.FedAvg(**local),
        federation,
        rg.nets.builder("cnn", federation),
        rounds=options.rounds,
        clients_per_round=10,
        workers=options.workers,
        precision=options.precision,
        evaluate_every=options.rounds + 1,
    )
    with training:
        half = ClientHalf(training.method, federation, training.site.build, 0, options.rounds, torch.device("cpu"))
        chosen = {name: HEADS[name] for name in options.heads}
        heads = {name: first(CReFF.preset(preset, **local), kept, training) for name, (preset, kept) in chosen.items()}
        print("| round | head | overall | tail | of the tail's classes: recall, gradient, length x, cosine |")
        print("|---|---|---|---|---|")
        for step in training.steps():
            round, averaged = step.state.round, step.state.server["model"]
            with same_bits_everywhere():
                for head in heads.values():
                    head.update(half, step.record["answered"], averaged, replace(training.site, round=round))
            if round % 25 == 0 or round == options.rounds:
                models = {"FedAvg": averaged} | {name: head.server["model"] for name, head in heads.items()}
                real = features(training, averaged, federation)
                for name, model in models.items():
                    scores = training.engine.evaluate(model, "test").record(federation.groups)
                    words = [of_class(c, scores["per_class"][c], real, heads.get(name)) for c in federation.groups.tail]
                    shares = f"{100 * scores['accuracy']:.1f} | {100 * scores['tail']:.1f}"
                    print(f"| {round} | {name} | {shares} | {'; '.join(words)} |", flush=True)


def first(method: CReFF, kept: bool, training: rg.Training) -> Head:
    model = {name: t.clone() for name, t in training.build().state_dict().items()}
    server = method.init_server(model, training.site)
    C = training.site.num_classes
    table = {name: torch.zeros(C, *server["psi"][name].shape) for name in ("weight", "bias")}
    return Head(method, kept, tree.ordered(server), table, torch.zeros(C, dtype=torch.bool))


@torch.no_grad()
def features(training: rg.Training, model: Tensors, federation: Federation) -> list[Tensor]:
    """The features of each class's test examples."""
    net, examples = training.net(model), federation.test
    assert examples is not None
    found = torch.cat(
        [net.encoder(examples.inputs(rows, torch.float32)) for rows in torch.arange(len(examples)).split(500)]
    )
    return [found[examples.labels == c] for c in range(federation.num_classes)]


def of_class(c: int, recall: float, real: list[Tensor], head: Head | None) -> str:
    words = f"{c}: {100 * recall:.0f} %"
    if head is None:
        return words
    imitated, gradient = head.server["features"], float(head.table["weight"][c].norm())
    length = imitated[c].norm(dim=1).mean() / real[c].norm(dim=1).mean()
    cosine = torch.cosine_similarity(imitated[c].mean(dim=0), real[c].mean(dim=0), dim=0)
    return f"{words}, {gradient:.4f}, {length:.2f}, {cosine:.2f}"


if __name__ == "__main__":
    main()
