"""Toys of several rooms: tiny examples and federations, a server's place, clients whose answers come as a sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import redgrape as rg
from redgrape import nets, tree
from redgrape.engines import Answer, ClientHalf, Lost, SumOfAnswers
from redgrape.engines.in_process import InProcess
from redgrape.exchange import fixed_point
from redgrape.method import ServerSite
from redgrape.tree import Tree

VECTOR = (5,)


def examples(counts: Sequence[int], seed: int = 0, shape: tuple[int, ...] = VECTOR) -> rg.Examples:
    """This many of each class: standard normal noise around the number of the class."""
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    noise = torch.randn(len(y), *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rg.Examples(noise + y.reshape(-1, *[1] * len(shape)), y)


def net() -> rg.Net:
    """A small net with a curved loss for such examples of four classes, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return rg.Net(nn.Sequential(nn.Linear(*VECTOR, 6), nn.Tanh()), nn.Linear(6, 4)).double()


def federation(*counts: Sequence[int], shape: tuple[int, ...] = VECTOR, **options: Any) -> rg.Federation:
    """A client for each of these counts, and two test examples of each class."""
    C = len(counts[0])
    clients = [examples(held, k, shape) for k, held in enumerate(counts)]
    return rg.Federation(clients, examples([2] * C, 99, shape), C, **options)


def server_site(clients: int, C: int, round: int = 1, **more: Any) -> ServerSite:
    build = partial(nets.build, "linear", VECTOR, C, 0)
    return ServerSite(build, clients, C, 0, round, 5, torch.device("cpu"), **more)


def class_rows(rows: Mapping[int, float], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows of these classes; every number of a row is the same."""
    values = torch.tensor(list(rows.values()), dtype=torch.float32)
    filled = {name: values.reshape(-1, *[1] * t.dim()).repeat(1, *t.shape).to(t.dtype) for name, t in like.items()}
    return {"classes": torch.tensor(list(rows), dtype=torch.int64), **filled}


class Summing(InProcess):
    """Clients of this process whose answers come as a secure sum of sites gives them: by way of whole numbers."""

    def __init__(self, half: ClientHalf, spoil: Callable[[dict[str, Any]], Any] = lambda total: total) -> None:
        super().__init__(half)
        self._spoil = spoil
        self.layouts: list[fixed_point.Layout] = []

    def run_clients(
        self, broadcast: Tree, clients: Sequence[int], states: Mapping[int, Tree], round: int
    ) -> Iterator[tuple[int | None, Answer | SumOfAnswers | Lost]]:
        answers = {k: self._half.run(k, broadcast, states.get(k), round) for k in clients}
        summands = [self._half.summand(k, broadcast, a.update, round) for k, a in answers.items()]
        encoded = [fixed_point.encode(summand, len(answers)) for summand in summands]
        self.layouts += [layout for layout, _ in encoded]
        total = fixed_point.decode(encoded[0][0], np.sum([numbers for _, numbers in encoded], axis=0))
        self._spoil(total)
        yield None, SumOfAnswers(total, {k: tree.ordered(a.state) for k, a in answers.items()}, round)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64, by their seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: Tree, b: Tree, tolerance: float = 1e-10) -> None:
    """Each tensor of `a` is close to that of `b` with its name."""
    others = tree.flatten(b)
    for name, t in tree.flatten(a).items():
        torch.testing.assert_close(t, others[name], rtol=tolerance, atol=tolerance)
