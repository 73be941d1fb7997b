"""The commands export, evaluate and predict."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from redgrape.cli.progress import percent
from redgrape.errors import ConfigError
from redgrape.reading.judged import EITHER_END, over_classes
from redgrape.reading.terminal import printable, table
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
    for name, value in _overall(scores).items():
        print(f"{name:<28}{value}")
    if scores["groups"]:
        rows: list[list[Any]] = [
            [
                name,
                group["classes"],
                group["examples"],
                percent(group["accuracy"]),
                _interval(scores, name),
                percent(group["macro_f1"]),
            ]
            for name, group in scores["groups"].items()
        ]
        titles = ("group", "classes", "examples", "accuracy", "95 %", "macro F1")
        print(f"\n{table(titles, rows, 'groups of classes, %')}")
    counts = scores.get("class_counts")
    classes = list(enumerate(scores["per_class"]))
    classes.sort(key=lambda entry: -counts[entry[0]] if counts else 0)
    between = len(classes) - 2 * EITHER_END if len(classes) > LONGEST else 0
    rows = [
        [
            entry["class"],
            *([counts[c]] if counts else []),
            entry["support"],
            *[percent(entry[name]) for name in ("precision", "recall", "f1", "auroc", "ap")],
        ]
        for c, entry in ([*classes[:EITHER_END], *classes[-EITHER_END:]] if between else classes)
    ]
    trained = ("training",) if counts else ()
    titles = ("class", *trained, "test", "precision", "recall", "F1", "AUROC", "AP")
    print(f"\n{table(titles, rows, 'per class, %')}")
    if between:
        print(f"{between} classes between the first and the last {EITHER_END} are in `--json`")


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
    rows = [
        (p.name, p.label, percent(p.probability), p.runner_up, percent(p.runner_up_probability)) for p in predictions
    ]
    print(table(("example", "class", "%", "runner-up", "%"), rows))
