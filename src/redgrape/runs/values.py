"""Nested values as a TOML file has them: read, and changed by `section.key=value`. TOML has no None: the word none."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from redgrape.errors import ConfigError
from redgrape.runs import durable
from redgrape.validation import short

DEEPEST = 100  # parts of a key; method.lam has two


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return _toml(durable.ordinary(path, ConfigError).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # bad TOML, bad UTF-8, or a number with too many digits
        raise ConfigError(short(f"'{path}' is not valid TOML: {error}")) from error


def _toml(text: str) -> dict[str, Any]:
    if any(piece.count(".") > DEEPEST for piece in re.split("[=,\n]", text)):  # tomllib takes quadratic time
        raise ValueError(f"a key has more than {DEEPEST} parts")
    return tomllib.loads(text)


def override(values: dict[str, Any], assignment: str) -> None:
    """Apply `section.key=value`. The value is parsed as TOML, or taken as a string if it is not valid TOML."""
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"'{short(assignment, 100)}' is not of the form key=value, such as data.ir=100")
    if len(assignment.splitlines()) > 1:
        raise ConfigError(f"'{short(assignment, 100)}' has a line break; set one key at a time, on one line")
    try:
        value = _toml(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    put(values, key.strip(), value)


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `section.key` in nested values."""
    *sections, name = key.split(".")
    if len(sections) > DEEPEST:
        raise ConfigError(f"'{short(key, 100)}' has {len(sections) + 1} parts; a key has at most {DEEPEST}")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(short(f"'{key}' cannot be set: '{section}' is a value, not a section"))
    values[name] = value


def for_toml(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: for_toml(inner) for name, inner in value.items()}
    return "none" if value is None else list(value) if isinstance(value, tuple) else value


def with_none(values: Any, model: type[BaseModel]) -> Any:
    """Replace the word none by None, for keys that can be None."""
    if not isinstance(values, Mapping):
        return values
    read = dict(values)
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and name in read:
            read[name] = with_none(read[name], kind)
        elif read.get(name) == "none" and type(None) in get_args(kind):
            read[name] = None
    return read
