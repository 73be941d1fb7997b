"""Differential privacy spent, by Google's dp-accounting (the extra `redgrape[dp]`).

The unit is the client: epsilon bounds what the releases tell about all data of one client, against anybody who sees
them but not the updates; the server, which adds the noise, is trusted. Two runs are neighbours where one client's
contributions are replaced by nothing. A client that took part in r rounds met r times every mechanism of a round,
Gaussians of these noise multipliers; they are composed as Renyi divergences (Mironov, CSF 2017). Who takes part when
is public, so no amplification by sampling is claimed: the client that took part most often decides.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from redgrape.errors import ConfigError


class Mechanism(NamedTuple):
    """`times` Gaussian mechanisms, each with noise of `multiplier` times its sensitivity to one client."""

    name: str
    multiplier: float
    times: int


def check_installed() -> None:
    if importlib.util.find_spec("dp_accounting") is None:
        raise ConfigError("noise is accounted for by dp-accounting, which is missing; pip install 'redgrape[dp]'")


def epsilon(mechanisms: Sequence[Mechanism], rounds: int, delta: float) -> float:
    """Of a client that took part in so many rounds; infinite where something was let out without noise."""
    if rounds == 0:
        return 0.0
    if not mechanisms or any(m.multiplier == 0 for m in mechanisms):
        return math.inf
    from dp_accounting import GaussianDpEvent, rdp

    accountant = rdp.RdpAccountant()
    for m in mechanisms:
        accountant.compose(GaussianDpEvent(m.multiplier), m.times * rounds)
    return float(accountant.get_epsilon(delta))


def most_rounds(releases: Iterable[Mapping[str, Any]]) -> int:
    """In how many releases the client took part that did so most often."""
    return max(Counter(k for release in releases for k in release["clients"]).values(), default=0)
