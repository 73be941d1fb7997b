"""The commands deploy init, server, site, run, status and renew."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redgrape.deploy.processes.supervision import require_flower
from redgrape.errors import BusyError, ConfigError, DataError, RedgrapeError
from redgrape.reading.terminal import printable, table

if TYPE_CHECKING:
    from redgrape.deploy.processes.superlink import Link
    from redgrape.deploy.setup.folder import Deployment, DeployOptions


def _say(words: str) -> None:
    print(printable(words), file=sys.stderr, flush=True)


def init(options: argparse.Namespace) -> None:
    """Create the folder of a deployment."""
    require_flower()
    from redgrape.deploy.setup.create import create
    from redgrape.deploy.setup.folder import FEWEST_IN_SUM, WHY_THREE

    described = _described(options)
    create(options.folder, described)
    print(f"deployment: {printable(options.folder)}")
    for name in described.sites:
        print(f"  give to site {printable(name)}: {printable(options.folder / 'sites' / name)}")
    if options.secure_aggregation is None and not described.secure_aggregation:
        print(
            f"note: no secure sums, because they need {FEWEST_IN_SUM} sites ({WHY_THREE}); the server sees each "
            "site's update"
        )
    if (described.class_rows or described.secure_aggregation) and len(described.sites) < 5:
        print(
            f"note: only classes that {described.min_clients} sites hold are re-balanced; with "
            f"{len(described.sites)} sites these may be few (--min-clients)"
        )
    print(f"next: redgrape deploy server {printable(options.folder)}")


def _described(options: argparse.Namespace) -> DeployOptions:
    from pydantic import ValidationError

    from redgrape.deploy.setup.folder import FEWEST_IN_SUM, DeployOptions
    from redgrape.validation import one_line

    sites = tuple(options.sites.split(","))
    secure = len(sites) >= FEWEST_IN_SUM if options.secure_aggregation is None else options.secure_aggregation
    values: dict[str, object] = {
        "sites": sites,
        "host": options.host,
        "port": options.port,
        "bind": options.bind or options.host,
        "plain": options.plain,
        "min_count": options.min_count,
        "min_clients": options.min_clients,
        "secure_aggregation": secure,
        "class_rows": options.class_rows,
        "data": _agreement(options),
    }
    if options.test is not None:
        values["test"] = str(options.test.resolve())
    if options.tail:
        values["tail"] = tuple(options.tail.split(","))
    try:
        return DeployOptions.model_validate(values)
    except ValidationError as error:
        raise one_line(error, DeployOptions) from error


def _agreement(options: argparse.Namespace) -> dict[str, object]:
    """The data format, from the flags or from sample data."""
    like = options.like or options.test
    if options.classes is not None and options.shape is not None:
        size = {"image_size": options.image_size} if options.image_size else {}
        return {"classes": _classes(options.classes), "shape": options.shape, "input": options.input, **size}
    if like is None:
        raise ConfigError(
            "describe the data of the sites: --classes a,b,c and --shape 1,28,28, or --like DATA, or --test DATA (and "
            "--label COLUMN for a table)"
        )
    if options.label is not None:
        return _table_agreement(like, options)
    import tempfile

    import torch

    from redgrape.data import user_data

    with tempfile.TemporaryDirectory() as cache:
        source = user_data.load(like, Path(cache), seed=0, image_size=options.image_size, hold_out=False)
        x = source.train.x
        kind = "uint8" if x.dtype == torch.uint8 else "float"
        shape = tuple(x.shape[1:])
    size = {"image_size": options.image_size} if options.image_size else {}
    return {"classes": tuple(source.class_names), "shape": shape, "input": kind, **size}


def _table_agreement(like: Path, options: argparse.Namespace) -> dict[str, object]:
    """The columns of a sample table, with all their categories."""
    from redgrape.data.columns import Roles, raw
    from redgrape.data.table import read
    from redgrape.deploy.setup.folder import DataAgreement

    rows = raw(read(like), Roles(options.label, drop=_listed(options.drop), categorical=_listed(options.categorical)))
    classes, _ = rows.table.names(rows.label, "class")
    values: dict[str, Any] = {
        "classes": tuple(classes),
        "input": "table",
        "label": rows.label,
        "numbers": tuple(name for name, is_number in rows.is_number.items() if is_number),
        "categories": {
            name: tuple(sorted(filter(None, rows.table[name].values)))
            for name, is_number in rows.is_number.items()
            if not is_number
        },
    }
    return values | {"shape": (DataAgreement.model_construct(**values).columns().width,)}


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _classes(text: str) -> tuple[str, ...]:
    """Comma-separated names, or a number: 10 means 0,1,...,9."""
    return tuple(map(str, range(int(text)))) if text.isdecimal() else tuple(text.split(","))


def server(options: argparse.Namespace) -> None:
    """Run the SuperLink in the foreground."""
    require_flower()
    from redgrape.deploy.processes.server_role import Server, running
    from redgrape.deploy.setup.folder import Deployment

    deployment = Deployment(options.folder)
    with running(Server(deployment, _say)) as this:
        listening = f"{deployment.options.bind}:{deployment.options.port}"
        kind = "without TLS" if deployment.options.plain else "with TLS, for registered sites only"
        print(f"listening on {printable(listening)} {kind}; press Ctrl-C to stop", flush=True)
        this.watch()


def site(options: argparse.Namespace) -> None:
    """Run a site in the foreground."""
    require_flower()
    from redgrape.deploy.processes.site_role import SiteRole
    from redgrape.deploy.setup.folder import SiteFolder, policy_in_words

    folder = SiteFolder(options.folder)
    role = SiteRole(folder, options.data, _say)
    try:
        facts = role.start()
        held = {name: n for name, n in facts["counts"].items() if n}
        words = ", ".join(f"{name} {n}" for name, n in held.items())
        print(
            f"site {printable(folder.options.name)}: {sum(held.values())} examples of {len(held)} classes", flush=True
        )
        print(f"  {printable(words)}", flush=True)
        print(f"  policy: {policy_in_words(folder.options)}", flush=True)
        few = [name for name, n in held.items() if n < folder.options.min_count]
        if folder.options.class_rows and few:
            print(f"  fewer than {folder.options.min_count} of {printable(', '.join(few))}: not reported")
        print(f"taking part at {printable(folder.options.server)}; press Ctrl-C to stop", flush=True)
        role.watch()
    finally:
        role.stop()


def run(options: argparse.Namespace) -> None:
    """Run an experiment on the sites."""
    require_flower()
    from redgrape.cli.execution import finish, print_plan, run_name
    from redgrape.cli.progress import Progress
    from redgrape.deploy.processes import submission
    from redgrape.deploy.processes.simulated import SimulatedDeployment
    from redgrape.deploy.processes.superlink import Link
    from redgrape.deploy.setup.create import DATA_KEYS, deployed
    from redgrape.deploy.setup.folder import Deployment
    from redgrape.reading import run_view
    from redgrape.runs.experiment import Experiment
    from redgrape.runs.folder import RunFolder

    deployment = Deployment(options.folder)
    if options.simulate is not None:
        SimulatedDeployment(options.folder, options.simulate)  # checks that it is possible
    values = _values(options, deployment.path / "experiment.toml")
    experiment = Experiment.parse(values)
    if unused := sorted(values.get("data", {}).keys() - set(DATA_KEYS)):
        _say(f"note: the sites' data is used as it is, without data.{', data.'.join(unused)}")
    submission.check(experiment, deployment.options)
    if warning := submission.lone_answers(experiment, deployment.options):
        _say(f"warning: {warning}")
    experiment = deployed(experiment, deployment.options)
    path = deployment.path / "runs" / (options.name or run_name(experiment))
    if options.dry_run:
        print_plan(path, experiment, options)
        return
    if options.simulate is None and not Link(deployment).is_up():
        raise RedgrapeError(f"the server does not answer; start it with `redgrape deploy server {deployment.path}`")
    if submission.is_active(deployment):
        raise BusyError(f"a run is already in progress; see `redgrape deploy status {deployment.path}`")
    if (path / "experiment.toml").is_file():
        folder = RunFolder.open(path)
        if folder.experiment().hash() != experiment.hash():
            raise ConfigError(f"'{path}' holds another experiment; choose another --name")
    else:
        folder = RunFolder.create(path, experiment)
    label = run_view.run_label(experiment.method.resolved())
    done = folder.checkpoints.newest_round()
    progress = Progress(label, done, experiment.rounds, as_json=options.json, quiet=options.quiet)
    with _link(deployment, options.simulate) as (where, link):
        this = submission.Submission(
            where, link, folder, allow_changes=options.allow_changes, simulation=options.simulate is not None
        )
        try:
            with progress:
                this.carry_out(progress.step, _say)
        except (ConfigError, DataError):
            folder.discard()  # an invalid run leaves nothing behind
            raise
    finish(folder, options)


@contextmanager
def _link(deployment: Deployment, simulated_data: Path | None) -> Iterator[tuple[Deployment, Link]]:
    """The SuperLink of the server, or a temporary one that simulates all sites."""
    from redgrape.deploy.processes.server_role import Server, running
    from redgrape.deploy.processes.simulated import SimulatedDeployment
    from redgrape.deploy.processes.superlink import Link
    from redgrape.deploy.processes.supervision import SIMULATED_DATA

    if simulated_data is None:
        yield deployment, Link(deployment)
        return
    simulated = SimulatedDeployment(deployment.path, simulated_data)
    variables = {SIMULATED_DATA: str(simulated_data.resolve())}
    with running(Server(simulated, _say, simulation=True), **variables) as server:
        yield simulated, server.link


def _values(options: argparse.Namespace, default: Path) -> dict[str, Any]:
    """The values of the experiment. Hyper-parameters of the deployment's method do not apply to other methods."""
    from redgrape.cli.execution import described
    from redgrape.runs.values import read_toml

    name = getattr(options, "set:method.name")
    options.experiment = options.experiment or default
    values = described(options)
    before = read_toml(options.experiment).get("method", {})
    if name is not None and options.experiment == default and before.get("name") != name:
        values["method"] = {key: value for key, value in values["method"].items() if before.get(key) != value}
    return values


def renew(options: argparse.Namespace) -> None:
    """Give the server a new certificate."""
    require_flower()
    from redgrape.deploy.setup import create
    from redgrape.deploy.setup.folder import Deployment

    create.renew(Deployment(options.folder))
    print("the server has a new certificate; restart it. The sites need no change")


def status(options: argparse.Namespace) -> None:
    """Show the connected sites and the state of the newest run."""
    require_flower()
    from redgrape.deploy.processes import submission
    from redgrape.deploy.processes.superlink import Link
    from redgrape.deploy.setup.folder import Deployment

    deployment = Deployment(options.folder)
    link = Link(deployment)
    is_up = link.is_up()
    known = link.sites() if is_up else {}
    otherwise = "not known" if deployment.options.plain else "not registered"
    sites = {name: known.get(name, otherwise) for name in deployment.options.sites}
    state = submission.journal(deployment)
    newest = {key: state.get(key) for key in ("run", "state", "round", "message")} if state else None
    if newest is not None and newest["state"] == "running" and not submission.is_active(deployment):
        newest["state"] = "ended without a message"
    if options.json:
        print(json.dumps({"server": is_up, "sites": sites, "run": newest}))
        return
    where = f"{deployment.options.bind}:{deployment.options.port}"
    print(f"server: {'answers' if is_up else 'does not answer'} at {printable(where)}")
    print(table(("site", "status"), [(name, words if is_up else "not known") for name, words in sites.items()]))
    if newest is not None:
        print(f"newest run: {printable(newest['run'])}, {printable(newest['state'])}, round {newest['round'] or 0}")
        if newest["message"]:
            print(f"  {printable(newest['message'])}")
