"""A site's answers to the server's questions (messages.py). Its examples and its state stay here. Only answers leave: a
survey; an update, once the new state is saved here; the counts of an evaluation, of classes with at least min_count
examples. A site with secure_aggregation gives these three only as parts of secure sums.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import tomllib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import safetensors
import torch
from pydantic import ValidationError

import redgrape
from redgrape import tree
from redgrape.data.columns import Columns
from redgrape.data.examples import Examples
from redgrape.data.prepare import augmentation
from redgrape.deploy.protocol import admission, inputs, messages, own_parts
from redgrape.deploy.protocol.admission import NotAllowed
from redgrape.deploy.protocol.known_federation import PartialFederation
from redgrape.deploy.protocol.messages import (
    Answer,
    ColumnsAnswer,
    ColumnsQuestion,
    EvaluateAnswer,
    EvaluateQuestion,
    Failure,
    JoinAnswer,
    JoinQuestion,
    OfRun,
    PrepareAnswer,
    PrepareQuestion,
    Question,
    Stage,
    SumAnswer,
    SumQuestion,
    SurveyAnswer,
    SurveyQuestion,
    TrainAnswer,
    TrainQuestion,
)
from redgrape.deploy.protocol.site_states import SiteStates, StateMissing
from redgrape.deploy.protocol.wire import REFUSED, Header, NotUnderstood, Parts
from redgrape.deploy.setup import site_data
from redgrape.deploy.setup.folder import SiteFolder
from redgrape.engines import ClientHalf
from redgrape.errors import ConfigError, RedgrapeError
from redgrape.learning import evaluation, sums
from redgrape.runs.experiment import Experiment
from redgrape.tree import Tree

if TYPE_CHECKING:
    from redgrape.deploy.protocol.secure_sum import Member

_ONLY_SUMS = "this site answers only in secure sums (secure_aggregation in its site.toml)"
_CPU = torch.device("cpu")


class _Prepared(NamedTuple):
    """What the site has made for a run. `sums_are_whole`: whether no site may be missing in sums of its rounds."""

    task: tuple[Any, ...]
    half: ClientHalf
    sums_are_whole: bool


class DeployedSite:
    """One site with its data, which has been checked."""

    def __init__(self, folder: SiteFolder, data: Path, states: Path | None = None) -> None:
        self.options, self._folder, self.index = folder.options, folder, folder.options.index
        self.train, self.test = site_data.of_site(folder, data)
        self._evaluated = self._reported_test_set()
        self._states = SiteStates(folder.states if states is None else states)
        self._prepared: _Prepared | None = None
        self._sums: tuple[str, Question, Member] | None = None  # of the sum under way: its name, and what is added

    def counts(self) -> dict[str, int]:
        """The number of training examples of each class. Only the site itself sees it."""
        counts = torch.bincount(self.train.labels, minlength=len(self.options.data.classes)).tolist()
        return dict(zip(self.options.data.classes, counts, strict=True))

    def _reported_test_set(self) -> Examples:
        """The test examples that the site evaluates on. The rows of a class disclose roughly how many training examples
        it has. So a class below the floor is left out, except in a secure sum."""
        if self.options.secure_aggregation or self.options.min_count == 1:
            return self.test
        held = torch.bincount(self.train.labels, minlength=len(self.options.data.classes))
        return self.test.take((held >= self.options.min_count)[self.test.labels].nonzero().flatten().numpy())

    def answer(self, header: Header, parts: Parts) -> tuple[Header, dict[str, bytes]]:
        """The answer to a question. A failure is an answer too, in one line."""
        try:
            question = messages.read_question(header)
            with _within(question.deadline):
                answer, sent = self._answered(question, parts)
            return answer.to_header(), sent
        except NotAllowed as error:
            words = " ".join(str(error).split())
            print(f"{REFUSED}{words}", file=sys.stderr, flush=True)
            return Failure(site=self.index, error=words, refused=True).to_header(), {}
        except StateMissing as error:
            return Failure(site=self.index, error=str(error), no_state=True).to_header(), {}
        except Exception as error:  # a site that fails must say so, and remain available for the next question
            words = _for_the_server(error).replace(f"{self._folder.path}{os.sep}", "")
            return Failure(site=self.index, error=words).to_header(), {}

    def _answered(self, question: Question, parts: Parts) -> tuple[Answer, dict[str, bytes]]:
        if isinstance(question, JoinQuestion):
            if self.options.secure_aggregation and not question.secure_aggregation:
                raise NotAllowed(f"{_ONLY_SUMS}, and the server asks without them")
            return self._join(), {}
        if isinstance(question, PrepareQuestion):
            self._half(question)
            return PrepareAnswer(site=self.index), {}
        if isinstance(question, SumQuestion):
            return self._sum(question, parts)
        if self.options.secure_aggregation:
            raise NotAllowed(f"{_ONLY_SUMS}, and the server asks for its '{question.kind}' alone")
        answer, value = self._computed(question, parts)
        return answer, {answer.carries: tree.to_bytes(value)}

    def _computed(self, question: Question, parts: Parts) -> tuple[Answer, Tree]:
        match question:
            case ColumnsQuestion():
                self._experiment(question)
                return ColumnsAnswer(site=self.index), inputs.sums(self.options.data.columns(), self.train)
            case SurveyQuestion():
                return self._survey(question)
            case TrainQuestion():
                return self._train(question, _tree(parts, question.carries))
            case EvaluateQuestion():
                return self._evaluate(question, _tree(parts, question.carries))
        raise AssertionError(question)

    def _join(self) -> JoinAnswer:
        hidden = self.options.secure_aggregation
        return JoinAnswer(
            site=self.index,
            name=self.options.name,
            sites=self.options.sites,
            agreement=self.options.data.model_dump(mode="json"),
            examples=None if hidden else len(self.train),
            tests=None if hidden else len(self._evaluated),
            secure_aggregation=hidden,
            evaluates=self.options.evaluates,
            redgrape=redgrape.__version__,
            torch=str(torch.__version__),
            numpy=np.__version__,
            machine=platform.machine(),
            cpu=torch.backends.cpu.get_cpu_capability(),
        )

    def _survey(self, question: SurveyQuestion) -> tuple[Answer, Tree]:
        _, answer = next(self._half(question).survey([self.index]))
        return SurveyAnswer(site=self.index), answer

    def _train(self, question: TrainQuestion, broadcast: Tree) -> tuple[TrainAnswer, Tree]:
        half, run, round, start = self._half(question), question.run, question.round, question.state
        answer = half.run(self.index, broadcast, self._state(question), round)
        new = tree.ordered(answer.state)
        key = self._states.save(run, round, new, question.reach, start) if new else None
        return TrainAnswer(site=self.index, round=round, state_key=key), tree.ordered(answer.update)

    def _state(self, question: TrainQuestion) -> Tree | None:
        """The state that the question names; StateMissing if this site does not have it."""
        if question.state is None:
            return None
        return self._states.load(question.run, question.state, question.state_key)

    def _evaluate(self, question: EvaluateQuestion, model: Tree) -> tuple[Answer, Tree]:
        if not self.options.evaluates:
            raise ConfigError("models are evaluated at the server, and this site holds no test set")
        if not len(self._evaluated):
            raise ConfigError(
                f"this site has no test example of a class with {self.options.min_count} training examples or more, "
                "and evaluates on no other (min_count in its site.toml)"
            )
        starts = sums.batch_starts(self._evaluated)
        scores = self._half(question).score(tree.flatten(model), "test", starts)
        return EvaluateAnswer(site=self.index), evaluation.combine([scores]).shared()

    def _sum(self, question: SumQuestion, parts: Parts) -> tuple[SumAnswer, dict[str, bytes]]:
        """One stage of a secure sum. The numbers that this site adds leave it masked."""
        from redgrape.deploy.protocol.secure_sum import Member
        from redgrape.exchange import fixed_point

        stage, added = Stage(question.stage, question.arrived, question.lost), replace(question.added(), deadline=1.0)
        if stage.name == "keys":
            everyone = self.options.sites if self._is_whole(question) else None
            self._sums = question.sum, added, Member(self.index, everyone)
        if self._sums is None or self._sums[:2] != (question.sum, added):
            raise ConfigError("this site takes part in another secure sum, or was restarted since this one began")
        answer, numbers = SumAnswer(site=self.index), None
        if stage.name == "masked":
            state_key, summand = self._summand(question, parts)
            layout, numbers = fixed_point.encode(summand, self.options.sites)
            answer = SumAnswer(site=self.index, layout=layout, state_key=state_key)
        return answer, self._sums[2].answer(stage, parts, numbers)

    def _is_whole(self, question: SumQuestion) -> bool:
        """Whether no site may be missing in this sum. Columns, a survey and an evaluation are the same whenever they
        are asked. NotAllowed and StateMissing come here, before anybody computes."""
        added = question.added()
        if isinstance(added, ColumnsQuestion):
            self._experiment(added)
            return True
        prepared = self._prepare(question)
        if not isinstance(added, TrainQuestion):
            return True
        self._state(added)
        return prepared.sums_are_whole

    def _summand(self, question: SumQuestion, parts: Parts) -> tuple[int | None, Tree]:
        """What this site adds, and the key of its client's new state."""
        added = question.added()
        answer, value = self._computed(added, parts)
        if not isinstance(answer, TrainAnswer):
            return None, value
        broadcast = _tree(parts, added.carries)
        summand = self._half(question).summand(self.index, broadcast, value, question.round)
        return answer.state_key, summand

    def _half(self, question: OfRun) -> ClientHalf:
        """The client half of the method of the server's experiment."""
        return self._prepare(question).half

    def _prepare(self, question: OfRun) -> _Prepared:
        task = question.experiment, question.files, question.columns
        if self._prepared is None or self._prepared.task != task:
            experiment = self._experiment(question)
            half = self._client_half(experiment, self._columns(question))
            self._prepared = _Prepared(task, half, admission.sums_must_be_whole(experiment, self.options))
        return self._prepared

    def _experiment(self, question: OfRun) -> Experiment:
        """The server's experiment, with this site's own files. NotAllowed if its policy does not allow it."""
        try:
            values = tomllib.loads(question.experiment)
        except (ValueError, RecursionError) as error:
            raise NotUnderstood(f"its experiment is not valid TOML: {error}") from error
        experiment = Experiment.parse(own_parts.here(values, question.files or {}, self._folder))
        if reason := admission.why_refused(experiment, self.options):
            raise NotAllowed(f"this site's policy (site.toml) does not allow the experiment: {reason}")
        return experiment

    def _columns(self, question: OfRun) -> Columns | None:
        """How rows of a table become inputs. Only the scaling is the server's; the rest was agreed on."""
        if self.options.data.label is None:
            return None
        try:
            columns = Columns.model_validate(question.columns)
        except ValidationError as error:
            raise NotUnderstood("the columns of the table did not come with the question") from error
        names = [(column.name, column.can_be_missing, column.categories) for column in columns.columns]
        if names != [(column.name, True, column.categories) for column in self.options.data.columns().columns]:
            raise NotUnderstood("the columns of the table are not those agreed on")
        return columns

    def _client_half(self, experiment: Experiment, columns: Columns | None) -> ClientHalf:
        options, shape = self.options, self.options.data.shape
        change = inputs.change(experiment.net, shape, columns, self._folder.cache)
        train = change(replace(self.train, augment=augmentation(experiment.data, 1 + len(shape))))
        federation = PartialFederation(
            options.data,
            options.sites,
            own=(self.index, train),
            test=change(self._evaluated) if options.evaluates else None,
            shape=experiment.net.inputs(shape),
        )
        build, exchange = experiment.builder(federation), experiment.exchange
        method = experiment.method.create()
        return ClientHalf(method, federation, build, experiment.seed, experiment.rounds, _CPU, exchange=exchange)


def _for_the_server(error: Exception) -> str:
    """What leaves the site about a failure. If the server's question is wrong, it gets the whole message. Of
    other failures it gets only the kind: their messages may name paths or the content of files. The log has them."""
    words = " ".join(str(error).split())
    if isinstance(error, ConfigError | NotUnderstood) or (isinstance(error, RedgrapeError) and os.sep not in words):
        return words
    print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
    return f"{type(error).__name__} at this site; its log has the details"


def _tree(parts: Parts, name: str) -> Tree:
    if name not in parts:
        raise NotUnderstood(f"'{name}' did not come with the question")
    try:
        return tree.from_bytes(parts[name])
    except (safetensors.SafetensorError, ValueError) as error:
        raise NotUnderstood(f"'{name}' cannot be read: {error}") from error


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Give up after this many seconds: the server has gone on without this answer, and the next question waits. This
    works only in the main thread, and only if the system has signals."""

    def late(*_: object) -> None:
        raise RedgrapeError(f"it was not finished within {seconds:g} seconds")

    try:
        before = signal.signal(signal.SIGALRM, late)
    except (ValueError, AttributeError):
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
