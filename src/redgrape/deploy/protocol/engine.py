"""The server's engine: clients are sites. Rounds, the survey and evaluations are questions to them. Sites answer singly
or in secure sums. A client's state lies at its site. The server keeps only its round and its key (site_states.py)."""

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
from redgrape.engines import Answer, ClientHalf, Lost, Split, StateLost, SumOfAnswers
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


class Refused(Lost):
    """A site whose policy does not allow the question."""


class _StatesLost(Exception):
    """Sites do not have the states that a secure sum would start from. Nobody has computed anything yet."""

    def __init__(self, lost: Mapping[ClientId, StateLost]) -> None:
        super().__init__()
        self.lost = lost


class FlowerEngine:
    """`run`: the name under which sites keep the states of this run."""

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
            state = {name: int(number) for name, number in states[k].items()} if k in states else {}
            question = TrainQuestion(
                deadline=self._options.deadlines.round,
                round=round,
                run=self._run,
                experiment=self._experiment,
                reach=self._reach,
                state=state.get("round"),
                state_key=state.get("key"),
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
        """The sum of the clients' updates, and the clients that are not in it."""
        from redgrape.deploy.protocol.secure_sum import SumFailed

        try:
            summed = self._sum(letters, self._fewest)
        except SumFailed as failure:
            why = "".join(f"; {reason}" for reason in failure.lost.values())
            for k in letters:
                yield k, Lost(f"there is no sum: {failure}{why}")
            return
        except _StatesLost as failure:
            yield from failure.lost.items()
            return
        for k, why in summed.lost.items():
            yield k, Lost(why)
        states = {k: _state(answer.state_key, round) for k, answer in summed.answered.items()}
        yield None, SumOfAnswers(summed.total, states, round)

    def survey(self, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId | None, Tree]]:
        """All clients must answer: a sum over fewer would describe another federation."""
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
                    f"the answer of site '{self._members.name(k)}' to the survey was rejected: {reason}"
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
                return evaluation.of_shared([self._checked_sums(summed.total)])
            except UpdateRejected as error:
                raise TooFewClients(f"the sum of the sites' evaluations was rejected: {error}") from error
        received: dict[ClientId, Tree] = {}
        for k, reply in self._ask(letters, EvaluateAnswer, 1):
            if isinstance(reply, Lost):
                self._say(f"site '{self._members.name(k)}' did not evaluate: {reply.reason}")
                continue
            try:
                received[k] = self._checked_sums(_checked(reply), self._members.tests(k))
            except UpdateRejected as error:
                self._say(f"the evaluation of site '{self._members.name(k)}' was rejected: {error}")
        if not received:
            raise TooFewClients("no site has evaluated the model, so there are no metrics")
        return evaluation.of_shared([sums for _, sums in sorted(received.items())])

    def _checked_sums(self, sent: Tree, tests: int | None = None) -> Tree:
        """What a site tells of its evaluation, else UpdateRejected. `tests`: on how many examples it evaluates, where
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

    def _sum_or_stop(self, letters: Mapping[ClientId, Letter], fewest: int) -> Summed:
        from redgrape.deploy.protocol.secure_sum import SumFailed

        try:
            return self._sum(letters, fewest)
        except SumFailed as failure:
            why = "".join(f"; site '{self._members.name(k)}': {reason}" for k, reason in failure.lost.items())
            kind = next(iter(letters.values()))[0].kind
            raise TooFewClients(f"the sites' answers to '{kind}' gave no sum: {failure}{why}") from failure

    def _sum(self, letters: Mapping[ClientId, Letter], fewest: int) -> Summed:
        """The secure sum of the sites' answers to these questions. If too few sites are there to begin, wait for them,
        as a run without secure sums would."""
        from redgrape.deploy.protocol.secure_sum import NotBegun, secure_sum

        ends = time.monotonic() + self._options.deadlines.join

        def ask(stage: Stage, parts: Mapping[ClientId, Parts]) -> Iterator[tuple[ClientId, Reply[SumAnswer] | Lost]]:
            asked: dict[ClientId, Letter] = {}
            for k, own in parts.items():
                question, more = letters[k]
                computes = stage.name == "masked"
                seconds = question.deadline if computes else self._options.deadlines.evaluate
                asked[k] = SumQuestion.about(question, name, stage, seconds), {**own, **(more if computes else {})}
            states_lost: dict[ClientId, StateLost] = {}
            for k, reply in self._ask(asked, SumAnswer, self._at_once if stage.name == "keys" else 1):
                if isinstance(reply, Refused):
                    refused.add(k)
                if isinstance(reply, StateLost):
                    states_lost[k] = reply
                yield k, reply
            # A sum of the others, and then one of all from new states, would differ by what a single site adds.
            if states_lost and stage.name == "keys":
                raise _StatesLost(states_lost)

        while True:
            name, refused = secrets.token_hex(8), set[ClientId]()
            try:
                return secure_sum(list(letters), ask, fewest)
            except NotBegun:
                if time.monotonic() >= ends or len(letters) - len(refused) < max(FEWEST_IN_SUM, fewest):
                    raise
                time.sleep(NODES)

    def _ask(
        self, letters: Mapping[ClientId, Letter], answer: type[A], fewest: int
    ) -> Iterator[tuple[ClientId, Reply[A] | Lost]]:
        """Ask sites, and yield their replies as they arrive; for a site that gives none, the reason."""
        nodes = self._members.connected(letters, fewest)
        for k in letters:
            if k not in nodes:
                yield k, Lost(f"site '{self._members.name(k)}' is not connected")
        site_of = {node: k for k, node in nodes.items()}
        for node, reply in self._transport.ask({node: letters[k] for k, node in nodes.items()}, answer):
            k = site_of[node]
            if isinstance(reply, NoAnswer):
                named = getattr(letters[k][0], "state", None) is not None
                kind = Refused if reply.refused else StateLost if reply.no_state and named else Lost
                lost = kind(f"site '{self._members.name(k)}' {reply.reason}")
                if kind is StateLost:
                    self._say(lost.reason)
                yield k, lost
            else:
                yield k, reply

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_answer(reply: Reply[TrainAnswer], asked: int) -> Answer | Lost:
    """What `training.rounds` judges. The state is represented by its round and its key."""
    try:
        update = _tree(reply)
    except UpdateRejected as error:
        return Lost(str(error))
    return Answer(update, _state(reply.answer.state_key, asked), reply.answer.round)


def _state(key: int | None, round: int) -> Tree:
    return {} if key is None else {"round": torch.tensor(round), "key": torch.tensor(key)}


def _checked(reply: Reply[A]) -> Tree:
    """Named tensors from a site, else UpdateRejected. Their values are checked elsewhere."""
    sent = _tree(reply)
    named_tensors(sent)
    return sent


def _tree(reply: Reply[A]) -> Tree:
    name = reply.answer.carries
    try:
        return tree.from_bytes(reply.parts[name])
    except (KeyError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise UpdateRejected(f"'{name}' cannot be read: {error}") from error
