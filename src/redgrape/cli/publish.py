"""The table of compare, reproduce and sweep: its files, its figure, and what is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redgrape.errors import ConfigError
from redgrape.reading.suites import curves, formats, ranking, tables
from redgrape.reading.terminal import printable


def publish(table: tables.Table, folder: Path, *, as_json: bool, more: Mapping[str, Any] | None = None) -> None:
    """Write the table and its figure to the folder, and print it. `more` is added to the JSON."""
    formats.write(table, folder)
    if any(entry.values for entry in table.entries):
        try:
            curves.draw(table, folder / "curves.png")
            if table.suite.ranked:
                ranking.draw(table, folder / "ranking.png")
        except ConfigError as error:
            print(f"note: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps({"folder": str(folder), "table": formats.as_values(table), **(more or {})}))
        return
    print(formats.plain_text(table), end="")
    for standing in table.standings:
        if not standing.finished:
            print(printable(f"not run: {standing.cell.name}: {standing.state}"))
    print(f"tables and figures: {printable(folder)}")
