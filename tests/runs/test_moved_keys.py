"""An experiment of 0.1 is told where its keys have moved, and records of 0.1 are migrated once."""

from __future__ import annotations

import runpy
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from forgery import vouch_for
from redgrape.cli import main as cli
from redgrape.errors import ConfigError
from redgrape.exchange import Exchange
from redgrape.reading import records
from redgrape.reading.run_view import RunView
from redgrape.reading.suites.cells import identity
from redgrape.runs.checksums import hash_of
from redgrape.runs.experiment import Experiment
from redgrape.runs.moved_keys import EXCHANGE, GONE, RENAMED

ROOT = Path(__file__).resolve().parents[2]

MOVED = [("redgrape", key, f"method.{key} has moved: write exchange.{new}") for key, new in EXCHANGE.items()]
MOVED += [("redgrape", key, f"method.{key} was removed: leave it out") for key in GONE]
MOVED += [
    (name, key, f"method.{key} was renamed: write method.{new}")
    for name, renamed in RENAMED.items()
    for key, new in renamed.items()
]


@pytest.mark.parametrize(("name", "key", "words"), MOVED)
def test_a_moved_key_says_where_it_moved(name: str, key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Experiment.parse({"method": {"name": name, key: 1}})
    assert str(caught.value) == words


def test_the_moved_preset_says_where_it_moved() -> None:
    with pytest.raises(ConfigError) as caught:
        Experiment.parse({"method": {"preset": "private"}})
    assert str(caught.value) == "method.preset=private has moved: write exchange.preset=private"


def test_the_new_names_exist() -> None:
    """What the messages name can be set."""
    assert set(EXCHANGE.values()) | {"preset"} == set(Exchange.model_fields)
    assert Experiment.parse({"exchange": {"preset": "private"}}).exchange.min_clients == 3
    assert Experiment.parse({"method": {"name": "feddyn", "alpha": 0.5}}).method.resolved()["alpha"] == 0.5


def test_a_method_of_ones_own_may_use_an_old_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from redgrape.methods.fedavg import FedAvg\nclass Mine(FedAvg):\n    presets = {}\n    min_count: int = 1\n"
    )
    assert Experiment.parse({"method": {"name": str(file), "min_count": 4}}).method.resolved()["min_count"] == 4


@pytest.mark.parametrize("words", [["-c", "method.dp_noise=1"], ["--preset", "private"]])
def test_the_command_line_tells_it_in_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["run", *words, "--out", str(tmp_path / "run")]) == ConfigError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert "has moved: write exchange." in line
    assert not (tmp_path / "run").exists()


# Records


FILES = ("experiment.toml", "environment.json", "metrics.jsonl", "summary.json")


@pytest.fixture
def run(tiny: Callable[..., Any], tmp_path: Path) -> Path:
    toml = tmp_path / "tiny.toml"
    toml.write_text(Experiment.parse(tiny(method={"name": "redgrape"})).to_toml())
    assert cli.run(["run", str(toml), "--out", str(tmp_path / "run"), "--workers", "1", "--quiet"]) == 0
    return tmp_path / "run"


def as_of_01(run: Path, place: Path, **gone: Any) -> None:
    """A record of this run as 0.1 wrote it: a folder, no section [exchange], the hash of that."""
    values = tomllib.loads((run / "experiment.toml").read_text())
    exchange = values.pop("exchange")
    values["method"] |= {old: exchange[new] for old, new in EXCHANGE.items()} | {**GONE, **gone}
    place.mkdir(parents=True)
    for name in FILES:
        shutil.copy(run / name, place / name)
    (place / "experiment.toml").write_text(tomli_w.dumps(values))
    vouch_for(place)


@pytest.fixture
def migrate() -> Callable[[Path, Path], None]:
    main: Callable[[Path, Path], None] = runpy.run_path(str(ROOT / "scripts/migrate_records.py"))["main"]
    return main


Migrate = Callable[[Path, Path], None]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_record_of_01_is_migrated_once(
    run: Path, tmp_path: Path, migrate: Migrate, capsys: pytest.CaptureFixture[str]
) -> None:
    """It becomes what --record would write of the run today. A second call does nothing."""
    results, view = tmp_path / "results", RunView.read(run)
    as_of_01(run, results / "hand-quick" / "tiny-seed0-00000000")
    migrate(results, results)
    assert list(contents(results)) == ["hand-quick.jsonl"]
    ((name, record),) = records.read(results / "hand-quick.jsonl").items()
    today = Experiment.read(run / "experiment.toml")
    assert name == f"tiny-seed0-{identity(today, {})[:8]}"
    assert record["experiment"] == view.experiment
    assert record["summary"]["experiment"] == hash_of(view.experiment)
    before = contents(results)
    capsys.readouterr()
    migrate(results, results)
    assert (contents(results), capsys.readouterr().out) == (before, "")


def test_records_of_another_checkout_are_added_and_stay_there(run: Path, tmp_path: Path, migrate: Migrate) -> None:
    for name in ("here", "there"):
        place = tmp_path / name / "hand-quick" / f"{name}-seed0-00000000"
        place.mkdir(parents=True)
        for file in FILES:
            shutil.copy(run / file, place / file)
    migrate(tmp_path / "here", tmp_path / "here")
    before = contents(tmp_path / "there")
    migrate(tmp_path / "there", tmp_path / "here")
    assert contents(tmp_path / "there") == before
    names = [name.rpartition("-")[0] for name in records.read(tmp_path / "here" / "hand-quick.jsonl")]
    assert names == ["here-seed0", "there-seed0"]


def test_what_is_no_record_is_left_alone(
    run: Path, tmp_path: Path, migrate: Migrate, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run has its weights, which nobody wants to lose."""
    before = contents(run)
    migrate(tmp_path, tmp_path)
    assert "not a record, left alone" in capsys.readouterr().out
    assert contents(run) == before


def test_a_record_that_used_what_is_gone_is_put_aside(run: Path, tmp_path: Path, migrate: Migrate) -> None:
    results = tmp_path / "results"
    as_of_01(run, results / "hand-quick" / "tiny-seed0-00000000", prototype_rank=1)
    for _ in range(2):
        migrate(results, results)
        assert list(contents(results)) == ["made-by-0.1/hand-quick.jsonl"]
    (record,) = records.read(results / "made-by-0.1" / "hand-quick.jsonl").values()
    assert record["experiment"]["method"]["prototype_rank"] == 1
