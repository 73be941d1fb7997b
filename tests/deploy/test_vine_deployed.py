"""Three sites by nothing but defaults: vine by secure sums, on a real SuperLink and SuperNodes with TLS; minutes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("flwr")

from deployments import CLASSES, SITES, Federated, Local, sent_by_sites, still_there, wait_for

from redgrape.deploy.setup.folder import SiteFolder
from redgrape.exchange import fixed_point

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DESCRIBED = ["--classes", ",".join(CLASSES), "--shape", "6", "--input", "float"]


def _round(deployment: Local) -> int:
    return int(deployment.journal().get("round", 0))


def _difference(deployment: Local, name: str) -> float:
    """How far G is from what the sites' own states say that they have sent."""
    sent = sent_by_sites(deployment.path, deployment.folder(name))
    G = deployment.server_state(name)["G"]
    return max(float((G[key] - total).abs().max()) for key, total in sent.items())


def _bound(records: list[dict[str, Any]]) -> float:
    return len(records) * fixed_point.error_of_sum(len(SITES))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """What `deploy init` writes for three sites, from their names and the format of their data."""
    folder = tmp_path_factory.mktemp("defaults")
    with Local(folder, Federated(folder / "data"), *DESCRIBED) as deployment:
        deployment.start()
        yield deployment
    assert not still_there(folder)


def test_defaults_train_vine_by_secure_sums(deployment: Local, tally: Callable[..., None]) -> None:
    """With evaluations at the sites, in secure sums too."""
    policies = [SiteFolder(deployment.path / "sites" / name).options for name in SITES]
    assert all(policy.secure_aggregation and not policy.class_rows for policy in policies)
    deployment.run("whole", "--rounds", 2)
    folder, records = deployment.folder("whole"), deployment.metrics("whole")
    assert folder.experiment().method.name == "vine" and folder.environment()["secure_aggregation"] is True
    assert [record["answered"] for record in records] == [[0, 1, 2]] * 2 and "test" in records[-1]
    assert _difference(deployment, "whole") <= _bound(records)
    tally("vine by secure sums from defaults alone", 1, 1)


def test_a_site_refuses_what_its_policy_does_not_allow(deployment: Local, tally: Callable[..., None]) -> None:
    rows = ["--rounds", 1, "--method", "redgrape", "-c", "exchange.preset=private"]
    assert "class_rows is false" in deployment.run("rows", *rows, code=2)
    deployment.set(class_rows=True)  # by the operator alone
    text = deployment.run("rows", *rows, code=4)
    assert "site 'north' refuses: this site's policy (site.toml) does not allow the experiment" in text
    for name in SITES:
        deployment.sites[name].says("REFUSED: this site's policy (site.toml) does not allow the experiment")
    deployment.set(class_rows=False)
    tally("a site refuses what its policy does not allow", 1, 1)


def test_g_is_the_sum_of_the_sites_after_kills(deployment: Local, tally: Callable[..., None]) -> None:
    """A site, the server's process and the whole server are killed, and a site comes back without its states. The first
    rounds of so many are not evaluated, which saves time."""
    words = ["--rounds", 20, "-c", "checkpoint_every=1", "-c", "evaluate_every=100"]
    run = deployment.begin_run("killed", *words)
    wait_for(lambda: deployment.journal().get("run") == "killed" and _round(deployment) >= 1, "a round", 600)
    deployment.sites["west"].kill_all()
    deployment.start_site("west")
    wait_for(lambda: _round(deployment) >= 3, "rounds with it", 600)
    os.kill(deployment.journal()["pid"], signal.SIGKILL)  # the server's part; the command goes on by itself
    wait_for(lambda: "going on after round" in run.text(), "the command to notice", 600)
    wait_for(lambda: _round(deployment) >= 4, "a round after it", 600)
    assert _difference(deployment, "killed") <= _bound(deployment.metrics("killed"))
    assert deployment.server is not None
    deployment.server.kill_all()
    assert run.process.wait(timeout=600) != 0
    deployment.sites["south"].kill_all()
    shutil.rmtree(deployment.path / "sites/south/states")
    deployment.start_server()
    deployment.start_site("south")
    run = deployment.begin_run("killed", *words)
    wait_for(lambda: "had lost its own" in run.text(), "the states to start anew", 600)
    anew = _round(deployment)
    wait_for(lambda: _round(deployment) > anew, "a round after it", 600)
    assert run.end(signal.SIGINT) == 130
    records = deployment.metrics("killed")
    assert [record["round"] for record in records if "states_lost" in record] == [anew]
    assert "all sites' states started anew, because site 'south' had lost its own" in run.text()
    state, _ = deployment.folder("killed").checkpoints.latest()
    assert state is not None and set(state.clients) == {0, 1, 2}
    assert _difference(deployment, "killed") <= _bound(records)
    tally("G is the sum of the sites' states after kills and a lost state", 1, 1)
