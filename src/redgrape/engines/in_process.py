"""Clients one after another in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from redgrape import evaluate, tree
from redgrape.engines import Answer, ClientHalf, Split
from redgrape.evaluate import Scores
from redgrape.method import ClientId
from redgrape.tree import Tensors, Tree


class InProcess:
    def __init__(self, half: ClientHalf) -> None:
        self._half = half

    def run_clients(
        self, broadcast: Tree, states: Mapping[ClientId, Tree | None], round: int
    ) -> Mapping[ClientId, Answer]:
        answers = ((k, self._half.run(k, broadcast, state, round)) for k, state in states.items())
        return {k: Answer(tree.ordered(update), tree.ordered(state)) for k, (update, state) in answers}

    def survey(self, clients: Sequence[ClientId]) -> Iterator[Tree]:
        return self._half.survey(clients)

    def evaluate(self, model: Tensors, split: Split) -> Scores:
        starts = evaluate.batch_starts(self._half.examples(split))
        return evaluate.combine(self._half.score(model, split, starts))

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
