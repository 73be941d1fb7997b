"""Decay of a hyper-parameter over the rounds."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

Schedule: TypeAlias = Literal["constant", "linear", "cosine", "exponential"]


def decay(schedule: Schedule, round: int, rounds: int, final: float) -> float:
    """The factor in this round: 1 in the first and, unless constant, `final` in the last."""
    t = (round - 1) / (rounds - 1) if rounds > 1 else 0.0
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - final) * t
        case "cosine":
            return final + (1.0 - final) * (1.0 + math.cos(math.pi * t)) / 2.0
        case "exponential":
            return float(final**t)
