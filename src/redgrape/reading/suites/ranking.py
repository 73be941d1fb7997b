"""All methods of a suite in one table, the best first, with what each costs, needs and discloses; and as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from redgrape.reading import method_index
from redgrape.reading.gap import baseline
from redgrape.reading.pictures import COOLER, GRAPE, printed, pyplot
from redgrape.reading.run_tables import by_seed, mean
from redgrape.reading.run_view import EXTRA_DATA
from redgrape.reading.suites.blocks import DASH, Block, Style, Text, called, figure, verdict
from redgrape.reading.suites.found_cells import Standing
from redgrape.reading.suites.statistics import Paired
from redgrape.reading.suites.tables import Table

COMPARED = ("accuracy", "tail")
OUTSIDE = {"@alone": "no federation: nothing leaves a client", "@pooled": "no federation: all examples in one place"}


def ranked(table: Table, column: tuple[str, ...]) -> list[str]:
    """The rows by their first measure, the best first. Rows without a figure come last."""
    means = {row: table.at(row, column, table.suite.measures[0]).mean for row in table.rows}
    return sorted(table.rows, key=lambda row: -math.inf if (mean := means[row]) is None else mean, reverse=True)


def block(table: Table, column: tuple[str, ...], style: Style) -> Block:
    """Figures, paired differences in points, megabytes of a run, seconds, needs and what the server sees."""
    suite = table.suite
    pairs = [(m, reference) for reference in suite.references for m in COMPARED if m in suite.measures]
    header = [", ".join(suite.rows), *[style.titles[measure] for measure in suite.measures]]
    header += [f"{style.titles[measure]} minus {called(reference)}" for measure, reference in pairs]
    header += ["MB down", "MB up", "seconds", "needs", "the server sees"]
    rows = []
    for row in ranked(table, column):
        entries = {measure: table.at(row, column, measure) for measure in suite.measures}
        marked = row + (EXTRA_DATA if any(entry.extra_data for entry in entries.values()) else "")
        compared = [entries[m].comparisons.get(reference, Paired(0, None)) for m, reference in pairs]
        found = [s for s in table.standings if (suite.row(s.cell.labels), suite.column(s.cell.labels)) == (row, column)]
        cells = [*(figure(entry, style) for entry in entries.values()), *(verdict(pair, style) for pair in compared)]
        rows.append([Text(words) for words in (marked, *cells, *_cost(found), *_facts(found))])
    return Block(", ".join(column), header, rows)


def _cost(standings: list[Standing]) -> list[str]:
    """Megabytes to and from all clients, and seconds, of a run: means over seeds."""
    outside = any(baseline(s.cell.experiment.resolved()) for s in standings)
    sent = [DASH if outside else _mean(standings, name, _megabytes) for name in ("bytes_down", "bytes_up")]
    return [*sent, _mean(standings, "seconds", lambda n: f"{n:.0f}")]


def _megabytes(n: float) -> str:
    """Three digits, and no exponent."""
    return f"{n / 1e6:,.0f}" if n >= 1e9 else f"{n / 1e6:.3g}"


def _mean(standings: list[Standing], name: str, written: Callable[[float], str]) -> str:
    """The mean over seeds, if all have it. Clients that were trained alone add up."""
    costs = (s.view.cost.get(name) if s.view is not None and s.finished else None for s in standings)
    known = by_seed(((s.cell.seed, s.client, cost) for s, cost in zip(standings, costs, strict=True)), together=sum)
    return written(mean([*known.values()])) if known and known.keys() == {s.cell.seed for s in standings} else DASH


def _facts(standings: list[Standing]) -> list[str]:
    """What the method of this row needs, and what the server sees of a client at best."""
    if not standings:
        return [DASH, DASH]
    experiment = standings[0].cell.experiment
    if where := baseline(experiment.resolved()):
        return [DASH, OUTSIDE[where]]
    line = method_index.line_of(experiment)
    return [DASH, DASH] if line is None else [", ".join(line.needs) or "nothing", line.discloses]


def draw(table: Table, path: Path) -> None:
    """Draw a PNG: overall accuracy against the tail's, a point a method with the deviation over seeds, a panel for each
    column. Points have the place of their method in the table. Needs matplotlib."""
    plt = pyplot()
    columns = [c for c in table.columns if any(e.values for e in table.entries if e.column == c)]
    suite = table.suite
    setting = [str(v[0]) for key, v in suite.axes.items() if len(v) == 1 and key not in (*suite.rows, *suite.columns)]
    orders = [[row for row in ranked(table, c) if table.at(row, c, "accuracy").values] for c in columns]
    height = max(5.4, 0.8 + 0.18 * max(map(len, orders)))  # inches; a line of the legend takes 0.18
    figure, axes = plt.subplots(
        len(columns), 1, figsize=(9, height * len(columns)), squeeze=False, layout="constrained"
    )
    for column, order, axis in zip(columns, orders, axes.flat, strict=True):
        for place, row in enumerate(order, start=1):
            x, y = (table.at(row, column, measure) for measure in ("accuracy", "tail"))
            if x.mean is None or y.mean is None:
                continue
            colour = GRAPE if row == "RedGrape" else COOLER[(place - 1) % len(COOLER)]
            spreads = [100 * (entry.std or 0.0) for entry in (x, y)]
            label = printed(f"{place}  {row}")
            at = 100 * x.mean, 100 * y.mean
            axis.errorbar(*at, spreads[1], spreads[0], fmt="none", color=colour, elinewidth=1, alpha=0.35)
            axis.plot(*at, "o", color=colour, markersize=5, label=label)
            axis.annotate(str(place), at, (4, 4), textcoords="offset points", fontsize=8)
        axis.set_title(", ".join([*setting, *column]), fontsize=10)
        axis.set_xlabel(f"{table.on} accuracy, overall, %")
        axis.set_ylabel(f"{table.on} accuracy, tail, %")
        axis.grid(alpha=0.3)
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
