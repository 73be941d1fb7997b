"""The commands data show and data fetch."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from redgrape.cli.commands.training import described
from redgrape.reading.judged import notes
from redgrape.reading.terminal import cell, printable


def show(options: argparse.Namespace) -> None:
    """Print the examples of each client, and draw them as a heat map."""
    from rich.console import Console

    from redgrape.data.prepare import prepare
    from redgrape.reading import data_show as picture
    from redgrape.runs.experiment import Experiment

    values = described(options)
    values.pop("method", None)  # not needed here, and it may be a code file
    experiment = Experiment.parse(values)
    federation = prepare(experiment.data, experiment.seed, options.data_root)
    if options.json:
        figures = {
            "split": federation.fingerprint(),
            "class_names": federation.class_names,
            "class_counts": federation.class_counts.tolist(),
            "test_counts": federation.counts("test"),
            "client_names": federation.client_names,
            "client_counts": federation.client_counts.tolist(),
        }
        print(json.dumps(figures))
        return
    picture.draw(federation, options.out)
    Console().print(picture.describe(federation))
    training = federation.class_counts.tolist()
    for note in notes(federation.class_names, federation.counts("test"), training):
        Console().print(cell(f"note: {note}"))
    print(f"examples of each client: {printable(options.out)}")


def fetch(options: argparse.Namespace) -> None:
    """Download a public data set and verify it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from redgrape.data.fetch import fetch as download

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        tasks: dict[str, Any] = {}

        def progress(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total)

        folder = download(options.name, options.data_root, progress=progress)
    print(f"complete and verified: {printable(folder)}")
