"""A client alone and pooled data: federations of one client with the rows, the tests and the tail of the whole one."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import redgrape as rg
from redgrape.data.federation import Federation
from redgrape.errors import ConfigError
from redgrape.runs.experiment import Experiment


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Site west lacks class c, which is rare, and its ages are others."""
    rows = [f"{i % 7 + 50 * (i % 3 == 0)},{['west', 'north', 'east'][i % 3]},{'aab'[i % 3 - 1]}" for i in range(90)]
    rows += [f"{i},north,c" for i in range(6)]
    (tmp_path / "t.csv").write_text("\n".join(["age,site,kind", *rows]))
    return tmp_path / "t.csv"


def loaded(path: Path, **options: Any) -> Federation:
    return rg.data.load(str(path), label="kind", site="site", **options)


def test_pooled_is_one_client_with_the_rows_of_all(path: Path) -> None:
    whole, pooled = loaded(path), loaded(path, pooled=True)
    assert pooled.num_clients == 1 and pooled.client_names == ["all"]
    assert sorted(pooled.parts[0]) == sorted(np.concatenate(whole.parts)) and pooled.groups == whole.groups
    assert torch.equal(pooled.test.labels, whole.test.labels)
    assert pooled.columns is not None and whole.columns is not None
    ours, theirs = pooled.columns.columns[0], whole.columns.columns[0]
    assert (ours.mean, ours.std) == pytest.approx((theirs.mean, theirs.std), rel=1e-12)


def test_a_client_alone_has_its_own_rows_and_its_own_scale(path: Path) -> None:
    whole, west = loaded(path), loaded(path, alone="west")
    k = whole.client_names.index("west")
    assert west.client_names == ["west"] and west.parts[0].tolist() == whole.parts[k].tolist()
    assert west.class_counts[2] == 0 and west.groups == whole.groups and west.groups.tail == (2,)
    assert torch.equal(west.test.labels, whole.test.labels)
    x = west.client(0).inputs(torch.arange(west.size(0)), torch.float64)
    assert float(x.mean()) == pytest.approx(0, abs=1e-6) and float(x.std(correction=0)) == pytest.approx(1, rel=1e-5)


def test_clients_without_names_go_by_their_numbers(path: Path) -> None:
    options: dict[str, Any] = {"partition": "iid", "clients": 4}
    assert loaded(path, alone="3", **options).parts[0].tolist() == loaded(path, **options).parts[3].tolist()


def test_what_does_not_go_together_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown client 'wets'; did you mean 'west'"):
        loaded(path, alone="wets")
    with pytest.raises(ConfigError, match="pooled and alone='west' exclude each other"):
        loaded(path, alone="west", pooled=True)
    with pytest.raises(ConfigError, match="min_answers is 2, but a round has only 1 clients"):
        Experiment.parse({"data": {"pooled": True}, "min_answers": 2})


def test_they_are_written_out_and_read_back() -> None:
    for data in ({"pooled": True}, {"alone": "3"}):
        experiment = Experiment.parse({"data": data})
        again = Experiment.parse(tomllib.loads(experiment.to_toml()))
        assert again.data == experiment.data and again.hash() == experiment.hash() != Experiment.parse({}).hash()
