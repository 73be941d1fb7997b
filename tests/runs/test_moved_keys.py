"""An experiment of 0.1 is told where its keys have moved, and records of 0.1 are migrated once."""

from __future__ import annotations

import json
import runpy
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from redgrape.cli import main as cli
from redgrape.errors import ConfigError
from redgrape.exchange import Exchange
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


def as_of_01(record: Path, place: Path, **gone: Any) -> None:
    """A copy of a record as 0.1 wrote it: no section [exchange], the hash of that, and a name with another hash."""
    shutil.copytree(record, place)
    values = tomllib.loads((record / "experiment.toml").read_text())
    exchange = values.pop("exchange")
    values["method"] |= {old: exchange[new] for old, new in EXCHANGE.items()} | {**GONE, **gone}
    (place / "experiment.toml").write_text(tomli_w.dumps(values))
    summary = (record / "summary.json").read_text()
    (place / "summary.json").write_text(summary.replace(json.loads(summary)["experiment"], "0" * 64))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def migrate() -> Callable[[Path], None]:
    main: Callable[[Path], None] = runpy.run_path(str(ROOT / "scripts/migrate_records.py"))["main"]
    return main


def test_records_are_migrated_once(
    tmp_path: Path, migrate: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Records of 0.1 become, byte for byte and by name, those that are under results/; a second call does nothing."""
    chosen = sorted((ROOT / "results").glob("table1-quick/*"))[:3]
    assert len(chosen) == 3
    for record in chosen:
        stem, _, _ = record.name.rpartition("-")
        as_of_01(record, tmp_path / "table1-quick" / f"{stem}-00000000")
    migrate(tmp_path)
    expected = {f"table1-quick/{r.name}/{name}": data for r in chosen for name, data in contents(r).items()}
    assert contents(tmp_path) == expected
    assert len(capsys.readouterr().out.splitlines()) == 3
    migrate(tmp_path)
    assert contents(tmp_path) == expected
    assert capsys.readouterr().out == ""


def test_a_record_that_used_what_is_gone_is_kept_as_it_is(tmp_path: Path, migrate: Callable[[Path], None]) -> None:
    record = min((ROOT / "results").glob("table1-quick/*"))
    as_of_01(record, tmp_path / "table1-quick" / record.name, prototype_rank=1)
    before = contents(tmp_path)
    for _ in range(2):
        migrate(tmp_path)
        assert contents(tmp_path) == {f"made-by-0.1/{name}": data for name, data in before.items()}
