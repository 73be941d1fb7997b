"""The command line as tests call it, and what they look at afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from redgrape.cli import main as cli


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    def json(self) -> Any:
        """What --json printed last; Infinity and NaN, which are no JSON, are refused."""
        return json.loads(self.out.splitlines()[-1], parse_constant=pytest.fail)


Command = Callable[..., Outcome]


def in_this_process(capsys: pytest.CaptureFixture[str], *always: str) -> Command:
    """Runs `redgrape ...`, always with these words at the end."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = cli.run([*map(str, arguments), *always])
        return Outcome(code, *capsys.readouterr())

    return call


def good(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome.err
    return outcome


def tree_of(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}
