"""`redgrape deploy run`: submits a run to the server and follows it, or resumes it."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from redgrape.deploy.processes.superlink import Link
from redgrape.deploy.processes.supervision import identity
from redgrape.deploy.protocol import admission
from redgrape.deploy.setup.folder import FEWEST_IN_SUM, Deployment, DeployOptions
from redgrape.errors import BY_EXIT_CODE, ConfigError, RedgrapeError
from redgrape.rounds import RunState
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import RunFolder
from redgrape.training import Step

START_DEADLINE = 120.0  # seconds for the server's part to start
SILENCE = 3600.0  # seconds for the server's own work in a round, besides its waits
ATTEMPTS = 3  # times that the server's part may die before it is given up


class Died(RedgrapeError):
    """The server's part of a run ended without a message."""


def check(experiment: Experiment, options: DeployOptions) -> None:
    """Raise ConfigError for an experiment that cannot be deployed, or not with these options."""
    if experiment.data.validation:
        raise ConfigError(
            "data.validation holds examples out at the server, which has none of the sites'; leave it out"
        )
    if reason := admission.why_refused(experiment, options):
        raise ConfigError(reason)
    sites, fewest = len(options.sites), FEWEST_IN_SUM if options.secure_aggregation else 1
    asked = experiment.clients_per_round or sites
    if not experiment.min_answers <= asked <= sites:
        raise ConfigError(
            f"there are {sites} sites; {asked} are asked in a round, and {experiment.min_answers} must answer; "
            "lower clients_per_round or min_answers"
        )
    if asked < fewest:
        raise ConfigError(
            f"clients_per_round is {asked}, and a secure sum needs at least {fewest} sites; ask more, or none for all"
        )
    parts, survey = admission.crossing(experiment, options)
    single = experiment.method.create().needs_single()
    experiment.exchange.check_fits(parts, asked, single=single, surveys=bool(survey))


def lone_answers(experiment: Experiment, options: DeployOptions) -> str | None:
    """A warning if a round may consist of one site's answer. In a secure sum it cannot."""
    fewest = max(experiment.min_answers, experiment.exchange.fewest_answers())
    if options.secure_aggregation or fewest > 1:
        return None
    return (
        "min_answers is 1: if a single site answers in a round, all sites receive its change of the model as it is; "
        "set min_answers=2 or more"
    )


class Submission:
    def __init__(
        self,
        deployment: Deployment,
        link: Link,
        folder: RunFolder,
        *,
        allow_changes: bool = False,
        simulation: bool = False,
    ) -> None:
        self._deployment, self._link, self._folder = deployment, link, folder
        authenticated = not (deployment.options.plain or simulation)
        self._settings = {
            "run": folder.path.name,
            "nodes": "authenticated" if authenticated else "as they say",
            "changes": "allowed" if allow_changes else "refused",
        }
        self._more = ("--federation-config", _simulated(deployment)) if simulation else ()
        self._shown = 0  # number of the server's messages passed on
        limits = deployment.options.deadlines
        self._longest = 6 * limits.join + limits.round + 8 * limits.evaluate + SILENCE

    def carry_out(self, step: Callable[[Step], None], say: Callable[[str], None]) -> None:
        """Follow until the run is finished. If the server's part dies, it is started again and goes on."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._attempt(step, say)
                return
            except Died as error:
                if attempt == ATTEMPTS:
                    raise
                say(f"{error}; going on after round {self._folder.checkpoints.newest_round()}")

    def _attempt(self, step: Callable[[Step], None], say: Callable[[str], None]) -> None:
        ticket, self._shown = secrets.token_hex(8), 0
        run = self._link.start({"ticket": ticket, **self._settings}, *self._more)
        done = False
        try:
            self._await_begin(ticket, run)
            seen = self._folder.checkpoints.newest_round()
            before: dict[str, Any] = {}
            moved = time.monotonic()
            while not done:
                state = journal(self._deployment)
                if state != before:
                    before, moved = state, time.monotonic()
                done = state.get("state") != "running"
                gone = not done and not _runs(state)
                seen = self._pass_on(state, seen, step, say)
                if gone and journal(self._deployment).get("state") == "running":
                    done = True
                    raise Died("the server's part of the run has ended without a word")
                if not done and time.monotonic() - moved > self._longest:
                    done = True
                    self._give_up(run, say)
                time.sleep(0.2)
        finally:
            if not done:  # interrupted: do not leave a run that nobody follows
                self._link.stop(run)
        if state["state"] != "finished":
            kind = BY_EXIT_CODE.get(int(state.get("exit_code", 1)), RedgrapeError)
            raise kind(str(state.get("message", "the run has failed")))

    def _give_up(self, run: str, say: Callable[[str], None]) -> NoReturn:
        """Give up a round that takes longer than all its deadlines: it hangs."""
        try:
            self._link.stop(run)
        except RedgrapeError as error:  # the SuperLink may hang as well
            say(str(error))
        raise RedgrapeError(
            f"the server's part of the run has reported nothing for {self._longest:g} seconds and was given up; see "
            f"{self._deployment.server / 'run.log'}; the same command goes on after round "
            f"{self._folder.checkpoints.newest_round()}"
        )

    def _await_begin(self, ticket: str, run: str) -> None:
        ends = time.monotonic() + START_DEADLINE
        while journal(self._deployment).get("ticket") != ticket:
            if time.monotonic() >= ends:
                status = self._link.status(run)
                raise RedgrapeError(
                    f"the server's part did not begin within {START_DEADLINE:g} seconds (Flower says '{status}'); see "
                    f"{self._deployment.server / 'superlink.log'}"
                )
            time.sleep(0.2)

    def _pass_on(
        self, state: dict[str, Any], seen: int, step: Callable[[Step], None], say: Callable[[str], None]
    ) -> int:
        said, count = state.get("said", []), int(state.get("words", 0))
        if missed := max(0, count - len(said) - self._shown):
            say(f"{missed} lines more are in {self._deployment.server / 'run.log'}")
        for words in said[max(0, self._shown + len(said) - count) :]:
            say(words)
        self._shown = count
        if int(state.get("round", 0)) > seen:
            times = {line["round"]: line for line in self._folder.times()}
            for record in self._folder.metrics():
                if seen < record["round"] <= state["round"]:
                    line = times.get(record["round"], {})
                    seconds = {name: value for name, value in line.items() if name not in ("round", "workers")}
                    step(Step(RunState(record["round"], {}), record, seconds))
            return int(state["round"])
        return seen


def journal(deployment: Deployment) -> dict[str, Any]:
    """The journal that the server's part of the newest run has written."""
    try:
        state = json.loads((deployment.server / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def is_active(deployment: Deployment) -> bool:
    state = journal(deployment)
    return state.get("state") == "running" and _runs(state)


def _runs(state: Mapping[str, Any]) -> bool:
    """Whether the process that wrote this still runs. After a reboot another process may have its number."""
    pid = int(state["pid"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    found = identity(pid)
    return not Path("/proc/self/stat").exists() or (found != "" and found == state.get("process", found))


def _simulated(deployment: Deployment) -> str:
    return f"num-supernodes={len(deployment.options.sites)} client-resources-num-cpus=1"
