"""The run folder: what a crash, damage or a second process can do to it, and that a run comes out the same in bits."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redgrape import nets, tree
from redgrape.data.prepare import DataOptions, prepare
from redgrape.errors import BusyError, ConfigError, DataError, Diverged, RedgrapeError, StorageError
from redgrape.exchange import checks
from redgrape.reading.run_view import RunView, find_runs
from redgrape.rounds import InMemory, RunState
from redgrape.runs import durable
from redgrape.runs.checkpoints import FORMAT
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run

Values = Callable[..., dict[str, Any]]


pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a run folder that must be equal between equal runs."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    found.pop("times.jsonl", None)
    sums = found.get("SHA256SUMS", b"").splitlines(keepends=True)
    return {**found, "SHA256SUMS": b"".join(line for line in sums if not line.endswith(b"times.jsonl\n"))}


def carry_out(path: Path, values: dict[str, Any], workers: int = 1) -> Path:
    """Begin a run, or go on with it, to its end."""
    begun = (path / "experiment.toml").exists()
    folder = RunFolder.open(path) if begun else RunFolder.create(path, Experiment.parse(values))
    for _ in Run(folder, workers=workers).steps():
        pass
    return path


def leftovers(folder: Path) -> list[Path]:
    return list(folder.rglob(".*.tmp"))


# Checkpoints


def state_of(round: int) -> RunState:
    """A state with every kind of tensor, different in every round."""
    generator = torch.Generator().manual_seed(round)
    double = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    server = {
        "model": {"encoder.0.weight": torch.randn(3, 4, generator=generator).T, "classifier.bias": torch.ones(4)},
        "seen": torch.tensor([True, False, True]),
        "age": torch.tensor([round, -(2**62)]),
        "scalar": torch.tensor(round),
        "deep": {"er": {"double": double, "nan": torch.tensor([float("nan"), -0.0, float("inf")])}},
    }
    clients = {k: {"visits": torch.tensor(round * k), "inner": {"dual": double * k}} for k in (0, 3, 12)}
    return RunState(round, server, InMemory(clients))


def on_disk(folder: RunFolder, state: RunState) -> RunState:
    """The state as a run in this folder would have it."""
    return replace(state, clients=folder.checkpoints.states(13).updated(state.clients))


@pytest.fixture
def saved(tmp_path: Path, tiny: Values) -> RunFolder:
    """A folder with the checkpoints of rounds 1 and 2."""
    folder = RunFolder.create(tmp_path / "run", Experiment.parse(tiny(rounds=9)))
    for round in (1, 2):
        save(folder, round)
    return folder


def save(folder: RunFolder, round: int) -> None:
    folder.append({"round": round, "test": {"accuracy": round / 10}}, {"train": 0.5})
    folder.save(on_disk(folder, state_of(round)), folder.experiment())


def newest(folder: RunFolder) -> RunState:
    state, _ = folder.checkpoints.latest()
    assert state is not None
    return state


def check_passed_over(folder: RunFolder) -> None:
    """Round 2 is found damaged, named, and round 1 is given whole in its place."""
    state, notes = folder.checkpoints.latest()
    assert state is not None
    assert state.round == 1
    assert tree.equal(state.server, state_of(1).server)
    assert len(notes) == 1
    assert "round-000002" in notes[0]
    assert len(notes[0].splitlines()) == 1


def checkpoint(folder: RunFolder, round: int = 2) -> Path:
    return folder.path / "checkpoints" / f"round-{round:06d}"


def test_a_checkpoint_gives_back_every_bit(tmp_path: Path, tiny: Values) -> None:
    """Server and client states of every dtype, nested, with NaN and -0.0, come back as they were."""
    folder = RunFolder.create(tmp_path / "run", Experiment.parse(tiny()))
    assert folder.checkpoints.latest() == (None, [])
    state = state_of(1)
    folder.append({"round": 1}, {})
    folder.save(on_disk(folder, state), folder.experiment())
    back, notes = folder.checkpoints.latest()
    assert back is not None
    assert (back.round, notes) == (1, [])
    assert tree.equal(back.server, state.server)
    assert set(back.clients) == {0, 3, 12}
    assert all(tree.equal(back.clients[k], state.clients[k]) for k in state.clients)
    assert back.server["age"].dtype == torch.int64
    assert back.server["seen"].dtype == torch.bool
    assert back.clients[3]["inner"]["dual"].dtype == torch.float64


def test_a_run_without_client_states_has_no_file_for_them(tmp_path: Path, tiny: Values) -> None:
    folder = RunFolder.create(tmp_path / "run", Experiment.parse(tiny()))
    folder.append({"round": 1}, {})
    folder.save(RunState(1, state_of(1).server), folder.experiment())
    assert sorted(p.name for p in checkpoint(folder, 1).iterdir()) == [
        "description.toml",
        "manifest.json",
        "server.safetensors",
    ]
    assert not newest(folder).clients
    assert not (folder.path / "clients").exists()


def test_the_last_two_checkpoints_are_kept(saved: RunFolder) -> None:
    """And the newest is the one of the highest round, also where its number has more digits than others."""
    for round in (3, 4):
        save(saved, round)
    assert [p.name for p in sorted((saved.path / "checkpoints").iterdir())] == ["round-000003", "round-000004"]
    save(saved, 1_000_000)
    save(saved, 999_999)
    assert newest(saved).round == saved.checkpoints.newest_round() == 1_000_000


FILES = ["server.safetensors", "clients.safetensors", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_detected(saved: RunFolder, name: str) -> None:
    """At 30 random places of each file; the checkpoint before it serves, and that is said."""
    path = checkpoint(saved) / name
    whole = path.read_bytes()
    dice = random.Random(name)
    for _ in range(30):
        damaged = bytearray(whole)
        damaged[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        check_passed_over(saved)
    path.write_bytes(whole)
    assert newest(saved).round == 2


def test_any_flipped_bit_of_a_manifest_is_detected(saved: RunFolder) -> None:
    """The manifest has no checksum of its own, so bits of nearly every byte are tried."""
    path = checkpoint(saved) / "manifest.json"
    whole = path.read_bytes()
    for place in range(0, 8 * len(whole), 11):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(StorageError):
            saved.checkpoints._load(checkpoint(saved))


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_is_detected(saved: RunFolder, name: str) -> None:
    path = checkpoint(saved) / name
    whole = path.read_bytes()
    for length in {
        0,
        len(whole) - 1 - (name == "manifest.json"),
        *random.Random(name).sample(range(len(whole) - 2), 28),
    }:
        path.write_bytes(whole[:length])
        check_passed_over(saved)


@pytest.mark.parametrize("name", [*FILES, "."])
def test_a_missing_file_is_detected(saved: RunFolder, name: str) -> None:
    """Each of the checkpoint's files, or all of them."""
    if name == ".":
        shutil.rmtree(checkpoint(saved))
        checkpoint(saved).mkdir()
    else:
        (checkpoint(saved) / name).unlink()
    check_passed_over(saved)


def garbage() -> Iterator[bytes]:
    yield from (b"null", b"[]", b"{}", b"7", b'"x"', b"\xff\xfe\x00", b"<html>", b"[" * 100_000, b"9" * 5000)
    yield json.dumps({"format": FORMAT}).encode()


CHANGES: list[dict[str, Any]] = [
    {"round": 3},
    {"round": "2"},
    {"round": None},
    {"rounds": 8},
    {"rounds": 10},
    {"rounds": "x"},
    {"format": 0},
    {"format": True, "round": 1},
    {"format": None},
    {"experiment": "0" * 64},
    {"experiment": None},
    {"files": {}},
    {"files": []},
    {"files": {"server.safetensors": 3}},
    {"files": {"../../../../../../etc/passwd": {"bytes": 1, "sha256": "x"}}},
    {"metrics": {}},
    {"metrics": 5},
    {"metrics": {"bytes": -1, "sha256": "x"}},
    {"metrics": {"bytes": "many", "sha256": "x"}},
    {"unknown": 1},
]


def test_a_manifest_of_garbage_is_detected(saved: RunFolder) -> None:
    path = checkpoint(saved) / "manifest.json"
    good = json.loads(path.read_bytes())
    for content in [*garbage(), *[json.dumps({**good, **change}).encode() for change in CHANGES]]:
        path.write_bytes(content)
        check_passed_over(saved)


def test_a_manifest_of_another_checkpoint_is_detected(saved: RunFolder) -> None:
    shutil.copy(checkpoint(saved, 1) / "manifest.json", checkpoint(saved, 2) / "manifest.json")
    check_passed_over(saved)


def test_where_no_checkpoint_is_whole_the_run_is_refused(saved: RunFolder) -> None:
    """Never silently from the beginning."""
    for round in (1, 2):
        path = checkpoint(saved, round) / "server.safetensors"
        path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(StorageError, match=r"has no intact checkpoint: .*round-000002.* is damaged"):
        saved.checkpoints.latest()
    with pytest.raises(StorageError, match="no intact checkpoint"):
        next(Run(saved, workers=1).steps())


@pytest.mark.parametrize("version", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_refused(saved: RunFolder, version: int) -> None:
    for round in (1, 2):
        path = checkpoint(saved, round) / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), "format": version}))
    with pytest.raises(StorageError, match=f"has format {version}, and this redgrape reads {FORMAT}; use the"):
        saved.checkpoints.latest()


def test_stray_folders_are_no_checkpoints(saved: RunFolder) -> None:
    for name in ("round-", "round-x", "round-000009.old", "other"):
        (saved.path / "checkpoints" / name).mkdir()
    assert newest(saved).round == 2


def test_damaged_metrics_are_detected(saved: RunFolder) -> None:
    """Damage in the lines that a checkpoint covers spoils it: in the last line only the newest, in the first both."""
    path = saved.path / "metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second.replace(b"0.2", b"0.9"))
    state, notes = saved.checkpoints.latest()
    assert state is not None
    assert state.round == 1
    assert "metrics.jsonl' is damaged" in notes[0]
    path.write_bytes(first.replace(b"0.1", b"0.9") + second)
    with pytest.raises(StorageError, match=r"metrics.jsonl' is damaged"):
        saved.checkpoints.latest()
    path.unlink()
    with pytest.raises(StorageError, match=r"cannot read .*metrics.jsonl"):
        saved.checkpoints.latest()


def test_lines_that_no_checkpoint_covers_are_cut(saved: RunFolder) -> None:
    """A line cut short, a later line and a damaged one all go; what a checkpoint covers stays as it is."""
    before = {name: (saved.path / name).read_bytes() for name in ("metrics.jsonl", "times.jsonl")}
    for tail in (b'{"round": 3, "te', b'{"round": 3}\n', b'{"round": 3}\n{"rou', b"\x00\xff\n", b"7\n", b'{"x": 1}\n'):
        for name, content in before.items():
            (saved.path / name).write_bytes(content + tail)
        assert newest(saved).round == 2
        saved.cut_after(2)
        assert {name: (saved.path / name).read_bytes() for name in before} == before
    saved.cut_after(0)
    assert saved.metrics() == saved.times() == []


def test_a_reader_passes_over_a_line_cut_short(saved: RunFolder) -> None:
    with (saved.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"round": 3, "te')
    assert [record["round"] for record in saved.metrics()] == [1, 2]
    assert RunView.read(saved.path).rounds_done == 2


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("lr = 0.1", "lr = 0.2", False),
        ("seed = 3", "seed = 4", False),
        ("rounds = 9", "rounds = 8", False),
        ("rounds = 9", "rounds = 10", True),
        ("lr = 0.1", "lr   = 1e-1 # the same", True),
    ],
)
def test_an_edited_experiment_is_detected(saved: RunFolder, old: str, new: str, is_same: bool) -> None:
    """A checkpoint goes on only with the experiment that made it, or with more rounds of it."""
    path = saved.path / "experiment.toml"
    assert f"{old}\n" in path.read_text()
    path.write_text(path.read_text().replace(f"{old}\n", f"{new}\n"))
    if is_same:
        assert newest(saved).round == 2
    else:
        with pytest.raises(StorageError, match=r"belongs to another experiment than experiment.toml"):
            saved.checkpoints.latest()


# Folders, the lock, disks


def test_a_folder_that_holds_something_is_not_taken(tmp_path: Path, tiny: Values) -> None:
    experiment = Experiment.parse(tiny())
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        RunFolder.create(tmp_path, experiment)
    with pytest.raises(ConfigError, match="already exists"):
        RunFolder.create(tmp_path / "file", experiment)
    with pytest.raises(StorageError, match="cannot make"):
        RunFolder.create(tmp_path / "file" / "inside", experiment)
    with pytest.raises(StorageError, match="cannot make"):
        RunFolder.create(tmp_path / ("n" * 300), experiment)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(StorageError, match="is not a run folder"):
        RunFolder.open(tmp_path)


def test_a_new_folder_is_flushed_in_its_parents(tmp_path: Path, tiny: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(durable, "sync_folder", flushed.append)
    RunFolder.create(tmp_path / "runs" / "run", Experiment.parse(tiny()))
    assert {tmp_path, tmp_path / "runs", tmp_path / "runs" / "run"} <= {*flushed}


def test_what_is_discarded_leaves_nothing_but_what_was_there(tmp_path: Path, tiny: Values) -> None:
    experiment = Experiment.parse(tiny())
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "a" / "b" / "run", tmp_path / "there" / "run", tmp_path / "there"):
        RunFolder.create(path, experiment).discard()
        assert [p.name for p in tmp_path.rglob("*")] == ["there"]


def test_a_run_of_before_or_one_with_a_round_is_not_discarded(saved: RunFolder, tmp_path: Path, tiny: Values) -> None:
    created = RunFolder.create(tmp_path / "new", Experiment.parse(tiny()))
    RunFolder.open(created.path).discard()
    assert (created.path / "experiment.toml").exists()
    saved.discard()
    assert newest(saved).round == 2


def test_a_run_is_removed_as_a_whole(
    saved: RunFolder, tmp_path: Path, tiny: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash at any step it is there with every file, or a new run can begin in its place."""
    before, home, left = files(saved.path), tmp_path / "home", 0
    while True:
        run = RunFolder.open(shutil.copytree(saved.path, home / "run"))
        steps = iter(range(left))
        with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
            patched.setattr(durable, "fault_point", lambda kind, steps=steps: next(steps, None) is None and interrupt())
            run.remove()
            break
        if run.path.exists():
            assert files(run.path) == {**before, "lock": b""}
        else:
            assert find_runs(home) == []
            RunFolder.create(run.path, Experiment.parse(tiny()))
            assert not leftovers(home)
        shutil.rmtree(home)
        left += 1
    assert left > 5 and not list(home.iterdir())


def interrupt() -> None:
    raise KeyboardInterrupt


def test_the_lock(saved: RunFolder) -> None:
    """Held by one at a time, who is named; let go however the holder leaves."""
    for error in (None, RuntimeError("oops")):
        try:
            with saved.locked():
                with pytest.raises(BusyError, match=rf"in use by another process \(process {os.getpid()}\)"):
                    next(Run(saved, workers=1).steps())
                if error:
                    raise error
        except RuntimeError:
            assert error
        assert (saved.path / "lock").read_bytes() == b""
    with saved.locked():
        pass
    assert BusyError.exit_code == 75


def test_a_lock_in_a_folder_that_is_gone(saved: RunFolder) -> None:
    shutil.rmtree(saved.path)
    with pytest.raises(StorageError, match="cannot lock"), saved.locked():
        pass


def test_a_full_disk_at_any_write_is_said_and_survived(
    tmp_path: Path, tiny: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's error at the 1st, 4th, 7th ... step of writing is a StorageError of one line that names the file;
    with room again the run ends in the same bits."""
    straight = files(carry_out(tmp_path / "straight", tiny()))
    steps = 0

    def full_at(step: int) -> None:
        def fail(kind: str) -> None:
            nonlocal steps
            steps += 1
            if steps == step:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(durable, "fault_point", fail)

    for step in range(1, 1000, 3):
        steps, path = 0, tmp_path / f"full-{step}"
        full_at(step)
        try:
            carry_out(path, tiny())
        except StorageError as error:
            assert str(path) in str(error)
            assert "No space left on device" in str(error)
        else:
            break
        full_at(0)
        assert files(carry_out(path, tiny())) == straight
        assert not leftovers(path)
    assert step > 30


CRASHES = """
import json, os, shutil, sys
from pathlib import Path
import torch
from redgrape.runs import durable
from redgrape.cli.main import run
import redgrape.cli.commands.training

torch.set_num_threads(1)
os.fsync = lambda fd: None  # slow, and what a process wrote outlives it anyway
experiment, root = Path(sys.argv[1]), Path(sys.argv[2])

def carry_out(folder):
    begun = (folder / "experiment.toml").exists()
    what = ["resume", str(folder)] if begun else ["run", str(experiment), "--out", str(folder)]
    return run([*what, "--workers", "1", "--quiet", "--json"])

def crashed_at(folder, where):
    child = os.fork()
    if child == 0:
        os.environ["REDGRAPE_CRASH_AT"] = where
        durable._steps.clear()
        sys.stdout = open(os.devnull, "w")
        os._exit(carry_out(folder))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

result = {}
real, sys.stdout = sys.stdout, open(os.devnull, "w")
assert carry_out(root / "straight") == 0
for kind in ("write", "fsync", "rename", "remove"):
    for n in range(1, 1000, int(sys.argv[3])):
        folder = root / f"{kind}-{n}"
        code = crashed_at(folder, f"{kind}:{n}")
        if code == 0:
            break
        found = [code]
        if n % 5 == 0:  # and once more while it recovers
            found.append(crashed_at(folder, "rename:1"))
        found.append(carry_out(folder))
        result[folder.name] = found
print(json.dumps(result), file=real)
"""


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_crash_at_any_step_of_writing_is_survived(
    tmp_path: Path, tiny: Values, tally: Callable[..., None], every: int
) -> None:
    """The process ends at once at every write, fsync, rename and removal of a run of three rounds, or at every third,
    and now and then again at the first rename of its recovery. What the user would call then ends in the same bits and
    leaves nothing over."""
    (tmp_path / "e.toml").write_text(Experiment.parse(tiny(rounds=3)).to_toml())
    command = [sys.executable, "-c", CRASHES, str(tmp_path / "e.toml"), str(tmp_path), str(every)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    crashes = json.loads(done.stdout)
    straight = files(tmp_path / "straight")
    assert {"experiment.toml", "environment.json", "partition.safetensors", "metrics.jsonl"} < straight.keys()
    assert {"summary.json", "checkpoints/round-000003/clients.safetensors"} < straight.keys()
    kinds = [name.partition("-")[0] for name in crashes]
    for kind, least in {"write": 14, "fsync": 25, "rename": 6, "remove": 5}.items():
        assert kinds.count(kind) >= least // every
    for name, codes in crashes.items():
        assert codes[0] == 137, name
        assert codes[-1] == 0, name
        assert files(tmp_path / name) == straight, name
        assert not leftovers(tmp_path / name), name
    if every == 1:
        tally("the process ends at a write, fsync, rename or removal: each of them", len(crashes), len(crashes))


def test_what_a_crash_left_is_swept(tmp_path: Path, tiny: Values) -> None:
    """Whatever its name: the next one to go on with the run clears it away."""
    path = carry_out(tmp_path / "run", tiny())
    before = files(path)
    (path / ".old.json.tmp").write_bytes(b"half")
    (path / "checkpoints" / ".round-000009.tmp").mkdir()
    (path / "checkpoints" / ".round-000009.tmp" / "server.safetensors").write_bytes(b"half")
    carry_out(path, tiny())
    assert not leftovers(path)
    assert files(path) == before


# Runs


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, tiny: Values) -> Path:
    """A run of four rounds that nothing interrupted."""
    return carry_out(tmp_path_factory.mktemp("straight") / "run", tiny(rounds=4))


def begun(path: Path, values: dict[str, Any], rounds: int, workers: int = 1) -> Run:
    """A run left after so many rounds, by closing it or by an exception."""
    run = Run(RunFolder.create(path, Experiment.parse(values)), workers=workers)
    steps = run.steps()
    for _ in range(rounds):
        next(steps)
    if rounds % 2:
        steps.close()  # type: ignore[attr-defined]
    else:
        with pytest.raises(ZeroDivisionError):
            steps.throw(ZeroDivisionError())  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_an_interrupted_run_ends_in_the_same_bits(tmp_path: Path, tiny: Values, straight: Path, rounds: int) -> None:
    run = begun(tmp_path / "run", tiny(rounds=4), rounds)
    assert not (tmp_path / "run" / "summary.json").exists()
    assert [step.state.round for step in Run(run.folder, workers=1).steps()] == list(range(rounds + 1, 5))
    assert files(tmp_path / "run") == files(straight)
    assert [entry["round"] for entry in run.folder.times()] == [1, 2, 3, 4]


def test_two_workers_and_an_interruption_change_no_bit(tmp_path: Path, tiny: Values, straight: Path) -> None:
    """Begun with two workers, gone on with one, finished with two."""
    run = begun(tmp_path / "run", tiny(rounds=4), 1, workers=2)
    next(Run(run.folder, workers=1).steps())
    assert [step.state.round for step in Run(run.folder, workers=2).steps()] == [3, 4]
    assert files(tmp_path / "run") == files(straight)


def test_rounds_between_checkpoints_are_done_again(tmp_path: Path, tiny: Values) -> None:
    """With a checkpoint every third round, what came after the last one is repeated and ends in the same bits."""
    values = tiny(rounds=5, checkpoint_every=3)
    whole = carry_out(tmp_path / "whole", values)
    assert [p.name for p in sorted((whole / "checkpoints").iterdir())] == ["round-000003", "round-000005"]
    for rounds, resumed_at in ((2, 1), (4, 4)):
        run = begun(tmp_path / f"run-{rounds}", values, rounds)
        assert next(Run(run.folder, workers=1).steps()).state.round == resumed_at
        carry_out(run.folder.path, values)
        assert files(run.folder.path) == files(whole)


def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_in_the_same_bits(
    tmp_path: Path, tiny: Values, straight: Path
) -> None:
    folder = RunFolder(carry_out(tmp_path / "run", tiny(rounds=4)))
    (checkpoint(folder, 4) / "server.safetensors").write_bytes(b"gone")
    run = Run(folder, workers=1)
    assert [step.state.round for step in run.steps()] == [4]
    assert len(run.notes) == 1
    assert "round-000004" in run.notes[0]
    assert "continuing from round 3" in run.notes[0]
    assert files(folder.path) == files(straight)


def test_a_finished_run_is_not_done_again(tmp_path: Path, tiny: Values, straight: Path) -> None:
    copy = shutil.copytree(straight, tmp_path / "run")
    assert list(Run(RunFolder.open(copy), workers=1).steps()) == []
    assert files(copy) == files(straight)
    (copy / "summary.json").write_bytes(b"damaged")
    assert list(Run(RunFolder.open(copy), workers=1).steps()) == []
    assert files(copy) == files(straight)


def test_an_extended_run_is_the_longer_run(tmp_path: Path, tiny: Values, straight: Path) -> None:
    """Two rounds extended to four have the metrics, the figures and the final state of four rounds at once."""
    run = Run(RunFolder(carry_out(tmp_path / "run", tiny(rounds=2))), workers=1, rounds=4)
    steps = run.steps()
    assert next(steps).state.round == 3
    assert RunView.read(run.folder.path).summary is None  # the old one is not taken for the new run's
    assert [step.state.round for step in steps] == [4]
    ours, theirs = files(run.folder.path), files(straight)
    assert ours == theirs
    assert json.loads(ours["summary.json"])["rounds"] == 4


def test_equal_runs_are_equal_in_bits(tmp_path: Path, tiny: Values) -> None:
    """RedGrape too, with a validation set; and wall-clock times are in times.jsonl alone."""
    values = tiny(data__validation=1, method={"name": "redgrape", "epochs": 1, "threshold": 3.0, "lr": 0.05})
    first, second = (carry_out(tmp_path / name, values) for name in ("first", "second"))
    assert files(first) == files(second)
    assert "validation" in json.loads((first / "metrics.jsonl").read_text().splitlines()[0])
    for name, content in files(first).items():
        assert all(word not in content for word in (b"seconds", b"elapsed", b'"train":', b'"date"')), name
    times = [json.loads(line) for line in (first / "times.jsonl").read_text().splitlines()]
    assert [set(entry) for entry in times] == [{"round", "train", "evaluate", "workers"}] * 2
    assert all(entry["train"] > 0 for entry in times)


def test_another_seed_is_another_run(tmp_path: Path, tiny: Values) -> None:
    first, second = (carry_out(tmp_path / str(seed), tiny(seed=seed)) for seed in (1, 2))
    assert files(first)["metrics.jsonl"] != files(second)["metrics.jsonl"]
    assert files(first)["partition.safetensors"] != files(second)["partition.safetensors"]


@pytest.mark.parametrize("what", ["labels", "inputs", "test inputs", "fewer rows"])
def test_changed_data_is_refused(tmp_path: Path, tiny: Values, vectors: Path, what: str) -> None:
    """A run goes on only with the data it began with, down to a single number; with that data back it does."""
    own = tmp_path / "own.npz"
    arrays = dict(np.load(vectors))
    n = len(arrays["y"])
    arrays["test"] = np.arange(n) % 5 == 0
    np.savez(own, **arrays)
    values = tiny(rounds=2, data__source=str(own))
    run = begun(tmp_path / "run", values, 1)
    before = files(run.folder.path)
    changed = {name: array.copy() for name, array in arrays.items()}
    match what:
        case "labels":
            changed["y"][[1, -1]] = changed["y"][[-1, 1]]
        case "inputs":
            changed["x"][1, 0] += 1
        case "test inputs":
            changed["x"][0, 0] += 1
        case _:
            changed = {name: array[:-1] for name, array in arrays.items()}
    np.savez(own, **changed)
    with pytest.raises(DataError, match="has changed since it began"):
        next(Run(run.folder, workers=1).steps())
    assert files(run.folder.path) == before
    np.savez(own, **arrays)
    carry_out(run.folder.path, values)
    assert files(run.folder.path) == files(carry_out(tmp_path / "straight", values))


def test_initial_weights_may_change_only_once_a_checkpoint_holds_what_became_of_them(
    tmp_path: Path, tiny: Values
) -> None:
    def write(seed: int) -> str:
        safetensors.torch.save_file(nets.build("mlp", (5,), 4, seed).state_dict(), tmp_path / "weights.safetensors")
        return str(tmp_path / "weights.safetensors")

    values = tiny(rounds=3, checkpoint_every=2, net={"name": "mlp", "weights": write(0)})
    run = begun(tmp_path / "run", values, 1)
    write(1)
    with pytest.raises(ConfigError, match=r"'weights.safetensors' has changed since"):
        next(Run(run.folder, workers=1).steps())
    write(0)
    steps = Run(run.folder, workers=1).steps()
    assert [next(steps).state.round, next(steps).state.round] == [1, 2]
    steps.close()  # type: ignore[attr-defined]
    write(1)
    assert [step.state.round for step in Run(run.folder, workers=1).steps()] == [3]


def test_a_damaged_environment_is_refused(tmp_path: Path, tiny: Values) -> None:
    run = begun(tmp_path / "run", tiny(), 1)
    for content in (b"", b"{}", b"[]", b"null", b'{"split'):
        (run.folder.path / "environment.json").write_bytes(content)
        with pytest.raises(StorageError, match=r"environment.json' is damaged"):
            next(Run(run.folder, workers=1).steps())


def test_a_run_that_diverges_keeps_its_last_good_round(
    tmp_path: Path, tiny: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops with exit code 3 and writes neither the line nor the checkpoint of the round that went wrong."""
    monkeypatch.setattr(checks, "LONGEST", math.inf)  # else no round is good
    folder = RunFolder.create(
        tmp_path / "run", Experiment.parse(tiny(rounds=9, method__lr=1e9, method__weight_decay=1e5))
    )
    with pytest.raises(Diverged, match="DIVERGED in round"):
        for _ in Run(folder, workers=1).steps():
            pass
    state, _ = folder.checkpoints.latest()
    done = state.round if state else 0
    assert 1 <= len(folder.metrics()) == done < 9
    assert state is None or all(torch.isfinite(t).all() for t in tree.flatten(state.server).values())
    assert folder.summary() is None


# Who holds what


def parts_of(path: Path) -> tuple[list[list[int]], list[int]]:
    stored = safetensors.torch.load_file(path / "partition.safetensors")
    ends = stored["ends"].tolist()
    rows = stored["rows"].tolist()
    return [rows[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)], stored["validation"].tolist()


@pytest.mark.parametrize("has_test", [False, True])
def test_the_partition_file_tells_who_holds_what(tmp_path: Path, tiny: Values, has_test: bool) -> None:
    """Rows of the file's x: each client's, the validation set's and, where the test set comes from there, its."""
    random = np.random.default_rng(1)
    x, y = random.normal(size=(60, 5)).astype(np.float32), np.arange(60) % 4
    test = {"x_test": x[:8] + 9, "y_test": y[:8]} if has_test else {}
    np.savez(tmp_path / "own.npz", x=x, y=y, **test)
    values = tiny(rounds=1, data__source=str(tmp_path / "own.npz"), data__validation=2)
    path = carry_out(tmp_path / "run", values)
    experiment = Experiment.parse(values)
    federation = prepare(experiment.data, experiment.seed)
    parts, validation = parts_of(path)
    for k, part in enumerate(parts):
        held = federation.client(k)
        assert np.array_equal(x[part], held.inputs(torch.arange(len(held)), torch.float32).numpy())
    in_test = safetensors.torch.load_file(path / "partition.safetensors")["test"].tolist()
    assert bool(in_test) != has_test
    assert sorted([row for part in parts for row in part] + validation + in_test) == list(range(len(x)))
    assert federation.validation is not None
    assert np.array_equal(y[validation], federation.validation.labels.numpy())


@settings(max_examples=40)
@given(st.data())
def test_no_client_ever_holds_a_row_for_evaluation(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever the source, its imbalance and its partition: of distinct examples, each is at one place at most."""
    folder = tmp_path_factory.mktemp("own")
    classes = data.draw(st.integers(2, 4))
    counts = data.draw(st.lists(st.integers(12, 30), min_size=classes, max_size=classes))
    n, seed = sum(counts), data.draw(st.integers(0, 99))
    random = np.random.default_rng(seed)
    y = random.permutation(np.repeat(np.arange(classes), counts))
    if data.draw(st.booleans()):
        x = np.zeros((n, 6, 6), np.uint8)
        x[:, 0, 0], x[:, 0, 1] = np.arange(n) % 256, np.arange(n) // 256
    else:
        x = random.permutation(np.arange(2 * n, dtype=np.float32)).reshape(n, 2)
    arrays: dict[str, Any] = {"x": x, "y": y}
    how = data.draw(st.sampled_from(["held out", "marked", "apart"]))
    if how == "marked":
        arrays["test"] = random.random(n) < 0.3
        arrays["test"][:2] = [True, False]
    elif how == "apart":
        arrays = {"x": x[n // 4 :], "y": y[n // 4 :], "x_test": x[: n // 4], "y_test": y[: n // 4]}
    arrays["client"] = random.integers(0, 3, len(arrays["x"]))
    np.savez(folder / "own.npz", **arrays)
    options = DataOptions(
        source=str(folder / "own.npz"),
        imbalance=data.draw(st.sampled_from(["natural", "exponential", "binary"])),
        ir=data.draw(st.sampled_from([2.0, 5.0])),
        head_cap=6,
        tail_classes=(0,),
        partition=data.draw(st.sampled_from(["class_dirichlet", "prior_dirichlet", "creff", "iid", "natural"])),
        alpha=data.draw(st.sampled_from([0.1, 1.0, 100.0])),
        clients=3,
        validation=data.draw(st.sampled_from([0, 2])),
    )
    try:
        federation = prepare(options, seed)
    except DataError as error:
        assert "the long tail asks for" in str(error)  # by chance a class has too few training examples left
        return
    places = [federation.client(k) for k in range(federation.num_clients)]
    places += [federation.test, *([federation.validation] if federation.validation else [])]
    rows = [row.tobytes() for p in places for row in p.inputs(torch.arange(len(p)), torch.float32).numpy()]
    assert len(set(rows)) == len(rows)
    assert set(rows) <= {row.tobytes() for row in everything(arrays)}


def everything(arrays: dict[str, Any]) -> Iterator[Any]:
    """Every example of the source as a network gets it."""
    for name in ("x", "x_test"):
        for row in arrays.get(name, ()):
            yield (row / np.float32(255)).astype(np.float32) if row.dtype == np.uint8 else row


def test_a_file_that_vanishes_while_a_folder_is_looked_at_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those do that another process writes before it renames them."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / ".metrics.tmp").touch()
    walk = os.walk

    def slowly(folder: Path, **options: Any) -> Iterator[Any]:
        for place, folders, files in list(walk(folder, **options)):
            for name in files:
                (Path(place) / name).unlink()
            yield place, folders, files

    monkeypatch.setattr(os, "walk", slowly)
    durable.check_ordinary(tmp_path)
    (tmp_path / "inner").rmdir()
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setattr(os, "walk", walk)
    with pytest.raises(StorageError, match="is a link"):
        durable.check_ordinary(tmp_path)


def test_errors_have_the_exit_codes_that_are_documented() -> None:
    """The tree at the top of errors.py is the truth."""
    from redgrape import errors

    # Not `__subclasses__()`: errors of other modules inherit their code, and are there only once imported.
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RedgrapeError)]
    assert errors.__doc__ is not None
    for kind in kinds:
        lines = [line for line in errors.__doc__.splitlines() if f" {kind.__name__} " in f" {line} "]
        assert len(lines) == 1, kind
        assert str(kind.exit_code) in lines[0].split(), kind
    assert len({kind.exit_code for kind in kinds}) == len(kinds) == 7
