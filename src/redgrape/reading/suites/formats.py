"""A suite's table for the terminal, and as Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redgrape.errors import ConfigError
from redgrape.reading import terminal
from redgrape.reading.run_tables import BEST, TITLES
from redgrape.reading.run_view import EXTRA_DATA, plain
from redgrape.reading.suites import found_cells, ranking
from redgrape.reading.suites.blocks import FULL, NARROW, Block, Style, Text, called, figure, times100, verdict
from redgrape.reading.suites.cells import text
from redgrape.reading.suites.statistics import FEWEST_SEEDS, Paired
from redgrape.reading.suites.tables import Entry, Table
from redgrape.runs import durable
from redgrape.runs.figures import LAST

# Emphasis, code, cells, HTML, entities; the end of a link's text; underscores except within a word, as in head_cap
_MARKUP = re.compile(r"[\\`*|<~]|&(?=[#\w])|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_])")
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
        whole = "" if table.scale == "paper" else " against scale paper"
        lines.append(f"scale {table.scale}, cut{whole}: {' · '.join(table.cuts)}")
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
