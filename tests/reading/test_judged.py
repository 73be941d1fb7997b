"""Every table says by how many examples each class is judged, and names the classes that have too few."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from redgrape.cli import main as cli
from redgrape.data.user_data import held_out_rows
from redgrape.reading import judged

NONE = "no test example of class broken, which no figure judges"
FEW = "fewer than 10 test examples of class cracked (5): one is over 10 points of accuracy"
OVER = "3 of 4 classes"


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four classes with 30, 15, 5 and no test examples."""
    y = np.repeat([0, 1, 2, 3], [90, 40, 20, 12])
    x = np.random.default_rng(0).normal(size=(len(y), 4)).astype(np.float32)
    tests = {0: 30, 1: 15, 2: 5, 3: 0}
    first = {c: int(np.flatnonzero(y == c)[0]) for c in tests}
    test = np.array([row - first[c] < tests[c] for row, c in enumerate(y.tolist())])
    path = tmp_path_factory.mktemp("sites") / "sites.npz"
    np.savez(path, x=x, y=y, test=test, class_names=np.array(["normal", "worn", "cracked", "broken"]))
    return path


@pytest.fixture(scope="module")
def run(sites: Path) -> Path:
    folder = sites.parent / "run"
    words = ["--data", str(sites), "--net", "linear", "--clients", "2", "--rounds", "1", "--method", "fedavg"]
    assert cli.run(["run", *words, "--partition", "iid", "--workers", "1", "--quiet", "--out", str(folder)]) == 0
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert cli.run([str(word) for word in words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_every_reader_is_told(
    run: Path, sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """data show, the tables of a run, of show and of compare, the model's card and the page; all at 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    data = ["--data", sites, "--clients", 2, "--partition", "iid"]
    shown = said(capsys, "data", "show", *data)
    assert NONE in shown
    assert FEW in shown
    assert "cracked 15/5" in shown
    assert json.loads(said(capsys, "data", "show", *data, "--json"))["test_counts"] == [30, 15, 5, 0]
    training = ["--net", "linear", "--rounds", 1, "--workers", 1, "--quiet"]
    for words in (["show", run], ["compare", "fedavg", *data, *training, "--out", "compared"]):
        table = said(capsys, *words)
        assert NONE in table
        assert FEW in table
        assert f"class-balanced is over {OVER}" in table
    assert " broken 12 0 – " in f"{said(capsys, 'show', run)} "
    assert json.loads(said(capsys, "show", run, "--json"))["test_counts"] == [30, 15, 5, 0]
    written = (tmp_path / "compared" / "table.md").read_text()
    assert NONE in written
    assert f"class-balanced is over {OVER}" in written
    said(capsys, "export", run, "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"Note: {NONE}." in card
    assert f"class-balanced ({OVER})" in card
    assert "| broken | tail | 12 | 0 | – |" in card
    said(capsys, "report", run)
    page = (tmp_path / "report.html").read_text()
    assert NONE in page
    assert f"class-balanced is over {OVER}" in page
    assert '"tested":[30,15,5,0]' in page


def test_where_nothing_was_written_down_the_confusion_matrix_tells(run: Path) -> None:
    """Of a deployment, and of a run from before the counts were in environment.json."""
    environment = json.loads((run / "environment.json").read_bytes())
    summary = json.loads((run / "summary.json").read_bytes())
    assert judged.counts_of(environment, summary) == judged.counts_of({}, summary) == [30, 15, 5, 0]
    assert judged.counts_of({}, None) is None
    assert judged.counts_of(environment, summary, "validation") is None


def test_what_is_noted() -> None:
    names = ["a", "b", "c"]
    assert judged.notes(names, [10, 10, 10], [5, 5, 5]) == []
    assert judged.notes(names, None, None) == []
    assert judged.notes(names, [10, 10, 10], [5, 0, 5]) == [
        "no training example of class b, which cannot be recognised"
    ]
    assert judged.notes(names, [0, 0, 10], None) == ["no test example of classes a, b, which no figure judges"]
    assert "c7 (1) and 4 more" in judged.notes([f"c{i}" for i in range(12)], [1] * 12, None)[0]
    assert (judged.over_classes([1, 2]), judged.over_classes([0, 2])) == ("", "1 of 2 classes")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9, 100])
def test_the_automatic_hold_out_has_every_class_of_two_examples(size: int) -> None:
    labels = np.repeat([0, 1], [size, 50])
    held_out = np.bincount(labels[held_out_rows(labels, 2, seed=0)], minlength=2)
    assert held_out[0] >= (size > 1)
    assert held_out[0] < size


def test_rare_classes_that_validation_took_from() -> None:
    """Ten of c are left, which is not few; of b validation took none."""
    (note,) = judged.taken(["a", "b", "c"], [3, 0, 3], [4, 4, 10])
    assert note.startswith("validation took training examples of class a (3 of 7);")
    assert judged.taken(["a"], None, [4]) == judged.taken(["a"], [3], None) == []
