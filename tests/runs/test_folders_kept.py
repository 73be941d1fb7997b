"""Run folders that are used again: nothing is taken that does not fit, nothing is written before all is checked, and
every reader sees the same damage."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from commands import Command, Outcome, good, in_this_process, tree_of
from redgrape import own_code
from redgrape.errors import StorageError
from redgrape.reading.run_view import RunView
from redgrape.reading.suites import grid, tables
from redgrape.reading.suites.found_cells import Standing
from redgrape.runs import checksums, durable
from redgrape.runs.experiment import Experiment, build_net
from redgrape.runs.folder import RunFolder

Values = Callable[..., dict[str, Any]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `redgrape ...` in this process, in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("REDGRAPE_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return in_this_process(capsys)


def refused(outcome: Outcome, *codes: int) -> str:
    assert outcome.code in codes, outcome
    (line,) = [line for line in outcome.err.splitlines() if not line.startswith("note: ")]
    assert line.startswith("redgrape: ")
    return line


# Places


def test_an_empty_path_and_a_name_that_leads_elsewhere_are_refused(
    command: Command, toml: Path, tmp_path: Path
) -> None:
    """`--out ''` is not the current folder, and --name is a folder below --out."""
    calls: list[list[object]] = [
        ["run", toml, "--out", ""],
        ["compare", "fedavg", "--experiment", toml, "--out", ""],
        *[["sweep", "method.lr=0.1,0.2", "--experiment", toml, "--name", name] for name in ("../x", "..", "a/b", "")],
    ]
    before = tree_of(tmp_path)
    for arguments in calls:
        refused(command(*arguments, "--workers", 1), 2)
        assert tree_of(tmp_path) == before


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    """Whoever can write to a folder cannot make redgrape empty a file elsewhere."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / ".page.html.tmp").symlink_to(precious)
    durable.replace_file(tmp_path / "page.html", b"new")
    assert precious.read_text() == "precious"
    assert (tmp_path / "page.html").read_bytes() == b"new"
    assert not (tmp_path / "page.html").is_symlink()


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "page.html").write_bytes(b"old")
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="No space left"):
        patch.setattr(os, "fsync", full)
        durable.replace_file(tmp_path / "page.html", b"new")
    with pytest.raises(StorageError, match="is a folder; name a file in it"):
        durable.replace_file(tmp_path, b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_a_folder_that_cannot_be_begun_is_not_left_behind(
    tiny: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(kind: str) -> None:
        if kind == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable, "fault_point", full)
    with pytest.raises(StorageError, match="No space left"):
        RunFolder.create(tmp_path / "runs" / "run", Experiment.parse(tiny()))
    assert list(tmp_path.iterdir()) == []


# Resuming


@pytest.fixture
def own(tmp_path: Path, vectors: Path) -> Path:
    """A data file that can be changed."""
    return Path(shutil.copy(vectors, tmp_path / "own.npz"))


def change(data: Path) -> None:
    """Four classes become two, of the same examples."""
    arrays = dict(np.load(data))
    np.savez(data, x=arrays["x"] + 1, y=arrays["y"] // 2)


@pytest.fixture
def run(command: Command, toml: Path, own: Path) -> Path:
    """A finished run of two rounds on data that can be changed."""
    good(command("run", toml, "--data", own, "--out", "run", "--workers", 1, "--quiet"))
    return Path("run").resolve()


@pytest.mark.parametrize("damage", ["none", "the newest checkpoint"])
def test_a_refused_resume_has_written_nothing(command: Command, run: Path, own: Path, damage: str) -> None:
    """Neither the rounds that it should go on to, nor what a resume would cut off first."""
    if damage != "none":
        path = run / "checkpoints" / "round-000002" / "server.safetensors"
        path.write_bytes(path.read_bytes()[:100])
    change(own)
    before = tree_of(run)
    line = refused(command("resume", run, "--rounds", 3, "--workers", 1), 65)
    assert "has changed since it began" in line
    assert tree_of(run) == before
    assert " 2/2 " in good(command("ls", run)).out


def test_a_missing_environment_is_refused(command: Command, run: Path, own: Path) -> None:
    """Without it nobody knows on which data a run began; --allow-changes holds it to its split."""
    (run / "environment.json").unlink()
    before = tree_of(run)
    line = refused(command("resume", run, "--rounds", 3, "--workers", 1), 74)
    assert "environment.json' is missing" in line
    assert tree_of(run) == before
    change(own)
    line = refused(command("resume", run, "--rounds", 3, "--workers", 1, "--allow-changes"), 65)
    assert "partition.safetensors" in line
    assert tree_of(run) == before


def test_lines_that_stand_there_twice_are_cut(command: Command, run: Path) -> None:
    """A result is the mean over what the checkpoint vouches for."""
    before = tree_of(run)
    path = run / "metrics.jsonl"
    path.write_bytes(2 * path.read_bytes())
    good(command("resume", run, "--workers", 1, "--quiet"))
    assert tree_of(run) == before


# Reading


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def other_digit(path: Path) -> None:
    """The last round was better than it was."""
    *before, last = path.read_text().splitlines()
    record = json.loads(last)
    record["test"]["accuracy"] = 0.875
    path.write_text("\n".join([*before, json.dumps(record), ""]))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "no experiment": lambda run: (run / "experiment.toml").unlink(),
    "half an experiment": lambda run: cut(run / "experiment.toml"),
    "no metrics": lambda run: (run / "metrics.jsonl").unlink(),
    "metrics twice": lambda run: (run / "metrics.jsonl").write_bytes(2 * (run / "metrics.jsonl").read_bytes()),
    "another digit": lambda run: other_digit(run / "metrics.jsonl"),
    "no environment": lambda run: (run / "environment.json").unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("state", ["finished", "unfinished", "a record"])
def test_every_reader_sees_the_damage(command: Command, run: Path, tmp_path: Path, state: str, kind: str) -> None:
    """`ls` names the run, which is in no list; whoever reads that run alone refuses it."""
    if kind == "no environment" and state == "unfinished":
        pytest.skip("a run has none until its data is read")
    match state:
        case "unfinished":
            (run / "summary.json").unlink()
            sums = (run / "SHA256SUMS").read_text().splitlines(keepends=True)
            kept = [line for line in sums if not line.endswith((".jsonl\n", "summary.json\n"))]
            (run / "SHA256SUMS").write_text("".join(kept))
        case "a record":
            (run / "SHA256SUMS").unlink()
            shutil.rmtree(run / "checkpoints")
    assert [row["done"] for row in json.loads(good(command("ls", run, "--json")).out)] == [2]
    DAMAGE[kind](run)
    listed = good(command("ls", run, "--json"))
    assert json.loads(listed.out) == []
    assert str(run) in listed.err
    for name in ("show", "privacy", "report"):
        refused(command(name, run), 74)
    refused(command("export", run, tmp_path / "model"), 74)
    assert not (tmp_path / "model").exists()


# Code of strangers


def test_whoever_only_looks_imports_no_method(
    command: Command, run: Path, toml: Path, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method of one's own is code; a run records what is to be known of it."""
    imported: list[Path] = []
    monkeypatch.setattr(own_code, "from_file", lambda path, what: imported.append(path))
    readers: list[list[object]] = [
        ["ls", run],
        ["show", run],
        ["report", run],
        ["privacy", run],
        ["export", run, tmp_path / "model"],
        ["data", "show", toml, "--data", own],
    ]
    for arguments in readers:
        assert good(command(*arguments)).out
    assert imported == []


# Models


@pytest.mark.parametrize("name", ["server.safetensors", "manifest.json"])
def test_a_finished_run_whose_last_model_is_damaged_is_not_exported(
    command: Command, run: Path, tmp_path: Path, name: str
) -> None:
    """The model of the round before is not given in its place; a resume makes the last one anew."""
    cut(run / "checkpoints" / "round-000002" / name)
    line = refused(command("export", run, tmp_path / "model"), 74)
    assert "its model is lost" in line
    assert not (tmp_path / "model").exists()
    good(command("resume", run, "--workers", 1, "--quiet"))
    assert "of round 2 " in good(command("export", run, tmp_path / "model")).out


# Old runs on new data


def test_compare_takes_no_run_of_other_data(command: Command, toml: Path, own: Path) -> None:
    """FedAvg on four classes does not stand beside RedGrape on two; --overwrite runs it again, --out keeps both."""
    shared: list[object] = ["--experiment", toml, "--data", own, "--rounds", 1, "--workers", 1, "--quiet"]
    good(command("compare", "fedavg", *shared))
    change(own)
    before = tree_of(Path("runs"))
    line = refused(command("compare", "redgrape", "fedavg", *shared), 2)
    assert "fedavg-seed3' does not match the request: the split was " in line
    assert "--out" in line and "--overwrite" in line
    assert tree_of(Path("runs")) == before
    good(command("compare", "redgrape", "fedavg", *shared, "--out", "elsewhere"))
    good(command("compare", "redgrape", "fedavg", *shared, "--overwrite"))
    assert tree_of(Path("runs/compare"))["table.md"] == tree_of(Path("elsewhere"))["table.md"]
    splits = {json.loads(path.read_bytes())["split"] for path in Path("runs").rglob("environment.json")}
    assert len(splits) == 1


@pytest.mark.parametrize("name", ["torch", "stack", "cpu"])
def test_compare_takes_no_run_of_another_machine_unless_allowed(command: Command, toml: Path, name: str) -> None:
    shared: list[object] = ["--experiment", toml, "--rounds", 1, "--workers", 1, "--quiet"]
    good(command("compare", "fedavg", *shared))
    path = Path("runs/compare/fedavg-seed3")
    environment = json.loads((path / "environment.json").read_bytes())
    checksums.write(path, {"environment.json": json.dumps({**environment, name: "ancient"}).encode()})
    assert f"the {name} was ancient and is " in refused(command("compare", "fedavg", *shared), 2)
    good(command("compare", "fedavg", *shared, "--allow-changes"))


def test_compare_sees_that_the_first_weights_have_changed(command: Command, tiny: Values, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    toml = tmp_path / "weights.toml"
    toml.write_text(Experiment.parse(tiny(net={"name": "mlp", "weights": str(weights)}, rounds=1)).to_toml())
    shared: list[object] = ["--experiment", toml, "--workers", 1, "--quiet"]
    net = build_net("mlp", (5,), 4, seed=0).state_dict()
    for bias in (0.0, 1.0):
        safetensors.torch.save_file({name: t + bias for name, t in net.items()}, weights)
        outcome = command("compare", "fedavg", *shared)
        assert (outcome.code == 0) == (bias == 0.0)
    assert "the file 'weights.safetensors' was " in refused(outcome, 2)


def test_sweep_takes_no_run_of_other_data(command: Command, toml: Path, own: Path) -> None:
    """What differs is named, for every cell; what is new is run, and no table has rows of two splits."""
    shared: list[object] = ["--experiment", toml, "--data", own, "--rounds", 1, "--workers", 1, "--quiet"]
    good(command("sweep", "method.lr=0.1", *shared))
    change(own)
    (environment,) = Path("runs/sweep").glob("*/environment.json")
    before = tree_of(environment.parent)
    assert "does not match the request" in good(command("sweep", "method.lr=0.1,0.2", *shared, "--plan")).out
    line = refused(command("sweep", "method.lr=0.1,0.2", *shared), 2)
    assert "does not fit: the split was " in line and "--overwrite" in line
    assert tree_of(environment.parent) == before
    entries = json.loads(Path("runs/sweep/table.json").read_bytes())["entries"]
    assert {entry["row"]: entry["mean"] is None for entry in entries} == {"0.1": True, "0.2": False}
    good(command("sweep", "method.lr=0.1,0.2", *shared, "--overwrite"))
    good(command("sweep", "method.lr=0.1,0.2", *shared))
    splits = {json.loads(path.read_bytes())["split"] for path in Path("runs").rglob("environment.json")}
    assert len(splits) == 1


def test_a_record_of_other_data_is_named_and_passed_over(command: Command, toml: Path, own: Path) -> None:
    shared: list[object] = ["--experiment", toml, "--data", own, "--rounds", 1, "--workers", 1, "--quiet"]
    good(command("sweep", "method.lr=0.1", *shared, "--out", "results"))
    good(command("sweep", "method.lr=0.1", *shared))
    assert not list(Path("runs").rglob("metrics.jsonl"))
    change(own)
    told = good(command("sweep", "method.lr=0.1", *shared)).out
    assert "a record is not taken: 'results/sweep/" in told
    assert len(list(Path("runs").rglob("metrics.jsonl"))) == 1


def test_a_record_of_another_torch_is_named(command: Command, toml: Path) -> None:
    """Its figures stand, beside a line on which cells were made with what."""
    shared: list[object] = ["--experiment", toml, "--rounds", 1, "--workers", 1, "--quiet"]
    good(command("sweep", "method.lr=0.1", *shared, "--out", "results"))
    (path,) = Path("results").glob("*/*/environment.json")
    environment = json.loads(path.read_bytes())
    checksums.write(path.parent, {path.name: json.dumps({**environment, "torch": "ancient"}).encode()})
    told = good(command("sweep", "method.lr=0.1,0.2", *shared)).out
    assert "last bits may differ: torch" in told and "ancient" in told
    assert "ancient" in Path("runs/sweep/table.tex").read_text()


def test_readers_say_which_runs_cannot_be_compared(command: Command, toml: Path, own: Path) -> None:
    """Whoever made them: two runs of one seed and the same options, of other data."""
    for name in ("fedavg", "redgrape"):
        good(command("run", toml, "--method", name, "--data", own, "--out", f"runs/{name}", "--workers", 1, "--quiet"))
        change(own)
    listed = good(command("ls", "--json"))
    assert "note: 'runs/redgrape' cannot be compared: its split is " in listed.err
    assert ["other_data" in row for row in json.loads(listed.out)] == [False, True]
    good(command("report", "runs", "--out", "page.html"))
    page = Path("page.html").read_text()
    assert "other data" in page and "Not to be compared with others" in page


def test_a_table_of_what_there_is_has_one_split(command: Command, toml: Path, own: Path) -> None:
    """Also where nothing is compared with the data, because it is not asked for."""
    runs = []
    for lr in (0.1, 0.2):
        good(
            command(
                "run", toml, "-c", f"method.lr={lr}", "--data", own, "--out", f"runs/{lr}", "--workers", 1, "--quiet"
            )
        )
        runs.append(RunView.read(Path(f"runs/{lr}")))
        change(own)
    made = grid.suite("g", tomllib.loads(toml.read_text()), ["method.lr=0.1,0.2"], [3])
    standings = [Standing(cell, view) for cell, view in zip(made.cells("sweep"), runs, strict=True)]
    table = tables.build(made, standings)
    assert [entry.mean is None for entry in table.entries if entry.measure == "accuracy"] == [False, True]
    assert any("cannot be compared" in note for note in table.notes)
