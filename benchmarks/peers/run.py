"""redgrape's simulator beside its peers: whole rounds of FedAvg, the same clients, net and optimizer for all.

    python benchmarks/peers/run.py --setting compute --epochs 1 --data-root DATA --out compute.json
    python benchmarks/peers/run.py --setting overhead --data-root DATA --out overhead.json
    python benchmarks/peers/run.py --setting resnet56 --out resnet56.json

Every contestant runs in a process of its own, one after another, `--repetitions` times over; its first round in a
process is not timed. A peer that has several ways to use the machine is tried in each on part of the work, and takes
part with the fastest. Seconds are medians, a ratio is the median of the ratios within a repetition, and the range that
follows is that of the repetitions. Needs an otherwise idle machine: threads that wait for each other suffer most from
strangers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from environments import HERE, Contestant, contestants, set_up, versions
from problem import Task
from saved import save, training_flop

CORES = len(os.sched_getaffinity(0))
WARM_UP = 1  # rounds
DEADLINE = 3600.0  # seconds for one contestant's process
BUSY = 0.1  # of the machine: more than this before a contestant starts is worth a warning

Rounds = list[dict[str, Any]]  # what one process reported


@dataclass(frozen=True)
class Setting:
    nets: Sequence[str]
    peers: Sequence[str]
    batch_size: int
    clients_per_round: int
    evaluate: bool
    rounds: int  # timed, at one local epoch
    trial: float  # share of the data on which setups are tried
    tolerance: float  # a row whose accuracy is lower than the median row's by more is void
    lr: float = 0.01


ALL = ("naive", "flower", "fedlab", "pfl", "redgrape")
STACKED = (*ALL, "stacked")
SETTINGS = {
    "compute": Setting(["cnn"], ALL, 64, 10, True, rounds=3, trial=0.25, tolerance=0.02),
    # 20 examples in batches of 4 are 5 steps. The time of a step does not depend on lr; 0.1 shows in a few rounds
    # whether a contestant learns.
    "overhead": Setting(["mlp", "linear"], STACKED, 4, 100, False, rounds=5, trial=1.0, tolerance=0.05, lr=0.1),
    "resnet56": Setting(["resnet56"], ["redgrape"], 64, 4, False, rounds=2, trial=1.0, tolerance=1.0),
}


class Failed(Exception):
    pass


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that no contestant outlives this process
    setting = SETTINGS[options.setting]
    peers = options.peers.split(",") if options.peers else list(setting.peers)
    failures: dict[str, str] = {}
    racing = _ready([contestants(CORES)[peer] for peer in peers], options.environments, failures)
    result: dict[str, Any] = {
        "setting": options.setting,
        "epochs": options.epochs,
        "repetitions": options.repetitions,
        "cores": CORES,
        "versions": {c.name: versions(c, options.environments) for c in racing},
        "nets": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        save(options.setting, Path(folder), options.data_root)
        for net in setting.nets:
            task = Task(
                folder=folder,
                net=net,
                epochs=options.epochs,
                batch_size=setting.batch_size,
                clients_per_round=setting.clients_per_round,
                rounds=WARM_UP + (options.rounds or (setting.rounds if options.epochs == 1 else 1)),
                evaluate=setting.evaluate,
                seed=0,
                processes=1,
                threads=1,
                share=0.1 if options.quick and setting.trial < 1 else 1.0,
                lr=setting.lr,
            )
            result["nets"][net] = race(racing, task, setting, options, failures)
            print(table(result["nets"][net], task, setting, failures), flush=True)
    result["failures"] = failures
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--setting", choices=SETTINGS, default="compute")
    parser.add_argument("--epochs", type=int, default=1, help="local epochs of a round")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="timed rounds of each process; default: by setting and epochs")
    parser.add_argument("--peers", help=f"comma-separated, of {','.join(STACKED)}; default: all")
    parser.add_argument("--data-root", type=Path, help="where the data lies, as for redgrape's own commands")
    parser.add_argument("--environments", type=Path, default=Path("~/.cache/redgrape-peers"))
    parser.add_argument("--out", type=Path, help="JSON file for everything measured")
    parser.add_argument(
        "--quick", action="store_true", help="one repetition on little data, no trials: does it all run?"
    )
    options = parser.parse_args()
    if unknown := set(filter(None, (options.peers or "").split(","))) - set(STACKED):
        parser.error(f"unknown peers {', '.join(sorted(unknown))}; choose from {', '.join(STACKED)}")
    options.environments = options.environments.expanduser().absolute()
    if options.quick:
        options.repetitions, options.rounds = 1, 1
    return options


def _ready(wanted: Sequence[Contestant], environments: Path, failures: dict[str, str]) -> list[Contestant]:
    ready = []
    for contestant in wanted:
        try:
            set_up(contestant, environments)
            ready.append(contestant)
        except subprocess.CalledProcessError as error:
            failures[contestant.name] = f"could not be installed: {_last_line(error.stderr)}"
    return ready


def race(
    racing: Sequence[Contestant], task: Task, setting: Setting, options: argparse.Namespace, failures: dict[str, str]
) -> dict[str, Any]:
    """Everything measured for one net."""
    trials: dict[str, list[dict[str, Any]]] = {}
    starters: list[tuple[Contestant, Task]] = []
    for c in racing:
        if c.name not in failures:
            trials[c.name] = [] if options.quick else try_setups(c, task, setting, options.environments)
            fastest = min(trials[c.name], key=lambda trial: trial["seconds"] or float("inf"), default=None)
            processes, threads = (fastest["processes"], fastest["threads"]) if fastest else c.setups[-1]
            starters.append((c, replace(task, processes=processes, threads=threads, stack=c.stack)))
    reports: dict[str, list[Rounds]] = {c.name: [] for c, _ in starters}
    busy: list[float] = []
    peaks: list[float] = []
    for repetition in range(options.repetitions):
        for c, own in starters:
            if c.name in failures:
                continue
            peaks.append(sgemm())
            busy.append(use_of_machine())
            if busy[-1] > BUSY:
                print(f"{100 * busy[-1]:.0f} % of the machine is in use by others", file=sys.stderr)
            try:
                reports[c.name].append(run(c, replace(own, seed=repetition), options.environments))
                print(f"{c.name}, repetition {repetition + 1}: {_seconds(reports[c.name][-1])}", file=sys.stderr)
            except Failed as error:
                failures[c.name] = str(error)
    peaks.append(sgemm())
    return {
        "samples": _samples(task),
        "sgemm": peaks,
        "busy": busy,
        "rows": {
            c.name: {
                "processes": own.processes,
                "threads": own.threads,
                "trials": trials[c.name],
                "rounds": reports[c.name],
            }
            for c, own in starters
            if c.name not in failures
        },
    }


def try_setups(c: Contestant, task: Task, setting: Setting, environments: Path) -> list[dict[str, Any]]:
    """Seconds of a round in each of the contestant's setups, on part of the work; None where it failed."""
    if len(c.setups) == 1:
        return []
    trials: list[dict[str, Any]] = []
    for processes, threads in c.setups:
        trial = replace(
            task, processes=processes, threads=threads, rounds=WARM_UP + 2, epochs=1, share=task.share * setting.trial
        )
        try:
            seconds = statistics.median(_whole(r) for r in run(c, trial, environments)[WARM_UP:])
            trials.append({"processes": processes, "threads": threads, "seconds": seconds})
        except Failed as error:
            trials.append({"processes": processes, "threads": threads, "seconds": None, "reason": str(error)})
        print(f"{c.name}, trial: {trials[-1]}", file=sys.stderr)
    return trials


def run(c: Contestant, task: Task, environments: Path) -> Rounds:
    """The lines that one process of a contestant reports."""
    command = [str(c.python(environments)), str(HERE / c.script), json.dumps(asdict(task))]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**environ, **c.environ, "PYTHONWARNINGS": "ignore"},
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=DEADLINE)
        except BaseException as error:
            _end(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise Failed(f"did not finish within {DEADLINE:.0f} s") from error
            raise
        errors.seek(0)
        said = errors.read()
    rounds = [json.loads(line) for line in output.splitlines() if line.startswith('{"train"')]
    if process.returncode or len(rounds) < task.rounds:
        raise Failed(
            f"finished {len(rounds)} of {task.rounds} rounds, exit code {process.returncode}: {_last_line(said)}"
        )
    return rounds


def _end(process: subprocess.Popen[str]) -> None:
    """The process and what it started: asked first, since some peers start sessions of their own and end them."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)


def sgemm(seconds: float = 1.0) -> float:
    """GFLOP a second of all cores together."""
    command = [sys.executable, str(HERE / "sgemm.py")]
    cores = [
        subprocess.Popen([*command, str(core), str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for core in sorted(os.sched_getaffinity(0))
    ]
    for core in cores:
        assert core.stdout is not None
        core.stdout.readline()
    for core in cores:
        assert core.stdin is not None
        core.stdin.write("go\n")
        core.stdin.flush()
    return sum(float(core.communicate()[0]) for core in cores)


def use_of_machine(seconds: float = 1.0) -> float:
    """Share of all cores' time that other processes take while we wait. 0 where the system does not say."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0

    def times() -> tuple[int, int]:
        numbers = [int(n) for n in stat.read_text().splitlines()[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]  # all; idle and waiting for disks

    (all_before, idle_before) = times()
    time.sleep(seconds)
    (all_after, idle_after) = times()
    return 1 - (idle_after - idle_before) / max(1, all_after - all_before)


def _samples(task: Task) -> int:
    """Examples that all clients of a round train on, over all epochs."""
    sizes = np.load(Path(task.folder) / "sizes.npy")
    mean: float = sum(max(1, round(task.share * n)) for n in sizes.tolist()) / len(sizes)
    return round(mean * task.clients_per_round * task.epochs)


def _train(round: dict[str, Any]) -> float:
    return float(round["train"])


def _whole(round: dict[str, Any]) -> float:
    return float(round["train"]) + float(round["evaluate"])


def _seconds(rounds: Rounds) -> str:
    return ", ".join(f"{_train(r):.2f} + {_whole(r) - _train(r):.2f} s" for r in rounds[WARM_UP:])


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


@dataclass(frozen=True)
class Figure:
    """A figure of every repetition."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def over(self, other: Figure) -> Figure:
        return Figure([a / b for a, b in zip(self.values, other.values, strict=True)])

    def __format__(self, spec: str) -> str:
        if len(self.values) == 1:
            return format(self.median, spec)
        return f"{self.median:{spec}} ({min(self.values):{spec}}–{max(self.values):{spec}})"


def table(measured: dict[str, Any], task: Task, setting: Setting, failures: dict[str, str]) -> str:
    """Markdown: a row for each contestant, then redgrape against the others, the fastest first."""
    rows = measured["rows"]

    def figures(of: Callable[[dict[str, Any]], float]) -> dict[str, Figure]:
        return {
            name: Figure([statistics.median(of(r) for r in rounds[WARM_UP:]) for rounds in row["rounds"]])
            for name, row in rows.items()
        }

    train = figures(_train)
    measures = {"training": train} | ({"whole round": figures(_whole)} if setting.evaluate else {})
    accuracy = {name: statistics.median(r[-1]["accuracy"] for r in row["rounds"]) for name, row in rows.items()}
    bar = statistics.median(accuracy.values()) - setting.tolerance if accuracy else 0.0
    void = [name for name in rows if accuracy[name] < bar]
    naive = "naive PyTorch loop"
    own = [name for name in rows if name.startswith("redgrape")]
    peak = statistics.median(measured["sgemm"])
    per_sample = training_flop(task.net, np.load(Path(task.folder) / "train_x.npy", mmap_mode="r").shape[1:]) / 1e9
    of_peak = {name: 100 * measured["samples"] * per_sample / f.median / peak for name, f in train.items()}
    overhead = not setting.evaluate and len(setting.peers) > 1

    head = ["contestant", "processes x threads"]
    for measure in measures:
        head += [f"{measure}, s"] + ([f"{measure}, x naive"] if naive in rows else [])
    head += ["ms a client" if overhead else "of sgemm, training", "accuracy"]
    lines = [
        f"### {task.net}, {task.clients_per_round} clients a round, {measured['samples']} trained examples a round",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for name, row in rows.items():
        cells = [name, f"{row['processes']} x {row['threads']}"]
        for figure in measures.values():
            cells.append(f"{figure[name]:.2f}")
            if naive in rows:
                cells.append(f"{figure[naive].over(figure[name]):.2f}")
        cells.append(
            f"{1000 * train[name].median / task.clients_per_round:.2f}" if overhead else f"{of_peak[name]:.0f} %"
        )
        cells.append(f"{accuracy[name]:.3f}" + (" **void**" if name in void else ""))
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"| {name} | failed: {reason} |" for name, reason in failures.items()]
    lines += [
        "",
        f"sgemm on {CORES} cores: {Figure(measured['sgemm']):.0f} GFLOP/s; "
        f"{1000 * per_sample:.1f} MFLOP to train one example.",
        f"Accuracy is that after round {task.rounds}; a row more than {setting.tolerance} below the median is void.",
    ]
    for measure, figure in measures.items():
        others = sorted((name for name in rows if name not in (*void, *own)), key=lambda name: figure[name].median)
        for name in own:
            ratios = [f"{figure[other].over(figure[name]):.2f} x {other}" for other in others]
            lines += [f"{measure}: {name} is {', '.join(ratios)}."] if ratios else []
    if measured["busy"]:
        usual, most = statistics.median(measured["busy"]), max(measured["busy"])
        lines.append(
            f"Others used {100 * usual:.0f} % of the machine (median of a second before each process, at most "
            f"{100 * most:.0f} %)" + (": these figures do not count." if usual > BUSY else ".")
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
