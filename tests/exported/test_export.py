"""A run becomes a model folder that says the same bits, holds nothing else, and can be carried anywhere."""

import json
import logging
import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from redgrape import nets, tree
from redgrape.data.examples import Examples
from redgrape.data.prepare import prepare
from redgrape.determinism import same_bits_everywhere
from redgrape.errors import ConfigError, DataError, RedgrapeError, StorageError
from redgrape.exported.card import plain
from redgrape.exported.export import export
from redgrape.exported.inference import evaluate_model, names_test_set, predict_file, read_inputs, read_labelled
from redgrape.exported.model import Model, load_model
from redgrape.learning import sums
from redgrape.method import ServerSite
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run

NAMES = ["<b>|x", "two words", "`c_3`\n# title"]
SIDE = 8


def pictures(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise with a bright band whose place tells the class."""
    random = np.random.default_rng(seed)
    y = np.arange(n) % len(NAMES)
    x = random.integers(0, 100, (n, SIDE, SIDE), dtype=np.uint8)
    for c in range(len(NAMES)):
        x[y == c, 2 * c : 2 * c + 2] += 120
    return x, y


def carry_out(folder: Path, **values: Any) -> SimpleNamespace:
    experiment = Experiment.parse(
        {
            "rounds": 2,
            "seed": 3,
            **values,
            "data": {"clients": 3, "imbalance": "exponential", "ir": 4.0, "alpha": 10.0, **values["data"]},
        }
    )
    steps = list(Run(RunFolder.create(folder, experiment), workers=1).steps())
    return SimpleNamespace(
        path=folder,
        experiment=experiment,
        server=steps[-1].state.server,
        test=steps[-1].record["test"],
        federation=prepare(experiment.data, experiment.seed),
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a secret place")


@pytest.fixture(scope="module")
def image_run(root: Path) -> SimpleNamespace:
    """RedGrape with the cnn from initial weights, on 8x8 images and 300 of them for testing: more than one batch."""
    (x, y), (x_test, y_test) = pictures(120, 0), pictures(300, 1)
    np.savez(root / "pictures.npz", x=x, y=y, x_test=x_test, y_test=y_test, class_names=np.array(NAMES))
    start = nets.build("cnn", (1, SIDE, SIDE), 3, seed=9).state_dict()
    safetensors.torch.save_file(start, root / "start.safetensors")
    run = carry_out(
        root / "image run",
        data={"source": str(root / "pictures.npz")},
        net={"name": "cnn", "weights": str(root / "start.safetensors")},
        method={"name": "redgrape", "threshold": math.inf, "lr": 0.1, "batch_size": 8},
    )
    (root / "start.safetensors").unlink()  # from here on nothing may need it
    return run


@pytest.fixture(scope="module")
def vector_run(root: Path) -> SimpleNamespace:
    random = np.random.default_rng(0)
    y = np.arange(90) % 3
    x = (random.normal(size=(90, 5)) + y[:, None]).astype(np.float32)
    np.savez(root / "vectors.npz", x=x, y=y)
    return carry_out(
        root / "vector run",
        data={"source": str(root / "vectors.npz")},
        net={"name": "mlp"},
        method={"name": "fedavg"},
    )


@pytest.fixture(scope="module")
def image_folder(image_run: SimpleNamespace, root: Path) -> Path:
    return export(image_run.path, root / "models" / "image")


@pytest.fixture(scope="module")
def onnx_folder(image_run: SimpleNamespace, root: Path) -> Path:
    return export(image_run.path, root / "models" / "image onnx", "onnx")


@pytest.fixture(scope="module")
def model(image_folder: Path) -> Model:
    return load_model(image_folder)


def run_logits(run: SimpleNamespace, name: str) -> torch.Tensor:
    """The logits of the run's own evaluation on its test set."""
    test = run.federation.test
    shape, cpu = tuple(test.x.shape[1:]), torch.device("cpu")
    site = ServerSite(lambda: nets.build(name, shape, 3, 0), 3, 3, 0, 0, 1, cpu)
    with same_bits_everywhere():
        net = site.load(run.server["model"]).eval()
        return torch.cat([sums.logits(net, test, start, cpu) for start in sums.batch_starts(test)])


def raw(run: SimpleNamespace) -> torch.Tensor:
    test = run.federation.test
    return test.x if test.rows is None else test.x[test.rows]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return tree.equal({"t": a}, {"t": b})


def test_the_model_gives_the_bits_of_the_runs_own_evaluation(image_run: SimpleNamespace, model: Model) -> None:
    x = raw(image_run)
    expected = run_logits(image_run, "cnn")
    assert set(expected.argmax(dim=1).tolist()) == {0, 1, 2}
    assert same_bits(model.logits(x), expected)
    assert same_bits(model(x), expected.softmax(dim=1))
    assert model.predict(x[:7]) == [NAMES[c] for c in expected[:7].argmax(dim=1)]


def test_every_arrangement_of_the_pixels_gives_the_same_bits(image_run: SimpleNamespace, model: Model) -> None:
    x = raw(image_run)
    expected = model.logits(x)
    assert same_bits(model.logits(x[:, 0]), expected)
    assert same_bits(model.logits(x.movedim(1, 3).contiguous()), expected)
    assert same_bits(model.logits(x.numpy()), expected)
    assert same_bits(model.logits(np.flip(np.flip(x.numpy(), 0), 0)), expected)


def test_vectors_too(vector_run: SimpleNamespace, tmp_path: Path) -> None:
    model = load_model(export(vector_run.path, tmp_path / "model"))
    assert same_bits(model.logits(raw(vector_run)), run_logits(vector_run, "mlp"))
    assert model.class_names == ["0", "1", "2"]
    with pytest.raises(DataError, match=r"float32 of shape \[2, 4\]; the model takes floats of shape \[n, 5\]"):
        model(torch.zeros(2, 4))


def test_the_evaluation_of_the_model_is_that_of_the_run(image_run: SimpleNamespace, model: Model) -> None:
    scores = evaluate_model(model, image_run.federation.test)
    assert scores["accuracy"] == image_run.test["accuracy"]
    assert scores["balanced"] == image_run.test["balanced"]
    assert scores["nll"] == image_run.test["loss"]
    assert [row["recall"] for row in scores["per_class"]] == image_run.test["per_class"]


def test_the_file_holds_encoder_and_classifier_only(image_run: SimpleNamespace, image_folder: Path) -> None:
    assert {"W_hat", "prototypes"} <= set(image_run.server)
    data = (image_folder / "model.safetensors").read_bytes()
    assert set(safetensors.torch.load(data)) == set(nets.build("cnn", (1, SIDE, SIDE), 3, 0).state_dict())
    assert image_run.server["model"]["classifier.weight"].numpy().tobytes() in data
    assert image_run.server["W_hat"]["weight"].numpy().tobytes() not in data
    names = ["README.md", "SHA256SUMS", "model.json", "model.safetensors"]
    assert sorted(file.name for file in image_folder.iterdir()) == names


def test_a_copied_folder_needs_nothing_else(image_run: SimpleNamespace, image_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(image_folder, tmp_path / "elsewhere")
    hidden = image_run.path.rename(image_run.path.with_name("hidden"))
    try:
        assert same_bits(load_model(str(copy)).logits(raw(image_run)), run_logits(image_run, "cnn"))
    finally:
        hidden.rename(image_run.path)


def test_onnx_agrees_and_has_the_preprocessing_inside(image_run: SimpleNamespace, onnx_folder: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = load_model(onnx_folder)
    x, expected = raw(image_run), run_logits(image_run, "cnn")
    torch.testing.assert_close(model.logits(x), expected, atol=1e-5, rtol=0)
    session = onnxruntime.InferenceSession(onnx_folder / "model.onnx")
    for n in (1, 5):
        (logits,) = session.run(["logits"], {"pixels": x[:n].numpy()})
        np.testing.assert_allclose(logits, expected[:n], atol=1e-5, rtol=0)


def test_onnx_of_vectors(
    vector_run: SimpleNamespace, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("onnxruntime")
    model = load_model(export(vector_run.path, tmp_path / "model", "onnx"))
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    torch.testing.assert_close(model.logits(raw(vector_run).double()), run_logits(vector_run, "mlp"), atol=1e-5, rtol=0)


def test_no_file_names_a_place_on_this_machine(root: Path, image_folder: Path, onnx_folder: Path) -> None:
    for file in [*image_folder.iterdir(), *onnx_folder.iterdir()]:
        data = file.read_bytes()
        for place in (root, Path(nets.__file__).parent, Path(torch.__file__).parent):
            assert str(place).encode() not in data
        assert b"a secret place" not in data
        assert b".py" not in data


def test_exporting_twice_gives_the_same_files(image_run: SimpleNamespace, image_folder: Path, tmp_path: Path) -> None:
    again = export(image_run.path, tmp_path / "again")
    assert all((again / file.name).read_bytes() == file.read_bytes() for file in image_folder.iterdir())


def test_onnx_without_its_packages(
    image_run: SimpleNamespace, onnx_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[onnx\]'"):
        export(image_run.path, tmp_path / "model", "onnx")
    with pytest.raises(ConfigError, match=r"pip install -e '.\[onnx\]'"):
        load_model(onnx_folder)
    assert not (tmp_path / "model").exists()


def test_where_a_model_is_not_written(image_run: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        export(image_run.path, tmp_path / "full")
    with pytest.raises(ConfigError, match="unknown format 'onxx'; did you mean 'onnx'"):
        export(image_run.path, tmp_path / "new", "onxx")  # type: ignore[arg-type]
    (tmp_path / "empty").mkdir()
    assert load_model(export(image_run.path, tmp_path / "empty")).class_names == NAMES
    with pytest.raises(StorageError, match="not a run folder"):
        export(tmp_path, tmp_path / "new")
    RunFolder.create(tmp_path / "begun", image_run.experiment)
    with pytest.raises(StorageError, match="no checkpoint yet"):
        export(tmp_path / "begun", tmp_path / "new")


def test_figures_of_another_round_are_not_given(image_run: SimpleNamespace, tmp_path: Path) -> None:
    """The newest checkpoint is lost: a finished run has no model then, and one that is not finished that of round 1."""
    run = shutil.copytree(image_run.path, tmp_path / "run", ignore=shutil.ignore_patterns("SHA256SUMS"))
    shutil.rmtree(run / "checkpoints" / "round-000002")
    with pytest.raises(StorageError, match="its model is lost"):
        export(run, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    (run / "summary.json").unlink()
    with pytest.raises(StorageError, match="its model is lost"):
        export(run, tmp_path / "model")
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(lines[0])
    out = export(run, tmp_path / "model")
    facts = load_model(out).card["run"]
    assert facts["round"] == 1 and facts["mean_of_last"] is None
    assert facts["last"] == RunFolder(run).metrics()[0]["test"]
    assert "after round 1 of 2. The run was not finished" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("model.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1]), "is damaged: its SHA-256"),
        ("model.safetensors", lambda data: data[:100], "is damaged: its SHA-256"),
        ("model.json", lambda data: data[:100], "is damaged"),
        ("model.json", lambda data: b"[]", "is damaged"),
        ("model.json", lambda data: b"\xff\xfe", "is damaged"),
        ("model.json", lambda data: data.replace(b'"format": 1,', b'"format": 99,'), "format 99, newer"),
        ("model.json", lambda data: data.replace(b'"net": "cnn"', b'"net": "mlp"'), "does not hold the weights"),
        ("model.json", lambda data: data.replace(b'"net": "cnn"', b'"net": "cmm"', 1), "unknown net 'cmm'"),
        ("model.json", lambda data: data.replace(b'"safetensors"', b'"../../evil"'), "is damaged"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(
    image_folder: Path, tmp_path: Path, file: str, change: Any, message: str
) -> None:
    copy = shutil.copytree(image_folder, tmp_path / "copy", ignore=shutil.ignore_patterns("SHA256SUMS"))
    before = (copy / file).read_bytes()
    (copy / file).write_bytes(change(before))
    assert (copy / file).read_bytes() != before
    with pytest.raises(RedgrapeError, match=message) as caught:
        load_model(copy)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no model\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((2, 1, 9, 9), np.uint8),
        np.zeros((2, 3, SIDE, SIDE), np.uint8),
        np.zeros((2, 1, SIDE, SIDE), np.float32),
        np.zeros((2, SIDE * SIDE), np.uint8),
        np.zeros(4, np.uint8),
        np.array(3, np.uint8),
        torch.zeros(2, 1, SIDE, SIDE, dtype=torch.int64),
    ],
)
def test_wrong_inputs_are_refused_in_one_line(model: Model, x: Any) -> None:
    with pytest.raises(DataError) as caught:
        model(x)
    assert "\n" not in str(caught.value)


def test_what_the_line_says(model: Model) -> None:
    with pytest.raises(
        DataError, match=r"^inputs are uint8 of shape \[2, 9, 9\]; the model takes uint8 pixels of shape"
    ):
        model(np.zeros((2, 9, 9), np.uint8))
    assert model.takes == "uint8 pixels of shape [n, 1, 8, 8] or [n, 8, 8] or [n, 8, 8, 1]"
    with pytest.raises(ConfigError, match="batch is 0"):
        model(np.zeros((2, SIDE, SIDE), np.uint8), batch=0)
    assert model(np.zeros((0, SIDE, SIDE), np.uint8)).shape == (0, 3)


def test_the_card(image_run: SimpleNamespace, image_folder: Path, model: Model) -> None:
    text = (image_folder / "README.md").read_text()
    assert all(plain(name) in text for name in NAMES)
    facts = image_run.experiment, image_run.federation.fingerprint()
    for words in (
        "redgrape on pictures.npz",
        facts[1],
        "imbalance ratio of 4",
        "clients: 3, by the partition class\\_dirichlet with alpha 10",
        "| lam | 0.1 |",
        "| threshold | inf |",
        "from start.safetensors",
        "after round 2 of 2.",
        f"{100 * image_run.test['accuracy']:.1f} %",
        'load_model("path/to/this/folder")',
        "divided by 255",
        "expose which classes a client holds",
        "exact feature vector",
    ):
        assert words in text
    assert model.card == json.loads((image_folder / "model.json").read_text())
    assert model.card["run"]["split"] == facts[1]
    assert model.card["run"]["experiment"]["method"]["threshold"] == "inf"


def test_only_paths_lose_their_folders(tmp_path: Path) -> None:
    """The source and a matrix of the user's do; columns and classes with slashes do not."""
    rows = [f"{i % 9},{'a/x' if i % 2 else 'b/x'}" for i in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["m/s,kind", *rows]))
    (tmp_path / "own.csv").write_text("client,p,q\nnorth,10,4\nsouth,5,6\n")
    data = {
        "source": str(tmp_path / "rows.csv"),
        "label": "kind",
        "categorical": ["m/s"],
        "imbalance": "natural",
        "tail_classes": ["b/x"],
        "partition": f"like:{tmp_path / 'own.csv'}",
    }
    run = carry_out(tmp_path / "run", rounds=1, data=data, net={"name": "linear"}, method={"name": "fedavg"})
    out = export(run.path, tmp_path / "model")
    kept = load_model(out).card["run"]["experiment"]["data"]
    assert kept | {"source": "rows.csv", "partition": "like:own.csv"} == kept
    assert (kept["label"], kept["categorical"], kept["tail_classes"]) == ("kind", ["m/s"], ["b/x"])
    assert str(tmp_path) not in (out / "model.json").read_text()
    assert "by the partition like\\:own.csv\n" in (out / "README.md").read_text()


def test_names_cannot_break_the_card(image_folder: Path) -> None:
    """Every row of a table has as many cells as its head, and no name has become markup."""
    text = (image_folder / "README.md").read_text()
    assert not re.search(r"(?<!\\)<b|(?<!\\)`c|^# title", text, re.MULTILINE)
    cells = 0
    for line in text.splitlines():
        if line.startswith("|"):
            found = len(re.findall(r"(?<!\\)\|", line))
            cells = cells or found
            assert found == cells
        else:
            cells = 0
    assert plain("a\\|b\u202e\tc") == "a\\\\\\|b c"


def test_only_redgrape_speaks_of_prototypes(vector_run: SimpleNamespace, tmp_path: Path) -> None:
    text = (export(vector_run.path, tmp_path / "model") / "README.md").read_text()
    assert "prototype" not in text
    assert "## Privacy" in text


@pytest.mark.parametrize(
    ("where", "words"),
    [({"pooled": True}, "the examples of all clients in one place"), ({"alone": "1"}, "the client 1 alone")],
)
def test_the_card_of_a_model_without_a_federation(tmp_path: Path, where: dict[str, Any], words: str) -> None:
    x, y = pictures(60, 0)
    np.savez(tmp_path / "small.npz", x=x / 255, y=y, x_test=x / 255, y_test=y)
    run = carry_out(
        tmp_path / "run", data={"source": str(tmp_path / "small.npz"), **where}, net={"name": "linear"}, rounds=1
    )
    text = (export(run.path, tmp_path / "model") / "README.md").read_text()
    assert text.count(words) == 3  # what it is, its data, its privacy
    assert "clients in each: all" in text and "from none" not in text
    assert "ederated" not in text and "partition" not in text
    assert "| accuracy | round 1 |\n" in text and "accuracy, round 1 |\n" in text  # no mean of a single round
    assert "several rounds" not in text


def given(class_names: list[str], probabilities: Any, labels: list[int]) -> dict[str, Any]:
    """The evaluation of a model that gives these probabilities."""
    p = torch.tensor(probabilities, dtype=torch.float64)
    card = {"class_names": class_names, "input": {"shape": [len(class_names)], "dtype": "float"}}
    return evaluate_model(Model(card, torch.log), Examples(p, torch.tensor(labels, dtype=torch.int64)))


def sure_of(predicted: list[int]) -> list[list[float]]:
    return [[0.8 if c == p else 0.1 for c in range(3)] for p in predicted]


def test_scores_of_three_classes() -> None:
    """Confusion (rows are the truth)       support  recall  precision      F1 = 2 TP / (support + predicted)
        3 1 0                                  4       3/4      3/4         6 / (4 + 4) = 3/4
        1 2 0                                  3       2/3      2/4         4 / (3 + 4) = 4/7
        0 1 2                                  3       2/3      2/2         4 / (3 + 2) = 4/5
    accuracy 7/10; balanced (3/4 + 2/3 + 2/3) / 3 = 25/36; macro F1 (3/4 + 4/7 + 4/5) / 3 = 99/140.
    Each prediction has 0.8 for its class and 0.1 for the others:
        nll    -(7 ln 0.8 + 3 ln 0.1) / 10
        brier  right: 0.2² + 2 * 0.1² = 0.06; wrong: 0.8² + 0.9² + 0.1² = 1.46; (7 * 0.06 + 3 * 1.46) / 10 = 0.48
        ece    all in one bin: |0.7 - 0.8| = 0.1
    """
    scores = given(list("abc"), sure_of([0, 0, 0, 1, 0, 1, 1, 1, 2, 2]), [0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    assert scores["confusion"] == [[3, 1, 0], [1, 2, 0], [0, 1, 2]]
    assert scores["examples"] == 10
    assert scores["accuracy"] == pytest.approx(7 / 10)
    assert scores["balanced"] == pytest.approx(25 / 36)
    assert scores["macro_f1"] == pytest.approx(99 / 140)
    assert scores["nll"] == pytest.approx(-(7 * math.log(0.8) + 3 * math.log(0.1)) / 10)
    assert scores["brier"] == pytest.approx(0.48)
    assert scores["ece"] == pytest.approx(0.1)
    columns = {key: [row[key] for row in scores["per_class"]] for key in scores["per_class"][0]}
    assert columns["class"] == ["a", "b", "c"]
    assert columns["support"] == [4, 3, 3]
    assert columns["recall"] == pytest.approx([3 / 4, 2 / 3, 2 / 3])
    assert columns["precision"] == pytest.approx([3 / 4, 2 / 4, 1])
    assert columns["f1"] == pytest.approx([3 / 4, 4 / 7, 4 / 5])


def test_calibration_of_four_predictions() -> None:
    """Two bins are hit. (13/15, 14/15] has 0.9 twice, once right: |1/2 - 0.9| = 0.4. (9/15, 10/15] has 0.62 and 0.65,
    both right: |1 - 0.635| = 0.365. Half of the examples in each: ece = 0.2 + 0.1825.
    brier with two classes is the mean of 2 (1 - p_y)²: 2 (0.01 + 0.81 + 0.1444 + 0.1225) / 4 = 0.54345.
    """
    scores = given(["a", "b"], [[0.9, 0.1], [0.9, 0.1], [0.38, 0.62], [0.65, 0.35]], [0, 1, 1, 0])
    assert scores["ece"] == pytest.approx(0.3825)
    assert scores["brier"] == pytest.approx(0.54345)
    assert scores["nll"] == pytest.approx(-sum(math.log(p) for p in (0.9, 0.1, 0.62, 0.65)) / 4)


def test_classes_without_examples_or_predictions() -> None:
    """b has examples and is never predicted: recall and F1 are 0, precision is unknown. c has none: all unknown."""
    scores = given(list("abc"), sure_of([0, 0, 2]), [0, 1, 1])
    a, b, c = scores["per_class"]
    assert (a["precision"], a["recall"], a["f1"]) == (1 / 2, 1, 2 / 3)
    assert (b["precision"], b["recall"], b["f1"]) == (None, 0, 0)
    assert (c["support"], c["precision"], c["recall"], c["f1"]) == (0, None, None, None)
    assert (scores["balanced"], scores["macro_f1"]) == (1 / 2, 1 / 3)
    json.dumps(scores, allow_nan=False)


def test_nothing_and_nonsense_to_evaluate() -> None:
    with pytest.raises(DataError, match="no examples"):
        given(list("ab"), np.zeros((0, 2)), [])
    with pytest.raises(DataError, match="label 2 is outside"):
        given(list("ab"), [[0.5, 0.5]], [2])
    with pytest.raises(DataError, match="NaN or infinite"):
        given(list("ab"), [[0.5, math.nan]], [1])


@pytest.fixture
def image_files(tmp_path: Path) -> Path:
    """Three images: of the model's size, larger, and in colour."""
    Image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "new"
    (folder / "deep" / "er").mkdir(parents=True)
    x, _ = pictures(3, 5)
    Image.fromarray(x[0]).save(folder / "a.png")
    Image.fromarray(x[1]).resize((SIDE * 2, SIDE * 3)).save(folder / "deep" / "b.bmp")
    Image.fromarray(x[2]).convert("RGB").save(folder / "deep" / "er" / "c.PNG")
    (folder / "notes.txt").write_text("not an image")
    (folder / ".hidden.png").write_text("not an image")
    return folder


def test_predicting_images(model: Model, image_files: Path) -> None:
    x, _ = pictures(3, 5)
    inputs, names = read_inputs(image_files, model)
    assert names == ["a.png", "deep/b.bmp", "deep/er/c.PNG"]
    assert (inputs.shape, inputs.dtype) == ((3, 1, SIDE, SIDE), np.uint8)
    assert (inputs[0, 0] == x[0]).all() and (inputs[2, 0] == x[2]).all()
    single, name = read_inputs(image_files / "a.png", model)
    assert name == ["a.png"] and (single == inputs[:1]).all()

    rows = predict_file(image_files, model)
    p = model(inputs)
    assert [row.name for row in rows] == names
    assert [row.label for row in rows] == model.predict(inputs)
    assert [row.probability for row in rows] == p.amax(dim=1).tolist()
    assert [row.runner_up_probability for row in rows] == p.sort(dim=1).values[:, 1].tolist()
    assert all(row.runner_up != row.label for row in rows)


def test_predicting_arrays(vector_run: SimpleNamespace, model: Model, tmp_path: Path) -> None:
    x, _ = pictures(4, 5)
    np.savez_compressed(tmp_path / "new.npz", x=x)
    assert [row.label for row in predict_file(tmp_path / "new.npz", model)] == model.predict(x)
    vectors = load_model(export(vector_run.path, tmp_path / "model"))
    np.savez(tmp_path / "vectors.npz", x=np.ones((2, 5), ">f8"))
    assert [row.name for row in predict_file(tmp_path / "vectors.npz", vectors)] == ["0", "1"]


def test_files_that_cannot_be_predicted(vector_run: SimpleNamespace, model: Model, image_files: Path) -> None:
    vectors = load_model(export(vector_run.path, image_files / "model"))
    (image_files / "broken.png").write_bytes((image_files / "a.png").read_bytes()[:40])
    (image_files / "broken.npz").write_bytes(b"PK\x03\x04 and nothing more")
    np.savez(image_files / "other.npz", z=np.zeros(3))
    np.savez(image_files / "size.npz", x=np.zeros((2, 9, 9), np.uint8))
    (image_files / "empty").mkdir()
    (image_files / "new.xlsx").write_bytes(b"PK")
    for name, used, message in (
        ("broken.png", model, r"broken\.png cannot be read as an image"),
        ("broken.npz", model, r"broken\.npz cannot be read"),
        ("notes.txt", model, r"notes\.txt cannot be read as an image"),
        ("other.npz", model, "no array `x`; it has z"),
        ("size.npz", model, r"shape \[2, 1, 9, 9\]; the model takes"),
        ("empty", model, "holds no images"),
        ("missing.png", model, "does not exist"),
        ("new.xlsx", model, r"'\.xlsx' is not read; save it as \.csv"),
        ("a.png", vectors, r"the model takes floats of shape \[n, 5\], not images"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            predict_file(image_files / name, used)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"'\.xlsx' is not read"):
        read_labelled(image_files / "new.xlsx", model)


@pytest.fixture(scope="module")
def named_model(model: Model) -> Model:
    """The model with names that can be folders."""
    return Model({**model.card, "class_names": ["zebra", "ape", "cat"]}, model._forward)


def test_labelled_folders_are_numbered_as_the_model_numbers(named_model: Model, tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    x, _ = pictures(3, 5)
    for place in (tmp_path / "flat", tmp_path / "split" / "test"):
        for name, count in (("ape", 2), ("zebra", 1)):  # a model's class may be absent
            (place / name).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(x[i]).save(place / name / f"{i}.png")
    (tmp_path / "split" / "train" / "ape").mkdir(parents=True)
    for data in (tmp_path / "flat", tmp_path / "split"):
        examples = read_labelled(data, named_model)
        assert examples.labels.tolist() == [1, 1, 0]
        assert (examples.x[:, 0].numpy() == x[[0, 1, 0]]).all()
        assert evaluate_model(named_model, examples)["per_class"][2]["recall"] is None
    (tmp_path / "split" / "train").rename(tmp_path / "split" / "val")
    with pytest.raises(DataError, match="holds the folders test, val; name them train and test"):
        read_labelled(tmp_path / "split", named_model)
    (tmp_path / "flat" / "dog").mkdir()
    Image.fromarray(x[0]).save(tmp_path / "flat" / "dog" / "0.png")
    with pytest.raises(DataError, match="class 'dog' that the model does not know; its classes are zebra, ape, cat"):
        read_labelled(tmp_path / "flat", named_model)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="no sub-folders"):
        read_labelled(tmp_path / "none", named_model)


def test_labelled_images_are_read_as_for_training(named_model: Model, tmp_path: Path) -> None:
    """In folders of sites, and in a manifest with or without a test set."""
    Image = pytest.importorskip("PIL.Image")
    x, _ = pictures(3, 5)
    for i, place in enumerate(("north/ape", "north/zebra", "south/cat")):
        (tmp_path / "sites" / place).mkdir(parents=True)
        Image.fromarray(x[i]).save(tmp_path / "sites" / place / "0.png")
    assert read_labelled(tmp_path / "sites", named_model).labels.tolist() == [1, 0, 2]
    assert not names_test_set(tmp_path / "sites", named_model)
    manifest = tmp_path / "sites" / "manifest.csv"
    for split, kept in (("train", [0, 1, 2]), ("test", [1])):
        manifest.write_text(
            f"path,label,split\nnorth/ape/0.png,ape,train\nnorth/zebra/0.png,zebra,{split}\nsouth/cat/0.png,cat,train\n"
        )
        for data in (manifest, manifest.parent):
            examples = read_labelled(data, named_model)
            assert (examples.x[:, 0].numpy() == x[kept]).all()
            assert examples.labels.tolist() == [[1, 0, 2][i] for i in kept]
            assert names_test_set(data, named_model) == (split == "test")
    for name in ("nothing", "nothing.npz", "nothing.csv"):
        with pytest.raises(DataError, match=rf"{name}' does not exist; pass a folder of images, a manifest.csv"):
            read_labelled(tmp_path / name, named_model)


def test_labelled_arrays(image_run: SimpleNamespace, named_model: Model, root: Path, tmp_path: Path) -> None:
    x, _ = pictures(4, 5)
    y = np.array([0, 1, 1, 0])
    np.savez(tmp_path / "plain.npz", x=x, y=y)
    np.savez(tmp_path / "named.npz", x=x, y=y, class_names=np.array(["ape", "zebra"]))
    np.savez(tmp_path / "marked.npz", x=x, y=y, test=np.array([False, True, False, True]))
    assert read_labelled(tmp_path / "plain.npz", named_model).labels.tolist() == [0, 1, 1, 0]
    assert read_labelled(tmp_path / "named.npz", named_model).labels.tolist() == [1, 0, 0, 1]
    assert read_labelled(tmp_path / "marked.npz", named_model).labels.tolist() == [1, 0]
    assert evaluate_model(named_model, read_labelled(tmp_path / "marked.npz", named_model))["examples"] == 2
    np.savez(tmp_path / "short.npz", x=x, y=y[:3])
    with pytest.raises(DataError, match="one label for each row"):
        read_labelled(tmp_path / "short.npz", named_model)


def test_the_runs_own_file_gives_its_test_set(image_run: SimpleNamespace, model: Model, root: Path) -> None:
    scores = evaluate_model(model, read_labelled(root / "pictures.npz", model))
    assert (scores["accuracy"], scores["nll"]) == (image_run.test["accuracy"], image_run.test["loss"])
