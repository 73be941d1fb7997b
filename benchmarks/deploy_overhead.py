"""What a round of a deployment costs beside the training: three sites on this machine, TLS and node authentication on.

    python benchmarks/deploy_overhead.py [--rounds 8] [--out overhead.json]

The net is linear and each site holds a few vectors, so that training takes milliseconds and all else is overhead. Once
with Flower's commands as they come (a SuperNode looks for messages every three seconds and starts a process for each,
which imports Flower), once as `redgrape deploy site` starts them, and once like that with secure aggregation, which
takes four messages a round. The first round is left out: sites join in it.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from redgrape.deploy.processes.server_role import Server, running
from redgrape.deploy.processes.site_role import SiteRole
from redgrape.deploy.setup.create import create
from redgrape.deploy.setup.folder import Deployment, DeployOptions, SiteFolder
from redgrape.runs.folder import RunFolder

SITES = ("north", "south", "west")


class AsFlowerComes(SiteRole):
    node: Sequence[str] = (str(Path(sys.executable).with_name("flower-supernode")),)
    forks = False
    poll = 1.0  # seconds, Flower's own


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _data(folder: Path) -> None:
    stream = np.random.default_rng(0)
    for name in (*SITES, "test"):
        y = np.arange(40) % 4
        np.savez(folder / f"{name}.npz", x=(stream.normal(size=(40, 8)) + y[:, None]).astype(np.float32), y=y)


def measure(kind: type[SiteRole], rounds: int, folder: Path, *, secure: bool = False) -> list[float]:
    """Seconds of each round after the first."""
    folder.mkdir()
    _data(folder)
    options = DeployOptions.model_validate(
        {
            "sites": SITES,
            "host": "localhost",
            "bind": "127.0.0.1",
            "port": _free_port(),
            "test": str(folder / "test.npz"),
            "secure_aggregation": secure,
            "data": {"classes": ("0", "1", "2", "3"), "shape": (8,), "input": "float"},
        }
    )
    create(folder / "deployment", options)
    deployment = Deployment(folder / "deployment")
    roles = [kind(SiteFolder(deployment.site(n)), folder / f"{n}.npz", lambda words: None) for n in SITES]
    ended = threading.Event()
    with running(Server(deployment, print)):
        watching = []
        try:
            for role in roles:
                role.start()
                watching.append(threading.Thread(target=role.watch, args=(ended.is_set,)))
                watching[-1].start()
            command = [sys.executable, "-m", "redgrape", "deploy", "run", str(deployment.path), "--quiet"]
            command += ["--method", "fedavg", "--rounds", str(rounds), "--name", "a", "-c", "net.name='linear'"]
            subprocess.run(command, check=True, timeout=3600, stdout=subprocess.DEVNULL)
        finally:
            ended.set()
            for thread in watching:
                thread.join()
            for role in roles:
                role.stop()
    times = RunFolder.open(deployment.path / "runs" / "a").times()
    return [line["train"] for line in times[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, kind, secure in (
            ("as Flower comes", AsFlowerComes, False),
            ("redgrape deploy site", SiteRole, False),
            ("secure aggregation", SiteRole, True),
        ):
            seconds = measure(kind, options.rounds, Path(folder) / name.replace(" ", "-"), secure=secure)
            results[name] = {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
            print(f"{name:22} {results[name]['median']:6.2f} s a round (from {min(seconds):.2f} to {max(seconds):.2f})")
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
