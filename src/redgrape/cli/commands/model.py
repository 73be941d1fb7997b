"""The commands export, evaluate and predict."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from redgrape.cli.progress import percent
from redgrape.reading.judged import over_classes
from redgrape.reading.terminal import cell, printable


def export(options: argparse.Namespace) -> None:
    from redgrape.exported.export import export as write

    folder = write(options.run, options.out, options.format)
    round = json.loads((folder / "model.json").read_bytes())["run"]["round"]
    told = f"model folder: {printable(folder)}, of round {round} (read its README.md)"
    print(json.dumps({"model": str(folder), "round": round}) if options.json else told)


def evaluate(options: argparse.Namespace) -> None:
    from redgrape.exported.export import open_model
    from redgrape.exported.inference import evaluate_model, names_test_set, read_labelled

    model = open_model(options.model)
    scores = evaluate_model(model, read_labelled(options.data, model))
    if not names_test_set(options.data, model):
        print(
            f"note: '{printable(options.data)}' names no test set, so all of it was used; examples from training "
            "make the figures look too good",
            file=sys.stderr,
        )
    if options.json:
        print(json.dumps(scores))
        return
    console = Console()
    over = over_classes([row["support"] for row in scores["per_class"]])
    lines = {
        "examples": str(scores["examples"]),
        "accuracy": f"{percent(scores['accuracy'])} %",
        "class-balanced accuracy": f"{percent(scores['balanced'])} %{f' ({over})' if over else ''}",
        "macro F1": f"{percent(scores['macro_f1'])} %",
        "expected calibration error": f"{percent(scores['ece'])} %",
        "negative log-likelihood": f"{scores['nll']:.4f}",
        "Brier score": f"{scores['brier']:.4f}",
    }
    for name, value in lines.items():
        console.print(f"{name:<28}{value}", highlight=False)
    table = Table(title="per class, %")
    for title in ("class", "examples", "precision", "recall", "F1"):
        table.add_column(title, justify="left" if title == "class" else "right")
    for row in scores["per_class"]:
        figures = [percent(row[name]) for name in ("precision", "recall", "f1")]
        table.add_row(cell(row["class"]), str(row["support"]), *figures)
    console.print(table)


def predict(options: argparse.Namespace) -> None:
    from redgrape.exported.export import open_model
    from redgrape.exported.inference import predict_file

    predictions = predict_file(options.data, open_model(options.model))
    if options.json:
        print(json.dumps([asdict(p) for p in predictions]))
        return
    table = Table()
    for title in ("example", "class", "%", "runner-up", "%"):
        table.add_column(title, justify="right" if title == "%" else "left")
    for p in predictions:
        row: list[Any] = [cell(p.name), cell(p.label), percent(p.probability)]
        table.add_row(*row, cell(p.runner_up), percent(p.runner_up_probability))
    Console().print(table)
