"""A user's own code by name: `file.py:function`, or `module:function` of an installed module.

The code is identified by the SHA-256 of its file. What that file imports is not part of it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from importlib.abc import SourceLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from redgrape.errors import ConfigError, DataError
from redgrape.runs import durable

ANYTHING = (Exception, SystemExit)  # what own code may raise
FILE_PREFIX = "redgrape_own_file_"
_NAME = re.compile(r"(?P<home>.+\.py|[A-Za-z_][A-Za-z0-9_.]*):(?P<function>[A-Za-z_][A-Za-z0-9_]*)", re.DOTALL)


def is_own(name: str) -> bool:
    """Whether this is the name of own code. Nothing is loaded."""
    return _NAME.fullmatch(name) is not None


def names_file(name: str) -> bool:
    """Whether this names a file of own code, or a function in one, and not a module."""
    return name.endswith(".py") or (is_own(name) and _parts(name)[0].endswith(".py"))


def load(name: str, what: str) -> Callable[..., Any]:
    """The function of this name. `what` it is for is told if there is none."""
    home, function = _parts(name)
    module = from_file(Path(home), what) if home.endswith(".py") else _installed(home, what)
    found = getattr(module, function, None)
    if not callable(found):
        there = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(f"'{home}' has no function '{function}' for the {what}; it has {', '.join(there) or 'none'}")
    result: Callable[..., Any] = found
    return result


def file_of(name: str) -> Path:
    """The file that holds the code. It is not run."""
    home, _ = _parts(name)
    if home.endswith(".py"):
        return Path(home)
    try:
        spec = importlib.util.find_spec(home)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"the module '{home}' is not installed; pass the path of a Python file") from error
    except ANYTHING as error:  # the package of a module is imported to find it
        raise _not_imported(f"module '{home}'", error) from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(f"the module '{home}' has no Python file here; pass the path of one")
    return Path(spec.origin)


def digests(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of each file, by its name without folders."""
    found: dict[str, str] = {}
    for path in paths:
        try:
            digest = hashlib.sha256(durable.ordinary(path, DataError).read_bytes()).hexdigest()
        except OSError as error:
            raise DataError(f"cannot read '{error.filename}': {error.strerror}") from error
        if found.setdefault(path.name, digest) != digest:
            raise ConfigError(f"two different files are named '{path.name}'; rename one")
    return found


def from_file(path: Path, what: str) -> ModuleType:
    """The module in this file, which is run once, and again after an edit."""
    if not path.is_file():
        raise ConfigError(f"no {what} file at '{path}'; pass the path of a Python file")
    path = path.resolve()
    code = path.read_bytes()
    module_name = f"{FILE_PREFIX}{hashlib.sha256(str(path).encode() + code).hexdigest()[:12]}"
    if module_name not in sys.modules:
        loader = _Read(path, code)
        spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
        if spec is None:
            raise ConfigError(f"'{path}' is not a Python file that can be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            loader.exec_module(module)
        except ANYTHING as error:
            del sys.modules[module_name]
            raise _not_imported(f"{what} file '{path}'", error) from error
    return sys.modules[module_name]


class _Read(SourceLoader):
    """Imports these bytes of a file. Python's own cache would miss an edit within a second of the last."""

    def __init__(self, path: Path, code: bytes) -> None:
        self._path, self._code = path, code

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: Any) -> bytes:
        return self._code


def _parts(name: str) -> tuple[str, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"'{name}' is not of the form file.py:function or module:function")
    return match["home"], match["function"]


def _installed(home: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(home)
    except ANYTHING as error:
        raise _not_imported(f"module '{home}' of the {what}", error) from error


def _not_imported(what: str, error: BaseException) -> ConfigError:
    return ConfigError(f"the {what} cannot be imported: {type(error).__name__}: {error}")
