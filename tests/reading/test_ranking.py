"""Ranked tables: order, differences, costs and facts by hand; and from the records of a suite."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redgrape.reading import method_index
from redgrape.reading.run_view import RunView
from redgrape.reading.suites import description, formats, found_cells, ranking, tables
from redgrape.reading.suites.blocks import FULL
from redgrape.reading.suites.cells import Cell
from redgrape.reading.suites.found_cells import Standing
from redgrape.runs.experiment import Experiment

ROOT = Path(__file__).resolve().parents[2]
SUITE = description.load("frozen100")
COLUMN = ("IR 100",)


def finished(cell: Cell, accuracy: float, seconds: float | None = 2.0) -> Standing:
    means = {"accuracy": accuracy, "tail": accuracy / 2}
    summary = {"mean_of_last": means, "averaged_rounds": [2], "extra_data": cell.experiment.method.name == "ratio_loss"}
    cost = {"bytes_down": 3e6, "bytes_up": 1.5e6, "seconds": seconds}
    return Standing(cell, RunView(Path("somewhere"), {}, None, [], summary, cost))


def table_of(accuracies: dict[str, list[float]], **options: Any) -> tables.Table:
    """A ranked table of these accuracies by row, a seed each. Clients alone have 0, 1, ... points more."""
    found = []
    for cell in SUITE.cells("quick", [0, 1, 2], ["ir=100"]):
        if (row := SUITE.row(cell.labels)) in accuracies:
            alone = int(cell.experiment.data.alone or 0)
            found.append(finished(cell, accuracies[row][cell.seed] + alone / 100, **options))
    return tables.build(SUITE, found, scale="quick")


def cells(table: tables.Table) -> dict[str, dict[str, str]]:
    (block,) = formats.blocks(table)
    return {row[0].text: dict(zip(block.header, [t.text for t in row], strict=True)) for row in block.rows}


def test_the_best_comes_first_with_its_differences() -> None:
    table = table_of({"FedAvg": [0.5, 0.6, 0.7], "LDA": [0.7, 0.8, 0.9], "Ratio Loss": [0.1, 0.2, 0.3]})
    shown = cells(table)
    assert list(shown) == ["LDA", "FedAvg", "Ratio Loss †"]
    assert shown["LDA"]["overall"] == "80.00 ± 10.00"
    assert shown["LDA"]["overall minus FedAvg"] == "+20.00 [+20.00, +20.00]"
    assert shown["LDA"]["tail minus FedAvg"] == "+10.00 [+10.00, +10.00]"
    assert shown["LDA"]["overall minus RedGrape"] == "–"
    assert shown["FedAvg"]["overall minus FedAvg"] == "–"


def test_a_row_without_a_figure_is_last() -> None:
    table = table_of({"FedAvg": [0.5, 0.6, 0.7], "RedGrape": [0.9, 0.9, 0.9]})
    missing = [replace(s, view=None) if SUITE.row(s.cell.labels) == "RedGrape" else s for s in table.standings]
    again = tables.build(SUITE, missing, scale="quick")
    assert ranking.ranked(again, COLUMN) == ["FedAvg", "RedGrape"]
    assert {cells(again)["RedGrape"][name] for name in ("overall", "MB up", "seconds")} == {"–"}


def test_costs_and_facts() -> None:
    """Clients alone send nothing, and their seconds add up; figures are the mean of the ten, 4.5 points above."""
    alone, pooled = "FedAvg, each client alone", "FedAvg, pooled data"
    shown = cells(table_of({row: [0.1, 0.1, 0.1] for row in ("LDA", "Balanced softmax", "CLIMB", alone, pooled)}))
    lda = shown["LDA"]
    assert (lda["MB down"], lda["MB up"], lda["seconds"]) == ("3", "1.5", "2")
    assert lda["the server sees"] == "sums alone, if it aggregates securely"
    assert shown["CLIMB"]["the server sees"] == "each client's update"
    assert shown["Balanced softmax"]["needs"] == "the clients' summed class counts"
    assert shown["CLIMB"]["needs"] == "nothing"
    both = cells(table_of({"Vine, balanced softmax": [0.1] * 3}))["Vine, balanced softmax"]
    assert both["needs"] == "the clients' summed class counts, state at the clients"
    assert both["the server sees"] == "sums alone, if it aggregates securely"
    assert (shown[alone]["overall"], shown[alone]["MB up"], shown[alone]["seconds"]) == ("14.50 ± 0.00", "–", "20")
    assert "no federation" in shown[pooled]["the server sees"]
    assert cells(table_of({"LDA": [0.1] * 3}, seconds=None))["LDA"]["seconds"] == "–"


def test_the_facts_of_a_row_are_those_of_its_settings() -> None:
    settings = {"vine": {}, "vine, stateless": {"preset": "stateless"}}
    lines = {
        label: method_index.line_of(Experiment.parse({"method": {"name": "vine", **more}}))
        for label, more in settings.items()
    }
    needs = {label: line.needs for label, line in lines.items() if line is not None}
    assert needs == {
        "vine": ("state at the clients", "the clients' summed class counts"),
        "vine, stateless": ("the clients' summed class counts",),
    }


def test_a_method_of_ones_own_is_not_run_to_tell_what_it_needs(remembering: Path) -> None:
    experiment = Experiment.parse({"method": {"name": str(remembering)}})
    assert method_index.line_of(experiment) is None


def test_every_format_has_the_ranked_table(tmp_path: Path) -> None:
    table = table_of({"FedAvg": [0.5, 0.6, 0.7], "LDA": [0.7, 0.8, 0.9]})
    formats.write(table, tmp_path)
    for name in ("table.md", "table.tex", "table.json"):
        text = (tmp_path / name).read_text()
        assert "overall minus FedAvg" in text
        assert "the server sees" in text
    first = re.findall(r"^\| (\w+) ", (tmp_path / "table.md").read_text(), flags=re.MULTILINE)
    assert first == ["method", "LDA", "FedAvg"]
    ranking.draw(table, tmp_path / "ranking.png")
    assert (tmp_path / "ranking.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["frozen10", "frozen100"])
def test_the_table_of_the_quick_records(name: str, tmp_path: Path) -> None:
    """Every method that trains or sums has a line with figures, bytes and seconds."""
    suite = description.load(name)
    found = found_cells.standings(suite.cells("quick", None, ["ir=100"]), tmp_path, ROOT / "results")
    table = tables.build(suite, found, scale="quick")
    block = ranking.block(table, COLUMN, FULL)
    assert len(block.rows) == len(suite.axes["method"])
    accuracies = [float(row[1].text) for row in block.rows]
    assert accuracies == sorted(accuracies, reverse=True)
    for row in block.rows:
        shown = dict(zip(block.header, [t.text for t in row], strict=True))
        assert shown["seconds"] != "–"
        assert (shown["MB up"] == "–") == ("no federation" in shown["the server sees"])
    ranking.draw(table, tmp_path / "ranking.png")
