"""Accuracy over rounds: one panel per column, one line per row. Bands span the worst to the best seed. A row with a
single evaluation, such as a head without training, is a dotted level."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from redgrape.reading import pictures, run_tables
from redgrape.reading.pictures import printed
from redgrape.reading.suites.found_cells import Standing
from redgrape.reading.suites.tables import Table


def draw(table: Table, path: Path) -> None:
    """Draw a PNG of the first measure of the suite. Needs matplotlib."""
    plt = pictures.pyplot()
    finished = [s for s in table.standings if s.finished]
    with_curves = {_place(table, s)[1] for s in finished if s.view and len(s.view.metrics) > 1}
    shown = with_curves or {_place(table, s)[1] for s in finished}  # a panel of levels alone says little
    columns = [c for c in table.columns if c in shown]
    across = min(3, len(columns))
    down = math.ceil(len(columns) / across)
    figure, axes = plt.subplots(
        down, across, figsize=(4.5 * across + 1.5, 3.4 * down + 0.6), squeeze=False, layout="constrained"
    )
    measure = table.suite.measures[0]
    lines = looks(table.rows)
    for axis in axes.flat[len(columns) :]:
        axis.set_visible(False)
    for column, axis in zip(columns, axes.flat, strict=False):
        lowest = 100.0
        for row in table.rows:
            found = [s for s in finished if _place(table, s) == (row, column)]
            rounds, low, mean, high = _band(found, measure, table.on)
            if not rounds:
                continue
            lowest = min(lowest, *(low[i] for i, number in enumerate(rounds) if number >= rounds[-1] / 10))
            colour, style = lines[row]
            label = printed(textwrap.fill(row, 40))
            if len(rounds) == 1:
                axis.axhline(mean[0], label=label, color=colour, linestyle=":", linewidth=1.6)
                continue
            axis.plot(rounds, mean, label=label, color=colour, linestyle=style, linewidth=1.6)
            if len(found) > 1:
                axis.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set_ylim(bottom=lowest - 1)  # lines begin far below; they are to be told apart where they end
        axis.set_title(", ".join(column), fontsize=10)
        axis.set_xlabel("round")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_ylabel(f"{table.on} accuracy, {run_tables.TITLES[measure]}, %")
        axis.grid(alpha=0.3)
    drawn = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(list(drawn.values()), list(drawn), loc="outside right center", fontsize=8)
    figure.suptitle(
        printed(table.suite.title if table.scale is None else f"{table.suite.title} ({table.scale})"),
        fontsize=10,
        wrap=True,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def looks(rows: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A colour and a line style for each row. The style changes when all colours are used."""
    ours_last = sorted(rows, key=lambda row: row == "RedGrape")
    styles = [("-", "--", "-.", ":")[i // len(pictures.COOLER) % 4] for i in range(len(rows))]
    return dict(zip(ours_last, zip(pictures.colours(len(rows)), styles, strict=True), strict=True))


def _place(table: Table, standing: Standing) -> tuple[str, tuple[str, ...]]:
    return table.suite.row(standing.cell.labels), table.suite.column(standing.cell.labels)


def _band(standings: list[Standing], measure: str, on: str) -> tuple[list[int], list[float], list[float], list[float]]:
    """The rounds that all seeds evaluated, with the worst, mean and best seed in percent."""
    curves = [
        {r["round"]: 100 * r[on][measure] for r in s.view.metrics if on in r and r[on].get(measure) is not None}
        for s in standings
        if s.view is not None
    ]
    rounds = sorted(set.intersection(*[set(curve) for curve in curves])) if curves else []
    values = [[curve[number] for curve in curves] for number in rounds]
    return rounds, [min(v) for v in values], [sum(v) / len(v) for v in values], [max(v) for v in values]
