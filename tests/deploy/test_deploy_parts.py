"""The parts of a deployment by themselves: no SuperLink is started here (test_deploy.py starts one)."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

pytest.importorskip("flwr")

from deployments import CLASSES, SITES, Federated, locally, wait_for
from flwr.app import Error, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run as FlowerRun
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.nodestate import NodeStateFactory

from redgrape import tree
from redgrape.cli import main as cli
from redgrape.deploy.processes import resident, server_role, site_role, submission, supervision
from redgrape.deploy.processes.deployed_run import at_sites
from redgrape.deploy.processes.launch import NOT_RUN, pin
from redgrape.deploy.processes.server_app import Journal
from redgrape.deploy.processes.submission import Submission, is_active
from redgrape.deploy.processes.submission import journal as read_journal
from redgrape.deploy.protocol import deadlines, wire
from redgrape.deploy.protocol.admission import why_refused
from redgrape.deploy.protocol.site import DeployedSite
from redgrape.deploy.protocol.site_states import SiteStates, StateMissing
from redgrape.deploy.setup import certificates, doctor, site_data
from redgrape.deploy.setup.create import app_hash, create, deployed, renew
from redgrape.deploy.setup.folder import DataAgreement, Deployment, DeployOptions, SiteFolder
from redgrape.errors import BusyError, ConfigError, DataError, RedgrapeError, StorageError, TooFewClients, install
from redgrape.methods.vine import Vine
from redgrape.reading.learned import disclosed
from redgrape.reading.learned_in_words import in_words
from redgrape.reading.run_view import RunView
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run
from redgrape.runs.values import read_toml

RUN = "0123456789abcdef"


def options(**changes: Any) -> DeployOptions:
    values: dict[str, Any] = {
        "sites": tuple(SITES),
        "host": "localhost",
        "bind": "127.0.0.1",
        "class_rows": True,
        "data": {"classes": tuple(CLASSES), "shape": (6,), "input": "float"},
    }
    return DeployOptions.model_validate(values | changes)


@pytest.mark.parametrize("key", ["host", "bind"])
def test_a_host_is_a_name_or_an_address(key: str) -> None:
    for good in ("fl.example.org", "server-1", "localhost", "10.0.0.1", "::1", "2001:db8::5", "a" * 63 + ".org"):
        assert getattr(options(**{key: good}), key) == good
    bad = ["", "a b", "x/y", "http://x", "x:8443", "[::1]", "-a", "a-", "a..b", "a.", "1.2.3.999", "a_b", "bücher"]
    for word in [*bad, "a" * 64, "a." * 127 + "b"]:
        with pytest.raises(ValueError, match="is no name of a host and no address"):
            options(**{key: word})


AGREEMENT = options().data.model_dump(mode="json")


@pytest.fixture
def deployment(tmp_path: Path, federated: Federated) -> Deployment:
    create(tmp_path / "deployment", options(test=str(federated.folder / "test.npz"), min_count=1, min_clients=1))
    return Deployment(tmp_path / "deployment")


def test_init_writes_what_each_party_needs(deployment: Deployment) -> None:
    site = deployment.site("south")
    assert {path.name for path in site.iterdir()} == {"site.toml", "ca.crt", "key", "key.pub", "start.sh", "README.md"}
    for key in (site / "key", deployment.server / "server.key", deployment.server / "ca.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert SiteFolder(site).options.index == 1
    assert certificates.public_identity(site / "key.pub") == certificates.private_identity(site / "key")
    assert certificates.days_left(deployment.server / "server.crt") > 800
    assert "ash, beech, cedar, date" in (site / "README.md").read_text()
    assert SiteFolder(site).options.app == app_hash(deployment.path / "app")
    for part in ("server", "client"):
        names: dict[str, Any] = {}
        exec((deployment.path / f"app/redgrape_app/{part}.py").read_text(), names)  # what Flower loads
        assert names["app"] is not None
    before = (deployment.server / "server.crt").read_bytes()
    renew(deployment)
    assert (deployment.server / "server.crt").read_bytes() != before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sites", "a,a", "--host", "localhost"], "named twice"),
        (["--sites", "a,../b", "--host", "localhost"], "no name for a site"),
        (["--sites", "a", "--host", "10.1.1.1", "--plain"], "without TLS"),
        (["--sites", "a", "--host", "localhost", "--tail", "5"], "none of the classes"),
        (
            ["--sites", "a,b", "--host", "localhost", "--class-rows"],
            "there are 2 sites, and a class is released only if 3",
        ),
        (["--sites", "a,b,c", "--host", "localhost", "--class-rows", "--min-clients", "4"], "name at least 4 sites"),
    ],
)
def test_what_cannot_be_is_refused_by_init(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["deploy", "init", str(tmp_path / "d"), *words, "--classes", "3", "--shape", "4"]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


INIT = ["--host", "localhost", "--classes", "10", "--shape", "4"]


@pytest.mark.parametrize(("number", "fewest"), [(1, 1), (2, 2), (3, 2), (5, 3)])
def test_what_init_writes_can_run(tmp_path: Path, number: int, fewest: int, capsys: pytest.CaptureFixture[str]) -> None:
    """From three sites on vine by secure sums; for fewer FedAvg, and one line says why. No round of one site alone if
    there are more."""
    assert cli.run(["deploy", "init", str(tmp_path / "d"), "--sites", ",".join("abcde"[:number]), *INIT]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    deployment = Deployment(tmp_path / "d")
    experiment = Experiment.parse(read_toml(deployment.path / "experiment.toml"))
    assert experiment.min_answers == fewest
    submission.check(experiment, deployment.options)
    site = SiteFolder(deployment.site("a")).options
    assert why_refused(experiment, site) is None
    assert site.secure_aggregation == deployment.options.secure_aggregation == (number >= 3)
    assert not site.class_rows and not deployment.options.class_rows
    if number >= 3:
        assert experiment.method.create() == Vine(min_holders=3)
        note = ["note: only classes that 3 sites hold are re-balanced"] if number < 5 else []
        assert [line.partition(";")[0] for line in notes] == note
    else:
        [note] = notes
        assert "no secure sums, because they need 3 sites" in note and experiment.method.name == "fedavg"


@pytest.mark.parametrize(("number", "floor"), [(2, 2), (3, 3), (5, 3)])
def test_class_rows_are_written_with_floors(
    tmp_path: Path, number: int, floor: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--sites", ",".join("abcde"[:number]), "--class-rows", "--min-clients", str(floor), *INIT]
    assert cli.run(["deploy", "init", str(tmp_path / "d"), *words]) == 0
    assert ("note: only classes that" in capsys.readouterr().out) == (number < 5)
    assert cli.run(["deploy", "run", str(tmp_path / "d"), "--dry-run", "--method", "redgrape"]) == 0


def test_the_settings_that_init_writes_are_explained(deployment: Deployment) -> None:
    for path in (deployment.path / "deploy.toml", deployment.site("north") / "site.toml"):
        lines = path.read_text().splitlines()
        keys = [i for i, line in enumerate(lines) if " = " in line]
        assert keys and all(lines[i - 1].startswith("# ") for i in keys), path


def test_without_secure_sums_operator_and_every_site_must_say_so(
    tmp_path: Path, federated: Federated, capsys: pytest.CaptureFixture[str]
) -> None:
    """CLIMB needs single updates. The operator alone does not bring the sites to send them."""
    create(tmp_path / "d", options(test=str(federated.folder / "test.npz"), secure_aggregation=True))
    climb = ["deploy", "run", str(tmp_path / "d"), "--dry-run", "--method", "climb"]
    assert cli.run(climb) == 2
    assert "set secure_aggregation=false in deploy.toml and every site.toml" in capsys.readouterr().err
    _allow(tmp_path / "d/deploy.toml", "secure_aggregation = true", "secure_aggregation = false")
    assert cli.run(climb) == 0
    for name in SITES[:2]:
        path = tmp_path / "d/sites" / name / "site.toml"
        _allow(path, "secure_aggregation = true", "secure_aggregation = false")
    deployment = _impatient(Deployment(tmp_path / "d"))
    sites = [DeployedSite(SiteFolder(deployment.site(name)), federated.data(name)) for name in SITES]
    folder, said = _run(deployment, FakeGrid(deployment, sites), "a", rounds=1, method={"name": "climb"})
    assert folder.metrics()[0]["answered"] == [0, 1]
    words = "a node is refused: site 'west' refuses: this site answers only in secure sums (secure_aggregation in its"
    assert any(words in line for line in said)


def _allow(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_a_site_sends_class_rows_only_if_its_policy_says_so(
    tmp_path: Path, federated: Federated, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server cannot change that: it is left with a refusal, whose reason it reads, and the other sites."""
    create(tmp_path / "d", options(test=str(federated.folder / "test.npz"), min_count=1, min_clients=1))
    deployment = Deployment(tmp_path / "d")
    _allow(deployment.site("west") / "site.toml", "class_rows = true", "class_rows = false")
    sites = [DeployedSite(SiteFolder(deployment.site(name)), federated.data(name)) for name in SITES]
    grid = FakeGrid(deployment, sites)
    folder, said = _run(deployment, grid, "a", rounds=1, method={"name": "redgrape"})
    assert folder.metrics()[0]["answered"] == [0, 1]
    reason = "method 'redgrape' sends class rows (prototypes), and class_rows is false"
    assert (
        f"site 'west' refuses: this site's policy (site.toml) does not allow the experiment: {reason}"
        in (folder.metrics()[0]["lost"]["2"])
    )
    assert any("site 'west' refuses" in line for line in said)
    assert f"{wire.REFUSED}this site's policy (site.toml) does not allow the experiment: {reason}" in (
        capsys.readouterr().err
    )
    folder, _ = _run(deployment, grid, "b", rounds=1, method={"name": "fedavg"})
    assert folder.metrics()[0]["answered"] == [0, 1, 2]


def test_nothing_in_a_question_changes_the_policy(tmp_path: Path, federated: Federated) -> None:
    """A compromised server may put any field into a header, and the site's own settings into the experiment."""
    create(tmp_path / "d", options(test="somewhere", secure_aggregation=True, class_rows=False))
    site = DeployedSite(SiteFolder(tmp_path / "d/sites/north"), federated.data("north"))
    before = site.options
    lies = {"secure_aggregation": False, "class_rows": True, "policy": {"class_rows": True}, "min_count": 1}
    for kind in ("train", "survey", "evaluate"):
        header, parts = site.answer(_question(kind, **lies), {"broadcast": tree.to_bytes({})})
        assert "answers only in secure sums" in header["error"] and header["refused"] and parts == {}
    for more in ("", "[deploy]\nclass_rows = true\n", "class_rows = true\n"):
        experiment = f"{REDGRAPE}[exchange]\npreset = 'private'\n{more}"
        question = _question("sum", **{"sum": "a", "of": "train", "stage": "keys", "experiment": experiment, **lies})
        header, parts = site.answer(question, {})
        assert "error" in header and parts == {}, "no key of a sum is given"
    assert (
        "class_rows is false"
        in site.answer(
            _question("sum", sum="a", of="train", stage="keys", experiment=f"{REDGRAPE}[exchange]\npreset = 'private'"),
            {},
        )[0]["error"]
    )
    assert site.options is before


def test_a_site_says_each_refusal_once(tmp_path: Path, deployment: Deployment, federated: Federated) -> None:
    said: list[str] = []
    role = site_role.SiteRole(SiteFolder(deployment.site("north")), federated.data("north"), said.append)
    role._resident = SimpleNamespace(log=tmp_path / "log")  # type: ignore[assignment]
    line = f"{wire.REFUSED}no"
    for text in ("", line, f"{line}\n", f"{line}\nother words\n{line}\n", f"{line}\n{line}\n{line} more\n"):
        (tmp_path / "log").write_text(text)
        role._report_refusals()
    role._resident = None
    role.stop()
    assert said == [line, f"{line} more"]


def test_a_run_that_one_site_may_make_alone_is_warned_of(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["deploy", "run", str(deployment.path), "--dry-run"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.run(["deploy", "run", str(deployment.path), "--dry-run", "-c", "min_answers=1"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("warning: min_answers is 1: if a single site") and said.count("\n") == 1


def test_settings_of_data_that_the_sites_decide_are_named(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [word for key in ("alpha=0.3", "flip=true", "ir=10") for word in ("-c", f"data.{key}")]
    cli.run(["deploy", "run", str(deployment.path), "--dry-run", *settings])
    said = "note: the sites' data is used as it is, without data.alpha, data.ir"
    assert said in capsys.readouterr().err.splitlines()


def test_without_flower_one_line_tells_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.run(["deploy", "status", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"redgrape: this needs Flower; {install('flower')}\n"


def test_a_key_that_others_can_read_is_refused(deployment: Deployment) -> None:
    key = deployment.site("north") / "key"
    key.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        certificates.check_private(key)


def test_letters_cross_whole_or_not_at_all() -> None:
    header, parts = {"round": 3, "words": "ä"}, {"a": b"", "b": bytes(range(256)) * 9000}
    assert wire.unpack(wire.pack(header, parts)) == (header, parts)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Thread(target=wire.send, args=(ours, header, parts)).start()
        assert wire.receive(theirs) == (header, parts)
        ours.sendall((1 << 40).to_bytes(8, "big"))
        with pytest.raises(wire.NotUnderstood, match="bytes"):
            wire.receive(theirs)
    with pytest.raises(wire.NotUnderstood):
        wire.unpack(RecordDict())


def test_states_are_kept_by_run_and_round(tmp_path: Path) -> None:
    states = SiteStates(tmp_path)
    keys = {}
    for before, round in itertools.pairwise((None, 1, 2, 4, 7, 8, 9)):
        keys[round] = states.save(RUN, round, {"c": torch.tensor([float(round)])}, reach=3, start=before)
    assert states.rounds(RUN) == [4, 7, 8, 9]  # the newest of those out of reach is what a resume may ask for
    assert states.load(RUN, 4, keys[4])["c"].tolist() == [4.0]
    with pytest.raises(StateMissing, match="not have its state of round 2"):
        states.load(RUN, 2, keys[2])
    for other in (keys[8], None, 0):
        with pytest.raises(StateMissing, match="not the one that the server counted"):
            states.load(RUN, 9, other)
    file = tmp_path / RUN / "round-000008"
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)
    with pytest.raises(StateMissing, match="damaged"):
        states.load(RUN, 8, keys[8])
    for name in ("../../etc", "", "a" * 17):
        with pytest.raises(StorageError, match="no name of a run"):
            states.load(name, 1, 1)


def test_the_state_that_counts_is_kept_however_many_do_not(tmp_path: Path) -> None:
    """Round 1 was accepted, 2 to 8 were not: the server names round 1 each time, and once more when it has gone back
    behind round 9, which it accepted."""
    states = SiteStates(tmp_path)
    key = states.save(RUN, 1, {"c": torch.tensor(1.0)}, reach=3, start=None)
    for round in range(2, 10):
        states.save(RUN, round, {"c": torch.tensor(float(round))}, reach=3, start=1)
        assert states.rounds(RUN) == [1, round]
    states.save(RUN, 10, {"c": torch.tensor(10.0)}, reach=3, start=9)
    assert states.rounds(RUN) == [1, 9, 10]
    assert float(states.load(RUN, 1, key)["c"]) == 1.0


def test_classes_agree_by_name(tmp_path: Path) -> None:
    x = np.zeros((6, 6), np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=[0, 0, 1, 1, 1, 0], class_names=np.array(["date", "beech"]))
    train, test = site_data.load(tmp_path / "a.npz", tmp_path, options().data, hold_out=False)
    assert train.labels.tolist() == [3, 3, 1, 1, 1, 3]
    assert len(test) == 0
    train, test = site_data.load(tmp_path / "a.npz", tmp_path, options().data, hold_out=True)
    assert sorted(test.labels.tolist()) == [1, 3] and len(train) == 4


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"class_names": np.array(["ash", "elm"])}, "'elm', which is none of those agreed on"),
        ({"x": np.zeros((4, 5), np.float32), "class_names": np.array(CLASSES)}, r"shape \[5\], and agreed is \[6\]"),
        ({"x": np.zeros((4, 1, 6, 6), np.uint8), "class_names": np.array(CLASSES)}, "shape"),
        ({"x": np.full((4, 6), np.nan, np.float32), "class_names": np.array(CLASSES)}, "NaN"),
    ],
)
def test_data_that_does_not_fit_is_refused(tmp_path: Path, arrays: dict[str, Any], said: str) -> None:
    np.savez(tmp_path / "a.npz", **{"x": np.zeros((4, 6), np.float32), "y": [0, 1, 0, 1], **arrays})
    with pytest.raises(DataError, match=said):
        site_data.load(tmp_path / "a.npz", tmp_path, options().data, hold_out=False)


def test_a_failure_at_a_site_tells_the_server_no_path(
    deployment: Deployment,
    sites: list[DeployedSite],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A damaged state is named by its round. Of other failures only the kind; the rest is in the site's log."""
    site, run = sites[0], deployment.site("north") / "states" / RUN
    run.mkdir(parents=True)
    (run / "round-000005").write_bytes(b"damaged" * 9)
    model = {"broadcast": tree.to_bytes({})}
    header, _ = site.answer(_question(state=5, state_key=1), model)
    assert "the file is damaged" in header["error"] and str(run) not in header["error"] and header["no_state"]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(run))

    monkeypatch.setattr(site, "_train", full)
    header, _ = site.answer(_question(), model)
    assert header["error"] == "OSError at this site; its log has the details"
    assert f"No space left on device: '{run}'" in capsys.readouterr().err


def test_a_site_s_engineer_is_told_all_that_leaves(tmp_path: Path) -> None:
    def told(name: str, **changes: Any) -> str:
        create(tmp_path / name, options(**changes))
        return " ".join((tmp_path / name / "sites/north/README.md").read_text().split())

    plain = told("plain")
    for words in (
        "training loss",
        "RedGrape and CReFF",
        "your site refuses, because its min_count is 8",
        "kind of failure",
    ):
        assert words in plain
    assert "taken for which, and the loss, for the classes of which you train with at least 8 examples;" in plain
    assert "masked" not in plain
    assert "nothing of a test set" in told("server", test="somewhere")
    secure = told("secure", secure_aggregation=True)
    assert "masked" in secure and "your site answers" in secure and "taken for which, and the loss;" in secure


def _question(kind: str = "train", **changes: Any) -> dict[str, Any]:
    experiment = Experiment.parse({"net": {"name": "linear"}, "method": {"name": "fedavg"}})
    header = {"kind": kind, "protocol": wire.PROTOCOL, "deadline": 30.0, "round": 1, "run": RUN, "reach": 3}
    return header | {"experiment": deployed(experiment, options()).to_toml()} | changes


LINEAR = "[net]\nname = 'linear'\n"
REDGRAPE = f"{LINEAR}[method]\nname = 'redgrape'\n"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "dance"}, "not known here"),
        ({"protocol": 0}, "protocol 0"),
        ({"experiment": "[method]\nname = '/tmp/evil.py'"}, "must be a file that is known by its hash"),
        ({"experiment": "[method]\nname = 'evil'"}, "not one of redgrape's own"),
        ({"experiment": f"{REDGRAPE}[exchange]\nmin_count = 3"}, "fewer than 8 examples"),
        ({"experiment": f"{REDGRAPE}[exchange]\nmin_count = 8"}, "fewer than 3 sites report"),
        ({"experiment": f"{REDGRAPE}min_count = 8"}, "method.min_count has moved: write exchange.min_count"),
        ({"kind": "survey", "experiment": f"{LINEAR}[method]\nname = 'balanced_softmax'"}, "for its class_counts"),
        ({"kind": "survey", "experiment": f"{LINEAR}[method]\nname = 'logit_adjustment'"}, "fewer than 8 examples"),
        ({"experiment": "=" * 9}, "not valid TOML"),
        ({"state": 5, "state_key": 1}, "does not have its state of round 5"),
        ({"run": "../../x", "state": 5}, "StorageError at this site"),
        ({"deadline": 1e-3}, "not finished within"),
        ({"deadline": 0}, "'deadline' must be seconds above 0, and is 0"),
        ({"deadline": 10**400}, "'deadline' must be seconds above 0"),
        ({"round": "1"}, "'round' must be a whole number, and is 1"),
        ({"reach": None}, "'reach' must be a whole number, and is None"),
        ({}, "'broadcast' did not come with the question"),
    ],
)
def test_a_site_answers_an_error_in_one_line(
    tmp_path: Path, federated: Federated, changes: dict[str, Any], said: str
) -> None:
    create(tmp_path / "d", options(test="somewhere"))
    site = DeployedSite(SiteFolder(tmp_path / "d/sites/north"), federated.data("north"))
    model = {"broadcast": tree.to_bytes({})} if changes else {}
    header, parts = site.answer(_question(**changes), model)
    assert said in header["error"] and "\n" not in header["error"]
    assert parts == {}


PRIVATE = {"preset": "private"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "class counts": ({"method": {"name": "balanced_softmax"}}, "the method asks every client for its class_counts"),
    "the floor of examples": ({"exchange": {**PRIVATE, "min_count": 7}}, "exchange.min_count is 7"),
    "the floor of sites": ({"exchange": {**PRIVATE, "min_clients": 2}}, "exchange.min_clients is 2"),
    "exact prototypes": (
        {"exchange": PRIVATE},
        "class gradients of up to 9 examples can be solved for every one of them, and this experiment sends them from",
    ),
    "more sites than there are": (
        {"exchange": {**PRIVATE, "min_count": 10, "min_clients": 4}},
        "exchange.min_clients is 4, but 3 of a round's 3 clients count",
    ),
}
TEN = {"classes": tuple("abcdefghij"), "shape": (6,), "input": "float"}


@pytest.mark.parametrize("case", REFUSED)
def test_what_sites_would_refuse_is_refused_before_anything_starts(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `deploy run` and the doctor by deploy.toml, as by a site by its site.toml."""
    create(tmp_path / "d", options(data=TEN))
    changes, said = REFUSED[case]
    values = {"net": {"name": "linear"}, **changes}
    (tmp_path / "d/experiment.toml").write_text(tomli_w.dumps(values))
    assert cli.run(["deploy", "run", str(tmp_path / "d")]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1
    assert list((tmp_path / "d/runs").iterdir()) == []
    assert cli.run(["doctor", str(tmp_path / "d")]) == 2
    assert " ".join(said.split()[:2]) in capsys.readouterr().out
    if case != "more sites than there are":
        site = SiteFolder(tmp_path / "d/sites/north").options
        assert said in str(why_refused(Experiment.parse(values), site))


def _refused(options: DeployOptions, method: str = "redgrape", **changes: Any) -> str | None:
    """Why these options refuse an experiment with the private floors."""
    floors = {"preset": "private", **changes.pop("exchange", {})}
    values = {"net": {"name": "linear"}, "exchange": floors, "method": {"name": method, **changes}}
    return why_refused(Experiment.parse(values), options)


def test_exact_prototypes_are_for_sites_whose_floor_is_above_the_classes_and_for_secure_sums() -> None:
    """With ten classes a gradient of up to nine examples can be solved for."""
    ten = options(data=TEN)
    for method in ("redgrape", "creff"):
        assert "min_count to 10" in str(_refused(ten, method))
        assert _refused(ten, method, exchange={"min_count": 10}) is None
        assert _refused(options(), method) is None  # of four classes three
    assert _refused(ten, use_prototypes=False) is None
    assert _refused(options(data=TEN, secure_aggregation=True)) is None
    assert _refused(options(data=TEN, min_count=1, min_clients=1), exchange={"preset": "plain"}) is None


def test_folders_of_before_the_floor_of_sites_have_the_default(tmp_path: Path, federated: Federated) -> None:
    create(tmp_path / "d", options(min_clients=1))
    for path in (tmp_path / "d/deploy.toml", tmp_path / "d/sites/north/site.toml"):
        assert "min_clients = 1\n" in path.read_text()
        path.write_text(path.read_text().replace("min_clients = 1\n", ""))
    assert Deployment(tmp_path / "d").options.min_clients == 3
    assert SiteFolder(tmp_path / "d/sites/north").options.min_clients == 3


@pytest.mark.parametrize("more", [{"min_answers": 4}, {"clients_per_round": 4}])
def test_more_sites_than_there_are_are_refused_before_anything_starts(
    tmp_path: Path, more: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    create(tmp_path / "d", options())
    values = {**more, "net": {"name": "linear"}, "method": {"name": "fedavg"}}
    (tmp_path / "d/experiment.toml").write_text(tomli_w.dumps(values))
    assert cli.run(["deploy", "run", str(tmp_path / "d")]) == 2
    assert "there are 3 sites; " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["balanced_softmax", "logit_adjustment"])
def test_a_survey_of_class_counts_is_for_open_sites_and_secure_sums(name: str) -> None:
    assert "the method asks every client for its class_counts" in str(_refused(options(), name, prior="global"))
    assert _refused(options(min_count=1), name, prior="global") is None
    assert _refused(options(secure_aggregation=True), name, prior="global") is None
    assert _refused(options(), name, prior="local") is None
    assert _refused(options(), name, prior="estimated") is None


def test_the_doctor_says_what_is_wrong(
    deployment: Deployment, federated: Federated, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["doctor", str(deployment.path)]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "valid until" in said and "GB free" in said and "40 examples" in said
    (deployment.server / "server.key").chmod(0o644)
    key, authority = certificates.load_authority(deployment.server / "ca.key", deployment.server / "ca.crt")
    names = ["localhost", "127.0.0.1"]
    expired = certificates.server_certificate(certificates.new_key(), names, authority, key, days=-3)
    (deployment.server / "server.crt").write_bytes(certificates.certificate_bytes(expired))
    assert cli.run(["doctor", str(deployment.path)]) == 2
    captured = capsys.readouterr()
    assert "expired 3 days ago; redgrape deploy renew" in captured.out and "chmod 600" in captured.out
    assert captured.err.startswith("redgrape: 2 of ")

    site = deployment.site("north")
    assert cli.run(["doctor", str(site), "--data", str(federated.folder / "nothing.npz")]) == 2
    said = capsys.readouterr().out
    assert "does not answer" in said and "there is no" in said and "sends class rows" in said
    assert cli.run(["doctor", str(site), "--data", str(federated.data("north")), "--json"]) == 2  # no server yet
    assert "45 training and 0 test examples of 3 classes" in capsys.readouterr().out


@pytest.mark.parametrize(("key", "host"), [("bind", "10.0.0.5"), ("host", "fl.example.org")])
def test_a_certificate_for_another_address_is_refused_until_it_is_renewed(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str, host: str
) -> None:
    """The command that starts the server would wait for an answer with the right certificate."""
    _allow(deployment.path / "deploy.toml", *(f'{key} = "{name}"' for name in (getattr(deployment.options, key), host)))
    monkeypatch.setattr(server_role, "check_port", lambda bind, port: None)
    server = server_role.Server(Deployment(deployment.path), print)
    with pytest.raises(ConfigError, match=f"server.crt' is not for '{host}'; `redgrape deploy renew "):
        server.start()
    found = {finding.what: finding.how for finding in doctor.examine(deployment.path)}
    assert found["server's names"] == "bad"
    assert cli.run(["deploy", "renew", str(deployment.path)]) == 0
    server_role.check_names(Deployment(deployment.path))


def test_who_names_the_wrong_folder_is_told_which_one_is_meant(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["doctor", "nowhere", "--data", "images"]) == 2
    assert "'nowhere' has no site.toml; ask the server for the folder of your site" in capsys.readouterr().err
    assert cli.run(["doctor", str(deployment.path), "--data", "images"]) == 2
    assert "name one of its sites" in capsys.readouterr().err
    assert cli.run(["deploy", "server", str(deployment.site("north"))]) == 2
    assert "it is a site's folder; name the server's\n" in capsys.readouterr().err


def test_the_doctor_refuses_the_data_that_a_site_refuses(tmp_path: Path) -> None:
    """One image gives no test set."""
    image = pytest.importorskip("PIL.Image")
    pictures = tmp_path / "pictures"
    (pictures / "ash").mkdir(parents=True)
    image.fromarray(np.zeros((2, 2), np.uint8)).save(pictures / "ash/0.png")
    create(tmp_path / "d", options(data={"classes": tuple(CLASSES), "shape": (1, 2, 2), "input": "uint8"}))
    site = SiteFolder(tmp_path / "d/sites/north")
    with pytest.raises(DataError, match="no test example") as refused:
        DeployedSite(site, pictures)
    found = {finding.what: finding for finding in doctor.examine(site.path, pictures)}
    assert (found["data"].how, found["data"].words) == ("bad", str(refused.value))


class _Node(SimpleNamespace):
    node_id: int
    public_key: bytes
    last_activated_at: str


class FakeGrid:
    """Sites in this process. For what is slow to try for real; it stands for nothing that test_deploy.py promises."""

    def __init__(self, deployment: Deployment, sites: Iterable[DeployedSite]) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # of the process that Flower starts
        self.sites = {100 + site.index: site for site in sites}
        self.keys = {
            100 + k: certificates.public_identity(deployment.site(name) / "key.pub") for k, name in enumerate(SITES)
        }
        self.silent: set[int] = set()
        self.kinds: list[tuple[int, str]] = []
        self._answers: dict[str, Any] = {}

    def get_nodes(self) -> list[_Node]:
        return [_Node(node_id=i, public_key=self.keys[i], last_activated_at="now") for i in self.sites]

    def push_messages(self, messages: list[Any]) -> list[str]:
        numbers = []
        for message in messages:
            node, number = message.metadata.dst_node_id, f"m{len(self.kinds)}"
            header, parts = wire.unpack(message.content)
            self.kinds.append((node, header["kind"]))
            if node not in self.silent or header["kind"] == "join":
                message.metadata.__dict__["_message_id"] = number
                answer = Message(wire.pack(*self.sites[node].answer(header, parts)), reply_to=message)
                self._answers[number] = answer
            numbers.append(number)
        return numbers

    def pull_messages(self, numbers: list[str]) -> list[Any]:
        return [self._answers.pop(number) for number in numbers if number in self._answers]


def _run(deployment: Deployment, grid: FakeGrid, name: str, **changes: Any) -> tuple[RunFolder, list[str]]:
    values = {"seed": 5, "rounds": 3, "net": {"name": "mlp"}, "method": {"name": "scaffold", "batch_size": 8}} | changes
    experiment = deployed(Experiment.parse(values), deployment.options)
    path, said = deployment.path / "runs" / name, []
    folder = RunFolder.open(path) if path.exists() else RunFolder.create(path, experiment)
    venue = at_sites(folder, deployment, grid, said.append, authenticated=True)  # type: ignore[arg-type]
    for _ in Run(folder, workers=1, venue=venue).steps():
        pass
    return folder, said


@pytest.fixture
def sites(deployment: Deployment, federated: Federated) -> list[DeployedSite]:
    return [DeployedSite(SiteFolder(deployment.site(name)), federated.data(name)) for name in SITES]


@pytest.mark.parametrize("method", ["scaffold", "redgrape", "logit_adjustment"])
def test_the_engine_gives_the_bits_of_the_local_one(
    deployment: Deployment, sites: list[DeployedSite], federated: Federated, method: str
) -> None:
    """With client state, with prototypes, with a survey."""
    chosen = {"name": method, "batch_size": 8}
    if method == "logit_adjustment":
        chosen |= {"prior": "global"}
    folder, _ = _run(deployment, FakeGrid(deployment, sites), "a", method=chosen)
    state, _ = folder.checkpoints.latest()
    assert state is not None
    assert tree.equal(state.server, locally(folder.experiment(), federated))
    assert not (folder.path / "partition.safetensors").exists()
    text = (folder.path / "environment.json").read_text() + (folder.path / "metrics.jsonl").read_text()
    assert '"client_counts": null' in text


def test_evaluations_at_the_sites_keep_to_the_floor(tmp_path: Path, federated: Federated) -> None:
    """After a fifth is held out the sites train with [24, 10, 2, 0], [16, 0, 7, 4] and [6, 13, 1, 10] examples: only
    rows from 8 on are sent, and of cedar nobody's. All that reads the run copes with a class without a figure."""
    create(tmp_path / "d", options())
    deployment = Deployment(tmp_path / "d")
    sites = [DeployedSite(SiteFolder(deployment.site(name)), federated.data(name)) for name in SITES]
    sent: list[list[int]] = []

    class Watching(FakeGrid):
        def push_messages(self, messages: list[Any]) -> list[str]:
            numbers = super().push_messages(messages)
            for number in numbers:
                _, parts = wire.unpack(self._answers[number].content)
                if "scores" in parts:
                    sent.append(tree.from_bytes(parts["scores"])["confusion"].sum(dim=1).tolist())
            return numbers

    folder, _ = _run(deployment, Watching(deployment, sites), "a", rounds=2, method={"name": "fedavg"})
    assert sent[:3] == [[6, 2, 0, 0], [4, 0, 0, 0], [0, 3, 0, 2]]
    test = folder.metrics()[-1]["test"]
    assert test["per_class"][2] is None and None not in test["per_class"][:2]
    known = [share for share in test["per_class"] if share is not None]
    assert test["balanced"] == sum(known) / 3 and math.isfinite(test["loss"])
    told = " ".join(in_words(disclosed(RunView.read(folder.path)))["the server"])
    assert "of each site, by 2 evaluations there, how many test examples of which class" in told
    assert "for classes with at least 8 examples for training" in told
    assert cli.run(["show", str(folder.path)]) == 0
    assert cli.run(["show", str(folder.path), "--json"]) == 0
    assert cli.run(["report", str(folder.path), "--out", str(tmp_path / "report")]) == 0
    assert cli.run(["export", str(folder.path), str(tmp_path / "model")]) == 0
    card = (tmp_path / "model/README.md").read_text()
    assert "| cedar | – | – | 0 | – |" in card and "No client held any of its examples" not in card
    assert "test sets of the sites" in card and "classes with at least 8 training examples" in card
    assert "There is no head or tail" in card


@pytest.mark.parametrize("tail", [(), ("beech",)])
def test_the_card_says_what_is_known_of_test_set_and_tail(
    tmp_path: Path, federated: Federated, tail: tuple[str, ...]
) -> None:
    create(tmp_path / "d", options(test=str(federated.folder / "test.npz"), tail=tail))
    deployment = Deployment(tmp_path / "d")
    sites = [DeployedSite(SiteFolder(deployment.site(name)), federated.data(name)) for name in SITES]
    folder, _ = _run(deployment, FakeGrid(deployment, sites), "a", rounds=1, method={"name": "fedavg"})
    assert cli.run(["export", str(folder.path), str(tmp_path / "model")]) == 0
    card = (tmp_path / "model/README.md").read_text()
    assert "Accuracy on a test set of the server." in card
    assert ("The tail consists of the classes named as such" in card) == bool(tail)
    assert "with the most and the fewest training examples" not in card


def test_a_site_that_is_below_the_floor_in_every_class_evaluates_none(tmp_path: Path, federated: Federated) -> None:
    create(tmp_path / "d", options(min_count=100))
    site = DeployedSite(SiteFolder(tmp_path / "d/sites/north"), federated.data("north"))
    header, parts = site.answer(_question("evaluate"), {"model": tree.to_bytes({})})
    assert "no test example of a class with 100 training examples" in header["error"] and parts == {}


class Surveyed(DeployedSite):
    """Answers the survey with something else."""

    def _survey(self, question: Any) -> Any:
        answer, survey = super()._survey(question)
        return answer, {"class_counts": torch.full_like(survey["class_counts"], -(10**9))}


def test_a_survey_that_cannot_be_stops_the_run_by_the_site_s_name(
    deployment: Deployment, sites: list[DeployedSite], federated: Federated
) -> None:
    liar = Surveyed(SiteFolder(deployment.site("west")), federated.data("west"))
    with pytest.raises(TooFewClients, match=r"the answer of site 'west' to the survey .* must count examples"):
        _run(deployment, FakeGrid(deployment, [*sites[:2], liar]), "a", method={"name": "balanced_softmax"})


def test_a_method_that_asks_nothing_before_the_first_round_is_deployed(
    deployment: Deployment, sites: list[DeployedSite]
) -> None:
    grid = FakeGrid(deployment, sites)
    _run(deployment, grid, "a", method={"name": "balanced_softmax", "prior": "local"})
    assert "survey" not in {kind for _, kind in grid.kinds}


class Joining(DeployedSite):
    """Says something else of itself when it joins."""

    says: dict[str, Any]

    def _join(self) -> Any:
        return replace(super()._join(), **self.says)


def _joining(deployment: Deployment, federated: Federated, **says: Any) -> Joining:
    site = Joining(SiteFolder(deployment.site("west")), federated.data("west"))
    site.says = says
    return site


def _impatient(deployment: Deployment) -> Deployment:
    toml = (deployment.path / "deploy.toml").read_text()
    (deployment.path / "deploy.toml").write_text(toml.replace("join = 300.0", "join = 0.5"))
    return Deployment(deployment.path)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"examples": 10**9 + 1}, "declares 1000000001 examples, which is not possible"),
        ({"examples": 0}, "declares 0 examples, which is not possible"),
        ({"examples": None}, "declares None examples, which is not possible"),
        ({"examples": True}, "gave an answer that cannot be read: 'examples' must be a whole number, and is True"),
        ({"agreement": [1]}, "gave an answer that cannot be read: 'agreement' must be a table, and is [1]"),
        ({"evaluates": 0}, "gave an answer that cannot be read: 'evaluates' must be true or false, and is 0"),
        ({"tests": -1}, "declares -1 tests, which is not possible"),
        ({"redgrape": "0.0.7"}, "has redgrape 0.0.7, and the server "),
        ({"evaluates": True}, "and the server do not agree on where models are evaluated: compare its site.toml with "),
        ({"sites": 4, "secure_aggregation": True}, "and the server do not agree on number of sites, secure_agg"),
        ({"agreement": AGREEMENT | {"classes": CLASSES[::-1]}}, "and the server do not agree on classes: compare "),
        ({"agreement": AGREEMENT | {"image_size": 6}}, "and the server do not agree on image_size: compare "),
        ({"agreement": AGREEMENT | {"more": 1}}, "and the server do not agree on data: compare "),
    ],
)
def test_what_a_site_cannot_be_is_refused_by_name(
    deployment: Deployment, sites: list[DeployedSite], federated: Federated, says: dict[str, Any], words: str
) -> None:
    liar = _joining(deployment, federated, **says)
    folder, said = _run(_impatient(deployment), FakeGrid(deployment, [*sites[:2], liar]), "a", rounds=1)
    assert folder.metrics()[0]["answered"] == [0, 1]
    assert any(f"a node is refused: site 'west' {words}" in line for line in said)


def test_what_sites_declare_is_told_and_recorded(
    deployment: Deployment, sites: list[DeployedSite], federated: Federated
) -> None:
    folder, said = _run(deployment, FakeGrid(deployment, sites), "a", rounds=1)
    assert "examples that sites have declared: north 45 (39%), south 34 (29%), west 37 (32%)" in said
    assert not any("than all others together" in line for line in said)
    joined = folder.environment()["joined"]
    assert {name: facts["examples"] for name, facts in joined.items()} == {"north": 45, "south": 34, "west": 37}
    assert {facts["torch"] for facts in joined.values()} == {torch.__version__}

    greedy = _joining(deployment, federated, examples=80, torch="1.0")
    _, said = _run(deployment, FakeGrid(deployment, [*sites[:2], greedy]), "b", rounds=1)
    assert "site 'west' has declared more examples than all others together, and decides in averages" in said
    assert any("site 'west' has torch 1.0, and the server" in line for line in said)


def test_a_site_s_first_declaration_counts_for_the_run(
    deployment: Deployment, sites: list[DeployedSite], federated: Federated
) -> None:
    """Also where the server's part was started again. A site that lies about it from the start is held to its lie."""
    deployment = _impatient(deployment)
    _run(deployment, FakeGrid(deployment, sites), "a", rounds=1)
    folder = RunFolder.open(deployment.path / "runs/a")
    folder.write_experiment(folder.experiment().with_rounds(2))
    more = _joining(deployment, federated, examples=10**6)
    _, said = _run(deployment, FakeGrid(deployment, [*sites[:2], more]), "a")
    words = "site 'west' joined this run with 37 examples and 0 to test on, but now declares 1000000 and 0"
    assert any(words in line for line in said)
    assert [record["answered"] for record in folder.metrics()] == [[0, 1, 2], [0, 1]]


class Evaluating(DeployedSite):
    """Has counted each of its test examples a hundred times."""

    def _evaluate(self, question: Any, model: Any) -> Any:
        answer, scores = super()._evaluate(question, model)
        return answer, {**scores, "confusion": 100 * scores["confusion"]}


def test_an_evaluation_has_as_many_examples_as_its_site_has_declared(tmp_path: Path, federated: Federated) -> None:
    create(tmp_path / "d", options(min_count=1))
    deployment = Deployment(tmp_path / "d")
    kinds = [DeployedSite, DeployedSite, Evaluating]
    sites = [
        kind(SiteFolder(deployment.site(name)), federated.data(name)) for kind, name in zip(kinds, SITES, strict=True)
    ]
    folder, said = _run(deployment, FakeGrid(deployment, sites), "a", rounds=1)
    tests = [len(site.test) for site in sites]
    words = f"the evaluation of site 'west' was rejected: 'confusion' counts {100 * tests[2]} examples, but the site"
    assert any(words in line for line in said)
    summary = folder.summary()
    assert summary is not None
    assert sum(map(sum, summary["confusion"])) == tests[0] + tests[1]
    assert any(line.startswith("tests that sites have declared: north ") for line in said)


class Answering(DeployedSite):
    """Changes its answers to the second round."""

    lie: str

    def answer(self, header: Any, parts: Any) -> Any:
        back, sent = super().answer(header, parts)
        if header["kind"] != "train" or header["round"] != 2:
            return back, sent
        return {
            "garbage": (back, {"update": b"no tensors at all"}),
            "nothing": (back, {}),
            "stale": (back | {"round": 1}, sent),
            "no round": (back | {"round": "2"}, sent),
        }[self.lie]


@pytest.mark.parametrize(
    ("lie", "where", "words"),
    [
        ("garbage", "lost", "'update' cannot be read"),
        ("nothing", "lost", "'update' cannot be read"),
        ("stale", "rejected", "the answer is for round 1"),
        ("no round", "lost", "cannot be read: 'round' must be a whole number"),
    ],
)
def test_an_answer_that_is_none_is_left_out_and_the_run_goes_on(
    deployment: Deployment, sites: list[DeployedSite], federated: Federated, lie: str, where: str, words: str
) -> None:
    liar = Answering(SiteFolder(deployment.site("west")), federated.data("west"))
    liar.lie = lie
    folder, _ = _run(deployment, FakeGrid(deployment, [*sites[:2], liar]), "a")
    assert [record["answered"] for record in folder.metrics()] == [[0, 1, 2], [0, 1], [0, 1, 2]]
    assert words in folder.metrics()[1][where]["2"]


class Expired(FakeGrid):
    """Flower's own answer to the first question to each node: the message has expired."""

    def __init__(self, deployment: Deployment, sites: Iterable[DeployedSite]) -> None:
        super().__init__(deployment, sites)
        self.asked: set[int] = set()

    def push_messages(self, messages: list[Any]) -> list[str]:
        numbers = super().push_messages(messages)
        for message, number in zip(messages, numbers, strict=True):
            if message.metadata.dst_node_id not in self.asked:
                self.asked.add(message.metadata.dst_node_id)
                self._answers[number] = Message(Error(0, "Message Unavailable"), reply_to=message)
        return numbers


def test_a_node_for_which_flower_has_an_error_is_asked_again(
    deployment: Deployment, sites: list[DeployedSite], federated: Federated
) -> None:
    """Busy with a run whose server has died, all nodes can miss the first question of the next; none is refused."""
    grid = Expired(deployment, sites)
    folder, said = _run(deployment, grid, "a")
    assert [kind for _, kind in grid.kinds[:6]] == ["join"] * 6
    assert not any("refused" in words for words in said)
    for name in SITES:
        assert f"site '{name}' failed: Message Unavailable (code 0); asking it again who it is" in said
    state, _ = folder.checkpoints.latest()
    assert state is not None
    assert tree.equal(state.server, locally(folder.experiment(), federated))


def test_a_silent_site_is_left_out_at_the_deadline(deployment: Deployment, sites: list[DeployedSite]) -> None:
    toml = (deployment.path / "deploy.toml").read_text()
    (deployment.path / "deploy.toml").write_text(toml.replace("round = 3600.0", "round = 0.5"))
    deployment = Deployment(deployment.path)
    grid = FakeGrid(deployment, sites)
    grid.silent = {101}
    folder, said = _run(deployment, grid, "a")
    assert [record["answered"] for record in folder.metrics()] == [[0, 2]] * 3
    assert sum("site 'south' was not there" in words for words in said) == 3


def test_the_key_decides_who_a_site_is(deployment: Deployment, sites: list[DeployedSite]) -> None:
    grid = FakeGrid(deployment, sites)
    grid.keys[100], grid.keys[102] = grid.keys[102], grid.keys[100]
    toml = (deployment.path / "deploy.toml").read_text()
    (deployment.path / "deploy.toml").write_text(toml.replace("join = 300.0", "join = 0.5"))
    folder, said = _run(Deployment(deployment.path), grid, "a")
    assert [record["answered"] for record in folder.metrics()] == [[1]] * 3
    assert any("it says that it is site 'north', but its key is that of 'west'" in words for words in said)
    assert {kind for node, kind in grid.kinds if node != 101} == {"join"}, "nothing of the model was sent to them"


def test_too_few_sites_stop_the_run_with_its_state_intact(
    deployment: Deployment, sites: list[DeployedSite], capsys: pytest.CaptureFixture[str]
) -> None:
    toml = (deployment.path / "deploy.toml").read_text()
    (deployment.path / "deploy.toml").write_text(toml.replace("join = 300.0", "join = 0.5"))
    deployment = Deployment(deployment.path)
    grid = FakeGrid(deployment, sites[:2])
    with pytest.raises(TooFewClients, match="2 of 3"):
        _run(deployment, grid, "a", min_answers=3)
    assert cli.run(["show", str(deployment.path / "runs/a")]) == 0
    assert "not finished; continue it with `redgrape deploy run`" in capsys.readouterr().out
    whole = FakeGrid(deployment, sites)
    folder, _ = _run(deployment, whole, "a", min_answers=3)
    assert len(folder.metrics()) == 3


class Sent:
    """What a SuperNode gets of the server: one message, and the run and the app that it is for."""

    def __init__(self, app: Path, **changes: str) -> None:
        content = build_fab_from_disk(app)
        name = hashlib.sha256(content).hexdigest()
        said = {"fab_id": "redgrape/redgrape-app", "fab_version": "1.0.0", "fab_hash": name} | changes
        message = Message(RecordDict(), dst_node_id=1, message_type="train")
        message.metadata.__dict__ |= {"_run_id": 5, "_message_id": message.object_id, "_src_node_id": 1}
        run = FlowerRun.create_empty(5)
        for key, value in said.items():
            setattr(run, key, value)
        self.stored = NodeStateFactory(objectstore_factory=ObjectStoreFactory())
        self.parts = {
            "receive": lambda: (message, get_object_tree(message)),
            "get_run": lambda number: run,
            "get_fab": lambda name, number: Fab(said["fab_hash"], content, {}),
            "pull_object": lambda number, name: message.deflate(),
            "confirm_message_received": lambda number, name: None,
        }

    def pulled(self, pinned: str) -> tuple[list[str], list[str]]:
        """The kinds of tasks that the SuperNode makes of it, and the errors that it answers."""
        theirs = import_module("flwr.supernode.start_client_internal")
        flower = SimpleNamespace(**vars(theirs))
        pin(flower, pinned)
        state = self.stored.state()
        state.set_node_id(1)
        store = self.stored.objectstore_factory.store()
        flower._pull_and_store_message(
            state=state, object_store=store, node_config={}, trusted_entities=None, **self.parts
        )
        answers = [store.get(reply.metadata.message_id) for reply in state.get_messages_legacy(is_reply=True)]
        return [task.type for task in state.get_tasks()], [bytes(answer).decode(errors="replace") for answer in answers]


def test_a_site_runs_the_app_that_it_knows_and_no_other(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    """With Flower's own SuperNode: another app, and the right one by a name that leads to another folder."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    app, own = deployment.path / "app", SiteFolder(deployment.site("north")).options.app
    tasks, errors = Sent(app).pulled(own)
    assert len(tasks) == 1 and errors == []
    for changes in ({"fab_version": "1.0.0/../../evil"}, {"fab_id": "evil/app"}, {"fab_hash": "0" * 64}):
        tasks, errors = Sent(app, **changes).pulled(own)
        assert tasks == [] and "by another name" in errors[0]
    (app / "redgrape_app/client.py").write_text("print('run')\n")
    tasks, errors = Sent(app).pulled(own)
    assert tasks == [] and f"this site runs only {own} (app in its site.toml)" in errors[0]
    assert capsys.readouterr().out.count(NOT_RUN) == 4
    with pytest.raises(SystemExit, match="could not be held"):
        pin(SimpleNamespace(), own)


def test_a_site_tells_of_an_app_that_it_did_not_run_once(deployment: Deployment, federated: Federated) -> None:
    said: list[str] = []
    role = site_role.SiteRole(SiteFolder(deployment.site("north")), federated.data("north"), said.append)
    for words in (
        "SuperNode ID: 5",
        f"{NOT_RUN}the one | more",
        f"{NOT_RUN}the one | more",
        "all else",
        f"{NOT_RUN}two",
    ):
        role._report_other_app(words)
    assert said == ["NOT RUN: the one", "NOT RUN: two"]
    role.stop()


def test_a_site_whose_clock_is_wrong_is_told_when_it_joins(
    deployment: Deployment, federated: Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    role = site_role.SiteRole(SiteFolder(deployment.site("north")), federated.data("north"), said.append)
    monkeypatch.setattr(site_role, "check_server", lambda folder: None)
    clocks = iter([0.5, 30.0, -100.0, OSError("gone")])

    def ahead(folder: SiteFolder) -> float:
        clock = next(clocks)
        if isinstance(clock, OSError):
            raise clock
        return clock

    monkeypatch.setattr(site_role, "clock_ahead", ahead)
    for _ in range(4):
        role._await_server()
    assert said == [
        "the clock of this machine is 30 seconds ahead of the server's, and Flower refuses what a site signs so; "
        "set it",
        "the clock of this machine is 100 seconds behind the server's; set it",
    ]
    role.stop()


def test_clocks_are_held_to_what_flower_accepts() -> None:
    hows = [doctor._clock_finding(ahead).how for ahead in (0.3, 3.5, 4.5, 30.0, -30.0, -100.0, -300.0)]
    assert hows == ["good", "good", "bad", "bad", "good", "warning", "bad"]


def test_a_site_may_hold_one_class_and_keeps_its_images_to_itself(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for row in range(3):
        path = tmp_path / "pictures" / "b" / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((2, 2), row, np.uint8)).save(path)
    agreed = DataAgreement(classes=("a", "b"), shape=(1, 2, 2), input="uint8")
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o755)
    train, _ = site_data.load(tmp_path / "pictures", cache, agreed, hold_out=False)
    assert train.labels.tolist() == [1, 1, 1]
    assert cache.stat().st_mode & 0o077 == 0
    larger = agreed.model_copy(update={"shape": (1, 4, 4)})
    with pytest.raises(DataError, match=r"set data\.image_size in deploy\.toml and every site\.toml"):
        site_data.load(tmp_path / "pictures", cache, larger, hold_out=False)


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_what_a_process_writes_is_for_its_owner_alone(tmp_path: Path) -> None:
    written = tmp_path / "written"
    command = [sys.executable, "-c", f"print('held'); open({str(written)!r}, 'w').close()"]
    process = supervision.Owned(command, dict(os.environ), tmp_path / "log")
    process.process.wait(timeout=60)
    assert [path.stat().st_mode & 0o777 for path in (written, tmp_path / "log")] == [0o600, 0o600]


def still_runs(pid: int) -> bool:
    """Whether it still runs; one that waits to be noticed by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="processes are followed by /proc")
def test_what_a_process_leaves_behind_is_ended_too(tmp_path: Path) -> None:
    """A child in a session of its own, which a kill of the group does not reach."""
    inner = "import time; time.sleep(600)"
    outer = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
    owned = supervision.Owned([sys.executable, "-c", outer], dict(os.environ), tmp_path / "log")
    ends = time.monotonic() + 60
    while not (tmp_path / "log").read_text().strip():
        assert time.monotonic() < ends
        time.sleep(0.05)
    child = int((tmp_path / "log").read_text())
    os.kill(owned.process.pid, signal.SIGKILL)
    owned.process.wait(timeout=30)
    owned.stop()
    ends = time.monotonic() + 10  # a killed process takes a moment on a busy machine
    while still_runs(child) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not still_runs(child)


# What hangs, and what is told


class Hanging(FakeGrid):
    """A SuperLink that takes a call and never comes back from it."""

    def __init__(self, deployment: Deployment, sites: Iterable[DeployedSite], call: str) -> None:
        super().__init__(deployment, sites)
        self._never = threading.Event()
        setattr(self, call, lambda *_: self._never.wait(600))


@pytest.mark.parametrize("call", ["get_nodes", "push_messages", "pull_messages"])
def test_a_superlink_that_hangs_stops_the_run(
    deployment: Deployment, sites: list[DeployedSite], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr("redgrape.deploy.protocol.transport.LINK", 0.2)
    monkeypatch.setattr("redgrape.deploy.protocol.members.JOIN", 0.2)
    grid = Hanging(deployment, sites, call)
    with pytest.raises(RedgrapeError, match="the SuperLink has not answered for 0"):
        _run(deployment, grid, "a")
    grid._never.set()


def test_what_a_call_gives_or_raises_comes_through_its_deadline() -> None:
    assert deadlines.within(60, lambda: 5, "late") == 5
    with pytest.raises(KeyError, match="a"):
        deadlines.within(60, lambda: {}["a"], "late")


class Ended(Exception):
    pass


class Stuck:
    """A process that has not ended; what is asked of its owner."""

    log = Path(os.devnull)

    def __init__(self) -> None:
        self.stopped = 0

    def code(self) -> int | None:
        return None

    def last_words(self) -> str:
        return ""

    def stop(self) -> None:
        self.stopped += 1


def test_a_superlink_that_does_not_answer_is_started_again(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    server = server_role.Server(deployment, said.append)
    server._owned = stuck = Stuck()  # type: ignore[assignment]
    answers = iter([True, False, False, True, False, False, False])
    monkeypatch.setattr(server_role, "LOOK_EVERY", 0.0)
    monkeypatch.setattr(server_role, "UNANSWERED", 3)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(server.link, "is_up", lambda: next(answers))

    def start() -> None:
        raise Ended

    monkeypatch.setattr(server, "start", start)
    with pytest.raises(Ended):
        server.watch()
    assert stuck.stopped == 1 and list(answers) == []
    assert said == ["the SuperLink has not answered 3 times; starting it again"]


def test_a_resident_process_that_hangs_is_started_again(
    deployment: Deployment, federated: Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    role = site_role.SiteRole(SiteFolder(deployment.site("north")), federated.data("north"), said.append)
    role._resident, role._node = Stuck(), Stuck()  # type: ignore[assignment]
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(role, "_start_resident", lambda: role._promise.give(600))
    looks = iter(range(100))
    role._promise.give(600)
    role.watch(until=lambda: next(looks) == 49)
    assert said == []
    role._promise.give(-1)
    role.watch(until=lambda: next(looks) == 99)
    assert said == ["the site's process hangs; starting it again"]
    assert role._resident.stopped == 1
    role.stop()


def test_what_was_forked_for_a_supernode_ends_with_it(
    deployment: Deployment, federated: Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would try to reach the port of the SuperNode that has ended, without an end."""
    role = site_role.SiteRole(SiteFolder(deployment.site("north")), federated.data("north"), print)
    role._resident, role._warm, role._node = Stuck(), (forked := Stuck()), (node := Stuck())  # type: ignore[assignment]
    monkeypatch.setattr(node, "code", lambda: 1)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(role, "_await_server", lambda again: None)
    started: list[str] = []

    def start_node() -> None:
        assert (forked.stopped, started) == (1, ["warm"])
        role._node = Stuck()  # type: ignore[assignment]

    monkeypatch.setattr(role, "_start_warm", lambda: started.append("warm"))
    monkeypatch.setattr(role, "_start_node", start_node)
    looks = iter(range(9))
    role.watch(until=lambda: next(looks) == 4)
    assert (forked.stopped, node.stopped, started) == (1, 1, ["warm"])
    role.stop()


_TO_ITS_END = """\x1b[92mINFO \x1b[0m:      FastAPI lifespan: shutdown
INFO:     Application shutdown complete.
INFO:     Finished server process [1]
"""
_REFUSED = f"""\x1b[91mERROR \x1b[0m:     Exit Code: 305
Failed to initialize the connection to the SuperLink.
[code: 2004] Failed to activate SuperNode.

For more information, visit: <https://flower.ai/docs/framework/1.41/en/ref-exit-codes/305.html>
{_TO_ITS_END}"""
_AWAY = f"""\x1b[93mWARNING \x1b[0m:   Giving up reconnection after 20.03 seconds and 7 tries.
\x1b[91mERROR \x1b[0m:     [Errno 111] Connection refused
\x1b[93mWARNING \x1b[0m:   Connection attempt failed, retrying in 0.19 seconds
{_TO_ITS_END}"""


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        (_AWAY, "[Errno 111] Connection refused"),
        (
            _REFUSED,
            "the server does not accept the key of site 'north': is it registered there, and used by nobody else? "
            "Failed to initialize the connection to the SuperLink. [code: 2004] Failed to activate SuperNode.",
        ),
    ],
)
def test_why_a_supernode_ended_is_told_without_all_else_that_it_prints(
    deployment: Deployment, federated: Federated, monkeypatch: pytest.MonkeyPatch, printed: str, reason: str
) -> None:
    said: list[str] = []
    role = site_role.SiteRole(SiteFolder(deployment.site("north")), federated.data("north"), said.append)
    log = deployment.path / "supernode.log"
    node = supervision.Owned([sys.executable, "-c", f"print({printed!r})"], dict(os.environ), log)
    assert node.process.wait(timeout=60) == 0
    role._resident, role._node = Stuck(), node  # type: ignore[assignment]
    for method in ("_await_server", "_start_node"):
        monkeypatch.setattr(role, method, lambda **again: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    looks = iter(range(9))
    role.watch(until=lambda: next(looks) == 1)
    assert said == [f"not connected; trying again ({reason})"]
    role.stop()


def test_a_site_whose_data_takes_too_long_is_told_how_to_read_it(
    deployment: Deployment, federated: Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_role, "START_DEADLINE", 0.5)
    monkeypatch.setattr(site_role.SiteRole, "resident", [sys.executable, "-c", "import time; time.sleep(600)"])
    role = site_role.SiteRole(SiteFolder(deployment.site("north")), federated.data("north"), print)
    with pytest.raises(RedgrapeError, match=r"not read within 0\.5 seconds; `redgrape doctor \S+ --data \S+`"):
        role.start()
    role.stop()


def test_a_site_runs_once_at_a_time(
    deployment: Deployment, federated: Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in ("_start_resident", "_start_warm", "_await_server", "_start_node"):
        monkeypatch.setattr(site_role.SiteRole, method, lambda self: {})
    first, second, third = (
        site_role.SiteRole(SiteFolder(deployment.site("north")), federated.data("north"), print) for _ in range(3)
    )
    first.start()
    with pytest.raises(BusyError, match="site 'north' already runs from"):
        second.start()
    second.stop()
    first.stop()
    third.start()
    third.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="ends with its parent there")
def test_what_was_forked_ends_with_the_process_that_forked_it(tmp_path: Path) -> None:
    """A client app that tries to reach a SuperNode that is not there."""
    command = [sys.executable, "-m", "redgrape.deploy.processes.launch", "clientapps", str(tmp_path / "s")]
    owned = supervision.Owned(command, supervision.environment(tmp_path), tmp_path / "log")
    try:
        wait_for((tmp_path / "s").exists, "a process that forks", 60)
        with socket.socket(socket.AF_UNIX) as link:
            wait_for(lambda: link.connect_ex(str(tmp_path / "s")) == 0, "a connection", 10)
            words = ["--insecure", "--runtime-api-address", "127.0.0.1:1", "--token", "x"]
            link.sendall("\0".join([*words, "--parent-pid", str(os.getpid())]).encode())
            link.shutdown(socket.SHUT_WR)
            assert link.recv(1) == b"+"
        children = Path(f"/proc/{owned.process.pid}/task/{owned.process.pid}/children")
        (child,) = map(int, wait_for(lambda: children.read_text().split(), "a fork", 10))
        wait_for(lambda: "Connection attempt failed" in (tmp_path / "log").read_text(), "an attempt", 30)
        os.kill(owned.process.pid, signal.SIGKILL)
        wait_for(lambda: not still_runs(child), "its end", 30)
    finally:
        owned.stop()


def test_a_resident_process_promises_when_it_will_be_done(
    tmp_path: Path, deployment: Deployment, federated: Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it has nothing to do; a question extends the promise by its deadline."""
    monkeypatch.setattr(resident, "BEAT", 0.02)
    site = DeployedSite(SiteFolder(deployment.site("north")), federated.data("north"))
    given: list[float] = []

    class Heard(deadlines.Promise):
        def give(self, seconds: float) -> None:
            given.append(seconds)
            if len(given) > 5 and given[-2] > 1000:
                raise Ended

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen(1)

        def ask() -> None:
            while len(given) < 5:
                time.sleep(0.01)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(tmp_path / "s"))
                wire.send(connection, _question("join", deadline=1000.0, secure_aggregation=False), {})
                wire.receive(connection)

        asking = threading.Thread(target=ask)
        asking.start()
        with pytest.raises(Ended):
            resident.serve(site, listening, Heard(tmp_path / "promise"))
        asking.join(60)
    assert given[:5] == [resident.SLACK] * 5
    assert given[-2:] == [1000.0 + resident.SLACK, resident.SLACK]


class FakeLink:
    """Flower's part of a submission: what it was asked for."""

    def __init__(self, begin: Any = None) -> None:
        self._begin, self.stopped = begin, 0

    def start(self, settings: Any, *more: str) -> str:
        if self._begin is not None:
            self._begin(settings["ticket"])
        return "1"

    def stop(self, run: str) -> None:
        self.stopped += 1


def _submission(deployment: Deployment, link: FakeLink) -> Submission:
    experiment = deployed(Experiment.parse({"net": {"name": "linear"}}), deployment.options)
    folder = RunFolder.create(deployment.path / "runs" / "a", experiment)
    return Submission(deployment, link, folder)  # type: ignore[arg-type]


def test_a_run_that_tells_nothing_for_longer_than_its_deadlines_is_given_up(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FakeLink(lambda ticket: Journal(deployment, ticket, "a"))
    submission = _submission(deployment, link)
    assert submission._longest > 3600 + 300 + 600
    monkeypatch.setattr(submission, "_longest", 0.5)
    with pytest.raises(RedgrapeError, match=r"has reported nothing for 0.5 seconds and was given up"):
        submission.carry_out(lambda step: None, lambda words: None)
    assert link.stopped == 1


def test_the_operator_sees_every_word_once(deployment: Deployment) -> None:
    """Also beyond those that the file holds; of what went by too fast, how much it was."""
    journal, said = Journal(deployment, "t", "a"), []
    submission = _submission(deployment, FakeLink())

    def look() -> None:
        submission._pass_on(read_journal(deployment), 0, lambda step: None, said.append)

    for i in range(250):
        journal.say(f"word {i}")
        if i % 7 == 0:
            look()
    look()
    assert said == [f"word {i}" for i in range(250)]
    said.clear()
    for i in range(130):
        journal.say(f"more {i}")
    look()
    assert said[0].startswith("30 lines more are in") and said[1:] == [f"more {i}" for i in range(30, 130)]
    assert len((deployment.server / "run.log").read_text().splitlines()) == 380


@pytest.mark.skipif(sys.platform != "linux", reason="processes are told apart by /proc")
def test_another_process_with_the_same_number_is_not_taken_for_the_run(deployment: Deployment) -> None:
    journal = Journal(deployment, "t", "a")
    assert is_active(deployment)
    journal.write(process="of an earlier start of this machine 77")
    assert not is_active(deployment)
    journal.write(process=supervision.identity(os.getpid()))
    assert is_active(deployment)
    journal.write(state="finished")
    assert not is_active(deployment)


# The way to the server


def _closing(listening: socket.socket) -> None:
    """Take a connection, read its first words, and end it without any."""
    connection, _ = listening.accept()
    with connection:
        connection.recv(1 << 16)


def test_a_server_that_closes_in_the_handshake_is_tried_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        create(tmp_path / "d", options(port=listening.getsockname()[1]))
        threading.Thread(target=_closing, args=(listening,), daemon=True).start()
        assert site_role.check_server(SiteFolder(tmp_path / "d/sites/north")) == "it closed the connection"


def test_a_certificate_that_is_no_good_any_more_is_told_of_and_tried_again(
    deployment: Deployment, federated: Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that has just been started ends; one that was connected waits until the certificate is renewed."""
    said: list[str] = []
    role = site_role.SiteRole(SiteFolder(deployment.site("north")), federated.data("north"), said.append)
    answers: list[Any] = [ConfigError("has expired"), ConfigError("has expired"), "refused", None]

    def check(folder: SiteFolder) -> str | None:
        answer = answers.pop(0)
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    monkeypatch.setattr(site_role, "check_server", check)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(ConfigError, match="has expired"):
        role._await_server()
    role._await_server(again=True)
    assert answers == []
    assert ["NOT TRUSTED, nothing is sent to it: has expired" in words for words in said] == [True, False]
    role.stop()


def test_a_site_that_waits_for_its_server_says_so_again(
    deployment: Deployment, federated: Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    role = site_role.SiteRole(SiteFolder(deployment.site("north")), federated.data("north"), said.append)
    answers = iter(["refused"] * 5 + [None])
    monkeypatch.setattr(site_role, "check_server", lambda folder: next(answers))
    monkeypatch.setattr(site_role, "REPORT_EVERY", 0.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    role._await_server()
    assert len(said) == 5
    role.stop()
