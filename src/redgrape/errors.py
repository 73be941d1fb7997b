"""The errors, each with its exit code.

    RedgrapeError             1
    ├── ConfigError           2   an invalid option, hyper-parameter or experiment
    ├── Diverged              3   training produced numbers that are not finite
    ├── TooFewClients         4   fewer clients answered than a round needs
    ├── DataError            65   missing, damaged or inconsistent data
    ├── StorageError         74   a file that cannot be read or written
    └── BusyError            75   another process holds the run

Every message is one line: what was wrong, the value, and what to do instead.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType


class RedgrapeError(Exception):
    exit_code = 1


class ConfigError(RedgrapeError):
    exit_code = 2


class Diverged(RedgrapeError):
    exit_code = 3


class TooFewClients(RedgrapeError):
    exit_code = 4


class DataError(RedgrapeError):
    exit_code = 65


class StorageError(RedgrapeError):
    exit_code = 74


class BusyError(RedgrapeError):
    exit_code = 75


BY_EXIT_CODE: dict[int, type[RedgrapeError]] = {
    kind.exit_code: kind for kind in (ConfigError, Diverged, TooFewClients, DataError, StorageError, BusyError)
}


def install(extra: str) -> str:
    """How to install an extra of redgrape, which is on no package index. Some shells read brackets without quotes as a
    pattern."""
    return f"run `pip install -e '.[{extra}]'` in your clone of redgrape"


def needed(module: str, purpose: str, extra: str) -> ModuleType:
    """The module of an optional package, else ConfigError: what needs it, and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{purpose}; {install(extra)}") from error


def unknown(kind: str, word: str, options: Iterable[str]) -> ConfigError:
    """`unknown method 'fedavgg'; did you mean 'fedavg'?`, or the options if none is close."""
    names = sorted(options)
    hint = did_you_mean(word, names) or f"choose from {', '.join(names)}"
    return ConfigError(f"unknown {kind} '{word}'; {hint}")


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """`did you mean 'fedavg'?`, or an empty text if none is close."""
    near = difflib.get_close_matches(word, list(options), n=1)
    return f"did you mean '{near[0]}'?" if near else ""


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn a lack of memory into a one-line error; torch has no error type for it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        raise ConfigError(
            "not enough memory; choose a smaller net, smaller inputs or batches, or fewer --workers"
        ) from error
