"""The files of the suites that come with redgrape. Needs no torch, so a list of them is quick."""

from __future__ import annotations

import tomllib
from pathlib import Path

from redgrape.errors import ConfigError

SETTINGS = "settings"
# The first path is used in a wheel, the second in a checkout.
FOLDERS = (Path(__file__).parents[2] / "experiments", Path(__file__).parents[4] / "experiments" / "suites")


def folder() -> Path:
    for path in FOLDERS:
        if path.is_dir():
            return path
    raise ConfigError(f"the suites' files are not at '{FOLDERS[0]}'; install redgrape again")


def names() -> list[str]:
    """The names of the suites included in redgrape."""
    return sorted(path.stem for path in folder().glob("*.toml") if path.stem != SETTINGS)


def title(name: str) -> str:
    return str(tomllib.loads((folder() / f"{name}.toml").read_text(encoding="utf-8"))["title"])
