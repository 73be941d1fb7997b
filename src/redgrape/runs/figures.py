"""The figures of an evaluation that runs report, by their names in a record."""

from __future__ import annotations

FIGURES = ("accuracy", "balanced", "head", "middle", "tail")
