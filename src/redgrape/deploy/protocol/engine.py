"""The server's engine: clients are sites, which are asked through Flower's grid.

A site is known by its key, and counts by its number. What it says of itself when it joins must agree with that, before
anything of the model is sent to it. Every question has a deadline; an answer that comes after it is never looked at.
A client's state lies at its site: what the server keeps of it is the round that it is of.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import safetensors
import torch

import redgrape
from redgrape import tree
from redgrape.data.federation import Declared
from redgrape.deploy.protocol import wire
from redgrape.deploy.protocol.deadlines import within
from redgrape.deploy.protocol.known_federation import PartialFederation
from redgrape.deploy.protocol.wire import PROTOCOL, Header, Parts, Reply
from redgrape.deploy.setup.folder import FEWEST_IN_SUM, DeployOptions
from redgrape.engines import Answer, ClientHalf, Lost, Split, SumOfAnswers
from redgrape.errors import TooFewClients
from redgrape.exchange.checks import MOST_EXAMPLES, UpdateRejected, named_tensors
from redgrape.learning import evaluation
from redgrape.learning.evaluation import Scores
from redgrape.method import ClientId
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import KEPT
from redgrape.tree import Tensors, Tree

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

    from redgrape.deploy.protocol.secure_sum import Letters, Summed

T = TypeVar("T")

POLL = 0.1  # seconds between two looks for answers
NODES = 1.0  # seconds between two looks for sites
JOIN = 30.0  # seconds for a node to say who it is
LINK = 120.0  # seconds for the SuperLink to take a call, which Flower would repeat for ever
_NUMBERS = ("examples", "tests")  # that a site declares: to train on, and to evaluate on
_VERSIONS = ("redgrape", "torch", "numpy", "machine", "cpu")
_KINDS = {"train": "train", "evaluate": "evaluate"}  # Flower's types of messages; all others are queries


@dataclass
class _Member:
    """A node that has joined as a site, and since when it is connected."""

    site: ClientId
    since: str


class FlowerEngine:
    """`keys`: the public key of each site, None where nodes are not authenticated. `declared`: what sites said
    when they first joined the run, by name, where it goes on; `record` is told what each says that joins."""

    def __init__(
        self,
        half: ClientHalf,
        grid: Grid,
        options: DeployOptions,
        experiment: Experiment,
        run: str,
        keys: Sequence[bytes] | None,
        say: Callable[[str], None],
        declared: Mapping[str, Mapping[str, Any]],
        record: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        assert isinstance(half.federation, PartialFederation)
        self._half, self._federation = half, half.federation
        self._grid, self._options, self._keys, self._say = grid, options, keys, say
        self._run, self._experiment = run, experiment.to_toml()
        self._fewest = max(experiment.min_answers, half.exchange.fewest_answers())
        self._at_once = max(self._fewest, FEWEST_IN_SUM if options.secure_aggregation else 1)  # to begin a round
        self._waited = False  # for all sites, as at the beginning of a run
        self._reach = KEPT * experiment.checkpoint_every + 1  # rounds that a resume may go back
        self._declared: dict[str, dict[str, Any]] = {
            name: {key: said[key] for key in _NUMBERS} for name, said in declared.items() if "examples" in said
        }
        self._record = record
        self._told = True  # who has declared what
        self._members: dict[int, _Member] = {}  # by node id
        self._refused: dict[int, str] = {}  # the same, with since when
        self._failed: dict[int, str] = {}  # the same, with what Flower last said of it

    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Iterator[tuple[ClientId | None, Answer | SumOfAnswers | Lost]]:
        parts = {"broadcast": tree.to_bytes(broadcast)}
        questions: dict[ClientId, tuple[Header, Parts]] = {}
        for k in clients:
            of = {"state": int(states[k]["round"])} if k in states else {}
            questions[k] = {"round": round, "reach": self._reach, **of}, parts
        if self._options.secure_aggregation:
            yield from self._sum_of_clients(questions, round)
            return
        for k, reply in self._ask("train", questions, self._options.deadlines.round, self._at_once):
            yield k, reply if isinstance(reply, Lost) else _as_answer(reply, round)

    def _sum_of_clients(
        self, questions: Mapping[ClientId, tuple[Header, Parts]], round: int
    ) -> Iterator[tuple[ClientId | None, SumOfAnswers | Lost]]:
        """The sum of the clients' updates, and who is not in it."""
        from redgrape.deploy.protocol.secure_sum import SumFailed

        try:
            summed = self._sum("train", questions, self._options.deadlines.round, self._fewest)
        except SumFailed as failure:
            for k in questions:
                blame = failure.lost.get(k)
                yield k, Lost(f"there is no sum: {failure}{f' ({blame})' if blame else ''}")
            return
        for k, why in summed.lost.items():
            yield k, Lost(why)
        states = {k: _state(header, round) for k, header in summed.answered.items()}
        yield None, SumOfAnswers(summed.total, states, round)

    def _sum(self, of: str, questions: Mapping[ClientId, tuple[Header, Parts]], seconds: float, fewest: int) -> Summed:
        """The secure sum of what sites answer to these questions. As long as too few are there to begin, they are
        waited for, as a run without secure sums would wait for them."""
        from redgrape.deploy.protocol.secure_sum import NotBegun, secure_sum

        ends = time.monotonic() + self._options.deadlines.join

        def ask(stage: str, letters: Letters) -> Iterator[tuple[ClientId, Reply | Lost]]:
            asked = {}
            for k, (header, parts) in letters.items():
                question, with_it = questions[k]
                more = with_it if stage == "masked" else {}
                asked[k] = {**question, **header, "of": of, "sum": name, "stage": stage}, {**parts, **more}
            within = seconds if stage == "masked" else self._options.deadlines.evaluate
            return self._ask("sum", asked, within, self._at_once if stage == "keys" else 1)

        while True:
            name = secrets.token_hex(8)
            try:
                return secure_sum(list(questions), ask, fewest)
            except NotBegun:
                if time.monotonic() >= ends:
                    raise
                time.sleep(NODES)

    def survey(self, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId | None, Tree]]:
        """All of them must answer: a sum over fewer would be of another federation."""
        questions: dict[ClientId, Any] = {k: ({"round": 0}, {}) for k in clients}
        if self._options.secure_aggregation:
            yield None, self._sum_or_stop("survey", questions, len(clients)).total
            return
        replies = dict(self._ask("survey", questions, self._options.deadlines.evaluate, len(clients)))
        for k in sorted(clients):
            reply = replies[k]
            if isinstance(reply, Lost):
                raise TooFewClients(f"the survey before the first round needs all sites: {reply.reason}")
            try:
                yield k, _checked(reply, "survey")
            except UpdateRejected as reason:
                raise TooFewClients(
                    f"what site '{self._name(k)}' answers to the survey is not taken: {reason}"
                ) from reason

    def evaluate(self, model: Tensors, split: Split) -> Scores:
        if not self._federation.evaluated_elsewhere:
            starts = evaluation.batch_starts(self._half.examples(split))
            return evaluation.combine(self._half.score(model, split, starts))
        parts = {"model": tree.to_bytes(model)}
        questions = {k: ({"round": 0}, parts) for k in range(self._federation.num_clients)}
        if self._options.secure_aggregation:
            summed = self._sum_or_stop("evaluate", questions, 1)
            for k, why in summed.lost.items():
                self._say(f"site '{self._name(k)}' did not evaluate: {why}")
            try:
                return evaluation.combine([self._scores(summed.total)])
            except UpdateRejected as error:
                raise TooFewClients(f"the sum of the sites' evaluations is not taken: {error}") from error
        scores: dict[ClientId, tuple[torch.Tensor, float]] = {}
        for k, reply in self._ask("evaluate", questions, self._options.deadlines.evaluate, 1):
            if isinstance(reply, Lost):
                self._say(f"site '{self._name(k)}' did not evaluate: {reply.reason}")
                continue
            try:
                scores[k] = self._scores(_checked(reply, "scores"), self._declared[self._name(k)]["tests"])
            except UpdateRejected as error:
                self._say(f"the evaluation of site '{self._name(k)}' is not taken: {error}")
        if not scores:
            raise TooFewClients("no site has evaluated the model; metrics cannot be made")
        return evaluation.combine([score for _, score in sorted(scores.items())])

    def _sum_or_stop(self, of: str, questions: Mapping[ClientId, tuple[Header, Parts]], fewest: int) -> Summed:
        from redgrape.deploy.protocol.secure_sum import SumFailed

        try:
            return self._sum(of, questions, self._options.deadlines.evaluate, fewest)
        except SumFailed as failure:
            why = "".join(f"; site '{self._name(k)}': {reason}" for k, reason in failure.lost.items())
            raise TooFewClients(f"the sites' answers to '{of}' gave no sum: {failure}{why}") from failure

    def _scores(self, sent: Tree, tests: int | None = None) -> tuple[torch.Tensor, float]:
        """`tests`: on how many examples this site evaluates, where that is known."""
        C = self._federation.num_classes
        confusion, loss = sent.get("confusion"), sent.get("loss")
        if not (isinstance(confusion, torch.Tensor) and confusion.shape == (C, C) and confusion.dtype == torch.int64):
            raise UpdateRejected(f"'confusion' must be {C} by {C} whole numbers")
        if (confusion < 0).any() or not confusion.sum() or (confusion > 10**9).any():
            raise UpdateRejected("'confusion' must count examples")
        if tests is not None and int(confusion.sum()) != tests:
            raise UpdateRejected(f"'confusion' counts {int(confusion.sum())} examples, and the site declared {tests}")
        if not (isinstance(loss, torch.Tensor) and loss.shape == () and torch.isfinite(loss) and loss >= 0):
            raise UpdateRejected("'loss' must be one finite number that is not negative")
        return confusion, float(loss)

    def _ask(
        self, kind: str, questions: Mapping[ClientId, tuple[Header, Parts]], seconds: float, fewest: int
    ) -> Iterator[tuple[ClientId, Reply | Lost]]:
        """Ask sites, and give their replies as they come; for each that gives none why."""
        nodes = self._connected(questions, fewest)
        for k in questions:
            if k not in nodes:
                yield k, Lost(f"site '{self._name(k)}' is not connected")
        common = {"kind": kind, "run": self._run, "experiment": self._experiment, "deadline": seconds}
        letters = {
            nodes[k]: wire.pack({**common, **header, "protocol": PROTOCOL}, parts)
            for k, (header, parts) in questions.items()
            if k in nodes
        }
        site_of = {node: k for k, node in nodes.items()}
        group = str(next(iter(questions.values()))[0].get("round", 0)) if questions else ""
        for node, message in self._exchange(kind, letters, group, seconds):
            k = site_of[node]
            if message is None:
                yield k, Lost(f"site '{self._name(k)}' gave no answer within {seconds:g} seconds")
            else:
                yield k, self._read(k, message)

    def _read(self, k: ClientId, message: Message) -> Reply | Lost:
        if message.has_error():
            reason = " ".join(str(message.error.reason).split())[:300]
            return Lost(f"site '{self._name(k)}' failed: {reason} (code {message.error.code})")
        try:
            reply = Reply(*wire.unpack(message.content))
        except wire.NotUnderstood as error:
            return Lost(f"the answer of site '{self._name(k)}' cannot be read: {error}")
        if "error" in reply.header:
            return Lost(f"site '{self._name(k)}': {' '.join(str(reply.header['error']).split())[:500]}")
        return reply

    def _exchange(
        self, kind: str, letters: Mapping[int, Any], group: str, seconds: float
    ) -> Iterator[tuple[int, Message | None]]:
        """The answers of nodes as they come, and None for each that has given none when the time is over. Nobody asks
        for the others any more, so that a late answer reaches no later round."""
        from flwr.app import Message

        messages = [
            Message(content, node, _KINDS.get(kind, "query"), ttl=seconds, group_id=group)
            for node, content in letters.items()
        ]
        ids = self._call(self._grid.push_messages, messages, seconds=seconds) if messages else []
        waiting = {number: node for number, node in zip(ids, letters, strict=True) if number}
        for node in set(letters) - set(waiting.values()):
            yield node, None
        del messages
        ends = time.monotonic() + seconds
        while waiting and time.monotonic() < ends:
            left = ends - time.monotonic()
            for message in self._call(self._grid.pull_messages, list(waiting), seconds=left):
                number = message.metadata.reply_to_message_id
                if number in waiting:
                    yield waiting.pop(number), message
            if waiting:
                time.sleep(POLL)
        for node in waiting.values():
            yield node, None

    def _call(self, call: Callable[..., Iterable[T]], *words: Any, seconds: float = 0.0) -> list[T]:
        """What a call of the SuperLink gives, which may take so long and a little more."""
        limit = max(seconds, 0.0) + LINK
        return within(
            limit,
            lambda: list(call(*words)),
            f"the SuperLink has not answered for {limit:g} seconds; see server/superlink.log, start the server again, "
            "and give the same command: the run goes on from its checkpoint",
        )

    def _connected(self, sites: Iterable[ClientId], fewest: int) -> dict[ClientId, int]:
        """The nodes of these sites. At the beginning all are waited for, so that a run that goes on does so with the
        same ones; later a site that is away is not, as long as the fewest are there. The wait has its deadline."""
        wanted, ends, told = set(sites), time.monotonic() + self._options.deadlines.join, False
        while True:
            there = {k: node for k, node in self._join().items() if k in wanted}
            enough = len(there) >= (min(fewest, len(wanted)) if self._waited else len(wanted))
            if enough or time.monotonic() >= ends:
                self._waited = True
                if not self._told:
                    self._tell_shares()
                return there
            if not told:
                self._say(f"waiting for {', '.join(self._name(k) for k in sorted(wanted - there.keys()))}")
                told = True
            time.sleep(NODES)

    def _join(self) -> dict[ClientId, int]:
        """The sites that are connected. A node that is new, or was away, is asked who it is."""
        nodes = {node.node_id: node for node in self._call(self._grid.get_nodes)}
        self._members = {i: m for i, m in self._members.items() if i in nodes and m.since == nodes[i].last_activated_at}
        new = [i for i in nodes if i not in self._members and self._refused.get(i) != nodes[i].last_activated_at]
        question = {"kind": "join", "deadline": JOIN, "protocol": PROTOCOL}
        letters = {i: wire.pack(question, {}) for i in new}
        for i, message in self._exchange("join", letters, "0", JOIN):
            if message is None:
                continue
            if message.has_error():  # Flower's words, not the node's: it may only have been busy, and is asked again
                reason = " ".join(str(message.error.reason).split())[:300]
                if self._failed.get(i) != reason:
                    self._failed[i] = reason
                    self._say(f"a node did not say who it is, and is asked again: {reason}")
                continue
            try:
                site = self._welcome(nodes[i], message)
            except UpdateRejected as reason:
                self._refused[i] = nodes[i].last_activated_at
                self._say(f"a node is refused: {reason}")
            else:
                self._members[i] = _Member(site, nodes[i].last_activated_at)
        return {member.site: i for i, member in self._members.items()}

    def _welcome(self, node: Any, message: Message) -> ClientId:
        """The number of the site that this node is; UpdateRejected where it cannot be one."""
        try:
            said, _ = wire.unpack(message.content)
        except wire.NotUnderstood as error:
            raise UpdateRejected(str(error)) from error
        if "error" in said:
            raise UpdateRejected(" ".join(str(said["error"]).split())[:300])
        k = said.get("site")
        if not isinstance(k, int) or not 0 <= k < len(self._options.sites):
            raise UpdateRejected(f"it says that it is site {str(k)[:40]}, and there are {len(self._options.sites)}")
        name = self._name(k)
        if self._keys is not None and node.public_key != self._keys[k]:
            whose = self._keys.index(node.public_key) if node.public_key in self._keys else None
            owner = "nobody here" if whose is None else f"'{self._name(whose)}'"
            raise UpdateRejected(f"it says that it is site '{name}', and its key is that of {owner}")
        if any(member.site == k for member in self._members.values()):
            raise UpdateRejected(f"site '{name}' is connected already")
        agreed = self._options.data.model_dump(mode="json")
        if said.get("agreement") != agreed or said.get("sites") != len(self._options.sites):
            raise UpdateRejected(f"site '{name}' has another agreement on classes, shape or sites than the server")
        if bool(said.get("evaluates")) != self._federation.evaluated_elsewhere:
            raise UpdateRejected(f"site '{name}' and the server do not agree on where models are evaluated")
        if bool(said.get("secure_aggregation")) != self._options.secure_aggregation:
            raise UpdateRejected(f"site '{name}' and the server do not agree on secure_aggregation")
        versions = {key: str(said.get(key))[:40] for key in _VERSIONS}
        if versions["redgrape"] != redgrape.__version__:
            raise UpdateRejected(
                f"site '{name}' has redgrape {versions['redgrape']}, and the server {redgrape.__version__}; install "
                "the same"
            )
        facts = self._declare(k, said) | versions
        self._record(name, facts)
        self._say(f"site '{name}' has joined ({json.dumps(facts)})")
        for package, here in (("torch", torch.__version__), ("numpy", np.__version__)):
            if versions[package] != here:
                self._say(f"site '{name}' has {package} {versions[package]}, and the server {here}: bits may differ")
        return k

    def _declare(self, k: ClientId, said: Header) -> dict[str, Any]:
        """Hold a site to how many examples it has said that it has, when it first joined the run: to train on, by
        which it is weighed in averages, and to evaluate on. With secure sums it tells no number."""
        name = self._name(k)
        if self._options.secure_aggregation:
            self._federation.joined[k] = Declared(MOST_EXAMPLES, name=f"site '{name}'")
            return {}
        numbers = {key: said.get(key) for key in _NUMBERS}
        for key, number in numbers.items():
            if type(number) is not int or not (key == "examples") <= number <= MOST_EXAMPLES:
                raise UpdateRejected(f"site '{name}' says that it has {str(number)[:40]} {key}, which cannot be")
        first = self._declared.setdefault(name, numbers)
        if numbers["examples"] > first["examples"] or numbers["tests"] != first["tests"]:
            raise UpdateRejected(
                f"site '{name}' joined this run with {first['examples']} examples and {first['tests']} to test on, and "
                f"says {numbers['examples']} and {numbers['tests']} now; put its data back, or start a new run"
            )
        if k not in self._federation.joined:
            self._federation.joined[k] = Declared(first["examples"], name=f"site '{name}'")
            self._told = False
        return dict(first)

    def _tell_shares(self) -> None:
        """What each site has declared, and who could carry the average alone."""
        self._told = True
        for key, what in (("examples", "in averages"), ("tests", "in evaluations")):
            numbers = {self._name(k): self._declared[self._name(k)][key] for k in sorted(self._federation.joined)}
            if not (total := sum(numbers.values())):
                continue
            words = ", ".join(f"{name} {n} ({n / total:.0%})" for name, n in numbers.items())
            self._say(f"{key} that sites have declared: {words}")
            name, most = max(numbers.items(), key=lambda item: item[1])
            if 2 * most > total and len(numbers) > 1:
                self._say(f"site '{name}' has declared more {key} than all others together, and decides {what}")

    def _name(self, k: ClientId) -> str:
        return self._options.sites[k]

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_answer(reply: Reply, asked: int) -> Answer | Lost:
    """What `training.rounds` judges: of the state only the round that it is of."""
    round = reply.header.get("round")
    try:
        update = tree.from_bytes(reply.parts["update"])
    except (KeyError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        return Lost(f"its update cannot be read: {error}")
    return Answer(update, _state(reply.header, asked), round if isinstance(round, int) else -1)


def _state(header: Header, round: int) -> Tree:
    return {"round": torch.tensor(round)} if header.get("has_state") is True else {}


def _checked(reply: Reply, name: str) -> Tree:
    """Named tensors from a site, else UpdateRejected. What is in them is for others to judge."""
    try:
        sent = tree.from_bytes(reply.parts[name])
    except (KeyError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise UpdateRejected(f"'{name}' cannot be read: {error}") from error
    named_tensors(sent)
    return sent
