"""Whatever happens to a run - kills, signals, full disks, damage - it ends in the same bits or with one clear line."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import victims
from victims import contents

from redgrape.cli import main as cli
from redgrape.data.federation import Federation
from redgrape.engines import in_process
from redgrape.errors import RedgrapeError, StorageError
from redgrape.reading.run_view import RunView
from redgrape.runs import checksums, durable
from redgrape.runs.checkpoints import FORMAT
from redgrape.runs.environment import MACHINE
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run

Values = Callable[..., dict[str, Any]]
Tally = Callable[..., None]
slow = pytest.mark.slow
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

# SCAFFOLD keeps a state at every client: all there is to lose.
VICTIM: dict[str, Any] = {
    "seed": 5,
    "rounds": 6,
    "clients_per_round": 3,
    "data": {"source": "digits", "ir": 5.0, "head_cap": 40, "clients": 6},
    "net": {"name": "linear"},
    "method": {"name": "scaffold", "lr": 0.1, "epochs": 1, "batch_size": 8},
}


def command(*arguments: object, capsys: pytest.CaptureFixture[str]) -> SimpleNamespace:
    """A call of redgrape in this process."""
    capsys.readouterr()
    code = cli.run([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return SimpleNamespace(code=code, out=out, err=err, lines=err.splitlines())


def one_line(outcome: SimpleNamespace, code: int) -> str:
    assert outcome.code == code, outcome
    assert len(outcome.lines) == 1, outcome.err
    assert outcome.err.startswith("redgrape: ")
    assert "Traceback" not in outcome.err
    line: str = outcome.err
    return line


def carry_out(path: Path, values: dict[str, Any], workers: int = 1) -> Run:
    begun = (path / "experiment.toml").exists()
    run = Run(RunFolder.open(path) if begun else RunFolder.create(path, Experiment.parse(values)), workers=workers)
    for _ in run.steps():
        pass
    return run


# Kills and signals


def victims_of(tmp_path: Path, values: Mapping[str, Any] = VICTIM, timeout: float = 200, **job: Any) -> Any:
    """What became of the victims of this job (see victims.py)."""
    toml = tmp_path / "experiment.toml"
    toml.write_text(Experiment.parse(values).to_toml())
    job = {"root": str(tmp_path), "experiment": str(toml), **job}
    call = [sys.executable, victims.__file__, json.dumps(job)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    outcome = json.loads(done.stdout)
    assert outcome["shared memory"] == []
    assert not [path for path in tmp_path.rglob(".*") if path.name.endswith(".tmp")]
    return outcome["result"]


@linux
@pytest.mark.parametrize("kills", [10, pytest.param(1000, marks=[slow, pytest.mark.timeout(7200)])])
def test_a_run_that_is_killed_at_any_instant_ends_in_the_same_bits(tmp_path: Path, tally: Tally, kills: int) -> None:
    """`redgrape run` with two workers and SCAFFOLD, killed at random instants and resumed until it is finished: model,
    client states, metrics and summary are those of the quiet run. No process, shared memory or temporary file stays."""
    result = victims_of(tmp_path, kind="kill", kills=kills, seed=kills, timeout=7200)
    landed = ", ".join(f"{count} {stage}" for stage, count in result["stages"].items() if count)
    tally("SIGKILL at a random instant, then resumed", result["kills"], result["kills"] - len(result["wrong"]), landed)
    tally("runs that were killed at least once, ended in the bits of the quiet run", result["runs"], result["equal"])
    assert result["wrong"] == []
    assert result["equal"] == result["runs"]
    assert result["kills"] >= kills
    assert result["orphans"] == 0
    assert sum(count > 0 for count in result["stages"].values()) >= 2


@linux
def test_a_temporary_folder_whose_name_is_too_long_for_a_socket(tmp_path: Path) -> None:
    temporary = tmp_path / ("t" * 100)
    temporary.mkdir()
    (tmp_path / "e.toml").write_text(Experiment.parse(VICTIM).to_toml())
    call = [sys.executable, "-m", "redgrape", "run", str(tmp_path / "e.toml"), "--out", str(tmp_path / "run")]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run([*call, "--workers", "2"], env=environment, capture_output=True, text=True, timeout=100)
    line = one_line(SimpleNamespace(code=done.returncode, err=done.stderr, lines=done.stderr.splitlines()), code=2)
    assert str(temporary) in line
    assert "TMPDIR" in line
    assert not (tmp_path / "run").exists()


SIGNALS = [
    (stage, number, count, workers)
    for stage in ("reading data", "starting workers", "training", "evaluating", "writing checkpoint", "writing summary")
    for number in (signal.SIGINT, signal.SIGTERM)
    for count in (1, 2)
    for workers in (1, 2)
]
SOME_SIGNALS = [
    ("reading data", signal.SIGTERM, 1, 1),
    ("starting workers", signal.SIGINT, 1, 2),
    ("training", signal.SIGINT, 2, 2),
    ("training", signal.SIGTERM, 1, 2),
    ("evaluating", signal.SIGINT, 1, 1),
    ("writing checkpoint", signal.SIGTERM, 2, 1),
    ("writing checkpoint", signal.SIGINT, 1, 2),
]


@linux
@pytest.mark.parametrize("tries", [SOME_SIGNALS, pytest.param(SIGNALS, marks=[slow, pytest.mark.timeout(1200)])])
def test_signals(tmp_path: Path, tally: Tally, tries: list[tuple[str, int, int, int]]) -> None:
    """Once: 130 or 143 and one line. Twice, while it is still ending: the same code at once. Resumed, the same bits."""
    values = {**VICTIM, "rounds": 3}
    results = victims_of(tmp_path, values, kind="signal", tries=tries, timeout=1200)
    survived = 0
    for result in results:
        _, number, count, _ = result["try"]
        assert result["code"] == 128 + number, result
        assert result["orphans"] == 0, result
        assert result["begun"], result
        if count == 1:
            word = "interrupted" if number == signal.SIGINT else "terminated"
            assert len(result["said"]) == 1, result
            assert result["said"][0].startswith(f"redgrape: {word}; run `redgrape resume "), result
            assert result["said"][0].endswith("` to continue from the last finished round"), result
        assert not any("Traceback" in line for line in result["said"]), result
        assert (result["again"], result["wrong"]) == (0, []), result
        survived += 1
    tally("Ctrl-C or SIGTERM, once or twice, 1 or 2 workers, at every stage", len(results), survived)


@linux
@slow
@pytest.mark.timeout(3600)
def test_a_long_run_under_fire(tmp_path: Path, tally: Tally) -> None:
    """10,000 client-rounds; every few seconds a worker is killed or stopped for good, or the whole process is killed
    and resumed."""
    values = {**VICTIM, "rounds": 500, "clients_per_round": 20, "data": {**VICTIM["data"], "clients": 40}}
    job = {"kind": "soak", "seed": 1, "every": [1.0, 4.0], "options": ["--deadline", "3"]}
    result = victims_of(tmp_path, values, **job, timeout=3600)
    assert (result["code"], result["wrong"], result["orphans"]) == (0, [], 0), result
    faults = ", ".join(f"{count} {fault}" for fault, count in sorted(result["faults"].items()))
    total = sum(result["faults"].values())
    tally("a run of 10,000 client-rounds with a kill every few seconds", total, total, faults)
    assert len(result["faults"]) == 3


@linux
@pytest.mark.parametrize("stopped", ["nobody", "the server of processes", "all of them"])
def test_a_real_process_that_is_killed_leaves_nothing_running_and_nothing_behind(
    tmp_path: Path, tiny: Values, stopped: str
) -> None:
    """Its clients would go on for a minute; they end with it, also where SIGSTOP has stopped whom they come from. Its
    temporary folder is empty afterwards."""
    toml = tmp_path / "e.toml"
    toml.write_text(Experiment.parse(tiny(rounds=3)).to_toml())
    temporary = Path(tempfile.mkdtemp())  # not below tmp_path: the name of a socket in it may have 107 bytes
    environment = {**os.environ, "TMPDIR": str(temporary), "REDGRAPE_TEST_PAUSE": "60"}
    arguments = ["run", str(toml), "--out", str(tmp_path / "run"), "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "redgrape", *arguments],
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with process:
        try:
            deadline = time.monotonic() + 60
            while len(victims.workers_of(process.pid)) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert len(victims.workers_of(process.pid)) >= 2
            time.sleep(1)  # until the clients are at work
            workers = victims.workers_of(process.pid)
            servers = {parent for pid, parent, _ in victims.processes() if pid in workers}
            for pid in {"nobody": set(), "the server of processes": servers}.get(stopped, {*servers, *workers}):
                os.kill(pid, signal.SIGSTOP)
        finally:
            process.kill()
    left = victims.orphans(process.pid)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    assert [path.name for path in temporary.iterdir()] == []
    temporary.rmdir()


# Determinism

VARIANTS = {
    "workers": [1, 2, 4],
    "OMP_NUM_THREADS": ["1", "2", "4"],
    "MKL_NUM_THREADS": ["1", "3"],
    "PYTHONHASHSEED": ["0", "1", "12345"],
    "LC_ALL": ["C", "C.UTF-8", "tr_TR.UTF-8"],
    "TZ": ["UTC", "Pacific/Kiritimati", "America/St_Johns"],
}


def variants(count: int) -> list[dict[str, Any]]:
    """So many combinations; every value of every setting is in the first three."""
    first = [{name: values[i % len(values)] for name, values in VARIANTS.items()} for i in range(3)]
    dice = random.Random(0)
    return [*first, *({name: dice.choice(values) for name, values in VARIANTS.items()} for _ in range(count - 3))]


@pytest.mark.parametrize("count", [3, pytest.param(12, marks=[slow, pytest.mark.timeout(1800)])])
def test_one_result_whatever_the_settings_of_the_machine(tmp_path: Path, tally: Tally, count: int) -> None:
    """Worker and thread counts, hash seeds, locales and time zones change no bit of any file."""
    toml = tmp_path / "e.toml"
    toml.write_text(Experiment.parse({**VICTIM, "rounds": 1, "net": {"name": "cnn"}}).to_toml())
    found = []
    for i, variant in enumerate(variants(count)):
        workers = variant.pop("workers")
        out = tmp_path / str(i)
        done = subprocess.run(
            [sys.executable, "-m", "redgrape", "run", toml, "--out", out, "--workers", str(workers), "--quiet"],
            env={**os.environ, **variant},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(contents(out))
    equal = sum(each == found[0] for each in found)
    tally("other worker and thread counts, hash seeds, locales, time zones: equal bits", count, equal)
    assert equal == count


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=slow)])
def test_the_order_of_answers_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally, tiny: Values, count: int
) -> None:
    original = in_process.InProcess.run_clients
    dice = random.Random(4)

    def shuffled(*args: Any) -> Iterator[Any]:
        answers = list(original(*args))
        dice.shuffle(answers)
        return iter(answers)

    values = tiny(clients_per_round=8, data__clients=8, method={"name": "scaffold", "lr": 0.1, "batch_size": 8})
    carry_out(tmp_path / "straight", values)
    straight = contents(tmp_path / "straight")
    monkeypatch.setattr(in_process.InProcess, "run_clients", shuffled)
    equal = 0
    for i in range(count):
        carry_out(tmp_path / str(i), values)
        equal += contents(tmp_path / str(i)) == straight
    tally("answers in another order: equal bits", count, equal)
    assert equal == count


def after(path: Path, values: dict[str, Any], rounds: int) -> RunFolder:
    """A run left after so many rounds."""
    folder = RunFolder.create(path, Experiment.parse(values))
    steps = Run(folder, workers=1).steps()
    for _ in range(rounds):
        next(steps)
    steps.close()  # type: ignore[attr-defined]
    return folder


@pytest.mark.parametrize("name", MACHINE)
def test_what_could_change_bits_is_refused_unless_asked_for(
    tmp_path: Path, tiny: Values, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that another version or machine began: one line that says which. With --allow-changes it goes on, says so,
    and environment.json remembers it."""
    carry_out(tmp_path / "straight", tiny(rounds=3))
    folder = after(tmp_path / "run", tiny(rounds=3), 2)
    path = folder.path / "environment.json"
    before = {**json.loads(path.read_bytes()), name: "ancient"}
    checksums.write(folder.path, {path.name: json.dumps(before).encode()})
    unchanged = contents(folder.path)
    line = one_line(command("resume", folder.path, "--workers", 1, capsys=capsys), 2)
    assert f"began with {name} ancient and is {name} " in line
    assert "--allow-changes" in line
    assert contents(folder.path) == unchanged
    done = command("resume", folder.path, "--workers", 1, "--quiet", "--allow-changes", capsys=capsys)
    assert done.code == 0, done
    assert f"note: the run began with {name} ancient" in done.err
    assert json.loads(path.read_bytes())["changes"][0]["after_round"] == 2
    assert contents(folder.path)["summary.json"] == contents(tmp_path / "straight")["summary.json"]
    assert command("resume", folder.path, "--workers", 1, "--quiet", capsys=capsys).err == ""


def test_a_change_before_the_first_round_is_no_matter(tmp_path: Path, tiny: Values) -> None:
    folder = RunFolder.create(tmp_path / "run", Experiment.parse(tiny()))
    run = Run(folder, workers=1)
    prepared = run.venue.prepare(run.experiment, None)
    federation = prepared.federation
    assert isinstance(federation, Federation)
    environment = run._checked_environment(prepared, federation, None, None)
    assert environment is not None
    folder.write_environment(environment, federation)
    path = folder.path / "environment.json"
    before = {**json.loads(path.read_bytes()), "torch": "ancient"}
    checksums.write(folder.path, {path.name: json.dumps(before).encode()})
    assert carry_out(folder.path, {}).notes == []
    assert json.loads(path.read_bytes())["torch"] != "ancient"


# Disks


@contextlib.contextmanager
def mounted(path: Path, size: int) -> Iterator[Path]:
    """A file system of its own, of so many KB."""
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@linux
@pytest.mark.parametrize("rooms", [(4, 8, 12, 16, 60, 160), pytest.param(range(4, 241, 4), marks=slow)])
def test_a_disk_that_is_really_full(
    tmp_path: Path, tiny: Values, tally: Tally, capsys: pytest.CaptureFixture[str], rooms: Sequence[int]
) -> None:
    """With room for ever more of a run: exit code 74 and one line that names a file; with room again, the same bits."""
    toml = tmp_path / "e.toml"
    toml.write_text(Experiment.parse(tiny(rounds=3)).to_toml())
    carry_out(tmp_path / "straight", tiny(rounds=3))
    straight = contents(tmp_path / "straight")
    survived = 0
    with mounted(tmp_path / "disk", 4096) as disk:
        for free in rooms:  # KB
            run = disk / f"run-{free}"
            (disk / "filler").write_bytes(bytes(1024 * (os.statvfs(disk).f_bavail * 4 - free)))
            outcome = command("run", toml, "--out", run, "--workers", 1, "--quiet", capsys=capsys)
            (disk / "filler").unlink()
            if outcome.code:
                assert "No space left on device" in one_line(outcome, 74)
                assert str(disk) in outcome.err
            begun = (run / "experiment.toml").exists()
            again = ("resume", run) if begun else ("run", toml, "--out", run)
            done = command(*again, "--workers", 1, "--quiet", capsys=capsys)
            assert (done.code, done.err) == (0, ""), done
            survived += contents(run) == straight
            assert not list(run.rglob(".*.tmp"))
            shutil.rmtree(run)
    tally("a full disk", len(rooms), survived)
    assert survived == len(rooms)


@linux
def test_a_file_system_that_is_read_only(tmp_path: Path, tiny: Values, capsys: pytest.CaptureFixture[str]) -> None:
    toml = tmp_path / "e.toml"
    toml.write_text(Experiment.parse(tiny()).to_toml())
    with mounted(tmp_path / "disk", 4096) as disk:
        folder = after(disk / "run", tiny(), 1)
        before = contents(folder.path)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for arguments in (["resume", folder.path], ["run", toml, "--out", disk / "new"]):
            line = one_line(command(*arguments, "--workers", 1, capsys=capsys), 74)
            assert "Read-only file system" in line
        assert command("show", folder.path, capsys=capsys).code == 0
        assert contents(folder.path) == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
@slow
def test_every_error_of_the_system_at_every_step(
    tmp_path: Path, tiny: Values, monkeypatch: pytest.MonkeyPatch, tally: Tally, number: int
) -> None:
    """At each write, fsync and rename: a StorageError of one line that names the file, and afterwards the same bits."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    carry_out(tmp_path / "straight", tiny())
    straight = contents(tmp_path / "straight")
    steps = 0

    def fail_at(step: int) -> None:
        nonlocal steps
        steps = 0

        def fault_point(kind: str) -> None:
            nonlocal steps
            steps += 1
            if steps == step:
                raise OSError(number, os.strerror(number))

        monkeypatch.setattr(durable, "fault_point", fault_point)

    survived = 0
    for step in itertools.count(1):
        path = tmp_path / f"step-{step}"
        fail_at(step)
        try:
            carry_out(path, tiny())
        except StorageError as error:
            assert str(path) in str(error)
            assert os.strerror(number) in str(error)
        else:
            break
        fail_at(0)
        carry_out(path, tiny())
        survived += contents(path) == straight
        assert not list(path.rglob(".*.tmp"))
        shutil.rmtree(path)
    tally(f"the system's error {errno.errorcode[number]} at every step of writing", step - 1, survived)
    assert survived == step - 1 > 60


def test_a_file_that_may_not_grow(tmp_path: Path, tiny: Values, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit of the system on the size of files."""
    toml = tmp_path / "e.toml"
    toml.write_text(Experiment.parse(tiny()).to_toml())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (100, 900, 1100):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            outcome = command("run", toml, "--out", tmp_path / f"{size}", "--workers", 1, "--quiet", capsys=capsys)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "File too large" in one_line(outcome, 74)


# Damage


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory, tiny: Values) -> Path:
    return after(tmp_path_factory.mktemp("damage") / "unfinished", tiny(rounds=3), 2).path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny: Values) -> Path:
    return carry_out(tmp_path_factory.mktemp("damage") / "finished", tiny(rounds=3)).folder.path


def kinds(folder: Path) -> list[str]:
    """A file of every kind that a run has, those of its newest checkpoint and the states that this one needs."""
    found = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.stat().st_size)
    newest = max(name for name in found if name.startswith("checkpoints/")).rpartition("/")[0]
    return [n for n in found if not n.startswith(("checkpoints/", "clients/")) or n.startswith(newest)] + [
        max(n for n in found if n.startswith("clients/"))
    ]


def fate(folder: Path, straight: dict[str, bytes], name: str) -> str:
    """What becomes of a run with a damaged file: refused in one line, repaired and said, or no matter at all."""
    run = None
    try:
        run = Run(RunFolder.open(folder), workers=1)
        for _ in run.steps():
            pass
    except RedgrapeError as error:
        assert len(str(error).splitlines()) == 1
        assert str(folder) in str(error)
        return "refused"
    found = contents(folder)
    if name in {"experiment.toml", "SHA256SUMS"}:  # what is harmless there stays
        found[name] = straight[name]
    if name == "times.jsonl":
        found.pop("rounds of times.jsonl")
        straight = {key: value for key, value in straight.items() if key != "rounds of times.jsonl"}
    if found != straight:
        return f"WRONG: {[n for n in straight if found.get(n) != straight[n]]}"
    return "said" if run.notes else "no matter"


def seen_by_a_reader(folder: Path) -> Any:
    """What `ls`, `show` and `report` get of a run; None where they are told that it is damaged."""
    try:
        view = RunView.read(folder)
    except StorageError:
        return None
    return (view.experiment, view.environment, view.metrics, view.summary)


def damaged(whole: bytes, dice: random.Random, how: str) -> bytes:
    place = dice.randrange(len(whole))
    if how == "cut":
        return whole[:place]
    return whole[:place] + bytes([whole[place] ^ 1 << dice.randrange(8)]) + whole[place + 1 :]


@pytest.mark.usefixtures("no_waiting_for_the_disk")
@pytest.mark.parametrize("how", ["flip", "cut"])
@pytest.mark.parametrize("which", ["finished", "unfinished"])
@pytest.mark.parametrize("count", [2, pytest.param(100, marks=[slow, pytest.mark.timeout(3600)])])
def test_damage_to_any_file_is_detected(
    tmp_path: Path, finished: Path, unfinished: Path, tally: Tally, which: str, how: str, count: int
) -> None:
    """A bit turned over, or the end cut off, in every kind of file: the run is refused in one line, or goes on from
    what is whole, says so, and ends in the bits of the quiet run. Readers tell the truth or that it is damaged."""
    source, straight = (finished if which == "finished" else unfinished), contents(finished)
    truth = seen_by_a_reader(source)
    assert truth is not None
    fates: dict[str, dict[str, int]] = {}
    for name in kinds(source):
        dice = random.Random(name)
        for _ in range(count):
            folder = tmp_path / "run"
            shutil.copytree(source, folder)
            whole = (folder / name).read_bytes()
            (folder / name).write_bytes(content := damaged(whole, dice, how))
            assert seen_by_a_reader(folder) in (None, truth), (name, content)
            became = fate(folder, straight, name)
            fates.setdefault(name, {}).setdefault(became, 0)
            fates[name][became] += 1
            shutil.rmtree(folder)
    wrong = {name: found for name, found in fates.items() if any(f.startswith("WRONG") for f in found)}
    tries = sum(sum(found.values()) for found in fates.values())
    what = "a turned bit" if how == "flip" else "a file cut short"
    bad = sum(n for found in wrong.values() for f, n in found.items() if f.startswith("WRONG"))
    tally(f"{what} in any file of a run, {which}", tries, tries - bad)
    assert wrong == {}
    if how == "flip":  # only the times of a run that goes on have no checksum, and only the list of checksums is none
        silent = {name for name, found in fates.items() if "no matter" in found}
        assert silent <= {"lock", "SHA256SUMS"} | ({"times.jsonl"} if which == "unfinished" else set()), fates


def test_damage_to_a_model_is_detected(
    finished: Path, vectors: Path, tmp_path: Path, tally: Tally, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bit turned over in any file that a prediction needs."""
    whole = tmp_path / "whole"
    assert command("export", finished, whole, capsys=capsys).code == 0
    dice = random.Random(2)
    refused = 0
    for name in ("model.json", "model.safetensors") * 10:
        folder = Path(shutil.copytree(whole, tmp_path / "model"))
        (folder / name).write_bytes(damaged((folder / name).read_bytes(), dice, "flip"))
        assert "is damaged" in one_line(command("predict", folder, vectors, capsys=capsys), 65)
        refused += 1
        shutil.rmtree(folder)
    tally("a turned bit in an exported model", 20, refused)


def test_a_copy_tells_what_was_edited(unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An edited experiment is refused with each key, its old and its new value."""
    folder = Path(shutil.copytree(unfinished, tmp_path / "run"))
    path = folder / "experiment.toml"
    whole = path.read_text()
    path.write_text(whole.replace("lr = 0.1", "lr = 0.5").replace("seed = 3", "seed = 4"))
    line = one_line(command("resume", folder, "--workers", 1, capsys=capsys), 74)
    assert "was edited: seed was 3 and is 4, method.lr was 0.1 and is 0.5" in line
    assert "round-000002/description.toml' is the original" in line
    path.write_text(whole.replace("rounds = 3", "rounds = 5"))
    line = one_line(command("resume", folder, "--workers", 1, capsys=capsys), 74)
    assert "rounds was 3 and is 5; use `redgrape resume --rounds` to extend a run" in line
    path.write_text(whole + "# a remark\n")
    assert command("resume", folder, "--workers", 1, "--quiet", capsys=capsys).code == 0


def test_an_edited_number_of_rounds_can_be_meant(
    unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(unfinished, tmp_path / "run"))
    path = folder / "experiment.toml"
    path.write_text(path.read_text().replace("rounds = 3", "rounds = 4"))
    assert command("resume", folder, "--workers", 1, "--quiet", "--rounds", 4, capsys=capsys).code == 0
    assert RunView.read(folder).rounds_done == 4


def test_foreign_files_are_no_matter(unfinished: Path, finished: Path, tmp_path: Path) -> None:
    """What a user, an editor or a file manager puts there is left alone, and changes nothing."""
    folder = Path(shutil.copytree(unfinished, tmp_path / "run"))
    foreign = ["notes.txt", ".DS_Store", "checkpoints/notes.txt", "checkpoints/round-x/y", "clients/notes", "a/b/c"]
    for name in foreign:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text("mine")
    carry_out(folder, {})
    found = contents(folder)
    assert all(found.pop(name) == b"mine" for name in foreign)
    assert found == contents(finished)


@pytest.mark.parametrize("name", ["partition.safetensors", "SHA256SUMS", "times.jsonl", "lock"])
def test_what_is_missing_but_can_be_made_anew_is(unfinished: Path, finished: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(unfinished, tmp_path / "run"))
    (folder / name).unlink()
    carry_out(folder, {})
    found, wanted = contents(folder), contents(finished)
    if name == "SHA256SUMS":  # files that are not written again are not listed
        assert set(found.pop(name).splitlines()) < set(wanted.pop(name).splitlines())
    if name == "times.jsonl":
        assert found.pop(f"rounds of {name}") == b"3"
        wanted.pop(f"rounds of {name}")
    assert found == wanted


def test_a_damaged_environment_can_be_done_without(
    unfinished: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(unfinished, tmp_path / "run"))
    path = folder / "environment.json"
    path.write_bytes(path.read_bytes().replace(b"torch", b"Torch"))
    line = one_line(command("resume", folder, "--workers", 1, capsys=capsys), 74)
    assert "environment.json' is damaged" in line
    assert "--allow-changes" in line
    done = command("resume", folder, "--workers", 1, "--quiet", "--allow-changes", capsys=capsys)
    assert done.code == 0
    assert "it is written again" in done.err
    assert contents(folder)["summary.json"] == contents(finished)["summary.json"]


@pytest.mark.parametrize("version", [0, FORMAT - 1, FORMAT + 1, 99])
def test_other_formats_are_refused_in_one_line(
    finished: Path, tmp_path: Path, version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    for path in folder.glob("checkpoints/*/manifest.json"):
        path.write_text(json.dumps({**json.loads(path.read_bytes()), "format": version}))
    line = one_line(command("resume", folder, "--workers", 1, capsys=capsys), 74)
    assert f"has format {version}" in line
