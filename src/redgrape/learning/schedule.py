"""Decay of a hyper-parameter over the rounds, and its warm-up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

Schedule: TypeAlias = Literal["constant", "linear", "cosine", "exponential", "milestones"]
MILESTONES = (0.5, 0.75)


def warm_up(round: int, warm_rounds: int) -> float:
    """The factor in this round: it rises linearly over the first `warm_rounds`, and is 1 in all others."""
    return min(1.0, round / (warm_rounds + 1))


def decay(schedule: Schedule, round: int, rounds: int, final: float, milestones: Sequence[float] = MILESTONES) -> float:
    """The factor in this round: 1 in the first and, unless constant, `final` in the last. `milestones`: the shares of
    the rounds after which it falls, by the same factor each time."""
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
        case "milestones":
            passed = sum(round > share * rounds for share in milestones)
            return float(final ** (passed / len(milestones)))
