"""Runs clients in persistent worker processes, one thread each.

Each client goes to a free worker, the longest first. Processes exchange named tensors through memory that the
coordinator shares with each worker: the broadcast once per worker and round, a client's state to the worker that runs
it, and its answer back. A worker that dies or misses its deadline is replaced, and its client runs again; the same keys
give the same bits. A client that takes down three workers is given up for the round.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import pickle
import queue
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from redgrape import own_code
from redgrape.data.federation import ClientData, Federation
from redgrape.engines import Answer, ClientHalf, Engine, Lost, Split
from redgrape.engines.devices import near
from redgrape.engines.shared_memory import Mailbox, SharedFederation
from redgrape.errors import ConfigError, RedgrapeError, enough_memory
from redgrape.learning import evaluation, sums
from redgrape.learning.evaluation import Scores
from redgrape.method import ClientId
from redgrape.tree import Tensors, Tree

START_DEADLINE = 120.0  # seconds
LONGEST_WAIT = 1e6  # seconds; select.poll takes no more than 2.1e6
ATTEMPTS = 3  # a task is given up after taking its worker down this often
AHEAD = 8  # most tasks queued at a worker besides its current one
COPIED = "copied"  # tells a worker that its last answer, for which its outbox had no room, may be overwritten
OUTBOXES = 512 << 20  # bytes of answers kept in shared memory, over all workers, until a round ends


class Pool(Engine):
    """`deadline`: seconds after which a worker that has not answered counts as hung (None: never)."""

    def __init__(
        self,
        half: ClientHalf,
        workers: int,
        deadline: float | None = None,
        devices: list[torch.device] | None = None,
    ) -> None:
        self._needs_main = _check_importable(half)
        self._half, self._deadline, self._devices = half, deadline, devices or [half.device]
        assert isinstance(half.federation, Federation), "workers share the arrays of all clients"
        self._shared = SharedFederation(half.federation)
        self._context = _context(
            preload=[] if half.method.optimizer == "sgd" else ["torch._dynamo"]
        )  # torch.optim imports it
        self._room = OUTBOXES // workers
        self._sharing = -(-workers // len(self._devices))  # the most workers that share a device
        self._workers: list[_Worker] = []
        try:
            for i in range(workers):
                self._workers.append(self._start(i))
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _start(self, index: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        inbox, outbox = Mailbox(self._room), Mailbox(self._room)
        device = self._devices[index % len(self._devices)]  # workers take turns
        data = cast(ClientData, self._shared)  # which arrives as WorkerData
        half = replace(self._half, federation=data, device=device)
        process = self._context.Process(
            target=_serve, args=(theirs, inbox, outbox, half, self._sharing), daemon=True, name="redgrape-worker"
        )
        with uninterrupted(), contextlib.nullcontext() if self._needs_main else without_main():
            try:
                process.start()
            except OSError as error:
                if "path too long" in str(error):  # the path of the server process's socket
                    raise ConfigError(
                        f"the path of the temporary folder is too long ('{tempfile.gettempdir()}'); "
                        "set TMPDIR to a shorter one, or use --workers 1"
                    ) from error
                raise
        theirs.close()
        return _Worker(process, ours, inbox, outbox)

    def run_clients(
        self, broadcast: Tree, clients: Sequence[ClientId], states: Mapping[ClientId, Tree], round: int
    ) -> Iterator[tuple[ClientId, Answer | Lost]]:
        groups = {group[0]: group for group in self._half.groups(clients)}

        def job(first: ClientId) -> _Job:
            of_group = {str(k): states[k] for k in groups[first] if k in states}
            return _Job((groups[first], set(of_group), round), {"states": of_group})

        for first, answers in self._run("client", list(groups), job, broadcast):
            for k in groups[first]:
                if isinstance(answers, Lost):
                    yield k, answers
                else:
                    answer = answers[str(k)]
                    yield k, Answer(answer.get("update", {}), answer.get("state", {}), int(answer["round"]))

    def survey(self, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, Tree]]:
        return self._half.survey(clients)

    def evaluate(self, model: Tensors, split: Split) -> Scores:
        starts = sums.batch_starts(self._half.examples(split))
        share = -(-len(starts) // len(self._workers))  # batches per worker, rounded up
        tasks = range(0, len(starts), share)
        parts: dict[int, Tree] = {}
        for i, part in self._run("score", tasks, lambda i: _Job((split, starts[i : i + share])), model):
            if isinstance(part, Lost):
                raise RedgrapeError(f"evaluation took its worker down {ATTEMPTS} times ({part.reason})")
            parts[i] = part
        return evaluation.combine([part for _, part in sorted(parts.items())])

    def _run(
        self, kind: str, tasks: Sequence[int], job: Callable[[int], _Job], payload: Tree
    ) -> Iterator[tuple[int, Tree | Lost]]:
        """Give each task's job to a free worker and yield the answers as they come. Each worker gets `payload` once."""
        try:
            yield from self._run_all(kind, tasks, job, payload)
        except BaseException:  # also when the caller stops early
            for worker in self._workers:
                if worker.tasks:  # its answers must not be mistaken for those of later tasks, which replace it
                    worker.kill()
                    worker.tasks.clear()
            raise

    def _run_all(
        self, kind: str, tasks: Sequence[int], job: Callable[[int], _Job], payload: Tree
    ) -> Iterator[tuple[int, Tree | Lost]]:
        waiting, failures, missing = deque(tasks), dict.fromkeys(tasks, 0), len(tasks)
        fresh = set(self._workers)  # workers without the payload yet
        arrived: list[tuple[int, Tree | Lost]] = []
        while missing:
            for i in range(len(self._workers)):
                # Queue several tasks per worker while many are left, so that workers go on while this process is busy.
                # Near the end assign one by one, so that no task waits behind another.
                while waiting and len(self._workers[i].tasks) <= min(AHEAD, len(waiting) // (4 * len(self._workers))):
                    if not self._workers[i].tasks and not self._workers[i].process.is_alive():
                        fresh.add(self._replace(i))
                    worker = self._workers[i]
                    if worker.tasks and worker.is_full:
                        break
                    task = waiting.popleft()
                    worker.assign(task, self._deadline)
                    worker.send(kind, job(task), payload if worker in fresh else None)
                    fresh.discard(worker)
            yield from arrived  # only now, when no worker is idle for lack of a task
            missing -= len(arrived)
            arrived = []
            for worker in self._answering() if missing else ():
                status, value = worker.receive()
                if status == "answer":
                    arrived.append((worker.finish(self._deadline), value))
                elif status == "refused":
                    raise value
                elif status == "error":
                    raise RuntimeError(f"{kind} {worker.tasks[0]} raised an error in its worker:\n{value}")
                else:
                    task = worker.tasks[0]  # its current task; the others had not begun
                    failures[task] += 1
                    if failures[task] == ATTEMPTS:
                        arrived.append((worker.tasks.popleft(), Lost(value)))
                    waiting.extendleft(reversed(worker.tasks))
                    fresh.add(self._replace(self._workers.index(worker)))

    def _answering(self) -> list[_Worker]:
        """The busy workers that have answered, died or missed their deadline."""
        busy = [worker for worker in self._workers if worker.tasks]
        ends = [worker.ends for worker in busy if worker.ends is not None]
        timeout = min(max(0.0, min(ends) - time.monotonic()), LONGEST_WAIT) if ends else None
        ready = _wait([thing for w in busy for thing in (w.connection, w.process.sentinel)], timeout)
        return [w for w in busy if w.connection in ready or w.process.sentinel in ready or w.is_late()]

    def _replace(self, index: int) -> _Worker:
        self._workers[index].kill()
        self._workers[index] = self._start(index)
        self._workers[index].wait_until_ready()
        return self._workers[index]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []
        self._shared.close()


def _wait(things: list[Any], timeout: float | None) -> set[Any]:
    """The connections and process handles that are ready."""
    if not hasattr(select, "poll"):  # Windows
        return set(wait(things, timeout))
    poll = select.poll()  # multiprocessing's wait does the same ten times more slowly
    by_number = {thing if isinstance(thing, int) else thing.fileno(): thing for thing in things}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return {by_number[number] for number, _ in poll.poll(None if timeout is None else math.ceil(timeout * 1000))}


class _Job(NamedTuple):
    """A worker's job: a few values, and tensors."""

    details: tuple[Any, ...]
    tensors: Tree = MappingProxyType({})


@dataclass(eq=False)
class _Worker:
    process: Any
    connection: Connection[Any, Any]
    inbox: Mailbox  # the worker's
    outbox: Mailbox
    tasks: deque[int] = field(default_factory=deque)  # the first is the current one
    ends: float | None = None  # deadline of the current task, on the monotonic clock
    is_full: bool = False  # the next letter would overwrite the last

    def wait_until_ready(self) -> None:
        if not self.connection.poll(START_DEADLINE) or self.receive()[0] != "ready":
            self.kill()
            raise RedgrapeError(
                "a worker process could not start; begin your script's own work under `if __name__ == '__main__':`, "
                "define build in a module, or pass workers=1"
            )

    def assign(self, task: int, deadline: float | None) -> None:
        self.tasks.append(task)
        if len(self.tasks) == 1:
            self._begin(deadline)

    def _begin(self, deadline: float | None) -> None:
        self.ends = None if deadline is None or not self.tasks else time.monotonic() + deadline

    def finish(self, deadline: float | None) -> int:
        task = self.tasks.popleft()
        self._begin(deadline)
        return task

    def is_late(self) -> bool:
        return self.ends is not None and time.monotonic() >= self.ends

    def send(self, kind: str, job: _Job, payload: Tree | None) -> None:
        if payload is not None:
            self.inbox.clear()
        letter = self.inbox.write(job.tensors if payload is None else {**job.tensors, "payload": payload})
        self.is_full = self.inbox.is_full
        with contextlib.suppress(OSError):  # it has died; receive() reports it
            self.connection.send((kind, job.details, payload is not None, letter))

    def receive(self) -> tuple[str, Any]:
        """("ready", None), ("answer", value), ("refused", error), ("error", text) or ("lost", reason)."""
        try:
            if self.connection.poll():
                status, value = self.connection.recv()
                return status, self._read(value) if status == "answer" else value
        except (EOFError, OSError):
            pass
        if self.process.is_alive() and self.is_late():
            return "lost", "no answer within the deadline"
        self.process.join(timeout=1)
        return "lost", f"the process ended with code {self.process.exitcode}"

    def _read(self, letter: Any) -> Tree:
        answer = self.outbox.read(letter)
        if self.outbox.is_full:
            with contextlib.suppress(OSError):  # it has died after its answer
                self.connection.send(COPIED)
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join(timeout=10)
        if not self.connection.closed:
            self.connection.close()
            self.inbox.close()
            self.outbox.close()


def _context(preload: list[str]) -> Any:
    """Fork workers from a clean server process if the platform can: they start fast and inherit no threads."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["redgrape.engines.fork_server", "redgrape.engines.pool", *preload])
        return context
    return multiprocessing.get_context("spawn")


def _check_importable(half: ClientHalf) -> bool:
    """Raise ConfigError if a worker cannot import the net or the method. Return whether it needs the main script."""
    needs_main = False
    for name, thing in (("build", half.build), ("method", half.method)):
        try:
            needs_main |= b"__main__" in pickle.dumps(thing)
        except Exception as error:
            raise ConfigError(
                f"{name} cannot be sent to worker processes ({error}); "
                "define it at the top level of a module, or pass workers=1"
            ) from error
    return needs_main


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Keep a new process from running the main script again, which it does to find what is defined there. If nothing
    of it is needed, scripts without a guard, notebooks and standard input then work."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C, and hide it from processes started meanwhile: it would kill the fork server noisily."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection[Any, Any], inbox: Mailbox, outbox: Mailbox, half: ClientHalf, sharing: int) -> None:
    """The main loop of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork server installs its own handler
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive the parent
    letters: queue.SimpleQueue[Any] = queue.SimpleQueue()
    copied: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, letters, copied), daemon=True).start()
    torch.set_num_threads(1)
    half = replace(half, federation=near(half.federation, half.device, sharing))
    connection.send(("ready", None))
    payload: Any = None
    while True:
        kind, details, has_payload, letter = letters.get()
        try:
            with enough_memory():
                received = inbox.read(letter)
                if has_payload:
                    payload = received.get("payload", {})
                    outbox.clear()  # the earlier answers have been used
                if kind == "client":
                    clients, with_state, round = details
                    sent = received.get("states", {})  # an empty state leaves no trace among the tensors
                    states = {k: sent.get(str(k), {}) for k in clients if str(k) in with_state}
                    answers = half.run_group(clients, payload, states, round)
                    answer: Tree = {
                        str(k): {"update": a.update, "state": a.state, "round": torch.tensor(a.round)}
                        for k, a in zip(clients, answers, strict=True)
                    }
                else:
                    split, starts = details
                    answer = half.score(payload, split, starts)
                if outbox.is_full:
                    copied.get()
                connection.send(("answer", outbox.write(answer)))
        except RedgrapeError as error:
            connection.send(("refused", error))
        except own_code.ANYTHING:
            connection.send(("error", traceback.format_exc()))


def _receive(connection: Connection[Any, Any], letters: queue.SimpleQueue[Any], copied: queue.SimpleQueue[Any]) -> None:
    """Take every letter at once: if the coordinator waited for a busy worker, which waits for it to take an answer,
    both would wait for ever. End with the coordinator: a client may take minutes, and its answer is then useless."""
    try:
        while True:
            letter = connection.recv()
            (copied if letter == COPIED else letters).put(letter)
    finally:
        os._exit(1)
