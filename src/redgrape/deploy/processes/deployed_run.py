"""The venue of a run with sites as clients. The run's folder is like any other, except for what the server does not
know: who holds what, and the number of training examples of each class. (If the test set is at the sites, evaluation
counts its examples.)"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redgrape.data.examples import Examples, Pixels
from redgrape.deploy.protocol.engine import FlowerEngine
from redgrape.deploy.protocol.known_federation import PartialFederation
from redgrape.deploy.protocol.members import Members
from redgrape.deploy.protocol.transport import Transport
from redgrape.deploy.setup import certificates, site_data
from redgrape.deploy.setup.folder import Deployment
from redgrape.engines import ClientHalf, Engine
from redgrape.errors import ConfigError
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Prepared, Venue, groups_of, input_of, machine

if TYPE_CHECKING:
    from flwr.serverapp import Grid


def at_sites(
    folder: RunFolder, deployment: Deployment, grid: Grid, say: Callable[[str], None], *, authenticated: bool
) -> Venue:
    """`authenticated`: nodes prove that they hold the key of their site."""
    options = deployment.options

    def prepared(experiment: Experiment, before: Mapping[str, Any] | None) -> Prepared:
        test, auxiliary = (_own(deployment, path) for path in (options.test, options.auxiliary))
        federation = PartialFederation(
            options.data, len(options.sites), test=test, auxiliary=auxiliary, tail=options.tail
        )
        if before is not None and bool(before.get("secure_aggregation")) != options.secure_aggregation:
            raise ConfigError(
                f"'{folder.path}' began with secure_aggregation={str(not options.secure_aggregation).lower()}, "
                "and the deployment has the other now; set it back, or start a new run"
            )
        run = str((before or {}).get("run", secrets.token_hex(8)))  # the sites keep their states under this name
        joined = dict((before or {}).get("joined", {}))  # what sites declared about themselves, by name
        keys = None
        if authenticated:
            keys = [certificates.public_identity(deployment.site(name) / "key.pub") for name in options.sites]

        def engine(half: ClientHalf) -> Engine:
            transport = Transport(grid)
            members = Members(transport, options, federation.joined, keys, say, joined, record_joined)
            return FlowerEngine(half, transport, members, options, experiment, run, say)

        environment = machine("cpu") | {
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
            "run": run,
            "joined": joined,
            "files": {},
            "stack": 1,
        }
        return Prepared(federation, environment, engine)

    def record_joined(name: str, said: Mapping[str, Any]) -> None:
        environment = folder.environment()
        joined = environment.get("joined", {})
        if joined.get(name) != said:
            folder.write_environment(environment | {"joined": {**joined, name: dict(said)}}, None)

    def client_name(client: int) -> str:
        return f"site '{options.sites[client]}'"

    def report_lost(record: Mapping[str, Any], notes: list[str]) -> None:
        """Report lost and rejected answers at once, by the sites' names."""
        for what, reasons in (("lost", record["lost"]), ("rejected", record["rejected"])):
            for client, reason in reasons.items():
                words = "was not there" if what == "lost" else "sent an update that is rejected"
                say(f"round {record['round']}: {client_name(int(client))} {words}: {reason}")
        for client in record.get("states_lost", {}):
            if client not in record["lost"]:
                lost = f"{client_name(int(client))} had lost its own"
                say(f"round {record['round']}: all sites' states started anew, because {lost}")

    return Venue(prepared, client_name, report_lost, knows_partition=False)


def _own(deployment: Deployment, path: str | None) -> Examples | None:
    """One of the server's own data sets."""
    if path is None:
        return None
    place = Path(path) if Path(path).is_absolute() else deployment.path / path
    return site_data.load_all(place, deployment.server / "cache", deployment.options.data)


def _contents(*sets: Examples | None) -> str:
    digest = hashlib.sha256()
    for examples in sets:
        if examples is not None and len(examples):
            digest.update(examples.labels.numpy().astype("<i8").tobytes())
            x = examples.x if examples.rows is None else examples.x[examples.rows]
            digest.update(x.contiguous().numpy().tobytes())
    return digest.hexdigest()
