"""What federating gains: the arithmetic of the lines, and the lines of a real comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from redgrape.cli.main import run
from redgrape.reading import gap
from redgrape.reading.run_tables import Result, by_seed
from redgrape.reading.run_view import RunView


def view(balanced: float, seed: int = 0, **data: Any) -> RunView:
    means = dict.fromkeys(("accuracy", "head", "middle", "tail"), 0.5) | {"balanced": balanced}
    experiment = {"seed": seed, "data": {"alone": "none", "pooled": False, **data}, "method": {"name": "m"}}
    return RunView(Path(), experiment, None, [], {"mean_of_last": means})


def alone(*values: tuple[str, int, float]) -> Result:
    return Result("m@alone", [view(value, seed, alone=name) for name, seed, value in values])


def test_a_seed_that_lacks_a_client_is_left_out() -> None:
    assert alone(("n", 0, 0.3), ("s", 0, 0.5), ("n", 1, 0.3)).by_seed("balanced") == {0: 0.4}
    assert by_seed([(0, "n", 0.3), (0, "s", 0.5), (1, "n", 0.3), (1, "s", None)]) == {0: 0.4}
    assert by_seed([(0, "n", 2.0), (0, "s", 3.0)], together=sum) == {0: 5.0}


def test_the_share_of_the_gap() -> None:
    sites = alone(("n", 0, 0.2), ("s", 0, 0.4), ("n", 1, 0.3), ("s", 1, 0.3))
    assert sites.by_seed("balanced") == pytest.approx({0: 0.3, 1: 0.3}) and sites.seeds == 2
    pooled = Result("m@pooled", [view(0.5, pooled=True), view(0.5, 1, pooled=True)])
    results = [Result("m", [view(0.4), view(0.5, 1)]), sites, pooled]
    assert gap.notes(results) == [
        "m@alone: class-balanced accuracy 30.0 % as the mean of 2 clients, 25.0 % at the worst (n)",
        "share of the gap from m@alone (30.0 %) to m@pooled (50.0 %) that is closed: m 75 %",
    ]
    better = [Result("other", [view(0.6), view(0.6, 1)]), *results[1:]]
    assert gap.notes(better)[1].endswith("is closed: other 150 %; above 100 %, the method itself gains too")
    assert gap.notes(results[:1]) == [] and len(gap.notes(results[:2])) == 1
    small = [results[0], sites, Result("m@pooled", [view(0.3, pooled=True), view(0.3, 1, pooled=True)])]
    assert gap.notes(small)[1] == "there is no gap from m@alone (30.0 %) to m@pooled (30.0 %)"


def test_clients_alone_are_compared_over_the_seeds_that_have_all_of_them() -> None:
    """At seed 1 only one of the two was trained, and well."""
    sites = alone(("n", 0, 0.2), ("s", 0, 0.4), ("n", 1, 0.9))
    assert gap.notes([sites]) == [
        "m@alone: class-balanced accuracy 30.0 % as the mean of 2 clients, 20.0 % at the worst (n)"
    ]


def test_the_gap_is_that_of_common_seeds() -> None:
    """At seed 0 the method closes two thirds; at seed 1 all is higher, and there is no pooled run."""
    sites = alone(("n", 0, 0.2), ("s", 0, 0.4), ("n", 1, 0.7), ("s", 1, 0.7))
    results = [Result("m", [view(0.5), view(0.9, 1)]), sites, Result("m@pooled", [view(0.6, pooled=True)])]
    way = "from m@alone (30.0 %) to m@pooled (60.0 %)"
    assert gap.notes(results)[1] == f"share of the gap {way} that is closed, over 1 of 2 seeds: m 67 %"
    apart = [*results[:2], Result("m@pooled", [view(0.6, 2, pooled=True)])]
    assert gap.notes(apart)[1] == "no seed has all of m@alone, m@pooled, m, so that their gap is not known"


def test_a_comparison_with_both_baselines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{i % 5},{'ns'[i % 2]},{'ab'[i % 5 == 0]}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["v,site,kind", *rows]))
    words = f"compare fedavg@alone fedavg fedavg@pooled --data {tmp_path}/t.csv --label kind --site site --rounds 1"
    more = f"--net linear --clients-per-round 1 --workers 1 --quiet --json --out {tmp_path}/out"
    assert run(f"{words} {more}".split()) == 0
    told = json.loads(capsys.readouterr().out)
    rows, notes = told["table"]["blocks"][0]["rows"], told["table"]["notes"]
    assert [row[0]["text"] for row in rows] == ["fedavg", "fedavg@alone", "fedavg@pooled"]
    assert any("as the mean of 2 clients" in note for note in notes)
    assert any("the gap from fedavg@alone" in note or "no gap from fedavg@alone" in note for note in notes)
    assert any("too few seeds to compare methods: 1 a cell" in note for note in notes)  # two clients are no two seeds
    assert sorted(p.name for p in (tmp_path / "out").glob("*alone*")) == [
        "fedavg-alone-0-n-seed0",
        "fedavg-alone-1-s-seed0",
    ]
    assert run(f"{words.replace('@alone', '@lone')} {more}".split()) == 2
    assert "unknown baseline 'lone'; did you mean 'alone'?" in capsys.readouterr().err
