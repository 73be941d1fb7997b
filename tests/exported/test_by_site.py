"""Figures by site, and a calibrated model: evaluated, exported, and used by predict."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics

from redgrape.cli.main import main
from redgrape.data.federation import Groups
from redgrape.errors import DataError
from redgrape.exported.export import export
from redgrape.exported.model import load_model
from redgrape.exported.own_test import OwnModel
from redgrape.learning import evaluation
from redgrape.reading.page.figures import page_data
from redgrape.reading.page.reading import Reading
from redgrape.runs.run import run

SITES = np.array(["north", "south", "one class"])


def write_data(path: Path, **more: Any) -> Path:
    """Three sites that know their test examples; the last has one class."""
    random = np.random.default_rng(0)
    y = np.repeat(np.arange(3), [90, 60, 40])
    site = SITES[random.integers(0, 2, len(y))]
    site[:12] = "one class"
    x = (random.normal(size=(len(y), 4)) + 1.2 * y[:, None]).astype("f4")
    np.savez(path, x=x, y=y, client=site, test=np.arange(len(y)) % 3 == 0, **more)
    return path


def described(source: Path, validation: int = 6) -> dict[str, Any]:
    return {
        "rounds": 3,
        "data": {"source": str(source), "partition": "natural", "validation": validation},
        "net": {"name": "linear"},
        "method": {"name": "fedavg", "epochs": 2, "lr": 0.05},
    }


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code, *capsys.readouterr()


def test_figures_of_a_site_are_those_of_scikit_learn() -> None:
    random = np.random.default_rng(1)
    y, said = random.integers(0, 4, 300), random.integers(0, 4, 300)
    sites = np.array(["a", "b", ""])[random.integers(0, 3, 300)]
    y[sites == "b"] = 2  # a site with one class
    said[y == 3] = 0  # nobody recognises it, but it is there
    groups = Groups((0,), (1,), (2, 3))
    rows = evaluation.by_site(torch.from_numpy(4 * y + said), sites, groups, 4)
    assert [row["site"] for row in rows] == ["a", "b"]  # nobody's examples are left out
    for row in rows:
        here = sites == row["site"]
        held = np.unique(y[here])
        assert row["examples"] == here.sum() and row["classes"] == len(held)
        assert row["accuracy"] == pytest.approx(metrics.accuracy_score(y[here], said[here]), abs=1e-12)
        recall = metrics.recall_score(y[here], said[here], labels=held, average="macro", zero_division=0)
        assert row["balanced"] == pytest.approx(recall, abs=1e-12)
        f1 = metrics.f1_score(y[here], said[here], labels=held, average="macro", zero_division=0)
        assert row["macro_f1"] == pytest.approx(f1, abs=1e-12)
        tail = here & (y >= 2)
        assert row["tail"] == pytest.approx((y == said)[tail].mean(), abs=1e-12)
    assert rows[1]["head"] is None and rows[1]["middle"] is None


def test_the_worst_site_has_enough_examples() -> None:
    figures = dict.fromkeys(evaluation.BY_SITE)
    rows = [
        {"site": "tiny", "examples": 2, **figures, "accuracy": 0.0, "tail": 0.0},
        {"site": "a", "examples": 50, **figures, "accuracy": 0.7},
        {"site": "b", "examples": 90, **figures, "accuracy": 0.6, "tail": 0.5},
    ]
    assert evaluation.worst_sites(rows, 10) == {
        "accuracy": {"site": "b", "value": 0.6},
        "tail": {"site": "b", "value": 0.5},
    }
    assert evaluation.worst_sites(rows, 90) == evaluation.worst_sites(rows, 10) != evaluation.worst_sites(rows, 2)
    assert evaluation.worst_sites(rows[:1], 10)["accuracy"]["site"] == "tiny"


def test_a_run_by_site_calibrated_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    folder = run(described(write_data(tmp_path / "data.npz")), tmp_path / "run")
    assert Reading.of(folder.path).evaluation == {}
    code, out, err = command(capsys, "evaluate", folder.path, "--by-site", "--picture", "reliability.png")
    assert code == 0 and not err and max(map(len, out.splitlines())) <= 80
    for words in ("by site, %", "one class", "worst site", "before", "after", "temperature", "reliability.png"):
        assert words in out, words
    assert (tmp_path / "reliability.png").read_bytes().startswith(b"\x89PNG")
    scores = OwnModel.open(folder.path).evaluate()
    total = sum(row["examples"] * row["accuracy"] for row in scores["sites"])
    assert total / scores["examples"] == pytest.approx(scores["accuracy"])
    shown = page_data({"a": Reading.of(folder.path)})["runs"]["a"]
    assert [row["site"] for row in shown["sites"]] == sorted(SITES)
    assert [line["title"] for line in shown["reliability"]] == ["before calibration", "after calibration"]
    bins = [row for row in scores["reliability"] if row["examples"]]
    error = sum(row["examples"] * abs(row["certainty"] - row["accuracy"]) for row in bins) / scores["examples"]
    assert error == pytest.approx(scores["ece"])
    code, out, _ = command(capsys, "evaluate", folder.path, "--on", "validation", "--by-site")
    assert code == 0 and "validation" in out
    (folder.path / "evaluation.json").write_text("{}")  # not what was written
    assert Reading.of(folder.path).evaluation == {}


def test_a_calibrated_model_predicts_as_it_was_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(described(write_data(tmp_path / "data.npz")), tmp_path / "run")
    own = OwnModel.open(folder.path)
    code, out, err = command(capsys, "export", folder.path, tmp_path / "model", "--calibrate", "--json")
    assert err.startswith("note: validation examples of the rarest class: 6; to calibrate on more, hold out 20 of each")
    assert code == 0 and json.loads(out)["calibration"] == json.loads(json.dumps(own.calibration()))
    model, plain = load_model(tmp_path / "model"), load_model(export(folder.path, tmp_path / "plain"))
    assert model.calibration is not None and plain.calibration is None
    x, labels = own.federation.test.inputs(torch.arange(64), torch.float32), own.federation.test.labels
    p, z = model(x), plain.logits(x)
    torch.testing.assert_close(p, (z.double() / model.calibration.temperature).softmax(dim=1))
    decided = (p / torch.tensor(model.calibration.thresholds)).argmax(dim=1)
    assert model.predict(x) == [str(c) for c in decided.tolist()]
    after = own.evaluate()["calibrated"]
    assert after["accuracy"] == pytest.approx(float((decided == labels).double().mean()))
    assert after["nll"] == pytest.approx(metrics.log_loss(labels, p.numpy()), abs=1e-6)
    assert "alibrated" in (tmp_path / "model" / "README.md").read_text()

    np.savez(tmp_path / "new.npz", x=x.numpy())
    code, _, _ = command(capsys, "predict", tmp_path / "model", tmp_path / "new.npz", "--out", tmp_path / "new.csv")
    rows = list(csv.DictReader((tmp_path / "new.csv").read_text().splitlines()))
    assert code == 0 and [row["label"] for row in rows] == model.predict(x)
    written = torch.tensor([[float(row[f"p({c})"]) for c in range(3)] for row in rows], dtype=torch.float64)
    torch.testing.assert_close(written, p)

    np.savez(tmp_path / "test.npz", x=x.numpy(), y=labels.numpy(), test=np.ones(64, bool))
    code, out, _ = command(capsys, "evaluate", tmp_path / "model", tmp_path / "test.npz", "--json")
    scores = json.loads(out)
    assert code == 0 and scores["accuracy"] == pytest.approx(after["accuracy"])
    assert scores["per_class"][2]["recall"] == pytest.approx(float((decided == 2)[labels == 2].double().mean()))
    assert scores["uncalibrated"]["accuracy"] == pytest.approx(own.evaluate()["accuracy"])
    picture = tmp_path / "reliability.png"
    code, out, _ = command(capsys, "evaluate", tmp_path / "model", tmp_path / "test.npz", "--picture", picture)
    assert code == 0 and "the figures above are those after calibration" in " ".join(out.split()) and picture.is_file()
    code, out, _ = command(capsys, "evaluate", folder.path)
    assert code == 0 and "the figures above are those before calibration" in " ".join(out.split())

    card = json.loads((tmp_path / "model" / "model.json").read_text())
    card["calibration"]["thresholds"] = [0.5, 0.5]
    (tmp_path / "model" / "model.json").write_text(json.dumps(card))
    (tmp_path / "model" / "SHA256SUMS").unlink()
    with pytest.raises(DataError, match="2 thresholds for 3 classes"):
        load_model(tmp_path / "model")


def test_a_temperature_that_would_not_gain_is_not_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(described(write_data(tmp_path / "data.npz")), tmp_path / "run")
    monkeypatch.setattr("redgrape.learning.calibration.gains", lambda *_: (False, False))
    code, out, _ = command(capsys, "export", folder.path, tmp_path / "model", "--calibrate")
    assert code == 0 and "temperature 1, since another would not gain; equal thresholds" in " ".join(out.split())
    chosen = load_model(tmp_path / "model").calibration
    assert chosen is not None and chosen.temperature == 1 and set(chosen.thresholds) == {1 / 3}


def test_what_is_missing_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_data(tmp_path / "data.npz")
    folder = run({**described(source, 0), "data": {"source": str(source), "clients": 2}}, tmp_path / "run")
    apart = tmp_path / "apart.npz"
    np.savez(
        apart, x=np.eye(8, 4, dtype="f4"), y=np.arange(8) % 2, x_test=np.eye(4, dtype="f4"), y_test=np.arange(4) % 2
    )
    unnamed = run({**described(apart, 0), "data": {"source": str(apart), "clients": 2}}, tmp_path / "unnamed")
    for words, message in (
        (("export", folder.path, tmp_path / "model", "--calibrate"), "has no validation examples; hold some out"),
        (("evaluate", folder.path, "--on", "validation"), "has no validation examples; hold some out"),
        (("evaluate", folder.path, source, "--by-site"), "--by-site is for a run's own examples"),
        (("evaluate", unnamed.path, "--by-site"), "do not name their sites"),
        (("evaluate", folder.path, "--picture", "a.txt"), "has no known ending; choose from .png, .svg, .pdf"),
    ):
        code, out, err = command(capsys, *words)
        assert code != 0 and not out and len(err.splitlines()) == 1 and message in err, err
    assert not (tmp_path / "model").exists()
