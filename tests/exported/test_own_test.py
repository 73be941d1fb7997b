"""`redgrape evaluate RUN`, and a tail that is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import redgrape as rg
from redgrape.cli import main as cli
from redgrape.cli.main import main
from redgrape.data.prepare import DataOptions, prepare
from redgrape.errors import ConfigError, DataError, StorageError
from redgrape.exported.export import export
from redgrape.exported.own_test import OwnModel
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run, run

NAMES = ["cat", "dog", "rare_syndrome", "mouse"]


def write_data(path: Path, seed: int = 0) -> Path:
    random = np.random.default_rng(seed)
    y, y_test = np.repeat(np.arange(4), [40, 30, 6, 12]), np.repeat(np.arange(4), [20, 10, 5, 9])
    x, x_test = (random.normal(size=(len(rows), 6)) + rows[:, None] for rows in (y, y_test))
    np.savez(path, x=x.astype("f4"), y=y, x_test=x_test.astype("f4"), y_test=y_test, class_names=np.array(NAMES))
    return path


def described(source: Path, tail: list[Any] | None = None) -> dict[str, Any]:
    data: dict[str, Any] = {"source": str(source), "clients": 3, "partition": "iid"}
    return {
        "rounds": 2,
        "data": data | ({} if tail is None else {"tail_classes": tail}),
        "net": {"name": "linear"},
        "method": {"name": "fedavg", "epochs": 1},
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data.npz")


def test_it_is_the_last_evaluation_of_the_run(source: Path, tmp_path: Path) -> None:
    folder = run(described(source, ["rare_syndrome", "cat"]), tmp_path / "run")
    scores, summary = OwnModel.open(folder.path).evaluate(), folder.summary()
    assert summary is not None
    for name in ("accuracy", "balanced", "macro_f1", "head", "tail"):
        assert scores[name] == summary["last"][name], name
    assert scores["confusion"] == summary["confusion"] and scores["nll"] == summary["last"]["loss"]
    assert [row["support"] for row in scores["per_class"]] == [20, 10, 5, 9]
    assert scores["class_counts"] == [40, 30, 6, 12]
    json.dumps(scores, allow_nan=False)
    card = (export(folder.path, tmp_path / "model") / "README.md").read_text()
    assert "The tail consists of the classes that the experiment names." in card and "macro F1" in card


def test_it_refuses_other_data_and_unfinished_runs(source: Path, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", rg.Experiment.parse(described(source)))
    steps = Run(folder, workers=1).steps()
    next(steps)
    steps.close()
    with pytest.raises(StorageError, match="is not finished; continue it"):
        OwnModel.open(folder.path)
    for _ in Run(RunFolder.open(folder.path), workers=1).steps():
        pass
    write_data(source, seed=1)
    with pytest.raises(DataError, match=r"has changed since it began: the data was \w+ and is \w+; restore"):
        OwnModel.open(folder.path)


def test_the_command_fits_80_columns(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = run(described(source), tmp_path / "run")

    def command(*words: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        return ended.value.code, *capsys.readouterr()

    code, out, _ = command("evaluate", str(folder.path))
    assert out.startswith("model of round 2 of 2\n")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    for words in ("rare_syndrome", "macro F1", "AUROC", "Brier score", "head", "tail", "precision", "95 %"):
        assert words in out
    code, out, _ = command("evaluate", str(folder.path), str(source))  # other data, without an export
    assert code == 0 and "macro F1" in out
    code, _, err = command("evaluate", str(export(folder.path, tmp_path / "model")))
    assert code != 0 and len(err.splitlines()) == 1 and "name labelled data" in err


def test_a_run_in_bfloat16_says_that_its_model_computes_in_float32(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for precision, told in (("float32", 0), ("bfloat16", 1)):
        folder = RunFolder.create(tmp_path / precision, rg.Experiment.parse(described(source)))
        for _ in Run(folder, workers=1, precision=precision).steps():
            pass
        card = (export(folder.path, tmp_path / f"model of {precision}") / "README.md").read_text()
        assert card.count("the encoder multiplied in bfloat16; the model computes in float32") == told
        assert cli.run(["evaluate", str(folder.path), "--json"]) == 0
        assert capsys.readouterr().err.count("note: the run's encoder multiplied in bfloat16; these figures") == told


def test_a_model_of_an_unfinished_run_is_told_of(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(tmp_path / "run", rg.Experiment.parse(described(source)))
    steps = Run(folder, workers=1).steps()
    next(steps)
    steps.close()
    note = "note: the run was not finished: this is its model of round 1 of 2\n"
    run, model = str(folder.path), str(tmp_path / "model")
    assert cli.run(["export", run, model]) == 0
    told = capsys.readouterr()
    assert told.err == note and "of round 1 of 2 (read" in told.out
    for path in (run, model):
        assert cli.run(["predict", path, str(source), "--json"]) == 0 and capsys.readouterr().err == note
        assert cli.run(["evaluate", path, str(source)]) == 0
        assert capsys.readouterr().out.startswith("model of round 1 of 2\n")
    for _ in Run(RunFolder.open(folder.path), workers=1).steps():
        pass
    assert cli.run(["predict", run, str(source)]) == 0 and capsys.readouterr().err == ""


def test_a_tail_is_named(source: Path) -> None:
    def tail(**options: Any) -> tuple[int, ...]:
        return prepare(DataOptions(source=str(source), clients=3, partition="iid", **options), 0).groups.tail

    assert set(tail(tail_classes=("rare_syndrome", "cat"))) == {0, 2}
    assert set(tail(tail_classes=(1, "cat"))) == {0, 1}
    assert set(tail(imbalance="natural", tail_classes=(1,))) == {1}  # numbers are not ignored
    assert set(tail()) == {2, 3}  # by count
    cut = prepare(DataOptions(source=str(source), clients=3, imbalance="binary", ir=10, tail_classes=("dog",)), 0)
    assert cut.groups.tail == (1,) and cut.class_counts.tolist() == [40, 3, 6, 12]
    for wrong in ("Cat", 4, -1):
        with pytest.raises(ConfigError, match=r"tail_classes names .*from 'cat', 'dog', 'rare_syndrome', 'mouse'$"):
            tail(tail_classes=(wrong,))
