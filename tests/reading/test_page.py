"""The page of runs: what is in it, what strangers' files can do to it (nothing), and the server that shows it live."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

import pytest
import torch

from forgery import vouch_for
from redgrape.cli import main as cli
from redgrape.errors import ConfigError
from redgrape.reading.page import figures, reading
from redgrape.reading.page.document import document
from redgrape.reading.page.figures import text
from redgrape.reading.page.reading import is_locked
from redgrape.reading.page.serve import Server
from redgrape.reading.run_view import RunView
from redgrape.runs.experiment import Experiment
from redgrape.runs.figures import FIGURES
from redgrape.runs.finished import classifier_norms
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run

Values = Callable[..., dict[str, Any]]
ROUNDS = 3

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "--></style><svg onload=alert(1)>",
    '" onmouseover="alert(1)',
    "' autofocus onfocus='alert(1)",
    "<!--<script>",
    "&lt;b&gt;",
    "=cmd|' /C calc'!A0",
    "@SUM(1+1)",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "two\nlines\r",
    "\u202eright to left",
    "\u2028separator\u2029",
    "nul\x00",
    "{data}{0}%s${x}`y`",
    "javascript:alert(1)",
    "]]>",
]


def carried_out(path: Path, values: dict[str, Any]) -> Path:
    for _ in Run(RunFolder.create(path, Experiment.parse(values)), workers=1).steps():
        pass
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny: Values) -> Path:
    """FedAvg and RedGrape with two seeds each, not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("fedavg", "redgrape"):
        for seed in (0, 1):
            values = tiny(seed=seed, rounds=ROUNDS, method__name=name)
            carried_out(folder / f"{name}-seed{seed}", values)
    return folder


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Path:
    """The same, to be changed: without checksums, which would tell."""
    return shutil.copytree(runs, tmp_path / "copied", ignore=shutil.ignore_patterns("SHA256SUMS"))


def written(folder: Path, *others: Path, out: Path) -> str:
    assert cli.run(["report", str(folder), *map(str, others), "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def data_of(page: str) -> dict[str, Any]:
    blocks = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert len(blocks) == 1
    data: dict[str, Any] = json.loads(blocks[0])
    return data


def change_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_bytes())
    change(values)
    path.write_text(json.dumps(values))


class Elements(HTMLParser):
    """What a page is made of."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


# What a run's summary holds for the page


def test_summary_tells_what_was_taken_for_what(runs: Path) -> None:
    for run in sorted(runs.iterdir()):
        summary = json.loads((run / "summary.json").read_bytes())
        confusion = summary["confusion"]
        shares = [row[c] / sum(row) for c, row in enumerate(confusion)]
        assert shares == summary["last"]["per_class"]


def test_summary_tells_the_classifiers_norms(runs: Path) -> None:
    for name, others in (("fedavg", set()), ("redgrape", {"W_hat"})):
        run = runs / f"{name}-seed0"
        state, _ = RunFolder.open(run).checkpoints.latest()
        assert state is not None
        norms = json.loads((run / "summary.json").read_bytes())["classifier_norms"]
        assert set(norms) == {"model", *others}
        weight = state.server["model"]["classifier.weight"]
        assert norms["model"] == pytest.approx([float((row.double() ** 2).sum()) ** 0.5 for row in weight])


def test_a_classifier_that_is_the_deployed_one_is_told_once() -> None:
    weight = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    server = {
        "model": {"classifier.weight": weight, "encoder.weight": torch.ones(2, 2)},
        "same": {"weight": weight.clone()},
        "other": {"weight": 2 * weight},
        "stacked": {"weight": torch.ones(2, 2, 2)},
        "seen": torch.tensor([True, False]),
    }
    assert classifier_norms(server) == {"model": [5.0, 2.0], "other": [10.0, 4.0]}


@pytest.mark.parametrize("change", ["gone", "older", "damaged", "another state"])
def test_a_summary_that_is_lost_or_older_is_made_anew(copied: Path, runs: Path, change: str) -> None:
    summary = copied / "redgrape-seed0" / "summary.json"
    match change:
        case "gone":
            summary.unlink()
        case "older":
            change_json(summary, lambda s: [s.pop("confusion"), s.pop("classifier_norms")])
        case "damaged":
            summary.write_bytes(b"[")
        case _:
            change_json(summary, lambda s: s.update(state="0" * 64, confusion=[[1]]))
    assert cli.run(["resume", str(summary.parent), "--workers", "1", "--quiet"]) == 0
    assert summary.read_bytes() == (runs / "redgrape-seed0" / "summary.json").read_bytes()


def test_a_finished_run_needs_its_data_no_more(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("the data is read")

    monkeypatch.setattr("redgrape.runs.run.prepare", refused)
    before = (copied / "fedavg-seed0" / "summary.json").read_bytes()
    assert cli.run(["resume", str(copied / "fedavg-seed0"), "--workers", "1", "--quiet"]) == 0
    assert (copied / "fedavg-seed0" / "summary.json").read_bytes() == before


# The page


def test_page_holds_the_data_of_every_chart(runs: Path, tmp_path: Path) -> None:
    data = data_of(written(runs, out=tmp_path / "page.html"))
    (setting,) = data["settings"]
    assert [(m["label"], len(m["runs"])) for m in setting["methods"]] == [("fedavg", 2), ("redgrape", 2)]
    assert dict(setting["facts"])["Seeds"] == "0, 1"
    assert data["damaged"] == []
    for key, run in data["runs"].items():
        summary = json.loads((Path(key) / "summary.json").read_bytes())
        environment = json.loads((Path(key) / "environment.json").read_bytes())
        split = data["splits"][run["split"]]
        assert run["state"] == "finished"
        assert run["result"] == pytest.approx(summary["mean_of_last"], abs=1e-6)
        assert run["per_class"] == pytest.approx(summary["per_class"], abs=1e-6)
        assert run["confusion"] == summary["confusion"]
        assert run["norms"].keys() == summary["classifier_norms"].keys()
        assert split["client_counts"] == environment["client_counts"]
        assert [split["class_counts"][c] for c in split["order"]] == sorted(environment["class_counts"], reverse=True)
        columns = data["rounds"][key]
        assert columns["round"] == [1, 2, 3]
        assert {len(values) for values in columns.values()} == {ROUNDS}
        for name in (*FIGURES, "train", "evaluate", "down", "up"):
            assert all(value is not None for value in columns[name]), name
        is_redgrape = "redgrape" in key
        assert (columns["age"][0] is not None) == is_redgrape


def test_the_commands_describe_the_runs(runs: Path, tmp_path: Path) -> None:
    data = data_of(written(runs, out=tmp_path / "page.html"))
    for method in data["settings"][0]["methods"]:
        (tmp_path / method["file"]).write_text(method["toml"])
        for key, command in zip(method["runs"], method["commands"], strict=True):
            program, name, file, flag, seed = shlex.split(command)
            assert (program, name, flag) == ("redgrape", "run", "--seed")
            values = Experiment.read(tmp_path / file).resolved() | {"seed": int(seed)}
            assert Experiment.parse(values).hash() == RunFolder.open(Path(key)).experiment().hash()


def test_methods_of_one_name_are_distinct_and_settings_too(runs: Path, tiny: Values, tmp_path: Path) -> None:
    weak = carried_out(tmp_path / "weak", tiny(seed=0, rounds=ROUNDS, method__name="redgrape", method__lam=0.5))
    longer = carried_out(tmp_path / "longer", tiny(seed=0, rounds=ROUNDS + 1, method__name="fedavg"))
    data = data_of(written(runs, weak, longer, out=tmp_path / "page.html"))
    first, second = data["settings"]
    assert [m["label"] for m in first["methods"]] == ["fedavg", "redgrape lam=0.1", "redgrape lam=0.5"]
    assert [m["label"] for m in second["methods"]] == ["fedavg"]
    assert first["title"].endswith("rounds=3")
    assert second["title"].endswith("rounds=4")


def test_of_many_variants_only_what_is_unusual_is_named() -> None:
    base = {"lam": 0.1, "threshold": 8.0, "placement": "in_gradient"}
    changes: list[dict[str, Any]] = [{}, {"lam": 1.0}, {"threshold": 2.0}, {"lam": 1.0, "placement": "after_step"}, {}]
    variants = [{**base, **change} for change in changes]
    named = ["", " lam=1.0", " threshold=2.0", " lam=1.0 placement=after_step"]
    assert figures._distinct(["r"] * 5, variants) == [f"r{words}" for words in [*named, ""]]
    two_by_two = [{"lam": lam} for lam in (1, 1, 2, 2)]
    assert figures._distinct(["r"] * 4, two_by_two) == ["r lam=1", "r lam=1", "r lam=2", "r lam=2"]
    lacking = [{"lam": 1}, {"lam": 1}, {}]
    assert figures._distinct(["r"] * 3, lacking) == ["r lam=1", "r lam=1", "r"]


def test_a_run_of_before_an_option_existed_is_of_the_same_setting(copied: Path, tmp_path: Path) -> None:
    """It had what is the default now; how often a run saves makes no setting either."""
    toml = copied / "fedavg-seed0" / "experiment.toml"
    before = toml.read_text()
    assert "min_answers = 1\n" in before
    toml.write_text(
        re.sub("checkpoint_every = .*\n", "checkpoint_every = 7\n", before.replace("min_answers = 1\n", ""))
    )
    vouch_for(toml.parent)
    assert len(data_of(written(copied, out=tmp_path / "page.html"))["settings"]) == 1
    toml.write_text(before.replace("min_answers = 1\n", "min_answers = 2\n"))
    vouch_for(toml.parent)
    assert len(data_of(written(copied, out=tmp_path / "page.html"))["settings"]) == 2


def aged(run: Path) -> Path:
    """What is known of classes of this run gets older, and one class never is released."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        line |= {"class_released": [True, True, i == 0, False]}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return vouch_for(run)


def test_ages_count_rounds_since_a_class_was_released(copied: Path, tmp_path: Path) -> None:
    run = aged(copied / "redgrape-seed0")
    ages = data_of(written(run, out=tmp_path / "page.html"))["rounds"][str(run)]["age"]
    assert ages == [[0, 0, i, None] for i in range(ROUNDS)]


def page_of(tiny: Values, *runs: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """The page data of finished runs: the settings of each, and its result."""
    readings = {}
    for i, (settings, result) in enumerate(runs):
        summary = {"mean_of_last": result, "averaged_rounds": [2], "per_class": []}
        view = RunView(Path(f"run{i}"), Experiment.parse(tiny(**settings)).resolved(), None, [], summary)
        readings[str(i)] = reading.Reading(view)
    data = figures.page_data(readings)
    assert data["damaged"] == []
    return data


def test_clients_alone_are_one_figure_a_seed(tiny: Values) -> None:
    """And a seed that lacks one is left out."""
    alone = {(0, "0"): 0.2, (0, "1"): 0.4, (1, "0"): 0.5, (1, "1"): 0.7, (2, "0"): 0.9}
    each = {"clients_per_round": "none", "method__name": "fedavg"}
    runs = [({**each, "seed": s, "data__alone": client}, {"accuracy": v}) for (s, client), v in alone.items()]
    ((method,),) = [setting["methods"] for setting in page_of(tiny, *runs)["settings"]]
    assert method["figures"]["accuracy"] == pytest.approx([0.3, 0.6])
    assert method["cells"][0] == "45.0 ± 21.2 (2 of 3 seeds)"


def test_a_setting_says_if_its_runs_were_not_made_alike(runs: Path, copied: Path, tmp_path: Path) -> None:
    change_json(copied / "fedavg-seed1" / "environment.json", lambda e: e.update(device="cuda", redgrape="0.1\x1b"))
    (setting,) = data_of(written(copied, out=tmp_path / "page.html"))["settings"]
    told = [note for note in setting["notes"] if note.startswith("not all made with")]
    assert [note.endswith("(fedavg, seed 1)") for note in told] == [True, True]
    assert "so that figures may differ: device cuda" in told[1] and "\x1b" not in told[0]
    (alike,) = data_of(written(runs, out=tmp_path / "page.html"))["settings"]
    assert not any("made with" in note for note in alike["notes"])


def test_page_asks_nobody_for_anything(runs: Path, tmp_path: Path) -> None:
    page = written(runs, out=tmp_path / "page.html")
    assert set(re.findall(r"https?:[^\s\"']*", page)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    elements = Elements(page)
    assert [value for name, value in elements.attributes if name in ("src", "href", "action")] == ["data:,"]
    assert not re.search(r"@import|url\(", page)


def test_policy_names_the_inline_parts_by_their_hash(runs: Path, tmp_path: Path) -> None:
    page = written(runs, out=tmp_path / "page.html")
    (found,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    policy = dict(part.strip().split(" ", 1) for part in html.unescape(found).split(";"))
    assert policy["default-src"] == policy["connect-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    for name, pattern in (("script-src", r"<script>(.*?)</script>"), ("style-src", r"<style>(.*?)</style>")):
        (inline,) = re.findall(pattern, page, flags=re.DOTALL)
        assert policy[name] == f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


def hostile_copy(runs: Path, folder: Path) -> Path:
    """A run whose folder, data source and classes have hostile names."""
    run = shutil.copytree(
        runs / "redgrape-seed0",
        folder / "<img src=x onerror=alert(1)> \x1b[31m",
        ignore=shutil.ignore_patterns("SHA256SUMS"),
    )
    names = [HOSTILE[i % len(HOSTILE)] for i in range(4)]
    change_json(run / "environment.json", lambda e: e.update(class_names=names, torch="<script>alert(1)</script>"))
    toml = (run / "experiment.toml").read_text()
    source = json.dumps("</title><script>alert(1)</script>.npz")
    (run / "experiment.toml").write_text(re.sub(r"^source = .*$", lambda _: f"source = {source}", toml, flags=re.M))
    return vouch_for(run)


def test_hostile_names_add_nothing_to_the_page(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harmless = Elements(written(runs / "redgrape-seed0", out=tmp_path / "plain.html"))
    run = hostile_copy(runs, tmp_path / "hostile")
    for start in range(len(HOSTILE)):
        names = [HOSTILE[(start + i) % len(HOSTILE)] for i in range(4)]
        change_json(run / "environment.json", lambda e, names=names: e.update(class_names=names))
        page = written(run, out=tmp_path / "page.html")
        elements = Elements(page)
        assert elements.tags == harmless.tags
        assert [name for name, _ in elements.attributes] == [name for name, _ in harmless.attributes]
        data = data_of(page)
        (split,) = data["splits"].values()
        assert split["class_names"] == [text(name) for name in names]
        assert all(name.isprintable() or "\N{REPLACEMENT CHARACTER}" in name for name in split["class_names"])
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err


def test_a_run_of_before_makes_a_page_without_the_new_figures(copied: Path, tmp_path: Path) -> None:
    for run in copied.iterdir():
        change_json(run / "summary.json", lambda s: [s.pop("confusion"), s.pop("classifier_norms")])
    data = data_of(written(copied, out=tmp_path / "page.html"))
    assert [(run["confusion"], run["norms"]) for run in data["runs"].values()] == [(None, None)] * 4


def test_a_run_that_is_not_finished_stands_with_what_it_has(copied: Path, tmp_path: Path) -> None:
    run = copied / "fedavg-seed0"
    (run / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:40])  # a line that is being written
    vouch_for(run)
    found = data_of(written(run, out=tmp_path / "page.html"))["runs"][str(run)]
    tests = [json.loads(line)["test"] for line in lines[:2]]
    assert (found["state"], found["done"], found["averaged"]) == ("stopped", 2, 1)
    assert found["result"]["tail"] == pytest.approx(tests[1]["tail"], abs=1e-6)


def test_a_run_without_a_round_makes_a_page(copied: Path, tmp_path: Path) -> None:
    run = copied / "fedavg-seed0"
    for name in ("summary.json", "metrics.jsonl", "times.jsonl", "environment.json"):
        (run / name).unlink()
    vouch_for(run)
    data = data_of(written(run, out=tmp_path / "page.html"))
    assert data["runs"][str(run)]["done"] == 0
    assert data["splits"] == {}


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "experiment": lambda run: (run / "experiment.toml").write_text("x = ["),
    "experiment lacks": lambda run: (run / "experiment.toml").write_text("seed = 0\nrounds = 3\n"),
    "metrics": lambda run: (run / "metrics.jsonl").write_text("{\n{}\n"),
    "metrics lists": lambda run: (run / "metrics.jsonl").write_text("[1]\n"),
    "metrics depth": lambda run: (run / "metrics.jsonl").write_text("[" * 100_000 + "\n"),
    "metrics number": lambda run: (run / "metrics.jsonl").write_text(
        '{"round": 1, "train_loss": 1' + "0" * 400 + "}\n"
    ),
    "environment": lambda run: (run / "environment.json").write_text("{"),
    "environment lacks": lambda run: (run / "environment.json").write_text("{}"),
    "environment names": lambda run: change_json(run / "environment.json", lambda e: e.update(class_names=["one"])),
    "environment text": lambda run: change_json(run / "environment.json", lambda e: e.update(class_counts="many")),
    "environment groups": lambda run: change_json(run / "environment.json", lambda e: e["groups"].update(head=[99])),
    "summary": lambda run: (run / "summary.json").write_text("[]"),
    "a pipe": lambda run: [(run / "metrics.jsonl").unlink(), os.mkfifo(run / "metrics.jsonl")],
    "a folder": lambda run: [(run / "summary.json").unlink(), (run / "summary.json").mkdir()],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_run_hides_no_other(
    copied: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGE[kind](copied / "fedavg-seed0")
    data = data_of(written(copied, out=tmp_path / "page.html"))
    assert len(data["runs"]) == 3
    assert [Path(run["name"]).name for run in data["damaged"]] == ["fedavg-seed0"]
    assert capsys.readouterr().err.count("fedavg-seed0' is left out") == 1
    assert cli.run(["report", str(copied / "fedavg-seed0"), "--out", str(tmp_path / "none.html")]) == 74
    assert not (tmp_path / "none.html").exists()
    assert capsys.readouterr().err.startswith("redgrape: no run can be read: ")


def test_numbers_that_json_lacks_are_no_numbers(copied: Path, tmp_path: Path) -> None:
    run = copied / "fedavg-seed0"
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    line["test"] |= {"accuracy": float("nan"), "tail": "<b>", "head": True, "per_class": [1e999] * 4}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (run / "times.jsonl").write_text('{"round": 1, "train": NaN}\nnot a line\n[]\n{"rou')
    (run / "summary.json").unlink()
    vouch_for(run)
    data = data_of(written(run, out=tmp_path / "page.html"))
    columns = data["rounds"][str(run)]
    assert [columns[name][0] for name in ("accuracy", "tail", "head", "train")] == [None] * 4
    assert data["runs"][str(run)]["per_class"] == [None] * 4


@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_no_run_is_one_line(tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert cli.run(["report", str(tmp_path / place), "--out", str(tmp_path / "page.html")]) == 74
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert place in error
    assert not (tmp_path / "page.html").exists()


def test_report_for_machines(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert cli.run(["report", str(runs), "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"page": str(out), "runs": [str(run) for run in sorted(runs.iterdir())], "damaged": []}


# The lock is looked at, never taken


@pytest.mark.parametrize("linux", [True, False])
def test_who_holds_the_lock_is_seen(copied: Path, linux: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if linux and not reading.PROC_LOCKS.exists():
        pytest.skip("/proc/locks is not there")
    if not linux:
        monkeypatch.setattr(reading, "PROC_LOCKS", Path("/nowhere"))
    folder = RunFolder.open(copied / "fedavg-seed0")
    lock = folder.path / "lock"
    assert not is_locked(lock)
    with folder.locked():
        assert is_locked(lock)
    assert not is_locked(lock)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    lock.write_text(f"process {int(gone.stdout)}")  # left by a process that was killed
    assert not is_locked(lock)
    for nonsense in ("", "process", "process -1", "process x", "\x00"):
        lock.write_text(nonsense)
        assert not is_locked(lock)


def test_a_process_that_only_lives_does_not_train(copied: Path) -> None:
    if not reading.PROC_LOCKS.exists():
        pytest.skip("/proc/locks is not there")
    lock = copied / "fedavg-seed0" / "lock"
    lock.write_text(f"process {os.getpid()}")  # the number of a killed process, given anew
    assert not is_locked(lock)


# The server


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    with Server(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[Server]:
    with serving(runs) as server:
        yield server


def asked(server: Server, path: str, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    with contextlib.closing(connection):
        connection.putrequest(method, path, skip_host=True)
        if host != "":
            connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


def news(server: Server, *wanted: tuple[str, int, str]) -> dict[str, Any]:
    query = "&".join(f"run={quote(key)}&rows={rows}&stamp={stamp}" for key, rows, stamp in wanted)
    code, _, body = asked(server, f"/news?{query}")
    assert code == 200
    found: dict[str, Any] = json.loads(body)
    return found


def test_serve_lists_the_runs(server: Server) -> None:
    code, _, body = asked(server, "/runs")
    rows = json.loads(body)
    assert code == 200
    assert [row["id"] for row in rows] == ["fedavg-seed0", "fedavg-seed1", "redgrape-seed0", "redgrape-seed1"]
    assert {(row["state"], row["done"], row["rounds"]) for row in rows} == {("finished", ROUNDS, ROUNDS)}


def test_serve_shows_the_page(server: Server) -> None:
    code, headers, page = asked(server, "/")
    assert code == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert data_of(page)["live"] is True
    assert asked(server, "/", "HEAD")[2] == ""
    assert int(asked(server, "/", "HEAD")[1]["Content-Length"]) == len(page.encode())


def test_serve_tells_only_what_is_new(server: Server) -> None:
    first = news(server, ("redgrape-seed0", 0, ""))
    assert first["rounds"]["redgrape-seed0"]["from"] == 0
    assert first["rounds"]["redgrape-seed0"]["columns"]["round"] == [1, 2, 3]
    stamp = first["runs"]["redgrape-seed0"]["stamp"]
    later = news(server, ("redgrape-seed0", 2, stamp))
    assert later["runs"] == later["splits"] == {}
    assert later["rounds"]["redgrape-seed0"]["from"] == 2
    assert later["rounds"]["redgrape-seed0"]["columns"]["round"] == [3]
    assert later["there"] == ["redgrape-seed0"]
    too_many = news(server, ("redgrape-seed0", 99, stamp))  # the run has been cut back since
    assert too_many["rounds"]["redgrape-seed0"]["from"] == ROUNDS


def test_serve_follows_a_run(runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "fedavg-seed0", tmp_path / "runs" / "a", ignore=shutil.ignore_patterns("SHA256SUMS"))
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").write_bytes(lines[0] + lines[1][:25])
    vouch_for(run)
    with serving(tmp_path / "runs") as server:
        first = news(server, ("a", 0, ""))
        assert first["rounds"]["a"]["columns"]["round"] == [1]
        assert first["runs"]["a"]["state"] == "stopped"
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(lines[1][25:])
        with RunFolder.open(run).locked():
            second = news(server, ("a", 1, first["runs"]["a"]["stamp"]))
            assert second["rounds"]["a"]["columns"]["round"] == [2]
            assert second["runs"]["a"]["state"] == "training"
        (run / "metrics.jsonl").write_text("{\n")
        assert json.loads(asked(server, "/runs")[2])[0]["state"] == "damaged"
        third = news(server, ("a", 2, ""))
        assert third["there"] == []
        assert third["damaged"][0]["name"] == "a"
        shutil.rmtree(run)
        assert json.loads(asked(server, "/runs")[2]) == []


@pytest.mark.parametrize("kind", DAMAGE)
def test_serve_shows_damaged_runs_as_damaged(copied: Path, kind: str) -> None:
    DAMAGE[kind](copied / "fedavg-seed0")
    with serving(copied) as server:
        states = {row["id"]: row["state"] for row in json.loads(asked(server, "/runs")[2])}
    assert states["fedavg-seed0"] == "damaged"
    assert sorted(states.values()) == ["damaged", "finished", "finished", "finished"]


def test_serve_changes_nothing_in_the_folder(runs: Path, server: Server) -> None:
    def standing() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in [runs, *runs.rglob("*")]}

    before = standing()
    for path in ("/", "/runs", "/news?run=fedavg-seed0&rows=0&stamp="):
        assert asked(server, path)[0] == 200
    assert standing() == before


def traversals() -> list[str]:
    ups = ["..", "%2e%2e", "%252e%252e", "..%00", "%c0%ae%c0%ae", "..;", "....", ".%2e", "%2e.", "\\..\\.."]
    slashes = ["/", "%2f", "%252f", "\\", "%5c", "//", "/./"]
    targets = ["etc/passwd", "fedavg-seed0/experiment.toml", "proc/self/environ"]
    paths = [f"/{slash.join([up] * 4)}{slash}{target}" for up in ups for slash in slashes for target in targets]
    return [
        *paths,
        "/etc/passwd",
        "//etc/passwd",
        "/file:///etc/passwd",
        "/fedavg-seed0",
        "/fedavg-seed0/experiment.toml",
        "/runs/",
        "/runs/fedavg-seed0",
        "/page.js",
        "/%00",
        "/~root",
        "http://127.0.0.1/etc/passwd",
        "*",
        "/" + "a" * 5000,
    ]


def test_serve_answers_404_to_every_traversal(server: Server) -> None:
    paths = traversals()
    assert len(paths) >= 200
    assert [path for path in paths if asked(server, path)[0] != 404] == []
    near = [".", "", "..", "fedavg-seed0/", "./fedavg-seed0", "fedavg-seed0\x00", "FEDAVG-seed0"]
    runs = [path[1:] for path in paths if path != "/fedavg-seed0"] + near
    queries = [f"/news?run={quote(run)}&rows=0&stamp=" for run in runs]
    assert [query for query in queries if asked(server, query)[0] != 404] == []


@pytest.mark.parametrize(
    "query", ["run=fedavg-seed0", "run=fedavg-seed0&rows=-1&stamp=", "run=fedavg-seed0&rows=1e9&stamp=", "rows=1"]
)
def test_serve_refuses_questions_that_it_does_not_understand(server: Server, query: str) -> None:
    assert asked(server, f"/news?{query}")[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"])
def test_serve_is_read_only(server: Server, method: str) -> None:
    code, headers, _ = asked(server, "/", method)
    assert (code, headers["Allow"]) == (405, "GET, HEAD")


def test_serve_is_for_this_machine_only(server: Server) -> None:
    """A page of another host whose name points here (DNS rebinding) sends its own name."""
    port = server.server_port
    assert server.server_address[0] == "127.0.0.1"
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert asked(server, "/runs", host=host)[0] == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        f"127.0.0.1:{port}.evil.example",
        "",
    ):
        code, _, body = asked(server, "/runs", host=host)
        assert code == 403
        assert "fedavg" not in body


def test_a_taken_port_is_one_line(server: Server, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="is in use; name another with --port"):
        Server(runs, server.server_port)
    assert cli.run(["serve", str(runs), "--port", str(server.server_port)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("port", ["-1", "65536", "http", "8765.0", ""])
def test_a_port_that_is_none_is_one_line(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", f"--port={port}"]) == 2
    assert "is not a port" in capsys.readouterr().err


def test_serve_prints_its_address_and_ends_at_ctrl_c(runs: Path) -> None:
    command = [sys.executable, "-m", "redgrape", "serve", str(runs), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


# TensorBoard


class Writer:
    """Remembers what torch's SummaryWriter is told."""

    made: list[Writer]

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.told: list[tuple[str, float, int]] = []
        self.closed = False
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.told.append((name, value, step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_tensorboard_gets_every_round_once(tiny: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    Writer.made = []
    toml, run = tmp_path / "tiny.toml", tmp_path / "run"
    toml.write_text(Experiment.parse(tiny()).to_toml())
    flags = ["--workers", "1", "--quiet", "--tensorboard"]
    assert cli.run(["run", str(toml), "--out", str(run), *flags]) == 0
    assert cli.run(["resume", str(run), "--rounds", "3", *flags]) == 0
    first, second = Writer.made
    assert (first.folder, first.purge_step, first.closed) == (str(run / "tensorboard"), 1, True)
    assert (second.purge_step, second.closed) == (3, True)
    assert [sorted({step for *_, step in writer.told}) for writer in (first, second)] == [[1, 2], [3]]
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[2])
    told = {name: value for name, value, _ in second.told}
    assert told["test/tail"] == record["test"]["tail"]
    assert told["train/loss"] == record["train_loss"]
    assert told["bytes/up"] == record["bytes_up"]
    assert {"test/accuracy", "test/loss", "seconds/train", "seconds/evaluate", "bytes/down"} <= told.keys()


def test_tensorboard_that_is_missing_is_one_line(
    tiny: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    toml = tmp_path / "tiny.toml"
    toml.write_text(Experiment.parse(tiny()).to_toml())
    assert cli.run(["run", str(toml), "--out", str(tmp_path / "run"), "--workers", "1", "--tensorboard"]) == 2
    assert "pip install -e '.[tensorboard]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# A real browser


class Browser:
    """Chromium without a window, spoken to over a pipe by its DevTools protocol."""

    def __init__(self, profile: Path) -> None:
        from_us, to_us = os.pipe(), os.pipe()
        flags = (
            "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
            "--disable-component-update --disable-sync --remote-debugging-pipe"
        )
        shell = f'exec chromium {flags} --user-data-dir="$0" about:blank 3<&{from_us[0]} 4>&{to_us[1]}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, str(profile)],
            pass_fds=(from_us[0], to_us[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us[0])
        os.close(to_us[1])
        self._write, self._read = os.fdopen(from_us[1], "wb"), os.fdopen(to_us[0], "rb")
        self._count, self._session = 0, None
        self.complaints: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._read.read(1)) != b"\0":
            assert byte, "the browser has ended"
            data += byte
        answer: dict[str, Any] = json.loads(data)
        if answer.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(answer["params"]))
        return answer

    def open(self, address: str, width: int, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && !!document.querySelector('main h1')")

    def value(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait, for the time that a test may take."""
        while not self.value(f"new Promise((r) => setTimeout(() => r({expression}), 50))"):
            pass

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        self._write.close()
        self._read.close()
        self._process.wait(timeout=60)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed")
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


CHARTS = [
    "Accuracy over rounds",
    "Accuracy of head, middle and tail per method",
    "Accuracy per class, from head to tail",
    "Confusion matrix of redgrape",
    "Norm of the classifier's weights per class",
    "Training examples of each class",
    "Training examples of each client and class",
    "Age of what is known of each class over the rounds",
    "Seconds a round per method",
    "Megabytes a client and round per method",
]
DRAWN = "[...document.querySelectorAll('svg[role=img]')].map((svg) => svg.getAttribute('aria-label'))"


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1100, 390, 360])
def test_browser_draws_every_chart(
    browser: Browser, runs: Path, copied: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    hostile = hostile_copy(runs, tmp_path / "hostile")
    aged(copied / "redgrape-seed0")
    written(copied, hostile, out=tmp_path / "page.html")
    browser.open((tmp_path / "page.html").as_uri(), width, dark)
    drawn = browser.value(DRAWN)
    assert [chart for chart in CHARTS if chart not in drawn] == []
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value("document.querySelectorAll('img, iframe, object, [onerror], [onload]').length") == 0
    browser.value("document.querySelector('#choose-setting').selectedIndex = 1")
    browser.value("document.querySelector('#choose-setting').dispatchEvent(new Event('change'))")
    assert browser.value("document.querySelectorAll('img, script[src], [onerror], [onmouseover]').length") == 0
    assert browser.value("document.scripts.length") == 2
    assert "<img" in browser.value("document.querySelector('main').textContent")  # shown as the text that it is
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [1100, 390])
def test_browser_shows_the_table_of_a_suite(
    browser: Browser, tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    grid = ["method.lr=0.01,0.1", "--data", "digits", "--net", "linear", "--rounds", "2", "-c", "data.head_cap=20"]
    assert cli.run(["sweep", *grid, "--seeds", "0,1,2", "--workers", "1", "--quiet"]) == 0
    written(Path("runs/sweep"), out=tmp_path / "page.html")
    (suite,) = data_of((tmp_path / "page.html").read_text(encoding="utf-8"))["suites"]
    browser.open((tmp_path / "page.html").as_uri(), width)
    assert browser.value("document.querySelector('h1').textContent") == suite["title"] == "Sweep over method.lr"
    cells = "[...document.querySelectorAll('.suite table')].map((t) => [...t.tBodies[0].rows].map((row) => "
    words = r"c.textContent.replaceAll('\u00a0', ' ')"
    shown = browser.value(f"{cells}[...row.cells].map((c) => [{words}, c.classList.contains('best')])))")
    assert shown == [block["rows"] for block in suite["blocks"]]
    lines = browser.value("[...document.querySelectorAll('.caption li')].map((line) => line.textContent)")
    assert lines == suite["caption"]
    assert suite["command"] in browser.value("[...document.querySelectorAll('pre')].map((p) => p.textContent)")
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.complaints == []


@pytest.mark.slow
def test_browser_switches_methods_and_tells_figures(browser: Browser, runs: Path, tmp_path: Path) -> None:
    written(runs, out=tmp_path / "page.html")
    browser.open((tmp_path / "page.html").as_uri(), 1100)
    lines = "document.querySelector('svg[aria-label=\"Accuracy over rounds\"]').querySelectorAll('polyline').length"
    assert browser.value(lines) == 2
    browser.value("document.querySelector('.legend button').click()")
    assert browser.value(lines) == 1
    assert browser.value("document.activeElement === document.body || document.activeElement.matches('.legend button')")
    browser.value("document.querySelector('.legend button').click()")
    browser.value(
        "document.querySelector('svg[aria-label=\"Accuracy over rounds\"]')"
        ".dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))"
    )
    tip = browser.value("document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent")
    data = data_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert tip.startswith("round 1")
    assert browser.value("document.querySelector('#tip svg').getBoundingClientRect().height") < 20
    for method in data["settings"][0]["methods"]:
        first = [data["rounds"][key]["accuracy"][0] for key in method["runs"]]
        assert f"{method['label']}{int(1000 * sum(first) / 2 + 0.5) / 10:.1f} (" in tip
    assert browser.complaints == []


@pytest.mark.slow
def test_browser_counts_seeds_and_not_runs(browser: Browser, tiny: Values, tmp_path: Path) -> None:
    """Clients alone are one seed. Of a column the highest of the printed means is bold."""
    alone = {"clients_per_round": "none", "method__name": "fedavg"}
    runs = [({**alone, "data__alone": str(k)}, {"accuracy": 0.2 + 0.3 * k}) for k in range(3)]
    runs.append(({"method__name": "fedavg", "clients_per_round": "none"}, {"accuracy": 0.6}))
    (tmp_path / "page.html").write_text(document(page_of(tiny, *runs), "runs"))
    browser.open((tmp_path / "page.html").as_uri(), 1100)
    card = "[...document.querySelectorAll('.card')].find((card) => card.firstChild.textContent === 'Results')"
    said = browser.value(f"{card}.textContent")
    assert "over seeds" not in said and "So few seeds" in said
    rows = browser.value(
        f"[...{card}.querySelector('tbody').rows].map((row) => [...row.cells].map((c) => c.textContent))"
    )
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("fedavg", "60.0", "1 seed"),
        ("fedavg@alone", "50.0", "1 seed"),
    ]
    assert browser.value(f"[...{card}.querySelectorAll('.best')].map((c) => c.textContent)") == ["60.0"]
    assert browser.complaints == []


@pytest.mark.slow
def test_browser_follows_a_run(browser: Browser, runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "fedavg-seed0", tmp_path / "runs" / "a", ignore=shutil.ignore_patterns("SHA256SUMS"))
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    summary = (run / "summary.json").read_bytes()
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:2]))
    points = "(document.querySelector('polyline.line')?.getAttribute('points') || '').trim().split(/\\s+/).length"
    state = "document.querySelector('.state')?.textContent"
    with serving(tmp_path / "runs") as server:
        browser.open(server.address, 390)
        browser.until(f"{points} === 2 && {state} === 'stopped'")
        (run / "metrics.jsonl").write_bytes(b"".join(lines) + b'{"round": 4, "cl')
        browser.until(f"{points} === 3")
        (run / "summary.json").write_bytes(summary)
        browser.until(f"{state} === 'finished' && {DRAWN}.includes('Confusion matrix of fedavg')")
        assert browser.value("document.documentElement.scrollWidth") <= 390
        assert browser.complaints == []


def test_the_page_tells_the_clients_that_there_are(tmp_path: Path) -> None:
    """The number in the experiment is not that of a natural partition."""

    def clients(environment: dict[str, Any] | None, **data: Any) -> int | None:
        experiment = {"data": {"clients": 10, "partition": "natural", **data}}
        return figures._clients(reading.Reading(RunView(tmp_path, experiment, environment, [], None)))

    assert clients({"client_names": ["north", "south", "west"]}) == 3
    assert clients({"client_counts": [[1, 2], [3, 4]]}) == 2  # of an older run
    assert clients(None) is None
    assert clients(None, partition="iid") == 10
    experiment = {"data": {"source": "t.csv", "imbalance": "natural"}, "clients_per_round": "none"}
    assert figures._title(experiment, 3) == "t, 3 clients"
    assert figures._title(experiment, None) == "t, natural clients"
    assert figures._title({**experiment, "clients_per_round": 2}, 3) == "t, 2 of 3 clients a round"
