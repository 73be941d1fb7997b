"""Paired comparison of two rows: differences by seed, and a confidence interval for their mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from redgrape.reading.run_tables import mean_std

FEWEST_SEEDS = 3
# The 97.5 % quantile of Student's t with 1, 2, ... degrees of freedom
_T = """
12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 2.201 2.179 2.160 2.145 2.131
2.120 2.110 2.101 2.093 2.086 2.080 2.074 2.069 2.064 2.060 2.056 2.052 2.048 2.045 2.042
"""
QUANTILES = tuple(map(float, _T.split()))


@dataclass(frozen=True)
class Paired:
    """The mean difference over common seeds. From three seeds on, it has a 95 % interval."""

    seeds: int
    mean: float | None
    low: float | None = None
    high: float | None = None

    @property
    def separated(self) -> bool | None:
        """Whether the interval excludes zero. None if there are too few seeds."""
        if self.low is None or self.high is None:
            return None
        return self.low > 0 or self.high < 0


def quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t. Beyond the table, an upper bound within 0.003."""
    return QUANTILES[freedom - 1] if freedom <= len(QUANTILES) else 1.96 + 2.5 / freedom


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Paired:
    """Ours minus theirs, by seed. Equal seeds give equal splits and sampled clients, so the differences are paired."""
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not differences:
        return Paired(0, None)
    mean, std = mean_std(differences)
    if len(differences) < FEWEST_SEEDS or std is None:
        return Paired(len(differences), mean)
    half = quantile(len(differences) - 1) * std / math.sqrt(len(differences))
    return Paired(len(differences), mean, mean - half, mean + half)
