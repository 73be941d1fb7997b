"""The differential privacy spent, computed with Google's dp-accounting (the extra `redgrape[dp]`).

The unit is the client: epsilon bounds what the releases reveal about all data of one client to anybody who sees the
releases but not the updates. The server adds the noise and is trusted. Two runs are neighbours if one client's
contributions are replaced by nothing. A client that took part in r rounds met every mechanism of a round r times. These
are Gaussians with the given noise multipliers, composed as Renyi divergences (Mironov, CSF 2017). Who takes part when
is public, so no amplification by sampling is claimed: the client with the most rounds decides.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from redgrape.errors import ConfigError, install


class Mechanism(NamedTuple):
    """`times` Gaussian mechanisms. The noise of each is `multiplier` times its sensitivity to one client."""

    name: str
    multiplier: float
    times: int


def check_installed() -> None:
    if importlib.util.find_spec("dp_accounting") is None:
        raise ConfigError(f"noise needs dp-accounting, which is not installed; {install('dp')}")


def epsilon(mechanisms: Sequence[Mechanism], rounds: int, delta: float) -> float:
    """The epsilon of a client that took part in this many rounds; infinite if something was released without noise."""
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
    """The largest number of releases that any one client took part in."""
    return max(Counter(k for release in releases for k in release["clients"]).values(), default=0)
