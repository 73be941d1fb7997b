"""Every method has a page, made from its file, and the page is up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from redgrape import methods

ROOT = Path(__file__).parents[2]


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("make_pages", ROOT / "docs" / "methods" / "make_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", methods.names())
def test_the_page_is_what_the_file_gives(name: str) -> None:
    """If this fails: .venv/bin/python docs/methods/make_pages.py"""
    pages = generator()
    assert (pages.PAGES / f"{name}.md").read_text() == pages.page(name)


@pytest.mark.parametrize("name", methods.names())
def test_a_method_says_what_it_was_written_from(name: str) -> None:
    method = methods.load(name)
    assert "fidelity" in vars(method), f"{name} must state its own fidelity"
    kinds = (
        "from the paper",
        "from RedGrape's paper",
        "ours",
        "from the authors' code",
        "from a secondary source",
        "the loss",
    )
    assert method.fidelity.startswith(kinds)
