"""`redgrape deploy init`: makes the folder of a deployment, with all that each party needs."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import tomli_w

from redgrape import own_code
from redgrape.data.prepare import AT_SITES
from redgrape.deploy.setup import certificates, readme
from redgrape.deploy.setup.certificates import Certificate, PrivateKey
from redgrape.deploy.setup.folder import (
    Deployment,
    DeployOptions,
    SiteOptions,
    is_everywhere,
    is_loopback,
    write_private,
)
from redgrape.errors import ConfigError
from redgrape.runs import durable
from redgrape.runs.experiment import Experiment

_APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "redgrape-app"
version = "1.0.0"
description = "The methods of redgrape on Flower; every party has redgrape installed"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "redgrape"

[tool.flwr.app.components]
serverapp = "redgrape_app.server:app"
clientapp = "redgrape_app.client:app"

[tool.flwr.app.config]
ticket = ""
run = ""
nodes = "authenticated"
changes = "refused"
"""


def create(path: Path, options: DeployOptions) -> None:
    """Make the folder, which must not exist yet or be empty. It appears complete or not at all."""
    if options.class_rows and len(options.sites) < options.min_clients:
        raise ConfigError(
            f"there are {len(options.sites)} sites, and a class is released only if {options.min_clients} of them "
            f"report it: none would be; name at least {options.min_clients} sites, or lower --min-clients (with two "
            "sites, each can subtract its own part)"
        )
    durable.check_free(path)
    temporary = durable.aside(path)
    with durable.storage_errors("make", path):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700, parents=True)
        try:
            _fill(temporary, options)
            if path.exists():
                path.rmdir()
            temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def default_experiment(options: DeployOptions) -> dict[str, Any]:
    """Vine in secure sums. Without them FedAvg, which asks no site for its classes. A round with a single site would
    disclose its model change to all."""
    net = "cnn" if len(options.data.shape) == 3 and min(options.data.shape[1:]) >= 16 else "mlp"
    fewest = min(len(options.sites), 3 if len(options.sites) >= 5 else 2)
    # A class with two holders: each could subtract its own part of the sum, and would know the other's.
    vine = {"name": "vine", "min_holders": options.min_clients}
    method = vine if options.secure_aggregation else {"name": "fedavg"}
    experiment = {
        "rounds": 20,
        "min_answers": fewest,
        "net": {"name": net},
        "method": method,
    }
    return experiment | ({"exchange": _floors(options)} if options.class_rows else {})


def _floors(options: DeployOptions) -> dict[str, Any]:
    """Floors for class rows. Without a secure sum, a gradient of fewer examples than classes can be solved for all of
    them."""
    solvable = 1 if options.secure_aggregation or options.min_count == 1 else len(options.data.classes)
    floors = {"min_count": max(options.min_count, solvable), "min_clients": options.min_clients}
    return {"preset": "private", **floors}


DATA_KEYS = ("crop", "flip", "cutout", "auxiliary")  # what an experiment decides about the sites' data


def deployed(experiment: Experiment, options: DeployOptions) -> Experiment:
    """The experiment on the sites' data."""
    values = experiment.resolved()
    data = {"source": AT_SITES, "imbalance": "natural", "partition": "natural", "clients": len(options.sites)}
    kept = {key: values["data"][key] for key in DATA_KEYS}
    for section, key in (("method", "name"), ("net", "name"), ("net", "weights")):  # the run is carried out elsewhere
        if own_code.names_file(name := values[section][key]) or (key == "weights" and name != "none"):
            values[section][key] = str(Path(name).resolve())
    return Experiment.parse({**values, "data": {**data, **kept}})


def _fill(path: Path, options: DeployOptions) -> None:
    server, app = path / "server", path / "app" / "redgrape_app"
    for folder in (server, path / "sites", path / "runs", app.parent, app):
        folder.mkdir(mode=0o700)
    _write(path / "deploy.toml", options.to_toml())
    _write(path / "experiment.toml", tomli_w.dumps(default_experiment(options)))
    _write(path / "README.md", readme.for_server(options))
    _write(app.parent / "pyproject.toml", _APP)
    _write(app / "__init__.py", '"""The Flower app: redgrape itself is installed at every party."""\n')
    _write(
        app / "server.py",
        '"""The server\'s part."""\n\nfrom redgrape.deploy.processes import server_app\n\napp = server_app.app\n',
    )
    _write(
        app / "client.py",
        '"""A site\'s part."""\n\nfrom redgrape.deploy.processes import client_app\n\napp = client_app.app\n',
    )
    _script(server / "start.sh", 'exec redgrape deploy server "$(dirname "$0")/.." "$@"')
    authority = b""
    if not options.plain:
        authority = _write_certificates(server, options)
    for index, name in enumerate(options.sites):
        _fill_site(path / "sites" / name, name, index, options, authority, app_hash(app.parent))


def app_hash(app: Path) -> str:
    """The hash of the app as Flower sends it."""
    from flwr.cli.build import build_fab_from_disk

    return hashlib.sha256(build_fab_from_disk(app)).hexdigest()


def renew(deployment: Deployment) -> None:
    """Make a new certificate for the server, signed by the authority that the sites already know."""
    server = deployment.server
    if deployment.options.plain:
        raise ConfigError("this deployment has no certificates: it is plain")
    certificates.check_private(server / "ca.key")
    if certificates.days_left(server / "ca.crt") < 0:
        raise ConfigError(f"'{server / 'ca.crt'}' itself has expired; make a new deployment and give out its folders")
    signing_key, authority = certificates.load_authority(server / "ca.key", server / "ca.crt")
    _write_server_certificate(server, deployment.options, signing_key, authority)


def _write_certificates(server: Path, options: DeployOptions) -> bytes:
    signing_key = certificates.new_key()
    authority = certificates.authority(signing_key)
    public = certificates.certificate_bytes(authority)
    (server / "ca.crt").write_bytes(public)
    write_private(server / "ca.key", certificates.private_bytes(signing_key))
    _write_server_certificate(server, options, signing_key, authority)
    return public


def _write_server_certificate(
    server: Path, options: DeployOptions, signing_key: PrivateKey, authority: Certificate
) -> None:
    key = certificates.new_key()
    everywhere = is_everywhere(options.bind)
    hosts = [options.host] if everywhere else [options.host, options.bind]
    if any(map(is_loopback, hosts)) or everywhere:
        hosts += ["localhost", "127.0.0.1"]  # for requests from this machine
    certificate = certificates.server_certificate(key, list(dict.fromkeys(hosts)), authority, signing_key)
    (server / "server.key").unlink(missing_ok=True)
    write_private(server / "server.key", certificates.private_bytes(key))
    (server / "server.crt").write_bytes(certificates.certificate_bytes(certificate))


def _fill_site(path: Path, name: str, index: int, options: DeployOptions, authority: bytes, app: str) -> None:
    path.mkdir(mode=0o700)
    site = SiteOptions(
        name=name,
        index=index,
        sites=len(options.sites),
        server=options.address,
        plain=options.plain,
        app=app,
        evaluates=options.test is None,
        secure_aggregation=options.secure_aggregation,
        class_rows=options.class_rows,
        min_count=options.min_count,
        min_clients=options.min_clients,
        data=options.data,
    )
    _write(path / "site.toml", site.to_toml())
    _write(path / "README.md", readme.for_site(site))
    _script(path / "start.sh", 'exec redgrape deploy site "$(dirname "$0")" --data "$@"')
    if not options.plain:
        private, public = certificates.site_key_bytes(certificates.new_key())
        (path / "ca.crt").write_bytes(authority)
        write_private(path / "key", private)
        (path / "key.pub").write_bytes(public)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _script(path: Path, line: str) -> None:
    _write(path, f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
