"""The venue of a run with sites as clients. The run's folder is like any other, except for what the server does not
know: who holds what, and the number of training examples of each class. (If the test set is at the sites, evaluation
counts its examples.)"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from redgrape.data.columns import Columns
from redgrape.data.examples import Examples, Pixels
from redgrape.data.federation import Declared
from redgrape.deploy.protocol import inputs, own_parts
from redgrape.deploy.protocol.asking import Sites
from redgrape.deploy.protocol.engine import FlowerEngine
from redgrape.deploy.protocol.known_federation import PartialFederation
from redgrape.deploy.protocol.members import Members
from redgrape.deploy.protocol.messages import ColumnsAnswer, ColumnsQuestion, PrepareQuestion
from redgrape.deploy.protocol.transport import Transport
from redgrape.deploy.setup import certificates, site_data
from redgrape.deploy.setup.folder import DataAgreement, Deployment, DeployOptions
from redgrape.engines import ClientHalf, Engine
from redgrape.errors import ConfigError, StorageError, TooFewClients
from redgrape.exchange.checks import UpdateRejected
from redgrape.nets import pretrained
from redgrape.runs.environment import file_digests, groups_of, input_of, machine
from redgrape.runs.experiment import Experiment, NetOptions
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Prepared, Venue
from redgrape.tree import Tensors

if TYPE_CHECKING:
    from flwr.serverapp import Grid


def at_sites(
    folder: RunFolder, deployment: Deployment, grid: Grid, say: Callable[[str], None], *, authenticated: bool
) -> Venue:
    """`authenticated`: nodes prove that they hold the key of their site."""
    options = deployment.options

    def prepared(experiment: Experiment, before: Mapping[str, Any] | None) -> Prepared:
        if before is not None and bool(before.get("secure_aggregation")) != options.secure_aggregation:
            raise ConfigError(
                f"'{folder.path}' began with secure_aggregation={str(not options.secure_aggregation).lower()}, "
                "and the deployment has the other now; set it back, or start a new run"
            )
        files = file_digests(experiment) if before is None else before.get("files", {})
        joined = dict((before or {}).get("joined", {}))  # what sites declared about themselves, by name
        task: dict[str, Any] = {
            "run": str((before or {}).get("run", secrets.token_hex(8))),  # the sites keep their states under this name
            "experiment": own_parts.for_sites(experiment),
            "files": files,
        }
        keys = None
        if authenticated:
            keys = [certificates.public_identity(deployment.site(name) / "key.pub") for name in options.sites]
        declared: dict[int, Declared] = {}
        transport = Transport(grid)
        members = Members(transport, options, declared, keys, say, dict(joined), partial(record_joined, joined))
        sites = Sites(transport, members, options, experiment, say)
        columns = None
        if options.data.label is not None:
            known = ((before or {}).get("input") or {}).get("table")
            columns = _columns(sites, options, task) if known is None else _stored(known, folder)
            task["columns"] = columns.model_dump()
        own = [_own(deployment, path) for path in (options.test, options.auxiliary)]
        contents = _contents(*own)
        change = inputs.change(experiment.net, options.data.shape, columns, deployment.server / "cache")
        test, auxiliary = (None if examples is None else change(examples) for examples in own)
        federation = PartialFederation(
            options.data,
            len(options.sites),
            test=test,
            auxiliary=auxiliary,
            tail=options.tail,
            shape=experiment.net.inputs(options.data.shape),
        )
        federation.joined = declared

        def engine(half: ClientHalf) -> Engine:
            if files:
                sites.prepare(PrepareQuestion(deadline=options.deadlines.round, **task))
            return FlowerEngine(half, sites, members, options, experiment, task, say)

        environment = machine("cpu") | {
            "split": federation.fingerprint(),
            "data": contents,
            "input": _input(experiment.net, options.data) | ({} if columns is None else {"table": task["columns"]}),
            "class_names": federation.class_names,
            "class_counts": None,
            "client_counts": None,
            "groups": groups_of(federation),
            "sites": list(options.sites),
            "secure_aggregation": options.secure_aggregation,
            "evaluated": "sites" if federation.evaluated_elsewhere else "server",
            "min_count": options.min_count,
            "run": task["run"],
            "joined": joined,
            "files": files,
            "stack": 1,
        }
        return Prepared(federation, environment, engine)

    def record_joined(joined: dict[str, Any], name: str, said: Mapping[str, Any]) -> None:
        """Sites may join before the environment of a new run is written. `joined` is a part of it."""
        if joined.get(name) != said:
            joined[name] = dict(said)
            if (folder.path / "environment.json").exists():
                folder.write_environment(folder.environment() | {"joined": joined}, None)

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


def _columns(sites: Sites, options: DeployOptions, task: Mapping[str, Any]) -> Columns:
    """The columns of the sites' tables, scaled by sums over all sites."""
    columns, question = options.data.columns(), ColumnsQuestion(deadline=options.deadlines.evaluate, **task)
    if not options.data.numbers:
        return columns
    total: Tensors = {}
    try:
        for _, sent in sites.summed_or_all(question, ColumnsAnswer):
            new = inputs.checked(sent, columns)
            total = {name: t + total[name] for name, t in new.items()} if total else new
    except UpdateRejected as reason:
        raise TooFewClients(f"the sites' tables cannot be scaled: {reason}") from reason
    return inputs.fitted(columns, total)


def _stored(columns: Any, folder: RunFolder) -> Columns:
    try:
        return Columns.model_validate(columns)
    except ValidationError as error:
        raise StorageError(f"'{folder.path / 'environment.json'}' is damaged: its columns are invalid") from error


def _input(net: NetOptions, agreement: DataAgreement) -> dict[str, Any]:
    """The format of raw inputs."""
    if agreement.input != "uint8":
        return input_of(agreement.shape, None)
    own = pretrained.normalisation(net.name, agreement.shape[0]) if net.is_pretrained else ()
    return input_of(agreement.shape, Pixels(*own))


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
