"""Deployments on this machine: real SuperLink and SuperNodes, with TLS and node authentication."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deployments import OPEN, SITES, Federated, Local, still_there

from redgrape import tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUICK = ["-c", "net.name='mlp'", "-c", "method.lr=0.1", "-c", "method.batch_size=8", "-c", "seed=5"]


def test_three_sites_give_the_bits_of_the_local_engine(tmp_path: Path) -> None:
    federated = Federated(tmp_path / "data")
    with Local(tmp_path, federated, *OPEN, "--test", tmp_path / "data/test.npz") as deployment:
        deployment.start()
        deployment.run("scaffold", *QUICK, "--rounds", 2, "--method", "scaffold")
        assert tree.equal(deployment.server_state("scaffold"), deployment.locally("scaffold"))
        assert [len(record["answered"]) for record in deployment.metrics("scaffold")] == [3, 3]
        assert all(f"'{name}' has joined" in deployment.words() for name in SITES)
    assert not still_there(tmp_path)
