"""A run whose clients are sites. Its folder is like that of any run, without what the server is not told: who holds
what, and how many training examples of a class there are. (Of a test set at the sites the evaluation counts them.)"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redgrape.data.examples import Examples, Pixels
from redgrape.data.federation import Federation
from redgrape.deploy.protocol.engine import FlowerEngine
from redgrape.deploy.protocol.known_federation import PartialFederation
from redgrape.deploy.setup import certificates, site_data
from redgrape.deploy.setup.folder import Deployment
from redgrape.engines import ClientHalf, Engine
from redgrape.errors import ConfigError
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run, groups_of, input_of, machine

if TYPE_CHECKING:
    from flwr.serverapp import Grid


class DeployedRun(Run):
    knows_partition = False

    def __init__(
        self,
        folder: RunFolder,
        deployment: Deployment,
        grid: Grid,
        say: Callable[[str], None],
        *,
        authenticated: bool,
        allow_changes: bool = False,
    ) -> None:
        super().__init__(folder, workers=1, allow_changes=allow_changes)
        self._deployment, self._grid, self._say = deployment, grid, say
        self._authenticated = authenticated
        self._name = ""  # of the run, by which the sites keep their states
        self._joined: dict[str, Any] = {}  # what the sites have said of themselves, by name

    def _prepare(self) -> Federation:
        options = self._deployment.options
        return PartialFederation(
            options.data,
            len(options.sites),
            test=self._own(options.test),
            auxiliary=self._own(options.auxiliary),
            tail=options.tail,
        )

    def _own(self, path: str | None) -> Examples | None:
        """A data set of the server's own."""
        if path is None:
            return None
        place = Path(path) if Path(path).is_absolute() else self._deployment.path / path
        return site_data.load_all(place, self._deployment.server / "cache", self._deployment.options.data)

    def _environment(self, federation: Federation, before: Mapping[str, Any] | None) -> dict[str, Any]:
        options = self._deployment.options
        if before is not None and bool(before.get("secure_aggregation")) != options.secure_aggregation:
            raise ConfigError(
                f"'{self.folder.path}' began with secure_aggregation={str(not options.secure_aggregation).lower()}, "
                "and the deployment has the other now; set it back, or start a new run"
            )
        self._name = str(before["run"]) if before is not None and "run" in before else secrets.token_hex(8)
        self._joined = dict((before or {}).get("joined", {}))
        return machine(self.device) | {
            "split": federation.fingerprint(),
            "data": _contents(federation.test, federation.auxiliary),
            "input": input_of(federation.input_shape, Pixels() if options.data.input == "uint8" else None),
            "class_names": federation.class_names,
            "class_counts": None,
            "client_counts": None,
            "groups": groups_of(federation),
            "sites": list(options.sites),
            "secure_aggregation": options.secure_aggregation,
            "evaluated": "sites" if federation.evaluated_elsewhere else "server",
            "min_count": options.min_count,
            "run": self._name,
            "joined": self._joined,
            "files": {},
            "stack": 1,
        }

    def _engine(self) -> Callable[[ClientHalf], Engine]:
        options, sites = self._deployment.options, self._deployment.options.sites
        keys = None
        if self._authenticated:
            keys = [certificates.public_identity(self._deployment.site(name) / "key.pub") for name in sites]

        def make(half: ClientHalf) -> Engine:
            joined = dict(self._joined)
            return FlowerEngine(
                half, self._grid, options, self.experiment, self._name, keys, self._say, joined, self._note_joined
            )

        return make

    def _note_joined(self, name: str, said: Mapping[str, Any]) -> None:
        environment = self.folder.environment()
        joined = environment.get("joined", {})
        if joined.get(name) != said:
            self.folder.write_environment(environment | {"joined": {**joined, name: dict(said)}}, None)

    def _note_lost(self, record: Mapping[str, Any]) -> None:
        """At once, also of what was rejected, and by the sites' names."""
        for what, reasons in (("lost", record["lost"]), ("rejected", record["rejected"])):
            for client, reason in reasons.items():
                words = "was not there" if what == "lost" else "sent an update that is rejected"
                self._say(f"round {record['round']}: {self._client_name(int(client))} {words}: {reason}")

    def _client_name(self, client: int) -> str:
        return f"site '{self._deployment.options.sites[client]}'"


def _contents(*sets: Examples | None) -> str:
    digest = hashlib.sha256()
    for examples in sets:
        if examples is not None and len(examples):
            digest.update(examples.labels.numpy().astype("<i8").tobytes())
            x = examples.x if examples.rows is None else examples.x[examples.rows]
            digest.update(x.contiguous().numpy().tobytes())
    return digest.hexdigest()
