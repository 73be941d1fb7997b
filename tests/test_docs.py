"""What the documents say holds: their code runs, their commands parse, their links and names lead somewhere."""

from __future__ import annotations

import functools
import importlib
import os
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest

from redgrape import errors, methods, nets
from redgrape.cli import parser
from redgrape.data.sources import READERS
from redgrape.methods.redgrape import RedGrape
from redgrape.reading.suites import description
from redgrape.runs.experiment import Experiment
from redgrape.testing.clauses import engines_agree

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = "<!-- not run -->"
NAMES_ALONE = [["resume"], ["export"], ["run"], ["deploy", "run"], ["deploy", "renew"]]  # commands in a sentence

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@dataclass(frozen=True)
class Block:
    language: str
    line: int  # of its first line of code, from 1
    text: str
    is_run: bool


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text().splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if line.startswith("```"):
            if start is None:
                start = number
            else:
                before = next((text for text in reversed(lines[:start]) if text.strip()), "")
                text = "\n".join(lines[start + 1 : number])
                found.append(Block(lines[start][3:].strip(), start + 2, text, before != NOT_RUN))
                start = None
    assert start is None, f"{page.name}: the block that begins in line {start} is not closed"
    return found


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if any(b.language == language for b in blocks(page))]


@pytest.mark.parametrize("page", pages_with("python"), ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page, one after another, in one namespace and an empty folder with a copy of the examples."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDGRAPE_DATA", str(tmp_path / "data"))
    module = ModuleType(f"redgrape_docs_{page.stem.replace('-', '_')}")  # where the page's classes are said to live
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page):
        if block.language == "python":
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            if block.is_run:
                exec(code, vars(module))


def commands(page: Path) -> list[str]:
    """The lines with a redgrape command: of blocks for the shell, and in the text where they are whole."""
    lines = [
        line.split(" #")[0].strip()
        for b in blocks(page)
        if b.language in ("bash", "console") and b.is_run
        for line in b.text.replace("\\\n", " ").splitlines()
    ]
    lines = [line.removeprefix("$ ") for line in lines]
    inline = re.findall(r"`(redgrape [a-z][^`]*)`", prose(page))
    return [line for line in lines if line.startswith("redgrape ")] + [
        text for text in inline if not re.search(r"[A-Z]{3}|\[", text)
    ]


@by_page
def test_commands_parse(page: Path) -> None:
    grammar = parser.build()
    for command in commands(page):
        arguments = shlex.split(command)[1:]
        if arguments == ["--version"]:
            with pytest.raises(SystemExit, match="0"):
                grammar.parse_args(arguments)
        elif arguments not in NAMES_ALONE:
            grammar.parse_args(arguments)


@by_page
def test_commands_describe_experiments_that_can_be(page: Path) -> None:
    """What run, compare and data show set is accepted, down to the methods' hyper-parameters."""
    from redgrape.cli import execution

    for command in commands(page):
        arguments = shlex.split(command)[1:]
        if arguments[:1] not in (["run"], ["compare"]) or "my.toml" in arguments:
            continue
        options = parser.build().parse_args(arguments)
        if options.experiment is not None:
            options.experiment = ROOT / options.experiment
        values = execution.described(options)
        shared = values.get("method", {})
        specs = getattr(options, "methods", [shared.get("name", "redgrape")])
        for spec in specs:
            absolute = str(ROOT / spec) if spec.endswith(".py") else spec
            chosen = {**values, "method": dict(shared)}
            execution.with_method(chosen, absolute)
            Experiment.parse(chosen)


def test_scripts_named_in_documents_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"scripts/\w+(?!\w*\.py)", page.read_text()):
            assert os.access(ROOT / name, os.X_OK), f"{page.name} names {name}"


def test_files_named_in_documents_and_scripts_exist() -> None:
    """Tests and benchmarks that a document or scripts/faults.py names."""
    for page in [*PAGES, ROOT / "docs/methods/make_pages.py"]:
        for name in re.findall(r"\b(?:tests|benchmarks|src|examples|scripts)/[\w/-]+\.py\b", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
    for name in runpy.run_path(str(ROOT / "scripts/faults.py"))["TESTS"]:
        assert (ROOT / "tests" / name).exists(), f"scripts/faults.py names {name}"


@by_page
def test_toml_is_an_experiment_or_a_suite(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.language == "toml" and "[methods]" in block.text:
            (tmp_path / "mine.toml").write_text(block.text)
            description.read(tmp_path / "mine.toml")
        elif block.language == "toml":
            Experiment.parse(tomllib.loads(block.text))


@by_page
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = unquote(target).partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(path), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def equation_rows() -> list[list[str]]:
    section = (ROOT / "docs/paper.md").read_text().partition("## Equations")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[entry.strip() for entry in row] for row in rows[2:]]


def test_equations_lead_to_code() -> None:
    rows = [row for row in equation_rows() if row[2]]
    assert len(rows) >= 15
    for _, _, file, name in rows:
        path = re.fullmatch(r"\[(.+)\]\(\.\./src/redgrape/(.+)\)", file)
        assert path is not None and path[1] == path[2], file
        module = importlib.import_module("redgrape." + path[1].removesuffix(".py").replace("/", "."))
        found = functools.reduce(getattr, name.strip("`").split("."), module)
        assert callable(found)
        assert sys.modules[found.__module__].__file__ == str(ROOT / "src/redgrape" / path[1])


def test_every_equation_is_there() -> None:
    numbers: set[int] = set()
    for equation, *_ in equation_rows():
        ends = [int(n) for n in re.findall(r"\d+", equation)]
        numbers |= set(range(min(ends), max(ends) + 1)) if ends else set()
    assert numbers == set(range(1, 16))
    in_code = {int(n) for n in re.findall(r"Eq\. \((\d+)\)", Path(methods.__path__[0], "redgrape.py").read_text())}
    assert in_code <= numbers


def test_every_hyper_parameter_is_explained() -> None:
    text = (ROOT / "docs/paper.md").read_text()
    for name in RedGrape.model_fields:
        assert re.search(rf"`{name}[`=]", text), f"docs/paper.md does not mention {name}"


def test_hyper_parameters_have_the_values_that_are_named() -> None:
    """Each `name="value"` of docs/paper.md is one that RedGrape takes; presets are as the page says."""
    text = (ROOT / "docs/paper.md").read_text()
    named = re.findall(r"`([a-z_]+)=\"([a-z_]+)\"`", text)
    assert len(named) > 10
    for name, value in named:
        assert getattr(RedGrape(**{name: value}), name) == value
    preset = dict(re.findall(r"preset: `([a-z_]+)=([^`]+)`", text))
    expected = {name: f'"{v}"' if isinstance(v, str) else str(v) for name, v in RedGrape.presets["released"].items()}
    assert preset == expected


def test_what_is_here_is_here() -> None:
    """The overview names every method, net, data source and command, and the reference every exit code."""
    table = (ROOT / "docs/overview.md").read_text().partition("## What is here\n")[2].partition("\n## ")[0]
    here = set(re.findall(r"`([a-z0-9_ ]+)`", table))
    grammar: Any = parser.build()
    top = next(a for a in grammar._actions if a.dest == "==SUPPRESS==" or a.choices).choices
    groups = ("data", "deploy")
    inner = {f"{group} {name}" for group in groups for a in top[group]._actions if a.choices for name in a.choices}
    all_commands = (set(top) - set(groups)) | inner
    for names in (methods.names(), nets.NETS, READERS, all_commands):
        assert set(names) <= here
    reference = (ROOT / "docs/reference.md").read_text()
    codes = {name: int(code) for code, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", reference, re.MULTILINE)}
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.RedgrapeError)]
    assert codes == {kind.__name__: kind.exit_code for kind in kinds}
    assert all_commands == set(re.findall(r"^\| `redgrape ((?:data |deploy )?[a-z]+)", reference, re.MULTILINE)) - {
        "COMMAND"
    }


def test_the_shown_method_is_the_file() -> None:
    shown = next(b.text for b in blocks(ROOT / "docs/add-a-method.md") if b.language == "python" and not b.is_run)
    file = (ROOT / "examples/my_method.py").read_text()
    annotated = re.sub(r"def criterion\(.*\) -> .*:", "def criterion(self, broadcast, site):", file)
    assert shown in annotated


def test_measured_figures_have_their_places() -> None:
    for page, name in (("README.md", "demo"), ("docs/overview.md", "results")):
        text = (ROOT / page).read_text()
        assert re.search(rf"<!-- {name}:begin -->\n.+\n<!-- {name}:end -->", text, flags=re.DOTALL)
        assert "to be measured" not in text


def test_documents_name_no_path_of_a_machine() -> None:
    for page in [*PAGES, ROOT / "CITATION.cff", *sorted((ROOT / "examples").glob("*.py"))]:
        assert not re.search(r"/(home|root|work|tmp|Users)/", page.read_text()), page.name


# The examples


def test_my_method_is_loaded_by_worker_processes() -> None:
    """The clause of the contract that docs/add-a-method.md leaves out; a worker has to find the file again."""
    engines_agree(methods.load(str(ROOT / "examples/my_method.py"))(), [2])


def test_bring_your_own_data_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/bring_your_own_data.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    shown = next(b.text for b in blocks(ROOT / "docs/own-data.md") if b.text.startswith("class  ")).splitlines()
    assert lines[0] == shown[0]
    assert [line.split()[:2] for line in lines] == [line.split()[:2] for line in shown]
    rare = lines[-1].split()
    assert float(rare[3]) > float(rare[2])  # RedGrape's recall of the rarest class, and FedAvg's
