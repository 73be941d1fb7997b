"""The methods, one file each, named after the method. They are discovered, not listed."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from redgrape.errors import ConfigError, unknown

if TYPE_CHECKING:
    from redgrape.method import Method

_FILE_PREFIX = "redgrape_method_file_"


def names() -> list[str]:
    """The methods that come with redgrape."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str) -> type[Method]:
    """The class of a method by its name, or of your own method by its file: `load("redgrape")`, `load("mine.py")`."""
    if name.endswith(".py"):
        return _only_method(_from_file(Path(name)), name)
    if name not in names():
        raise unknown("method", name, names())
    return _only_method(importlib.import_module(f"{__name__}.{name}"), name)


def by_class(name: str) -> type[Method] | None:
    """The class of this name among the methods that come with redgrape: `by_class("RedGrape")`."""
    for module in names():
        if module.replace("_", "") == name.lower() and (method := load(module)).__name__ == name:
            return method
    return None


def reference(method: type[Method]) -> type[Method] | str:
    """How another process finds the class: its path if it was loaded from a file, else the class itself."""
    module = sys.modules[method.__module__]
    return str(module.__file__) if module.__name__.startswith(_FILE_PREFIX) else method


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"no method file at '{path}'; pass the path of a Python file or one of {', '.join(names())}")
    path = path.resolve()
    module_name = f"{_FILE_PREFIX}{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"'{path}' is not a Python file that can be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[module_name]
            raise ConfigError(
                f"the method file '{path}' cannot be imported: {type(error).__name__}: {error}"
            ) from error
    return sys.modules[module_name]


def _only_method(module: ModuleType, name: str) -> type[Method]:
    from redgrape.method import Method

    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Method) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        listed = ", ".join(c.__name__ for c in found) or "none"
        raise ConfigError(f"'{name}' must define exactly one method class, and has {listed}")
    return found[0]
