"""Simulates all sites of a deployment with the same Flower app, on this machine or a cluster, with Ray.

No site connects: Flower starts their part in Ray's workers. This is for federations of many sites, and for trying out a
deployment in advance. Ray is the extra `redgrape[flower-simulation]`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from redgrape.data.table import SUFFIXES, listed
from redgrape.deploy.processes.supervision import free_port
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
                raise DataError(f"there is no '{data / name}', nor a file {listed(_kinds(name))} in '{data}'")
        own = {"host": "127.0.0.1", "bind": "127.0.0.1", "port": free_port(), "plain": True}
        self.options = self.options.model_copy(update=own)

    @property
    def flower_home(self) -> Path:
        return self.server / "simulated" / "flower"


def data_of(data: Path, name: str) -> Path:
    """The path of a simulated site's data: the folder PATH/NAME, PATH/NAME.npz, or a table."""
    return next((data / kind for kind in (name, *_kinds(name)) if (data / kind).exists()), data / name)


def _kinds(name: str) -> list[str]:
    return [f"{name}{suffix}" for suffix in (".npz", *SUFFIXES)]
