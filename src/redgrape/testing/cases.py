"""Toy data and nets that a method is run on, and how it is run on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from redgrape import determinism, nets
from redgrape.data.examples import Examples
from redgrape.data.federation import Federation
from redgrape.engines import ClientHalf, Engine
from redgrape.engines.in_process import InProcess
from redgrape.exchange import Exchange
from redgrape.method import ClientId, Method, ServerSite
from redgrape.nets.net import Net
from redgrape.rounds import PLAIN, RunState, rounds

SEED, ROUNDS, BATCH, CLASSES = 7, 3, 4, 4
IMAGE = (1, 8, 8)

# Examples of each class at each client: many of a class, few, one, none. Three of the four clients answer a round.
COUNTS = ((9, 3, 1, 0), (0, 8, 4, 0), (2, 0, 9, 1), (5, 3, 4, 2))

# The server's own examples of each class: a batch and one more, a batch, one, and two.
AUXILIARY = (BATCH + 1, BATCH, 1, 2)


def batchnorm_net() -> Net:
    """A tiny net with all that is awkward: BatchNorm that fails on a single example, its buffers, and dropout."""
    with determinism.global_stream(determinism.key(SEED, "net")):
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2))
        return Net(encoder, nn.Linear(6, CLASSES))


def float64_net() -> Net:
    return batchnorm_net().double()


def small(method: Method) -> Method:
    """The method at as little work as shows what it does."""
    return type(method)(**{**dict(method), "epochs": 1, "batch_size": BATCH, **method.cheap})


@dataclass(frozen=True)
class Case:
    """What a method is run on."""

    counts: tuple[tuple[int, ...], ...] = COUNTS
    build: Callable[[], Net] = batchnorm_net
    net: str = "batchnorm_net"
    shape: tuple[int, ...] = IMAGE
    clients_per_round: int = 3
    rounds: int = ROUNDS
    exchange: Exchange = PLAIN

    @cached_property
    def federation(self) -> Federation:
        clients = [self._examples(counts, k) for k, counts in enumerate(self.counts)]
        test, auxiliary = self._examples((1,) * CLASSES, len(clients)), self._examples(AUXILIARY, len(clients) + 1)
        return Federation(clients, test, CLASSES, auxiliary=auxiliary)

    @property
    def eligible(self) -> list[ClientId]:
        return [k for k in range(self.federation.num_clients) if self.federation.size(k)]

    def _examples(self, counts: Sequence[int], place: int) -> Examples:
        """So many examples of each class, noise around a mean of its own."""
        y = torch.repeat_interleave(torch.arange(CLASSES), torch.tensor(counts))
        means = torch.randn(CLASSES, *self.shape, generator=determinism.torch_stream(SEED, "means"))
        noise = torch.randn(len(y), *self.shape, generator=determinism.torch_stream(SEED, "noise", place))
        return Examples(means[y] + noise, y)


def named_net(name: str, shape: tuple[int, ...] = IMAGE) -> Case:
    build = functools.partial(nets.build, name, shape, CLASSES, seed=SEED)
    return Case(COUNTS[:2], build, name, shape, clients_per_round=2, rounds=2)


def client_half(method: Method, case: Case) -> ClientHalf:
    cpu = torch.device("cpu")
    return ClientHalf(method, case.federation, case.build, SEED, case.rounds, cpu, exchange=case.exchange)


def server_site(case: Case) -> ServerSite:
    f = case.federation
    return ServerSite(case.build, f.num_clients, f.num_classes, SEED, 0, case.rounds, torch.device("cpu"), f.auxiliary)


def run(
    method: Method,
    case: Case | None = None,
    engine: Callable[[ClientHalf], Engine] = InProcess,
    start: RunState | None = None,
) -> list[RunState]:
    """The states after each round."""
    case = case or Case()
    with engine(client_half(method, case)) as running:
        made = rounds(
            method,
            running,
            server_site(case),
            eligible=case.eligible,
            clients_per_round=case.clients_per_round,
            exchange=case.exchange,
            start=start,
        )
        return list(made)
