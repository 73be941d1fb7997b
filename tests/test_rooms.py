"""The rooms of the package: who may import whom, who names a method, and how large what all depends on may be.

Files are read, not run: an import inside a function counts for the rules of rooms, but not for cycles.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import redgrape
from redgrape import methods
from redgrape.method import Method
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.redgrape import RedGrape

ROOT = Path(redgrape.__file__).parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def imported(node: ast.AST) -> Iterator[str]:
    """The modules of the package that an import statement names, without `redgrape.`; the package is `__init__`."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "imports name their module in full"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return
    for name in names:
        first, _, inside = name.partition(".")
        if first == "redgrape":
            yield inside if inside in FILES else inside.rpartition(".")[0] or "__init__"


def statements(node: ast.AST, *, at_start: bool) -> Iterator[ast.AST]:
    """All nodes but those for type checkers; `at_start`: only those that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if at_start and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield child
        yield from statements(child, at_start=at_start)


@cache
def imports(module: str, at_start: bool = False) -> frozenset[str]:
    nodes = statements(parsed(module), at_start=at_start)
    return frozenset(name for node in nodes for name in imported(node)) - {module}


def in_room(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def broken(room: str, forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{module} imports {target}"
        for module in FILES
        if in_room(module, (room,))
        for target in imports(module)
        if in_room(target, forbidden) and target != FILES_ANYWHERE
    ]


# How a file is opened and written is asked in every room.
FILES_ANYWHERE = "runs.durable"

ABOVE = ("engines", "rounds", "training", "runs", "reading", "cli", "deploy")
LEARNING_AND_ABOVE = ("learning", "method", "methods", "exchange", *ABOVE)

# What each room must not know. `data` and `nets` know no learning.
RULES = {
    "engines": ("runs", "reading", "cli", "deploy", "methods", "rounds", "training"),
    "exchange": ("learning", "methods", *ABOVE),
    "data": LEARNING_AND_ABOVE,
    "nets": LEARNING_AND_ABOVE,
    "learning": ("methods", *ABOVE),
    "privacy": ("learning", "method", "methods", "engines", "rounds", "training", "reading", "cli", "deploy"),
    "method": ABOVE,
    "rounds": ("methods", "nets", "training", "runs", "reading", "cli", "deploy"),
    "training": ("methods", "runs", "reading", "cli", "deploy"),
}


def test_every_room_of_the_rules_is_there() -> None:
    rooms = {module.partition(".")[0] for module in FILES}
    assert {*RULES, *(room for forbidden in RULES.values() for room in forbidden)} <= rooms


def test_what_every_room_may_import_knows_no_room() -> None:
    assert imports(FILES_ANYWHERE) == {"errors"}


@pytest.mark.parametrize("room", RULES)
def test_a_room_does_not_know_what_is_above_it(room: str) -> None:
    assert broken(room, RULES[room]) == []


def test_a_method_knows_the_parts_of_an_update_and_what_was_received() -> None:
    known = {"exchange", "method", "methods.fedavg", "tree", "validation", "errors", "determinism"}
    for name in methods.names():
        others = {target for target in imports(f"methods.{name}") if not in_room(target, ("learning", "nets"))}
        assert others <= known, f"{name} imports {sorted(others - known)}"


def test_only_the_command_line_knows_the_command_line() -> None:
    assert [m for m in FILES if not in_room(m, ("cli", "__main__", "testing")) and broken(m, ("cli",))] == []


def test_imports_go_round_in_no_circle() -> None:
    def reached(module: str) -> set[str]:
        seen: set[str] = set()
        todo = [module]
        while todo:
            new = imports(todo.pop(), at_start=True) - seen
            seen |= new
            todo += new
        return seen

    assert [module for module in FILES if module in reached(module)] == []


def test_few_modules_stand_at_the_root() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 10


def test_redgrape_is_read_beside_its_paper() -> None:
    assert len(FILES["methods.redgrape"].read_text().splitlines()) <= 200
    assert len(RedGrape.model_fields.keys() - FedAvg.model_fields.keys()) <= 17


def test_a_method_overrides_few_functions() -> None:
    functions = {name for name, value in vars(Method).items() if callable(value) and not name.startswith("_")}
    variables = {name for name in Method.__class_vars__ if not name.startswith("_")}
    assert len(functions) <= 9, functions
    assert len(variables) <= 6, variables


WORD = re.compile(r"\w+")
NAMING = ("methods", "testing", "deploy.setup.create", "runs.moved_keys")


def words(module: str) -> Iterator[str]:
    """The identifiers and the words of strings in a module's code: not those of docstrings and comments."""
    tree = parsed(module)
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield from WORD.findall(text)
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (word for alias in names for word in alias.name.split("."))


def test_nobody_names_a_method() -> None:
    """`redgrape` is also the package, `crt` also a certificate's file, `creff` also a way to divide data among clients,
    and the help has examples."""
    partition = {
        "data.partition": {"creff"},
        "data.prepare": {"creff"},
        "cli.main": {"fedavg"},
        "cli.parser": {"fedavg"},
        "cli.flags": {"creff"},
    }
    named = set(methods.names()) - {"redgrape", "crt"}
    found = {module: named & set(words(module)) for module in FILES if not in_room(module, NAMING)}
    assert {module: names for module, names in found.items() if names} == partition


def test_nobody_asks_which_method_it_is() -> None:
    """Whether it is one may be asked, and whether a section of an experiment is a mapping. A combination must know
    whether a method's training calls what an ingredient brings."""
    for module in FILES:
        if in_room(module, ("testing", "methods._combination")):
            continue
        code = ast.unparse(parsed(module))
        asked = set(re.findall(r"isinstance\(method, ([^)]*)\)", code))
        assert asked <= {"Method", "dict", "Mapping"}, module
        assert "vars(type(" not in code and "__mro__" not in code, module
