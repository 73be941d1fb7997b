"""`redgrape deploy init`: makes the folder of a deployment, with all that each party needs."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import tomli_w

from redgrape import own_code
from redgrape.data.federation import MANY
from redgrape.data.prepare import AT_SITES
from redgrape.data.table import SUFFIXES
from redgrape.deploy.setup import certificates
from redgrape.deploy.setup.certificates import Certificate, PrivateKey
from redgrape.deploy.setup.folder import (
    DataAgreement,
    Deployment,
    DeployOptions,
    SiteOptions,
    is_everywhere,
    is_loopback,
    write_private,
)
from redgrape.errors import ConfigError
from redgrape.learning.sums import DENSE
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

_SERVER_README = """\
# A deployment of redgrape

Sites: {sites}. Server: {address}, listening on {bind}.

1. Give each site its folder below `sites/`, over a channel that only the two of you can read: it holds the site's key.
   You may delete it here afterwards, but keep `sites/NAME/key.pub`, by which the server knows the site.
2. `redgrape deploy server .` (or `server/start.sh`) starts the server and stays in the foreground.
3. Every site starts its own part.
4. `redgrape deploy status .` shows who is connected; `redgrape deploy run .` runs `experiment.toml`. The run folder
   appears below `runs/`. After an interruption, the same command continues from the last finished round.
5. `redgrape doctor .` looks for problems.

`server/ca.key` signs certificates that all sites trust: keep it secret.
"""

_SITE_README = """\
# Site {name}

Your data stays on your machine. You need Python 3.11 or newer, this folder, and an outgoing connection to {address}
(TCP). Nobody connects to you.

1. Install: `pip install -e '.[flower,images]'` in a clone of redgrape, in the same
   version as the server.
2. Check your setup: `redgrape doctor . --data PATH`.
3. Start: `redgrape deploy site . --data PATH` (or `./start.sh PATH`), and leave it running. It reconnects by itself.
   Ctrl-C ends it; start it again whenever you like: your site is known by its key. During a run some methods need all
   sites, and stop without yours.

PATH is {path}. The classes are: {classes}. You need not hold all of them.{input}{evaluation}

What leaves your site:

{leaves}

What your site takes part in is its policy, in `site.toml` (`secure_aggregation`, `class_rows`, `min_count`,
`min_clients`). It is enforced here, whatever the server asks for. Your site refuses what the policy does not allow, and
tells you why. To change the policy, edit `site.toml` and start the site again. Within it the server chooses the method
and its settings. It also sends the Flower app, which is code: only the app with the SHA-256 `app` in `site.toml` runs
here. No other code is sent. If an experiment needs code of its own, your site runs your copy in `files/`, and only if
`[allowed]` in `site.toml` has its name and SHA-256.

`key` is your site's key: keep it secret, readable only by you. `states/` holds what your site must remember between
rounds: keep it during a run.
"""

_LEAVES = """\
- in each round your update of the model (with some methods also a second one of its size, such as that of
  SCAFFOLD's control variates), the number of your examples and your mean training loss; such an update often
  discloses which classes you hold, and nearly the features of an example that is the only one of its class;
- {rows};
- if a method asks for it before the first round, how many examples of each class you hold, or which: {counts};
- {evaluation};
- who you are: the name of your site, the versions of redgrape, torch and numpy, and the kind of processor;
- that something failed, and what kind of failure it was; what it was exactly is in `resident.log`, which stays here."""

_COLUMNS = """\
- before the first round, for each column of numbers, how many you know, their sum and the sum of their squares;"""

_MASKED = """

All but the last two are masked, so that the server can read only the sum over all sites (secure aggregation)."""

_ROWS = """\
with RedGrape and CReFF a mean gradient for each class of which you hold at least {min_count} examples, with FedNH and
  RUCR a mean of its features, and so which these classes are; with some settings also how many examples of them you
  hold"""


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


def deployed(experiment: Experiment, options: DeployOptions) -> Experiment:
    """The experiment on the sites' data."""
    values = experiment.resolved()
    data = {"source": AT_SITES, "imbalance": "natural", "partition": "natural", "clients": len(options.sites)}
    kept = {key: values["data"][key] for key in ("crop", "flip", "cutout", "auxiliary")}
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
    sites = ", ".join(options.sites)
    _write(path / "README.md", _SERVER_README.format(sites=sites, address=options.address, bind=options.bind))
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
    evaluation = (
        "\nModels are evaluated at the sites: of data without a test set a fifth is held out for that."
        if site.evaluates
        else ""
    )
    words = {
        "name": name,
        "address": options.address,
        "classes": ", ".join(options.data.classes),
        **_data_in_words(options.data),
        "evaluation": evaluation,
        "leaves": _leaves(site),
    }
    _write(path / "README.md", _SITE_README.format(**words))
    _script(path / "start.sh", 'exec redgrape deploy site "$(dirname "$0")" --data "$@"')
    if not options.plain:
        private, public = certificates.site_key_bytes(certificates.new_key())
        (path / "ca.crt").write_bytes(authority)
        write_private(path / "key", private)
        (path / "key.pub").write_bytes(public)


_ARRAYS = """\
a folder with a sub-folder for each class, or an `.npz` file with `x`, `y` and, if classes are not simply
numbered, `class_names`"""


def _data_in_words(data: DataAgreement) -> dict[str, str]:
    if data.label is None:
        kind = "pixels as uint8" if data.input == "uint8" else "numbers"
        return {"path": _ARRAYS, "input": f" An input has the shape\n{' x '.join(map(str, data.shape))} ({kind})."}
    columns = [f"- {name}: numbers" for name in data.numbers]
    columns += [f"- {name}: one of {', '.join(categories)}" for name, categories in data.categories.items()]
    said = "\n".join(
        ["", "", "An empty cell is a missing value. Columns that are not listed here are not read:", "", *columns, ""]
    )
    return {"path": f"a table ({', '.join(SUFFIXES)}) with the classes in the column `{data.label}`", "input": said}


def _leaves(site: SiteOptions) -> str:
    """What leaves a site, for its engineer."""
    unrestricted = site.secure_aggregation or site.min_count == 1
    counts = "your site answers" if unrestricted else f"your site refuses, because its min_count is {site.min_count}"
    floor = "" if unrestricted else f", for the classes of which you train with at least {site.min_count} examples"
    classes = len(site.data.classes)
    pairs = "which class of your test set was taken for which"
    counted = pairs if classes <= DENSE else "each class of your test set was tested, recognised and predicted"
    near = ", how often it was among the five most probable" if classes >= MANY else ""
    evaluation = (
        f"in an evaluation how often {counted}{near}, and the loss{floor}"
        if site.evaluates
        else "nothing of a test set: models are evaluated at the server"
    )
    rows = _ROWS.format(min_count=site.min_count) if site.class_rows else "no row of a class: your site refuses"
    words = _LEAVES.format(rows=rows, counts=counts, evaluation=evaluation)
    words = words if site.data.label is None else f"{_COLUMNS}\n{words}"
    return words + _MASKED if site.secure_aggregation else words


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _script(path: Path, line: str) -> None:
    _write(path, f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
