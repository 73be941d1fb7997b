"""The best round by validation, and an early stop: settings that hold through kills and extensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import redgrape as rg
from redgrape.errors import ConfigError
from redgrape.exported.export import export, newest_state
from redgrape.exported.own_test import OwnModel
from redgrape.reading.run_view import RunView
from redgrape.runs import figures
from redgrape.runs.finished import digest_of_state
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run, run


def write_data(path: Path) -> Path:
    random = np.random.default_rng(0)
    y, y_test = np.repeat(np.arange(3), [40, 20, 12]), np.repeat(np.arange(3), [20, 10, 5])
    x, x_test = (1.5 * random.normal(size=(len(rows), 4)) + rows[:, None] for rows in (y, y_test))
    np.savez(path, x=x.astype("f4"), y=y, x_test=x_test.astype("f4"), y_test=y_test)
    return path


def described(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "rounds": 8,
        "data": {"source": str(write_data(tmp_path / "data.npz")), "clients": 2, "partition": "iid", "validation": 5},
        "net": {"name": "linear"},
        "method": {"name": "fedavg", "epochs": 1, "lr": 1.0},  # too large: rounds differ
        **more,
    }


def record(round: int, balanced: float | None) -> dict[str, Any]:
    return {"round": round, **({} if balanced is None else {"validation": {"balanced": balanced}})}


def test_the_rule_by_hand() -> None:
    records = [record(1, 0.3), record(2, 0.5), record(3, None), record(4, 0.5), record(5, 0.4)]
    assert figures.best_round(records) == 2  # of equal ones, the first
    assert figures.best_round([]) == figures.best_round([record(1, None)]) == 0
    stopped = [figures.has_stopped(records[:n], 2) for n in range(6)]
    assert stopped == [False, False, False, False, True, True]  # round 3 was not evaluated
    assert not figures.has_stopped(records, None) and not figures.has_stopped(records, 4)


def test_the_model_of_the_best_round_is_kept_and_exported(tmp_path: Path) -> None:
    folder = run(described(tmp_path, keep="best", checkpoint_every=3), tmp_path / "run")
    plain = run(described(tmp_path), tmp_path / "plain")
    records, summary = folder.metrics(), folder.summary()
    assert summary is not None and records == plain.metrics()  # it changes nothing in training
    best = figures.best_round(records)
    assert 1 <= best < 8, "the last round is the best: the test cannot fail"
    assert summary["averaged_rounds"] == [best] == [summary["best_round"]]
    assert summary["last"] == records[best - 1]["test"]
    shorter = run(described(tmp_path, rounds=best), tmp_path / "shorter")
    state = newest_state(RunFolder.open(folder.path), RunView.read(folder.path))
    assert state.round == best and summary["state"] == (shorter.summary() or {})["state"] == digest_of_state(state)
    assert OwnModel.open(folder.path).evaluate()["accuracy"] == records[best - 1]["test"]["accuracy"]
    card = (export(folder.path, tmp_path / "model") / "README.md").read_text()
    assert f"after round {best} of 8" in card and "not finished" not in card
    assert f"| accuracy | round {best}, the best by validation |\n" in card and "mean of" not in card
    card = (export(plain.path, tmp_path / "last") / "README.md").read_text()
    assert "| accuracy | round 8 | mean of 4 evaluations, rounds 5 to 8 |\n" in card
    assert "over the models of several" in card


@pytest.mark.parametrize("keep", ["best", "last"])
def test_it_stops_early_and_resumes_to_the_same(tmp_path: Path, keep: str) -> None:
    experiment = described(tmp_path, rounds=40, patience=2, keep=keep, checkpoint_every=4)
    whole = run(experiment, tmp_path / "whole")
    summary, done = whole.summary(), len(whole.metrics())
    assert summary is not None and done < 40 and summary["stopped_after"] == done
    assert done - figures.best_round(whole.metrics()) >= 2
    assert summary["averaged_rounds"][-1] == (figures.best_round(whole.metrics()) if keep == "best" else done)

    killed = RunFolder.create(tmp_path / "killed", rg.Experiment.parse(experiment))
    for _ in range(done):  # after each round
        steps = Run(RunFolder.open(killed.path), workers=1).steps()
        if next(steps, None) is None:
            break
        steps.close()
    for _ in Run(RunFolder.open(killed.path), workers=1).steps():
        pass
    assert killed.summary() == summary and killed.metrics() == whole.metrics()
    (killed.path / "summary.json").unlink()  # stopped, and its summary lost: no round more
    assert list(Run(RunFolder.open(killed.path), workers=1).steps()) == []
    assert killed.summary() == summary
    assert list(Run(RunFolder.open(killed.path), workers=1, rounds=50).steps()) == []  # the same rule holds
    assert len(RunView.read(killed.path).metrics) == done


def test_without_validation_it_is_refused(tmp_path: Path) -> None:
    for more in ({"keep": "best"}, {"patience": 3}):
        with pytest.raises(ConfigError, match=r"no validation examples; hold some out with data.validation=20"):
            rg.Experiment.parse({**more, "rounds": 3})


def test_experiments_that_do_not_name_them_keep_their_hashes() -> None:
    plain = rg.Experiment.parse({})
    assert not {"keep", "patience"} & plain.resolved().keys()
    assert not {"lr_warmup", "lr_milestones"} & plain.resolved()["method"].keys()
    named = rg.Experiment.parse({"keep": "last", "patience": "none", "method": {"lr_warmup": 0}})
    assert named.hash() == plain.hash()
    other = rg.Experiment.parse({"method": {"lr_warmup": 3, "lr_milestones": [0.2, 0.4]}})
    assert other.hash() != plain.hash() and rg.Experiment.parse(other.resolved()).hash() == other.hash()


def test_milestones_and_warm_up_by_hand() -> None:
    """Ten rounds, milestones after 5 and 7.5: two falls by the square root of 0.01. Warm-up: 1/3, 2/3, 1."""
    from redgrape.learning.schedule import decay, warm_up

    falls = [decay("milestones", t, 10, 0.01) for t in range(1, 11)]
    assert falls == pytest.approx([1.0] * 5 + [0.1] * 2 + [0.01] * 3)
    assert [warm_up(t, 2) for t in range(1, 5)] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert [warm_up(t, 0) for t in (1, 2)] == [1.0, 1.0]
    for wrong in ([], [0.5, 0.5], [0.0], [1.5], ["a"], 3):
        with pytest.raises(ConfigError, match="rising shares of the rounds") as raised:
            rg.Experiment.parse({"method": {"lr_milestones": wrong}})
        assert "\n" not in str(raised.value)
