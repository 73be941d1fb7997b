"""Trains a method on a federation: rounds on an engine, their evaluation, and the result."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redgrape import determinism, engines
from redgrape.data.federation import FederatedData, Federation
from redgrape.engines import ClientHalf, Engine, Split, devices
from redgrape.errors import ConfigError, DataError
from redgrape.exchange import Exchange
from redgrape.learning.features import batchnorms
from redgrape.method import Method, ServerSite
from redgrape.nets import own
from redgrape.nets.mixed import in_bfloat16
from redgrape.nets.net import Net
from redgrape.rounds import PLAIN, ClientStates, RunState, exchanged, rounds
from redgrape.tree import Tensors, Tree


@dataclass(frozen=True)
class Step:
    """One evaluated round: the state after it, its figures and its times, kept apart since they differ between runs."""

    state: RunState
    record: dict[str, Any]
    seconds: dict[str, float]


class Training:
    """A method on a federation. It opens an engine and yields evaluated rounds. `engine` makes an engine other
    than the local ones.

        with Training(method, federation, build, rounds=10) as training:
            for step in training.steps():
                print(step.record["test"]["accuracy"])
    """

    def __init__(
        self,
        method: Method,
        federation: FederatedData,
        build: Callable[[], Net] | nn.Module,
        *,
        rounds: int,
        clients_per_round: int | None = None,
        seed: int = 0,
        workers: int = 1,
        device: str = "cpu",
        precision: str = "float32",
        evaluate_every: int = 1,
        stack: int = 1,
        min_answers: int = 1,
        deadline: float | None = None,
        exchange: Exchange = PLAIN,
        engine: Callable[[ClientHalf], Engine] | None = None,
        secret: bytes | None = None,
    ) -> None:
        if not isinstance(rounds, int) or rounds < 1:
            raise ConfigError(f"rounds is {rounds!r}; it must be a whole number of at least 1")
        if not isinstance(seed, int):
            raise ConfigError(f"seed is {seed!r}; it must be a whole number")
        if clients_per_round is not None and not 1 <= clients_per_round <= federation.num_clients:
            raise ConfigError(
                f"clients_per_round is {clients_per_round}; choose 1 to {federation.num_clients}, or None for all"
            )
        self.eligible = [k for k in range(federation.num_clients) if federation.size(k) > 0]
        asked = min(clients_per_round or federation.num_clients, len(self.eligible))
        if not 1 <= min_answers <= asked:
            raise ConfigError(
                f"min_answers is {min_answers}; choose 1 to {asked}, the number of clients with examples in a round"
            )
        if deadline is not None and not deadline > 0:
            raise ConfigError(f"deadline is {deadline}; it is in seconds and must be above 0")
        if evaluate_every < 1:
            raise ConfigError(f"evaluate_every is {evaluate_every}; it is a number of rounds and must be at least 1")
        if workers < 1:
            raise ConfigError(
                f"workers is {workers}; there must be at least 1 (this machine has {os.cpu_count()} cores)"
            )
        places = devices.chosen(device)
        check_precision(precision, stack)
        if not isinstance(method, Method):
            raise ConfigError(
                f"method is {method!r}; pass a method with its hyper-parameters, such as RedGrape(lr=0.05)"
            )
        if isinstance(build, nn.Module):
            build = own.copies(build, federation.input_shape, federation.num_classes)
        with determinism.global_stream(None):  # so that training starts from the first net that `build` draws
            net = build()
            check_net(net, federation)
            check_fresh(net, build())
        if stack < 1:
            raise ConfigError(f"stack is {stack}; it is the number of clients trained as one and must be at least 1")
        if stack > 1:
            from redgrape.engines import stacked

            stacked.check(method, net)
        if method.batch_size == 1 and batchnorms(net) and not method.freeze_encoder:
            raise ConfigError("batch_size is 1, but BatchNorm needs more than one example; choose at least 2")
        self.federation = federation
        self.method = method
        self.build = build
        self.evaluate_every = evaluate_every
        self.min_answers = min_answers
        self.clients_per_round = clients_per_round or federation.num_clients
        used = build if precision == "float32" else partial(in_bfloat16, build)
        self.site = ServerSite(
            used,
            federation.num_clients,
            federation.num_classes,
            seed,
            0,
            rounds,
            places[0],
            federation.auxiliary,
            secret=secret or secrets.token_bytes(32),  # for differential privacy's noise
        )
        self.exchange = exchange
        self.parts, survey = exchanged(method, self.site)
        scaled = isinstance(federation, Federation) and federation.columns is not None
        exchange.check_fits(self.parts, asked, single=method.needs_single(), surveys=bool(survey), scaled=scaled)
        half = ClientHalf(method, federation, used, seed, rounds, places[0], stack, exchange)
        self.engine = engines.create(half, workers, deadline, places) if engine is None else engine(half)

    def steps(
        self,
        start: RunState | None = None,
        model: Tensors | None = None,
        states: ClientStates | None = None,
        spill: Path | None = None,
        account: Callable[[RunState], Mapping[str, Any]] | None = None,
    ) -> Iterator[Step]:
        """Yield the rounds after `start`, or all rounds from the weights `model` (None: those from `build`). `states`
        and `spill` are those of `rounds`. `account` is called with each state before any of it leaves the server, for
        example for evaluation. Its result becomes part of the round's record."""
        before = time.perf_counter()
        for state in rounds(
            self.method,
            self.engine,
            self.site,
            eligible=self.eligible,
            clients_per_round=self.clients_per_round,
            exchange=self.exchange,
            model=model,
            start=start,
            states=states,
            spill=spill,
            declared=self.federation.declared,
            min_answers=self.min_answers,
        ):
            trained = time.perf_counter()
            record = {**state.record, **(account(state) if account is not None else {})}
            if self.is_evaluated(state.round):
                splits: list[Split] = ["test"] if self.federation.validation is None else ["test", "validation"]
                for split in splits:
                    if (scores := self.engine.evaluate(state.server["model"], split)) is not None:
                        record[split] = scores.record(self.federation.groups)
            after = time.perf_counter()
            yield Step(state, record, {"train": trained - before, "evaluate": after - trained})
            before = time.perf_counter()

    def is_evaluated(self, round: int) -> bool:
        """True every evaluate_every rounds, and in each of the last ten, over which a run reports the mean."""
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


class History(list[dict[str, Any]]):
    """One record per round, in order."""

    def column(self, name: str) -> list[Any]:
        """A figure of every round by its joined name, such as `test.accuracy`; None if a round lacks it."""

        def found(record: Any, parts: Sequence[str]) -> Any:
            for part in parts:
                record = record.get(part) if isinstance(record, Mapping) else None
            return record

        return [found(record, name.split(".")) for record in self]

    def to_pandas(self) -> Any:
        """A DataFrame with a row per round and a column per figure; needs pandas."""
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise ConfigError("to_pandas needs pandas, which is not installed; pip install pandas") from error
        names = dict.fromkeys(name for record in self for name in _figures(record))
        return DataFrame({name: self.column(name) for name in names})


def _figures(record: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _figures(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            yield prefix + name


@dataclass(frozen=True)
class Result:
    """server: the final state, named tensors; net: the inference model (P and W); history: one record per round."""

    server: Tree
    net: Net
    history: History

    def __repr__(self) -> str:
        return f"Result({len(self.history)} rounds, {_in_words(self.history[-1])})"


def train(
    method: Method,
    federation: FederatedData,
    build: Callable[[], Net] | nn.Module,
    *,
    rounds: int,
    clients_per_round: int | None = None,
    seed: int = 0,
    workers: int = 1,
    device: str = "cpu",
    precision: str = "float32",
    evaluate_every: int = 1,
    stack: int = 1,
    min_answers: int = 1,
    deadline: float | None = None,
    exchange: Exchange = PLAIN,
    progress: bool = False,
) -> Result:
    """Train a method on a federation, from the weights that `build` gives, with evaluations on the way.

    `build` returns a fresh Net at every call; or it is a net, which is copied. With one worker it may be any callable.
    With more it must be importable, because it is sent to other processes. `min_answers`: the run stops if a round has
    fewer accepted answers.
    `deadline`: seconds after which a worker that has not answered counts as hung; ignored with one worker.
    `device`: cpu; cuda for all GPUs, cuda:0 for the first; auto for GPUs if there are any. Workers take turns on them.
    `precision`: float32, or bfloat16 for an encoder that multiplies in it.
    `stack`: train this many clients of equal size as one, if the method and the net allow it. This is fast for small
    nets; results agree to rounding, not bit for bit.
    `progress`: print a line per round on standard error.
    """
    history = History()
    with Training(
        method,
        federation,
        build,
        rounds=rounds,
        clients_per_round=clients_per_round,
        seed=seed,
        workers=workers,
        device=device,
        precision=precision,
        evaluate_every=evaluate_every,
        stack=stack,
        min_answers=min_answers,
        deadline=deadline,
        exchange=exchange,
    ) as training:
        for step in training.steps():
            history.append(step.record)
            if progress:
                print(f"round {step.state.round}/{rounds}  {_in_words(step.record)}", file=sys.stderr, flush=True)
        return Result(step.state.server, training.net(step.state.server["model"]), history)


def _in_words(record: Mapping[str, Any]) -> str:
    """The main figures of a round in one line."""
    figures = {name: record["test"][name] for name in ("accuracy", "tail")} if "test" in record else {}
    words = [f"{name} {100 * value:.1f} %" for name, value in figures.items() if value is not None]
    return ", ".join(words) or "not evaluated"


def check_net(net: object, federation: FederatedData) -> None:
    """Raise ConfigError if `build` does not give an encoder with a linear classifier that fits the data."""
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
            raise DataError(f"the {name} set is empty; evaluation needs examples")
    try:
        with torch.no_grad():
            z: Tensor = net.eval()(federation.sample(net.classifier.weight.dtype))
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"the net does not take inputs of shape {federation.input_shape}: {reason}") from error
    if z.shape != (2, federation.num_classes):
        raise ConfigError(f"the net's outputs have shape {tuple(z.shape[1:])}; it must give one number for each class")


def check_fresh(net: Net, other: Net) -> None:
    """Raise ConfigError if two nets of `build` share memory: training one would change the other."""
    places = {t.data_ptr() for t in net.state_dict().values() if t.numel()}
    if any(t.data_ptr() in places for t in other.state_dict().values() if t.numel()):
        raise ConfigError("build() returned the same net twice; it must make a new one at every call")


def check_precision(precision: str, stack: int) -> None:
    if precision not in ("float32", "bfloat16"):
        raise ConfigError(f"precision is '{precision}'; choose float32 or bfloat16")
    if precision == "bfloat16" and stack > 1:
        raise ConfigError("precision bfloat16 does not go with a stack of clients; choose one of the two")
