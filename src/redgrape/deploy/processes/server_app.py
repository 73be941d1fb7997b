"""Flower's ServerApp: carries out a run in its folder, and records its progress in a file.

Flower discards what a ServerApp prints, and reports only that it failed. So the state of the run and its messages are
written to server/run.json, which `redgrape deploy run` follows.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from redgrape import own_code
from redgrape.deploy.processes.deployed_run import at_sites
from redgrape.deploy.processes.supervision import DEPLOYMENT, identity
from redgrape.deploy.setup.folder import Deployment
from redgrape.errors import ConfigError, RedgrapeError
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run

app = ServerApp()


KEPT = 100  # messages kept in run.json; run.log has all of them


class Journal:
    """server/run.json and server/run.log. `said` holds the latest messages; `words` counts all of them."""

    def __init__(self, deployment: Deployment, ticket: str, run: str) -> None:
        self._file, self._log = deployment.server / "run.json", deployment.server / "run.log"
        pid = os.getpid()
        self._state: dict[str, Any] = {"ticket": ticket, "run": run, "state": "running", "said": [], "words": 0}
        self.write(pid=pid, process=identity(pid))

    def say(self, words: str) -> None:
        self.write(said=[*self._state["said"], words][-KEPT:], words=self._state["words"] + 1)
        with self._log.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {words}\n")

    def write(self, **more: Any) -> None:
        self._state |= more
        temporary = self._file.with_name(".run.json.tmp")
        temporary.write_text(json.dumps(self._state), encoding="utf-8")
        temporary.replace(self._file)


@app.main()  # type: ignore[untyped-decorator]  # Flower may not be installed where types are checked
def main(grid: Grid, context: Context) -> None:
    deployment = Deployment(Path(os.environ[DEPLOYMENT]))
    settings = {key: str(value) for key, value in context.run_config.items()}
    journal = Journal(deployment, settings["ticket"], settings["run"])
    try:
        _carry_out(deployment, settings, grid, journal)
    except RedgrapeError as error:
        journal.write(state="failed", message=str(error), exit_code=error.exit_code)
        raise
    except own_code.ANYTHING as error:  # a killed process writes nothing: `redgrape deploy run` then goes on
        journal.say(traceback.format_exc())
        words = " ".join(str(error).split())[:300]
        journal.write(state="failed", message=f"{type(error).__name__}: {words}", exit_code=1)
        raise
    journal.write(state="finished")


def _carry_out(deployment: Deployment, settings: dict[str, str], grid: Grid, journal: Journal) -> None:
    name = settings["run"]
    if Path(name).name != name:
        raise ConfigError(f"'{name}' is no name of a run")
    folder = RunFolder.open(deployment.path / "runs" / name)
    venue = at_sites(folder, deployment, grid, journal.say, authenticated=settings["nodes"] == "authenticated")
    run = Run(folder, workers=1, allow_changes=settings["changes"] == "allowed", venue=venue)
    journal.say(f"run '{name}' begins after round {folder.checkpoints.newest_round()}")
    for step in run.steps():
        journal.write(round=step.state.round)
    for note in run.notes:
        journal.say(note)
