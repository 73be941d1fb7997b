"""Federated learning itself: `rounds` is the whole of it. The caller evaluates, logs, checkpoints and stops."""

from __future__ import annotations

import os
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redgrape import engines, features, keys, plausible, tree
from redgrape.acceptance import MOST_EXAMPLES, Declared, NotFinite, UpdateRejected, check_length, first_not_finite
from redgrape.aggregation import Averaging
from redgrape.data.federation import Federation
from redgrape.engines import Answer, ClientHalf, Engine, Lost, ShareOfSum
from redgrape.errors import ConfigError, DataError, Diverged, RedgrapeError, TooFewClients
from redgrape.features import batchnorms
from redgrape.method import ClientId, Method, ServerSite
from redgrape.nets.net import Net
from redgrape.numerics import same_bits_everywhere
from redgrape.plausible import Measures
from redgrape.shelf import Shelf
from redgrape.tree import Tensors, Tree


class ClientStates(Mapping[ClientId, Tree]):
    """The states of the clients that have one. Each is made when it is looked up, so that it may lie on a disk."""

    @abstractmethod
    def updated(self, new: Mapping[ClientId, Tree]) -> ClientStates:
        """These states with the new ones in their place."""


class InMemory(ClientStates):
    """Client states in memory."""

    def __init__(self, states: Mapping[ClientId, Tree] | None = None) -> None:
        self._states = states or {}

    def updated(self, new: Mapping[ClientId, Tree]) -> InMemory:
        return InMemory({**self._states, **{k: tree.owned(state) for k, state in new.items()}})

    def __getitem__(self, client: ClientId) -> Tree:
        return self._states[client]

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


@dataclass(frozen=True)
class RunState:
    """All that a run is after a round: with it, and the description of the run, the next round is determined."""

    round: int
    server: Tree
    clients: ClientStates = field(default_factory=InMemory)
    record: Mapping[str, Any] = field(default_factory=dict)  # what happened in this round; decides nothing


def rounds(
    method: Method,
    engine: Engine,
    site: ServerSite,
    *,
    eligible: Sequence[ClientId],
    clients_per_round: int,
    model: Tensors | None = None,
    start: RunState | None = None,
    states: ClientStates | None = None,
    spill: Path | None = None,
    declared: Callable[[ClientId], Declared] | None = None,
    min_answers: int = 1,
) -> Iterator[RunState]:
    """The states after round 1, 2, ... `site.rounds`: from `model` (else from `site.build`), or from `start` on.

    `states`: where the clients' states are kept, none as yet (None: in memory). `spill`: a folder for answers that wait
    for a round to end and are more than memory should hold; a round's updates are gone when the next one begins.
    `declared`: what a client said of itself when it joined (None: not known), to which its updates are held.
    `min_answers`: with fewer answers that count, a round is not made and the run stops.
    """
    state = start if start is not None else _first_state(method, engine, site, eligible, model, states, declared)
    with closing(Shelf(spill)) as shelf:
        for t in range(state.round + 1, site.rounds + 1):
            shelf.clear()
            sampled = sample_clients(eligible, clients_per_round, site.seed, t)
            with same_bits_everywhere():
                state = _round(method, engine, replace(site, round=t), state, sampled, shelf, declared, min_answers)
            yield state


def _round(
    method: Method,
    engine: Engine,
    site: ServerSite,
    state: RunState,
    sampled: Sequence[ClientId],
    shelf: Shelf,
    declared: Callable[[ClientId], Declared] | None,
    min_answers: int,
) -> RunState:
    broadcast = tree.ordered(method.broadcast(state.server))
    like, model = method.update_like(state.server, site), state.server["model"]
    momenta = features.momenta(site.load(model)) if like.get("buffers") else {}

    def check(client: ClientId | None, update: Tree) -> Measures:
        known = None if declared is None or client is None else declared(client)
        method.check_update(update, like, known, site)
        check_length(update, model)
        steps = None if client is None or "count" not in update else method.steps(int(update["count"]))
        return plausible.measured(update, like, model, momenta, steps)

    answers = _Answers(sampled, site.round, check, shelf)
    for k, answer in engine.run_clients(broadcast, sampled, state.clients, site.round):
        answers.take(k, answer)
    answers.compare(model)
    updates = answers.updates()
    answers.must_be(max(min_answers, method.fewest_answers()))
    counted = method.counted(updates)
    server = tree.owned(method.server_update(state.server, counted, site))
    if name := first_not_finite(tree.flatten(server)):
        raise Diverged(f"DIVERGED in round {site.round}: server tensor '{name}' is not finite; {_ADVICE}")
    states = {k: new for k, new in answers.states.items() if k in counted}
    record = {
        "round": site.round,
        "clients": list(sampled),
        "answered": list(updates),
        "rejected": {str(k): str(reason) for k, reason in answers.rejected.items()},
        "lost": {str(k): reason for k, reason in answers.lost.items()},
        **({"left_out": [k for k in updates if k not in counted]} if len(counted) < len(updates) else {}),
        **_losses(updates, site.num_classes),
        "bytes_down": len(sampled) * tree.num_bytes(broadcast),
        "bytes_up": sum(tree.num_bytes(update) for update in updates.values()),
        **{name: value.tolist() for name, value in method.log(server, counted).items()},
    }
    return RunState(site.round, server, state.clients.updated(states) if states else state.clients, record)


_ADVICE = "lower the learning rate or clip the gradient"


class _Answers:
    """A round's answers as they come in: which count, which do not, and why. What counts does not depend on the order
    in which they come."""

    def __init__(
        self, asked: Sequence[ClientId], round: int, check: Callable[[ClientId | None, Tree], Measures], shelf: Shelf
    ) -> None:
        self._asked, self._round, self._check, self._shelf = frozenset(asked), round, check, shelf
        self._updates: dict[ClientId, Tree] = {}
        self._measures: dict[ClientId, Measures] = {}
        self._refused: dict[ClientId, UpdateRejected] = {}
        self._unasked: dict[ClientId, UpdateRejected] = {}  # strangers, and answers to another round's question
        self._lost: dict[ClientId, str] = {}
        self.states: dict[ClientId, Tree] = {}  # count where the client's update does

    def take(self, client: ClientId, answer: Answer | Lost) -> None:
        if isinstance(answer, Lost):
            self._lost[client] = answer.reason
        elif client not in self._asked:
            self._unasked[client] = UpdateRejected("this client was not asked")
        elif answer.round != self._round:
            self._unasked[client] = UpdateRejected(f"the answer is for round {answer.round}")
        elif client in self._updates or client in self._refused:
            self._refuse(client, UpdateRejected("the client answered twice"))
        else:
            of_sum = isinstance(answer, ShareOfSum)
            try:
                # A mean is held to no single client's data.
                measures = self._check(None if of_sum else client, answer.update)
            except UpdateRejected as reason:
                if of_sum:
                    raise sum_refused(self._round, reason) from reason
                self._refuse(client, reason)
            else:
                self._updates[client], self._measures[client] = self._shelf.put(answer.update), measures
                if answer.state:  # a client without state (most methods) is not remembered
                    self.states[client] = self._shelf.put(answer.state)

    def _refuse(self, client: ClientId, reason: UpdateRejected) -> None:
        self._updates.pop(client, None)
        self._refused[client] = reason

    def compare(self, model: Tensors) -> None:
        """Refuse what is far beyond the others, once all are there."""
        for client, reason in plausible.outliers({k: self._measures[k] for k in self.updates()}, model).items():
            self._refuse(client, reason)

    def updates(self) -> dict[ClientId, Tree]:
        return dict(sorted(self._updates.items()))

    @property
    def rejected(self) -> dict[ClientId, UpdateRejected]:
        late = {k: reason for k, reason in self._unasked.items() if k not in self._updates}
        return dict(sorted((late | self._refused).items()))

    @property
    def lost(self) -> dict[ClientId, str]:
        return dict(sorted(self._lost.items()))

    def must_be(self, fewest: int) -> None:
        """Raise where fewer answers than these count: Diverged where the others are not finite, else TooFewClients."""
        if len(self._updates) >= fewest:
            return
        for k, reason in self.rejected.items():
            if isinstance(reason, NotFinite):
                raise Diverged(f"DIVERGED in round {self._round}: client {k}: {reason}; {_ADVICE}")
        if not self.rejected and not self._lost and not self._updates:
            raise TooFewClients(f"no client answered in round {self._round}")
        why = {**self._lost, **self.rejected}
        first = f"; client {min(why)}: {why[min(why)]}" if why else ""
        raise TooFewClients(
            f"{len(self._updates)} of {len(self._asked)} clients gave an answer that counts in round {self._round}, "
            f"and {fewest} are needed{first}"
        )


def sum_refused(round: int, reason: UpdateRejected) -> RedgrapeError:
    """For a sum over the clients that must not count. Who is to blame cannot be told."""
    words = f"the sum over the clients of round {round} is not taken: {reason}; nothing of it was applied"
    return Diverged(f"DIVERGED: {words}; {_ADVICE}") if isinstance(reason, NotFinite) else TooFewClients(words)


def _first_state(
    method: Method,
    engine: Engine,
    site: ServerSite,
    clients: Sequence[ClientId],
    model: Tensors | None = None,
    states: ClientStates | None = None,
    declared: Callable[[ClientId], Declared] | None = None,
) -> RunState:
    if model is None:
        model = site.build().state_dict()
    model = {name: t.detach().cpu().clone().contiguous() for name, t in model.items()}
    survey = _survey(method, engine, site, clients, declared) if method.surveys(site) else {}
    with same_bits_everywhere():
        server = method.init_server(model, replace(site, round=0, survey=survey))
        return RunState(0, tree.ordered(server), states if states is not None else InMemory())


def _survey(
    method: Method,
    engine: Engine,
    site: ServerSite,
    clients: Sequence[ClientId],
    declared: Callable[[ClientId], Declared] | None,
) -> Tree:
    """The sum of what the clients answer to a method's survey. TooFewClients where an answer, or the sum, cannot be."""
    total: Tensors | None = None
    for k, answer in engine.survey(clients):
        try:
            if k is not None:
                method.check_survey(answer, _known(declared, k).examples, site)
            flat = tree.flatten(answer)
            if total is not None and _kinds(flat) != _kinds(total):
                raise UpdateRejected("its names, shapes or types are not those of the clients before it")
        except UpdateRejected as reason:
            name = (_known(declared, k).name if k is not None else "") or f"client {k}"
            raise TooFewClients(
                f"what {name} answers to the survey before the first round is not taken: {reason}"
            ) from reason
        total = flat if total is None else {name: t + total[name] for name, t in flat.items()}
    survey = tree.unflatten(total or {})
    try:
        method.check_survey(survey, sum(_known(declared, k).examples for k in clients), site, of_sum=True)
    except UpdateRejected as reason:
        raise TooFewClients(f"the sum of the clients' answers to the survey is not taken: {reason}") from reason
    return survey


def _kinds(flat: Tensors) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (t.shape, t.dtype) for name, t in flat.items()}


def _known(declared: Callable[[ClientId], Declared] | None, client: ClientId) -> Declared:
    return Declared(MOST_EXAMPLES) if declared is None else declared(client)


def sample_clients(eligible: Sequence[ClientId], count: int, seed: int, round: int) -> list[ClientId]:
    """The clients of a round, a function of (seed, round) alone, so that every method meets the same sequence."""
    if count >= len(eligible):
        return sorted(eligible)
    chosen = keys.numpy_stream(seed, "sample", round).choice(len(eligible), size=count, replace=False)
    return sorted(eligible[i] for i in chosen.tolist())


def _losses(updates: Mapping[ClientId, Tree], num_classes: int) -> dict[str, Any]:
    """The clients' training losses, weighted by their examples, where the method reports them. One that is not
    plausible counts as the largest that is, and is named."""
    claimed = {k: float(u["loss"]) for k, u in updates.items() if "loss" in u and "count" in u}
    if not claimed:
        return {"train_loss": None}
    most = plausible.most_loss(list(claimed.values()), num_classes)
    pairs = [(max(-most, min(loss, most)), float(updates[k]["count"])) for k, loss in claimed.items()]
    capped = {str(k): loss for k, loss in claimed.items() if abs(loss) > most}
    mean = sum(loss * n for loss, n in pairs) / sum(n for _, n in pairs)
    return {"train_loss": mean, **({"capped_loss": capped} if capped else {})}


@dataclass(frozen=True)
class Step:
    """One evaluated round: the state after it, its figures and, apart since they differ from run to run, its times."""

    state: RunState
    record: dict[str, Any]
    seconds: dict[str, float]


class Training:
    """A method on a federation: opens an engine, and yields evaluated rounds. `engine` makes one of another kind than
    those of this machine.

    with Training(method, federation, build, rounds=10) as training:
        for step in training.steps():
            print(step.record["test"]["accuracy"])
    """

    def __init__(
        self,
        method: Method,
        federation: Federation,
        build: Callable[[], Net],
        *,
        rounds: int,
        clients_per_round: int | None = None,
        seed: int = 0,
        workers: int = 1,
        device: str = "cpu",
        evaluate_every: int = 1,
        stack: int = 1,
        min_answers: int = 1,
        deadline: float | None = None,
        engine: Callable[[ClientHalf], Engine] | None = None,
        secret: bytes | None = None,
    ) -> None:
        if not isinstance(rounds, int) or rounds < 1:
            raise ConfigError(f"rounds is {rounds!r}; it must be a whole number of at least 1")
        if not isinstance(seed, int):
            raise ConfigError(f"seed is {seed!r}; it must be a whole number")
        if clients_per_round is not None and not 1 <= clients_per_round <= federation.num_clients:
            raise ConfigError(
                f"clients_per_round is {clients_per_round}; choose 1 to {federation.num_clients}, or none for all"
            )
        asked = clients_per_round or federation.num_clients
        if not 1 <= min_answers <= asked:
            raise ConfigError(f"min_answers is {min_answers}; choose 1 to {asked}, the clients of a round")
        if deadline is not None and not deadline > 0:
            raise ConfigError(f"deadline is {deadline}; it counts seconds and must be above 0")
        if evaluate_every < 1:
            raise ConfigError(f"evaluate_every is {evaluate_every}; it counts rounds and must be at least 1")
        if workers < 1:
            raise ConfigError(
                f"workers is {workers}; there must be at least 1 (this machine has {os.cpu_count()} cores)"
            )
        place = _device(device)
        if not isinstance(method, Method):
            raise ConfigError(
                f"method is {method!r}; pass a method with its hyper-parameters, such as RedGrape(lr=0.05)"
            )
        with keys.global_stream(None):  # so that the net that training starts from is the first that `build` draws
            net = build()
            check_net(net, federation)
            check_fresh(net, build())
        if stack < 1:
            raise ConfigError(f"stack is {stack}; it counts clients that are trained as one and must be at least 1")
        if stack > 1:
            from redgrape.engines import stacked

            stacked.check(method, net)
        if method.batch_size == 1 and batchnorms(net) and not method.freeze_encoder:
            raise ConfigError("batch_size is 1, and BatchNorm has no statistics of a single example; choose at least 2")
        if isinstance(method, Averaging):
            has_statistics = not method.freeze_encoder and next(net.buffers(), None) is not None
            method.check_noise(has_statistics=has_statistics)
        self.federation = federation
        self.method = method
        self.build = build
        self.evaluate_every = evaluate_every
        self.min_answers = min_answers
        self.eligible = [k for k in range(federation.num_clients) if federation.size(k) > 0]
        self.clients_per_round = clients_per_round or federation.num_clients
        method.check_clients(min(self.clients_per_round, len(self.eligible)))
        self.site = ServerSite(
            build,
            federation.num_clients,
            federation.num_classes,
            seed,
            0,
            rounds,
            place,
            federation.auxiliary,
            secret=secret or secrets.token_bytes(32),  # of differential privacy's noise
        )
        half = ClientHalf(method, federation, build, seed, rounds, place, stack)
        self.engine = engines.create(half, workers, deadline) if engine is None else engine(half)

    def steps(
        self,
        start: RunState | None = None,
        model: Tensors | None = None,
        states: ClientStates | None = None,
        spill: Path | None = None,
        account: Callable[[RunState], Mapping[str, Any]] | None = None,
    ) -> Iterator[Step]:
        """The rounds after `start`, or all of them from these initial weights (None: those that `build` gives).
        `states` and `spill` as for `rounds`. `account` is called with each state before anything of it leaves the
        server, for evaluation say, and what it gives is part of the round's record."""
        before = time.perf_counter()
        for state in rounds(
            self.method,
            self.engine,
            self.site,
            eligible=self.eligible,
            clients_per_round=self.clients_per_round,
            model=model,
            start=start,
            states=states,
            spill=spill,
            declared=self.federation.declared,
            min_answers=self.min_answers,
        ):
            trained = time.perf_counter()
            record = {**state.record, **(account(state) if account is not None else {})}
            if self._is_evaluated(state.round):
                record["test"] = self.engine.evaluate(state.server["model"], "test").record(self.federation.groups)
                if self.federation.validation is not None:
                    scores = self.engine.evaluate(state.server["model"], "validation")
                    record["validation"] = scores.record(self.federation.groups)
            after = time.perf_counter()
            yield Step(state, record, {"train": trained - before, "evaluate": after - trained})
            before = time.perf_counter()

    def _is_evaluated(self, round: int) -> bool:
        """Every evaluate_every rounds, and each of the last ten, whose mean is what a run reports."""
        return round % self.evaluate_every == 0 or round > self.site.rounds - 10

    def net(self, model: Tensors) -> Net:
        """The inference model."""
        return self.site.load(model).eval().cpu()

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Result:
    """server: the final state, named tensors; net: the inference model (P and W); history: one record a round."""

    server: Tree
    net: Net
    history: list[dict[str, Any]]


def train(
    method: Method,
    federation: Federation,
    build: Callable[[], Net],
    *,
    rounds: int,
    clients_per_round: int | None = None,
    seed: int = 0,
    workers: int = 1,
    device: str = "cpu",
    evaluate_every: int = 1,
    stack: int = 1,
    min_answers: int = 1,
    deadline: float | None = None,
) -> Result:
    """Train a method on a federation from the weights that `build` gives, and evaluate as it goes.

    `build` returns a fresh Net at every call. With one worker it may be any callable; with more it must be importable,
    because it is sent to other processes. `min_answers`: the run stops where fewer answers count in a round.
    `deadline`: seconds after which a worker that has not answered is taken for hung; with one worker there is none.
    `stack`: train so many clients of equal size as one, where the method and the
    net allow it; fast for small nets, with results that agree to rounding instead of in bits.
    """
    history = []
    with Training(
        method,
        federation,
        build,
        rounds=rounds,
        clients_per_round=clients_per_round,
        seed=seed,
        workers=workers,
        device=device,
        evaluate_every=evaluate_every,
        stack=stack,
        min_answers=min_answers,
        deadline=deadline,
    ) as training:
        for step in training.steps():
            history.append(step.record)
        return Result(step.state.server, training.net(step.state.server["model"]), history)


def check_net(net: object, federation: Federation) -> None:
    """Raise ConfigError where `build` does not give an encoder with a linear classifier that fits the data."""
    if not isinstance(net, Net) or not isinstance(net.classifier, nn.Linear):
        raise ConfigError(
            f"build() returned a {type(net).__name__}; it must return redgrape.Net(encoder, nn.Linear(...))"
        )
    if net.classifier.out_features != federation.num_classes:
        raise ConfigError(
            f"the net's classifier has {net.classifier.out_features} outputs for {federation.num_classes} classes"
        )
    if not all(p.requires_grad for p in net.classifier.parameters()):
        raise ConfigError("the net's classifier is frozen (requires_grad is False); every method trains it")
    for name, examples in (("test", federation.test), ("validation", federation.validation)):
        if examples is not None and not len(examples) and not federation.evaluated_elsewhere:
            raise DataError(f"the {name} set is empty; it needs examples to judge a model by")
    try:
        with torch.no_grad():
            z: Tensor = net.eval()(federation.sample(net.classifier.weight.dtype))
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"the net does not take inputs of shape {federation.input_shape}: {reason}") from error
    if z.shape != (2, federation.num_classes):
        raise ConfigError(
            f"the net gives outputs of shape {tuple(z.shape[1:])}; it must give one number for each class"
        )


def check_fresh(net: Net, other: Net) -> None:
    """Raise ConfigError where two nets of `build` share memory: training one would change the other."""
    places = {t.data_ptr() for t in net.state_dict().values() if t.numel()}
    if any(t.data_ptr() in places for t in other.state_dict().values() if t.numel()):
        raise ConfigError("build() returned the same net twice; it must make a new one at every call")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device '{name}' cannot be used here: {str(error).splitlines()[0]}; try 'cpu'") from error
    return device
