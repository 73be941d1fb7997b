"""What must hold of deployments, each on real SuperLinks and SuperNodes with TLS and node authentication; minutes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from deployments import OPEN, SITES, Federated, Local, Running, locally, still_there, wait_for

from redgrape import tree
from redgrape.engines import Answer, Lost
from redgrape.engines.in_process import InProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SMALL = ["-c", "net.name='mlp'", "-c", "method.lr=0.1", "-c", "method.batch_size=8", "-c", "seed=5"]
METHODS = ["redgrape", "scaffold", "climb", "creff"]
CHEAP = {"creff": ["-c", "method.match_steps=20", "-c", "method.retrain_epochs=5"]}


@pytest.fixture(scope="module")
def federated(tmp_path_factory: pytest.TempPathFactory) -> Federated:
    return Federated(tmp_path_factory.mktemp("data"))


def _deployment(folder: Path, federated: Federated, *flags: object) -> Local:
    return Local(folder, federated, *OPEN, "--test", federated.folder / "test.npz", *flags)


@pytest.mark.parametrize("limits", ["lowest", "defaults"])
def test_five_rounds_of_each_method_have_the_bits_of_the_local_engine(
    tmp_path: Path, federated: Federated, limits: str, tally: Callable[..., None]
) -> None:
    flags = ["--min-count", "1", "--min-clients", "1"] if limits == "lowest" else []
    with _deployment(tmp_path, federated, *flags) as deployment:
        deployment.start()
        equal = {}
        for method in METHODS:
            options = [*SMALL, "--rounds", 5, "--method", method, *CHEAP.get(method, [])]
            deployment.run(method, *options)
            equal[method] = tree.equal(deployment.server_state(method), deployment.locally(method))
            assert all(len(record["answered"]) == 3 for record in deployment.metrics(method)), deployment.words()
        tally(f"a deployment's bits are the local engine's, limits {limits}", len(equal), sum(equal.values()))
        assert all(equal.values()), equal
    assert not still_there(tmp_path)


def test_models_are_evaluated_at_the_sites_where_the_server_has_no_test_set(
    tmp_path: Path, federated: Federated
) -> None:
    words = [*OPEN, "--like", federated.folder / "test.npz"]
    with Local(tmp_path, federated, *words) as deployment:
        deployment.start()
        deployment.run("a", *SMALL, "--rounds", 2)
        tested = [(n, min(max(1, round(0.2 * n)), n // 2)) for row in _sizes(federated) for n in row]
        told = [held_out for n, held_out in tested if n - held_out >= 8]  # the floor, by what is left for training
        summary = deployment.folder("a").summary()
        assert summary is not None
        assert sum(map(sum, summary["confusion"])) == sum(told)
        environment = deployment.folder("a").environment()
        assert environment["class_counts"] is None and environment["client_counts"] is None
        assert not (deployment.path / "runs/a/partition.safetensors").exists()
        assert "overall" in deployment.command("show", deployment.path / "runs/a")
        deployment.command("report", deployment.path / "runs/a", "--out", tmp_path / "report.html")
        deployment.command("export", deployment.path / "runs/a", tmp_path / "model")
        deployment.command("evaluate", tmp_path / "model", federated.folder / "test.npz")


def _sizes(federated: Federated) -> list[list[int]]:
    return [[int((y == c).sum()) for c in range(4)] for _, y in federated.clients]


class Absent:
    """The local engine without some clients in some rounds."""

    def __init__(self, inner: InProcess, away: Mapping[int, set[int]]) -> None:
        self._inner, self._away = inner, away

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run_clients(self, broadcast: Any, clients: Any, states: Any, round: int) -> Iterator[tuple[int, Answer | Lost]]:
        here = [k for k in clients if k not in self._away.get(round, set())]
        return self._inner.run_clients(broadcast, here, states, round)


def _locally_without(deployment: Local, name: str, away: Mapping[int, set[int]]) -> Any:
    experiment = deployment.folder(name).experiment()
    return locally(experiment, deployment.federated, engine=lambda half: Absent(InProcess(half), away))


def _away(deployment: Local, name: str) -> dict[int, set[int]]:
    return {r["round"]: set(r["clients"]) - set(r["answered"]) for r in deployment.metrics(name)}


def _resident_of(site: Running) -> int:
    def found() -> int | None:
        from deployments import family

        for pid in family(site.process.pid):
            if b"redgrape.deploy.processes.resident" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        return None

    return int(wait_for(found, "a resident process"))


def _round(deployment: Local) -> int:
    return int(deployment.journal().get("round", 0))


def test_a_late_answer_is_discarded(tmp_path: Path, federated: Federated, tally: Callable[..., None]) -> None:
    with _deployment(tmp_path, federated) as deployment:
        deployment.set(deadlines__round=12)
        deployment.start()
        run = deployment.begin_run("late", *SMALL, "--rounds", 8, "--method", "scaffold")
        wait_for(lambda: _round(deployment) >= 2, "two rounds")
        slow = _resident_of(deployment.sites["west"])
        os.kill(slow, signal.SIGSTOP)
        stopped_in = _round(deployment)
        wait_for(lambda: _round(deployment) > stopped_in + 1, "a round without it")
        os.kill(slow, signal.SIGCONT)
        assert run.process.wait(timeout=300) == 0, run.text() + deployment.words()
        away = _away(deployment, "late")
        assert any(2 in missing for missing in away.values())
        assert away[8] == set(), "the site is back"
        same = tree.equal(deployment.server_state("late"), _locally_without(deployment, "late", away))
        tally("a straggler's late answer is discarded, bits as without it", 1, int(same))
        assert same


KILLS = int(os.environ.get("REDGRAPE_DEPLOY_KILLS", "20"))


def test_a_site_that_is_killed_rejoins_with_its_key(
    tmp_path: Path, federated: Federated, tally: Callable[..., None]
) -> None:
    with _deployment(tmp_path, federated) as deployment:
        deployment.set(deadlines__round=40)
        deployment.start()
        run = deployment.begin_run("killed", *SMALL, "--rounds", 2000, "--method", "scaffold")
        wait_for(lambda: _round(deployment) >= 1, "a round")
        back = 0
        for i in range(KILLS):
            name = SITES[i % 3]
            deployment.sites[name].kill_all()
            begun = _round(deployment)
            wait_for(lambda begun=begun: _round(deployment) > begun + 1, "rounds without it")
            deployment.start_site(name)
            k = i % 3

            def takes_part(k: int = k, begun: int = begun) -> bool:
                last = deployment.metrics("killed")[-1]
                return last["round"] > begun + 1 and k in last["answered"]

            wait_for(takes_part, f"site {name} to be back", 240)
            back += 1
        assert run.process.poll() is None, run.text()
        deployment.command("deploy", "status", deployment.path)
        run.end()
        away = _away(deployment, "killed")
        assert sum(1 for missing in away.values() if missing) >= KILLS, "rounds ended with the others"
        tally("a killed site rejoins with its key", KILLS, back)
    assert not still_there(tmp_path)


def test_a_killed_server_goes_on_to_the_same_bits(
    tmp_path: Path, federated: Federated, tally: Callable[..., None]
) -> None:
    with _deployment(tmp_path, federated) as deployment:
        deployment.start()
        words = [*SMALL, "--rounds", 6, "--method", "scaffold", "-c", "checkpoint_every=2"]
        run = deployment.begin_run("a", *words)
        wait_for(lambda: _round(deployment) >= 3, "three rounds")
        os.kill(deployment.journal()["pid"], signal.SIGKILL)  # the ServerApp: the command goes on by itself
        assert run.process.wait(timeout=300) == 0, run.text() + deployment.words()
        assert "going on after round" in run.text()
        alone = tree.equal(deployment.server_state("a"), deployment.locally("a"))

        run = deployment.begin_run("b", *words)
        wait_for(lambda: _round(deployment) >= 3 and deployment.journal()["run"] == "b", "three rounds")
        assert deployment.server is not None
        deployment.server.kill_all()  # the SuperLink and all: the same command goes on once it is there again
        assert run.process.wait(timeout=300) != 0
        for site in deployment.sites.values():
            site.says("not connected; trying again")  # the server is away for longer than a SuperNode tries
        deployment.start_server()
        deployment.run("b", *words)
        said = json.loads(deployment.command("deploy", "status", deployment.path, "--json"))
        assert said["sites"] == dict.fromkeys(SITES, "online") and said["run"]["state"] == "finished"
        whole = tree.equal(deployment.server_state("b"), deployment.locally("b"))
        tally("a killed server goes on to the same bits", 2, int(alone) + int(whole))
        assert alone and whole
    assert not still_there(tmp_path)


LIES = {
    "nan": "not finite",
    "shape": "it must be",
    "huge": "has length",
    "turned": "not a gradient of a cross-entropy",
    "turned weights": "not a gradient of a cross-entropy",
    "count": "'count' is",
    "garbage": "cannot be read",
    "stale": "is for round",
}


def test_a_lying_site_is_rejected_by_name_and_the_run_goes_on(
    tmp_path: Path, federated: Federated, tally: Callable[..., None]
) -> None:
    rejected = 0
    with _deployment(tmp_path, federated) as deployment:
        deployment.start_server()
        for name in ("north", "south"):
            deployment.start_site(name)
        for lie, reason in LIES.items():
            liar = deployment.start_liar("west", lie)
            name = lie.replace(" ", "-")
            text = deployment.run(name, *SMALL, "--rounds", 3, "--method", "redgrape")
            liar.end()
            records = deployment.metrics(name)
            assert [record["answered"] for record in records] == [[0, 1, 2], [0, 1], [0, 1]], (lie, records, text)
            told = [{**record["rejected"], **record["lost"]}["2"] for record in records[1:]]
            assert all(reason in words for words in told), (lie, told)
            assert "site 'west'" in text
            away = {2: {2}, 3: {2}}
            assert tree.equal(deployment.server_state(name), _locally_without(deployment, name, away)), lie
            rejected += 1
    tally("a lying site is rejected by name", len(LIES), rejected)


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, federated: Federated) -> None:
    with _deployment(tmp_path, federated) as deployment:
        deployment.start()
        run = deployment.begin_run("a", *SMALL, "--rounds", 500)
        wait_for(lambda: _round(deployment) >= 1, "a round")
        assert run.end(signal.SIGINT) == 130
        wait_for(lambda: not _is_running(deployment.journal().get("pid", 0)), "the server's part to end")
        for site in deployment.sites.values():
            assert site.end(signal.SIGINT) == 130
        assert deployment.server is not None
        assert deployment.server.end(signal.SIGTERM) == 143
        time.sleep(1)
        assert not still_there(tmp_path)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_simulation_with_ray_has_the_bits_of_the_local_engine(tmp_path: Path, federated: Federated) -> None:
    pytest.importorskip("ray")
    with _deployment(tmp_path, federated) as deployment:
        words = [*SMALL, "--rounds", 3, "--method", "scaffold", "--simulate", federated.folder]
        deployment.run("simulated", *words)
        assert tree.equal(deployment.server_state("simulated"), deployment.locally("simulated"))
    assert not still_there(tmp_path)
