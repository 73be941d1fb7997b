"""Results of a suite as Markdown, LaTeX, CSV and JSON tables, next to the paper's figures, with notes."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from redgrape.errors import ConfigError
from redgrape.reading import terminal
from redgrape.reading.run_tables import BEST, EXTRA_DATA, TITLES, RunView, mean_std, other_data, plain
from redgrape.reading.suites import found_cells, ranking
from redgrape.reading.suites.blocks import FULL, NARROW, Block, Style, Text, called, figure, times100, verdict
from redgrape.reading.suites.description import Suite, label_text, text
from redgrape.reading.suites.found_cells import Standing
from redgrape.reading.suites.statistics import FEWEST_SEEDS, Paired, paired
from redgrape.runs import durable
from redgrape.runs.figures import LAST
from redgrape.runs.run import DECIDING

TOO_SHORT = 2 * LAST  # shorter runs have no LAST rounds after their warm-up
RISE = 0.01  # a run is still learning if its accuracy rose by more than this in the last rounds


@dataclass(frozen=True)
class Entry:
    """One entry of the table."""

    row: str
    column: tuple[str, ...]
    measure: str
    values: Mapping[int, float]  # by seed
    seeds: int  # number requested
    paper: float | None  # in percent
    extra_data: bool
    comparisons: Mapping[str, Paired]  # by reference

    @property
    def mean(self) -> float | None:
        return mean_std(list(self.values.values()))[0] if self.values else None

    @property
    def std(self) -> float | None:
        return mean_std(list(self.values.values()))[1] if self.values else None

    @property
    def difference(self) -> float | None:
        """Our figure minus that of the paper, in points."""
        return None if self.mean is None or self.paper is None else 100 * self.mean - self.paper


@dataclass(frozen=True)
class Table:
    suite: Suite
    scale: str | None
    on: str
    standings: Sequence[Standing]
    entries: Sequence[Entry]
    cuts: Sequence[str]
    departures: Sequence[str]
    notes: Sequence[str]
    command: str

    def at(self, row: str, column: tuple[str, ...], measure: str) -> Entry:
        """The entry at this place. It is empty if the selection of cells excludes it."""
        found = (e for e in self.entries if (e.row, e.column, e.measure) == (row, column, measure))
        return next(found, Entry(row, column, measure, {}, 0, None, False, {}))

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(entry.row for entry in self.entries))

    @property
    def columns(self) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(entry.column for entry in self.entries))


def build(
    suite: Suite,
    standings: Sequence[Standing],
    *,
    scale: str | None = None,
    cuts: Sequence[str] = (),
    departures: Sequence[str] = (),
    on: str = "test",
    command: str = "",
    notes: Sequence[str] = (),
) -> Table:
    standings = _of_one_split(standings)
    places: dict[tuple[str, tuple[str, ...]], list[Standing]] = {}
    for standing in standings:
        labels = standing.cell.labels
        places.setdefault((suite.row(labels), suite.column(labels)), []).append(standing)
    values = {
        (*place, measure): _by_seed(group, measure, on) for place, group in places.items() for measure in suite.measures
    }
    entries = []
    for (row, column), group in places.items():
        for measure in suite.measures:
            ours = values[row, column, measure]
            others = {ref: values.get((ref, column, measure), {}) for ref in suite.references if ref != row}
            entries.append(
                Entry(
                    row=row,
                    column=column,
                    measure=measure,
                    values=ours,
                    seeds=len({standing.cell.seed for standing in group}),
                    paper=suite.paper_value(row, column, measure) if on == "test" else None,
                    extra_data=any(s.view is not None and s.view.uses_extra_data for s in group),
                    comparisons={reference: paired(ours, theirs) for reference, theirs in others.items()},
                )
            )
    all_notes = [*notes, *_notes(standings, on)]
    return Table(suite, scale, on, standings, entries, cuts, departures, all_notes, command)


def _of_one_split(standings: Sequence[Standing]) -> list[Standing]:
    """The standings, without runs whose data differs from others with the same seed and data options."""
    other = other_data([s.view for s in standings if s.view is not None and s.finished])
    return [
        replace(s, view=None, obstacle=f"cannot be compared: '{s.view.path}': {other[s.view.path]}")
        if s.view is not None and s.view.path in other
        else s
        for s in standings
    ]


def _by_seed(group: Sequence[Standing], measure: str, on: str) -> dict[int, float]:
    """The figure for each seed. Clients that were trained alone give their mean, once all are finished."""
    found: dict[int, list[float]] = {}
    unfinished = {standing.cell.seed for standing in group if not standing.finished}
    for standing in group:
        if standing.cell.seed in unfinished:
            continue
        if standing.view is not None and standing.view.summary is not None:
            means = standing.view.summary["mean_of_last" if on == "test" else "validation"]
            if means is None:
                raise ConfigError(
                    f"'{standing.view.path}' was run without a validation set; hold one out with -c data.validation=10"
                )
            if means.get(measure) is not None:
                found.setdefault(standing.cell.seed, []).append(means[measure])
    return {seed: mean_std(values)[0] for seed, values in found.items()}


def _notes(standings: Sequence[Standing], on: str) -> list[str]:
    """Notes that a reader needs before comparing rows."""
    finished = [s for s in standings if s.finished]
    notes = []
    if finished:
        rounds = {s.cell.experiment.rounds for s in finished}
        # A head from sums is complete after one round, or after two if it is chosen on held-out examples.
        trained = {number for number in rounds if number > 2} or rounds - {1} or rounds
        short = sorted(number for number in trained if number < TOO_SHORT)
        if short:
            notes.append(f"too short to compare methods: {_list(short)} rounds")
        else:
            varying = _varying_axes(finished)
            rising = [s for s in finished if s.view is not None and _rises(s.view, on)]
            if rising:
                names = list(dict.fromkeys(_name(s, varying) for s in rising))
                who = f" ({'; '.join(names)})" if varying and len(rising) < len(finished) else ""
                notes.append(
                    f"still learning at the end, up by more than a point in the last rounds: {len(rising)} of "
                    f"{len(finished)} runs{who}"
                )
        seeds: dict[str, set[int]] = {}
        for s in finished:
            seeds.setdefault(_name(s, s.cell.labels), set()).add(s.cell.seed)
        numbers = sorted(set(map(len, seeds.values())))
        if numbers[0] < FEWEST_SEEDS:
            notes.append(
                f"too few seeds to compare methods: {_list(numbers)} a cell, and chance alone "
                f"moves figures; {FEWEST_SEEDS} or more can be compared"
            )
    notes += _machines(finished)
    notes += [f"a record is not taken: {s.not_taken}" for s in standings if s.not_taken]
    missing: dict[str, list[str]] = {}
    for s in standings:
        if not s.finished:
            missing.setdefault(s.state, []).append(s.cell.name)
    for state, cells in missing.items():
        notes.append(f"not run{'' if state == 'to run' else f' ({state})'}: {len(cells)} of {len(standings)} cells")
    return notes


def _machines(finished: Sequence[Standing]) -> list[str]:
    """Notes on versions and machines, if the cells that record them differ."""
    lines = []
    for name in DECIDING:
        made: dict[str, list[str]] = {}
        for s in finished:
            recorded = (s.view.environment or {}).get(name) if s.view is not None else None
            if recorded is not None:
                made.setdefault(str(recorded), []).append(s.cell.name)
        if len(made) > 1:
            *few, most = sorted(made, key=lambda value: len(made[value]))
            which = " · ".join(f"{value} ({'; '.join(made[value])})" for value in few)
            lines.append(f"not all made with {name} {most}, so that last bits may differ: {name} {which}")
    return lines


def _varying_axes(standings: Sequence[Standing]) -> list[str]:
    """The axes that distinguish the cells."""
    labels = [s.cell.labels for s in standings]
    return [axis for axis in labels[0] if any(other[axis] != labels[0][axis] for other in labels)]


def _name(standing: Standing, axes: Iterable[str]) -> str:
    """The name of a cell on these axes, without its seed."""
    return ", ".join(label_text(axis, standing.cell.labels[axis]) for axis in axes)


def _rises(view: RunView, on: str) -> bool:
    """Whether the last rounds are better than the twenty before them by more than RISE."""
    evaluated = [(r["round"], r[on]["accuracy"]) for r in view.metrics if on in r]
    last = [accuracy for _, accuracy in evaluated[-LAST:]]
    begin = evaluated[-LAST][0] if len(evaluated) > LAST else 0
    before = [accuracy for number, accuracy in evaluated[:-LAST] if number >= begin - 2 * LAST]
    return bool(before) and sum(last) / len(last) - sum(before) / len(before) > RISE


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def blocks(table: Table, style: Style = FULL) -> list[Block]:
    """Results, then comparisons, for the columns with finished cells. A ranked suite has one block a column."""
    if table.suite.ranked:
        done = [column for _, columns in _groups(table) for column in columns]
        return [ranking.block(table, column, style) for column in done]
    found = []
    for title, columns in _groups(table):
        places = [(column, measure) for column in columns for measure in table.suite.measures]
        header, rows = [", ".join(table.suite.rows)], {row: [_row_text(table, row)] for row in table.rows}
        for column, measure in places:
            entries = [table.at(row, column, measure) for row in table.rows]
            has_paper = any(entry.paper is not None for entry in entries)
            name = _column_title(table, column, measure, style)
            header += [name, "paper", "difference"] if has_paper else [name]
            for entry in entries:
                rows[entry.row] += [Text(figure(entry, style), entry in _best(entries))]
                if has_paper:
                    rows[entry.row] += [Text(style.percent(entry.paper)), Text(style.points(entry.difference))]
        found.append(Block(title, header, list(rows.values())))
        for reference in table.suite.references:
            if any(e.comparisons.get(reference, Paired(0, None)).separated is not None for e in table.entries):
                found.append(_comparison(table, title, places, reference, style))
    return found


def _groups(table: Table) -> list[tuple[str, list[tuple[str, ...]]]]:
    """The columns with finished cells, grouped by their first part if they have several."""
    done = {entry.column for entry in table.entries if entry.values}
    groups: dict[str, list[tuple[str, ...]]] = {}
    for column in table.columns:
        if column in done:
            groups.setdefault(column[0] if len(column) > 1 else "", []).append(column)
    return list(groups.items())


def _comparison(
    table: Table, title: str, places: Sequence[tuple[tuple[str, ...], str]], reference: str, style: Style
) -> Block:
    titles = [_column_title(table, column, measure, style) for column, measure in places]
    header = [", ".join(table.suite.rows), *titles]
    rows = []
    for row in table.rows:
        if row != reference:
            pairs = [
                table.at(row, column, measure).comparisons.get(reference, Paired(0, None)) for column, measure in places
            ]
            rows.append([_row_text(table, row), *[Text(verdict(pair, style)) for pair in pairs]])
    return Block(f"{title + ': ' if title else ''}minus {called(reference)}, by seed, in points", header, rows)


def _row_text(table: Table, row: str) -> Text:
    return Text(row + (EXTRA_DATA if any(e.extra_data for e in table.entries if e.row == row) else ""))


def _column_title(table: Table, column: tuple[str, ...], measure: str, style: Style) -> str:
    parts = list(column[1:] if len(column) > 1 else column)
    if len(table.suite.measures) > 1 or not parts:
        parts.append(style.titles[measure])
    return ", ".join(parts)


def _best(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with the highest printed mean, if there is another entry to compare with."""
    means = [round(100 * entry.mean, 2) for entry in entries if entry.mean is not None]
    if len(set(means)) < 2:
        return []
    return [entry for entry in entries if entry.mean is not None and round(100 * entry.mean, 2) == max(means)]


def caption(table: Table) -> list[str]:
    """The lines below the table, in every format."""
    measure = f"{TITLES[table.suite.measures[0]]} " if len(table.suite.measures) == 1 else ""
    summaries = [s.view.summary for s in table.standings if s.view and s.view.summary]
    averaged = {len(summary["averaged_rounds"]) for summary in summaries}
    over = "" if len(averaged) != 1 else f"the last {min(averaged)} rounds" if min(averaged) > 1 else "the last round"
    is_best = summaries and all("best_round" in summary for summary in summaries)
    over = BEST if is_best else f"mean of {over or f'the last rounds, at most {LAST}'}"
    lines = [f"{measure}{table.on} accuracy in %, {over}"]
    if any(entry.std is not None for entry in table.entries):
        lines[0] += ", ± standard deviation over seeds"
    if any(entry.extra_data for entry in table.entries):
        lines.append(f"{EXTRA_DATA.strip()} uses extra balanced data at the server")
    for reference in table.suite.references:
        pairs = [e.comparisons[reference] for e in table.entries if reference in e.comparisons]
        if any(pair.separated is not None for pair in pairs):
            lines.append(
                f"minus {called(reference)}: mean difference over common seeds with its 95 % interval (paired t), "
                "each by itself, not corrected for their number; not separated: the seeds cannot tell the two apart"
            )
        elif any(pair.seeds for pair in pairs):
            most = max(pair.seeds for pair in pairs)
            lines.append(f"compared with {reference} by seed: too few seeds ({most}), {FEWEST_SEEDS} are needed")
    if table.suite.claim and table.scale is not None:
        lines.append(f"the paper says: {table.suite.claim}")
    if table.cuts:
        lines.append(f"scale {table.scale}, cut against scale paper: {' · '.join(table.cuts)}")
    elif table.scale is not None:
        lines.append(f"scale {table.scale}")
    if table.departures:
        lines.append(f"differences from the paper, and our choices where it gives none: {' · '.join(table.departures)}")
    return [*lines, *[f"note: {note}" for note in table.notes]]


def plain_text(table: Table) -> str:
    """The table for a terminal."""
    parts = [terminal.paragraph(table.suite.title)]
    parts += [
        terminal.table(block.header, [[entry.text for entry in row] for row in block.rows], block.title)
        for block in blocks(table, NARROW)
    ]
    if not any(entry.values for entry in table.entries):
        parts.append("No cell is finished.")
    below = [line.replace("; not separated: the", "; an interval around 0: the") for line in caption(table)]
    parts.append("\n".join(terminal.paragraph(f"- {line}", "  ") for line in below))
    return "\n\n".join(parts) + "\n"


def markdown(table: Table) -> str:
    parts = [f"**{_markdown(table.suite.title)}**"]
    for block in blocks(table):
        parts += [_markdown(block.title)] if block.title else []
        parts.append(_grid(block))
    if not any(entry.values for entry in table.entries):
        parts.append("No cell is finished.")
    parts.append("\n".join(f"- {_markdown(line)}" for line in caption(table)))
    if table.command:
        parts.append(f"`{table.command}`")
    return "\n\n".join(parts) + "\n"


def insert(table: Table, page: str) -> str:
    """The page with the table inserted between its marks. It replaces the old content."""
    begin, end = marks(table.suite.name, table.scale, page)
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{markdown(table)}{end}{rest.partition(end)[2]}"


def marks(suite: str, scale: str | None, page: str) -> tuple[str, str]:
    """The marks around the table of this suite in a page. Raise ConfigError if the page lacks them."""
    begin, end = (f"<!-- {suite} {scale}:{edge} -->" for edge in ("begin", "end"))
    if end not in page.partition(begin)[2]:
        raise ConfigError(f"the page has no place for this table; put {begin} and {end} where it should stand")
    return begin, end


def _grid(block: Block) -> str:
    lines = [[_markdown(title) for title in block.header]]
    lines += [[f"**{_markdown(t.text)}**" if t.bold else _markdown(t.text) for t in row] for row in block.rows]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(block.header))]
    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    padded = [
        [t.ljust(w) if i == 0 else t.rjust(w) for i, (t, w) in enumerate(zip(x, widths, strict=True))] for x in lines
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in [padded[0], rule, *padded[1:]])


# Emphasis, code, cells, HTML, entities; the end of a link's text; underscores except within a word, as in head_cap
_MARKUP = re.compile(r"[\\`*|<~]|&(?=[#\w])|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_])")


def _markdown(words: str) -> str:
    """Escape Markdown. A label may contain anything that a user typed."""
    return " ".join(_MARKUP.sub(r"\\\g<0>", words).split())


def latex(table: Table) -> str:
    lines = [r"% \usepackage{booktabs}"]
    for block in blocks(table):
        lines += [
            "",
            *([f"% {' '.join(block.title.split())}"] if block.title else []),
            rf"\begin{{tabular}}{{l{'r' * (len(block.header) - 1)}}}",
            r"\toprule",
            " & ".join(map(_latex, block.header)) + r" \\",
            r"\midrule",
            *[
                " & ".join(rf"\textbf{{{_latex(t.text)}}}" if t.bold else _latex(t.text) for t in r) + r" \\"
                for r in block.rows
            ],
            r"\bottomrule",
            r"\end{tabular}",
        ]
    return (
        "\n".join([*lines, "", *[f"% {' '.join(line.split())}" for line in [table.suite.title, *caption(table)]]])
        + "\n"
    )


_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{character: f"{{{character}}}" for character in "[*"},  # after \\ they would be read as options
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "†": r"$\dagger$",
    "–": "--",
}


def _latex(words: str) -> str:
    return "".join(_LATEX.get(character, character) for character in " ".join(words.split()))


def as_csv(table: Table) -> str:
    """One line per entry of the table. Accuracies are in percent."""
    axes = [*table.suite.rows, *table.suite.columns]
    references = list(table.suite.references)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    compared = [f"{what} {reference}" for reference in references for what in ("minus", "low against", "high against")]
    header = ["suite", "scale", *axes, "measure", "on", "seeds", "mean", "std", "paper", "difference", *compared]
    writer.writerow([_csv(title) for title in header])
    labels = {
        (table.suite.row(s.cell.labels), table.suite.column(s.cell.labels)): s.cell.labels for s in table.standings
    }
    for e in table.entries:
        names = [text(labels[e.row, e.column][axis]) for axis in axes]
        pairs = [e.comparisons.get(reference, Paired(0, None)) for reference in references]
        figures = [times100(e.mean), times100(e.std), e.paper, e.difference]
        figures += [times100(value) for pair in pairs for value in (pair.mean, pair.low, pair.high)]
        words = [_csv(word) for word in (table.suite.name, table.scale or "", *names, e.measure, table.on)]
        writer.writerow([*words, len(e.values), *["" if f is None else f"{f:.4f}" for f in figures]])
    return file.getvalue()


def _csv(words: str) -> str:
    """Text that no spreadsheet reads as a formula. Numeric labels stay numbers."""
    try:
        float(words)
    except ValueError:
        return f"'{words}" if words.startswith(("=", "+", "-", "@", "\t", "\r")) else words
    return words


def as_values(table: Table) -> dict[str, Any]:
    """The table for JSON. Accuracies are fractions; those of the paper are in percent, as printed there."""
    return {
        "suite": table.suite.name,
        "title": table.suite.title,
        "claim": table.suite.claim,
        "scale": table.scale,
        "on": table.on,
        "command": table.command,
        "cuts": list(table.cuts),
        "departures": list(table.departures),
        "notes": list(table.notes),
        "rows": list(table.suite.rows),
        "columns": list(table.suite.columns),
        "entries": [
            {
                "row": e.row,
                "column": list(e.column),
                "measure": e.measure,
                "seeds": {str(seed): value for seed, value in e.values.items()},
                "mean": e.mean,
                "std": e.std,
                "paper": e.paper,
                "difference": e.difference,
                "extra_data": e.extra_data,
                "against": {
                    ref: {"seeds": p.seeds, "mean": p.mean, "low": p.low, "high": p.high, "separated": p.separated}
                    for ref, p in e.comparisons.items()
                },
            }
            for e in table.entries
        ],
        "cells": [plain(found_cells.described(standing)) for standing in table.standings],
        "blocks": [asdict(block) for block in blocks(table)],
        "caption": caption(table),
    }


def write(table: Table, folder: Path) -> None:
    """Write table.md, table.tex, table.csv and table.json."""
    with durable.storage_errors("make", folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "table.md": markdown(table) + _not_run(table),
        "table.tex": latex(table),
        "table.csv": as_csv(table),
        "table.json": json.dumps(as_values(table), indent=1) + "\n",
    }.items():
        durable.replace_file(folder / name, content.encode())


def _not_run(table: Table) -> str:
    """List the cells that are missing in the table, by name."""
    missing = [standing for standing in table.standings if not standing.finished]
    lines = [f"- {_markdown(standing.cell.name)}: {_markdown(standing.state)}" for standing in missing]
    return "\n".join(["", "Not run:", "", *lines, ""]) if lines else ""
