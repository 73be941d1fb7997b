"""The server's engine: clients are sites. Rounds, the survey and evaluations are questions to them, answered one by one
or as secure sums. A client's state lies at its site: what the server keeps of it is the round that it is of."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import safetensors
import torch

from redgrape import tree
from redgrape.deploy.protocol.members import NODES, Members
from redgrape.deploy.protocol.messages import (
    A,
    EvaluateAnswer,
    EvaluateQuestion,
    Letter,
    Reply,
    Stage,
    SumAnswer,
    SumQuestion,
    SurveyAnswer,
    SurveyQuestion,
    TrainAnswer,
    TrainQuestion,
)
from redgrape.deploy.protocol.transport import NoAnswer, Transport
from redgrape.deploy.protocol.wire import Parts
from redgrape.deploy.setup.folder import FEWEST_IN_SUM, DeployOptions
from redgrape.engines import Answer, ClientHalf, Lost, Split, SumOfAnswers
from redgrape.errors import TooFewClients
from redgrape.exchange.checks import UpdateRejected, named_tensors
from redgrape.learning import evaluation, sums
from redgrape.learning.evaluation import Scores
from redgrape.method import ClientId
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import KEPT
from redgrape.tree import Tensors, Tree

if TYPE_CHECKING:
    from redgrape.deploy.protocol.secure_sum import Summed


class FlowerEngine:
    """`run`: the name by which sites keep the states of this run."""

    def __init__(
        self,
        half: ClientHalf,
        transport: Transport,
        members: Members,
        options: DeployOptions,
        experiment: Experiment,
        run: str,
        say: Callable[[str], None],
    ) -> None:
        self._half, self._transport, self._members, self._options, self._say = half, transport, members, options, say
        self._run, self._experiment = run, experiment.to_toml()
        self._fewest = max(experiment.min_answers, half.exchange.fewest_answers())
        self._at_once = max(self._fewest, FEWEST_IN_SUM if options.secure_aggregation else 1)  # to begin a round
        self._reach = KEPT * experiment.checkpoint_every + 1  # rounds that a resume may go back

    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Iterator[tuple[ClientId | None, Answer | SumOfAnswers | Lost]]:
        parts = {TrainQuestion.carries: tree.to_bytes(broadcast)}
        letters: dict[ClientId, Letter] = {}
        for k in clients:
            question = TrainQuestion(
                deadline=self._options.deadlines.round,
                round=round,
                run=self._run,
                experiment=self._experiment,
                reach=self._reach,
                state=int(states[k]["round"]) if k in states else None,
            )
            letters[k] = question, parts
        if self._options.secure_aggregation:
            yield from self._sum_of_clients(letters, round)
            return
        for k, reply in self._ask(letters, TrainAnswer, self._at_once):
            yield k, reply if isinstance(reply, Lost) else _as_answer(reply, round)

    def _sum_of_clients(
        self, letters: Mapping[ClientId, Letter], round: int
    ) -> Iterator[tuple[ClientId | None, SumOfAnswers | Lost]]:
        """The sum of the clients' updates, and who is not in it."""
        from redgrape.deploy.protocol.secure_sum import SumFailed

        try:
            summed = self._sum(letters, self._fewest)
        except SumFailed as failure:
            for k in letters:
                blame = failure.lost.get(k)
                yield k, Lost(f"there is no sum: {failure}{f' ({blame})' if blame else ''}")
            return
        for k, why in summed.lost.items():
            yield k, Lost(why)
        states = {k: _state(answer.has_state, round) for k, answer in summed.answered.items()}
        yield None, SumOfAnswers(summed.total, states, round)

    def survey(self, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId | None, Tree]]:
        """All of them must answer: a sum over fewer would be of another federation."""
        question = SurveyQuestion(deadline=self._options.deadlines.evaluate, run=self._run, experiment=self._experiment)
        letters: dict[ClientId, Letter] = {k: (question, {}) for k in clients}
        if self._options.secure_aggregation:
            yield None, self._sum_or_stop(letters, len(clients)).total
            return
        replies = dict(self._ask(letters, SurveyAnswer, len(clients)))
        for k in sorted(clients):
            reply = replies[k]
            if isinstance(reply, Lost):
                raise TooFewClients(f"the survey before the first round needs all sites: {reply.reason}")
            try:
                yield k, _checked(reply)
            except UpdateRejected as reason:
                raise TooFewClients(
                    f"what site '{self._members.name(k)}' answers to the survey is not taken: {reason}"
                ) from reason

    def evaluate(self, model: Tensors, split: Split) -> Scores:
        if self._options.test is not None:
            starts = sums.batch_starts(self._half.examples(split))
            return evaluation.combine([self._half.score(model, split, starts)])
        question = EvaluateQuestion(
            deadline=self._options.deadlines.evaluate, run=self._run, experiment=self._experiment
        )
        parts = {EvaluateQuestion.carries: tree.to_bytes(model)}
        letters: dict[ClientId, Letter] = {k: (question, parts) for k in range(len(self._options.sites))}
        if self._options.secure_aggregation:
            summed = self._sum_or_stop(letters, 1)
            for k, why in summed.lost.items():
                self._say(f"site '{self._members.name(k)}' did not evaluate: {why}")
            try:
                return evaluation.of_told([self._told(summed.total)])
            except UpdateRejected as error:
                raise TooFewClients(f"the sum of the sites' evaluations is not taken: {error}") from error
        told: dict[ClientId, Tree] = {}
        for k, reply in self._ask(letters, EvaluateAnswer, 1):
            if isinstance(reply, Lost):
                self._say(f"site '{self._members.name(k)}' did not evaluate: {reply.reason}")
                continue
            try:
                told[k] = self._told(_checked(reply), self._members.tests(k))
            except UpdateRejected as error:
                self._say(f"the evaluation of site '{self._members.name(k)}' is not taken: {error}")
        if not told:
            raise TooFewClients("no site has evaluated the model; metrics cannot be made")
        return evaluation.of_told([sums for _, sums in sorted(told.items())])

    def _told(self, sent: Tree, tests: int | None = None) -> Tree:
        """What a site tells of its evaluation, else UpdateRejected. `tests`: on how many examples it evaluates, where
        that is known."""
        shapes = evaluation.told_shapes(self._half.federation.num_classes)
        for name, shape in shapes.items():
            counts = sent.get(name)
            if not (isinstance(counts, torch.Tensor) and counts.shape == shape and counts.dtype == torch.int64):
                raise UpdateRejected(f"'{name}' must be {' by '.join(map(str, shape))} whole numbers")
            if (counts < 0).any() or (counts > 10**9).any():
                raise UpdateRejected(f"'{name}' must count examples")
        loss = sent.get("loss")
        if not (isinstance(loss, torch.Tensor) and loss.shape == () and torch.isfinite(loss) and loss >= 0):
            raise UpdateRejected("'loss' must be one finite number that is not negative")
        told = {name: sent[name] for name in (*shapes, "loss")}
        name, scores = next(iter(shapes)), evaluation.of_told([told])
        number = int(scores.tested.sum())
        if not number or not scores.is_possible():
            raise UpdateRejected(f"'{name}' must count examples")
        if tests is not None and number != tests:
            raise UpdateRejected(f"'{name}' counts {number} examples, and the site declared {tests}")
        return told

    def _sum_or_stop(self, letters: Mapping[ClientId, Letter], fewest: int) -> Summed:
        from redgrape.deploy.protocol.secure_sum import SumFailed

        try:
            return self._sum(letters, fewest)
        except SumFailed as failure:
            why = "".join(f"; site '{self._members.name(k)}': {reason}" for k, reason in failure.lost.items())
            kind = next(iter(letters.values()))[0].kind
            raise TooFewClients(f"the sites' answers to '{kind}' gave no sum: {failure}{why}") from failure

    def _sum(self, letters: Mapping[ClientId, Letter], fewest: int) -> Summed:
        """The secure sum of what sites answer to these questions. As long as too few are there to begin, they are
        waited for, as a run without secure sums would wait for them."""
        from redgrape.deploy.protocol.secure_sum import NotBegun, secure_sum

        ends = time.monotonic() + self._options.deadlines.join

        def ask(stage: Stage, parts: Mapping[ClientId, Parts]) -> Iterator[tuple[ClientId, Reply[SumAnswer] | Lost]]:
            asked: dict[ClientId, Letter] = {}
            for k, own in parts.items():
                question, more = letters[k]
                computes = stage.name == "masked"
                seconds = question.deadline if computes else self._options.deadlines.evaluate
                asked[k] = SumQuestion.about(question, name, stage, seconds), {**own, **(more if computes else {})}
            return self._ask(asked, SumAnswer, self._at_once if stage.name == "keys" else 1)

        while True:
            name = secrets.token_hex(8)
            try:
                return secure_sum(list(letters), ask, fewest)
            except NotBegun:
                if time.monotonic() >= ends:
                    raise
                time.sleep(NODES)

    def _ask(
        self, letters: Mapping[ClientId, Letter], kind: type[A], fewest: int
    ) -> Iterator[tuple[ClientId, Reply[A] | Lost]]:
        """Ask sites, and give their replies as they come; for each that gives none why."""
        nodes = self._members.connected(letters, fewest)
        for k in letters:
            if k not in nodes:
                yield k, Lost(f"site '{self._members.name(k)}' is not connected")
        site_of = {node: k for k, node in nodes.items()}
        for node, reply in self._transport.ask({node: letters[k] for k, node in nodes.items()}, kind):
            k = site_of[node]
            yield k, Lost(f"site '{self._members.name(k)}' {reply.reason}") if isinstance(reply, NoAnswer) else reply

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_answer(reply: Reply[TrainAnswer], asked: int) -> Answer | Lost:
    """What `training.rounds` judges: of the state only the round that it is of."""
    try:
        update = _tree(reply)
    except UpdateRejected as error:
        return Lost(str(error))
    return Answer(update, _state(reply.answer.has_state, asked), reply.answer.round)


def _state(has_state: bool, round: int) -> Tree:
    return {"round": torch.tensor(round)} if has_state else {}


def _checked(reply: Reply[A]) -> Tree:
    """Named tensors from a site, else UpdateRejected. What is in them is for others to judge."""
    sent = _tree(reply)
    named_tensors(sent)
    return sent


def _tree(reply: Reply[A]) -> Tree:
    name = reply.answer.carries
    try:
        return tree.from_bytes(reply.parts[name])
    except (KeyError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise UpdateRejected(f"'{name}' cannot be read: {error}") from error
