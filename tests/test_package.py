"""What is built from the repository: the wheel and the sdist, in an environment that does not know the repository."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import yaml

import redgrape

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the sdist."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(out)], cwd=ROOT, check=True)
    return out


def test_the_wheel_has_everything_that_runs_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
    sources = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*") if p.is_file()}
    sources = {name for name in sources if "__pycache__" not in name}
    suites = {f"redgrape/experiments/{path.name}" for path in (ROOT / "experiments/suites").glob("*.toml")}
    assert {name for name in names if ".dist-info/" not in name} == sources | suites
    assert "redgrape/py.typed" in names
    assert f"Version: {redgrape.__version__}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert {f"Provides-Extra: {extra}" for extra in PROJECT["optional-dependencies"]} <= set(metadata.splitlines())


def test_the_sdist_builds_the_wheel_and_runs_the_tests(built: Path) -> None:
    """It has sources, suites, tests and documents; records of runs are left out for their size."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ["pyproject.toml", "LICENSE", "src/redgrape/py.typed", "experiments/suites/table1.toml", "tests/toys.py"]
    assert {*wanted, "scripts/test", "docs/quickstart.md", "constraints.txt"} <= names
    assert not any(name.startswith(("results/", "build/", "runs/")) for name in names)


def test_the_version_stands_in_one_place() -> None:
    """`__version__`; the citation and the changelog repeat it for their readers."""
    assert "version" not in PROJECT
    assert f"version: {redgrape.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == redgrape.__version__


def test_every_import_is_a_dependency_or_of_an_extra() -> None:
    """What a module imports when it is loaded is a dependency, except in deploy/, which needs Flower. Imports inside of
    functions may also be of an extra. pandas is the caller's: a DataFrame is made only if it is there."""
    homes = {top: {_plain(name) for name in names} for top, names in packages_distributions().items()}
    needed = _names(PROJECT["dependencies"])
    flower = _names(PROJECT["optional-dependencies"]["flower"]) | _names(
        [*(requires("flwr") or []), *(requires("uvicorn") or [])]
    )
    extras = _names(line for lines in PROJECT["optional-dependencies"].values() for line in lines) | {"pandas"}
    wrong = []
    for path in (ROOT / "src").rglob("*.py"):
        of_room = flower if "deploy" in path.parts else set()
        module = ast.parse(path.read_text())
        at_once = set(_imported(node for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)))
        for top in set(_imported(ast.walk(module))):
            allowed = needed | of_room | (set() if top in at_once else extras)
            if not homes.get(top, set()) & allowed:
                wrong.append(f"{path.relative_to(ROOT)}: {top}")
    assert not wrong


def _plain(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def _names(requirements: Iterable[str]) -> set[str]:
    return {_plain(line) for line in requirements}


def _imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The packages that these lines import, without redgrape and the standard library."""
    for node in nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [str(node.module)]
        yield from {name.partition(".")[0] for name in names} - {"redgrape", *sys.stdlib_module_names}


@pytest.mark.slow
def test_the_wheel_works_without_the_repository(built: Path, tmp_path: Path) -> None:
    """The dependencies are those of this environment: a path file names their folder, and an editable install is not
    followed from there."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin/python"), "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True)
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])

    def ran(*command: str) -> str:
        done = subprocess.run(
            [str(home / "bin" / command[0]), *command[1:]], cwd=tmp_path, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = Path(ran("python", "-c", "import redgrape; print(redgrape.__file__)").strip())
    assert where.is_relative_to(home)
    assert ran("redgrape", "--version") == f"redgrape {redgrape.__version__}\n"
    assert "table2" in ran("redgrape", "reproduce")
    run = ["--data", "digits", "--clients", "2", "--rounds", "1", "--epochs", "1", "--net", "linear", "--workers", "1"]
    ran("redgrape", "run", *run, "--out", "run", "--quiet")
    ran("redgrape", "export", "run", "model")
    assert "balanced" in ran("redgrape", "evaluate", "run")
    shown = "import redgrape as rg; print(type(rg.load_model('model')).__name__)"
    assert ran("python", "-c", shown) == "Model\n"


# What a forge and a container read


def test_the_forge_runs_our_scripts() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    runs = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert runs == ["scripts/test", "scripts/docs"]
    for path in [*(ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"), ROOT / ".pre-commit-config.yaml"]:
        assert yaml.safe_load(path.read_text()), path.name


def test_the_container_copies_what_is_there_and_installs_known_extras() -> None:
    """No engine for containers is needed: the folder that it would see builds the wheel, and its extras exist."""
    text = (ROOT / "Containerfile").read_text()
    seen = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in seen)
    assert {PROJECT["readme"], *PROJECT["license-files"], "src", "pyproject.toml", "constraints.txt"} <= set(seen)
    (extras,) = re.findall(r"\.whl\)\[([a-z,]+)\]", text)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert re.search(r'^ENTRYPOINT \["redgrape"\]$', text, re.MULTILINE) and re.search("^USER redgrape$", text, re.M)
    assert f"python:{'.'.join(map(str, sys.version_info[:2]))}-slim" in text


@pytest.mark.slow
def test_the_folder_that_the_container_sees_builds_the_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).symlink_to(ROOT / name)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=source, check=True
    )
    assert list(tmp_path.glob("redgrape-*.whl"))
