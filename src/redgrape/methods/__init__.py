"""The methods, one file each, named after the method. They are discovered, not listed."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from redgrape import own_code
from redgrape.errors import ConfigError, unknown

if TYPE_CHECKING:
    from redgrape.method import Method

WITHOUT_TRAINING = "lda"  # the method of `redgrape fit`
RECOMMENDED = {  # where to begin, and why; docs/choose.md has the figures
    "fedavg": "what all others have to beat",
    "balanced_softmax": "the simplest correction for rare classes",
    "vine": "re-balances the classifier, by sums alone",
}


def names() -> list[str]:
    """The methods that come with redgrape."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def is_known(name: object) -> bool:
    """Whether a method, or a combination, of this name comes with redgrape."""
    return isinstance(name, str) and set(name.split("+")) <= set(names())


def load(name: str) -> type[Method]:
    """The class of a method by its name, or of your own method by its file: `load("redgrape")`, `load("mine.py")`,
    `load("vine+balanced_softmax")`."""
    parts = name.split("+")
    if name.endswith(".py") and parts[0] not in names():
        return _only_method(own_code.from_file(Path(name), "method"), name)
    if file := next((part for part in parts if part.endswith(".py")), None):
        other = next(part for part in parts if part != file)
        raise ConfigError(f"'{name}' combines with a file; let its class inherit from that of '{other}' instead")
    if len(parts) > 1:
        from redgrape.methods._combination import combined

        if twice := next((part for part in parts if parts.count(part) > 1), None):
            raise ConfigError(f"method '{name}': '{twice}' is named twice; name it once")
        return combined({part: load(part) for part in parts})
    if name not in names():
        raise unknown("method", name, names())
    return _only_method(importlib.import_module(f"{__name__}.{name}"), name)


def post_hoc(name: str) -> bool:
    """Whether the method can give a trained model another head without training."""
    return "post_hoc" in load(name).presets


def by_class(name: str) -> type[Method] | None:
    """The class of this name among the methods that come with redgrape: `by_class("RedGrape")`."""
    for module in names():
        if module.replace("_", "") == name.lower() and (method := load(module)).__name__ == name:
            return method
    return None


def reference(method: type[Method]) -> type[Method] | str:
    """How another process finds the class: its path if it was loaded from a file, its name if it is a combination, else
    the class itself."""
    if "+" in method.__name__:
        return method.__name__
    module = sys.modules[method.__module__]
    return str(module.__file__) if module.__name__.startswith(own_code.FILE_PREFIX) else method


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
