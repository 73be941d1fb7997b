"""The commands export, evaluate and predict."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from redgrape.cli.progress import percent
from redgrape.errors import BusyError, ConfigError, DataError, StorageError
from redgrape.reading.judged import EITHER_END, FEW, over_classes
from redgrape.reading.reliability import check_ending, draw
from redgrape.reading.run_tables import SHORT
from redgrape.reading.terminal import paragraph, printable, table
from redgrape.runs import durable
from redgrape.runs.figures import FIGURES, LONGEST

ENOUGH = 20  # validation examples of a class


def export(options: argparse.Namespace) -> None:
    from redgrape.exported.export import export as write

    calibration = None
    if options.shares and not options.calibrate:
        raise ConfigError(f"--shares {options.shares} is for --calibrate; add that, or leave it out")
    if options.calibrate:
        from redgrape.exported.own_test import OwnModel

        durable.check_free(options.out)
        calibration = OwnModel.open(options.run, options.data_root).calibration(options.shares)
    folder = write(options.run, options.out, options.format, calibration)
    run = json.loads((folder / "model.json").read_bytes())["run"]
    round, rounds = run["round"], run["experiment"]["rounds"]
    message = f"model folder: {printable(folder)}, of round {round} of {rounds} (read its README.md)"
    _tell_unfinished(run)
    if calibration is not None:
        message = f"{paragraph(_chosen(calibration))}\n{message}"
        if calibration["fewest"] < ENOUGH:
            _tell(
                f"validation examples of the rarest class: {calibration['fewest']}; to calibrate on more, hold out "
                f"{ENOUGH} of each class in a new run: -c data.validation={ENOUGH}"
            )
    more = {} if calibration is None else {"calibration": calibration}
    print(json.dumps({"model": str(folder), "round": round, **more}) if options.json else message)


def _chosen(calibration: Mapping[str, Any]) -> str:
    """What was chosen for a calibration, in words."""
    shares = f", with the class shares of {calibration['shares']}" if "shares" in calibration else ""
    held_out = f" on {calibration['examples']} validation examples" if "examples" in calibration else ""
    low, high = min(calibration["thresholds"]), max(calibration["thresholds"])
    thresholds = f"thresholds from {percent(low)} % to {percent(high)} %"
    if high - low < 1e-9:
        thresholds = "equal thresholds, since others would not gain"
    temperature = f"temperature {calibration['temperature']:.3f}"
    if calibration["temperature"] == 1:
        temperature = "temperature 1, since another would not gain"
    return f"calibrated{held_out}{shares}: {temperature}; {thresholds}"


def evaluate(options: argparse.Namespace) -> None:
    has_own_data = options.data is None and not (options.model / "model.json").is_file()
    of_runs = {"--by-site": options.by_site, "--on validation": options.on == "validation", "--shares": options.shares}
    for flag, given in of_runs.items():
        if given and options.data is not None:
            raise ConfigError(f"{flag} is for a run's own examples; leave out '{options.data}'")
    if options.picture is not None:
        check_ending(options.picture)
    scores = _scores_of_run(options) if has_own_data else _scores_of_model(options)
    before, after = scores.get("uncalibrated", scores), scores.get("calibrated", scores)
    if options.picture is not None:
        draw(scores if before is after else {**before, "calibrated": after}, options.picture)
    if options.json:
        print(json.dumps(scores))
        return
    if "round" in scores:
        print(f"model of round {scores['round']} of {scores['rounds']}")
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
    if options.by_site:
        print(f"\n{_by_site(scores)}")
    if before is not after:
        when = "before" if scores is before else "after"
        print(f"\n{_before_and_after(before, after)}")
        print(paragraph(f"{_chosen(scores['calibration'])}; the figures above are those {when} calibration"))
    if options.picture is not None:
        print(f"reliability diagram: {printable(options.picture)}")


def _by_site(scores: Mapping[str, Any]) -> str:
    """A table of the sites, the largest first, with the mean over them and the worst."""
    shown = ("accuracy", "balanced", "macro_f1", "tail")
    sites = sorted(scores["sites"], key=lambda row: -row["examples"])
    means = {figure: [row[figure] for row in sites if row[figure] is not None] for figure in shown}
    rows = [[row["site"], row["examples"], row["classes"], *(percent(row[f]) for f in shown)] for row in sites]
    rows += [["mean", "", "", *(percent(sum(v) / len(v)) if v else "–" for v in means.values())]]
    titles = ("site", scores["on"], "classes", *(SHORT[figure] for figure in shown))
    worst = [
        f"{SHORT[f]} {percent(entry['value'])} ({entry['site']})"
        for f in shown
        if (entry := scores["worst_sites"].get(f)) is not None
    ]
    few = f"of those with at least {FEW} examples" if any(row["examples"] >= FEW for row in sites) else "of all"
    return f"{table(titles, rows, 'by site, %')}\n{paragraph(f'worst site {few}: ' + ', '.join(worst))}"


def _before_and_after(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    words = {"nll": "negative log-likelihood", "brier": "Brier score"}
    shares = {**{f: f"{SHORT[f]}, %" for f in FIGURES if before[f] is not None}, "ece": "calibration error, %"}
    rows = [[title, *(percent(of[figure]) for of in (before, after))] for figure, title in shares.items()]
    rows += [[title, *(f"{of[figure]:.4f}" for of in (before, after))] for figure, title in words.items()]
    return table(("calibration", "before", "after"), rows)


def _scores_of_model(options: argparse.Namespace) -> dict[str, Any]:
    from redgrape.exported.export import open_model
    from redgrape.exported.inference import evaluate_model, names_test_set, read_labelled, unknown_values

    if options.data is None:
        raise ConfigError(
            f"'{options.model}' is not a run, so it has no test set; name labelled data: redgrape evaluate MODEL DATA"
        )
    model = open_model(options.model, options.code)
    scores = evaluate_model(model, read_labelled(options.data, model))
    if not names_test_set(options.data, model):
        _tell(
            f"'{options.data}' names no test set, so all of it was used; examples from training make the figures look "
            "too good"
        )
    _tell(*unknown_values(options.data, model))
    run = model.card.get("run")
    return scores if run is None else {**scores, "round": run["round"], "rounds": run["experiment"]["rounds"]}


def _tell(*notes: str) -> None:
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)


def _tell_unfinished(run: Mapping[str, Any] | None) -> None:
    """`run`: of the model's card."""
    if run is not None and run.get("mean_of_last") is None and run["round"] < run["experiment"]["rounds"]:
        _tell(f"the run was not finished: this is its model of round {run['round']} of {run['experiment']['rounds']}")


def _scores_of_run(options: argparse.Namespace) -> dict[str, Any]:
    from redgrape.exported.own_test import OwnModel

    own = OwnModel.open(options.model, options.data_root)
    if options.by_site and not own.knows_sites(options.on):
        other = next((on for on in ("test", "validation") if own.knows_sites(on)), None)
        remedy = f"add --on {other}" if other else "docs/own-data.md says how data names sites"
        raise DataError(f"the {options.on} examples of '{options.model}' do not name their sites; {remedy}")
    scores = own.evaluate(options.on, options.shares)
    if own.in_bfloat16:
        _tell("the run's encoder multiplied in bfloat16; these figures are in float32, so they differ from the run's")
    if options.on == "test":
        try:
            own.keep(scores)
        except (StorageError, BusyError) as error:  # such as a folder that is read-only
            _tell(f"pages will not show this evaluation: {error}")
    return scores


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
    from redgrape.exported.inference import as_csv, predict_file, unknown_values

    if options.out is not None:
        durable.check_no_folder(options.out)
    model = open_model(options.model, options.code)
    predictions = predict_file(options.data, model)
    _tell_unfinished(model.card.get("run"))
    _tell(*unknown_values(options.data, model))
    if options.out is not None:
        durable.replace_file(options.out, as_csv(predictions, model.class_names).encode())
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
