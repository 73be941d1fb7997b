"""Records: what is kept of a run, that damage is told, and that a file stays small."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redgrape.cli import main as cli
from redgrape.errors import StorageError
from redgrape.reading import records, run_view
from redgrape.reading.page.figures import page_data
from redgrape.reading.page.reading import Reading
from redgrape.reading.page.serve import Runs
from redgrape.reading.run_view import RunView
from redgrape.runs.experiment import Experiment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunView:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    toml = tmp_path / "tiny.toml"
    toml.write_text(Experiment.parse(tiny(method={"name": "redgrape", "threshold": float("inf")}, rounds=3)).to_toml())
    assert cli.run(["run", str(toml), "--out", str(tmp_path / "run"), "--workers", "1", "--quiet"]) == 0
    return RunView.read(tmp_path / "run")


def record_of(view: RunView, seed: int = 3) -> records.Record:
    parts = {part: getattr(view, part) for part in ("environment", "metrics", "summary", "cost")}
    return {"experiment": {**view.experiment, "seed": seed}, **parts}


def test_a_record_keeps_the_result_and_drops_what_no_table_needs(run: RunView, tmp_path: Path) -> None:
    file = tmp_path / "hand-quick.jsonl"
    records.add(file, {"a": record_of(run)})
    view = run_view.view(file / "a")
    assert view.experiment == run.experiment
    assert run.summary is not None and view.summary is not None
    assert view.summary["mean_of_last"] == run.summary["mean_of_last"]
    assert view.row() == {**run.row(), "run": str(file / "a")}
    assert view.rounds_done == run.rounds_done
    assert "confusion" not in view.summary
    for ours, theirs in zip(view.metrics, [m for m in run.metrics if "test" in m], strict=True):
        assert ours["round"] == theirs["round"]
        assert ours["test"] == {name: round(theirs["test"][name], 6) for name in ours["test"]}
        assert {"accuracy", "tail", "macro_f1"} <= ours["test"].keys()
    assert view.cost["bytes_up"] == sum(m["bytes_up"] for m in run.metrics) > 0
    assert view.cost["seconds"] == run.cost["seconds"] is not None
    assert run_view.find_runs(tmp_path)[-1] == file / "a"


def test_what_records_share_is_written_once_and_order_does_not_matter(run: RunView, tmp_path: Path) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    records.add(one, {"b": record_of(run), "a": record_of(run, 4)})
    for name, seed in {"a": 4, "b": 3}.items():
        records.add(other, {name: record_of(run, seed)})
    assert one.read_bytes() == other.read_bytes()
    kinds = [next(iter(json.loads(line))) for line in one.read_text().splitlines()]
    assert kinds == ["format", "shared", "shared", "record", "record"]


@pytest.mark.parametrize("number", [2, 4])
def test_a_changed_figure_is_told(run: RunView, tmp_path: Path, number: int) -> None:
    """In a shared part, or in a record."""
    file = tmp_path / "hand-quick.jsonl"
    records.add(file, {"a": record_of(run)})
    lines = file.read_text().splitlines()
    digit = next(c for c in reversed(lines[number - 1]) if c in "12345678")
    head, _, tail = lines[number - 1].rpartition(digit)
    lines[number - 1] = f"{head}{int(digit) + 1}{tail}"
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(StorageError, match=f"damaged in line {number}"):
        records.read(file)


def test_a_line_that_is_gone_is_told(run: RunView, tmp_path: Path) -> None:
    file = tmp_path / "hand-quick.jsonl"
    records.add(file, {"a": record_of(run)})
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], *lines[2:]]))
    with pytest.raises(StorageError, match="damaged in line 3"):
        records.read(file)


def test_other_files_are_no_records(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n')
    (tmp_path / "empty.jsonl").write_text("")
    assert records.files(tmp_path) == []


def test_a_record_is_no_run(run: RunView, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It can be shown; what needs its weights or its rounds says so in a line."""
    file = tmp_path / "hand-quick.jsonl"
    records.add(file, {"a": record_of(run)})
    assert cli.run(["show", str(file / "a")]) == 0
    assert "accuracy per class" in capsys.readouterr().out
    data = page_data({"record": Reading.of(file / "a"), "run": Reading.of(run.path)})
    assert [data["runs"][key]["is_record"] for key in ("record", "run")] == [True, False]
    for words in (
        ["privacy", str(file / "a")],
        ["export", str(file / "a"), str(tmp_path / "m")],
        ["show", f"{file}/b"],
    ):
        assert cli.run(words) == StorageError.exit_code
        (line,) = capsys.readouterr().err.splitlines()
        assert "is a record" in line or "not a run folder" in line or "has no record 'b'" in line


def test_a_damaged_file_hides_no_other(
    run: RunView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("bad", "good"):
        records.add(Path("results", f"{name}-quick.jsonl"), {"a": record_of(run)})
    Path("results/bad-quick.jsonl").write_text(json.dumps(records.FORMAT) + "\nno record\n")
    wrong = "'results/bad-quick.jsonl' is damaged in line 2"
    Path("page.md").write_text("<!-- fig_lambda quick:begin -->\n<!-- fig_lambda quick:end -->\n")
    table = "reproduce fig_lambda --scale quick --no-run"
    # a page of results must not lose them
    for words, code in {
        "ls results": 0,
        "report results --out page.html": 0,
        table: 0,
        f"{table} --into page.md": 74,
    }.items():
        assert cli.run(words.split()) == code
        assert capsys.readouterr().err.count(wrong) == 1
    rows = Runs(Path("results")).listed()
    assert [(row["id"], row["state"]) for row in rows] == [
        ("bad-quick.jsonl", "damaged"),
        ("good-quick.jsonl/a", "finished"),
    ]
    assert wrong in rows[0]["reason"]


def test_another_file_is_not_called_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("# Read me\n")
    for command in ("show", "privacy"):
        assert cli.run([command, str(tmp_path / "README.md" / "x")]) == StorageError.exit_code
        assert "README.md' is no file of records" in capsys.readouterr().err


@pytest.mark.parametrize("file", records.files(ROOT / "results"), ids=lambda path: path.stem)
def test_the_records_of_a_suite_stay_small(file: Path) -> None:
    assert file.stat().st_size <= 2 * 2**20
    assert records.read(file)
