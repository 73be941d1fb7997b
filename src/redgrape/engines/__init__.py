"""Where clients run. No method is named here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, Self, TypeAlias

import torch

from redgrape import determinism, tree
from redgrape.data.examples import Examples
from redgrape.data.federation import ClientData
from redgrape.determinism import keep_freed_memory, same_bits_everywhere
from redgrape.errors import ConfigError
from redgrape.exchange import Exchange
from redgrape.learning import sums
from redgrape.learning.evaluation import Scores
from redgrape.method import ClientId, ClientSite, Method, Site
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree

Split: TypeAlias = Literal["test", "validation"]


class Answer(NamedTuple):
    """The result of one client's round: its update for the server, and its new state, which stays with the client.
    The round number keeps a late answer from being taken for another round's."""

    update: Tree
    state: Tree
    round: int


class SumOfAnswers(NamedTuple):
    """The sum of the clients' summands, accepted or rejected as a whole, and the new state of each client."""

    total: Tree
    states: Mapping[ClientId, Tree]
    round: int


class Lost(NamedTuple):
    """A client that did not answer, and why."""

    reason: str


class StateLost(Lost):
    """A client that no longer has the state that the run counts on. None of the round's answers is used then."""


class Engine(Protocol):
    """Runs the client half of a method and evaluates models in the same place."""

    @abstractmethod
    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Iterator[tuple[ClientId | None, Answer | SumOfAnswers | Lost]]:
        """Run one round of these clients. Yield their answers as they arrive, in any order, or only their sum, with
        None as the client. Some clients may be lost; the reason is given. Nothing is checked here. `states` holds the
        states of clients that have one. A state may lie on disk. It is looked up when its client runs, so not all are
        in memory at once."""
        ...

    @abstractmethod
    def survey(self, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId | None, Tree]]:
        """These clients' answers to Method.survey, in order of their ids; or only their sum, with None as client."""
        ...

    @abstractmethod
    def evaluate(self, model: Tensors, split: Split) -> Scores | None:
        """The model's scores; None if it cannot be evaluated now."""
        ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class ClientHalf:
    """What any engine needs to run one client or evaluate one batch. All engines share this code."""

    method: Method
    federation: ClientData
    build: Callable[[], Net]
    seed: int
    rounds: int
    device: torch.device
    stack: int = 1  # number of clients of equal size trained as one (engines/stacked.py)
    exchange: Exchange = Exchange()  # noqa: RUF009  # it is frozen

    def site(self, client: ClientId, round: int) -> ClientSite:
        return ClientSite(
            self.build,
            self.federation.num_clients,
            self.federation.num_classes,
            self.seed,
            round,
            self.rounds,
            self.device,
            client,
            self.federation.client(client),
            self.exchange.min_count,
        )

    def run(self, client: ClientId, broadcast: Tree, state: Tree | None, round: int) -> Answer:
        """Run one client's round. `state` is None before its first."""
        keep_freed_memory()
        site = self.site(client, round)
        with same_bits_everywhere(), determinism.global_stream(determinism.key(self.seed, "global", round, client)):
            before = self.method.init_client(broadcast) if state is None else state
            match self.method.client_update(broadcast, before, site):
                case update, new:
                    return Answer(self._leave(update, broadcast, site), new, round)
                case other:
                    raise TypeError(f"client_update returns a {type(other).__name__}; it must return (update, state)")

    def _leave(self, update: Tree, broadcast: Tree, site: ClientSite) -> Tree:
        if self.exchange.min_count == 1:
            return update
        return self.exchange.leave(update, self.method.parts(broadcast["model"], site), site.class_counts)

    def groups(self, clients: Iterable[ClientId]) -> list[list[ClientId]]:
        """Groups of clients to run together, largest first: single clients, or stacks of clients of equal size."""
        by_size: dict[int, list[ClientId]] = {}
        for k in sorted(clients):
            by_size.setdefault(self.federation.size(k), []).append(k)
        largest_first = [by_size[size] for size in sorted(by_size, reverse=True)]
        return [same[i : i + self.stack] for same in largest_first for i in range(0, len(same), self.stack)]

    def run_group(
        self, clients: Sequence[ClientId], broadcast: Tree, states: Mapping[ClientId, Tree], round: int
    ) -> list[Answer]:
        if self.stack == 1:
            return [self.run(k, broadcast, states.get(k), round) for k in clients]
        from redgrape.engines import stacked  # torch.func takes a second to import

        keep_freed_memory()
        with same_bits_everywhere():
            before = [states[k] if k in states else self.method.init_client(broadcast) for k in clients]
            sites = [self.site(k, round) for k in clients]
            answers = stacked.run(self.method, broadcast, before, sites)
            pairs = zip(answers, sites, strict=True)
            return [Answer(self._leave(update, broadcast, site), state, round) for (update, state), site in pairs]

    def summand(self, client: ClientId, broadcast: Tree, update: Tree, round: int) -> Tree:
        """What the client adds to a secure sum instead of its update."""
        with same_bits_everywhere():
            parts = self.method.parts(broadcast["model"], self.site(client, round))
            return self.exchange.summand(tree.ordered(update), parts, self.federation.num_classes)

    def survey(self, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, Tree]]:
        for client in sorted(clients):
            with same_bits_everywhere():
                answer = self.method.survey(self.site(client, 0))
            yield client, answer  # outside: whoever asks goes on in between

    def examples(self, split: Split) -> Examples:
        examples = self.federation.test if split == "test" else self.federation.validation
        if examples is None:
            raise ConfigError("there is no validation split; hold one out with data.validation")
        return examples

    def score(self, model: Tensors, split: Split, starts: range) -> Tensors:
        """The sums over the batches that start at these rows."""
        examples = self.examples(split)
        site = Site(
            self.build,
            self.federation.num_clients,
            self.federation.num_classes,
            self.seed,
            0,
            self.rounds,
            self.device,
        )
        with same_bits_everywhere():
            net = site.load(model).eval()
            return sums.of_batches(net, examples, starts, self.device)


def create(
    half: ClientHalf, workers: int, deadline: float | None = None, devices: list[torch.device] | None = None
) -> Engine:
    """A pool of worker processes if there are several workers, else this process, which has no deadline. `devices`:
    what workers take turns on; None for that of `half`."""
    from redgrape.engines.in_process import InProcess
    from redgrape.engines.pool import Pool

    return InProcess(half) if workers == 1 else Pool(half, workers, deadline, devices)
