"""Run the notebooks of docs/tutorials and store what their cells show.

.venv/bin/python scripts/notebooks.py            # all of them
.venv/bin/python scripts/notebooks.py photos     # docs/tutorials/photos.ipynb

A cell is Python, or commands that begin with `!redgrape`, or a file after `%%writefile NAME`. Jupyter runs the same
cells; this script needs no Jupyter. It knows what the notebooks use: printed text, and a last expression that shows
itself as PNG or as text.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from redgrape.cli.main import run as redgrape

FOLDER = Path(__file__).resolve().parent.parent / "docs/tutorials"


def main() -> int:
    os.environ["COLUMNS"] = "80"
    names = sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for name in names:
        path = FOLDER / f"{name}.ipynb"
        notebook = json.loads(path.read_text(encoding="utf-8"))
        tempfile.tempdir = None
        with tempfile.TemporaryDirectory() as place, chdir(place):
            os.environ["REDGRAPE_DATA"] = tempfile.tempdir = place
            for cell, outputs in zip(code_cells(notebook), shown(notebook), strict=True):
                cell["outputs"] = outputs
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"stored: docs/tutorials/{path.name}")
    return 0


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def shown(notebook: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """What each code cell shows, run one after the other in the current folder, in the format of notebooks."""
    module = ModuleType("notebook")
    sys.modules[module.__name__] = module  # where its classes are said to live
    for number, cell in enumerate(code_cells(notebook), start=1):
        source, text = "".join(cell["source"]), io.StringIO()
        with redirect_stdout(text):
            if source.startswith("!"):
                value = commanded(source)
            elif source.startswith("%%writefile "):
                value = written(source)
            else:
                value = evaluated(source, f"cell {number}", vars(module))
        outputs: list[dict[str, Any]] = []
        if text.getvalue():
            outputs.append({"name": "stdout", "output_type": "stream", "text": text.getvalue().splitlines(True)})
        if value is not None:
            data: dict[str, Any] = {"text/plain": [re.sub(r" at 0x\w+", "", repr(value))]}
            if hasattr(value, "_repr_png_"):
                data["image/png"] = base64.b64encode(value._repr_png_()).decode()
            result = {"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"}
            outputs.append(result)
        yield outputs


def evaluated(source: str, name: str, names: dict[str, Any]) -> Any:
    """The value of the last line, if it is an expression."""
    lines = ast.parse(source).body
    last = lines.pop() if isinstance(lines[-1], ast.Expr) else None
    exec(compile(ast.Module(lines, []), name, "exec"), names)  # noqa: S102  # the notebooks are ours
    return eval(compile(ast.Expression(last.value), name, "eval"), names) if last else None  # noqa: S307


def commanded(source: str) -> None:
    for line in source.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line)
        if program != "!redgrape" or redgrape(words) != 0:
            raise RuntimeError(f"'{line}' failed")


def written(source: str) -> None:
    head, _, text = source.partition("\n")
    name = head.split()[1]
    Path(name).write_text(text + "\n", encoding="utf-8")
    print(f"Writing {name}")


if __name__ == "__main__":
    sys.exit(main())
