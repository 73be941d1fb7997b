"""Own nets, data and partitions by name: in runs, worker processes, exported models; and objects in Python."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import redgrape as rg
from redgrape import nets, own_code
from redgrape.cli.main import run as command
from redgrape.data.partition import partition
from redgrape.errors import ConfigError, DataError
from redgrape.exported.export import export
from redgrape.exported.model import load_model
from redgrape.methods.fedavg import FedAvg
from redgrape.runs.experiment import Experiment

CODE = """
import numpy as np
import redgrape as rg
from torch import nn

print("own code is run")


def net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], 6), nn.Tanh(), nn.Linear(6, classes))


def data():
    y = np.arange(60) % 3
    x = np.random.default_rng(0).normal(size=(60, 4)) + y[:, None]
    return {"x": x.astype(np.float32), "y": y, "test": np.arange(60) >= 45, "class_names": np.array(["a", "b", "c"])}


def by_turns(labels, clients, alpha, seed):
    return np.arange(len(labels)) % clients


number = 3
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def values(code: Path, **more: Any) -> dict[str, Any]:
    return {
        "rounds": 2,
        "data": {"source": f"{code}:data", "partition": f"{code}:by_turns", "clients": 3},
        "net": {"name": f"{code}:net"},
        "method": {"name": "fedavg", "lr": 0.1, "batch_size": 5},
        **more,
    }


def test_describing_an_experiment_runs_no_code(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = Experiment.parse(values(code))
    assert experiment.code() == [code] * 3
    assert capsys.readouterr().out == ""


def test_the_same_bits_in_worker_processes(code: Path, tmp_path: Path) -> None:
    alone, pool = (rg.run(values(code), tmp_path / f"run{n}", workers=n) for n in (1, 2))
    assert (alone.path / "metrics.jsonl").read_bytes() == (pool.path / "metrics.jsonl").read_bytes()
    environment = alone.environment()
    assert environment["files"] == own_code.digests([code])
    assert environment["client_counts"] == [[15, 0, 0], [0, 15, 0], [0, 0, 15]]
    assert environment["class_names"] == ["a", "b", "c"]
    again = rg.run(values(code), alone.path)  # a finished run is taken as it is
    assert again.summary() == pool.summary()


def test_every_command_knows_them(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own = ["--data", "mine.py:data", "--partition", "mine.py:by_turns", "--net", "mine.py:net", "--clients", "3"]
    fast = ["--rounds", "2", "--workers", "1", "--quiet"]
    assert command(["data", "show", *own, "--json"]) == 0
    assert command(["compare", "fedavg", "redgrape", *own, *fast, "--out", "both"]) == 0
    assert command(["resume", "both/fedavg-seed0", "--rounds", "3", "--workers", "1", "--quiet"]) == 0
    assert command(["report", "both", "--out", "page.html"]) == 0
    assert command(["export", "both/fedavg-seed0", "model"]) == 0
    np.savez("new.npz", x=np.zeros((2, 4), np.float32))
    capsys.readouterr()
    assert command(["predict", "model", "new.npz", "--code", "mine.py", "--out", "new.csv"]) == 0
    assert Path("new.csv").read_text().count("\n") == 3
    assert command(["predict", "model", "new.npz"]) == 2
    assert "the model's net is the function 'net' of 'mine.py'; pass that file with --code" in capsys.readouterr().err
    code.write_text(CODE + "\n# changed\n")
    assert command(["resume", "both/fedavg-seed0", "--rounds", "4", "--workers", "1"]) == 2
    assert "'mine.py' has changed since" in capsys.readouterr().err
    assert command(["export", "both/fedavg-seed0", "again"]) == 2
    assert "'mine.py' has changed since the run began; restore the old file" in capsys.readouterr().err
    assert command(["predict", "model", "new.npz", "--code", "mine.py"]) == 2
    assert "'mine.py' is not the file that the model was trained with" in capsys.readouterr().err


def test_an_exported_own_net(code: Path, tmp_path: Path) -> None:
    run = rg.run(values(code), tmp_path / "run")
    state, _ = run.checkpoints.latest()
    assert state is not None
    model = state.server["model"]
    x = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    hidden = (torch.from_numpy(x) @ model["encoder.1.weight"].T + model["encoder.1.bias"]).tanh()
    expected = hidden @ model["classifier.weight"].T + model["classifier.bias"]
    folder = export(run.path, tmp_path / "model")
    card = json.loads((folder / "model.json").read_bytes())
    assert card["net"] == "mine.py:net" and card["code"] == own_code.digests([code])["mine.py"]
    torch.testing.assert_close(load_model(folder, code=code).logits(x), expected)
    pytest.importorskip("onnxscript")
    onnx = load_model(export(run.path, tmp_path / "onnx", "onnx"))  # needs no code
    torch.testing.assert_close(onnx.logits(x), expected, rtol=1e-4, atol=1e-5)


def test_a_module_by_its_name(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert own_code.file_of("mine:net") == code
    assert nets.build("mine:net", (4,), 3, seed=0).classifier.out_features == 3
    sys.modules.pop("mine")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("{code}:nothing", "has no function 'nothing' for the net; it has net, data, by_turns"),
        ("{code}:number", "has no function 'number'"),
        ("{folder}/none.py:net", "no net file at"),
        ("no_such_module:net", "the module 'no_such_module' of the net cannot be imported: ModuleNotFoundError"),
        ("{code}:data", "TypeError"),
    ],
)
def test_names_that_lead_nowhere(name: str, line: str, code: Path, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, TypeError)) as error:
        nets.build(name.format(code=code, folder=tmp_path), (4,), 3, seed=0)
    assert line in f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize("body", ["raise RuntimeError('no licence')", "import sys; sys.exit(0)"])
def test_whatever_an_import_raises_is_told(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"^the module 'broken.part' cannot be imported: (Runtime|System)E"):
        own_code.file_of("broken.part:net")
    for name in ("broken.part:net", f"{tmp_path}/broken/__init__.py:net"):
        with pytest.raises(ConfigError, match=r"^the .*net.* cannot be imported: (Runtime|System)E"):
            own_code.load(name, "net")


def test_an_edited_file_is_run_again(tmp_path: Path) -> None:
    """As in a notebook: edit, load, and the new code is there, also within the same second."""
    file = tmp_path / "mine.py"
    file.write_text("def net(): return 1\n")
    first = own_code.load(f"{file}:net", "net")
    assert own_code.load(f"{file}:net", "net") is first
    file.write_text("def net(): return 2\n")
    assert (first(), own_code.load(f"{file}:net", "net")()) == (1, 2)


def test_files_of_one_name_must_be_one_file(code: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "mine.py"
    other.parent.mkdir()
    other.write_text(CODE + "\n")
    with pytest.raises(ConfigError, match=r"two different files are named 'mine.py'; rename one"):
        own_code.digests([code, other])


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("labels[1:]", "of shape (3,); it must give the number of a client for each of 4 rows"),
        ("labels * 1.0", "gives float64"),
        ("labels + 1", "gives clients 1 to 2; there are clients 0 to 1"),
    ],
)
def test_partitions_that_are_refused(body: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / f"p{len(body)}.py"
    path.write_text(f"def cut(labels, clients, alpha, seed):\n    return {body}\n")
    with pytest.raises(DataError) as error:
        partition(np.array([0, 1, 0, 1]), f"{path}:cut", 2, 1.0, 0)
    assert line in str(error.value)


class Backwards(nn.Module):
    """Its last linear layer comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(4, 3), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = self.second(self.first(x))
        return z


def federation() -> rg.Federation:
    y = np.arange(30) % 3
    x = (np.random.default_rng(0).normal(size=(30, 4)) + y[:, None]).astype(np.float32)
    return rg.Federation(clients=[(x[:12], y[:12]), (x[12:24], y[12:24])], test=(x[24:], y[24:]), num_classes=3)  # type: ignore[list-item,arg-type]


def test_a_module_as_the_net() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 3)))
    before = {name: t.clone() for name, t in module.state_dict().items()}
    data = federation()
    result = rg.train(FedAvg(lr=0.1), data, module, rounds=1)
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())  # it is copied
    x = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    with rg.Training(FedAvg(lr=0.1), data, module, rounds=1) as training:
        assert torch.equal(training.build()(x), module(x))
    assert not torch.equal(result.net(x), module(x))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (Backwards(), "the net does not end in its last nn.Linear, 'first'; return redgrape.Net("),
        (nn.Sequential(nn.Conv2d(1, 3, 1)), "has no linear classifier after an encoder"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "has 2 outputs for 3 classes"),
        (nn.Sequential(nn.Linear(9, 4), nn.Linear(4, 3)), "does not take examples of shape [4]"),
    ],
)
def test_modules_that_are_refused(module: nn.Module, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        rg.train(FedAvg(), federation(), module, rounds=1)
    assert line in str(error.value)


class Pictures(Dataset[Any]):
    classes = ("cat", "dog")

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return torch.full((3, 2, 2), float(i)), i % 2


class Table:
    """What is used of a Hugging Face data set."""

    def __init__(self, **columns: Any) -> None:
        self._columns = columns
        self.column_names = list(columns)
        names = type("ClassLabel", (), {"names": ["low", "high"]})
        self.features = {name: names if name == "label" else None for name in columns}

    def __len__(self) -> int:
        return len(self._columns["label"])

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]


def test_data_in_python() -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32), np.arange(20) % 2
    pair = rg.data.load((x, y), clients=2)
    assert pair.class_counts.sum() == 16 and len(pair.test) == 4
    both = rg.data.load(((x, y), (x[:6], y[:6])), clients=2)
    assert both.class_counts.sum() == 20 and len(both.test) == 6
    tensors = rg.data.load(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), clients=2)
    assert tensors.fingerprint() == pair.fingerprint()
    pictures = rg.data.load((Pictures(), Pictures()), clients=2)
    assert pictures.class_names == ["cat", "dog"] and pictures.input_shape == (3, 2, 2)
    assert len(pictures.test) == 10
    table = Table(image=[row.tolist() for row in x], label=y.tolist(), site=["n", "s"] * 10)
    named = rg.data.load(table, partition="natural")
    assert named.client_names == ["n", "s"] and named.class_names == ["low", "high"]
    assert torch.allclose(named.train.x, torch.from_numpy(x))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (Stream(), "Stream cannot be read as a data set; pass (x, y)"),
        (np.zeros((3, 2)), "ndarray cannot be read as a data set; pass (x, y)"),
        ([(torch.zeros(n), 0) for n in (2, 3, 4)], "gives no (input, label) pairs"),
        (Table(text=["a"], other=["b"], label=[0]), "has the columns text, other, label; rename one to `label`"),
        ({"y": np.zeros(3, np.int64)}, "the data has no array `x`; it has y"),
    ],
)
def test_data_that_is_refused(data: Any, line: str) -> None:
    with pytest.raises(DataError) as error:
        rg.data.load(data)
    assert line in str(error.value)
