"""The commands data show, data fetch and embed."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from redgrape.cli.execution import described
from redgrape.errors import ConfigError
from redgrape.reading.judged import notes
from redgrape.reading.terminal import paragraph, printable


def show(options: argparse.Namespace) -> None:
    """Print the examples of each client, and draw them as a heat map."""
    from redgrape.data.prepare import prepare
    from redgrape.reading import data_show as picture
    from redgrape.runs.experiment import Experiment

    values = described(options)
    values.pop("method", None)  # not needed here, and it may be a code file
    experiment = Experiment.parse(values)
    federation = prepare(experiment.data, experiment.seed, options.data_root)
    if options.json:
        figures: dict[str, Any] = {
            "split": federation.fingerprint(),
            "class_names": federation.class_names,
            "class_counts": federation.class_counts.tolist(),
            "test_counts": federation.counts("test"),
            "client_names": federation.client_names,
            "client_counts": federation.client_counts.tolist(),
            "effective_holders": picture.holders(federation).tolist(),
        }
        if federation.columns is not None:
            figures["inputs"] = picture.inputs(federation)
        print(json.dumps(figures))
        return
    picture.draw(federation, options.out)
    print(picture.describe(federation))
    training = federation.class_counts.tolist()
    for note in [*federation.notes, *notes(federation.class_names, federation.counts("test"), training)]:
        print(paragraph(f"note: {note}"))
    print(f"examples of each client: {printable(options.out)}")


def embed(options: argparse.Namespace) -> None:
    """Compute the embeddings of a data set, for later runs or for an .npz file."""
    import io

    import numpy as np
    from rich.console import Console
    from rich.progress import Progress

    from redgrape.nets import pretrained
    from redgrape.runs import durable
    from redgrape.runs.embedded import embed as embedded
    from redgrape.runs.experiment import NetOptions

    if not pretrained.is_pretrained(options.net):
        raise ConfigError(f"net '{options.net}' is not a pretrained encoder; choose {pretrained.LITE0}")
    if options.out is not None:
        durable.check_no_folder(options.out)
    net = NetOptions.parse({"name": options.net, "weights": options.weights, "size": options.size})
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("embedding")
        arrays = embedded(
            str(options.data),
            net,
            image_size=options.image_size,
            data_root=options.data_root,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    features = arrays["x"].shape[1]
    examples = [len(arrays["y"]), len(arrays["y_test"])]
    if options.out is not None:
        content = io.BytesIO()
        np.savez(content, **arrays)
        durable.replace_file(options.out, content.getvalue())
    if options.json:
        told = {"training": examples[0], "test": examples[1], "features": features}
        print(json.dumps(told | {"file": None if options.out is None else str(options.out)}))
        return
    print(f"{examples[0]} training and {examples[1]} test examples have {features} features each, in the cache of runs")
    if options.out is not None:
        print(f"use them with --data {printable(options.out)} --net linear")


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
