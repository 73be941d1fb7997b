"""The server's engine: clients are sites. Rounds, the survey and evaluations are questions to them. Sites answer singly
or in secure sums. A client's state lies at its site. The server keeps only its round and its key (site_states.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from redgrape import tree
from redgrape.deploy.protocol.admission import sums_must_be_whole
from redgrape.deploy.protocol.asking import Sites, StatesLost, checked, tree_of
from redgrape.deploy.protocol.members import Members
from redgrape.deploy.protocol.messages import (
    EvaluateAnswer,
    EvaluateQuestion,
    Letter,
    Reply,
    SurveyAnswer,
    SurveyQuestion,
    TrainAnswer,
    TrainQuestion,
)
from redgrape.deploy.setup.folder import DeployOptions
from redgrape.engines import Answer, ClientHalf, Engine, Lost, Split, SumOfAnswers
from redgrape.errors import TooFewClients
from redgrape.exchange.checks import UpdateRejected
from redgrape.learning import evaluation, sums
from redgrape.learning.evaluation import Scores
from redgrape.method import ClientId
from redgrape.runs.checkpoints import KEPT
from redgrape.runs.experiment import Experiment
from redgrape.tree import Tensors, Tree


class FlowerEngine(Engine):
    """`task`: the fields that all questions of the run have."""

    def __init__(
        self,
        half: ClientHalf,
        sites: Sites,
        members: Members,
        options: DeployOptions,
        experiment: Experiment,
        task: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._half, self._sites, self._members, self._options, self._say = half, sites, members, options, say
        self._task = dict(task)
        self._reach = KEPT * experiment.checkpoint_every + 1  # rounds that a resume may go back
        self._round = self._rounds = experiment.rounds  # the last, also of a run that was trained before
        self._waits = True
        self._is_whole = options.secure_aggregation and sums_must_be_whole(experiment, options)

    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Iterator[tuple[ClientId | None, Answer | SumOfAnswers | Lost]]:
        self._round = round
        parts = {TrainQuestion.carries: tree.to_bytes(broadcast)}
        letters: dict[ClientId, Letter] = {}
        for k in clients:
            state = {name: int(number) for name, number in states[k].items()} if k in states else {}
            question = TrainQuestion(
                deadline=self._options.deadlines.round,
                round=round,
                reach=self._reach,
                state=state.get("round"),
                state_key=state.get("key"),
                **self._task,
            )
            letters[k] = question, parts
        if self._options.secure_aggregation:
            yield from self._sum_of_clients(letters, round)
            return
        for k, reply in self._sites.ask(letters, TrainAnswer, self._sites.at_once):
            yield k, reply if isinstance(reply, Lost) else _as_answer(reply, round)

    def _sum_of_clients(
        self, letters: Mapping[ClientId, Letter], round: int
    ) -> Iterator[tuple[ClientId | None, SumOfAnswers | Lost]]:
        """The sum of the clients' updates, and the clients that are not in it."""
        from redgrape.deploy.protocol.secure_sum import SumFailed

        everyone = len(self._options.sites)
        if self._is_whole and len(letters) < everyone:
            gone = " and ".join(f"site '{self._members.name(k)}'" for k in range(everyone) if k not in letters)
            raise TooFewClients(
                f"{gone} lost the state of this run, and its sums must be over all {everyone} sites; start a new run"
            )
        try:
            summed = self._sites.sum(letters, everyone if self._is_whole else self._sites.fewest)
        except SumFailed as failure:
            for k in letters:
                yield k, Lost(f"there is no sum: {failure}")
            return
        except StatesLost as failure:
            yield from failure.lost.items()
            return
        for k, why in summed.lost.items():
            yield k, Lost(why)
        states = {k: _state(answer.state_key, round) for k, answer in summed.answered.items()}
        yield None, SumOfAnswers(summed.total, states, round)

    def survey(self, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId | None, Tree]]:
        """`clients` are all of them."""
        question = SurveyQuestion(deadline=self._options.deadlines.evaluate, **self._task)
        return self._sites.summed_or_all(question, SurveyAnswer)

    def evaluate(self, model: Tensors, split: Split) -> Scores | None:
        if self._options.test is not None:
            starts = sums.batch_starts(self._half.examples(split))
            return evaluation.combine([self._half.score(model, split, starts)])
        question = EvaluateQuestion(deadline=self._options.deadlines.evaluate, **self._task)
        parts = {EvaluateQuestion.carries: tree.to_bytes(model)}
        letters: dict[ClientId, Letter] = {k: (question, parts) for k in range(len(self._options.sites))}
        if self._options.secure_aggregation:
            return self._evaluated_by_all(letters)
        received: dict[ClientId, Tree] = {}
        for k, reply in self._sites.ask(letters, EvaluateAnswer, 1):
            if isinstance(reply, Lost):
                self._say(f"site '{self._members.name(k)}' did not evaluate: {reply.reason}")
                continue
            try:
                received[k] = self._checked_sums(checked(reply), self._members.tests(k))
            except UpdateRejected as error:
                self._say(f"the evaluation of site '{self._members.name(k)}' was rejected: {error}")
        if not received:
            raise TooFewClients("no site has evaluated the model, so there are no metrics")
        return evaluation.of_shared([sums for _, sums in sorted(received.items())])

    def _evaluated_by_all(self, letters: Mapping[ClientId, Letter]) -> Scores | None:
        """From a sum over all sites, else None: two sums that differ by one site give its test examples. A missing site
        is waited for after the last round only, and once."""
        from redgrape.deploy.protocol.secure_sum import NotBegun, SumFailed

        waits = self._waits and self._round == self._rounds
        try:
            total = self._sites.sum(letters, len(letters), waits=waits).total
            return evaluation.of_shared([self._checked_sums(total)])
        except SumFailed as failure:
            self._waits = self._waits and not (waits and isinstance(failure, NotBegun))
            reason = f"not all sites did: {failure}"
        except UpdateRejected as error:
            reason = f"the sum of the sites' evaluations was rejected: {error}"
        self._say(f"the model of round {self._round} is not evaluated, since {reason}")
        return None

    def _checked_sums(self, sent: Tree, tests: int | None = None) -> Tree:
        """What a site sends of its evaluation, else UpdateRejected. `tests`: on how many examples it evaluates, where
        that is known."""
        shapes = evaluation.shared_shapes(self._half.federation.num_classes)
        for name, shape in shapes.items():
            counts = sent.get(name)
            if not (isinstance(counts, torch.Tensor) and counts.shape == shape and counts.dtype == torch.int64):
                raise UpdateRejected(f"'{name}' must be {' by '.join(map(str, shape))} whole numbers")
            if (counts < 0).any() or (counts > 10**9).any():
                raise UpdateRejected(f"'{name}' must count examples")
        loss = sent.get("loss")
        if not (isinstance(loss, torch.Tensor) and loss.shape == () and torch.isfinite(loss) and loss >= 0):
            raise UpdateRejected("'loss' must be one finite number that is not negative")
        received = {name: sent[name] for name in (*shapes, "loss")}
        name, scores = next(iter(shapes)), evaluation.of_shared([received])
        number = int(scores.tested.sum())
        if not number or not scores.is_possible():
            raise UpdateRejected(f"'{name}' must count examples")
        if tests is not None and number != tests:
            raise UpdateRejected(f"'{name}' counts {number} examples, but the site declared {tests}")
        return received

    def close(self) -> None:
        pass


def _as_answer(reply: Reply[TrainAnswer], asked: int) -> Answer | Lost:
    """What `rounds.rounds` judges. The state is represented by its round and its key."""
    try:
        update = tree_of(reply)
    except UpdateRejected as error:
        return Lost(str(error))
    return Answer(update, _state(reply.answer.state_key, asked), reply.answer.round)


def _state(key: int | None, round: int) -> Tree:
    return {} if key is None else {"round": torch.tensor(round), "key": torch.tensor(key)}
