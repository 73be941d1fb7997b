"""Turns pydantic's report of a bad value into one line: the key, the value, and what is allowed."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from redgrape.errors import ConfigError, did_you_mean

LONGEST = 300  # characters of a message
LARGEST = 1e9  # largest hyper-parameter: the product of four still fits a float32

_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


class Strict(BaseModel):
    """Values that a person wrote, or a file: of exactly these types, without other keys, and frozen."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


def as_tuple(value: Any) -> Any:
    """A list as a tuple: TOML has only lists."""
    return tuple(value) if isinstance(value, list) else value


def one_line(error: ValidationError, model: type[BaseModel], prefix: str = "") -> ConfigError:
    """The first problem, and the number of others."""
    problems = error.errors(include_url=False)
    first = problems[0]
    path = [str(part) for part in first["loc"]]
    named = path if first["type"] == "extra_forbidden" else _public(path)
    key = _cut(".".join([*([prefix] if prefix else []), *named]), 120)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return ConfigError(short(_sentence(first, key, model, path), LONGEST - len(more)) + more)


def short(text: str, longest: int = LONGEST) -> str:
    """The text on one line, cut to this length."""
    return _cut(" ".join(text.split()), longest)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _public(path: list[str]) -> list[str]:
    """The path without the names that pydantic adds for union members and validators."""
    kinds = {"int", "constrained-int", "float", "str", "none"}
    return [part for part in path if not part.startswith("function-") and part not in kinds]


def _sentence(problem: Any, key: str, model: type[BaseModel], path: list[str]) -> str:
    kind, value, context = problem["type"], shown(problem.get("input")), problem.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key '{key}'{_near(path, model)}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{key} is {value}; it must be {words} {context[name]}"
    if kind == "literal_error":
        return f"{key} is {value}; choose from {context['expected'].replace(' or ', ', ')}"
    if kind == "value_error":
        message = str(context.get("error", problem["msg"]))
        return f"{key}: {message}" if key else message
    if kind == "missing":
        return f"{key} is missing"
    return f"{key} is {value}; {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _near(path: list[str], model: type[BaseModel]) -> str:
    """A hint: the closest spelling among the keys allowed in this place, or all of them."""
    here: Any = model
    for part in path[:-1]:
        field = here.model_fields.get(part) if isinstance(here, type) and issubclass(here, BaseModel) else None
        here = field.annotation if field is not None else None
    if not (isinstance(here, type) and issubclass(here, BaseModel)):
        return ""
    names = list(here.model_fields)
    hint = did_you_mean(path[-1], names) or f"choose from {', '.join(names)}"
    return f"; {hint}"


def shown(value: Any) -> str:
    try:
        return _cut(repr(value), 60)
    except RecursionError:
        return "nested too deeply"
    except ValueError:
        return "a number with too many digits"
