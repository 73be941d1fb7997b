"""Requests to the local SuperLink through the `flwr` command. Every wait has a deadline."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

import tomli_w

from redgrape.deploy.processes.launch import END
from redgrape.deploy.processes.supervision import environment
from redgrape.deploy.setup.folder import Deployment, address, is_everywhere
from redgrape.errors import RedgrapeError, StorageError
from redgrape.runs import durable

NAME = "redgrape"  # the connection's name in Flower's configuration
COMMAND_DEADLINE = 60.0  # seconds
START_DEADLINE = 90.0


class Link:
    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        bind = deployment.options.bind
        self.host = "127.0.0.1" if is_everywhere(bind) else bind  # from this machine

    def write_connection(self, **more: Any) -> None:
        """Tell the `flwr` command where the SuperLink is."""
        options, home = self._deployment.options, self._deployment.flower_home
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        connection: dict[str, Any] = {"address": address(self.host, options.port)}
        if options.plain:
            connection["insecure"] = True
        else:
            connection["root-certificates"] = str(self._deployment.server / "ca.crt")
        settings = {"superlink": {"default": NAME, NAME: {**connection, **more}}}
        (home / "config.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")

    def is_up(self) -> bool:
        """Whether a SuperLink answers at the deployment's address, with its certificate."""
        options = self._deployment.options
        connection: HTTPConnection
        if options.plain:
            connection = HTTPConnection(self.host, options.port, timeout=3)
        else:
            context = ssl.create_default_context(cafile=str(self._deployment.server / "ca.crt"))
            connection = HTTPSConnection(self.host, options.port, timeout=3, context=context)
        try:
            connection.request("GET", "/health/ready")
            connection.getresponse().read()
            return True
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def sites(self) -> dict[str, str]:
        """The status of each registered site. Flower lists nodes without their names, so the names are kept here."""
        listed = self._ask("supernode", "list", NAME).get("nodes", [])
        status = {str(node.get("node-id")): str(node.get("status")) for node in listed}
        return {name: status[node] for name, node in self._registered().items() if node in status}

    def register(self, keys: Mapping[str, Path]) -> None:
        """Register the sites' keys."""
        commands = [["supernode", "register", str(key), NAME, "--name", name] for name, key in keys.items()]
        nodes = [str(answer["node-id"]) for answer in self._ask_all(commands)]
        durable.replace_file(self._nodes, json.dumps(dict(zip(keys, nodes, strict=True))).encode())

    @property
    def _nodes(self) -> Path:
        return self._deployment.server / "nodes.json"

    def _registered(self) -> dict[str, str]:
        """Flower's node number for each registered site."""
        try:
            return {str(name): str(node) for name, node in json.loads(self._nodes.read_text(encoding="utf-8")).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError) as error:
            raise StorageError(
                f"'{self._nodes}' cannot be read ({error}); start the server again, which makes it anew"
            ) from error

    def start(self, settings: Mapping[str, str], *more: str) -> str:
        """Start the app and return the id of Flower's run."""
        pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        answer = self._ask("run", str(self._deployment.path / "app"), NAME, "-c", pairs, *more)
        return str(answer["run-id"])

    def status(self, run: str) -> str:
        """Flower's status of a run; empty if Flower does not know the run."""
        runs = self._ask("list", NAME, "--run-id", run).get("runs", [])
        return str(runs[0].get("status", "")) if runs else ""

    def stop(self, run: str) -> None:
        self._ask("stop", run, NAME)

    def _ask(self, *words: str) -> dict[str, Any]:
        return self._ask_all([list(words)])[0]

    def _ask_all(self, commands: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """The answer to each command; RedgrapeError if one fails or there is no answer in time."""
        if not commands:
            return []
        try:
            done = subprocess.run(  # the command is ours
                [sys.executable, "-m", "redgrape.deploy.processes.launch", "commands"],
                input=json.dumps([[*words, "--format", "json"] for words in commands]).encode(),
                env=environment(self._deployment.flower_home),
                cwd=self._deployment.path,
                capture_output=True,
                timeout=COMMAND_DEADLINE,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            words = " ".join(commands[0][:2])
            raise RedgrapeError(f"`flwr {words}` gave no answer within {COMMAND_DEADLINE:g} seconds") from error
        said = done.stdout.decode(errors="replace").split(END)[:-1]
        if len(said) != len(commands):
            words = " ".join(done.stderr.decode(errors="replace").split())[-300:]
            raise RedgrapeError(f"`flwr {commands[0][0]}` ended with code {done.returncode}: {words}")
        return [_understood(words, text) for words, text in zip(commands, said, strict=True)]


def _understood(words: Sequence[str], text: str) -> dict[str, Any]:
    """A command's answer, which may follow other output."""
    try:
        answer = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except ValueError:
        answer = {"error-message": text}
    if not isinstance(answer, dict) or not answer.get("success", False):
        reason = " ".join(str(answer.get("error-message", text)).split())[-300:]
        raise RedgrapeError(f"`flwr {' '.join(words[:2])}` failed: {reason}")
    return answer


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= ends:
            return False
        time.sleep(0.2)
    return True
