"""Vine's G at the server is the sum over the sites of what each says that it has sent, whoever is killed and when. The
sites run in this process; test_vine_deployed.py kills real ones."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from deployments import SITES, Federated, sent_by_sites
from flwr.app import Error, Message
from test_deploy_parts import FakeGrid, options

from redgrape import tree
from redgrape.deploy.processes.deployed_run import at_sites
from redgrape.deploy.protocol import asking, wire
from redgrape.deploy.protocol.site import DeployedSite
from redgrape.deploy.protocol.site_states import SiteStates, StateMissing
from redgrape.deploy.setup.create import create, deployed
from redgrape.deploy.setup.folder import Deployment, SiteFolder
from redgrape.errors import TooFewClients
from redgrape.exchange import fixed_point
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run

ROUNDS = 6


class ServerKilled(Exception):
    pass


class Faulty(FakeGrid):
    """Sites and a server that fail when `fault` says so, by what it returns for a question to a node:

    lost        the site is killed before it does anything
    unsent      the site is killed when it has answered, and the answer is lost with it
    server      the server is killed when the site has answered
    forgets     the site is killed, and its states are gone when it is back
    backup      the site is killed, and has the states of its last backup when it is back
    """

    def __init__(
        self, deployment: Deployment, federated: Federated, fault: Callable[[int, dict[str, Any]], str]
    ) -> None:
        self.deployment, self.federated, self.fault = deployment, federated, fault
        self.broadcasts: dict[tuple[int, int], bytes] = {}  # what a site last trained on, by site and round
        self.faults: list[str] = []
        super().__init__(deployment, [self.start(k) for k in range(len(SITES))])

    def start(self, k: int) -> DeployedSite:
        return DeployedSite(SiteFolder(self.deployment.site(SITES[k])), self.federated.data(SITES[k]))

    def states(self, k: int) -> Path:
        return self.deployment.site(SITES[k]) / "states"

    def back_up(self) -> None:
        for k in range(len(SITES)):
            if self.states(k).exists():
                shutil.copytree(self.states(k), self.states(k).with_name("backup"), dirs_exist_ok=True)

    def push_messages(self, messages: list[Any]) -> list[str]:
        numbers, killed = [], False
        for message in messages:
            node, number = message.metadata.dst_node_id, f"m{len(self.kinds)}"
            header, parts = wire.unpack(message.content)
            self.kinds.append((node, header["kind"]))
            k, what = node - 100, "" if header["kind"] == "join" else self.fault(node - 100, header)
            self.faults += [what] if what else []
            message.metadata.__dict__["_message_id"] = number
            if "broadcast" in parts:
                self.broadcasts[k, header["round"]] = parts["broadcast"]
            answer = None if what in ("lost", "forgets", "backup") else self.sites[node].answer(header, parts)
            if what in ("forgets", "backup"):
                shutil.rmtree(self.states(k), ignore_errors=True)
                if what == "backup" and self.states(k).with_name("backup").exists():
                    shutil.copytree(self.states(k).with_name("backup"), self.states(k))
            if what and what != "server":
                self.sites[node] = self.start(k)
            killed = killed or what == "server"
            content = Error(0, "gone") if answer is None or what else wire.pack(*answer)
            self._answers[number] = Message(content, reply_to=message)
            numbers.append(number)
        if killed:
            raise ServerKilled
        return numbers


def _attempt(deployment: Deployment, grid: Faulty, **changes: Any) -> tuple[RunFolder, list[str]]:
    values = {
        "seed": 5,
        "rounds": ROUNDS,
        "checkpoint_every": 2,
        "min_answers": 2,
        "net": {"name": "linear"},
        "method": {"name": "vine", "batch_size": 8},
    }
    experiment = deployed(Experiment.parse(values | changes), deployment.options)
    path, said = deployment.path / "runs/a", list[str]()
    folder = RunFolder.open(path) if path.exists() else RunFolder.create(path, experiment)
    venue = at_sites(folder, deployment, grid, said.append, authenticated=True)  # type: ignore[arg-type]
    for step in Run(folder, workers=1, venue=venue).steps():
        if step.state.round == 2:
            grid.back_up()
    return folder, said


def _until_done(deployment: Deployment, grid: Faulty) -> tuple[RunFolder, list[str]]:
    said: list[str] = []
    for _ in range(60):
        try:
            folder, more = _attempt(deployment, grid)
        except (ServerKilled, TooFewClients):
            continue
        return folder, said + more
    raise AssertionError("the run does not end")


def _difference(deployment: Deployment, folder: RunFolder) -> float:
    """How far G is from what the sites say that they have sent."""
    state, _ = folder.checkpoints.latest()
    assert state is not None
    sent = sent_by_sites(deployment.path, folder)
    return max(float((state.server["G"][name] - total).abs().max()) for name, total in sent.items())


def _assert_latest(deployment: Deployment, folder: RunFolder, grid: Faulty) -> None:
    """What a site says that it has sent is its M_k at the model of its last accepted round, computed here again."""
    state, _ = folder.checkpoints.latest()
    assert state is not None
    for k, named in state.clients.items():
        round, key = int(named["round"]), int(named["key"])
        sent = SiteStates(grid.states(k)).load(folder.environment()["run"], round, key)["sent"]
        half = grid.start(k)._client_half(folder.experiment(), None)
        broadcast = tree.from_bytes(grid.broadcasts[k, round])
        latest = half.run(k, broadcast, None, round).update["gradient"]  # a client without a state sends M_k itself
        for name, M_k in latest.items():
            torch.testing.assert_close(sent[name], M_k.double(), rtol=1e-5, atol=1e-6, msg=f"{k} {name}")


@pytest.fixture(params=[True, False], ids=["secure", "alone"])
def deployment(request: pytest.FixtureRequest, tmp_path: Path, federated: Federated) -> Deployment:
    values = {"min_count": 1, "min_clients": 1, "secure_aggregation": request.param, "class_rows": not request.param}
    create(tmp_path / "d", options(test=str(federated.folder / "test.npz"), **values))
    return Deployment(tmp_path / "d")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "NODES", 0.0)


def _bound(deployment: Deployment) -> float:
    """A secure sum is rounded in every round, on top of the rounding of float64."""
    return ROUNDS * fixed_point.error_of_sum(len(SITES)) if deployment.options.secure_aggregation else 1e-12


@pytest.mark.parametrize("seed", range(2))
def test_g_is_the_sum_of_the_sites_whoever_is_killed(deployment: Deployment, federated: Federated, seed: int) -> None:
    stream, often = random.Random(seed), 0.2 if deployment.options.secure_aggregation else 0.4
    kinds = ["lost", "unsent", "server", "forgets", "backup"]

    def fault(k: int, header: dict[str, Any]) -> str:
        trains = "train" in (header["kind"], header.get("of")) and header["round"] <= ROUNDS - 2
        return stream.choice(kinds) if trains and len(grid.faults) < 8 and stream.random() < often else ""

    grid = Faulty(deployment, federated, fault)
    folder, _ = _until_done(deployment, grid)
    assert len(grid.faults) >= 4 and len(folder.metrics()) == ROUNDS, grid.faults
    assert _difference(deployment, folder) <= _bound(deployment)
    _assert_latest(deployment, folder, grid)


@pytest.mark.parametrize("what", ["forgets", "backup"])
def test_a_site_without_its_state_starts_all_states_anew(
    deployment: Deployment, federated: Federated, what: str
) -> None:
    """The run goes on without a person's help, G is right again after that round, and the operator is told."""
    done: list[int] = []

    def fault(k: int, header: dict[str, Any]) -> str:
        if (k, header["round"]) == (1, 5) and not done and header.get("stage", "keys") == "keys":
            done.append(k)
            return what
        return ""

    grid = Faulty(deployment, federated, fault)
    folder, said = _until_done(deployment, grid)
    assert done and _difference(deployment, folder) <= _bound(deployment)
    _assert_latest(deployment, folder, grid)
    anew = [record["round"] for record in folder.metrics() if "states_lost" in record]
    assert len(anew) == 1 and anew[0] in (5, 6), folder.metrics()
    assert any("site 'south' answers: this site does not have its state of round " in line for line in said), said
    assert f"round {anew[0]}: all sites' states started anew, because site 'south' had lost its own" in said
    assert all(len(record["answered"]) >= 2 for record in folder.metrics())


def test_scaffold_starts_anew_too(deployment: Deployment, federated: Federated) -> None:
    """c at the server is the mean over all sites of their c_i."""

    def fault(k: int, header: dict[str, Any]) -> str:
        first = (k, header["round"]) == (1, 3) and "forgets" not in grid.faults
        return "forgets" if first and header.get("stage", "keys") == "keys" else ""

    grid = Faulty(deployment, federated, fault)
    folder, _ = _attempt(deployment, grid, rounds=4, method={"name": "scaffold", "batch_size": 8})
    assert sum("states_lost" in record for record in folder.metrics()) == 1
    state, _ = folder.checkpoints.latest()
    assert state is not None and set(state.clients) == {0, 1, 2}
    sent = sent_by_sites(deployment.path, folder, "c_i")
    for name, c in state.server["c"].items():
        torch.testing.assert_close(c, sent[name] / len(SITES), rtol=1e-5, atol=1e-6)


def test_g_would_be_wrong_if_a_site_silently_began_anew(deployment: Deployment, federated: Federated) -> None:
    """The same loss without the check: what the tests above look for is there to be found."""
    grid = Faulty(deployment, federated, lambda k, header: "")

    class Careless(DeployedSite):
        def _state(self, question: Any) -> Any:
            return None if question.round == 5 else super()._state(question)

    grid.sites[101] = Careless(SiteFolder(deployment.site(SITES[1])), federated.data(SITES[1]))
    folder, _ = _attempt(deployment, grid)
    assert _difference(deployment, folder) > 1e-3


def test_a_method_that_cannot_begin_anew_leaves_the_site_out(deployment: Deployment, federated: Federated) -> None:
    def fault(k: int, header: dict[str, Any]) -> str:
        first = (k, header["round"]) == (1, 3) and "forgets" not in grid.faults
        return "forgets" if first and header.get("stage", "keys") == "keys" else ""

    grid = Faulty(deployment, federated, fault)
    changes = {"method": {"name": "feddyn", "batch_size": 8}, "rounds": 4}
    if deployment.options.secure_aggregation:  # the two others are too few
        with pytest.raises(TooFewClients, match="there is no sum: 2 sites gave their keys, and 3 are needed"):
            _attempt(deployment, grid, **changes)
        return
    folder, said = _attempt(deployment, grid, **changes)
    assert [record["answered"] for record in folder.metrics()] == [[0, 1, 2], [0, 1, 2], [0, 2], [0, 2]]
    assert any("site 'south' was not there: site 'south' answers: this site does not have" in line for line in said)


def test_no_sum_is_made_without_a_site_that_lost_its_state(tmp_path: Path, federated: Federated) -> None:
    """The server would subtract it from the sum over all that follows, and have what that site added alone."""
    policy = {"secure_aggregation": True, "class_rows": False, "min_clients": 1}
    create(tmp_path / "d", options(test=str(federated.folder / "test.npz"), **policy))
    deployment = Deployment(tmp_path / "d")
    stages: list[tuple[int, int, str, bool]] = []

    def fault(k: int, header: dict[str, Any]) -> str:
        if header["kind"] == "sum" and header["of"] == "train":
            stages.append((header["round"], k, header["stage"], "state" in header))
        return ""

    grid = Faulty(deployment, federated, fault)
    _attempt(deployment, grid, rounds=2)
    shutil.rmtree(grid.states(2))
    folder = RunFolder.open(deployment.path / "runs/a")
    folder.write_experiment(folder.experiment().with_rounds(3))
    _attempt(deployment, grid)
    third = [(stage, named) for round, _, stage, named in stages if round == 3]
    assert {named for stage, named in third if stage == "masked"} == {False}
    assert sum(stage == "masked" for stage, _ in third) == len(SITES)
    assert ("keys", True) in third


def test_a_site_that_has_a_state_of_another_attempt_says_so(tmp_path: Path) -> None:
    """The server was killed in round 5, made it again, and counts on the second attempt; the site has the first."""
    states = SiteStates(tmp_path)
    run = "0123456789abcdef"
    first = states.save(run, 5, {"sent": torch.ones(2)}, reach=3, start=None)
    backup = (tmp_path / run / "round-000005").read_bytes()
    second = states.save(run, 5, {"sent": torch.zeros(2)}, reach=3, start=None)
    assert first != second
    assert states.load(run, 5, second)["sent"].tolist() == [0.0, 0.0]
    (tmp_path / run / "round-000005").write_bytes(backup)
    with pytest.raises(StateMissing, match="not the one that the server counted"):
        states.load(run, 5, second)
