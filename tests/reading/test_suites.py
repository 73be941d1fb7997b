"""Suites: what they describe, how cells are found and gone on with, and what their tables say."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student

import redgrape
from commands import Command, good, in_this_process
from redgrape.cli import main as cli
from redgrape.cli.commands import suites
from redgrape.data.longtail import exponential
from redgrape.data.partition import partition
from redgrape.errors import ConfigError, install
from redgrape.reading import records
from redgrape.reading.run_view import RunView
from redgrape.reading.suites import (
    blocks,
    cost,
    curves,
    description,
    files,
    formats,
    found_cells,
    grid,
    side_by_side,
    statistics,
    tables,
)
from redgrape.reading.suites.cells import Cell, Rule, Suite, identity
from redgrape.reading.suites.description import SCALES
from redgrape.reading.suites.found_cells import Standing
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
PAPER = ROOT.parent / "shared" / "paper" / "redgrape.tex"
METHODS = ["FedAvg", "Fed-Focal", "Ratio Loss", "CLIMB", "CReFF", "RedGrape"]

UNCUT = ("frozen10", "frozen100", "mnist_uncut")
by_suite = pytest.mark.parametrize("name", files.names())

SETTINGS = """
[keys]
lr = "method.lr"

[seeds]
paper = [0, 1]

[experiment]
rounds = 4

[experiment.data]
source = "digits"
head_cap = 20
ir = 4.0
clients = 2

[experiment.net]
name = "linear"

[[rules]]
when = { dataset = "Digits" }
set = { data = { source = "digits" } }

[[rules]]
when = { dataset = "MNIST" }
set = { data = { source = "mnist" } }

[[rules]]
when = { method = "FedAvg" }
set = { method = { name = "fedavg" } }

[[rules]]
when = { method = "RedGrape" }
set = { method = { name = "redgrape" } }

[[rules]]
when = { scale = "quick" }
set = { rounds = 2 }
"""
SMALL = """
title = "Small"
claim = "none"
rows = ["method"]
columns = ["dataset"]
measures = ["accuracy"]
references = ["FedAvg"]

[axes]
dataset = ["Digits", "MNIST"]
method = ["FedAvg", "RedGrape"]

[paper.accuracy]
FedAvg = [50.0, 60.0]
RedGrape = [55.5, 66.6]
"""
RATES = """
title = "Rates"
rows = ["lr"]
measures = ["accuracy", "tail"]

[axes]
dataset = ["Digits"]
method = ["FedAvg"]
lr = [0.01, 0.1]
"""
SAME_CELLS = """
title = "Small, tail"
cells_of = "small"
measures = ["tail"]
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of suites that take a blink, of whose two data sets one is missing."""
    folder = tmp_path / "suites"
    folder.mkdir()
    for name, content in {"settings": SETTINGS, "small": SMALL, "rates": RATES, "same": SAME_CELLS}.items():
        (folder / f"{name}.toml").write_text(content)
    monkeypatch.setattr(files, "FOLDERS", (folder,))
    return folder


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `redgrape ...` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDGRAPE_DATA", str(tmp_path / "no data here"))
    return in_this_process(capsys, "--workers", "1", "--quiet")


# The suites that come with redgrape


def test_every_table_and_figure_has_its_suite() -> None:
    figures = ["fig_convergence", "fig_lambda", "fig_threshold", "fig_two_stream"]
    assert files.names() == sorted(
        [
            *(f"table{i}" for i in range(1, 7)),
            *figures,
            *("ablations", "cifar10_resnet8", "creff_table", "mnist_full", "rates", "vine"),
            *UNCUT,
        ]
    )


@by_suite
@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_is_an_experiment(name: str, scale: str) -> None:
    """Each is valid (or `cells` would raise), and no two of a suite are the same."""
    suite = description.load(name)
    if not suite.seeds[scale]:
        with pytest.raises(ConfigError, match=f"'{name}' has no scale '{scale}'; choose another"):
            suite.cells(scale)
        return
    cells = suite.cells(scale)
    size = len(suite.seeds[scale])
    for labels in suite.axes.values():
        size *= len(labels)
    alone = [cell for cell in cells if cell.experiment.data.alone is not None]
    assert len(cells) == size + len(alone) - len(alone) // 10
    assert len(cells) == len({cell.identity for cell in cells}) == len({cell.folder for cell in cells})
    assert len(cells) == len({cell.name for cell in cells})
    of_paper = [cell.experiment.data for cell in cells if cell.experiment.data.source != "digits"]
    its_own = (0, "creff") if name == "creff_table" else (32, "prior_dirichlet")
    assert {(data.auxiliary, data.partition) for data in of_paper} <= {its_own}
    assert bool(suite.cuts(scale)) == (scale == "quick" or (scale == "study" and name not in ("rates", "vine", *UNCUT)))


@pytest.mark.parametrize("name", [f"table{i}" for i in range(1, 7)])
def test_tables_hold_the_papers_figures(name: str) -> None:
    """Against the paper's own source, where it is at hand."""
    suite = description.load(name)
    (measure,) = suite.measures
    assert list(suite.paper[measure]) == METHODS
    assert suite.all_rows() == [*METHODS, "LDA, untrained encoder"]
    for row in METHODS:
        for column in suite.all_columns():
            assert suite.paper_value(row, column, measure) is not None
    if not PAPER.exists():
        pytest.skip("the paper's source is not here")
    labels = ["main results full", "main results partial", "binary class imbalance results"]
    labels += ["tail results full", "tail results partial", "results of different alpha"]
    end = PAPER.read_text().index(rf"\label{{tab: {labels[int(name[-1]) - 1]}}}")
    begin = PAPER.read_text().rindex(r"\begin{tabular}{l", 0, end)
    printed = [
        [float(number) for number in re.findall(r"\d+\.\d+", line.partition("&")[2])]
        for line in PAPER.read_text()[begin:end].split("\n")
        if re.match(r"(FedAvg|Fed-Focal|Ratio|CLIMB|CReFF|Ours) *", line)
    ]
    assert printed == list(suite.paper[measure].values())


def test_tail_tables_are_of_the_same_runs() -> None:
    for scale in SCALES:
        for main, tail in (("table1", "table4"), ("table2", "table5")):
            ours, theirs = (description.load(name).cells(scale) for name in (main, tail))
            assert [cell.identity for cell in ours] == [cell.identity for cell in theirs]
    assert description.load("table4").home == "table1"


def test_suites_share_cells() -> None:
    """Figures are variations of a cell of table 1, and table 6 has the alpha of table 1 in its middle."""

    def identities(name: str, scale: str) -> set[str]:
        return {cell.identity for cell in description.load(name).cells(scale, [0])}

    for scale in SCALES:
        table1 = identities("table1", scale)
        assert identities("fig_convergence", scale) <= table1
        for name, shared in (("fig_lambda", 1), ("fig_threshold", 1), ("fig_two_stream", 2), ("table6", 21)):
            assert len(identities(name, scale) & table1) == shared
        assert not table1 & identities("table2", scale)
    for name, shared in (("cifar10_resnet8", 4), ("ablations", 2)):
        assert len(identities(name, "quick") & identities("table1", "quick")) == shared
        assert len(identities(name, "paper") & identities("table1", "paper")) == shared


def test_departures_stand_below_the_tables_they_concern() -> None:
    def told(name: str, *only: str) -> str:
        return " ".join(description.load(name).departures("study", only))

    assert "32 images" in told("table1", "mnist", "fedavg") and "0.9" in told("table1", "mnist", "fedavg")
    assert "clipped" not in told("table1", "mnist", "fedavg") and "clipped" in told("table1", "mnist", "ratio_loss")
    assert "cropped" not in told("table1", "mnist") and "cropped" in told("table1", "cifar10")
    assert "skewed" not in told("table6", "mnist") and "skewed" in told("table6", "cifar100")
    suite = description.load("table6")
    table = tables.build(suite, [], scale="study", departures=suite.departures("study"))
    assert "clipped at norm 1" in formats.markdown(table)


def test_skew_of_the_partition_is_as_table_6_says() -> None:
    told = " ".join(description.load("table6").departures("study", ["cifar100"]))
    for source, classes, head in (("CIFAR-100-LT", 100, 468), ("CIFAR-10-LT", 10, 4968)):
        sizes = exponential([head] * classes, ir=100)
        labels = np.repeat(np.arange(classes), sizes)
        skews = []
        for alpha in (0.1, 1.0, 10.0):
            distances = []
            for seed in range(3):
                parts = partition(labels, "prior_dirichlet", clients=10, alpha=alpha, seed=seed)
                mixtures = [np.bincount(labels[rows], minlength=classes) / len(rows) for rows in parts]
                distances += [np.abs(mixture - np.array(sizes) / sum(sizes)).sum() / 2 for mixture in mixtures]
            skews.append(f"{np.mean(distances):.1f}")
        assert re.search(rf"{source} .*?{skews[0]}, {skews[1]} and {skews[2]}", told), (source, skews)


def test_smaller_scales_are_cut_against_the_papers_data_and_net() -> None:
    """Also where a suite is made for the smaller scale."""
    assert "data.head_cap: 1000 instead of none" in description.load("ablations").cuts("study")
    cuts = description.load("cifar10_resnet8").cuts("study")
    assert {"data.head_cap: 500 instead of none", "net.name: resnet8 instead of resnet56"} <= set(cuts)


def test_settings_are_those_of_the_appendix() -> None:
    def cell(name: str, *only: str) -> Experiment:
        (found,) = description.load(name).cells("paper", [0], only)
        return found.experiment

    rounds = {
        (name, source): cell(name, source, "ir=100", "fedavg").rounds
        for name in ("table1", "table2")
        for source in ("mnist", "cifar10", "cifar100")
    }
    assert list(rounds.values()) == [200, 500, 500, 500, 1000, 1000]
    for source, lr, threshold, eps, dual_lr in (
        ("mnist", 0.01, 8, 0.01, 2.0),
        ("cifar10", 0.1, 8, 0.1, 0.1),
        ("cifar100", 0.1, 2, 0.1, 0.1),
    ):
        redgrape = cell("table2", source, "ir=100", "redgrape")
        assert (redgrape.clients_per_round, redgrape.data.clients, redgrape.data.ir) == (10, 50, 100.0)
        options = dict(redgrape.method.create())
        assert (options["lr"], options["lam"], options["threshold"]) == (lr, 0.1, threshold)
        assert (options["batch_size"], options["epochs"], options["momentum"]) == (64, 5, 0.9)
        climb = dict(cell("table2", source, "ir=100", "climb").method.create())
        assert (climb["eps"], climb["dual_lr"]) == (eps, dual_lr)
        creff = dict(cell("table2", source, "ir=100", "creff").method.create())
        assert (creff["features_per_class"], creff["match_steps"], creff["match_lr"]) == (100, 100, 0.1)
        assert (creff["retrain_epochs"], creff["retrain_lr"]) == (300, None)
    binary = cell("table3", "full", "mnist", "fedavg").data
    assert (binary.imbalance, binary.tail_classes, binary.ir) == ("binary", (0, 7, 8), 100.0)


def test_the_study_of_table_2_is_a_known_experiment() -> None:
    """Written out here once more, so that a change of a rule cannot silently orphan what has been run."""
    values = {
        "rounds": 100,
        "clients_per_round": 10,
        "data": {"source": "mnist", "ir": 100.0, "partition": "prior_dirichlet", "clients": 50, "auxiliary": 32},
        "net": {"name": "cnn"},
    }
    local = {"lr": 0.01, "momentum": 0.9, "batch_size": 64, "epochs": 5}
    for name, method in {
        "fedavg": {"name": "fedavg"},
        "redgrape": {"name": "redgrape"},
        "creff": {"name": "creff", "preset": "appendix"},
        "climb": {"name": "climb"},
        "fed_focal": {"name": "fed_focal"},
        "ratio_loss": {"name": "ratio_loss", "clip_norm": 1.0},
    }.items():
        (cell,) = description.load("table2").cells("study", None, ["mnist", "ir=100", name])
        experiment = Experiment.parse({**values, "method": {**local, **method}})
        assert cell.identity == identity(experiment, {})


def test_frozen_suites_have_the_same_methods_and_budget() -> None:
    """One number of rounds for all that train; heads from sums take a round or two. A run's figure is the mean of its
    last ten rounds, and all of these belong to the last stage of methods that have two."""
    ours, theirs = (description.load(name) for name in ("frozen10", "frozen100"))
    assert {**ours.axes, "features": ()} == {**theirs.axes, "features": ()}
    for suite, source in ((ours, "cifar10"), (theirs, "cifar100")):
        cells = suite.cells("study", [0], ["ir=100"])
        assert {cell.experiment.data.source for cell in cells} == {source}
        rounds = {suite.row(cell.labels): cell.experiment.rounds for cell in cells}
        assert {row for row, number in rounds.items() if number != 20} == {
            "LDA",
            "LDA, chosen",
            "NCM",
            "Fed3R",
        }
        settings = {suite.row(cell.labels): cell.experiment.method.resolved() for cell in cells}
        assert {hyper["lr"] for hyper in settings.values()} <= {0.01, 0.1}
        stages = {
            row: [hyper[k] for k in ("head_share", "share", "deferred") if k in hyper]
            for row, hyper in settings.items()
        }
        assert {row: share for row, share in stages.items() if share} == {
            "RUCR": [0.5],
            "FedReLa": [0.5],
            "LDAM": [0.5],
            "cRT": [0.75],
            "LWS": [0.75],
        }
        assert settings["RedGrape"]["threshold"] == {"cifar10": 8.0, "cifar100": 2.0}[source]
        assert settings["CLIMB"]["preset"] == "cifar"
        assert (settings["SCAFFOLD"]["momentum"], settings["FedDyn"]["momentum"]) == (0.0, 0.0)
        assert {cell.experiment.data.head_cap for cell in cells} == {None}
        assert sorted(c.experiment.data.alone for c in cells if c.experiment.data.alone) == list("0123456789")
        assert sum(cell.experiment.data.pooled for cell in cells) == 1
        methods = {cell.experiment.method.name for cell in cells}
        assert methods == {*redgrape.methods.names(), "vine+balanced_softmax"}


def test_mnist_uncut_is_of_known_cells() -> None:
    """Those of table 2 and of vine at the scale study, the best trained methods, and heads on two encoders."""

    def of(name: str, *only: str) -> set[str]:
        return {cell.identity for cell in description.load(name).cells("study", [0], only)}

    known = of("table2", "mnist", "ir=100") | of("vine", "setting=MNIST-LT, 10 of 50")
    suite = description.load("mnist_uncut")
    assert [suite.row(c.labels) for c in suite.cells("study", [0]) if c.identity not in known] == [
        "FEDIC",
        "Vine, balanced softmax",
        "LDA, encoder of FedAvg",
        "LDA, encoder of RedGrape",
    ]


def test_mnist_full_is_a_part_of_tables_1_2_4_and_5() -> None:
    """Its cells of the paper's methods, and the paper's figures beside them."""
    suite = description.load("mnist_full")
    for column, main, tail in (("partial", "table2", "table5"), ("full", "table1", "table4")):
        table = description.load(main)
        theirs = {table.row(c.labels): c.identity for c in table.cells("paper", [0], ["mnist", "ir=100"])}
        cells = suite.cells("paper", [0], [f"participation={column}"])
        assert {suite.row(c.labels): c.identity for c in cells}.items() >= theirs.items()
        for measure, name in (("accuracy", main), ("tail", tail)):
            for row in METHODS:
                printed = description.load(name).paper_value(row, ("MNIST-LT", "IR 100"), measure)
                assert suite.paper_value(row, (column,), measure) == printed


AFTER = """
title = "Another head"
rows = ["method"]
measures = ["accuracy"]

[axes]
dataset = ["Digits"]

[methods]
"LDA" = { after = "FedAvg", rounds = 1, method = { name = "lda" } }
"FedAvg" = {}
"""


def test_a_line_starts_from_the_final_model_of_another(small: Path, command: Command, tmp_path: Path) -> None:
    """The other is run first, by name or as a part of the suite. A record holds no model, but finds the line again."""
    (small / "after.toml").write_text(AFTER)
    suite = description.load("after")

    def states(results: str = "results") -> dict[str, str]:
        found = found_cells.standings(suite.cells("quick", [0]), tmp_path / "runs", tmp_path / results)
        return {str(s.cell.labels["method"]): s.state for s in found}

    alone = good(command("reproduce", "after", "--seeds", "0", "--only", "method=LDA"))
    assert "starts from the model of 'Digits, FedAvg, seed 0', which was not run" in alone.out
    assert states() == {"LDA": "to run", "FedAvg": "to run"}
    good(command("reproduce", "after", "--seeds", "0", "--only", "method=FedAvg"))
    good(command("reproduce", "after", "--seeds", "0", "--record"))
    assert states() == {"LDA": "done", "FedAvg": "done"}
    first, second = (next((tmp_path / "runs").rglob(f"*{name}-seed0*")) for name in ("fedavg", "lda"))
    assert Experiment.read(second / "experiment.toml").start == str(first.relative_to(tmp_path))
    shutil.rmtree(tmp_path / "runs")
    assert states() == {"LDA": "recorded", "FedAvg": "recorded"}
    assert (
        "runs/" not in (tmp_path / "results" / "after-quick.jsonl").read_text()
    )  # the name of the start, not its folder
    good(command("reproduce", "after", "--seeds", "0", "--only", "method=FedAvg", "--no-run", "--results", "results"))
    lines = (tmp_path / "results" / "after-quick.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "fewer").mkdir()
    (tmp_path / "fewer" / "after-quick.jsonl").write_text("".join(line for line in lines if '"lda"' not in line))
    assert states("fewer")["LDA"].endswith("of which only a record is here")


@pytest.mark.parametrize("first", ["nothing", "LDA"])
def test_a_line_starts_from_a_line_that_starts_by_itself(small: Path, first: str) -> None:
    (small / "after.toml").write_text(AFTER.replace('after = "FedAvg"', f'after = "{first}"'))
    with pytest.raises(ConfigError, match=f"'LDA' starts from '{first}', which is no line"):
        description.load("after")


def test_a_suite_can_be_judged_by_held_out_examples(small: Path, command: Command) -> None:
    (small / "held.toml").write_text(RATES.replace('title = "Rates"', 'title = "Held out"\non = "validation"'))
    settings = small / "settings.toml"
    settings.write_text(settings.read_text().replace("head_cap = 20", "head_cap = 20\nvalidation = 2"))
    assert "validation accuracy in %" in good(command("reproduce", "held", "--seeds", "0")).out


OWN = """
title = "Mine beside others"
rows = ["method"]
measures = ["accuracy"]
axes = { dataset = ["Digits"] }

[methods]
"FedAvg" = {}
"Mine" = { method = { name = "mine.py" } }
"""


def test_a_suite_of_ones_own_shares_settings_and_cells(small: Path, command: Command, tmp_path: Path) -> None:
    """FedAvg has been run for another suite. Only the own method is left to run."""
    (tmp_path / "mine.toml").write_text(OWN)
    (tmp_path / "mine.py").write_text(
        "from redgrape.methods.fedavg import FedAvg\n\nclass Mine(FedAvg):\n    '''Mine.'''\n"
    )
    good(command("reproduce", "small", "--only", "digits", "fedavg"))
    assert "2 cells: 1 done, 1 to run" in good(command("reproduce", "mine.toml", "--plan")).out
    good(command("reproduce", "mine.toml"))
    assert [e["row"] for e in table_of(tmp_path / "runs/mine-quick")["entries"]] == ["FedAvg", "Mine"]
    assert "`redgrape reproduce mine.toml --scale quick`" in (tmp_path / "runs/mine-quick/table.md").read_text()
    refused = command("reproduce", "nowhere.toml")
    assert refused.code == 2 and "'nowhere.toml'" in refused.err and refused.err.count("\n") == 1


def test_clients_alone_count_once_all_are_finished() -> None:
    cells = description.load("frozen100").cells("quick", [0], ["ir=100", "alone"])
    assert [cell.experiment.data.alone for cell in cells] == list("0123456789")
    summary = {"averaged_rounds": [2], "extra_data": False}
    done = [
        Standing(c, RunView(Path("x"), {}, None, [], {**summary, "mean_of_last": {"accuracy": 0.1 * k}}))
        for k, c in enumerate(cells)
    ]
    suite = description.load("frozen100")
    row = "FedAvg, each client alone"
    assert tables.build(suite, done).at(row, ("IR 100",), "accuracy").mean == pytest.approx(0.45)
    assert tables.build(suite, [*done[:9], Standing(cells[9])]).at(row, ("IR 100",), "accuracy").mean is None


def test_identity_is_what_decides_the_result() -> None:
    values: dict[str, Any] = {"rounds": 30, "method": {"name": "creff", "preset": "appendix"}}
    ours = identity(Experiment.parse(values), {})
    same = {**values, "checkpoint_every": 7, "evaluate_every": 3, "method": {"name": "creff", "retrain_lr": "none"}}
    assert identity(Experiment.parse(same), {}) == ours
    for change in ({"rounds": 31}, {"seed": 1}, {"method": {"name": "creff"}}, {"data": {"ir": 51.0}}):
        assert identity(Experiment.parse({**values, **change}), {}) != ours
    assert identity(Experiment.parse(values), {"mine.py": "abc"}) != ours


# Choosing cells


def names_of(cells: list[Cell]) -> list[str]:
    return [cell.name for cell in cells]


def test_only_chooses_by_part_or_by_axis() -> None:
    suite = description.load("table2")

    def chosen(*only: str) -> list[str]:
        return names_of(suite.cells("study", [0], only))

    assert len(chosen("mnist")) == 21
    assert len(chosen("cifar")) == 42
    assert len(chosen("cifar10")) == 21  # the data set, though CIFAR-100-LT holds it as text
    assert len(chosen("ir=10")) == 21  # not 100
    assert len(chosen("dataset=cifar10", "ir=10", "ir=50")) == 14
    assert chosen("method=red", "mnist", "ir=100") == ["partial, MNIST-LT, IR 100, RedGrape, seed 0"]
    assert chosen("fed_focal", "cifar100", "ir=50") == ["partial, CIFAR-100-LT, IR 50, Fed-Focal, seed 0"]


def test_only_takes_a_label_before_the_variants_of_its_method() -> None:
    """`Vine` is a label of its own, and the method of its variants."""
    suite = description.load("vine")

    def chosen(method: str) -> list[str]:
        return [str(cell.labels["method"]) for cell in suite.cells("study", [0], ["digits, 10 of 10", method])]

    assert chosen("method=Vine") == ["Vine"]
    assert chosen("method=RedGrape, private") == ["RedGrape, private"]
    assert chosen("method=stateless") == ["Vine, stateless"]


@pytest.mark.parametrize("term", ["nothing", "method=nothing", "colour=red", "=", "ir="])
def test_only_names_what_there_is(term: str) -> None:
    with pytest.raises(ConfigError, match=r"there is .*dataset MNIST-LT, CIFAR-10-LT, .*ir 10, 50, 100; method FedAvg"):
        description.load("table2").cells("quick", None, [term])


def test_unknown_suites_and_scales_get_one_line(command: Command) -> None:
    outcome = command("reproduce", "table7")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "unknown suite 'table7'; did you mean 'table" in outcome.err
    outcome = command("reproduce", "table1", "--only", "nothing")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"Digits", "MNIST"', '"Digits", "SVHN"', "no rule says what dataset 'SVHN' means"),
        ('rows = ["method"]', 'rows = ["dataset"]', "axis 'method' tells neither rows nor columns apart"),
        ('references = ["FedAvg"]', 'references = ["FedSGD"]', "the reference 'FedSGD' is none of the rows"),
        ("[55.5, 66.6]", "[55.5]", "paper.accuracy.RedGrape has 1 figures"),
        ("FedAvg = [50.0, 60.0]", "FedSGD = [50.0, 60.0]", "paper.accuracy names no row of the table: FedSGD"),
        ('measures = ["accuracy"]', 'measures = ["f1"]', "'f1' is no measure"),
        ('claim = "none"', 'clame = "none"', "unknown key 'small.toml.clame'; did you mean 'claim'?"),
    ],
)
def test_a_suite_that_does_not_fit_together_is_refused(small: Path, old: str, new: str, message: str) -> None:
    assert old in SMALL
    (small / "small.toml").write_text(SMALL.replace(old, new))
    with pytest.raises(ConfigError, match=re.escape(message)):
        description.load("small")


# Running


def table_of(folder: Path) -> Any:
    return json.loads((folder / "table.json").read_text(), parse_constant=pytest.fail)


def test_a_suite_runs_and_names_what_it_could_not(small: Path, command: Command, tmp_path: Path) -> None:
    outcome = good(command("reproduce", "small"))
    assert "not run: MNIST, FedAvg, seed 0: data missing: mnist" in outcome.out
    assert "note: not run (data missing: mnist): 2 of 4 cells" in outcome.out
    assert "too short to compare methods: 2 rounds" in outcome.out
    assert "too few seeds to compare methods: 1 a cell" in outcome.out
    assert "compared with FedAvg by seed: too few seeds (1), 3 are needed" in outcome.out
    assert "rounds: 2 instead of 4 · seeds: 1 instead of 2" in " ".join(outcome.out.split())
    folder = tmp_path / "runs" / "small-quick"
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert files >= {"table.md", "table.tex", "table.csv", "table.json"}
    assert "- MNIST, FedAvg, seed 0: data missing: mnist" in (folder / "table.md").read_text()
    entries = table_of(folder)["entries"]
    assert [(e["row"], *e["column"]) for e in entries if e["mean"] is not None] == [
        ("FedAvg", "Digits"),
        ("RedGrape", "Digits"),
    ]
    ours = next(e for e in entries if e["mean"] is not None)
    run = next(cell for cell in table_of(folder)["cells"] if cell["state"] == "done")["run"]
    assert ours["mean"] == RunView.read(tmp_path / run).summary["mean_of_last"]["accuracy"]
    assert ours["difference"] == pytest.approx(100 * ours["mean"] - 50.0)


def test_a_table_says_which_runs_multiplied_in_bfloat16(small: Path, command: Command) -> None:
    told = good(command("reproduce", "small", "--only", "digits", "fedavg", "--precision", "bfloat16", "--record")).out
    assert "note: the encoder multiplied in bfloat16 (--precision): 1 of 1 runs" in told
    told = good(command("reproduce", "small", "--only", "digits", "--out", "others")).out
    assert "note: the encoder multiplied in bfloat16 (--precision): 1 of 2 runs" in told
    assert "so that figures may differ: device cpu" in told


def test_finished_cells_are_not_run_again(small: Path, command: Command, tmp_path: Path) -> None:
    """By another suite either, nor where the run lies elsewhere, saves more seldom, and has another name."""
    good(command("reproduce", "small", "--only", "digits"))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("metrics.jsonl")}
    assert len(before) == 2
    good(command("reproduce", "same", "--only", "digits"))
    (tmp_path / "runs" / "small-quick").rename(tmp_path / "runs" / "elsewhere")
    good(command("reproduce", "small", "--only", "digits"))
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("metrics.jsonl")}
    assert sorted(after.values()) == sorted(before.values())
    assert {e["measure"] for e in table_of(tmp_path / "runs" / "same-quick")["entries"]} == {"tail"}


def test_a_run_recorded_before_an_option_existed_is_still_found(small: Path, command: Command, tmp_path: Path) -> None:
    """Its experiment is parsed, so that an option that is not in it has its default."""
    good(command("reproduce", "small", "--only", "digits", "fedavg", "--record"))
    file = tmp_path / "results" / "small-quick.jsonl"
    ((name, record),) = records.read(file).items()
    data = dict(record["experiment"]["data"])
    assert data.pop("cutout") == 0
    records.add(file, {name: {**record, "experiment": {**record["experiment"], "data": data}}})
    plan = good(command("reproduce", "small", "--only", "digits", "--plan", "--out", "nowhere")).out
    assert re.search(r"Digits, FedAvg, seed 0 +recorded\n", plan)
    assert re.search(r"Digits, RedGrape, seed 0 +to run ", plan)
    good(command("reproduce", "small", "--only", "digits", "fedavg", "--out", "empty"))
    assert not list((tmp_path / "empty").rglob("metrics.jsonl"))
    assert table_of(tmp_path / "empty" / "small-quick")["entries"][0]["mean"] is not None


def test_plan_runs_nothing(small: Path, command: Command, tmp_path: Path) -> None:
    for flag in ("--plan", "--dry-run"):
        outcome = good(command("reproduce", "small", flag))
        assert not (tmp_path / "runs").exists()
        assert re.search(r"Digits, FedAvg, seed 0 +to run  2 rounds, about ", outcome.out)
        assert re.search(r"MNIST, FedAvg, seed 0 +data missing: mnist\n", outcome.out)
        assert "4 cells: 2 to run, 2 data missing: mnist" in outcome.out
    values = json.loads(good(command("reproduce", "small", "--plan", "--json")).out)
    assert [cell["state"] for cell in values["cells"]] == ["to run", "to run", *["data missing: mnist"] * 2]
    assert values["seconds"] == pytest.approx(sum(cell["seconds"] for cell in values["cells"]))


def test_no_run_writes_what_there_is(small: Path, command: Command, tmp_path: Path) -> None:
    outcome = good(command("reproduce", "small", "--no-run"))
    assert "No cell is finished." in outcome.out
    assert "note: not run: 4 of 4 cells" in outcome.out
    assert not list((tmp_path / "runs").rglob("experiment.toml"))


KILLED = """
import sys
from pathlib import Path
from redgrape.cli import main as cli
from redgrape.reading.suites import files
files.FOLDERS = (Path(sys.argv[1]),)
cli.main(sys.argv[2:])
"""


KILLED_IN_TURN = """
import os, sys
from pathlib import Path
from redgrape.cli import main as cli
import redgrape.cli.commands.training
from redgrape.reading.suites import files
files.FOLDERS = (Path(sys.argv[1]),)
for point in ("rename:4", "fsync:9", "write:7"):
    child = os.fork()
    if child == 0:
        os.environ["REDGRAPE_CRASH_AT"] = point
        os._exit(cli.run(sys.argv[2:]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 137, point
"""


def test_killed_and_called_again_it_goes_on(small: Path, command: Command, tmp_path: Path) -> None:
    """Ended in the middle of a save, in the middle of a line, between two cells: the table is that of a quiet run."""
    call = ["reproduce", "rates", "--workers", "1", "--quiet", "--out", "killed"]
    environment = {**os.environ, "PYTHONPATH": str(Path(redgrape.__file__).parents[1])}
    line = [sys.executable, "-c", KILLED_IN_TURN, str(small), *call]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    begun = good(command("reproduce", "rates", "--plan", "--out", "killed")).out
    assert re.search("begun, at round [12]|done", begun)
    for name in ("killed", "quiet"):
        good(command("reproduce", "rates", "--out", name))
    killed, quiet = (table_of(tmp_path / name / "rates-quick") for name in ("killed", "quiet"))
    assert killed["entries"] == quiet["entries"]
    assert all(entry["mean"] is not None for entry in killed["entries"])
    assert len(list((tmp_path / "killed").rglob("experiment.toml"))) == 2


def test_a_cell_in_use_is_passed_over(small: Path, command: Command, tmp_path: Path) -> None:
    first, _ = description.load("rates").cells("quick")
    folder = RunFolder.create(tmp_path / "runs" / "rates-quick" / first.folder, first.experiment)
    with folder.locked():
        outcome = good(command("reproduce", "rates"))
    assert f"not run: {first.name}: in use by another process" in outcome.out
    states = [cell["state"] for cell in table_of(tmp_path / "runs" / "rates-quick")["cells"]]
    assert states == ["in use by another process", "done"]


def test_a_cell_that_fails_does_not_stop_the_others(small: Path, command: Command, tmp_path: Path) -> None:
    (small / "rates.toml").write_text(RATES.replace("[0.01, 0.1]", "[1e9, 0.1]"))
    outcome = command("reproduce", "rates")
    assert outcome.code == 3
    assert outcome.err.count("\n") == 1
    assert "Digits, FedAvg, lr 1e+09, seed 0" in outcome.err
    states = [cell["state"] for cell in table_of(tmp_path / "runs" / "rates-quick")["cells"]]
    assert states[1] == "done"
    assert states[0] not in ("done", "to run")


OTHER_RATES = RATES.replace('"Rates"', '"Other rates"')


def test_a_cell_that_another_suite_has_come_to_is_not_run_again(
    small: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first cell runs, another suite begins, passes over that cell and does the second."""
    (small / "other.toml").write_text(OTHER_RATES)
    carry_out, others = suites.carry_out, []

    def meanwhile(folder: RunFolder, options: Any, label: str, *, heading: str) -> bool:
        if not others:
            others.append("reproduce other")
            with folder.locked():
                good(command("reproduce", "other"))
        return carry_out(folder, options, label, heading=heading)

    monkeypatch.setattr(suites, "carry_out", meanwhile)
    good(command("reproduce", "rates"))
    runs = sorted(path.parent.parent.name for path in (tmp_path / "runs").rglob("experiment.toml"))
    assert runs == ["other-quick", "rates-quick"]
    assert [cell["state"] for cell in table_of(tmp_path / "runs" / "rates-quick")["cells"]] == ["done", "done"]
    states = [cell["state"] for cell in table_of(tmp_path / "runs" / "other-quick")["cells"]]
    assert states == ["in use by another process", "done"]


def test_suites_started_at_once_run_each_cell_once(small: Path, tmp_path: Path) -> None:
    (small / "other.toml").write_text(OTHER_RATES)
    environment = {**os.environ, "PYTHONPATH": str(Path(redgrape.__file__).parents[1])}
    arguments = ["--workers", "1", "--quiet"]
    lines = [[sys.executable, "-c", KILLED, str(small), "reproduce", n, *arguments] for n in ("rates", "other")]
    processes = [subprocess.Popen(line, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) for line in lines]
    assert [process.wait() for process in processes] == [0, 0]
    runs = [path.parent for path in (tmp_path / "runs").rglob("experiment.toml")]
    assert len(runs) == 2
    assert all((run / "summary.json").exists() for run in runs)


@pytest.mark.parametrize(
    ("workers", "asked", "expected"),
    [
        (2, None, (1, 2)),
        (7, None, (1, 7)),
        (8, None, (2, 4)),
        (100, None, (4, 25)),  # there are no more cells
        (2, 2, (2, 1)),
        (1, 3, (3, 1)),
        (8, 1, (1, 8)),
    ],
)
def test_cells_run_side_by_side_where_there_are_workers_for_all_clients(
    workers: int, asked: int | None, expected: tuple[int, int]
) -> None:
    values = {"data.clients": 9, "clients_per_round": 4}
    grid_of_four = grid.suite("g", {}, [f"{key}={value}" for key, value in values.items()], [0, 1, 2, 3])
    cells = [Standing(cell) for cell in grid_of_four.cells("sweep")]
    unable = Standing(replace(cells[0].cell, experiment=Experiment()), obstacle="data missing: mnist")
    assert side_by_side.shares([*cells, unable], workers, asked) == expected
    assert side_by_side.shares([unable], workers, asked) == (1, workers)


def test_processes_share_a_grid(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is done by them: nothing is left to the one that started them."""
    monkeypatch.setattr(suites, "carry_out", pytest.fail)
    monkeypatch.setenv("PYTHONPATH", str(Path(redgrape.__file__).parents[1]))
    good(command(*SWEEP, "--method", "fedavg", "method.lr=0.01,0.03,0.1", "--side-by-side", "2"))
    assert [cell["state"] for cell in table_of(tmp_path / "runs" / "sweep")["cells"]] == ["done"] * 3
    assert len(list((tmp_path / "runs").rglob("experiment.toml"))) == 3


def test_control_c_ends_all_that_run_side_by_side(tmp_path: Path) -> None:
    """A terminal sends it to every process of the group: one line, no traceback, and nobody holds a run any more."""
    arguments = [*SWEEP, "--rounds", "99999", "--method", "fedavg", "method.lr=0.01,0.1", "--side-by-side", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "redgrape", *arguments, "--workers", "2", "--quiet"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(redgrape.__file__).parents[1])},
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    while len(list(tmp_path.rglob("metrics.jsonl"))) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err.count("\n")) == (130, 1), err
    assert err.startswith("redgrape: interrupted; run the same command to continue")
    for path in tmp_path.rglob("metrics.jsonl"):
        with RunFolder.open(path.parent).locked():
            pass


def test_a_cell_is_recorded_once(small: Path, command: Command, tmp_path: Path) -> None:
    """Called again, by another suite, and where the record lies in another folder."""
    (small / "other.toml").write_text(OTHER_RATES)
    assert good(command("reproduce", "rates", "--record")).err.count("recorded: ") == 2
    (tmp_path / "results" / "rates-quick.jsonl").rename(tmp_path / "results" / "elsewhere.jsonl")
    for name in ("rates", "other"):
        assert "recorded: " not in good(command("reproduce", name, "--record")).err
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["elsewhere.jsonl"]


@pytest.mark.parametrize("file", ["metrics.jsonl", "summary.json", "experiment.toml"])
def test_a_damaged_run_stops_no_other_cell(small: Path, command: Command, tmp_path: Path, file: str) -> None:
    """It is told, and the tables are written; where the cell has a record, that counts."""
    first, second = description.load("rates").cells("quick")
    good(command("reproduce", "rates", "--only", "lr=0.01", "--record"))
    home = tmp_path / "runs" / "rates-quick"
    run = home / first.folder
    (run / file).write_bytes((run / file).read_bytes().replace(b"a", b"\xff", 1))
    outcome = command("reproduce", "rates", "--results", "nowhere")
    assert outcome.code == 74
    assert outcome.err.startswith(f"redgrape: {first.name}: ")
    assert "damaged" in outcome.err
    damaged, done = (cell["state"] for cell in table_of(home)["cells"])
    assert "damaged" in damaged
    assert done == "done"
    assert (home / second.folder / "summary.json").exists()
    good(command("reproduce", "rates"))
    assert [cell["state"] for cell in table_of(home)["cells"]] == ["recorded", "done"]


# The page of a suite


def reported(*arguments: object) -> dict[str, Any]:
    """The data of the page of these."""
    assert cli.run(["report", *map(str, arguments), "--out", "page.html"]) == 0
    (block,) = re.findall(r'id="data">(.*?)</script>', Path("page.html").read_text(), flags=re.DOTALL)
    data: dict[str, Any] = json.loads(block)
    return data


def test_the_page_of_a_suite_holds_its_table_and_its_command(small: Path, command: Command, tmp_path: Path) -> None:
    good(command("reproduce", "small", "--seeds", "0,1,2"))
    data = reported("runs/small-quick")
    (suite,) = data["suites"]
    assert suite["title"] == "Small (scale quick)"
    assert suite["command"] == "redgrape reproduce small --scale quick --seeds 0,1,2"
    results, compared = suite["blocks"]
    assert results["header"] == ["method", "Digits", "paper", "difference"]
    entry = table_of(tmp_path / "runs" / "small-quick")["entries"][0]
    words = [f"{100 * entry['mean']:.2f} ± {100 * entry['std']:.2f}", "50.00", f"{entry['difference']:+.2f}"]
    assert [place[0] for place in results["rows"][0]] == ["FedAvg", *words]
    assert sum(place[1] for row in results["rows"] for place in row) == 1
    assert compared["title"] == "minus FedAvg, by seed, in points"
    assert "note: too short to compare methods: 2 rounds" in suite["caption"]
    assert any("rounds: 2 instead of 4" in line for line in suite["caption"])
    assert suite["not_run"][0] == ["MNIST, FedAvg, seed 0", "data missing: mnist"]
    assert [(m["label"], len(m["runs"])) for m in data["settings"][0]["methods"]] == [("fedavg", 3), ("redgrape", 3)]


def test_a_suite_whose_runs_lie_elsewhere_has_a_page(
    small: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs are of another suite and a record; it is named by folder, by name, and from another place."""
    good(command("reproduce", "small", "--only", "digits", "fedavg", "--record", "--out", "gone"))
    good(command("reproduce", "small", "--only", "digits", "redgrape"))
    good(command("reproduce", "same", "--only", "digits"))
    names = {"results/small-quick.jsonl", "runs/small-quick"}
    for place in ("runs/same-quick", "same"):
        data = reported(place)
        assert {str(Path(run).parent) for run in data["runs"]} == names
        assert data["suites"][0]["command"] == "redgrape reproduce same --scale quick --only digits"
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    assert len(reported(tmp_path / "runs" / "same-quick")["runs"]) == 2


def test_a_page_names_the_runs_that_are_gone(
    small: Path, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good(command("reproduce", "rates"))
    first, second = (cell["run"] for cell in table_of(tmp_path / "runs" / "rates-quick")["cells"])
    shutil.rmtree(tmp_path / first)
    data = reported("runs/rates-quick")
    assert list(data["runs"]) == [second]
    assert [run["name"] for run in data["damaged"]] == [first]
    assert f"note: '{first}' is left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as the table of a suite"),
        ("[]", "cannot be read as the table of a suite"),
        ('{"cells": [{"run": 1}]}', "cannot be read as the table of a suite"),
        ('{"cells": [], "scale": null, "title": "", "blocks": [], "caption": [], "command": ""}', "no cell of"),
        (None, "there is no folder 'some'"),
    ],
)
def test_what_is_no_suite_is_one_line(
    content: str | None, message: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("some").mkdir()
        Path("some/table.json").write_text(content)
    assert cli.run(["report", "some"]) == 74
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_suite_that_has_not_been_reproduced_says_how(
    small: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["report", "small"]) == 74
    assert "run `redgrape reproduce small`" in capsys.readouterr().err


def test_a_strangers_table_adds_nothing_to_the_page(small: Path, command: Command, tmp_path: Path) -> None:
    good(command("reproduce", "rates"))
    path = tmp_path / "runs" / "rates-quick" / "table.json"
    hostile = "</script><script>alert(1)</script>\x1b[31m\u202e"
    values = json.loads(path.read_text())
    values |= {"title": hostile, "command": hostile, "caption": [hostile]}
    values["blocks"][0]["rows"][0][0]["text"] = hostile
    path.write_text(json.dumps(values))
    (suite,) = reported("runs/rates-quick")["suites"]
    assert suite["command"] == "</script><script>alert(1)</script>\ufffd[31m\ufffd"
    assert Path("page.html").read_text().count("<script") == 2


# Sweeps


SWEEP = ["sweep", "--data", "digits", "--net", "linear", "--clients", "2", "--rounds", "2", "-c", "data.head_cap=20"]


def test_sweep_runs_a_grid(command: Command, tmp_path: Path) -> None:
    arguments = [*SWEEP, "-c", "method.name=fedavg", "method.lr=0.01,0.1", "data.tail_classes=[0,1],[2]"]
    outcome = good(command(*arguments, "--seeds", "0,1"))
    table = table_of(tmp_path / "runs" / "sweep")
    assert [e["row"] for e in table["entries"] if e["measure"] == "tail"] == [
        "0.01, [0, 1]",
        "0.01, [2]",
        "0.1, [0, 1]",
        "0.1, [2]",
    ]
    assert all(len(entry["seeds"]) == 2 for entry in table["entries"] if entry["measure"] != "middle")  # named tails
    assert "mean of the last round, ± standard deviation over seeds" in outcome.out
    repeated = good(command(*shlex.split(table["command"])[1:], "--plan"))
    assert "8 cells: 8 done\nnothing to run" in repeated.out


def test_sweep_compares_with_the_first_row_or_another(command: Command, tmp_path: Path) -> None:
    arguments = [*SWEEP, "--method", "fedavg", "method.lr=0.01,0.1", "--seeds", "0,1,2"]
    outcome = good(command(*arguments))
    assert "minus row 0.01, by seed, in points" in outcome.out
    assert "note: choosing method.lr by test accuracy is tuning on the test set" in outcome.out
    assert {*table_of(tmp_path / "runs" / "sweep")["entries"][-1]["against"]} == {"0.01"}
    good(command(*arguments, "--reference", "0.1"))
    table = table_of(tmp_path / "runs" / "sweep")
    assert {*table["entries"][0]["against"]} == {"0.1"}
    assert "--reference 0.1" in table["command"]
    wrong = command(*arguments, "--reference", "0.2")
    assert (wrong.code, wrong.err) == (2, "redgrape: --reference '0.2' is none of the rows: 0.01; 0.1\n")


def test_methods_and_data_are_compared_on_the_test_set_without_a_warning(command: Command) -> None:
    assert "tuning" not in good(command(*SWEEP, "method.name=fedavg,fedprox", "method.lr=0.1", "data.ir=2,4")).out


def test_notes_of_a_sweep_over_data_say_which_data_they_are_of(command: Command, tmp_path: Path) -> None:
    """The sets have three and four classes, and the last class of each has few test examples."""
    for classes in (3, 4):
        y, few = np.arange(20 * classes) % classes, np.repeat(np.arange(classes), [*[12] * (classes - 1), classes])
        np.savez(tmp_path / f"{classes}.npz", x=np.eye(4)[y], y=y, x_test=np.eye(4)[few], y_test=few)
    words = ["sweep", "--method", "fedavg", "--net", "linear", "--clients", "2", "--rounds", "1"]
    out = good(command(*words, "data.source=3.npz,4.npz", "method.lr=0.1,0.2")).out.replace("\n  ", " ")
    assert "note: data.source 3.npz: fewer than 10 test examples of class 2 (3)" in out
    assert "note: data.source 4.npz: fewer than 10 test examples of class 3 (4)" in out


def test_an_axis_may_hold_what_the_method_needs(command: Command) -> None:
    outcome = good(command(*SWEEP, "--method", "fedic", "data.auxiliary=4,8", "-c", "seed=3", "--plan"))
    assert "data.auxiliary 4, seed 3" in outcome.out


def test_a_grid_of_a_method_of_ones_own_sees_that_its_file_has_changed(
    command: Command, remembering: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(remembering.read_text())
    arguments = [*SWEEP, "-c", "method.name=mine.py", "method.lr=0.1"]
    good(command(*arguments))
    assert "1 done" in good(command(*arguments, "--plan")).out
    mine.write_text(remembering.read_text() + "\n# changed\n")
    assert "1 to run" in good(command(*arguments, "--plan")).out


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (["method.lr=0.1,0.1"], "names a value twice"),
        (["method.lr=0.1", "method.lr=0.2"], "'method.lr' is named twice"),
        (["method.lr"], "is not of the form key=value,value"),
        (["method.lr="], "is not of the form key=value,value"),
        (["seed=0,1"], "pass them with --seeds"),
        (["method.lr=0.1", "-c", "seed=x"], "seed is 'x'"),
        (["method.lrr=1"], "unknown key 'method.lrr'"),
        (["lr=1"], "unknown key 'lr'; did you mean 'method.lr'"),
        (["method.lr=x"], "method.lr x: method.lr is 'x'"),
        (["method.lr=0.1", "--on", "validation"], "data.validation is 0"),
        (["method.lr=0.1..1", "--search", "2", "--plan"], "--plan cannot predict"),
        (["method.lr=1..0.1", "--search", "2"], "is no range; write low..high"),
        (["method.lr=0..1:log", "--search", "2"], "its low end must be above 0"),
        (["method.lr=1..inf", "--search", "2"], "is no range; write low..high"),
        (["method.lr=0.1..1", "method.lr=2..3", "--search", "2"], "'method.lr' is named twice"),
        (["seed=0..5", "--search", "2"], "pass them with --seeds"),
        (["=0.1..1", "--search", "2"], "is not of the form key=value,value"),
    ],
)
def test_bad_grids_get_one_line(command: Command, axes: list[str], message: str, tmp_path: Path) -> None:
    outcome = command(*SWEEP, *axes)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert message in outcome.err
    assert not (tmp_path / "runs").exists()


def test_values_are_split_outside_brackets_and_quotes() -> None:
    assert grid.labels("a.b=1,2.5,true,x") == [1, 2.5, True, "x"]
    assert grid.labels("a=[0,1],[2]") == [[0, 1], [2]]
    assert grid.labels('a="x,y",z') == ["x,y", "z"]


class Sampler:
    """Stands for Optuna: proposes the low end, then the high one, and remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.asked = 0

    def ask(self) -> Sampler:
        self.asked += 1
        return self

    def suggest_float(self, key: str, low: float, high: float, log: bool) -> float:
        assert (key, log) == ("method.lr", True)
        return low if self.asked == 1 else high

    def suggest_categorical(self, key: str, choices: list[str]) -> str:
        return choices[-1]

    def tell(self, trial: Any, value: float | None = None, state: Any = None) -> None:
        self.told.append(value)


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Sampler:
    study = Sampler()
    optuna = types.SimpleNamespace(
        logging=types.SimpleNamespace(set_verbosity=lambda level: None, WARNING=30),
        samplers=types.SimpleNamespace(TPESampler=lambda seed: None),
        create_study=lambda direction, sampler: study,
        trial=types.SimpleNamespace(TrialState=types.SimpleNamespace(FAIL="fail")),
    )
    monkeypatch.setitem(sys.modules, "optuna", optuna)
    return study


SEARCH = ["method.lr=0.001..0.1:log", "method.optimizer=sgd", "--search", "2", "-c", "method.name=fedavg"]


def test_search_looks_at_the_validation_set_alone(command: Command, sampler: Sampler, tmp_path: Path) -> None:
    outcome = good(command(*SWEEP, *SEARCH, "-c", "data.validation=5"))
    table = table_of(tmp_path / "runs" / "sweep")
    assert table["on"] == "validation"
    scores = [e["mean"] for e in table["entries"] if e["measure"] == "balanced"]
    views = [RunView.read(tmp_path / cell["run"]) for cell in table["cells"]]
    assert scores == sampler.told == [view.summary["validation"]["balanced"] for view in views]
    best = ["0.001", "0.1"][max((0, 1), key=lambda i: scores[i])]
    assert f"best on validation: -c method.lr={best} -c method.optimizer=sgd" in outcome.err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["data=1,2"], "data"),
        (["method.lr=0.1", "-c", "data=5"], "data"),
        (["data.alone=each client", "-c", "data.clients=x"], "data.clients"),
    ],
)
def test_a_sweep_of_what_cannot_be_is_refused_in_one_line(command: Command, words: list[str], complaint: str) -> None:
    outcome = command("sweep", *words, "--plan")
    assert outcome.code == 2 and complaint in outcome.err and len(outcome.err.strip().splitlines()) == 1


def test_a_client_alone_needs_no_number_of_clients(command: Command) -> None:
    assert len(good(command("sweep", "data.alone=each client", "--plan")).out.splitlines()) >= 1


def test_search_without_a_validation_set_is_refused(command: Command, sampler: Sampler, tmp_path: Path) -> None:
    outcome = command(*SWEEP, *SEARCH)
    assert outcome.code == 2
    assert "must not be chosen on the test set" in outcome.err
    assert not (tmp_path / "runs").exists()


def test_search_without_optuna_says_what_to_install(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    outcome = command(*SWEEP, *SEARCH, "-c", "data.validation=5")
    assert (outcome.code, outcome.err) == (2, f"redgrape: --search needs Optuna; {install('search')}\n")


# Figures: by hand


def test_paired_interval_by_hand() -> None:
    """Differences 2, 3 and 1 points: mean 2, standard deviation 1; t with 2 degrees is 4.303, so the half width is
    4.303 / sqrt(3) = 2.4844. With 2, 2.1, 1.9 it is a tenth of that."""
    theirs = {0: 0.88, 1: 0.89, 2: 0.90}
    wide = statistics.paired({0: 0.90, 1: 0.92, 2: 0.91}, theirs)
    assert (wide.mean, wide.low, wide.high) == pytest.approx((0.02, 0.02 - 0.024844, 0.02 + 0.024844), abs=1e-6)
    assert wide.separated is False
    assert blocks.verdict(wide) == "+2.00 [-0.48, +4.48], not separated"
    narrow = statistics.paired({0: 0.900, 1: 0.911, 2: 0.919}, theirs)
    assert (narrow.low, narrow.high) == pytest.approx((0.0175156, 0.0224844), abs=1e-6)
    assert narrow.separated is True and statistics.paired(theirs, {0: 0.900, 1: 0.911, 2: 0.919}).separated is True
    assert blocks.verdict(narrow) == "+2.00 [+1.75, +2.25]"


def test_too_few_common_seeds_are_not_compared() -> None:
    pair = statistics.paired({0: 0.9, 1: 0.9, 5: 0.9}, {0: 0.8, 1: 0.8, 2: 0.8})
    assert (pair.seeds, pair.separated) == (2, None)
    assert blocks.verdict(pair) == "+10.00, too few seeds (2)"
    assert blocks.verdict(statistics.paired({0: 0.9}, {1: 0.9})) == "–"


def test_student_quantiles_fall_towards_the_normal() -> None:
    values = [statistics.quantile(freedom) for freedom in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert (values[0], values[1], values[9], values[29]) == (12.706, 4.303, 2.228, 2.042)
    for freedom, value in enumerate(values, start=1):
        exact = student.ppf(0.975, freedom)
        assert (exact - 5e-4 if freedom <= 30 else exact) <= value <= exact + (5e-4 if freedom <= 30 else 0.003)
    assert statistics.quantile(10**9) == pytest.approx(1.960, abs=0.001)


def standing(
    suite: Suite, row: str, seed: int, accuracy: float | None, rounds: int = 40, rise: float = 0.0
) -> Standing:
    """A finished cell with this accuracy, of which nothing but the figures is there; None: not finished."""
    (cell,) = [c for c in suite.cells("paper", [seed]) if suite.row(c.labels) == row]
    if accuracy is None:
        return Standing(cell)
    scores = [accuracy - (rise if number <= rounds - 10 else 0.0) for number in range(1, rounds + 1)]
    metrics = [{"round": i, "test": {"accuracy": score, "tail": score}} for i, score in enumerate(scores, start=1)]
    means = {"accuracy": accuracy, "tail": accuracy / 2}
    summary = {"mean_of_last": means, "averaged_rounds": list(range(rounds - 9, rounds + 1)), "extra_data": False}
    return Standing(cell, RunView(Path("somewhere"), {"rounds": rounds}, None, metrics, summary))


def written(
    name: str, accuracies: dict[str, list[float | None]], brief: dict[str, int] | None = None, **options: Any
) -> tables.Table:
    """A table of these accuracies by row, a seed each. `brief`: rows with another number of rounds."""
    rules = [Rule(when={"variant": row}, set={"method": {"lr": 0.01 * (i + 1)}}) for i, row in enumerate(accuracies)]
    rules += [Rule(when={"variant": row}, set={"rounds": n}) for row, n in (brief or {}).items()]
    suite = Suite(
        name=name,
        title="By hand",
        axes={"variant": list(accuracies)},
        rows=["variant"],
        columns=[],
        measures=["accuracy"],
        references=[next(iter(accuracies))],
        experiment={"rounds": options.get("rounds", 40)},
        rules=rules,
        paper={"accuracy": {row: [90.0] for row in accuracies}},
    )
    found = [
        standing(suite, row, seed, accuracy, **options)
        for row, column in accuracies.items()
        for seed, accuracy in enumerate(column)
    ]
    return tables.build(suite, found, scale="paper")


def test_table_by_hand() -> None:
    """A: mean 0.90, standard deviation sqrt((0.0001 + 0 + 0.0001) / 2) = 0.01. B is 0.03 above it with every seed, C
    has one seed. The paper's figure is 90 for all."""
    table = written("hand", {"A": [0.89, 0.90, 0.91], "B": [0.92, 0.93, 0.94], "C": [0.93, None, None]})
    results, compared = formats.blocks(table)
    assert results.header == ["variant", "overall", "paper", "difference"]
    assert [[place.text for place in row] for row in results.rows] == [
        ["A", "90.00 ± 1.00", "90.00", "+0.00"],
        ["B", "93.00 ± 1.00", "90.00", "+3.00"],
        ["C", "93.00 (1 of 3 seeds)", "90.00", "+3.00"],
    ]
    assert [[place.bold for place in row] for row in results.rows] == [[False, i > 0, False, False] for i in range(3)]
    assert compared.title == "minus A, by seed, in points"
    assert [[place.text for place in row] for row in compared.rows] == [
        ["B", "+3.00 [+3.00, +3.00]"],
        ["C", "+4.00, too few seeds (1)"],
    ]
    assert table.notes[0].startswith("too few seeds to compare methods: 1, 3 a cell")
    assert table.notes[1] == "not run: 2 of 9 cells"
    text = formats.markdown(table)
    assert re.search(r"\| B +\| +\*\*93.00 ± 1.00\*\* \| 90.00 \| +\+3.00 \|", text)
    assert "95 % interval (paired t), each by itself, not corrected for their number" in text


def test_notes_tell_short_runs_and_rising_ones() -> None:
    three = [0.5, 0.5, 0.5]
    assert written("n", {"A": three, "B": three}).notes == []
    assert written("n", {"A": three, "B": three}, rise=0.009).notes == []
    (note,) = written("n", {"A": three, "B": three}, rise=0.02).notes
    assert note == "still learning at the end, up by more than a point in the last rounds: 6 of 6 runs"
    (note,) = written("n", {"A": three, "B": [0.5, 0.4, 0.5]}, rise=-0.04).notes
    assert note == "worse at the end, down by more than 3 points in the last rounds: 6 of 6 runs"
    assert written("n", {"A": three, "B": three}, rise=0.5, rounds=20).notes == []  # only the warm-up was lower
    (note,) = written("n", {"A": three, "B": three}, rounds=19).notes
    assert note == "too short to compare methods: 19 rounds"
    assert written("n", {"A": three, "B": three}, brief={"B": 2}).notes == []  # a head from sums
    (note,) = written("n", {"A": three, "B": three}, brief={"B": 3}).notes
    assert note == "too short to compare methods: 3 rounds"


def test_the_change_at_the_end_of_a_short_run() -> None:
    """Of 20 rounds the first ten are a warm-up. The second half of the others is up by 0.5 in the mean."""
    metrics = [{"round": i, "test": {"accuracy": 0.0 if i <= 10 else i / 10}} for i in range(1, 21)]
    view = RunView(Path("somewhere"), {}, None, metrics, None)
    assert tables._change(view, "test") == pytest.approx(0.5)
    assert tables._change(replace(view, metrics=metrics[:10]), "test") == 0.0


def test_the_change_at_the_end_is_against_the_twenty_rounds_before() -> None:
    """A point each round up to 60: the mean of 51 to 60 is 55.5, and of 31 to 50 it is 40.5."""
    metrics = [{"round": i, "test": {"accuracy": i / 100}} for i in range(1, 61)]
    assert tables._change(RunView(Path("somewhere"), {}, None, metrics, None), "test") == pytest.approx(0.15)


def test_nothing_is_bold_where_nothing_is_better() -> None:
    assert "**5" not in formats.markdown(written("n", {"A": [0.5], "B": [0.5]}))
    assert "**5" not in formats.markdown(written("n", {"A": [0.5], "B": [None]}))
    assert "**50.00**" in formats.markdown(written("n", {"A": [0.5], "B": [0.4]}))


def test_the_note_on_learning_reads_the_set_of_the_table() -> None:
    """On the validation set the accuracy rises by two points at the end, on the test set it stays."""
    table = written("n", {"A": [0.5, 0.5, 0.5]}, rise=0.02)
    for s in table.standings:
        assert s.view is not None and s.view.summary is not None
        s.view.summary["validation"] = s.view.summary["mean_of_last"]
        for record in s.view.metrics:
            record["validation"] = record["test"]
            record["test"] = {"accuracy": 0.5}
    assert tables.build(table.suite, table.standings).notes == []
    (note,) = tables.build(table.suite, table.standings, on="validation").notes
    assert note.startswith("still learning at the end")


def test_the_note_on_learning_names_the_cells_by_what_tells_them_apart() -> None:
    table = written("n", {"A": [0.5, 0.5, 0.5], "B": [0.5, 0.5, 0.5]}, rise=0.02)
    calm = [standing(table.suite, "A", seed, 0.5) for seed in range(3)]
    (note,) = tables.build(table.suite, [*calm, *table.standings[3:]]).notes
    assert note.endswith("3 of 6 runs (B)")
    alone = written("n", {"A": [0.5, 0.5, 0.5]}, rise=0.02)
    (note,) = tables.build(alone.suite, [standing(alone.suite, "A", 0, 0.5), *alone.standings[1:]]).notes
    assert note.endswith("2 of 3 runs")


def test_every_row_has_a_look_of_its_own() -> None:
    for count in range(1, 25):
        rows = [*map(str, range(count - 1)), "RedGrape"]
        assert len(set(curves.looks(rows).values())) == count


def test_the_picture_shows_what_was_run_where_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row without a run is in the legend, and the first rounds, from 5 %, do not press the rest together."""
    from matplotlib.figure import Figure

    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    table = written("n", {"A": [0.9], "B": [None], "C": [0.8]})
    for s in table.standings:
        for record in s.view.metrics[:3] if s.view else []:
            record["test"]["accuracy"] = 0.05
    curves.draw(table, tmp_path / "curves.png")
    (figure,) = saved
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["A", "C"]
    assert figure.axes[0].get_ylim()[0] == pytest.approx(79)


NASTY = {"=1+1": [0.5], r"50% & {a}_b \x ~^": [0.4], "a|b <i>": [0.3], "@x": [0.2]}


def test_latex_is_escaped() -> None:
    text = formats.latex(written("nasty", NASTY))
    assert r"50\% \& \{a\}\_b \textbackslash{}x \textasciitilde{}\textasciicircum{} & 40.00 & 90.00 & -50.00 \\" in text
    assert r"a\textbar{}b \textless{}i\textgreater{}" in text
    for line in text.split("\n"):
        if not line.startswith(("%", "\\")) and line:
            assert len(re.findall(r"(?<!\\)&", line)) == 3
    optional = formats.latex(written("options", {"A": [0.4], "[2pt] x": [0.5], "*": [0.3]}))
    assert "\n{[}2pt] x & " in optional  # after the \\\\ of the line before
    assert "\n{*} & " in optional
    with_std = formats.latex(written("std", {"A": [0.5, 0.6], "B": [0.1, 0.2]}))
    assert r"\textbf{55.00 $\pm$ 7.07}" in with_std


def test_csv_holds_no_formula() -> None:
    lines = list(csv.DictReader(io.StringIO(formats.as_csv(written("nasty", NASTY)))))
    assert [line["variant"] for line in lines] == ["'=1+1", r"50% & {a}_b \x ~^", "a|b <i>", "'@x"]
    assert [float(line["difference"]) for line in lines] == pytest.approx([-40, -50, -60, -70])
    assert lines[0]["paper"] == "90.0000"
    assert lines[0]["std"] == ""


def test_markdown_cells_stay_cells() -> None:
    text = formats.markdown(written("nasty", NASTY))
    assert r"a\|b \<i>" in text
    for line in text.split("\n"):
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 5


@pytest.mark.parametrize(
    ("label", "escaped"),
    [
        ("[x](http://e) _a_ ~~b~~", r"[x\](http://e) \_a\_ \~\~b\~\~"),
        ("[x][y] [z]: u ![i](j)", r"[x\][y] [z\]: u ![i\](j)"),
        ("__init__ &lt;b&gt; a & b", r"\_\_init\_\_ \&lt;b\&gt; a & b"),
        ("data.head_cap [0, 1] +2.00 [-0.48, +4.48]", "data.head_cap [0, 1] +2.00 [-0.48, +4.48]"),
    ],
)
def test_labels_are_text_in_markdown(label: str, escaped: str) -> None:
    assert f"| {escaped} " in formats.markdown(written("n", {label: [0.5]}))


# Time


def test_estimates_follow_what_was_measured() -> None:
    """The model times the ratio of the runs most like the cell: of its method, else of its net, else of all."""
    (cell,) = description.load("table2").cells("study", None, ["mnist", "ir=100", "redgrape"])
    model = cost.modelled(cell.experiment, workers=2)
    assert model is not None
    here = Standing(cell)

    def estimate(*measured: cost.Measured) -> float:
        seconds = cost.seconds_left(here, measured, workers=2)
        assert seconds is not None
        return (seconds - cost.START) / 100 / model

    other = cost.Measured("cifar10", "resnet8", "fedavg", 7.0)
    same_net = cost.Measured("mnist", "cnn", "fedavg", 3.0)
    same = cost.Measured("mnist", "cnn", "redgrape", 2.0)
    assert estimate() == pytest.approx(1.0)
    assert estimate(other) == pytest.approx(7.0)
    assert estimate(other, same_net) == pytest.approx(3.0)
    assert estimate(other, same_net, same) == pytest.approx(2.0)
    assert cost.modelled(cell.experiment, workers=1) > 1.5 * model


def test_a_head_on_stored_features_is_estimated_as_one() -> None:
    """A pretrained encoder runs once for all runs, so a round of its head costs a small part of a net's round."""
    (head,) = description.load("frozen10").cells("study", [0], ["ir=100", "method=FedAvg"])
    (net,) = description.load("creff_table").cells("study", [0], ["method=FedAvg"])
    seconds = [cost.modelled(cell.experiment, workers=2) for cell in (head, net)]
    assert seconds[0] is not None and seconds[1] is not None
    assert seconds[0] < seconds[1] / 10


def test_estimates_know_how_many_workers_the_measured_runs_had(command: Command, tmp_path: Path) -> None:
    """Rounds of 2 s with one worker, then of 1 s with four: the model's, corrected by what it foresees for each."""
    good(command(*SWEEP, "-c", "method.name=fedavg", "method.lr=0.1"))
    (times,) = (tmp_path / "runs").rglob("times.jsonl")
    assert [json.loads(line)["workers"] for line in times.read_text().splitlines()] == [1, 1]
    lines = [{"round": i + 1, "train": [2, 1][i], "evaluate": 0, "workers": [1, 4][i]} for i in range(2)]
    times.write_text("".join(json.dumps(line) + "\n" for line in lines))
    experiment = Experiment.read(times.with_name("experiment.toml"))
    one, four = (cost.modelled(experiment, workers) for workers in (1, 4))
    assert one is not None and four is not None and one > four
    for here in (1, 2, 4):
        (measured,) = cost.measure(tmp_path / "runs", here)
        assert measured.ratio == pytest.approx(3 / (one + four))


def test_durations_are_as_fine_as_estimates() -> None:
    told = {1.0: "5 s", 61.0: "60 s", 600.0: "10 min", 7200.0: "2 h", 300_000.0: "3 days"}
    assert [cost.in_words(seconds) for seconds in told] == [f"about {words}" for words in told.values()]
    assert cost.in_words(cost.total([1.0, None])) == "unknown"


# Shipping


def test_the_wheel_holds_the_suites() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert built["force-include"] == {"experiments/suites": "redgrape/experiments"}
    assert files.FOLDERS[0] == Path(redgrape.__file__).parent / "experiments"


@pytest.mark.parametrize("page", ["results", "results-cut", "results-quick"])
def test_the_results_pages_say_what_the_records_say(page: str, tmp_path: Path) -> None:
    """scripts/results has been called since the last record."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    marks = re.findall(r"^<!-- ([a-z0-9_]+) ([a-z]+):begin -->$", text, flags=re.MULTILINE)
    if page == "results-quick":
        assert sorted(marks) == [(name, "quick") for name in files.names() if description.load(name).seeds["quick"]]
    for name, scale in marks:
        suite = description.load(name)
        found = found_cells.standings(suite.cells(scale), tmp_path, ROOT / "results")
        found = [Standing(s.cell, s.view, s.is_record) for s in found]
        assert any(standing.finished for standing in found), f"{name} at scale {scale} has no record"
        command = f"redgrape reproduce {name} --scale {scale}"
        notes = {"cuts": suite.cuts(scale), "departures": suite.departures(scale)}
        table = tables.build(suite, found, scale=scale, command=command, **notes)
        assert formats.insert(table, text) == text, f"{name} at scale {scale}: run scripts/results"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ConfigError, match="<!-- hand paper:begin -->"):
        formats.insert(written("hand", {"A": [0.5], "B": [0.4]}), "# A page\n")
