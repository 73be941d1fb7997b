"""Engines that do to a round what may happen to it: they reverse, drop, spoil and sum the clients' answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from redgrape import tree
from redgrape.engines import Answer, ClientHalf, Lost, SumOfAnswers
from redgrape.engines.in_process import InProcess
from redgrape.method import ClientId
from redgrape.tree import Tensors, Tree

Answers: TypeAlias = Iterator[tuple[ClientId | None, Answer | SumOfAnswers | Lost]]


class Reversed(InProcess):
    """Runs the clients, and returns their answers, in reversed order."""

    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Answers:
        for k in reversed(clients):
            yield from super().run_clients(broadcast, [k], states, round)


class Dropping(InProcess):
    """Loses all answers but those at these places."""

    def __init__(self, half: ClientHalf, keep: Sequence[int]) -> None:
        super().__init__(half)
        self._keep = keep

    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Answers:
        answers = list(super().run_clients(broadcast, clients, states, round))
        return (answers[i] for i in self._keep)


class Spoiling(InProcess):
    """Spoils the answer at the second place."""

    def __init__(self, half: ClientHalf, spoil: Callable[[Tensors], Any]) -> None:
        super().__init__(half)
        self._spoil = spoil

    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Answers:
        for place, (k, answer) in enumerate(super().run_clients(broadcast, clients, states, round)):
            if place == 1 and isinstance(answer, Answer):
                yield k, answer._replace(update=self._spoil(tree.flatten(answer.update)))
            else:
                yield k, answer


def _with_number(number: float) -> Callable[[Tensors], Tree]:
    def spoil(flat: Tensors) -> Tree:
        name, t = next((name, t) for name, t in flat.items() if t.is_floating_point() and t.numel())
        spoilt = t.clone()
        spoilt.view(-1)[-1] = number
        return tree.unflatten({**flat, name: spoilt})

    return spoil


SPOILERS: dict[str, Callable[[Tensors], Any]] = {
    "holds NaN": _with_number(float("nan")),
    "holds infinity": _with_number(float("-inf")),
    "is empty": lambda flat: {},
    "holds a Python number": lambda flat: {**tree.unflatten(flat), "number": 1.5},
}


class Summing(InProcess):
    """The clients' answers as a secure sum gives them."""

    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Answers:
        answers = {k: self._half.run(k, broadcast, states.get(k), round) for k in clients}
        total = summed([self._half.summand(k, broadcast, answer.update, round) for k, answer in answers.items()])
        yield None, SumOfAnswers(total, {k: tree.ordered(answer.state) for k, answer in answers.items()}, round)


class Watched(InProcess):
    """Notes every tree that crosses, before anything checks it."""

    def __init__(self, half: ClientHalf) -> None:
        super().__init__(half)
        self.passed: list[Passed] = []

    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Answers:
        self.passed.append(Passed("broadcast", f"the broadcast of round {round}", broadcast))
        for k in clients:
            answer = self._half.run(k, broadcast, states.get(k), round)
            self.passed.append(Passed("update", f"client {k}'s update of round {round}", answer.update))
            self.passed.append(Passed("state", f"client {k}'s state after round {round}", answer.state))
            yield k, Answer(tree.ordered(answer.update), tree.ordered(answer.state), round)


class Passed(NamedTuple):
    """A tree on its way from one half of a method to the other."""

    kind: Literal["server", "broadcast", "update", "state"]
    what: str
    tree: Tree


def summed(summands: Sequence[Tree]) -> Tree:
    """Of trees that must have the same names, shapes and dtypes."""
    total = tree.flatten(summands[0])
    for summand in summands[1:]:
        flat = tree.flatten(summand)
        for name in sorted(total.keys() | flat.keys()):
            if name not in flat or name not in total or (flat[name].shape, flat[name].dtype) != kind(total[name]):
                raise AssertionError(
                    f"'{name}' of a summand depends on the client; send zeros for what it does not hold"
                )
        total = {name: t + flat[name] for name, t in total.items()}
    return tree.unflatten(total)


def kind(t: Tensor) -> tuple[torch.Size, torch.dtype]:
    return t.shape, t.dtype
