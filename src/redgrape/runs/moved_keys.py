"""Experiment keys that were moved or removed since 0.1, and their replacements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redgrape.errors import ConfigError

EXCHANGE = {
    "aggregation": "rule",
    "byzantine": "byzantine",
    "update_norm": "update_norm",
    "dp_clip": "clip",
    "dp_noise": "noise",
    "dp_delta": "delta",
    "dp_randomness": "randomness",
    "min_count": "min_count",
    "min_clients": "min_clients",
    "prototype_clip": "class_clip",
    "prototype_noise": "class_noise",
}  # from [method] to [exchange]
RENAMED = {"feddyn": {"a": "alpha"}}
GONE = {"prototype_message": "table", "prototype_rank": "none", "prototype_precision": "single"}  # with their defaults


def check(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first key of [method] that was moved or removed."""
    method = values.get("method")
    if not isinstance(method, Mapping) or str(method.get("name", "")).endswith(".py"):
        return
    if method.get("preset") == "private":
        raise ConfigError("method.preset=private has moved: write exchange.preset=private")
    for key in method:
        if key in EXCHANGE:
            raise ConfigError(f"method.{key} has moved: write exchange.{EXCHANGE[key]}")
        if key in GONE:
            raise ConfigError(f"method.{key} was removed: leave it out")
        if new := RENAMED.get(str(method.get("name")), {}).get(str(key)):
            raise ConfigError(f"method.{key} was renamed: write method.{new}")
