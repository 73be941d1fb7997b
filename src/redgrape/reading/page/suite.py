"""Suites for a page, read from the table.json of `reproduce` and `sweep`. It names the runs of the cells."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redgrape.errors import StorageError
from redgrape.reading.terminal import printable

FILE = "table.json"
LONGEST = 4000  # characters per line


@dataclass(frozen=True)
class Suite:
    shown: dict[str, Any]  # {title, blocks: [{title, header, rows: [[[words, is bold]]]}], caption, command, not_run}
    runs: list[Path]
    gone: list[str]  # runs that no longer exist at their path


def is_suite(folder: Path) -> bool:
    return (folder / FILE).is_file()


def read(folder: Path) -> Suite:
    try:
        values = json.loads((folder / FILE).read_bytes())
        names = list(dict.fromkeys(str(cell["run"]) for cell in values["cells"] if cell["run"] is not None))
        found = {name: _find(name, folder) for name in names}
        return Suite(
            _shown(values),
            [path for path in found.values() if path is not None],
            [name for name, path in found.items() if path is None],
        )
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"'{folder / FILE}' cannot be read as the table of a suite ({type(error).__name__}: {error}); `redgrape "
            "reproduce` or `redgrape sweep` writes it anew"
        ) from error


def _shown(values: Mapping[str, Any]) -> dict[str, Any]:
    scale = "" if values["scale"] is None else f" (scale {values['scale']})"
    return {
        "title": _line(f"{values['title']}{scale}"),
        "blocks": [
            {
                "title": _line(block["title"]),
                "header": [_line(title) for title in block["header"]],
                "rows": [[[_line(place["text"]), bool(place["bold"])] for place in row] for row in block["rows"]],
            }
            for block in values["blocks"]
        ],
        "caption": [_line(line) for line in values["caption"]],
        "command": _line(values["command"]),
        "not_run": [
            [_line(cell["name"]), _line(cell["state"])]
            for cell in values["cells"]
            if cell["state"] not in ("done", "recorded")
        ],
    }


def _line(words: Any) -> str:
    return printable(words)[:LONGEST]


def _find(run: str, folder: Path) -> Path | None:
    """The path of a run. It is relative to where the suite was reproduced: here, or a folder above the suite."""
    for base in (Path(), *folder.resolve().parents):
        if (base / run / "experiment.toml").is_file() or (base / run).parent.is_file():
            return base / run
    return None
