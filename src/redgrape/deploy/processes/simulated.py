"""Simulates all sites of a deployment with the same Flower app, on this machine or a cluster, with Ray.

No site connects: Flower starts their part in Ray's workers. This is for federations of many sites, and for trying out a
deployment in advance. Ray is the extra `redgrape[flower-simulation]`.
"""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path

from redgrape.deploy.setup.folder import Deployment
from redgrape.errors import ConfigError, DataError, install


class SimulatedDeployment(Deployment):
    """The same folder with a separate SuperLink, without TLS, on a free port of this machine."""

    def __init__(self, path: Path, data: Path) -> None:
        super().__init__(path)
        if find_spec("ray") is None:
            raise ConfigError(f"simulation needs Ray; {install('flower-simulation')}")
        if self.options.secure_aggregation:
            raise ConfigError(
                "secure_aggregation is set, and a simulation has all sites' data in one place: nothing could be "
                "hidden; try it on sites of this machine (redgrape deploy site)"
            )
        for name in self.options.sites:
            if not data_of(data, name).exists():
                raise DataError(f"there is no '{data / name}' nor '{data / name}.npz'; each site needs one of them")
        own = {"host": "127.0.0.1", "bind": "127.0.0.1", "port": _free_port(), "plain": True}
        self.options = self.options.model_copy(update=own)

    @property
    def flower_home(self) -> Path:
        return self.server / "simulated" / "flower"


def data_of(data: Path, name: str) -> Path:
    """The path of a simulated site's data: the folder PATH/NAME, or PATH/NAME.npz."""
    return data / name if (data / name).is_dir() else data / f"{name}.npz"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
