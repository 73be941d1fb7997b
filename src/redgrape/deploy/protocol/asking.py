"""How the server asks sites: singly, or in secure sums. All questions of a run go through here."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import safetensors

from redgrape import tree
from redgrape.deploy.protocol.members import NODES, Members
from redgrape.deploy.protocol.messages import (
    A,
    Letter,
    PrepareAnswer,
    PrepareQuestion,
    Question,
    Reply,
    Stage,
    SumAnswer,
    SumQuestion,
)
from redgrape.deploy.protocol.transport import NoAnswer, Transport
from redgrape.deploy.protocol.wire import Parts
from redgrape.deploy.setup.folder import FEWEST_IN_SUM, DeployOptions
from redgrape.engines import Lost, StateLost
from redgrape.errors import TooFewClients
from redgrape.exchange.checks import UpdateRejected, named_tensors
from redgrape.method import ClientId
from redgrape.runs.experiment import Experiment
from redgrape.tree import Tree

if TYPE_CHECKING:
    from redgrape.deploy.protocol.secure_sum import Summed


class Refused(Lost):
    """A site whose policy does not allow the question."""


class StatesLost(Exception):
    """Sites do not have the states that a secure sum would start from. Nobody has computed anything yet."""

    def __init__(self, lost: Mapping[ClientId, StateLost]) -> None:
        super().__init__()
        self.lost = lost


class Sites:
    """`fewest`: the answers that a round needs. `at_once`: the sites that must be there to begin one."""

    def __init__(
        self,
        transport: Transport,
        members: Members,
        options: DeployOptions,
        experiment: Experiment,
        say: Callable[[str], None],
    ) -> None:
        self._transport, self._members, self._options, self._say = transport, members, options, say
        self.fewest = max(experiment.min_answers, experiment.exchange.fewest_answers())
        self.at_once = max(self.fewest, FEWEST_IN_SUM if options.secure_aggregation else 1)

    def prepare(self, question: PrepareQuestion) -> None:
        """Let all sites prepare a run, and report those that cannot. They would refuse each question of the run."""
        letters: dict[ClientId, Letter] = {k: (question, {}) for k in range(len(self._options.sites))}
        for _, reply in self.ask(letters, PrepareAnswer, self.at_once):
            if isinstance(reply, Lost):
                self._say(reply.reason)

    def summed_or_all(self, question: Question, answer: type[A]) -> Iterator[tuple[ClientId | None, Tree]]:
        """The answers of all sites in their order, or only their sum, with None as the site. None may be missing: a sum
        over fewer would describe another federation."""
        letters: dict[ClientId, Letter] = {k: (question, {}) for k in range(len(self._options.sites))}
        if self._options.secure_aggregation:
            yield None, self.sum_or_stop(letters, len(letters)).total
            return
        replies = dict(self.ask(letters, answer, len(letters)))
        for k in letters:
            reply = replies[k]
            if isinstance(reply, Lost):
                raise TooFewClients(f"the {question.kind} before the first round needs all sites: {reply.reason}")
            try:
                yield k, checked(reply)
            except UpdateRejected as reason:
                raise TooFewClients(
                    f"the answer of site '{self._members.name(k)}' to the {question.kind} was rejected: {reason}"
                ) from reason

    def sum_or_stop(self, letters: Mapping[ClientId, Letter], fewest: int) -> Summed:
        from redgrape.deploy.protocol.secure_sum import SumFailed

        try:
            return self.sum(letters, fewest)
        except SumFailed as failure:
            kind = next(iter(letters.values()))[0].kind
            raise TooFewClients(f"the sites' answers to '{kind}' gave no sum: {failure}") from failure

    def sum(self, letters: Mapping[ClientId, Letter], fewest: int, *, waits: bool = True) -> Summed:
        """The secure sum of the sites' answers to these questions. If too few sites are there to begin, it `waits` for
        them, as a run without secure sums would."""
        from redgrape.deploy.protocol.secure_sum import NotBegun, secure_sum

        ends = time.monotonic() + (self._options.deadlines.join if waits else 0)
        least = max(self.at_once, fewest) if waits else 0

        def ask(stage: Stage, parts: Mapping[ClientId, Parts]) -> Iterator[tuple[ClientId, Reply[SumAnswer] | Lost]]:
            asked: dict[ClientId, Letter] = {}
            for k, own in parts.items():
                question, more = letters[k]
                computes = stage.name == "masked"
                seconds = question.deadline if computes else self._options.deadlines.evaluate
                asked[k] = SumQuestion.about(question, name, stage, seconds), {**own, **(more if computes else {})}
            states_lost: dict[ClientId, StateLost] = {}
            for k, reply in self.ask(asked, SumAnswer, least if stage.name == "keys" else 1):
                if isinstance(reply, Refused):
                    refused.add(k)
                if isinstance(reply, StateLost):
                    states_lost[k] = reply
                yield k, reply
            # A sum of the others, and then one of all from new states, would differ by what a single site adds.
            if states_lost and stage.name == "keys":
                raise StatesLost(states_lost)

        while True:
            name, refused = secrets.token_hex(8), set[ClientId]()
            try:
                return secure_sum({k: f"site '{self._members.name(k)}'" for k in letters}, ask, fewest)
            except NotBegun:
                if time.monotonic() >= ends or len(letters) - len(refused) < max(FEWEST_IN_SUM, fewest):
                    raise
                time.sleep(NODES)

    def ask(
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


def checked(reply: Reply[A]) -> Tree:
    """Named tensors from a site, else UpdateRejected. Their values are checked elsewhere."""
    sent = tree_of(reply)
    named_tensors(sent)
    return sent


def tree_of(reply: Reply[A]) -> Tree:
    name = reply.answer.carries
    try:
        return tree.from_bytes(reply.parts[name])
    except (KeyError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise UpdateRejected(f"'{name}' cannot be read: {error}") from error
