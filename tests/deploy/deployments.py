"""Real deployments on this machine for tests: a SuperLink and SuperNodes, started by redgrape's own commands."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from redgrape import Examples, Federation
from redgrape.deploy.protocol.site_states import SiteStates
from redgrape.deploy.setup.create import app_hash
from redgrape.engines import Answer
from redgrape.engines.in_process import InProcess
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import RunFolder
from redgrape.runs.values import put
from redgrape.training import Training

SITES = ["north", "south", "west"]
SIZES = [[30, 12, 3, 0], [20, 0, 9, 5], [8, 16, 1, 12]]  # examples of each class at each site
CLASSES = ["ash", "beech", "cedar", "date"]
LONGEST = 150.0  # seconds that anything here may take


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], Any], what: str, seconds: float = LONGEST) -> Any:
    ends = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < ends, f"{what} did not come about within {seconds:g} seconds"
        time.sleep(0.1)
    return value


def _draw(sizes: list[int], stream: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    y = np.repeat(np.arange(len(sizes)), sizes)
    x = stream.normal(size=(len(y), 6)) + 1.5 * y[:, None]
    order = stream.permutation(len(y))
    return x[order].astype(np.float32), y[order].astype(np.int64)


class Federated:
    """Three sites' data on disk, with a test set for the server, and the same as a local federation."""

    def __init__(self, folder: Path, sizes: list[list[int]] = SIZES) -> None:
        stream = np.random.default_rng(1)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.clients = [_draw(row, stream) for row in sizes]
        self.test = _draw([10] * len(CLASSES), stream)
        for name, (x, y) in zip(SITES, self.clients, strict=False):
            np.savez(self.data(name), x=x, y=y, class_names=np.array(CLASSES))
        np.savez(folder / "test.npz", x=self.test[0], y=self.test[1], class_names=np.array(CLASSES))

    def data(self, name: str) -> Path:
        return self.folder / f"{name}.npz"

    def local(self) -> Federation:
        return Federation([Examples(x, y) for x, y in self.clients], Examples(*self.test), len(CLASSES))


class Running:
    """A command of redgrape's in a process group of its own."""

    def __init__(self, *words: object, log: Path, program: Sequence[str] = ("-m", "redgrape"), **env: str) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *program, *map(str, words)],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **env},
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def says(self, words: str) -> None:
        wait_for(lambda: words in self.text() or self.process.poll() is not None, f"'{words}'")
        assert words in self.text(), self.text()

    def end(self, number: int = signal.SIGINT) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=60)

    def kill_all(self) -> None:
        """As if the machine had lost power: the process and all that it has started."""
        for pid in [self.process.pid, *family(self.process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(timeout=30)


def family(root: int) -> list[int]:
    """The processes that this one has started, directly or not: also those that have lost their parent."""
    children: dict[int, list[int]] = {}
    marks: dict[int, bytes] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            children.setdefault(int((entry / "stat").read_text().rpartition(")")[2].split()[1]), []).append(
                int(entry.name)
            )
            found = re.search(rb"REDGRAPE_OWNED=\w+", (entry / "environ").read_bytes())
            marks[int(entry.name)] = found.group() if found else b""
        except OSError:
            continue
    family, waiting = set(), [root]
    while waiting:
        new = [pid for pid in children.get(waiting.pop(), []) if pid not in family]
        family.update(new)
        waiting += new
    own = {marks.get(pid, b"") for pid in family} - {b""}
    return sorted(family | {pid for pid, mark in marks.items() if mark in own})


def still_there(folder: Path) -> list[str]:
    """The command lines of processes that have to do with a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (entry.parent / "environ").read_bytes()
        except OSError:
            continue
        if int(entry.parent.name) != os.getpid() and (str(folder) in line or str(folder).encode() in environment):
            found.append(line)
    return found


OPEN = ["--no-secure-aggregation", "--class-rows"]  # flags of `deploy init`: sites answer alone, with any method


class Local:
    """A deployment whose server and sites are all on this machine."""

    def __init__(self, folder: Path, federated: Federated, *flags: object) -> None:
        self.path, self.federated, self.port = folder / "deployment", federated, free_port()
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True)
        self.sites: dict[str, Running] = {}
        self.server: Running | None = None
        words = ["--sites", ",".join(SITES), "--host", "localhost", "--bind", "127.0.0.1", "--port", self.port]
        self.command("deploy", "init", self.path, *words, *flags)

    def command(self, *words: object, code: int = 0, **env: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "redgrape", *map(str, words)],
            capture_output=True,
            timeout=600,
            env={**os.environ, **env},
        )
        text = done.stdout.decode() + done.stderr.decode()
        assert done.returncode == code, f"{words}: exit {done.returncode}\n{text}\n{self.words()}"
        return text

    def words(self) -> str:
        """All that the parties have written, for a failing test."""
        logs = [*self.logs.glob("*.log"), *self.path.glob("server/*.log"), *self.path.glob("sites/*/*.log")]
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(logs))

    def start_server(self) -> None:
        self.server = Running("deploy", "server", self.path, log=self.logs / "server.log")
        self.server.says("listening on")

    def start_site(self, name: str, **env: str) -> Running:
        words = ["deploy", "site", self.path / "sites" / name, "--data", self.federated.data(name)]
        self.sites[name] = Running(*words, log=self.logs / f"{name}.log", **env)
        return self.sites[name]

    def start_liar(self, name: str, lie: str) -> Running:
        words = ["site", self.path / "sites" / name, "--data", self.federated.data(name)]
        program = [str(Path(__file__).with_name("deploy_liar.py"))]
        self.sites[name] = Running(*words, log=self.logs / f"{name}.log", program=program, REDGRAPE_TEST_LIE=lie)
        return self.sites[name]

    def set(self, **changes: object) -> None:
        """Change settings of deploy.toml, such as deadlines__round=5."""
        path = self.path / "deploy.toml"
        values = tomllib.loads(path.read_text())
        for key, value in changes.items():
            put(values, key.replace("__", "."), value)
        path.write_text(tomli_w.dumps(values))

    def set_app(self, **files: str) -> None:
        """Change files of the app, which the sites are then to run."""
        for name, text in files.items():
            (self.path / f"app/redgrape_app/{name}.py").write_text(text)
        for path in self.path.glob("sites/*/site.toml"):
            values = tomllib.loads(path.read_text()) | {"app": app_hash(self.path / "app")}
            path.write_text(tomli_w.dumps(values))

    def start(self) -> Local:
        self.start_server()
        for name in SITES:
            self.start_site(name)
        return self

    def run(self, name: str, *flags: object, code: int = 0) -> str:
        return self.command("deploy", "run", self.path, "--name", name, "--quiet", *flags, code=code)

    def begin_run(self, name: str, *flags: object) -> Running:
        words = ["deploy", "run", self.path, "--name", name, "--json", *flags]
        return Running(*words, log=self.logs / f"run-{name}-{time.monotonic_ns()}.log")

    def folder(self, name: str) -> RunFolder:
        return RunFolder.open(self.path / "runs" / name)

    def server_state(self, name: str) -> Any:
        state, _ = self.folder(name).checkpoints.latest()
        assert state is not None
        return state.server

    def metrics(self, name: str) -> list[dict[str, Any]]:
        return self.folder(name).metrics()

    def journal(self) -> dict[str, Any]:
        path = self.path / "server" / "run.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def locally(self, name: str) -> Any:
        """The final server state of the same experiment on the engine of this machine."""
        return locally(self.folder(name).experiment(), self.federated)

    def close(self) -> None:
        for running in [*self.sites.values(), *([self.server] if self.server else [])]:
            if running.process.poll() is None:
                running.process.send_signal(signal.SIGTERM)
        for running in [*self.sites.values(), *([self.server] if self.server else [])]:
            try:
                running.process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                running.kill_all()

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sent_by_sites(deployment: Path, folder: RunFolder, group: str = "sent") -> dict[str, torch.Tensor]:
    """The sum over the sites of a group of their states: those that the server counts on."""
    state, _ = folder.checkpoints.latest()
    assert state is not None
    total: dict[str, torch.Tensor] = {}
    for k, named in state.clients.items():
        states = SiteStates(deployment / "sites" / SITES[k] / "states")
        sent = states.load(folder.environment()["run"], int(named["round"]), int(named["key"]))[group]
        total = {name: t + total.get(name, 0.0) for name, t in sent.items()}
    return total


def locally(experiment: Experiment, federated: Federated, **more: Any) -> Any:
    """The server's state after the same experiment without a deployment. `more`: for Training, such as an engine."""
    federation = federated.local()
    with Training(
        experiment.method.create(),
        federation,
        experiment.builder(federation),
        rounds=experiment.rounds,
        clients_per_round=experiment.clients_per_round,
        seed=experiment.seed,
        exchange=experiment.exchange,
        **more,
    ) as training:
        model = {name: t.clone() for name, t in experiment.first_model(federation).items()}
        for step in training.steps(model=model):
            server = step.state.server
    return server


class _Catching(InProcess):
    """The local engine, which keeps the updates of the first round."""

    updates: dict[int, Any]

    def run_clients(self, broadcast: Any, clients: Any, states: Any, round: int) -> Iterator[tuple[Any, Any]]:
        answers = dict(super().run_clients(broadcast, clients, states, round))
        if round == 1:
            self.updates = {k: answer.update for k, answer in answers.items() if isinstance(answer, Answer)}
        yield from answers.items()


def first_updates(experiment: Experiment, federated: Federated) -> dict[int, Any]:
    """What each site would send in the first round without secure aggregation."""
    engines: list[_Catching] = []

    def engine(half: Any) -> _Catching:
        engines.append(_Catching(half))
        return engines[0]

    locally(experiment, federated, engine=engine)
    return engines[0].updates
