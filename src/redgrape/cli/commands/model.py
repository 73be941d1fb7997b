"""The commands export, evaluate and predict."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from redgrape.cli.progress import percent
from redgrape.errors import ConfigError
from redgrape.reading.judged import EITHER_END, over_classes
from redgrape.reading.terminal import cell, printable
from redgrape.runs.figures import LONGEST


def export(options: argparse.Namespace) -> None:
    from redgrape.exported.export import export as write

    folder = write(options.run, options.out, options.format)
    round = json.loads((folder / "model.json").read_bytes())["run"]["round"]
    message = f"model folder: {printable(folder)}, of round {round} (read its README.md)"
    print(json.dumps({"model": str(folder), "round": round}) if options.json else message)


def evaluate(options: argparse.Namespace) -> None:
    is_run = (options.model / "experiment.toml").exists()
    scores = _scores_of_run(options) if is_run and options.data is None else _scores_of_model(options)
    if options.json:
        print(json.dumps(scores))
        return
    console = Console()
    for name, value in _overall(scores).items():
        console.print(f"{name:<28}{value}", highlight=False)
    if scores["groups"]:
        table = _table("groups of classes, %", ("group", "classes", "examples", "accuracy", "95 %", "macro F1"))
        for name, group in scores["groups"].items():
            shares = percent(group["accuracy"]), _interval(scores, name), percent(group["macro_f1"])
            table.add_row(name, str(group["classes"]), str(group["examples"]), *shares)
        console.print(table)
    counts = scores.get("class_counts")
    trained = ("training",) if counts else ()
    table = _table("per class, %", ("class", *trained, "test", "precision", "recall", "F1", "AUROC", "AP"))
    rows = list(enumerate(scores["per_class"]))
    rows.sort(key=lambda row: -counts[row[0]] if counts else 0)
    between = len(rows) - 2 * EITHER_END if len(rows) > LONGEST else 0
    for c, row in [*rows[:EITHER_END], *rows[-EITHER_END:]] if between else rows:
        sizes = [*([str(counts[c])] if counts else []), str(row["support"])]
        figures = [percent(row[name]) for name in ("precision", "recall", "f1", "auroc", "ap")]
        table.add_row(cell(row["class"]), *sizes, *figures)
    console.print(table)
    if between:
        console.print(f"{between} classes between the first and the last {EITHER_END} are in `--json`")


def _scores_of_model(options: argparse.Namespace) -> dict[str, Any]:
    from redgrape.exported.export import open_model
    from redgrape.exported.inference import evaluate_model, names_test_set, read_labelled

    if options.data is None:
        raise ConfigError(
            f"'{options.model}' is not a run, so it has no test set; name labelled data: redgrape evaluate MODEL DATA"
        )
    model = open_model(options.model, options.code)
    scores = evaluate_model(model, read_labelled(options.data, model))
    if not names_test_set(options.data, model):
        print(
            f"note: '{printable(options.data)}' names no test set, so all of it was used; examples from training "
            "make the figures look too good",
            file=sys.stderr,
        )
    return scores


def _scores_of_run(options: argparse.Namespace) -> dict[str, Any]:
    from redgrape.exported.own_test import evaluate_run

    return evaluate_run(options.model, options.data_root)


def _overall(scores: dict[str, Any]) -> dict[str, str]:
    """The figures of all classes together, in words."""
    over = over_classes([row["support"] for row in scores["per_class"]])

    def share(name: str, more: str = "") -> str:
        between = _interval(scores, name)
        return f"{percent(scores[name])} %{f' (95 %: {between})' if between else ''}{more}"

    def area(name: str) -> str:
        return (
            "–" if scores[name] is None else f"{percent(scores[name])} % (within {100 * scores[f'{name}_within']:.2f})"
        )

    return {
        "examples": str(scores["examples"]),
        "accuracy": share("accuracy"),
        "class-balanced accuracy": share("balanced", f" ({over})" if over else ""),
        "macro F1": share("macro_f1"),
        **({"top-5 accuracy": share("top5")} if len(scores["per_class"]) > 5 else {}),
        "AUROC, mean over classes": area("auroc"),
        "average precision": area("ap"),
        "expected calibration error": f"{percent(scores['ece'])} %",
        "negative log-likelihood": f"{scores['nll']:.4f}",
        "Brier score": f"{scores['brier']:.4f}",
    }


def _interval(scores: dict[str, Any], name: str) -> str:
    low, high = scores["intervals"].get(name, (None, None))
    return "" if low is None else f"{percent(low)} to {percent(high)}"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in ("class", "group") else "right")
    return table


def predict(options: argparse.Namespace) -> None:
    from redgrape.exported.export import open_model
    from redgrape.exported.inference import as_csv, predict_file
    from redgrape.runs import durable

    predictions = predict_file(options.data, open_model(options.model, options.code))
    if options.out is not None:
        durable.replace_file(options.out, as_csv(predictions).encode())
    if options.json:
        print(json.dumps([asdict(p) for p in predictions]))
        return
    if options.out is not None:
        print(f"{len(predictions)} predictions: {printable(options.out)}")
        return
    table = Table()
    for title in ("example", "class", "%", "runner-up", "%"):
        table.add_column(title, justify="right" if title == "%" else "left")
    for p in predictions:
        row: list[Any] = [cell(p.name), cell(p.label), percent(p.probability)]
        table.add_row(*row, cell(p.runner_up), percent(p.runner_up_probability))
    Console().print(table)
