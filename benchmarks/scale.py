"""Memory, file descriptors and start-up of a run with many clients.

    python benchmarks/scale.py                          10,000 clients with state (SCAFFOLD), 100 a round, 200 rounds
    python benchmarks/scale.py --clients 100000 --rounds 20
    python benchmarks/scale.py --clients 2000 --sampled 1000 --net cnn --rounds 4 --method fedavg

The data are random vectors or images: nothing is measured that depends on what they show. The run is `redgrape run` in
a process of its own, with its workers, and is watched from outside at the end of every round: the resident memory of
all its processes (what they share counts once) and their open files. Of the memory, one part was allocated; one is what
processes hand to each other, which goes up and down with the share of a round that each worker takes; the rest is
program code and the data set, which lies in memory once and is counted as its pages are first touched.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--sampled", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--examples", type=int, default=4, help="of each client, on average")
    parser.add_argument("--method", default="scaffold")
    parser.add_argument("--net", default="mlp", help="mlp (on 784 numbers, 109,386 parameters), cnn, linear ...")
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write every round's figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="redgrape-scale-") as folder:
        rows = watch(options, Path(folder))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    report(options, rows)


def write_data(path: Path, options: argparse.Namespace) -> None:
    """Training examples with a client each, a few test examples."""
    random = np.random.default_rng(0)
    count = options.clients * options.examples
    arrays = {
        "x": random.integers(0, 256, size=(count, 1, 28, 28), dtype=np.uint8),
        "y": random.integers(0, 10, size=count),
        "x_test": random.integers(0, 256, size=(1000, 1, 28, 28), dtype=np.uint8),
        "y_test": random.integers(0, 10, size=1000),
    }
    np.savez(path, **arrays)


def watch(options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    data, out = folder / "data.npz", folder / "run"
    write_data(data, options)
    command = [
        sys.executable,
        "-m",
        "redgrape",
        "run",
        "--method",
        options.method,
        "--data",
        str(data),
        "--net",
        options.net,
    ]
    command += ["--partition", "iid", "--clients", str(options.clients), "--clients-per-round", str(options.sampled)]
    command += ["--rounds", str(options.rounds), "--epochs", "1", "--batch-size", "4", "--lr", "0.01"]
    command += ["-c", f"checkpoint_every={options.checkpoint_every}", "-c", "evaluate_every=1000"]
    command += ["--workers", str(options.workers), "--out", str(out), "--quiet"]
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    rows: list[dict[str, float]] = []
    times, seen = out / "times.jsonl", 0
    while process.poll() is None:
        done = times.read_bytes().count(b"\n") if times.exists() else 0
        if done > seen:
            rows.append({"round": done, "seconds": time.monotonic() - begin, **figures(process.pid)})
            seen = done
        time.sleep(0.01)
    if process.returncode:
        sys.exit(f"the run ended with code {process.returncode}")
    seconds = [json.loads(line) for line in times.read_text().splitlines()]
    rows[0]["before_first_round"] = rows[0]["seconds"] - seconds[0]["train"] - seconds[0]["evaluate"]
    for row in rows:
        row["train"] = seconds[int(row["round"]) - 1]["train"]
    rows[-1]["folder"] = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    return rows


def figures(pid: int) -> dict[str, float]:
    """Of the process and all its children, as far as they live: bytes, and counts of open files."""
    resident = allocated = shared = files = 0
    for p in [pid, *children(pid)]:
        try:
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{p}/smaps_rollup").read_text().splitlines()[1:])
            values = {name: int(value.split()[0]) << 10 for name, value in fields.items()}
            resident += values["Pss"]  # what is shared counts once over all
            files += sum(1 for _ in Path(f"/proc/{p}/fd").iterdir())
            allocated += values["Pss_Anon"]
            shared += values["Pss_Shmem"]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return {"resident": resident, "allocated": allocated, "shared": shared, "files": files}


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def report(options: argparse.Namespace, rows: list[dict[str, float]]) -> None:
    after = [row for row in rows if row["round"] > options.rounds // 4]  # warmed up

    def slope(name: str) -> float:
        """Of a straight line through the points, a round."""
        return float(np.polyfit([row["round"] for row in after], [row[name] for row in after], 1)[0])

    print(
        f"{options.clients} clients, {options.sampled} a round, {options.rounds} rounds, "
        f"{options.method}, {options.net}"
    )
    print("| figure | value |\n|---|---|")
    print(f"| start-up, until the first round begins | {rows[0]['before_first_round']:.1f} s |")
    print(f"| a round (median) | {statistics.median(row['train'] for row in rows):.2f} s |")
    print(f"| resident memory, highest | {max(row['resident'] for row in rows) / 2**20:.0f} MB |")
    halves = after[: len(after) // 2], after[len(after) // 2 :]
    for name, what in (("allocated", "allocated"), ("shared", "shared between the processes")):
        highest = " and ".join(f"{max(row[name] for row in half) / 2**20:.1f}" for half in halves if half)
        print(f"| of it {what}, highest in the two halves after round {options.rounds // 4} | {highest} MB |")
        if len(after) > 10:
            print(f"| growth of what is {what} in 100 rounds | {slope(name) * 100 / 2**20:+.2f} MB |")
    print(
        f"| open files, lowest and highest | {min(r['files'] for r in rows):.0f}, {max(r['files'] for r in rows):.0f} |"
    )
    print(f"| the run's folder at the end | {rows[-1]['folder'] / 2**20:.0f} MB |")


if __name__ == "__main__":
    main()
