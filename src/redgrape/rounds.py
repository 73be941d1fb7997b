"""Federated learning itself: the function `rounds`. Its caller evaluates, logs, checkpoints and stops."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redgrape import determinism, tree
from redgrape.data.examples import Examples
from redgrape.data.federation import Declared
from redgrape.determinism import same_bits_everywhere
from redgrape.engines import Answer, Engine, Lost, StateLost, SumOfAnswers
from redgrape.engines.waiting_answers import Shelf
from redgrape.errors import Diverged, TooFewClients
from redgrape.exchange import Exchange, Parts, Received, plausible
from redgrape.exchange.checks import (
    UNDECLARED,
    Inspection,
    NotFinite,
    UpdateRejected,
    check_survey,
    first_not_finite,
)
from redgrape.exchange.plausible import Measures
from redgrape.method import ClientId, ClientSite, Method, ServerSite, Site
from redgrape.tree import Tensors, Tree

PLAIN = Exchange()


class ClientStates(Mapping[ClientId, Tree]):
    """Client states. Each is loaded when it is looked up, so it may lie on disk."""

    @abstractmethod
    def updated(self, new: Mapping[ClientId, Tree]) -> ClientStates:
        """These states, with the new ones replacing the old."""

    @abstractmethod
    def emptied(self) -> ClientStates:
        """The same store without a state."""


class InMemory(ClientStates):
    """Client states in memory."""

    def __init__(self, states: Mapping[ClientId, Tree] | None = None) -> None:
        self._states = states or {}

    def updated(self, new: Mapping[ClientId, Tree]) -> InMemory:
        return InMemory({**self._states, **{k: tree.owned(state) for k, state in new.items()}})

    def emptied(self) -> InMemory:
        return InMemory()

    def __getitem__(self, client: ClientId) -> Tree:
        return self._states[client]

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


@dataclass(frozen=True)
class RunState:
    """The complete state of a run after a round. Together with the run's description it determines the next round."""

    round: int
    server: Tree
    clients: ClientStates = field(default_factory=InMemory)
    record: Mapping[str, Any] = field(default_factory=dict)  # what happened in this round; nothing depends on it


def rounds(
    method: Method,
    engine: Engine,
    site: ServerSite,
    *,
    eligible: Sequence[ClientId],
    clients_per_round: int,
    exchange: Exchange = PLAIN,
    model: Tensors | None = None,
    start: RunState | None = None,
    states: ClientStates | None = None,
    spill: Path | None = None,
    declared: Callable[[ClientId], Declared] = lambda _: UNDECLARED,
    min_answers: int = 1,
) -> Iterator[RunState]:
    """Yield the states after rounds 1, 2, ... `site.rounds`, from `model` (else from `site.build`) or after `start`.

    `states`: an empty store for the clients' states (None: in memory). `spill`: a folder for waiting answers that are
    too many for memory; a round's updates are gone when the next round begins. `declared`: what a client declared when
    it joined (None: unknown); its updates are checked against it. `min_answers`: the run stops at a round with fewer
    accepted answers.
    """
    state = start if start is not None else first_state(method, engine, site, eligible, model, states, declared)
    with closing(Shelf(spill)) as shelf:
        for t in range(state.round + 1, site.rounds + 1):
            sampled = sample_clients(eligible, clients_per_round, site.seed, t)
            here = replace(site, round=t)
            with same_bits_everywhere():
                broadcast = tree.ordered(_checked(method.broadcast(state.server), "the broadcast"))
                before, clients, asked, states_lost = state.server, state.clients, sampled, dict[ClientId, StateLost]()
                while True:
                    shelf.clear()
                    answers = _Answers(method, exchange, broadcast["model"], sampled, here, shelf, declared)
                    for k, answer in engine.run_clients(broadcast, asked, clients, t):
                        answers.take(k, answer)
                    if not answers.states_lost:
                        break
                    states_lost |= answers.states_lost
                    if method.sums_of_states:  # all start anew: what they send now replaces these sums
                        zero = {name: tree.sub(before[name], before[name]) for name in method.sums_of_states}
                        before, clients = {**before, **zero}, clients.emptied()
                    else:
                        asked = [k for k in asked if k not in states_lost]
                for k in set(sampled) - set(asked):
                    answers.take(k, states_lost[k])
                received = answers.received(max(min_answers, exchange.fewest_answers()))
                server = tree.owned(_checked(method.server_update(before, received, here), "the server's state"))
                if name := first_not_finite(tree.flatten(server)):
                    raise Diverged(f"DIVERGED in round {t}: server tensor '{name}' is not finite; {_ADVICE}")
                record = {
                    "round": t,
                    "clients": list(sampled),
                    **answers.record(received),
                    **(
                        {"states_lost": {str(k): lost.reason for k, lost in states_lost.items()}} if states_lost else {}
                    ),
                    **received.record(),
                    "bytes_down": len(sampled) * tree.num_bytes(broadcast),
                    "bytes_up": received.num_bytes(),
                    **_logged(method.log(server, received)),
                }
                new = {k: s for k, s in answers.states.items() if k in received.clients}
                state = RunState(t, server, clients.updated(new) if new else clients, record)
            yield state


def _checked(given: Tree, what: str) -> Tree:
    tree.check_leaves(given, what)
    return given


def _logged(log: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a method's log adds to the record of a round."""
    tree.check_leaves(log, "the log")
    if taken := sorted(set(RECORD) & set(log)):
        raise ValueError(f"the log has '{taken[0]}', which each record of a round has already; choose another name")
    return {name: value.tolist() for name, value in log.items()}


# The keys of a round's record, the same for every method. A method may add more with `log`.
RECORD = (
    *("round", "clients", "answered", "rejected", "lost", "left_out", "states_lost", "train_loss", "capped_loss"),
    *("class_contributors", "class_released", "bytes_down", "bytes_up", "epsilon", "test", "validation"),
)

_ADVICE = "lower the learning rate, clip the gradient, or scale the inputs"


class _Answers:
    """A round's answers as they arrive: which are accepted, which are rejected, and why. The order of arrival does not
    affect which are accepted."""

    def __init__(
        self,
        method: Method,
        exchange: Exchange,
        model: Tensors,
        asked: Sequence[ClientId],
        site: ServerSite,
        shelf: Shelf,
        declared: Callable[[ClientId], Declared],
    ) -> None:
        self._method, self._exchange, self._model = method, exchange, model
        self._parts = method.parts(model, site)
        self._inspection = Inspection(self._parts, model, site.num_classes)
        self._asked, self._site, self._shelf, self._declared = frozenset(asked), site, shelf, declared
        self._updates: dict[ClientId, Tree] = {}
        self._measures: dict[ClientId, Measures] = {}
        self._sum: SumOfAnswers | None = None
        self._refused: dict[ClientId, UpdateRejected] = {}
        self._unasked: dict[ClientId, UpdateRejected] = {}  # clients that were not asked, and answers for another round
        self._lost: dict[ClientId, str] = {}
        self.states_lost: dict[ClientId, StateLost] = {}
        self.states: dict[ClientId, Tree] = {}  # a state is kept if the client's update is accepted

    def take(self, client: ClientId | None, answer: Answer | SumOfAnswers | Lost) -> None:
        if isinstance(answer, SumOfAnswers):
            self._sum, self.states = answer, {k: s for k, s in answer.states.items() if s}
            return
        assert client is not None, "only a sum has no client"
        if isinstance(answer, Lost):
            self._lost[client] = answer.reason
            if isinstance(answer, StateLost):
                self.states_lost[client] = answer
        elif client not in self._asked:
            self._unasked[client] = UpdateRejected("this client was not asked")
        elif answer.round != self._site.round:
            self._unasked[client] = UpdateRejected(f"the answer is for round {answer.round}")
        elif client in self._updates or client in self._refused:
            self._refuse(client, UpdateRejected("the client answered twice"))
        else:
            try:
                self._measures[client] = self._checked(client, answer.update)
            except UpdateRejected as reason:
                self._refuse(client, reason)
            else:
                self._updates[client] = self._shelf.put(answer.update)
                if answer.state:  # most methods have no client state; nothing is kept then
                    self.states[client] = self._shelf.put(answer.state)

    def _checked(self, client: ClientId, update: Tree) -> Measures:
        lengths = self._inspection.lengths(update, self._declared(client))
        steps = self._method.steps(int(update["count"])) if "count" in update else None
        return plausible.measured(update, self._parts, lengths, steps)

    def _refuse(self, client: ClientId, reason: UpdateRejected) -> None:
        self._updates.pop(client, None)
        self._refused[client] = reason

    def received(self, fewest: int) -> Received:
        """The input of the server half, once all answers are in. TooFewClients or Diverged if too few are accepted."""
        if self._sum is not None:
            return self._received_sum(self._sum, fewest)
        if not self._exchange.is_noisy:  # epsilon assumes that no client decides whether others count
            measures = {k: self._measures[k] for k in sorted(self._updates)}
            for client, reason in plausible.outliers(measures, self._parts, self._model).items():
                self._refuse(client, reason)
        self._require(len(self._updates), fewest)
        return self._exchange.receive(dict(sorted(self._updates.items())), self._parts, self._site)

    def _received_sum(self, answer: SumOfAnswers, fewest: int) -> Received:
        clients = sorted(answer.states)
        self._require(len(clients), fewest)
        try:
            return self._exchange.receive_sum(answer.total, clients, self._parts, self._model, self._site)
        except UpdateRejected as reason:
            words = (
                f"the sum over the clients of round {answer.round} was rejected: {reason}; nothing of it was applied"
            )
            if isinstance(reason, NotFinite):
                raise Diverged(f"DIVERGED: {words}; {_ADVICE}") from reason
            raise TooFewClients(words) from reason

    def record(self, received: Received) -> dict[str, Any]:
        answered = sorted(self._updates) if self._sum is None else sorted(self._sum.states)
        left_out = [k for k in answered if k not in received.clients]
        return {
            "answered": answered,
            "rejected": {str(k): str(reason) for k, reason in self._rejected().items()},
            "lost": {str(k): reason for k, reason in sorted(self._lost.items())},
            **({"left_out": left_out} if left_out else {}),
        }

    def _rejected(self) -> dict[ClientId, UpdateRejected]:
        late = {k: reason for k, reason in self._unasked.items() if k not in self._updates}
        return dict(sorted((late | self._refused).items()))

    def _require(self, number: int, fewest: int) -> None:
        """Raise if fewer than `fewest` answers count: Diverged if the others are not finite, else TooFewClients."""
        if number >= fewest:
            return
        rejected, round = self._rejected(), self._site.round
        for k, reason in rejected.items():
            if isinstance(reason, NotFinite):
                raise Diverged(f"DIVERGED in round {round}: client {k}: {reason}; {_ADVICE}")
        if not rejected and not self._lost and not number:
            raise TooFewClients(f"no client answered in round {round}")
        why = {**self._lost, **rejected}
        first = f"; client {min(why)}: {why[min(why)]}" if why else ""
        raise TooFewClients(
            f"{number} of {len(self._asked)} clients gave an accepted answer in round {round}, and {fewest} are "
            f"needed{first}"
        )


def first_state(
    method: Method,
    engine: Engine,
    site: ServerSite,
    clients: Sequence[ClientId],
    model: Tensors | None = None,
    states: ClientStates | None = None,
    declared: Callable[[ClientId], Declared] = lambda _: UNDECLARED,
) -> RunState:
    """The state before the first round. For it, the clients are surveyed."""
    if model is None:
        model = site.build().state_dict()
    model = {name: t.detach().cpu().clone().contiguous() for name, t in model.items()}
    like = survey_like(method, site)
    survey = _survey(like, engine, clients, declared) if like else {}
    with same_bits_everywhere():
        server = method.init_server(model, replace(site, round=0, survey=survey))
        return RunState(0, tree.ordered(server), states if states is not None else InMemory())


def exchanged(method: Method, site: Site) -> tuple[Parts, Tree]:
    """What clients send with this method and the site's net: the parts of an update, and a template of an answer to the
    survey."""
    with determinism.global_stream(None):
        model = site.build().state_dict()
    return method.parts(model, site), survey_like(method, site)


def survey_like(method: Method, site: Site) -> Tree:
    """A template of an answer to the method's survey: that of a client without examples. Empty: nothing is asked."""
    nothing = Examples(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
    place = (site.build, site.num_clients, site.num_classes, site.seed, 0, site.rounds, site.device)
    return method.survey(ClientSite(*place, 0, nothing))


def _survey(like: Tree, engine: Engine, clients: Sequence[ClientId], declared: Callable[[ClientId], Declared]) -> Tree:
    """The sum of the clients' answers to a method's survey. TooFewClients if an answer or the sum is invalid."""
    total: Tensors | None = None
    for k, answer in engine.survey(clients):
        try:
            if k is not None:
                check_survey(answer, like, declared(k).examples)
        except UpdateRejected as reason:
            name = (declared(k).name if k is not None else "") or f"client {k}"
            raise TooFewClients(
                f"the answer of {name} to the survey before the first round was rejected: {reason}"
            ) from reason
        flat = tree.flatten(answer)
        total = flat if total is None else {name: t + total[name] for name, t in flat.items()}
    survey = tree.unflatten(total or {})
    try:
        check_survey(survey, like, sum(declared(k).examples for k in clients), of_sum=True)
    except UpdateRejected as reason:
        raise TooFewClients(f"the sum of the clients' answers to the survey was rejected: {reason}") from reason
    return survey


def sample_clients(eligible: Sequence[ClientId], count: int, seed: int, round: int) -> list[ClientId]:
    """The clients of a round. They depend on (seed, round) only, so every method meets the same sequence."""
    if count >= len(eligible):
        return sorted(eligible)
    chosen = determinism.numpy_stream(seed, "sample", round).choice(len(eligible), size=count, replace=False)
    return sorted(eligible[i] for i in chosen.tolist())
