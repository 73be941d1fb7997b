"""A model of a table takes raw rows: from its run, from its folder, from a DataFrame."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redgrape.cli import main as cli
from redgrape.errors import DataError
from redgrape.exported.export import export, open_model
from redgrape.exported.inference import evaluate_model, names_test_set, predict_file, read_labelled
from redgrape.exported.model import load_model
from redgrape.runs import checksums
from redgrape.runs.run import run

HEAD = "age,colour,site,fold,kind"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("table")
    random = np.random.default_rng(0)
    lines = [HEAD]
    for i in range(200):
        rare = i % 5 == 0
        age = "" if i % 7 == 0 else round(random.normal(30 + 30 * rare, 5), 1)
        fold = "test" if i % 4 == 0 else "train"
        lines.append(f"{age},{random.choice(['red', 'blue'])},{'NS'[i % 2]},{fold},{['well', 'ill'][rare]}")
    (folder / "rows.csv").write_text("\n".join(lines))
    data = {"source": str(folder / "rows.csv"), "label": "kind", "site": "site", "test": "fold"}
    done = run({"rounds": 3, "data": data, "method": {"name": "fedavg", "lr": 0.1}}, folder / "run")
    export(folder / "run", folder / "model")
    return folder, done


def test_a_table_gets_a_net_for_vectors(trained: Any) -> None:
    _, done = trained
    assert done.experiment().net.name == "mlp" and done.experiment().data.partition == "natural"


def test_raw_rows_give_the_figures_of_the_run(trained: Any) -> None:
    folder, done = trained
    for model in (open_model(folder / "run"), load_model(folder / "model")):
        scores = evaluate_model(model, read_labelled(folder / "rows.csv", model))
        assert scores["examples"] == 50 and scores["accuracy"] == done.summary()["last"]["accuracy"]
        assert names_test_set(folder / "rows.csv", model)


def test_new_rows_with_holes_are_predicted(trained: Any, tmp_path: Path) -> None:
    folder, _ = trained
    model = load_model(folder / "model")
    new = tmp_path / "new.csv"
    new.write_text("colour,age,more\nred,60,x\ngreen,,y\n,NA,\n")
    told = predict_file(new, model)
    assert [p.name for p in told] == ["1", "2", "3"]
    assert told == predict_file(new, open_model(folder / "run"))
    frame = {"colour": ["red", "green", None], "age": [60.0, None, float("nan")]}
    assert model.predict(frame) == [p.label for p in told]
    assert float(model(frame)[0].max()) == pytest.approx(told[0].probability)
    (tmp_path / "labelled.csv").write_text("colour,age,kind\nred,60,ill\nblue,30,well\n")
    assert len(read_labelled(tmp_path / "labelled.csv", model)) == 2  # no column of the test set: all rows
    assert not names_test_set(tmp_path / "labelled.csv", model)
    with pytest.raises(DataError, match=r"tables with the columns age, colour, or floats of shape \[n, 4\]"):
        model.predict(np.zeros((2, 3), np.float32))
    (tmp_path / "labelled.csv").write_text("colour,age,kind\nred,60,tired\n")
    with pytest.raises(DataError, match="class 'tired' that the model does not know"):
        read_labelled(tmp_path / "labelled.csv", model)


def test_values_that_the_model_does_not_know_are_told_of(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = trained
    new = tmp_path / "new.csv"
    note = "note: column 'colour': 2 of 3 values are unknown to the model (Blue, rouge); it knows blue, red"
    new.write_text("colour,age,kind\nrouge,60,ill\nBlue,40,well\nred,30,well\n,30,well\n")
    for words in (("predict", folder / "model"), ("predict", folder / "run"), ("evaluate", folder / "model")):
        assert cli.run([*map(str, words), str(new), "--json"]) == 0
        assert note in capsys.readouterr().err.splitlines()
    new.write_text("colour,age,kind\nred,60,ill\n,40,well\n")
    assert cli.run(["predict", str(folder / "model"), str(new)]) == 0
    assert capsys.readouterr().err == ""
    many = "\n".join(f"shade {i:02},60" for i in range(20))
    new.write_text(f"colour,age\n{many}\n")
    assert cli.run(["predict", str(folder / "model"), str(new)]) == 0
    assert "20 of 20 values are unknown to the model (shade 00, " in (err := capsys.readouterr().err)
    assert "shade 11, ...); it knows" in err


def test_onnx_takes_the_same_rows(trained: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    folder, _ = trained
    export(folder / "run", tmp_path / "onnx", "onnx")
    (tmp_path / "new.csv").write_text("colour,age\nred,60\n,\n")
    one, two = (predict_file(tmp_path / "new.csv", load_model(m)) for m in (tmp_path / "onnx", folder / "model"))
    assert [p.label for p in one] == [p.label for p in two]
    assert one[0].probability == pytest.approx(two[0].probability, abs=1e-5)
    assert "already scaled" in (tmp_path / "onnx" / "README.md").read_text()


def test_columns_that_do_not_fit_the_net_are_refused(trained: Any, tmp_path: Path) -> None:
    folder, _ = trained
    files = {f.name: f.read_bytes() for f in (folder / "model").iterdir() if f.name != checksums.NAME}
    card = json.loads(files["model.json"])
    card["input"]["table"]["columns"][1]["categories"].append("green")
    files["model.json"] = json.dumps(card).encode()
    for name, content in {**files, checksums.NAME: checksums.of(files)}.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match="its columns give 5 numbers"):
        load_model(tmp_path)


def test_the_card_names_the_columns(trained: Any) -> None:
    folder, _ = trained
    assert "with the columns age, colour." in (folder / "model" / "README.md").read_text()
