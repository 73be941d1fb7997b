"""Runs that are killed, interrupted and resumed. Called as a script with a job in JSON, it prints what became of them.

The process has everything imported and forks each victim, so that a try costs a fraction of a second. A victim calls
`redgrape run` or `redgrape resume` through redgrape.cli.main.run as a person would, in a session of its own, with
workers that a server process of its own forks. The functions that make up a run tell in a byte of shared memory when
they are at work: that is how it is known at which stage a kill landed.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import select
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch

import redgrape.cli.commands.training
from redgrape import engines
from redgrape.cli import main as cli
from redgrape.engines import in_process, pool
from redgrape.runs import checkpoints, folder, run
from redgrape.training import Training

STAGES = [
    "starting",
    "reading data",
    "starting workers",
    "training",
    "evaluating",
    "writing metrics",
    "writing checkpoint",
    "removing old files",
    "writing summary",
]
PATIENCE = 90.0  # seconds until something that should end is taken to hang; a busy disk alone takes many
SHARED = mmap.mmap(-1, 2)  # the stage, and whether the victim waits in it


class Stages:
    """Where the victim waits to be interrupted: at this stage, once it was entered so many times."""

    def __init__(self, pause_at: str = "", times: int = 1) -> None:
        self.pause_at, self.left = pause_at, times

    def enter(self, stage: str) -> None:
        SHARED[0] = STAGES.index(stage)
        if stage == self.pause_at:
            self.left -= 1
            if self.left == 0:
                SHARED[1] = 1
                time.sleep(2 * PATIENCE)


stages = Stages()


def mark(owner: Any, name: str, stage: str, afterwards: str = "") -> None:
    """Let a function tell when it is at work."""
    original = getattr(owner, name)

    def marked(*args: Any, **options: Any) -> Any:
        before = STAGES[SHARED[0]]
        stages.enter(stage)
        result = original(*args, **options)
        SHARED[0] = STAGES.index(afterwards or before)
        return result

    setattr(owner, name, marked)


def mark_all() -> None:
    mark(run, "prepare", "reading data")
    mark(engines, "create", "starting workers", afterwards="training")
    for engine in (pool.Pool, in_process.InProcess):
        mark(engine, "run_clients", "training")
        mark(engine, "evaluate", "evaluating")
    mark(folder.RunFolder, "append", "writing metrics")
    mark(folder.RunFolder, "save", "writing checkpoint")
    mark(checkpoints.Checkpoints, "_remove_unused_states", "removing old files")
    mark(folder.RunFolder, "write_summary", "writing summary")


def fork_server(self: Any) -> None:
    """ForkServer.ensure_running, with a fork in place of a new interpreter that would import all of torch again."""
    if self._forkserver_pid is not None:
        return
    address = connection.arbitrary_address("AF_UNIX")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    alive_r, alive_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept = {0, 1, 2, listener.fileno(), alive_r, resource_tracker.getfd()}
        for fd in {
            int(path.name) for path in Path("/proc/self/fd").iterdir()
        } - kept:  # as a new interpreter would have it
            with contextlib.suppress(OSError):
                os.close(fd)
        with contextlib.suppress(SystemExit):
            forkserver.main(listener.detach(), alive_r, ["redgrape.engines.fork_server"])
        os._exit(0)
    os.close(alive_r)
    listener.close()
    self._forkserver_address, self._forkserver_alive_fd, self._forkserver_pid = address, alive_w, pid


def start(arguments: list[str], log: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Fork a victim; its process id."""
    SHARED[0] = SHARED[1] = 0
    pid = os.fork()
    if pid == 0:
        os.setsid()
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        code = 99
        with contextlib.suppress(BaseException):
            prepare()
            code = cli.run([*arguments, "--quiet", "--json"])
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return pid


def wait(pid: int, seconds: float) -> int | None:
    """The exit code, negative for a signal; None while it lives."""
    fd = os.pidfd_open(pid)
    try:
        ready = select.select([fd], [], [], max(0.0, seconds))[0]
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if ready else None
    finally:
        os.close(fd)


def finish(pid: int) -> int:
    """The exit code of a victim that should end by itself."""
    code = wait(pid, 10 * PATIENCE)
    if code is None:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise TimeoutError(f"victim {pid} hangs at stage '{STAGES[SHARED[0]]}'")
    return code


def processes() -> Iterator[tuple[int, int, int]]:
    """(process, parent, session) of all that live."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, _, session, *_ = path.read_text().rpartition(")")[2].split()
            if state != "Z":
                yield int(path.parent.name), int(parent), int(session)


def orphans(session: int) -> list[int]:
    """Processes of a victim that has ended, which have PATIENCE to end too."""
    deadline = time.monotonic() + PATIENCE
    while left := [pid for pid, _, of in processes() if of == session]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.005)
    return []


def workers_of(pid: int) -> list[int]:
    """The worker processes of a victim: the children of its children."""
    found = [(p, parent) for p, parent, session in processes() if session == pid]
    return [p for p, parent in found if parent != pid and p != pid and any(parent == child for child, _ in found)]


def call(job: dict[str, Any], folder: Path, workers: int) -> list[str]:
    begun = (folder / "experiment.toml").exists()
    what = ["resume", str(folder)] if begun else ["run", job["experiment"], "--out", str(folder)]
    return [*what, "--workers", str(workers), *job.get("options", [])]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that must be equal between equal runs."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    times = found.pop("times.jsonl", b"").splitlines()
    found["rounds of times.jsonl"] = b" ".join(str(json.loads(line)["round"]).encode() for line in times)
    sums = found.pop("SHA256SUMS", b"").splitlines(keepends=True)
    found["SHA256SUMS"] = b"".join(line for line in sums if not line.endswith(b"times.jsonl\n"))
    return found


class Quiet:
    """The run that nothing disturbs, against which the others are held."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.root = Path(job["root"])
        folder = self.root / "quiet"
        begun = time.monotonic()
        assert finish(start(call(job, folder, 2), self.root / "quiet.log")) == 0, (self.root / "quiet.log").read_text()
        self.seconds = time.monotonic() - begun
        self.contents = contents(folder)

    def check(self, folder: Path) -> list[str]:
        """What differs in a run that went through something; it is removed where nothing does."""
        found = contents(folder)
        wrong = [name for name in self.contents | found if self.contents.get(name) != found.get(name)]
        if not wrong:
            shutil.rmtree(folder)
        return wrong


def kill_at_random(job: dict[str, Any], quiet: Quiet) -> dict[str, Any]:
    """SIGKILL at a random instant, resume, SIGKILL ..., until it is finished; and again, until there were enough."""
    dice = random.Random(job["seed"])
    landed: Counter[str] = Counter()
    result: dict[str, Any] = {"kills": 0, "runs": 0, "equal": 0, "orphans": 0, "wrong": []}
    expected = quiet.seconds  # follows how fast the machine is at the moment, so that kills keep landing
    while result["kills"] < job["kills"]:
        folder = quiet.root / f"run-{result['runs']}"
        log = folder.with_suffix(".log")
        code = None
        while code is None:
            begun = time.monotonic()
            pid = start(call(job, folder, 2), log)
            code = wait(pid, dice.uniform(0, expected) if result["kills"] < job["kills"] else 10 * PATIENCE)
            if code is not None:
                expected = (expected + time.monotonic() - begun) / 2
            else:
                expected *= 1.05
                os.kill(pid, signal.SIGKILL)
                stage = STAGES[SHARED[0]]
                os.waitpid(pid, 0)
                result["kills"] += 1
                landed[stage] += 1
            result["orphans"] += len(orphans(pid))
        result["runs"] += 1
        wrong = quiet.check(folder)
        result["equal"] += code == 0 and not wrong
        if code or wrong:
            result["wrong"].append([code, wrong, log.read_text()[-2000:]])
    result["stages"] = {stage: landed[stage] for stage in STAGES}
    return result


def interrupt(job: dict[str, Any], quiet: Quiet) -> list[dict[str, Any]]:
    """A signal, or two, at every stage asked for; then the run is resumed to its end."""
    results = []
    for i, (stage, number, count, workers) in enumerate(job["tries"]):
        folder = quiet.root / f"signal-{i}"

        def prepare(stage: str = stage, count: int = count) -> None:
            global stages
            stages = Stages(stage, times=2 if stage in ("training", "evaluating", "writing checkpoint") else 1)
            if count == 2:
                Training.close = lambda _: time.sleep(2 * PATIENCE)  # type: ignore[method-assign]  # to be interrupted

        pid = start(call(job, folder, workers), folder.with_suffix(".log"), prepare)
        deadline = time.monotonic() + PATIENCE
        while not SHARED[1] and time.monotonic() < deadline:
            time.sleep(0.002)
        for _ in range(count):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            time.sleep(0.1)
        code = wait(pid, PATIENCE)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        left = len(orphans(pid))
        said = folder.with_suffix(".log").read_text()
        begun = (folder / "experiment.toml").exists()
        again = finish(start(call(job, folder, 1), folder.with_suffix(".again.log")))
        results.append(
            {
                "try": [stage, number, count, workers],
                "paused": bool(SHARED[1]) or code is not None,
                "code": code,
                "said": said.splitlines(),
                "orphans": left,
                "begun": begun,
                "again": again,
                "wrong": quiet.check(folder),
            }
        )
    return results


def soak(job: dict[str, Any], quiet: Quiet) -> dict[str, Any]:
    """One long run; every few seconds a worker is killed or stopped, or the whole process is killed and resumed."""
    dice = random.Random(job["seed"])
    faults: Counter[str] = Counter()
    folder, log = quiet.root / "soak", quiet.root / "soak.log"
    code, left = None, 0
    while code is None:
        pid = start(call(job, folder, 2), log)
        while (code := wait(pid, dice.uniform(*job["every"]))) is None:
            workers = workers_of(pid)
            fault = dice.choice(["coordinator killed", *(["worker killed", "worker stopped"] if workers else [])])
            faults[fault] += 1
            if fault == "coordinator killed":
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                left += len(orphans(pid))
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(workers), signal.SIGKILL if fault == "worker killed" else signal.SIGSTOP)
    return {
        "code": code,
        "faults": dict(faults),
        "orphans": left,
        "wrong": quiet.check(folder),
        "seconds": quiet.seconds,
        "said": log.read_text()[-2000:],
    }


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    assert redgrape.cli.commands.training is not None  # imported for the victims
    mark_all()
    resource_tracker.ensure_running()
    forkserver.ForkServer.ensure_running = fork_server  # type: ignore[method-assign]
    before = set(Path("/dev/shm").iterdir())
    quiet = Quiet(job)
    kinds: dict[str, Callable[[dict[str, Any], Quiet], Any]] = {
        "kill": kill_at_random,
        "signal": interrupt,
        "soak": soak,
    }
    result = kinds[job["kind"]](job, quiet)
    shared = sorted(map(str, set(Path("/dev/shm").iterdir()) - before))
    print(json.dumps({"result": result, "shared memory": shared, "quiet seconds": quiet.seconds}))


if __name__ == "__main__":
    main()
