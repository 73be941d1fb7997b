"""More classes than a matrix or a line of text should hold: evaluation, records of rounds, and their readers."""

from __future__ import annotations

import base64
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import redgrape as rg
from redgrape.cli.main import main
from redgrape.data.federation import Groups
from redgrape.errors import StorageError
from redgrape.learning import evaluation, sums
from redgrape.reading import pictures, run_tables, run_view
from redgrape.reading.page.figures import page_data
from redgrape.reading.page.reading import Reading
from redgrape.runs.figures import LONGEST, packed, unpacked, unpacked_record
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run, run

CPU = torch.device("cpu")


def evaluated(C: int, n: int = 700) -> tuple[rg.Net, rg.Examples, torch.Tensor]:
    """A random net, examples whose labels it often knows, and its logits."""
    with torch.random.fork_rng():
        torch.manual_seed(C)
        net = rg.Net(nn.Identity(), nn.Linear(8, C)).double().eval()
        x = torch.randn(n, 8, dtype=torch.float64)
        z = net(x).detach()
        y = z.argsort(dim=1, descending=True)[torch.arange(n), torch.randint(0, 9, (n,)).clamp(max=C - 1)]
    return net, rg.Examples(x, y), z


@pytest.mark.parametrize("C", [7, 120, 400])
def test_counts_are_those_of_the_whole_matrix(C: int) -> None:
    net, examples, z = evaluated(C)
    starts = sums.batch_starts(examples)
    parts = [sums.of_batches(net, examples, starts[i : i + 1], CPU) for i in range(len(starts))]
    scores = evaluation.combine(parts)
    y, said = examples.labels, z.argmax(dim=1)
    matrix = torch.zeros(C, C, dtype=torch.int64).index_put_((y, said), torch.tensor(1), accumulate=True)
    assert scores.confusion is not None and scores.confusion.is_sparse == (C > sums.DENSE)
    assert torch.equal(scores.confusion.to_dense(), matrix)
    assert torch.equal(scores.tested, matrix.sum(1)) and torch.equal(scores.predicted, matrix.sum(0))
    assert torch.equal(scores.right, matrix.diagonal())
    assert scores.loss == pytest.approx(float(nn.functional.cross_entropy(z, y)), rel=1e-12)
    near = z.topk(min(5, C), dim=1).indices == y[:, None]
    assert scores.top is not None and int(scores.top.sum()) == int(near.any(dim=1).sum()) < len(y)
    assert evaluation.combine([sums.of_batches(net, examples, starts, CPU)]).record(Groups((0,), (), (1,))) == (
        scores.record(Groups((0,), (), (1,)))
    )


@pytest.mark.parametrize("C", [7, 99, 100, 400])
def test_what_sites_tell_adds_up_to_one_evaluation(C: int) -> None:
    """One site has a single class. With many classes nobody sends a matrix."""
    net, examples, _ = evaluated(C)
    order = examples.labels.argsort().numpy()
    alone = int((examples.labels == examples.labels.min()).sum())
    sites = [examples.take(order[:alone]), examples.take(order[alone:400]), examples.take(order[400:])]
    scored = [evaluation.combine([sums.of_batches(net, site, sums.batch_starts(site), CPU)]) for site in sites]
    told = [scores.shared() for scores in scored]
    for sent in told:
        assert {n: t.shape for n, t in sent.items() if n != "loss"} == evaluation.shared_shapes(C)
        assert sum(t.numel() for t in sent.values()) <= max(4 * C + 1, sums.DENSE**2)
    together = evaluation.of_shared(told)
    whole = evaluation.combine([sums.of_batches(net, examples, sums.batch_starts(examples), CPU)])
    assert together.is_possible() and all(scores.is_possible() for scores in scored)
    groups = Groups.by_count(examples.labels.bincount(minlength=C).tolist())
    assert together.record(groups) == {**whole.record(groups), "loss": pytest.approx(whole.loss)}
    assert ("top5" in whole.record(groups)) == (C >= 100)


def test_impossible_counts_are_seen() -> None:
    tested, right = torch.tensor([3, 2]), torch.tensor([1, 2])
    assert evaluation.Scores(tested, right, torch.tensor([1, 4]), 0.0).is_possible()
    assert not evaluation.Scores(tested, right, torch.tensor([1, 3]), 0.0).is_possible()  # not as many as tested
    assert not evaluation.Scores(tested, right, torch.tensor([4, 1]), 0.0).is_possible()  # right more than predicted
    assert not evaluation.Scores(tested, right, torch.tensor([1, 4]), 0.0, top=torch.tensor([0, 2])).is_possible()
    assert not evaluation.Scores(tested, right, torch.tensor([1, 4]), 0.0, top=torch.tensor([4, 2])).is_possible()


def test_rank_breaks_ties_by_the_number_of_the_class() -> None:
    z = torch.tensor([[1.0, 1.0, 1.0], [0.0, 2.0, 0.0], [0.0, 2.0, 2.0]])
    ranks = [sums.rank(z, torch.full((3,), c)).tolist() for c in range(3)]
    assert ranks == [[0, 1, 2], [1, 0, 0], [2, 2, 1]]
    assert all(ranks[c][row] == 0 for row, c in enumerate(z.argmax(dim=1).tolist()))


def test_classes_by_their_training_examples() -> None:
    counts = [101, 100, 20, 19, 0] * 20
    shots = Groups.by_count(counts).by_shots
    assert {name: sorted({counts[c] for c in classes}) for name, classes in shots.items()} == {
        "many": [101],
        "medium": [20, 100],
        "few": [0, 19],
    }
    assert sum(map(len, shots.values())) == 100
    assert not Groups.by_count(counts[:99]).by_shots and not Groups.by_count([0] * 100).by_shots


# Records


def test_long_lists_of_a_record_are_packed_and_come_back() -> None:
    per_class = [None, 0.1, 1 / 3, *[c / 400 for c in range(400)]]
    record: dict[str, Any] = {
        "round": 3,
        "clients": list(range(1000)),
        "lost": {"3": "zlib-d: is no list"},
        "class_contributors": list(range(400)),
        "class_released": [c % 2 == 0 for c in range(400)],
        "short": [0.5] * LONGEST,
        "names": ["a"] * 400,
        "test": {"accuracy": 0.5, "per_class": per_class},
    }
    line = json.dumps(packed(record))
    stored = json.loads(line)
    kept = ("round", "clients", "lost", "short", "names")
    assert {name: stored[name] for name in kept} == {name: record[name] for name in kept}
    assert all(isinstance(stored[name], str) for name in ("class_contributors", "class_released"))
    back = unpacked_record(stored)
    assert back == record and [type(v) for v in back["class_released"]] == [bool] * 400
    assert unpacked(per_class) is per_class and unpacked("text") == "text" and unpacked(None) is None


def test_a_line_of_8142_classes_is_small() -> None:
    shares = np.random.default_rng(0).integers(0, 4, 8142) / 3
    record = {"test": {"per_class": shares.tolist()}}
    assert len(json.dumps(packed(record))) < 8000 < 80_000 < len(json.dumps(record))


@pytest.mark.parametrize("spoil", [lambda t: t[:-8], lambda t: t[:20] + "!" + t[21:], lambda t: "zlib-q:" + t[7:39]])
def test_a_damaged_list_is_refused(spoil: Any) -> None:
    text = packed({"x": [0.25] * 301 + np.random.default_rng(0).random(30).tolist()})["x"]
    with pytest.raises(ValueError, match="packed list of numbers"):
        unpacked(spoil(text))


def test_a_bomb_is_not_unpacked() -> None:
    bomb = "zlib-d:" + base64.b64encode(zlib.compress(bytes(10**8))).decode()
    with pytest.raises(ValueError, match="longer than 10"):
        unpacked(bomb, 10)
    with pytest.raises(ValueError, match="longer than 0"):
        unpacked(bomb, 0)


# A run


C = 400


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    random = np.random.default_rng(0)
    counts = [150] * 4 + [30] * 16 + [2] * (C - 20)
    y, y_test = np.repeat(np.arange(C), counts), np.repeat(np.arange(1, C), 2)  # class 0 has no test example
    means = random.normal(size=(C, 8))
    x, x_test = (means[rows] + random.normal(scale=0.1, size=(len(rows), 8)) for rows in (y, y_test))
    path = tmp_path_factory.mktemp("many") / "data.npz"
    np.savez(path, x=x.astype("f4"), y=y, x_test=x_test.astype("f4"), y_test=y_test)
    return {
        "rounds": 3,
        "clients_per_round": 2,
        "data": {"source": str(path), "clients": 4, "partition": "iid"},
        "net": {"name": "linear"},
        "method": {"name": "logit_adjustment", "epochs": 1, "lr": 0.5},
    }


@pytest.fixture(scope="module")
def finished(experiment: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return run(experiment, tmp_path_factory.mktemp("many") / "run")


def test_a_run_stores_little_in_a_round(finished: RunFolder) -> None:
    lines = (finished.path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 3 and max(map(len, lines)) < 8000
    records = finished.metrics()
    test = records[-1]["test"]
    assert isinstance(json.loads(lines[-1])["test"]["per_class"], str)
    assert test["per_class"][0] is None and len(test["per_class"]) == len(records[-1]["prior"]) == C
    assert sum(test["per_class"][1:]) / (C - 1) == pytest.approx(test["balanced"]) == pytest.approx(test["accuracy"])
    assert test["top5"] > test["accuracy"] > 0 and {"many", "medium", "few"} <= test.keys()


def test_its_summary_has_the_cells_of_the_confusion_matrix(finished: RunFolder) -> None:
    summary = finished.summary()
    assert summary is not None
    confusion, last = summary["confusion"], finished.metrics()[-1]["test"]
    cells = list(zip(confusion["true"], confusion["predicted"], confusion["examples"], strict=True))
    assert confusion["classes"] == C and sum(n for *_, n in cells) == 2 * (C - 1)
    assert sum(n for a, b, n in cells if a == b) / (2 * (C - 1)) == pytest.approx(last["accuracy"])
    assert summary["last"] == last
    assert summary["per_class"][5] == last["per_class"][5]  # the mean covers one of three rounds


def test_an_interrupted_run_gives_the_same_bytes(
    finished: RunFolder, experiment: dict[str, Any], tmp_path: Path
) -> None:
    folder = RunFolder.create(tmp_path / "run", rg.Experiment.parse(experiment))
    steps = Run(folder, workers=1).steps()
    next(steps)
    steps.close()
    for _ in Run(RunFolder.open(folder.path), workers=2).steps():
        pass
    for name in ("metrics.jsonl", "summary.json"):
        assert (folder.path / name).read_bytes() == (finished.path / name).read_bytes()


def test_a_damaged_list_in_a_line_is_seen(finished: RunFolder, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    text = (finished.path / "metrics.jsonl").read_text()
    at = text.index("zlib-d:")
    (tmp_path / "metrics.jsonl").write_text(text[: at + 30] + text[at + 60 :])
    with pytest.raises(StorageError, match=r"metrics.jsonl' is damaged: a packed list"):
        folder.metrics()
    with pytest.raises(StorageError):
        run_view.RunView.read(tmp_path)


def command(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0


def test_readers_show_it(finished: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("show", str(finished.path))
    shown = capsys.readouterr().out
    assert "> 100" in shown and "top 5" in shown and "380 classes between" in shown
    assert len(shown.splitlines()) < 120
    command("show", str(finished.path), "--json")
    assert len(json.loads(capsys.readouterr().out)["summary"]["per_class"]) == C
    view = run_view.RunView.read(finished.path)
    results = run_tables.collect([(view.label, view)])
    pictures.draw_per_class(results, tmp_path / "per_class.png")
    assert (tmp_path / "per_class.png").stat().st_size > 10_000
    assert run_tables.many_classes(results)
    data = page_data({"a": Reading.of(finished.path)})
    assert not data["damaged"] and data["runs"]["a"]["confusion"] is None
    assert data["runs"]["a"]["tested"] == [0, *[2] * (C - 1)]
    assert data["runs"]["a"]["per_class"][5] == pytest.approx(view.summary["per_class"][5], abs=1e-6)  # type: ignore[index]
    command("report", str(finished.path), "--out", str(tmp_path / "page.html"))


def test_an_unfinished_run_shows_the_classes_of_its_last_rounds(finished: RunFolder) -> None:
    reading = Reading.of(finished.path)
    view = run_view.RunView(
        reading.view.path, reading.view.experiment, reading.view.environment, reading.view.metrics, None
    )
    shown = page_data({"a": Reading(view)})["runs"]["a"]["per_class"]
    expected = reading.view.summary["per_class"]  # type: ignore[index]
    assert shown[0] is None and shown[1:] == pytest.approx(expected[1:], abs=1e-6)
    assert not any(math.isnan(value) for value in shown[1:])
