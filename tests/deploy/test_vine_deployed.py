"""Three sites by nothing but defaults: vine by secure sums, on a real SuperLink and SuperNodes with TLS; minutes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from deployments import CLASSES, SITES, Federated, Local, sent_by_sites, still_there, wait_for

from redgrape.deploy.setup.folder import Deployment, SiteFolder
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


def test_defaults_train_vine_by_secure_sums(tmp_path: Path, tally: Callable[..., None]) -> None:
    """Evaluated at the sites too, in secure sums. Then a run in which a site, the server's process and the whole server
    are killed, and a site comes back without its states."""
    federated = Federated(tmp_path / "data")
    with Local(tmp_path, federated, *DESCRIBED) as deployment:
        assert Deployment(deployment.path).options.secure_aggregation
        policies = [SiteFolder(deployment.path / "sites" / name).options for name in SITES]
        assert all(policy.secure_aggregation and not policy.class_rows for policy in policies)
        deployment.start()
        deployment.run("whole", "--rounds", 3)
        assert deployment.folder("whole").experiment().method.name == "vine"
        assert deployment.folder("whole").environment()["secure_aggregation"] is True
        records = deployment.metrics("whole")
        assert [record["answered"] for record in records] == [[0, 1, 2]] * 3
        assert "test" in records[-1]
        assert _difference(deployment, "whole") <= _bound(records)
        tally("vine by secure sums from defaults alone", 1, 1)

        text = deployment.run("rows", "--rounds", 1, "--method", "redgrape", code=2)
        assert "class_rows is false" in text and text.count("redgrape: ") == 1
        deployment.set(class_rows=True)  # by the operator alone
        text = deployment.run("rows", "--rounds", 1, "--method", "redgrape", "-c", "exchange.preset=private", code=4)
        assert "site 'north' refuses: this site's policy (site.toml) does not allow the experiment" in text
        deployment.sites["north"].says("REFUSED: this site's policy")
        deployment.set(class_rows=False)
        tally("a site refuses what its policy does not allow", 1, 1)

        words = ["--rounds", 14, "-c", "checkpoint_every=2"]
        run = deployment.begin_run("killed", *words)
        began = lambda: deployment.journal().get("run") == "killed"  # noqa: E731
        wait_for(lambda: began() and _round(deployment) >= 2, "two rounds", 600)
        deployment.sites["west"].kill_all()
        deployment.start_site("west")
        wait_for(lambda: _round(deployment) >= 5, "rounds with it", 600)
        os.kill(deployment.journal()["pid"], signal.SIGKILL)  # the server's part; the command goes on by itself
        wait_for(lambda: "going on after round" in run.text(), "the command to notice", 600)
        wait_for(lambda: _round(deployment) >= 7, "rounds after it", 600)
        assert deployment.server is not None
        deployment.server.kill_all()
        assert run.process.wait(timeout=600) != 0
        deployment.sites["south"].kill_all()
        shutil.rmtree(deployment.path / "sites/south/states")
        deployment.start_server()
        deployment.start_site("south")
        text = deployment.run("killed", *words)
        records = deployment.metrics("killed")
        assert len(records) == 14 and records[-1]["answered"] == [0, 1, 2], deployment.words()
        assert sum("states_lost" in record for record in records) == 1
        assert "all sites' states started anew, because site 'south' had lost its own" in text
        assert _difference(deployment, "killed") <= _bound(records)
        tally("G is the sum of the sites' states after kills and a lost state", 1, 1)
    assert not still_there(tmp_path)
