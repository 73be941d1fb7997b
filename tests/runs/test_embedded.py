"""Runs with a pretrained encoder: embeddings in their cache, frozen and unfrozen runs, the exported model.

The weights are random, from a file, so that nothing needs to be installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from redgrape import methods
from redgrape.cli.main import run as command
from redgrape.data.embedding import Embedder
from redgrape.data.examples import Examples
from redgrape.errors import ConfigError
from redgrape.exported.export import export, open_model
from redgrape.exported.model import load_model
from redgrape.nets import efficientnet, pretrained
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run

NET = "efficientnet_lite0"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey pictures of three classes, bright at one of three heights, and random weights."""
    root = tmp_path_factory.mktemp("embedded")
    random = np.random.default_rng(0)
    y = np.arange(36) % 3
    x = random.integers(0, 60, (36, 12, 12), dtype=np.uint8)
    for c in range(3):
        x[y == c, 4 * c : 4 * c + 4] += 150
    np.savez(root / "pictures.npz", x=x, y=y, test=np.arange(36) >= 24, class_names=np.array(["low", "mid", "top"]))
    torch.manual_seed(0)
    encoder = efficientnet.lite0()
    with torch.no_grad():
        encoder.train()(torch.rand(8, 3, 32, 32))  # running statistics that are not those of a new net
    safetensors.torch.save_file(encoder.state_dict(), root / "encoder.safetensors")
    return root


def described(place: Path, **net: Any) -> dict[str, Any]:
    return {
        "rounds": 2,
        "data": {"source": str(place / "pictures.npz"), "clients": 2, "partition": "iid"},
        "net": {"name": NET, "weights": str(place / "encoder.safetensors"), "size": 32, **net},
        "method": {"name": "fedavg", "lr": 0.05, "batch_size": 6},
    }


def carried_out(place: Path, folder: Path, **net: Any) -> RunFolder:
    run = RunFolder.create(folder, Experiment.parse(described(place, **net)))
    for _ in Run(run, workers=1, data_root=place).steps():
        pass
    return run


class Counting(torch.nn.Module):
    """The mean of each channel, and how often it was asked."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.mean(dim=(2, 3))


def test_examples_are_embedded_once(tmp_path: Path) -> None:
    x = torch.arange(40 * 3 * 2 * 2, dtype=torch.int64).remainder(251).to(torch.uint8).reshape(40, 3, 2, 2)
    everything = Examples(x, torch.arange(40) % 4)
    expected = (x.float() / 255).mean(dim=(2, 3))
    told: list[tuple[int, int]] = []
    encoder = Counting()
    change = Embedder(encoder, 3, "toy", tmp_path, lambda done, total: told.append((done, total)))
    rows = [5, 3, 38]
    part = change(everything.take(rows))
    assert torch.allclose(part.inputs(torch.arange(3), torch.float32), expected[rows])
    assert part.labels.tolist() == [1, 3, 2]
    assert told == [(32, 40), (40, 40)]
    change(everything)
    again = Embedder(encoder, 3, "toy", tmp_path)(everything)
    assert encoder.calls == 2  # two batches, once
    assert torch.allclose(again.x, expected)
    assert isinstance(again.source, np.memmap)


def test_what_the_cache_depends_on(tmp_path: Path) -> None:
    x = torch.zeros(2, 1, 2, 2, dtype=torch.uint8)
    y = torch.tensor([0, 1])
    for identity, inputs in (("a", x), ("b", x), ("a", x + 1), ("a", x)):
        Embedder(Counting(), 1, identity, tmp_path)(Examples(inputs, y))
    files = sorted((tmp_path / "embedded").iterdir())
    assert len(files) == 3


def test_a_damaged_cache_is_written_again(tmp_path: Path) -> None:
    examples = Examples(torch.full((2, 1, 2, 2), 51, dtype=torch.uint8), torch.tensor([0, 1]))
    Embedder(Counting(), 1, "toy", tmp_path)(examples)
    (file,) = (tmp_path / "embedded").iterdir()
    good = file.read_bytes()
    file.write_bytes(good[:-40] + b"\x01" + good[-39:])
    assert torch.allclose(Embedder(Counting(), 1, "toy", tmp_path)(examples).x, torch.tensor(0.2))
    assert file.read_bytes() == good


@pytest.mark.parametrize(
    ("head", "format"),
    [("linear", "safetensors"), ("mlp", "safetensors"), pytest.param("linear", "onnx", marks=pytest.mark.slow)],
)
def test_a_frozen_run_and_its_model(place: Path, tmp_path: Path, head: str, format: str) -> None:
    if format == "onnx":
        pytest.importorskip("onnxscript")
    run = carried_out(place, tmp_path / "run", head=head)
    state, _ = run.checkpoints.latest()
    assert state is not None
    model = state.server["model"]
    assert model["classifier.weight"].shape[1] == (1280 if head == "linear" else 64)
    assert not any("running_mean" in name for name in model)  # the encoder is not sent
    x = np.load(place / "pictures.npz")["x"]
    body = pretrained.body(NET, (1, 12, 12), 32).eval()
    body[1].load_state_dict(safetensors.torch.load_file(place / "encoder.safetensors"))
    with torch.no_grad():
        h = body((torch.from_numpy(x)[:, None].float() - 127) / 128)
        for i in (1, 3) if head == "mlp" else ():
            h = (h @ model[f"encoder.{i}.weight"].T + model[f"encoder.{i}.bias"]).relu()
        logits = h @ model["classifier.weight"].T + model["classifier.bias"]
    exported = load_model(export(run.path, tmp_path / "model", format))
    torch.testing.assert_close(exported.logits(x), logits, rtol=1e-3, atol=1e-3)
    assert "encoder.0.1.0" not in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.parametrize("frozen", [True, False])
def test_an_encoder_of_a_hub_keeps_its_whole_name(
    place: Path, tmp_path: Path, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())

    toy = pretrained.Encoder((0.5,) * 3, (0.2,) * 3, build, lambda: build().state_dict())
    monkeypatch.setitem(pretrained._HUBS, "hf", lambda name: {"org/toy": toy}[name])
    monkeypatch.delitem(pretrained.PACKAGES, "hf")
    safetensors.torch.save_file(build().state_dict(), tmp_path / "toy.safetensors")
    run = carried_out(
        place, tmp_path / "run", name="hf:org/toy", frozen=frozen, weights=str(tmp_path / "toy.safetensors")
    )
    x = np.load(place / "pictures.npz")["x"]
    model = load_model(export(run.path, tmp_path / "model"))
    assert torch.equal(model.logits(x), open_model(run.path).logits(x))
    assert model.card["net"] == model.card["run"]["experiment"]["net"]["name"] == "hf:org/toy"
    assert model.card["run"]["experiment"]["net"]["weights"] == "toy.safetensors"
    pretrained.find.cache_clear()


def test_a_frozen_run_needs_its_encoder_to_go_on(place: Path, tmp_path: Path) -> None:
    weights = tmp_path / "own.safetensors"
    weights.write_bytes((place / "encoder.safetensors").read_bytes())
    run = carried_out(place, tmp_path / "run", weights=str(weights))
    tensors = safetensors.torch.load_file(weights)
    safetensors.torch.save_file({name: t + 1 for name, t in tensors.items()}, weights)
    with pytest.raises(ConfigError, match=r"'own.safetensors' has changed since"):
        list(Run(run, workers=1, data_root=place, rounds=3).steps())


def test_the_version_of_the_package_of_the_encoder_decides(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes on only with the same one, and features are not taken from the cache of another."""
    monkeypatch.setattr(pretrained, "version", lambda net: {"timm": "1"})
    run = carried_out(place, tmp_path / "run")
    cached = {*(place / "embedded").iterdir()}
    monkeypatch.setattr(pretrained, "version", lambda net: {"timm": "2"})
    with pytest.raises(ConfigError, match=r"began with timm 1 and is timm 2 now"):
        list(Run(run, workers=1, data_root=place, rounds=3).steps())
    carried_out(place, tmp_path / "again")
    assert {*(place / "embedded").iterdir()} > cached


def test_resuming_gives_the_same_bits(place: Path, tmp_path: Path) -> None:
    whole = carried_out(place, tmp_path / "whole")
    half = RunFolder.create(tmp_path / "half", Experiment.parse(described(place)))
    next(Run(half, workers=1, data_root=place).steps())
    for _ in Run(half, workers=2, data_root=place).steps():
        pass
    assert (whole.path / "metrics.jsonl").read_bytes() == (half.path / "metrics.jsonl").read_bytes()
    assert whole.summary() == half.summary()


def test_an_unfrozen_run_starts_from_the_weights_and_moves_them(place: Path, tmp_path: Path) -> None:
    values = described(place, frozen=False) | {"rounds": 1}
    values["method"]["lr"] = 1e-5
    run = RunFolder.create(tmp_path / "run", Experiment.parse(values))
    for _ in Run(run, workers=1, data_root=place).steps():
        pass
    state, _ = run.checkpoints.latest()
    assert state is not None
    stored = safetensors.torch.load_file(place / "encoder.safetensors")
    moved = state.server["model"]["encoder.0.1.1.weight"] - stored["1.weight"]
    assert 0 < moved.abs().max() < 0.05 < stored["1.weight"].abs().max()
    x = np.load(place / "pictures.npz")["x"]
    assert load_model(export(run.path, tmp_path / "model")).logits(x).shape == (36, 3)


def test_other_experiments_keep_their_description() -> None:
    assert Experiment.parse({"net": {"name": "cnn"}}).resolved()["net"] == {"name": "cnn", "weights": "none"}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"net": {"name": "cnn", "size": 64}}, "net: size is for pretrained encoders, and 'cnn' is not one"),
        ({"net": {"name": NET, "size": 50}}, "net.size"),
        ({"net": {"name": NET}, "data": {"flip": True}}, "have no effect on the embeddings of a frozen encoder"),
        ({"net": {"name": NET, "frozen": False}, "method": {"batch_size": 1}}, "BatchNorm in net 'efficientnet_lite0'"),
        ({"net": {"name": "efficientnet_lite1"}}, "did you mean 'efficientnet_lite0'"),
    ],
)
def test_what_does_not_go_together(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        Experiment.parse(values)
    assert line in str(error.value)


def test_vectors_have_no_embeddings(place: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "vectors.npz", x=np.zeros((8, 3), np.float32), y=np.arange(8) % 2)
    values = described(place) | {"data": {"source": str(tmp_path / "vectors.npz"), "clients": 2}}
    run = RunFolder.create(tmp_path / "run", Experiment.parse(values))
    with pytest.raises(ConfigError, match="takes images, but the data holds floats; choose mlp or linear"):
        list(Run(run, workers=1, data_root=place).steps())


def test_embed_alone(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "features.npz"
    options = ["--weights", str(place / "encoder.safetensors"), "--size", "32", "--data-root", str(place)]
    assert command(["embed", str(place / "pictures.npz"), *options, "--out", str(out)]) == 0
    assert "24 training and 12 test examples have 1280 features each" in capsys.readouterr().out
    with np.load(out) as arrays:
        assert arrays["x"].shape == (24, 1280) and arrays["x_test"].shape == (12, 1280)
        assert arrays["class_names"].tolist() == ["low", "mid", "top"]
    sites = {"y": np.arange(4) % 2, "client": np.array(list("nsns")), "test": np.arange(4) > 1}
    np.savez(tmp_path / "sites.npz", x=np.zeros((4, 8, 8), np.uint8), **sites)
    assert command(["embed", str(tmp_path / "sites.npz"), *options, "--out", str(out)]) == 0
    with np.load(out) as arrays:
        assert arrays["client"].tolist() == arrays["client_test"].tolist() == ["n", "s"]
    capsys.readouterr()
    assert command(["embed", str(place / "pictures.npz"), "--net", "cnn"]) == 2
    assert "net 'cnn' is not a pretrained encoder" in capsys.readouterr().err


def test_fit_gives_a_run_and_a_model_in_one_round(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head of the run, of the exported model and of a run of the same experiment are one, and all readers work."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    source, weights = str(place / "pictures.npz"), f"net.weights={place / 'encoder.safetensors'}"
    shared = ["--clients", "2", "-c", weights, "-c", "net.size=32", "--data-root", str(place), "--workers", "1"]
    assert command(["fit", source, *shared, "--out", "fitted", "--export", "model"]) == 0
    told = capsys.readouterr().out
    assert "page: redgrape report fitted" in told and "model folder: model" in told
    assert max(map(len, told.splitlines())) <= 80
    (record,) = RunFolder.open(Path("fitted")).metrics()
    assert sum(record["class_examples"]) == 24 and record["train_loss"] is None
    named = ["--data", source, "--net", NET, "--method", methods.WITHOUT_TRAINING, "--rounds", "1"]
    assert command(["run", *named, *shared, "--out", "same"]) == 0
    fitted, same = (RunFolder.open(Path(name)) for name in ("fitted", "same"))
    assert fitted.metrics() == same.metrics() and fitted.experiment().hash() == same.experiment().hash()
    assert command(["report", "fitted"]) == command(["privacy", "fitted"]) == 0
    assert "exact feature vector" in " ".join(capsys.readouterr().out.split())
    assert command(["evaluate", "fitted", "--data-root", str(place), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["accuracy"] == record["test"]["accuracy"] > 0.5
    assert command(["evaluate", "model", source, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == record["test"]["accuracy"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--export", "taken"], "'taken' already exists and is not an empty folder"),
        (["--preset", "chosen"], "method.held_out is 0.2, and g and rho are chosen in a second round; set rounds=2"),
        (["--lr", "0.1"], "unrecognized arguments: --lr 0.1"),
    ],
)
def test_fit_refuses_before_it_writes(
    more: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    Path("taken/file").touch()
    assert command(["fit", "digits", "--net", "linear", "--workers", "1", "--out", "fitted", *more]) == 2
    assert words in capsys.readouterr().err
    assert not Path("fitted").exists()
