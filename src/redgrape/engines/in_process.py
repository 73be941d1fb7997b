"""Runs clients one after another in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from redgrape import tree
from redgrape.engines import Answer, ClientHalf, Engine, Lost, Split, SumOfAnswers, devices
from redgrape.learning import evaluation, sums
from redgrape.learning.evaluation import Scores
from redgrape.method import ClientId
from redgrape.tree import Tensors, Tree


class InProcess(Engine):
    def __init__(self, half: ClientHalf) -> None:
        self._half = replace(half, federation=devices.near(half.federation, half.device))

    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Iterator[tuple[ClientId | None, Answer | SumOfAnswers | Lost]]:
        for group in sorted(self._half.groups(clients)):
            answers = self._half.run_group(group, broadcast, states, round)
            for k, answer in zip(group, answers, strict=True):
                yield k, Answer(tree.ordered(answer.update), tree.ordered(answer.state), answer.round)

    def survey(self, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, Tree]]:
        return self._half.survey(clients)

    def evaluate(self, model: Tensors, split: Split) -> Scores:
        starts = sums.batch_starts(self._half.examples(split))
        return evaluation.combine([self._half.score(model, split, starts)])

    def close(self) -> None:
        pass
