"""The clauses of the contract, one small function each, in CHECKS by their names."""

from __future__ import annotations

import functools
import itertools
import pickle
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from redgrape import nets, tree
from redgrape.engines.in_process import InProcess
from redgrape.engines.pool import Pool
from redgrape.exchange import Exchange
from redgrape.method import Method
from redgrape.own_code import ANYTHING
from redgrape.rounds import PLAIN, InMemory, RunState, exchanged, survey_like
from redgrape.testing.cases import (
    CLASSES,
    IMAGE,
    SEED,
    Case,
    batchnorm_net,
    client_half,
    float64_net,
    named_net,
    run,
    server_site,
    small,
)
from redgrape.testing.comparing import Passed, check_accepted, check_model, crossing, must_be_close, must_equal, same
from redgrape.testing.engines import SPOILERS, Dropping, Reversed, Spoiling, Summing, kind

CHECKS: dict[str, Callable[..., None]] = {}


def clause(check: Callable[..., None]) -> Callable[..., None]:
    """Enter a check in CHECKS; whatever it raises becomes an AssertionError that names the method and the clause."""

    @functools.wraps(check)
    def checked(method: Method, *options: Any) -> None:
        try:
            check(small(method), *options)
        except ANYTHING as error:
            words = _sentence(error, _own_line(method, error))
            raise AssertionError(f"{type(method).__name__} breaks '{check.__name__}': {words}") from error

    CHECKS[check.__name__] = checked
    return checked


def check_runs(method: Method) -> None:
    """Raise AssertionError if an ordinary run raises. No clause is to blame for that."""
    try:
        run(small(method))
    except ANYTHING as error:
        own = {c.__module__ for c in itertools.takewhile(lambda c: c is not Method, type(method).__mro__)}
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        called = [frame.f_code.co_name for frame in frames if frame.f_globals.get("__name__") in own]
        where = f".{called[0]} raises" if called else " cannot run:"  # the function that the engine called first
        words = _sentence(error, _own_line(method, error))
        raise AssertionError(f"{type(method).__name__}{where} {words}") from error


def _own_line(method: Method, error: BaseException) -> str:
    """The last line of the method's own file that the error came through, else of the methods that it builds on."""
    frames = list(traceback.walk_tb(error.__traceback__))
    for c in itertools.takewhile(lambda c: c is not Method, type(method).__mro__):
        for frame, line in reversed(frames):
            if frame.f_globals.get("__name__") == c.__module__:
                return f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
    return ""


def _sentence(error: BaseException, own_line: str) -> str:
    """The first line of what was raised, with the last where the first only announces it; if the method raised it, its
    type and where."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    if isinstance(error, ValidationError):
        lines = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    text = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]
    if own_line or not isinstance(error, AssertionError):
        text = f"{type(error).__name__}: {text}"
    return f"{text} ({own_line})" if own_line else text


@clause
def hyper_parameters_are_frozen(method: Method) -> None:
    """No hyper-parameter can be assigned."""
    for name, value in dict(method).items():
        try:
            setattr(method, name, value)
        except Exception:  # noqa: S112  # that it refuses is what is asked
            continue
        raise AssertionError(f"hyper-parameter '{name}' can be assigned; keep Method's model_config frozen")


@clause
def no_state_is_kept_on_the_method(method: Method) -> None:
    """A run adds and changes nothing on the instance or its class."""
    before = _attributes(method)
    run(method)
    after = _attributes(method)
    for name in sorted(after.keys() | before.keys()):
        if before.get(name) != after.get(name):
            raise AssertionError(f"a run changed '{name}'; state belongs in the server's or the client's state")


@clause
def leaves_are_named_tensors(method: Method) -> None:
    """What passes between client and server is named tensors, and is equal after it was written and read."""
    for passed in crossing(method):
        tree.check_leaves(passed.tree, passed.what)
        again = tree.flatten(tree.from_bytes(tree.to_bytes(passed.tree)))
        for name, t in tree.flatten(passed.tree).items():
            if name not in again or not same(again[name], t):
                raise AssertionError(f"{passed.what}: '{name}' does not survive a passage through bytes")


@clause
def nothing_that_was_passed_is_modified(method: Method) -> None:
    """Broadcasts, updates, client states and old server states keep their bits."""
    kept: list[tuple[Passed, bytes]] = []
    for passed in crossing(method):
        kept.append((passed, tree.to_bytes(passed.tree)))
        for earlier, bits in reversed(kept):
            if tree.to_bytes(earlier.tree) != bits:
                raise AssertionError(f"{earlier.what} was modified in place before {passed.what} was made; clone first")


@clause
def updates_share_no_memory(method: Method) -> None:
    """An update looks neither into the broadcast nor into the client's data."""
    case = Case()
    data = case.federation.train
    places: dict[int, str] = {}
    for passed in crossing(method, case):
        flat = tree.flatten(passed.tree)
        found = {_memory(t): f"the {passed.kind}'s '{name}'" for name, t in flat.items()}
        if passed.kind == "broadcast":
            places = {_memory(data.x): "the client's inputs", _memory(data.y): "the client's labels", **found}
        if passed.kind == "update":
            for name, t in flat.items():
                if t.numel() and _memory(t) in places:
                    raise AssertionError(f"{passed.what}: '{name}' shares memory with {places[_memory(t)]}; clone it")


@clause
def model_keeps_names_shapes_and_dtypes(method: Method) -> None:
    """server["model"] is what build() gives, after init_server and after every round."""
    for passed in crossing(method):
        if passed.kind == "server":
            check_model(passed.tree, batchnorm_net(), passed.what)


@clause
def batchnorm_buffers_stay_sound(method: Method) -> None:
    """Batch counters are int64, and the server's running variances are not negative."""
    for passed in crossing(method):
        for name, t in tree.flatten(passed.tree).items():
            if name.endswith("num_batches_tracked") and t.dtype != torch.int64:
                raise AssertionError(f"{passed.what}: '{name}' is {t.dtype}; it must stay torch.int64")
            if passed.kind == "server" and name.startswith("model/") and name.endswith("running_var") and (t < 0).any():
                raise AssertionError(f"{passed.what}: '{name}' is negative; average buffers, do not step along them")


@clause
def same_seed_gives_same_bits(method: Method) -> None:
    """Two runs are equal bit for bit."""
    must_equal(run(method), run(method), "a second run with the same seed")


@clause
def global_random_numbers_are_not_used(method: Method) -> None:
    """The global streams of torch, NumPy and Python decide nothing."""
    straight = run(method)
    for name, seed in (("torch", torch.manual_seed), ("NumPy", np.random.seed), ("Python", random.seed)):
        with _global_random_state_put_back():
            seed(12345)
            other = run(method)
        must_equal(straight, other, f"a run after another global seed of {name}; draw from site.generator")


@clause
def global_random_state_is_left_alone(method: Method) -> None:
    """A run moves no global stream of random numbers of torch."""
    before = torch.get_rng_state()
    run(method)
    if not torch.equal(before, torch.get_rng_state()):
        raise AssertionError("a run moved torch's global random state; draw from site.generator")


@clause
def threads_change_nothing(method: Method) -> None:
    """Two threads give the bits that one gives."""
    threads = torch.get_num_threads()
    runs: dict[int, list[RunState]] = {}
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            runs[count] = run(method, named_net("cnn"))
    finally:
        torch.set_num_threads(threads)
    must_equal(runs[1], runs[2], "a run with two threads")


@clause
def order_of_clients_changes_nothing(method: Method) -> None:
    """Clients may run and answer in any order."""
    must_equal(run(method), run(method, engine=Reversed), "a run whose clients came in reversed order")


@clause
def any_clients_may_be_missing(method: Method) -> None:
    """A round is made of any non-empty subset of the clients that were asked, down to one."""
    for place in range(3):
        check_accepted(run(method, Case(rounds=2), functools.partial(Dropping, keep=[place])), "one answer a round")
    check_accepted(run(method, Case(rounds=2), functools.partial(Dropping, keep=[0, 2])), "two answers a round")


@clause
def bad_updates_are_left_out(method: Method) -> None:
    """An update that is not what it must be changes nothing: the round is that of the other clients."""
    case = Case(rounds=2)
    without = run(method, case, functools.partial(Dropping, keep=[0, 2]))
    for what, spoil in SPOILERS.items():
        found = run(method, case, functools.partial(Spoiling, spoil=spoil))
        must_equal(without, found, f"a run in which one client's update {what}")


@clause
def resumed_run_equals_straight_run(method: Method) -> None:
    """A run continued from the stored state of any round, by a new instance, goes on as if nothing had happened."""
    straight = run(method)
    for state in straight[:-1]:
        clients = {k: tree.from_bytes(tree.to_bytes(s)) for k, s in state.clients.items()}
        stored = RunState(state.round, tree.from_bytes(tree.to_bytes(state.server)), InMemory(clients))
        resumed = run(pickle.loads(pickle.dumps(method)), start=stored)  # noqa: S301  # pickled in this line
        must_equal(straight[state.round :], resumed, f"the run resumed after round {state.round}")


@clause
def engines_agree(method: Method, workers: Sequence[int] = (1, 2)) -> None:
    """Worker processes, however many, give the bits that this process gives."""
    straight = run(method)
    for count in workers:
        pooled = run(method, engine=functools.partial(Pool, workers=count))
        must_equal(straight, pooled, f"a run in a pool of {count}")


@clause
def clients_of_one_class(method: Method) -> None:
    """Each client may hold a single class."""
    check_accepted(run(method, Case(((6, 0, 0, 0), (0, 9, 0, 0), (0, 0, 2, 0)))), "clients of a single class")


@clause
def clients_of_one_example(method: Method) -> None:
    """A client may hold a single example, even where nobody holds more."""
    check_accepted(run(method, Case(((1, 0, 0, 0), (9, 3, 2, 2), (0, 1, 0, 0)))), "clients of a single example")
    check_accepted(run(method, Case(((0, 0, 0, 1),))), "one client of one example")


@clause
def last_batch_of_one(method: Method) -> None:
    """The last batch may hold a single example, for which BatchNorm has no statistics."""
    check_accepted(run(method, Case(((2, 2, 1, 0), (4, 4, 0, 1), (1, 2, 1, 1)))), "a last batch of one example")


@clause
def clients_without_examples(method: Method) -> None:
    """A client that holds nothing is counted, but never asked."""
    check_accepted(run(method, Case(((0, 0, 0, 0), (5, 2, 1, 1), (3, 9, 0, 2)))), "a client without examples")


@clause
def classes_that_nobody_holds(method: Method) -> None:
    """A class may have no training example anywhere."""
    check_accepted(run(method, Case(((9, 0, 2, 0), (3, 0, 8, 0), (1, 0, 1, 0)))), "classes that nobody holds")


@clause
def few_of_many_clients(method: Method) -> None:
    """Ten of fifty clients a round."""
    counts = tuple((k % 10, k % 3, k % 7 // 3, 1 if k % 11 == 0 else 0) for k in range(50))
    check_accepted(run(method, Case(counts, clients_per_round=10, rounds=2)), "ten of fifty clients")


@clause
def every_kind_of_net(method: Method) -> None:
    """Nets with convolutions, with residual blocks and BatchNorm, and without an encoder."""
    for case in (named_net("cnn"), named_net("resnet8"), named_net("linear", (64,))):
        for state in run(method, case):
            check_accepted([state], f"net '{case.net}'")
            check_model(state.server, case.build(), f"net '{case.net}', the server after round {state.round}")


@clause
def float64_stays_float64(method: Method) -> None:
    """A net in double precision is trained and sent in double precision."""
    for passed in crossing(method, Case(build=float64_net)):
        for name, t in tree.flatten(passed.tree).items():
            if t.is_floating_point() and t.dtype != torch.float64:
                raise AssertionError(f"{passed.what}: '{name}' is {t.dtype} where the net is torch.float64")


# Each is for every method, or is refused.
EXCHANGES: dict[str, Exchange] = {
    "floors": Exchange(min_count=2, min_clients=2),
    "private": Exchange(preset="private"),
    **{rule: Exchange(rule=rule) for rule in ("median", "trimmed_mean", "krum", "multi_krum", "norm_clipping")},
    "clip": Exchange(clip=0.5),
    "noise": Exchange(clip=0.5, noise=0.1, randomness="seed"),
    "noise on class rows": Exchange(clip=0.5, noise=0.1, class_clip=0.1, class_noise=0.1, randomness="seed"),
}


@clause
def exchanges_carry_it(method: Method) -> None:
    """With floors, robust rules, clipping and noise, and each of them in a secure sum, a run stays finite, unless
    the exchange refuses what does not go together."""
    many = ((9, 3, 1, 0), (0, 8, 4, 0), (2, 0, 9, 1), (5, 3, 4, 2), (3, 3, 3, 3), (8, 8, 1, 0))
    build = functools.partial(nets.build, "mlp", IMAGE, CLASSES, seed=SEED)  # noise goes with no running statistics
    case = Case(many, build, "mlp", clients_per_round=len(many), rounds=2)
    parts, survey = exchanged(method, server_site(case))
    for name, exchange in EXCHANGES.items():
        for summed in (False, True):
            if not exchange.refuses(parts, single=method.needs_single(), surveys=bool(survey), summed=summed):
                what = f"the exchange '{name}'{' in a secure sum' if summed else ''}"
                engine = Summing if summed else InProcess
                check_accepted(run(method, replace(case, exchange=exchange), engine), what)


@clause
def sums_are_enough_where_it_says_so(method: Method) -> None:
    """The server makes of the sum over the clients what it makes of their updates, and a client's part of the sum looks
    the same whatever it holds; or the method says why it needs single updates."""
    case = Case(build=float64_net)
    if PLAIN.refuses(exchanged(method, server_site(case))[0], single=method.needs_single(), summed=True):
        return
    straight, summed = run(method, case), run(method, case, Summing)
    for one, other in zip(straight, summed, strict=True):
        must_be_close(
            tree.flatten(one.server), tree.flatten(other.server), f"the server after round {one.round}, summed,"
        )
        for key in ("answered", "class_contributors", "class_released"):
            if one.record.get(key) != other.record.get(key):
                raise AssertionError(f"'{key}' of round {one.round} differs if the updates come as a sum")


@clause
def a_survey_of_nothing_is_zero(method: Method) -> None:
    """A client without examples answers a survey with zeros, of the shapes that all others answer with."""
    case = Case()
    like = tree.flatten(survey_like(method, server_site(case)))
    if any(bool(t.any()) for t in like.values()):
        raise AssertionError("a client without examples must answer a survey with zeros: it adds nothing to the sum")
    for k, answer in client_half(method, case).survey(case.eligible):
        if {name: kind(t) for name, t in tree.flatten(answer).items()} != {n: kind(t) for n, t in like.items()}:
            raise AssertionError(f"client {k}'s answer to the survey has other names or shapes than an empty client's")


def _attributes(method: Method) -> dict[str, Any]:
    """The attributes of the instance and of its classes below Method, in a form that can be compared later."""
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


def _memory(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


@contextmanager
def _global_random_state_put_back() -> Iterator[None]:
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
