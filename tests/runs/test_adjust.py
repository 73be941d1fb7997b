"""Runs that start from the model of a finished run: what they adjust, what is recorded, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from redgrape.cli.main import run as command
from redgrape.data.prepare import prepare
from redgrape.determinism import torch_stream
from redgrape.errors import ConfigError
from redgrape.learning import class_statistics
from redgrape.method import ClientSite
from redgrape.reading.run_view import RunView
from redgrape.runs.experiment import Experiment
from redgrape.runs.finished import digest_of_state
from redgrape.runs.folder import RunFolder

C = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vectors of three classes with 30, 12 and 6 examples, and a finished run of FedAvg."""
    root = tmp_path_factory.mktemp("adjust")
    random = np.random.default_rng(0)
    y = np.repeat(np.arange(C), [40, 22, 16])
    x = random.normal(size=(len(y), 5)).astype(np.float32) + y[:, None]
    test = np.concatenate([np.arange(n) < 10 for n in (40, 22, 16)])
    np.savez(root / "vectors.npz", x=x[~test], y=y[~test], x_test=x[test], y_test=y[test])
    shared = ["--data", str(root / "vectors.npz"), "--net", "mlp", "--clients", "3", "--partition", "iid"]
    training = ["--method", "fedavg", "--rounds", "2", "--epochs", "1", "--workers", "1", "--quiet"]
    assert command(["run", *shared, *training, "-c", "data.imbalance=natural", "--out", str(root / "first")]) == 0
    return root


def state(run: Path) -> Any:
    found, _ = RunFolder.open(run).checkpoints.latest()
    assert found is not None
    return found


def adjusted(place: Path, tmp_path: Path, *arguments: str) -> Any:
    out = tmp_path / "adjusted"
    more = ["--workers", "1", "--quiet", "--out", str(out)]
    assert command(["adjust", str(place / "first"), *arguments, *more]) == 0
    before, after = (state(run).server["model"] for run in (place / "first", out))
    assert all(torch.equal(t, after[name]) for name, t in before.items() if name.startswith("encoder."))
    return before, after, out


def test_lda_on_the_encoder_of_a_run(place: Path, tmp_path: Path) -> None:
    """The head is that of the sums over all examples at the run's encoder."""
    before, after, out = adjusted(place, tmp_path, "lda:g=0.5,rho=1.0")
    experiment = RunFolder.open(out).experiment()
    data = prepare(experiment.data, experiment.seed)
    site = ClientSite(
        experiment.builder(data), 1, C, 0, 1, 1, torch.device("cpu"), 0, data.train.take(np.concatenate(data.parts))
    )
    sums = class_statistics.of_rows(site.load(before), site, torch.arange(len(site.data)))
    W, b = class_statistics.Spread.of(sums).discriminants([0.5], [1.0])
    expected = class_statistics.with_head(before, sums, W[0], b[0, 0])
    for name in ("classifier.weight", "classifier.bias"):
        torch.testing.assert_close(after[name], expected[name], rtol=1e-4, atol=1e-4)
        assert not torch.equal(after[name], before[name])


def test_a_run_that_keeps_its_best_round_or_stopped_early_is_a_start(place: Path, tmp_path: Path) -> None:
    words = ["--data", str(place / "vectors.npz"), "--net", "mlp", "--clients", "3", "--partition", "iid", "--quiet"]
    words += ["--method", "fedavg", "--rounds", "9", "--epochs", "3", "--lr", "0.5", "--workers", "1"]
    words += ["-c", "data.imbalance=natural", "-c", "data.validation=3", "--keep", "best", "--patience", "2"]
    assert command(["run", *words, "--out", str(tmp_path / "best")]) == 0
    folder = RunFolder.open(tmp_path / "best")
    best, after = (folder.summary() or {})["best_round"], tmp_path / "after"
    assert best < state(folder.path).round < 9
    assert command(["adjust", str(folder.path), "ncm", "--workers", "1", "--quiet", "--out", str(after)]) == 0
    encoder, last = state(after).server["model"], state(folder.path).server["model"]
    kept = folder.checkpoints.after(best).server["model"]
    assert all(torch.equal(t, encoder[name]) for name, t in kept.items() if name.startswith("encoder."))
    assert not all(torch.equal(t, encoder[name]) for name, t in last.items() if name.startswith("encoder."))


def test_what_a_run_started_from_is_recorded(place: Path, tmp_path: Path) -> None:
    _, _, out = adjusted(place, tmp_path, "ncm")
    first = str(place / "first")
    assert RunFolder.open(out).environment()["files"][first] == digest_of_state(state(place / "first"))
    view = RunView.read(out)
    assert view.label == "ncm on first" and view.experiment["start"] == first
    assert command(["evaluate", str(out), "--json"]) == 0
    assert command(["export", str(out), str(tmp_path / "model")]) == 0
    card = json.loads((tmp_path / "model" / "model.json").read_text())
    assert card["run"]["experiment"]["start"] == "first"


def test_logits_are_shifted_and_nothing_is_trained(place: Path, tmp_path: Path) -> None:
    before, after, _ = adjusted(place, tmp_path, "logit_adjustment")
    assert torch.equal(before["classifier.weight"], after["classifier.weight"])
    share = torch.tensor([30, 12, 6]) / 48
    torch.testing.assert_close(after["classifier.bias"], before["classifier.bias"] - share.log())


def test_rows_get_equal_lengths(place: Path, tmp_path: Path) -> None:
    before, after, _ = adjusted(place, tmp_path, "tau_norm")
    W = before["classifier.weight"]
    torch.testing.assert_close(after["classifier.weight"], W / W.norm(dim=1, keepdim=True))
    assert not after["classifier.bias"].any()
    before, after, _ = adjusted(place, tmp_path / "half", "tau_norm:tau=0.5")
    torch.testing.assert_close(after["classifier.weight"], W / W.norm(dim=1, keepdim=True).sqrt())


def test_a_head_is_calibrated_on_noise(place: Path, tmp_path: Path) -> None:
    """With no clients' data: the head before and the key of the round decide."""
    before, after, _ = adjusted(place, tmp_path, "fednpc:noise_steps=1,noise_samples=100")
    random = torch_stream(0, "random features", 1)
    y = torch.randint(C, (100,), generator=random)
    W, b = (before[f"classifier.{name}"].clone().requires_grad_() for name in ("weight", "bias"))
    h = torch.empty(100, W.shape[1]).normal_(generator=random)
    gradients = torch.autograd.grad(torch.nn.functional.cross_entropy(h @ W.T + b, y), [W, b])
    torch.testing.assert_close(after["classifier.weight"], (W - 0.1 * gradients[0]).detach())
    torch.testing.assert_close(after["classifier.bias"], (b - 0.1 * gradients[1]).detach())


REFUSED = [
    (["lda", "-c", "seed=1"], "was trained on another split"),
    (["lda@pooled"], "names a baseline"),
    (["nothing"], "unknown method"),
    (["lda", "-c", "net.name=linear"], "has another net"),
    (["lda", "-c", "method=5"], "method is 5"),
    (["lda", "-c", "method.name=7"], "7"),
    (["crt"], "'crt' trains, and so it changes nothing in a finished run; choose fed3r, fednpc, lda, logit_adjustment"),
]


@pytest.mark.parametrize(("arguments", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_does_not_fit_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    """In one line, and nothing is left behind."""
    out = tmp_path / "adjusted"
    assert command(["adjust", str(place / "first"), *arguments, "--workers", "1", "--out", str(out)]) != 0
    error = capsys.readouterr().err
    assert why in error and len(error.strip().splitlines()) == 1
    assert not out.exists()


def test_only_a_finished_run_without_noise_is_a_start(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = RunFolder.open(place / "first").experiment().resolved()
    begun = RunFolder.create(tmp_path / "begun", Experiment.parse(values))
    noisy = {**values, "exchange": {"clip": 1.0, "noise": 1.0, "randomness": "seed"}}
    noise = RunFolder.create(tmp_path / "noise", Experiment.parse(noisy))
    for folder, why in ((begun, "not finished"), (noise, "was trained with noise")):
        out = tmp_path / "adjusted"
        more = ["-c", "exchange.noise=0.0", "--workers", "1", "--out", str(out)]
        assert command(["adjust", str(folder.path), "lda", *more]) != 0
        assert why in capsys.readouterr().err
        assert not out.exists()


def test_without_a_start_there_must_be_training() -> None:
    with pytest.raises(ConfigError, match="epochs is 0, which trains nothing"):
        Experiment.parse({"method": {"name": "fedavg", "epochs": 0}})
    plain = Experiment.parse({"method": {"name": "fedavg"}})
    assert "start" not in plain.resolved()


def test_the_result_stands_below_that_of_the_run(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adjusted(place, tmp_path, "tau_norm")
    first, second = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:3]]
    assert (first, second) == ("fedavg", "tau_norm")
