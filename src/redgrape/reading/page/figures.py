"""The data of a page as plain JSON: settings, their methods, runs and rounds.

Runs of one setting differ only by method and seed, so their curves can be compared:

    settings   [{title, facts, notes, methods: [{label, runs, figures: a number per seed, cells: these in words, hyper,
               file, toml, commands}]}]
    runs       {id: {seed, state, done, result, per_class, tested, confusion, norms, split, reliability: [{title, ece,
               bins}], sites: [{site, examples, ...}], ...}}
    splits     {fingerprint: {class_names, known, class_counts, client_names, client_counts, groups, order: from head to
               tail}}
    rounds     {id: {round: [...], accuracy: [...], ...}}: one column per figure, null if there is none
    damaged    [{name, reason}]
    suites     [{title, blocks, caption, command, not_run}]: the tables of the suites that contain the runs (suite.py)

Run folders are untrusted. Text is cleaned of anything that a terminal or a page could execute. Numbers are checked, and
null if invalid. No method is loaded, because a user's method is code.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from redgrape.data.count_matrix import brings_clients
from redgrape.reading import judged
from redgrape.reading.gap import baseline
from redgrape.reading.gap import notes as gap_notes
from redgrape.reading.page.reading import Reading
from redgrape.reading.run_tables import Result, by_seed, cell, last_evaluated
from redgrape.reading.run_view import EXTRA_DATA, flat, machines, other_data, run_label, started
from redgrape.reading.terminal import printable
from redgrape.runs.figures import FIGURES, unpacked, window

GROUPS = ("head", "middle", "tail")


def page_data(
    readings: Mapping[str, Reading], damaged: Iterable[tuple[str, str]] = (), suites: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The complete page data for these runs, by id."""
    runs: dict[str, Any] = {}
    splits: dict[str, Any] = {}
    rounds: dict[str, Any] = {}
    wrong = [{"name": text(name), "reason": text(reason)} for name, reason in damaged]
    for key, reading in readings.items():
        try:
            split = _split(reading)
            _settings({key: reading}, {key: (run := _run(reading, split))})  # raises if a run cannot be described
            runs[key], rounds[key] = run, _columns(reading, split)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            wrong.append({"name": text(key), "reason": f"its files do not fit together: {text(repr(error))}"})
            continue
        if split is not None:
            splits[runs[key]["split"]] = split
    whole = {key: readings[key] for key in runs}
    return {
        "settings": _settings(whole, runs),
        "runs": runs,
        "splits": splits,
        "rounds": rounds,
        "damaged": wrong,
        "suites": list(suites),
    }


def text(value: Any) -> str:
    """One line of text. Unprintable characters are replaced, such as terminal escapes and bidirectional marks."""
    return printable(value)[:400]


def number(value: Any) -> float | int | None:
    """The value if it is a finite number, else None. JSON has no infinity and no NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return round(value, 6) if isinstance(value, float) else value


def _numbers(values: Any, length: int) -> list[float | int | None] | None:
    values = unpacked(values, length)
    if not isinstance(values, list) or len(values) != length:
        return None
    return [number(value) for value in values]


def _split(reading: Reading) -> dict[str, Any] | None:
    """The examples of each client. None before the data is prepared."""
    environment = reading.view.environment
    if environment is None:
        return None
    names = [text(name) for name in environment["class_names"]]
    known = environment["class_counts"] is not None  # else only the sites of a deployment know them
    counts = [int(n) for n in environment["class_counts"]] if known else [0] * len(names)
    held = environment["client_counts"]  # None: unknown, or too many to record
    clients = [[int(n) for n in row] for row in held] if known and held is not None else []
    client_names = [text(name) for name in environment.get("client_names", range(len(clients)))] if clients else []
    groups = {group: [int(c) for c in environment["groups"][group]] for group in GROUPS}
    group_of = {c: group for group, classes in groups.items() for c in classes}
    if len(names) != len(counts) or any(len(row) != len(counts) for row in clients):
        raise ValueError("class names, class counts and client counts have different lengths")
    if len(client_names) != len(clients):
        raise ValueError("client names and client counts have different lengths")
    return {
        "class_names": names,
        "known": known,
        "class_counts": counts,
        "client_names": client_names,
        "client_counts": clients,
        "order": sorted(range(len(counts)), key=lambda c: (GROUPS.index(group_of.get(c, "head")), -counts[c], c)),
        "groups": [group_of[c] if known else group_of.get(c, "") for c in range(len(counts))],
    }


def _run(reading: Reading, split: dict[str, Any] | None) -> dict[str, Any]:
    view = reading.view
    tests = [record["test"] for record in view.metrics if isinstance(record.get("test"), dict)]
    summary, last = view.summary, tests[-window(view.rounds_done) :]  # of an unfinished run: those so far
    C = len(split["class_counts"]) if split else 0
    result = summary["mean_of_last"] if summary else {f: _mean([test.get(f) for test in last]) for f in FIGURES}
    classes = zip(*(_numbers(test.get("per_class"), C) or [None] * C for test in last), strict=True)
    per_class = summary["per_class"] if summary else [_mean(values) for values in classes]
    return {
        "name": text(view.path),
        "seed": int(view.experiment["seed"]),
        "state": reading.state,
        "is_record": view.path.parent.is_file(),
        "done": view.rounds_done,
        "rounds": int(view.experiment["rounds"]),
        "split": text((view.environment or {}).get("split", "")),
        "result": {figure: number(result.get(figure)) for figure in FIGURES},
        "is_best": bool((summary or {}).get("best_round")),
        "averaged": len(summary["averaged_rounds"]) if summary else len(last),
        "per_class": _numbers(per_class, C),
        "tested": _numbers(judged.counts_of(view.environment, summary), C),
        "confusion": _confusion((summary or {}).get("confusion"), C),
        "norms": _norms((summary or {}).get("classifier_norms"), C),
        "reliability": _reliability(reading.evaluation),
        "sites": [_site(row) for row in reading.evaluation.get("sites", [])],
        "rejected": sum(len(record.get("rejected") or ()) for record in view.metrics),
        "versions": _versions(view.environment),
    }


def _reliability(evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The bins of the final model: before calibration, and after it if it was calibrated."""
    after = evaluation.get("calibrated")
    lines = {"before calibration" if after else "": evaluation, "after calibration": after or {}}
    names = ("examples", "certainty", "accuracy")
    return [
        {
            "title": title,
            "ece": number(of.get("ece")),
            "bins": [[number(row.get(name)) for name in names] for row in of["reliability"]],
        }
        for title, of in lines.items()
        if of.get("reliability")
    ]


def _site(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"site": text(row["site"]), **{name: number(row.get(name)) for name in ("examples", "classes", *FIGURES)}}


def _versions(environment: Mapping[str, Any] | None) -> list[str]:
    names = ("redgrape", "torch", "python", "machine", "device")
    return [f"{name} {text(environment[name])}" for name in names if name in environment] if environment else []


def _mean(values: Iterable[Any]) -> float | None:
    known = [value for value in map(number, values) if value is not None]
    return sum(known) / len(known) if known else None


def _confusion(rows: Any, C: int) -> list[list[float | int | None]] | None:
    if not isinstance(rows, list) or len(rows) != C:
        return None
    numbers = [row for row in (_numbers(row, C) for row in rows) if row is not None]
    return numbers if len(numbers) == C else None


def _norms(norms: Any, C: int) -> dict[str, list[float | int | None]] | None:
    if not isinstance(norms, dict):
        return None
    by_name = {text(name): _numbers(values, C) for name, values in norms.items()}
    return {name: values for name, values in by_name.items() if values is not None} or None


def _columns(reading: Reading, split: dict[str, Any] | None) -> dict[str, list[Any]]:
    seconds = {line.get("round"): line for line in reading.view.times}
    C = len(split["class_counts"]) if split else 0
    columns: dict[str, list[Any]] = {}
    ages: list[int | None] = [None] * C
    for record in reading.view.metrics:
        test = record["test"] if isinstance(record.get("test"), dict) else {}
        time = seconds.get(record["round"], {})
        asked, answered = len(record.get("clients") or ()), len(record.get("answered") or ())
        row = {
            "round": int(record["round"]),
            **{figure: number(test.get(figure)) for figure in FIGURES},
            "train": number(time.get("train")),
            "evaluate": number(time.get("evaluate")),
            "down": _per_client(record.get("bytes_down"), asked),
            "up": _per_client(record.get("bytes_up"), answered),
            "age": (ages := _older(ages, record)) if _releases(record, C) else None,
        }
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def _per_client(total: Any, clients: int) -> int | None:
    total = number(total)
    return None if total is None or not clients else round(total / clients)


def _releases(record: Mapping[str, Any], C: int) -> bool:
    """Whether the record lists the classes released in its round."""
    released = unpacked(record.get("class_released"), C)
    return C > 0 and isinstance(released, list) and len(released) == C


def _older(ages: Sequence[int | None], record: Mapping[str, Any]) -> list[int | None]:
    """Rounds since each class was last released. Null before its first release."""
    pairs = zip(ages, unpacked(record["class_released"]), strict=True)
    return [0 if released else None if age is None else age + 1 for age, released in pairs]


def _settings(readings: Mapping[str, Reading], runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Group runs that are equal except for method and seed, in order of appearance."""
    other = other_data([reading.view for reading in readings.values()])
    why = {key: other.get(reading.view.path, "") for key, reading in readings.items()}
    groups = _of_equal_settings(readings, why)
    first = {keys[0]: readings[keys[0]].view.experiment for keys in groups}
    titles = [_title(e, _clients(readings[key])) + (", other data" if why[key] else "") for key, e in first.items()]
    titles = _distinct(titles, [{**e, "method": {}, "seed": 0} for e in first.values()])
    settings = []
    for title, keys in zip(titles, groups, strict=True):
        reason, methods = why[keys[0]], _methods(keys, readings, runs)
        apart = [["Not to be compared with others", text(reason)]] if reason else []
        settings.append(
            {
                "title": title,
                "facts": [*_facts([readings[key] for key in keys]), *apart],
                "notes": _notes(readings[keys[0]], runs[keys[0]]["tested"]) + _on_methods(methods, readings),
                "methods": methods,
            }
        )
    return settings


def _of_equal_settings(readings: Mapping[str, Reading], why: Mapping[str, str]) -> list[list[str]]:
    """The ids of the runs of each setting, baselines last. `why`: why a run cannot be compared with others."""
    shared = {key: _shared(reading.view.experiment) for key, reading in readings.items()}
    names = set().union(*shared.values())
    lacking = any(names - values.keys() for values in shared.values())
    defaults = _defaults() if lacking else {}
    together: dict[str, list[str]] = {}
    for key, values in shared.items():
        whole = {name: values.get(name, defaults.get(name)) for name in names} | {"": why[key]}
        together.setdefault(json.dumps(whole, sort_keys=True, default=str), []).append(key)
    return [sorted(keys, key=lambda k: bool(baseline(readings[k].view.experiment))) for keys in together.values()]


def _notes(reading: Reading, tested: Sequence[Any] | None) -> list[str]:
    """Notes on classes with few test examples or none, and the number of classes in the class-balanced mean."""
    environment = reading.view.environment or {}
    names = [text(name) for name in environment.get("class_names", [])]
    over = judged.over_classes(tested)
    notes = judged.notes(names, tested, environment.get("class_counts"))
    return [*([f"class-balanced is over {over}"] if over else []), *notes]


def _shared(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that determines a result, except method, seed, and whether clients are alone or pooled."""
    apart = ("method", "seed", "checkpoint_every", "evaluate_every", "data.alone", "data.pooled")
    values = flat(experiment).items()
    return {name: value for name, value in values if not name.startswith("method.") and name not in apart}


def _defaults() -> dict[str, Any]:
    """Defaults for runs that are older than an option, so that they share a setting with newer ones."""
    from redgrape.runs.experiment import Experiment

    return _shared(Experiment().resolved())


def _methods(keys: Sequence[str], readings: Mapping[str, Reading], runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    together: dict[str, list[str]] = {}
    for key in keys:
        experiment = readings[key].view.experiment
        told = json.dumps(experiment["method"], sort_keys=True, default=str) + baseline(experiment)
        told += started(experiment)
        together.setdefault(told, []).append(key)
    groups = list(together.values())
    experiments = [readings[members[0]].view.experiment for members in groups]
    titles = [text(run_label(e["method"]) + baseline(e) + started(e)) for e in experiments]
    labels = _distinct(titles, [e["method"] for e in experiments])
    methods = []
    for label, members, experiment in zip(labels, groups, experiments, strict=True):
        file = f"{re.sub(r'[^A-Za-z0-9_.=-]+', '-', label).strip('-.') or 'experiment'}.toml"
        extra = any(readings[key].view.uses_extra_data for key in members)
        known = {
            figure: by_seed(
                (runs[key]["seed"], readings[key].view.client, runs[key]["result"][figure]) for key in members
            )
            for figure in FIGURES
        }
        methods.append(
            {
                "label": label + (EXTRA_DATA if extra else ""),
                "runs": members,
                "figures": {figure: list(seeds.values()) for figure, seeds in known.items()},
                "cells": [cell(seeds, len({runs[key]["seed"] for key in members})) for seeds in known.values()],
                "hyper": [[text(name), text(value)] for name, value in experiment["method"].items()],
                "file": file,
                "toml": tomli_w.dumps(experiment),
                "commands": [f"redgrape run {shlex.quote(file)} --seed {runs[key]['seed']}" for key in members],
            }
        )
    return methods


def _on_methods(methods: Sequence[Mapping[str, Any]], readings: Mapping[str, Reading]) -> list[str]:
    """What federating gains, once runs of clients alone or of pooled data are finished; what was not evaluated; and
    whether all runs were made alike."""
    views = {method["label"]: [readings[key].view for key in method["runs"]] for method in methods}
    finished = [Result(label, of_method) for label, of_method in views.items() if all(v.summary for v in of_method)]
    named = [(f"{label}, seed {v.experiment['seed']}", v) for label, of_method in views.items() for v in of_method]
    late = [note for _, v in named if v.summary and (note := last_evaluated(v))]
    return [printable(note) for note in [*gap_notes(finished), *late, *machines(named)]]


def _distinct(titles: Sequence[str], values: Sequence[Mapping[str, Any]]) -> list[str]:
    """The titles. Equal titles also get the values in which they differ from most of the others."""
    named = [flat(value) for value in values]
    distinct = []
    for i, title in enumerate(titles):
        alike = [named[j] for j, other in enumerate(titles) if other == title]
        own = [f"{text(key)}={text(value)}" for key, value in named[i].items() if not _usual(key, value, alike)]
        distinct.append(" ".join([title, *own]))
    return distinct


def _usual(key: str, value: Any, alike: Sequence[Mapping[str, Any]]) -> bool:
    """Whether more than half have this value. Then it is enough to name the others."""
    return all(key in other for other in alike) and 2 * sum(other[key] == value for other in alike) > len(alike)


def _clients(reading: Reading) -> int | None:
    """The number of clients. It follows from the data if the partition is natural or of the user: None until known."""
    data = reading.view.experiment["data"]
    if baseline(reading.view.experiment):
        return int(data["clients"])
    known = judged.clients_in(reading.view.environment or {})
    return known or (None if brings_clients(data["partition"]) else int(data["clients"]))


def _title(experiment: Mapping[str, Any], clients: int | None) -> str:
    sampled, among = experiment.get("clients_per_round", "none"), "natural" if clients is None else clients
    participation = f"{among} clients" if sampled in ("none", clients) else f"{sampled} of {among} clients a round"
    return text(f"{Path(experiment['data']['source']).stem}{_ratio(experiment['data'])}, {participation}")


def _ratio(data: Mapping[str, Any]) -> str:
    return "" if data["imbalance"] == "natural" else f", imbalance ratio {data['ir']:g}"


def _facts(readings: Sequence[Reading]) -> list[list[str]]:
    """The facts of a setting, in words."""
    experiment = readings[0].view.experiment
    data, sampled = experiment["data"], experiment.get("clients_per_round", "none")
    alpha = f", alpha {data['alpha']:g}" if judged.has_alpha(data["partition"]) else ""
    clients = _clients(readings[0])
    among = "" if clients is None else f" of {clients}"
    facts = {
        "Data": f"{Path(data['source']).stem}, {data['imbalance']}{_ratio(data)}",
        "Partition": f"{data['partition']}{alpha}",
        "Clients in a round": f"all{among}" if sampled == "none" else f"{sampled}{among}, drawn anew",
        "Rounds": experiment["rounds"],
        "Net": experiment["net"]["name"],
    }
    environment = readings[0].view.environment
    if environment and environment["class_counts"] is not None:
        counts = environment["class_counts"]
        facts["Training examples"] = (
            f"{sum(counts)} of {len(counts)} classes, {max(counts)} in the largest, {min(counts)} in the smallest"
        )
    elif environment:
        sites = ", ".join(map(str, environment.get("sites", [])))
        facts["Training examples"] = f"of each class known to the sites alone: {sites}"
        facts["Evaluated at"] = f"the {environment.get('evaluated', 'server')}"
    methods = [reading.view.experiment["method"] for reading in readings]
    for key, words in {"epochs": "Local epochs", "batch_size": "Batch size", "lr": "Learning rate"}.items():
        values = sorted({str(method[key]) for method in methods if key in method})
        if values:
            facts[words] = ", ".join(values)
    facts["Seeds"] = ", ".join(map(str, sorted({int(reading.view.experiment["seed"]) for reading in readings})))
    return [[name, text(value)] for name, value in facts.items()]
