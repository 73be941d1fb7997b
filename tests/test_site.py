"""The documentation site: it builds without a warning, and every public name has its place in the reference."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import redgrape as rg
from redgrape import methods

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = ["Augment", "ClientSite", "Examples", "Exchange", "Experiment", "Federation", "History", "Method", "Net"]
PUBLIC += ["Pixels", "RedgrapeError", "Result", "ServerSite", "Training", "check_method", "data", "load_model"]
PUBLIC += ["methods", "nets", "run", "train", "tree"]


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_of_docs", ROOT / "scripts/docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_public_names_are_these_and_the_reference_has_them() -> None:
    assert sorted(rg.__all__) == sorted(PUBLIC)
    listed = re.findall(r"^- \[`rg\.(\w+)`\]", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(PUBLIC)


def test_the_site_builds_without_a_warning(docs: ModuleType, tmp_path: Path) -> None:
    """Every page has its place, links lead somewhere, names are explained, nothing is fetched from elsewhere."""
    site = docs.build(tmp_path)
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    for page in (ROOT / "docs").glob("*.md"):
        assert f"{page.stem}.html" in pages
    for name in [*PUBLIC, *(methods.load(name).__name__ for name in methods.names())]:
        assert f'id="{docs.home(name)}"' in pages["api.html"], name
    pictures = {path.name for path in (ROOT / "docs/images").iterdir()}
    assert pictures == set(re.findall(r'src="images/([^"]+)"', pages["gallery.html"]))
    assert (site / "search.json").stat().st_size > 10_000
    for name, text in pages.items():
        assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//', text), name


def test_a_page_without_a_place_is_an_error(docs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A\n")
    (tmp_path / "b.md").write_text("# B\n")
    assert docs.sections([{"Start": ["*.md"]}], tmp_path) == [{"Start": ["a.md", "b.md"]}]
    with pytest.raises(docs.Mistake, match=r"no section of zensical.toml names b\.md"):
        docs.sections([{"Start": ["a.md"]}], tmp_path)
    with pytest.raises(docs.Mistake, match=r"names 'c\.md', which is no page"):
        docs.sections([{"Start": ["*.md", "c.md"]}], tmp_path)


def test_links_lead_to_pages_and_files_on_the_site(
    docs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages stay pages, a file of the repository gets a page of its own, code is left alone, all else refused."""
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    (tmp_path / "docs/methods").mkdir(parents=True)
    (tmp_path / "run.py").write_text("1")
    (tmp_path / "README.md").write_text("[a](docs/methods/a.md#b)")
    page, shown = tmp_path / "docs/methods/a.md", set[Path]()
    page.write_text("[r](../../README.md) [f](../../run.py)\n```\n[x](y)\n```\n[w](https://example.org) [h](#b)")
    assert docs.with_links(tmp_path / "README.md", "index.md", shown) == "[a](methods/a.md#b)"
    assert docs.with_links(page, "methods/a.md", shown) == (
        "[r](../index.md) [f](../source/run.py.md)\n```\n[x](y)\n```\n[w](https://example.org) [h](#b)"
    )
    assert shown == {tmp_path / "run.py"}
    page.write_text("[n](nowhere.md)")
    with pytest.raises(docs.Mistake, match=r"docs/methods/a\.md links to 'nowhere\.md', which is not there"):
        docs.with_links(page, "methods/a.md", shown)
