"""CReFF's server step, in closed form against automatic differentiation as it was published.

    python benchmarks/creff_server.py --classes 10 --features 64 --repeats 3

Both match 100 made-up features a class to the clients' gradients in 100 steps, and re-train the classifier on them for
300 epochs in batches of 32. The published way (shangxinyi/CReFF-FL) differentiates every class's gradient a second
time, and trains an nn.Linear with torch's SGD on batches from a DataLoader; a second column takes the batches by index
instead, so that the DataLoader's part is seen. All are interleaved, on one thread, from the same start and with the
same shuffling, so that their results can be compared. Medians of processor seconds, as a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from redgrape import nets
from redgrape.learning.gradient_matching import match
from redgrape.method import ServerSite
from redgrape.methods.creff import CReFF
from redgrape.tree import Tensors

Batches: TypeAlias = Callable[[Tensor, Tensor, Tensor, int], Iterable[tuple[Tensor, Tensor]]]


def published_match(features: Tensor, psi: Tensors, target: Tensors, steps: int, lr: float) -> Tensor:
    """Double backward, class by class."""
    C, n, d = features.shape
    classifier = nn.Linear(d, C)
    classifier.load_state_dict(psi)
    parameters = list(classifier.parameters())
    features = features.clone().requires_grad_()
    optimizer = torch.optim.SGD([features], lr=lr)
    for _ in range(steps):
        loss = torch.zeros(())
        for c in range(C):
            y = torch.full((n,), c)
            weight, bias = torch.autograd.grad(
                F.cross_entropy(classifier(features[c]), y), parameters, create_graph=True
            )
            loss = loss + one_minus_cosine(weight, target["weight"][c])
            loss = loss + one_minus_cosine(bias[None], target["bias"][c][None])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return features.detach()


def one_minus_cosine(u: Tensor, v: Tensor) -> Tensor:
    sizes = torch.linalg.vector_norm(u, dim=1) * torch.linalg.vector_norm(v, dim=1)
    distance: Tensor = (1 - (u * v).sum(dim=1) / (sizes + 1e-6)).sum()
    return distance


def batches_by_index(h: Tensor, y: Tensor, order: Tensor, size: int) -> Iterable[tuple[Tensor, Tensor]]:
    return ((h[rows], y[rows]) for rows in order.split(size))


def batches_by_loader(h: Tensor, y: Tensor, order: Tensor, size: int) -> Iterable[tuple[Tensor, Tensor]]:
    return DataLoader(TensorDataset(h, y), size, sampler=order.tolist())


def published_retraining(features: Tensor, batches: Batches, method: CReFF, site: ServerSite) -> Tensors:
    """An nn.Linear by torch's SGD."""
    C, n, d = features.shape
    random = site.generator("re-training")
    classifier = nn.Linear(d, C)
    with torch.no_grad():
        for p in (classifier.weight, classifier.bias):
            p.uniform_(-(d**-0.5), d**-0.5, generator=random)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=method.retrain_lr or 0.01)
    h, y = features.reshape(C * n, d), torch.arange(C).repeat_interleave(n)
    for _ in range(method.retrain_epochs):
        for x, labels in batches(h, y, torch.randperm(C * n, generator=random), method.retrain_batch):
            optimizer.zero_grad()
            F.cross_entropy(classifier(x), labels).backward()
            optimizer.step()
    return {name: p.detach() for name, p in classifier.named_parameters()}


def timed(step: Callable[[], Tensors]) -> tuple[float, Tensors]:
    start = time.process_time()
    result = step()
    return time.process_time() - start, result


def measure(C: int, d: int, repeats: int) -> str:
    """A row of the table."""
    method, random = CReFF(), torch.Generator().manual_seed(0)
    site = ServerSite(lambda: nets.build("linear", (d,), C, 0), 10, C, 0, 1, 1, torch.device("cpu"))
    psi = {"weight": torch.randn(C, d, generator=random) * d**-0.5, "bias": torch.zeros(C)}
    features = torch.randn(C, method.features_per_class, d, generator=random)
    # The clients' gradients: those of other features around a mean of each class.
    h = torch.randn(C, 50, d, generator=random) + 2 * torch.randn(C, 1, d, generator=random)
    r = torch.softmax(h @ psi["weight"].T + psi["bias"], dim=2) - torch.eye(C)[:, None, :]
    target = {"weight": r.transpose(1, 2) @ h / 50, "bias": r.mean(dim=1)}
    classes = torch.arange(C)

    def closed_form() -> Tensors:
        moved = match(
            features, classes, psi["weight"], psi["bias"], target, "rows", method.match_steps, method.match_lr
        )
        return {"features": moved, **method._retrained(moved, psi, site)}

    def autograd(batches: Batches) -> Tensors:
        moved = published_match(features, psi, target, method.match_steps, method.match_lr)
        return {"features": moved, **published_retraining(moved, batches, method, site)}

    ways: list[Callable[[], Tensors]] = [
        partial(autograd, batches_by_loader),
        partial(autograd, batches_by_index),
        closed_form,
    ]
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats):
        results = []
        for way, times in zip(ways, seconds, strict=True):
            taken, result = timed(way)
            times.append(taken)
            results.append(result)
    expected, _, found = results
    differs = max(float((found[name] - t).abs().max() / t.abs().max()) for name, t in expected.items())
    loader, index, ours = (statistics.median(times) for times in seconds)
    times_faster = f"{loader / ours:.1f} | {index / ours:.1f}"
    return f"| {C}, {d} | {loader:.2f} | {index:.2f} | {ours:.2f} | {times_faster} | {differs:.0e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="CReFF's server step: closed form against autograd, one thread")
    parser.add_argument("--classes", type=int, nargs="+", default=[10], help="one row for each (default: 10)")
    parser.add_argument("--features", type=int, default=64, help="dimension of the features (default: 64)")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of each, interleaved (default: 3)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| C, d | autograd, as published | autograd, batches by index | closed form | x | x | largest difference |")
    print("|---|---|---|---|---|---|---|")
    for C in options.classes:
        print(measure(C, options.features, options.repeats), flush=True)


if __name__ == "__main__":
    main()
