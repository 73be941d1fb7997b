"""The contract that every method keeps, as checks for anybody's method: `check_method(MyMethod)`.

Each clause of the contract is one small function; `CHECKS` holds them by name, so that a test suite can run them one at
a time:

    @pytest.mark.parametrize("clause", redgrape.testing.CHECKS)
    def test_my_method(clause):
        redgrape.testing.CHECKS[clause](MyMethod())

A method is checked with its own hyper-parameters, except that it trains one epoch in batches of four, because the data
are tiny, and does less of what only costs time (`Method.cheap`). A broken clause raises AssertionError with a sentence
that says what is broken.
"""

from __future__ import annotations

import functools
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from redgrape import determinism, nets, tree
from redgrape.data.examples import Examples
from redgrape.data.federation import Federation
from redgrape.engines import Answer, ClientHalf, Engine, Lost, SumOfAnswers
from redgrape.engines.in_process import InProcess
from redgrape.engines.pool import Pool
from redgrape.exchange import Exchange
from redgrape.method import ClientId, Method, ServerSite
from redgrape.nets.net import Net
from redgrape.training import PLAIN, InMemory, RunState, _first_state, exchanged, rounds, survey_like
from redgrape.tree import Tensors, Tree

SEED, ROUNDS, BATCH, CLASSES = 7, 3, 4, 4
IMAGE = (1, 8, 8)

# Examples of each class at each client: many of a class, few, one, none. Three of the four clients answer a round.
COUNTS = ((9, 3, 1, 0), (0, 8, 4, 0), (2, 0, 9, 1), (5, 3, 4, 2))

# The server's own examples of each class: a batch and one more, a batch, one, and two.
AUXILIARY = (BATCH + 1, BATCH, 1, 2)

CHECKS: dict[str, Callable[[Method], None]] = {}


def check_method(method: type[Method] | Method, *, workers: Sequence[int] = (1, 2)) -> None:
    """Raise AssertionError at the first clause of the contract that the method breaks.

    Pass the class where the defaults of its hyper-parameters are to be checked, else an instance. `workers`: the sizes
    of the pools of worker processes whose results must equal those of this process; the class must be importable there.
    """
    instance = method() if isinstance(method, type) else method
    for check in CHECKS.values():
        if check is engines_agree:
            engines_agree(instance, workers)
        else:
            check(instance)


def batchnorm_net() -> Net:
    """A tiny net with all that is awkward: BatchNorm that fails on a single example, its buffers, and dropout."""
    with determinism.global_stream(determinism.key(SEED, "net")):
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2))
        return Net(encoder, nn.Linear(6, CLASSES))


def float64_net() -> Net:
    return batchnorm_net().double()


def _clause(check: Callable[..., None]) -> Callable[..., None]:
    """Enter a check in CHECKS; whatever it raises becomes an AssertionError that names the method and the clause."""

    @functools.wraps(check)
    def checked(method: Method, *options: Any) -> None:
        try:
            check(_small(method), *options)
        except Exception as error:
            raise AssertionError(f"{type(method).__name__} breaks '{check.__name__}': {_sentence(error)}") from error

    CHECKS[check.__name__] = checked
    return checked


def _small(method: Method) -> Method:
    """The method at as little work as shows what it does."""
    return type(method)(**{**dict(method), "epochs": 1, "batch_size": BATCH, **method.cheap})


@_clause
def hyper_parameters_are_frozen(method: Method) -> None:
    """No hyper-parameter can be assigned."""
    for name, value in dict(method).items():
        try:
            setattr(method, name, value)
        except Exception:  # noqa: S112  # that it refuses is what is asked
            continue
        raise AssertionError(f"hyper-parameter '{name}' can be assigned; keep Method's model_config frozen")


@_clause
def no_state_is_kept_on_the_method(method: Method) -> None:
    """A run adds and changes nothing on the instance or its class."""
    before = _attributes(method)
    _run(method)
    after = _attributes(method)
    for name in sorted(after.keys() | before.keys()):
        if before.get(name) != after.get(name):
            raise AssertionError(f"a run changed '{name}'; state belongs in the server's or the client's state")


@_clause
def leaves_are_named_tensors(method: Method) -> None:
    """What crosses a wall is tensors by name, and the same again after a passage through bytes."""
    for passed in _exchange(method):
        tree.check_leaves(passed.tree, passed.what)
        again = tree.flatten(tree.from_bytes(tree.to_bytes(passed.tree)))
        for name, t in tree.flatten(passed.tree).items():
            if name not in again or not _same(again[name], t):
                raise AssertionError(f"{passed.what}: '{name}' does not survive a passage through bytes")


@_clause
def nothing_that_was_passed_is_modified(method: Method) -> None:
    """Broadcasts, updates, client states and old server states keep their bits."""
    kept: list[tuple[_Passed, bytes]] = []
    for passed in _exchange(method):
        kept.append((passed, tree.to_bytes(passed.tree)))
        for earlier, bits in reversed(kept):
            if tree.to_bytes(earlier.tree) != bits:
                raise AssertionError(f"{earlier.what} was modified in place before {passed.what} was made; clone first")


@_clause
def updates_share_no_memory(method: Method) -> None:
    """An update looks neither into the broadcast nor into the client's data."""
    case = _Case()
    data = case.federation.train
    places: dict[int, str] = {}
    for passed in _exchange(method, case):
        flat = tree.flatten(passed.tree)
        found = {_memory(t): f"the {passed.kind}'s '{name}'" for name, t in flat.items()}
        if passed.kind == "broadcast":
            places = {_memory(data.x): "the client's inputs", _memory(data.y): "the client's labels", **found}
        if passed.kind == "update":
            for name, t in flat.items():
                if t.numel() and _memory(t) in places:
                    raise AssertionError(f"{passed.what}: '{name}' shares memory with {places[_memory(t)]}; clone it")


@_clause
def model_keeps_names_shapes_and_dtypes(method: Method) -> None:
    """server["model"] is what build() gives, after init_server and after every round."""
    for passed in _exchange(method):
        if passed.kind == "server":
            _check_model(passed.tree, batchnorm_net(), passed.what)


@_clause
def batchnorm_buffers_stay_sound(method: Method) -> None:
    """Batch counters are int64, and the server's running variances are not negative."""
    for passed in _exchange(method):
        for name, t in tree.flatten(passed.tree).items():
            if name.endswith("num_batches_tracked") and t.dtype != torch.int64:
                raise AssertionError(f"{passed.what}: '{name}' is {t.dtype}; it must stay torch.int64")
            if passed.kind == "server" and name.startswith("model/") and name.endswith("running_var") and (t < 0).any():
                raise AssertionError(f"{passed.what}: '{name}' is negative; average buffers, do not step along them")


@_clause
def same_seed_gives_same_bits(method: Method) -> None:
    """Two runs are equal bit for bit."""
    _must_equal(_run(method), _run(method), "a second run with the same seed")


@_clause
def global_random_numbers_are_not_used(method: Method) -> None:
    """The global streams of torch, NumPy and Python decide nothing."""
    straight = _run(method)
    for name, seed in (("torch", torch.manual_seed), ("NumPy", np.random.seed), ("Python", random.seed)):
        with _global_random_state_put_back():
            seed(12345)
            other = _run(method)
        _must_equal(straight, other, f"a run after another global seed of {name}; draw from site.generator")


@_clause
def global_random_state_is_left_alone(method: Method) -> None:
    """A run moves no global stream of random numbers of torch."""
    before = torch.get_rng_state()
    _run(method)
    if not torch.equal(before, torch.get_rng_state()):
        raise AssertionError("a run moved torch's global random state; draw from site.generator")


@_clause
def threads_change_nothing(method: Method) -> None:
    """Two threads give the bits that one gives."""
    threads = torch.get_num_threads()
    runs: dict[int, list[RunState]] = {}
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            runs[count] = _run(method, _named_net("cnn"))
    finally:
        torch.set_num_threads(threads)
    _must_equal(runs[1], runs[2], "a run with two threads")


@_clause
def order_of_clients_changes_nothing(method: Method) -> None:
    """Clients may run and answer in any order."""
    _must_equal(_run(method), _run(method, engine=_Reversed), "a run whose clients came in reversed order")


@_clause
def any_clients_may_be_missing(method: Method) -> None:
    """A round is made of any non-empty subset of the clients that were asked, down to one."""
    for place in range(3):
        _check_finite(_run(method, _Case(rounds=2), functools.partial(_Dropping, keep=[place])), "one answer a round")
    _check_finite(_run(method, _Case(rounds=2), functools.partial(_Dropping, keep=[0, 2])), "two answers a round")


@_clause
def bad_updates_are_left_out(method: Method) -> None:
    """An update that is not what it must be changes nothing: the round is that of the other clients."""
    case = _Case(rounds=2)
    without = _run(method, case, functools.partial(_Dropping, keep=[0, 2]))
    for what, spoil in _SPOILERS.items():
        found = _run(method, case, functools.partial(_Spoiling, spoil=spoil))
        _must_equal(without, found, f"a run in which one client's update {what}")


@_clause
def resumed_run_equals_straight_run(method: Method) -> None:
    """A run continued from the stored state of any round, by a new instance, goes on as if nothing had happened."""
    straight = _run(method)
    for state in straight[:-1]:
        clients = {k: tree.from_bytes(tree.to_bytes(s)) for k, s in state.clients.items()}
        stored = RunState(state.round, tree.from_bytes(tree.to_bytes(state.server)), InMemory(clients))
        resumed = _run(pickle.loads(pickle.dumps(method)), start=stored)  # noqa: S301  # pickled in this line
        _must_equal(straight[state.round :], resumed, f"the run resumed after round {state.round}")


@_clause
def engines_agree(method: Method, workers: Sequence[int] = (1, 2)) -> None:
    """Worker processes, however many, give the bits that this process gives."""
    straight = _run(method)
    for count in workers:
        pooled = _run(method, engine=functools.partial(Pool, workers=count))
        _must_equal(straight, pooled, f"a run in a pool of {count}")


@_clause
def clients_of_one_class(method: Method) -> None:
    """Each client may hold a single class."""
    _check_finite(_run(method, _Case(((6, 0, 0, 0), (0, 9, 0, 0), (0, 0, 2, 0)))), "clients of a single class")


@_clause
def clients_of_one_example(method: Method) -> None:
    """A client may hold a single example, even where nobody holds more."""
    _check_finite(_run(method, _Case(((1, 0, 0, 0), (9, 3, 2, 2), (0, 1, 0, 0)))), "clients of a single example")
    _check_finite(_run(method, _Case(((0, 0, 0, 1),))), "one client of one example")


@_clause
def last_batch_of_one(method: Method) -> None:
    """A client's examples may leave one over, of which BatchNorm has no statistics."""
    _check_finite(_run(method, _Case(((2, 2, 1, 0), (4, 4, 0, 1), (1, 2, 1, 1)))), "a last batch of one example")


@_clause
def clients_without_examples(method: Method) -> None:
    """A client that holds nothing is counted, but never asked."""
    _check_finite(_run(method, _Case(((0, 0, 0, 0), (5, 2, 1, 1), (3, 9, 0, 2)))), "a client without examples")


@_clause
def classes_that_nobody_holds(method: Method) -> None:
    """A class may have no training example anywhere."""
    _check_finite(_run(method, _Case(((9, 0, 2, 0), (3, 0, 8, 0), (1, 0, 1, 0)))), "classes that nobody holds")


@_clause
def few_of_many_clients(method: Method) -> None:
    """Ten of fifty clients a round."""
    counts = tuple((k % 10, k % 3, k % 7 // 3, 1 if k % 11 == 0 else 0) for k in range(50))
    _check_finite(_run(method, _Case(counts, clients_per_round=10, rounds=2)), "ten of fifty clients")


@_clause
def every_kind_of_net(method: Method) -> None:
    """Nets with convolutions, with residual blocks and BatchNorm, and without an encoder."""
    for case in (_named_net("cnn"), _named_net("resnet8"), _named_net("linear", (64,))):
        for state in _run(method, case):
            _check_finite([state], f"net '{case.net}'")
            _check_model(state.server, case.build(), f"net '{case.net}', the server after round {state.round}")


@_clause
def float64_stays_float64(method: Method) -> None:
    """A net in double precision is trained and sent in double precision."""
    for passed in _exchange(method, _Case(build=float64_net)):
        for name, t in tree.flatten(passed.tree).items():
            if t.is_floating_point() and t.dtype != torch.float64:
                raise AssertionError(f"{passed.what}: '{name}' is {t.dtype} where the net is torch.float64")


# Each is for every method, or is refused with a reason.
EXCHANGES: dict[str, Exchange] = {
    "floors": Exchange(min_count=2, min_clients=2),
    "private": Exchange(preset="private"),
    **{rule: Exchange(rule=rule) for rule in ("median", "trimmed_mean", "krum", "multi_krum", "norm_clipping")},
    "clip": Exchange(clip=0.5),
    "noise": Exchange(clip=0.5, noise=0.1, randomness="seed"),
    "noise on class rows": Exchange(clip=0.5, noise=0.1, class_clip=0.1, class_noise=0.1, randomness="seed"),
}


@_clause
def exchanges_carry_it(method: Method) -> None:
    """With floors, robust rules, clipping and noise, and each of them in a secure sum, a run stays finite and a client
    reports no class below the floor; or the exchange says in words what does not go together."""
    many = ((9, 3, 1, 0), (0, 8, 4, 0), (2, 0, 9, 1), (5, 3, 4, 2), (3, 3, 3, 3), (8, 8, 1, 0))
    build = functools.partial(nets.build, "mlp", IMAGE, CLASSES, seed=SEED)  # noise goes with no running statistics
    case = _Case(many, build, "mlp", clients_per_round=len(many), rounds=2)
    for name, exchange in EXCHANGES.items():
        for summed in (False, True):
            what = f"the exchange '{name}'{' in a secure sum' if summed else ''}"
            site = _server_site(case)
            parts, survey = exchanged(method, site)
            reason = exchange.refuses(parts, single=method.needs_single(), surveys=bool(survey), summed=summed)
            if reason is not None:
                if not reason.strip():
                    raise AssertionError(f"{what} is refused without a word")
                continue
            engine = functools.partial(_Floored, floor=exchange.min_count, summed=summed)
            _check_finite(_run(method, case, engine, exchange=exchange), what)


@_clause
def sums_are_enough_where_it_says_so(method: Method) -> None:
    """The server makes of the sum over the clients what it makes of their updates, and a client's part of the sum looks
    the same whatever it holds; or the method says why it needs single updates."""
    case = _Case(build=float64_net)
    if PLAIN.refuses(exchanged(method, _server_site(case))[0], single=method.needs_single(), summed=True):
        return
    straight, summed = _run(method, case), _run(method, case, _Summing)
    for one, other in zip(straight, summed, strict=True):
        _must_be_close(
            tree.flatten(one.server), tree.flatten(other.server), f"the server after round {one.round}, summed,"
        )
        for key in ("answered", "class_contributors", "class_released"):
            if one.record.get(key) != other.record.get(key):
                raise AssertionError(f"'{key}' of round {one.round} differs if the updates come as a sum")


@_clause
def a_survey_of_nothing_is_zero(method: Method) -> None:
    """A client without examples answers a survey with zeros, of the shapes that all others answer with."""
    case = _Case()
    like = tree.flatten(survey_like(method, _server_site(case)))
    if any(bool(t.any()) for t in like.values()):
        raise AssertionError("a client without examples must answer a survey with zeros: it adds nothing to the sum")
    for k, answer in _client_half(method, case).survey(case.eligible):
        if {name: _kind(t) for name, t in tree.flatten(answer).items()} != {n: _kind(t) for n, t in like.items()}:
            raise AssertionError(f"client {k}'s answer to the survey has other names or shapes than an empty client's")


@dataclass(frozen=True)
class _Case:
    """What a method is run on."""

    counts: tuple[tuple[int, ...], ...] = COUNTS
    build: Callable[[], Net] = batchnorm_net
    net: str = "batchnorm_net"
    shape: tuple[int, ...] = IMAGE
    clients_per_round: int = 3
    rounds: int = ROUNDS

    @cached_property
    def federation(self) -> Federation:
        clients = [self._examples(counts, k) for k, counts in enumerate(self.counts)]
        test, auxiliary = self._examples((1,) * CLASSES, len(clients)), self._examples(AUXILIARY, len(clients) + 1)
        return Federation(clients, test, CLASSES, auxiliary=auxiliary)

    @property
    def eligible(self) -> list[ClientId]:
        return [k for k in range(self.federation.num_clients) if self.federation.size(k)]

    def _examples(self, counts: Sequence[int], place: int) -> Examples:
        """So many examples of each class, noise around a mean of its own."""
        y = torch.repeat_interleave(torch.arange(CLASSES), torch.tensor(counts))
        means = torch.randn(CLASSES, *self.shape, generator=determinism.torch_stream(SEED, "means"))
        noise = torch.randn(len(y), *self.shape, generator=determinism.torch_stream(SEED, "noise", place))
        return Examples(means[y] + noise, y)


def _named_net(name: str, shape: tuple[int, ...] = IMAGE) -> _Case:
    build = functools.partial(nets.build, name, shape, CLASSES, seed=SEED)
    return _Case(COUNTS[:2], build, name, shape, clients_per_round=2, rounds=2)


class _Reversed(InProcess):
    """Runs the clients, and returns their answers, in reversed order."""

    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Iterator[tuple[ClientId | None, Answer | SumOfAnswers | Lost]]:
        for k in reversed(clients):
            yield from super().run_clients(broadcast, [k], states, round)


class _Dropping(InProcess):
    """Loses all answers but those at these places."""

    def __init__(self, half: ClientHalf, keep: Sequence[int]) -> None:
        super().__init__(half)
        self._keep = keep

    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Iterator[tuple[ClientId | None, Answer | SumOfAnswers | Lost]]:
        answers = list(super().run_clients(broadcast, clients, states, round))
        return (answers[i] for i in self._keep)


class _Spoiling(InProcess):
    """Spoils the answer at the second place."""

    def __init__(self, half: ClientHalf, spoil: Callable[[Tensors], Any]) -> None:
        super().__init__(half)
        self._spoil = spoil

    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Iterator[tuple[ClientId | None, Answer | SumOfAnswers | Lost]]:
        for place, (k, answer) in enumerate(super().run_clients(broadcast, clients, states, round)):
            if place == 1 and isinstance(answer, Answer):
                yield k, answer._replace(update=self._spoil(tree.flatten(answer.update)))
            else:
                yield k, answer


def _with_number(number: float) -> Callable[[Tensors], Tree]:
    def spoil(flat: Tensors) -> Tree:
        name, t = next((name, t) for name, t in flat.items() if t.is_floating_point() and t.numel())
        spoilt = t.clone()
        spoilt.view(-1)[-1] = number
        return tree.unflatten({**flat, name: spoilt})

    return spoil


_SPOILERS: dict[str, Callable[[Tensors], Any]] = {
    "holds NaN": _with_number(float("nan")),
    "holds infinity": _with_number(float("-inf")),
    "is empty": lambda flat: {},
    "holds a Python number": lambda flat: {**tree.unflatten(flat), "number": 1.5},
}


def _memory(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _client_half(method: Method, case: _Case, exchange: Exchange = PLAIN) -> ClientHalf:
    return ClientHalf(method, case.federation, case.build, SEED, case.rounds, torch.device("cpu"), exchange=exchange)


def _server_site(case: _Case) -> ServerSite:
    f = case.federation
    return ServerSite(case.build, f.num_clients, f.num_classes, SEED, 0, case.rounds, torch.device("cpu"), f.auxiliary)


def _run(
    method: Method,
    case: _Case | None = None,
    engine: Callable[[ClientHalf], Engine] = InProcess,
    start: RunState | None = None,
    exchange: Exchange = PLAIN,
) -> list[RunState]:
    """The states after each round."""
    case = case or _Case()
    with engine(_client_half(method, case, exchange)) as running:
        return list(_states(method, case, running, start, exchange))


def _states(
    method: Method, case: _Case, engine: Engine, start: RunState | None = None, exchange: Exchange = PLAIN
) -> Iterator[RunState]:
    return rounds(
        method,
        engine,
        _server_site(case),
        eligible=case.eligible,
        clients_per_round=case.clients_per_round,
        exchange=exchange,
        start=start,
    )


class _Summing(InProcess):
    """The clients' answers as a secure sum gives them."""

    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Iterator[tuple[ClientId | None, Answer | SumOfAnswers | Lost]]:
        answers = {k: self._half.run(k, broadcast, states.get(k), round) for k in clients}
        total = _sum([self._half.summand(k, broadcast, answer.update, round) for k, answer in answers.items()])
        yield None, SumOfAnswers(total, {k: tree.ordered(answer.state) for k, answer in answers.items()}, round)


class _Floored(InProcess):
    """Holds every update to the floor of examples."""

    def __init__(self, half: ClientHalf, floor: int, summed: bool) -> None:
        super().__init__(half)
        self._floor, self._summing = floor, _Summing(half) if summed else None

    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Iterator[tuple[ClientId | None, Answer | SumOfAnswers | Lost]]:
        if self._summing is not None:
            yield from self._summing.run_clients(broadcast, clients, states, round)
            return
        for k, answer in super().run_clients(broadcast, clients, states, round):
            for name, t in tree.flatten(answer.update if isinstance(answer, Answer) else {}).items():
                if (
                    name.endswith("/classes")
                    and k is not None
                    and (self._half.site(k, round).class_counts[t] < self._floor).any()
                ):
                    raise AssertionError(f"client {k} reports a class below the floor of {self._floor} in '{name}'")
            yield k, answer


class _Passed(NamedTuple):
    """A tree on its way from one half of a method to the other."""

    kind: Literal["server", "broadcast", "update", "state"]
    what: str
    tree: Tree


class _Watched(InProcess):
    """Notes every tree that crosses."""

    def __init__(self, half: ClientHalf) -> None:
        super().__init__(half)
        self.passed: list[_Passed] = []

    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Iterator[tuple[ClientId | None, Answer | SumOfAnswers | Lost]]:
        self.passed.append(_Passed("broadcast", f"the broadcast of round {round}", broadcast))
        for k in clients:
            answer = self._half.run(k, broadcast, states.get(k), round)
            self.passed.append(_Passed("update", f"client {k}'s update of round {round}", answer.update))
            self.passed.append(_Passed("state", f"client {k}'s state after round {round}", answer.state))
            yield k, Answer(tree.ordered(answer.update), tree.ordered(answer.state), round)


def _exchange(method: Method, case: _Case | None = None) -> Iterator[_Passed]:
    """A run taken apart: every tree that the method has made, in order."""
    case = case or _Case()
    with _Watched(_client_half(method, case)) as engine:
        first = _first_state(method, engine, _server_site(case), case.eligible)
        yield _Passed("server", "the server's first state", first.server)
        for state in _states(method, case, engine, first):
            yield from engine.passed
            engine.passed.clear()
            yield _Passed("server", f"the server's state after round {state.round}", state.server)


def _attributes(method: Method) -> dict[str, Any]:
    """What stands on the instance and on its classes below Method, in a form that can be compared later."""
    instance = {**vars(method), **(method.__pydantic_private__ or {})}
    classes = [c for c in type(method).__mro__ if issubclass(c, Method) and c is not Method]
    on_classes = {
        f"{c.__name__}.{name}": value for c in classes for name, value in vars(c).items() if not name.startswith("__")
    }
    return {name: _comparable(value) for name, value in {**instance, **on_classes}.items()}


def _comparable(value: Any) -> Any:
    try:
        return pickle.dumps(value)
    except Exception:  # a property, a classmethod: it changes only by being replaced
        return id(value)


def _sentence(error: Exception) -> str:
    """The first line of what was raised, with the last where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]
    return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and tree.equal({"t": a}, {"t": b})


def _must_equal(expected: Sequence[RunState], found: Sequence[RunState], what: str) -> None:
    for a, b in zip(expected, found, strict=True):
        ours, theirs = _flat(a), _flat(b)
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in ours or name not in theirs or not _same(ours[name], theirs[name]):
                raise AssertionError(f"'{name}' differs after round {a.round} in {what}")


def _flat(state: RunState) -> Tensors:
    return tree.flatten({"server": state.server, **{f"client {k}": s for k, s in state.clients.items()}})


def _check_finite(states: Sequence[RunState], what: str) -> None:
    """No update and no server state holds NaN or infinity; `rounds` itself stops at such a server."""
    for state in states:
        for client, reason in state.record["rejected"].items():
            raise AssertionError(f"with {what}, client {client}'s update of round {state.round}: {reason}")


def _check_model(server: Tree, net: Net, what: str) -> None:
    """server["model"] has the names, shapes and dtypes of the net's state."""
    expected = net.state_dict()
    model = server.get("model", {})
    if wrong := sorted(expected.keys() ^ model.keys()):
        raise AssertionError(f"{what}: server['model'] and build() do not both have '{wrong[0]}'")
    for name, t in expected.items():
        if model[name].dtype != t.dtype or model[name].shape != t.shape:
            raise AssertionError(
                f"{what}: '{name}' is {model[name].dtype} {tuple(model[name].shape)}, not {t.dtype} {tuple(t.shape)}"
            )


def _sum(summands: Sequence[Tree]) -> Tree:
    """Of trees that must have the same names, shapes and dtypes."""
    total = tree.flatten(summands[0])
    for summand in summands[1:]:
        flat = tree.flatten(summand)
        for name in sorted(total.keys() | flat.keys()):
            if name not in flat or name not in total or (flat[name].shape, flat[name].dtype) != _kind(total[name]):
                raise AssertionError(
                    f"'{name}' of a summand depends on the client; send zeros for what it does not hold"
                )
        total = {name: t + flat[name] for name, t in total.items()}
    return tree.unflatten(total)


def _kind(t: Tensor) -> tuple[torch.Size, torch.dtype]:
    return t.shape, t.dtype


def _must_be_close(expected: Tensors, found: Tensors, what: str) -> None:
    """To rounding in double precision."""
    for name in sorted(expected.keys() | found.keys()):
        if name not in expected or name not in found or _kind(expected[name]) != _kind(found[name]):
            raise AssertionError(f"{what} has another '{name}' than the one made from updates")
        if not torch.allclose(expected[name].double(), found[name].double(), rtol=1e-7, atol=1e-9):
            raise AssertionError(f"{what} differs in '{name}' from the one made from updates")


@contextmanager
def _global_random_state_put_back() -> Iterator[None]:
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
