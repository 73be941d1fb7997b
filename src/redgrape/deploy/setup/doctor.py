"""`redgrape doctor`: checks the folder of a deployment or a site, and says what is wrong and what to do."""

from __future__ import annotations

import datetime
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from redgrape import own_code
from redgrape.deploy.processes import submission
from redgrape.deploy.processes.server_role import check_names, check_port
from redgrape.deploy.processes.site_role import AHEAD, BEHIND, check_server, clock_ahead, why_clock_is_wrong
from redgrape.deploy.processes.superlink import Link
from redgrape.deploy.setup import certificates, site_data
from redgrape.deploy.setup.create import deployed
from redgrape.deploy.setup.folder import FILES, Deployment, SiteFolder, policy_in_words
from redgrape.errors import BusyError, RedgrapeError, install
from redgrape.runs.experiment import Experiment

SOON = 30.0  # days before expiry at which a certificate gets a warning
FREE = 1 << 30  # bytes
OLDEST_FLOWER, FIRST_FLOWER_TOO_NEW = (1, 41), (1, 42)


@dataclass(frozen=True)
class Finding:
    """What was checked, its status, and what to do about it."""

    what: str
    how: Literal["good", "warning", "bad"]
    words: str


def examine(path: Path, data: Path | None = None) -> list[Finding]:
    """All findings about a deployment's folder or a site's. `data` is a site's."""
    if data is not None or (path / "site.toml").is_file():
        return list(_site(path, data))
    return list(_server(path))


def _server(path: Path) -> Iterator[Finding]:
    deployment = Deployment(path)
    options, server = deployment.options, deployment.server
    yield from _versions()
    yield _look("experiment", lambda: _experiment(deployment))
    if not options.plain:
        for name in ("ca.crt", "server.crt"):
            yield _certificate(server / name, f"redgrape deploy renew {path}")
        yield _look("server's names", partial(check_names, deployment))
        for name in ("ca.key", "server.key"):
            yield _look(f"server/{name}", partial(certificates.check_private, server / name))
        for name in options.sites:
            key = deployment.site(name) / "key.pub"
            yield _look(f"key of site {name}", partial(_public_key, key))
    link = Link(deployment)
    where = f"{options.bind}:{options.port}"
    if link.is_up():
        yield Finding("server", "good", f"answers at {where}")
    else:
        yield _look(
            "port", lambda: check_port(options.bind, options.port), f"{where} is free; the server is not running"
        )
    yield _look("host name", lambda: _resolves(options.host))
    for name, place in (("test set", options.test), ("auxiliary set", options.auxiliary)):
        if place is not None:
            yield _look(name, partial(_data, Path(place), server / "cache", deployment))
    yield _disk(path)


def _site(path: Path, data: Path | None) -> Iterator[Finding]:
    folder = SiteFolder(path)
    options = folder.options
    yield from _versions()
    yield Finding("policy", "good", policy_in_words(options))
    if not options.plain:
        yield _certificate(folder.authority, "ask the server's people for a new ca.crt")
        yield _look("key", lambda: certificates.check_private(folder.key))
        yield _look("key pair", lambda: _same_key(folder))
    if folder.options.allowed:
        yield _look("allowed", lambda: _own_files(folder))
    yield _reachable(folder)
    yield _clock(folder)
    if data is None:
        yield Finding("data", "warning", "not looked at; name it with --data PATH")
    else:
        yield _look("data", lambda: _site_data(folder, data))
    yield _disk(path)


def _look(what: str, check: Callable[[], str | None], otherwise: str = "in order") -> Finding:
    """The finding of a check. If the check raises, the error says what is wrong."""
    try:
        return Finding(what, "good", check() or otherwise)
    except BusyError as error:
        return Finding(what, "warning", str(error))
    except (RedgrapeError, OSError, ValueError) as error:
        return Finding(what, "bad", " ".join(str(error).split()))


def _versions() -> Iterator[Finding]:
    for name in ("redgrape", "torch", "flwr"):
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding(name, "bad", f"not installed; {install('flower')}")
            continue
        numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdecimal())
        if name == "flwr" and not OLDEST_FLOWER <= numbers < FIRST_FLOWER_TOO_NEW:
            yield Finding(name, "bad", f"{found}; run `pip install 'flwr>=1.41,<1.42'`")
        else:
            yield Finding(name, "good", found)


def _experiment(deployment: Deployment) -> str:
    experiment = Experiment.read(deployment.path / "experiment.toml")
    submission.check(experiment, deployment.options)
    experiment = deployed(experiment, deployment.options)
    return f"{experiment.method.name}, {experiment.rounds} rounds"


def _certificate(path: Path, remedy: str) -> Finding:
    try:
        days = certificates.days_left(path)
    except RedgrapeError as error:
        return Finding(path.name, "bad", str(error))
    if days < 0:
        return Finding(path.name, "bad", f"expired {-days:.0f} days ago; {remedy}")
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    words = f"valid until {ends:%Y-%m-%d}"
    return Finding(path.name, "warning" if days < SOON else "good", words + (f"; {remedy}" if days < SOON else ""))


def _resolves(host: str) -> str:
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    except OSError as error:
        raise RedgrapeError(f"'{host}' is not known here ({error}); sites must be able to resolve it") from error
    return f"{host} is {', '.join(found)}"


def _data(path: Path, cache: Path, deployment: Deployment) -> str:
    place = path if path.is_absolute() else deployment.path / path
    return f"{len(site_data.load_all(place, cache, deployment.options.data))} examples"


def _public_key(path: Path) -> None:
    certificates.public_identity(path)


def _same_key(folder: SiteFolder) -> None:
    public = folder.path / "key.pub"
    if public.exists() and certificates.public_identity(public) != certificates.private_identity(folder.key):
        raise RedgrapeError("key and key.pub do not belong together; ask the server's people for your site's folder")


def _reachable(folder: SiteFolder) -> Finding:
    try:
        reason = check_server(folder)
    except RedgrapeError as error:
        return Finding("server", "bad", str(error))
    if reason is not None:
        return Finding(
            "server", "bad", f"{folder.options.server} does not answer ({reason}); is it started, and a way out open?"
        )
    return Finding(
        "server", "good", f"{folder.options.server} answers" + ("" if folder.options.plain else " and is the right one")
    )


def _clock(folder: SiteFolder) -> Finding:
    try:
        return _clock_finding(clock_ahead(folder))
    except (OSError, ValueError) as error:
        return Finding("clock", "warning", f"not compared: {error}")


def _clock_finding(ahead: float) -> Finding:
    wrong = why_clock_is_wrong(ahead)
    if wrong is not None:
        return Finding("clock", "warning" if -BEHIND <= ahead <= AHEAD else "bad", wrong)
    return Finding("clock", "good", f"{abs(ahead):.0f} seconds {'ahead of' if ahead > 0 else 'behind'} the server's")


def _own_files(folder: SiteFolder) -> str:
    code = {name: digest for name, digest in folder.options.allowed.items() if name.endswith(".py")}
    for name, digest in code.items():
        if own_code.digests([folder.path / FILES / name])[name] != digest:
            raise RedgrapeError(f"{FILES}/{name} is another file than the one that site.toml allows")
    return f"{len(code)} files of code as site.toml allows them"


def _site_data(folder: SiteFolder, data: Path) -> str:
    train, test = site_data.of_site(folder, data)
    classes = len(train.labels.unique())
    return f"{len(train)} training and {len(test)} test examples of {classes} classes"


def _disk(path: Path) -> Finding:
    free = shutil.disk_usage(path).free
    words = f"{free / (1 << 30):.1f} GB free"
    return Finding("disk", "good" if free >= FREE else "bad", words + ("" if free >= FREE else "; make room"))
