"""The model card in Markdown: what the model is, how to use it, how well it performs, and its limits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from redgrape.data.prepare import CUT
from redgrape.reading import judged
from redgrape.reading.gap import baseline

FIGURES = {
    "accuracy": "overall",
    "balanced": "class-balanced",
    "macro_f1": "macro F1 score",
    "head": "head classes",
    "middle": "middle classes",
    "tail": "tail classes",
}


def write_card(card: Mapping[str, Any], disclosed: str) -> str:
    """Write the card from model.json. `disclosed` is what the method discloses beyond plain averaging."""
    run, experiment = card["run"], card["run"]["experiment"]
    sections = [
        f"# {plain(experiment['method']['name'])} on {plain(experiment['data']['source'])}",
        _what_it_is(card),
        "## How to use it",
        _use(card),
        "## How well it does",
        _results(run, card["class_names"]),
        "## Classes",
        _classes(card),
        "## Data",
        _data(run),
        "## Training",
        _training(card),
        "## Limits",
        _limits(card),
        "## Privacy",
        _privacy(card, disclosed),
    ]
    return "\n\n".join(sections) + "\n"


def plain(text: Any) -> str:
    """Text on one line, escaped so that Markdown shows it literally."""
    printable = "".join(c if c.isprintable() else " " for c in str(text))
    return re.sub(r"([\\`*_\[\]<>|#~&$@:!])", r"\\\1", " ".join(printable.split()))


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _what_it_is(card: Mapping[str, Any]) -> str:
    run = card["run"]
    rounds = run["experiment"]["rounds"]
    unfinished = "" if run["mean_of_last"] else " The run was not finished when this was written."
    return (
        f"A classifier of {len(card['class_names'])} classes, trained {_where(run['experiment'])} with "
        f"redgrape {plain(run['versions']['redgrape'])}: the encoder and the linear classifier of the net "
        f"{plain(card['net'])} after round {run['round']} of {rounds}.{unfinished} Nothing else of the training is in "
        f"this folder."
    )


def _where(experiment: Mapping[str, Any]) -> str:
    return {
        "": "by federated learning",
        "@pooled": "on the examples of all clients in one place",
        "@alone": f"on the examples of the client {plain(experiment['data'].get('alone'))} alone",
    }[baseline(experiment)]


def _use(card: Mapping[str, Any]) -> str:
    shape = ", ".join(["n", *map(str, card["input"]["shape"])])
    if pixels := card["input"]["pixels"]:
        bars = card["input"].get("letterbox")
        how = "between black bars" if bars else "which distorts them if their aspect ratio differs"
        treatment = (
            f"`x` holds pixels as {card['input']['dtype']}, [{shape}]. The model normalises them: divided by "
            f"{pixels['divided_by']}, minus the mean "
            f"{_numbers(pixels['mean'])}, divided by the standard deviation {_numbers(pixels['std'])} of each channel. "
            f"Image files of another size are resized, {how}."
        )
    elif rows := card["input"].get("table"):
        names = ", ".join(plain(column["name"]) for column in rows["columns"])
        treatment = (
            f"`x` is a DataFrame, or a table for `redgrape predict`, with the columns {names}. The model scales "
            "numbers and codes categories as model.json says. Missing values and unknown categories are allowed."
        )
    else:
        treatment = f"`x` holds floats, [{shape}], which go to the net unchanged."
    name = "pixels" if pixels else "x"
    scaled = "the normalisation is part of the graph"
    if card["input"].get("table"):
        scaled = f"it takes [{shape}] floats, already scaled"
    runtime = f"\n\nThe input of model.onnx is named `{name}`, its output `logits`; {scaled}."
    return (
        "```python\nfrom redgrape.exported.model import load_model\n\n"
        'model = load_model("path/to/this/folder")\n'
        "model.predict(x)  # the names of the classes\n"
        "model(x)  # the probabilities, one row per example\n```\n\n"
        f"{treatment}{runtime if card['weights']['format'] == 'onnx' else ''}"
    )


def _results(run: Mapping[str, Any], class_names: Sequence[str]) -> str:
    columns = _shown(run, run["last"], run["mean_of_last"])
    if not columns:
        return f"There are no figures of the model of round {run['round']}."
    counts, names = run["test_counts"], [plain(name) for name in class_names]
    over = judged.over_classes(counts)
    rows = [
        [
            f"{words} ({over})" if over and figure == "balanced" else words,
            *(percent((values or {}).get(figure)) for values in columns.values()),
        ]
        for figure, words in FIGURES.items()
    ]
    in_bfloat16 = "for these figures the encoder multiplied in bfloat16; the model computes in float32, and may differ"
    listed = [*judged.notes(names, counts, run["class_counts"]), *([in_bfloat16] if run.get("bfloat16") else [])]
    few = "".join(f"Note: {note}.\n\n" for note in listed)
    of_several = ""
    if run["last"] is None:
        of_several = f" There are no figures of the model of round {run['round']}, which this folder holds."
    elif len(columns) > 1:
        of_several = (
            f" This folder holds the model of round {run['round']}; the mean is over the models of several rounds."
        )
    return f"{_tested_on(run)}\n\n{table(['accuracy', *columns], rows)}\n\n{few}{_head_and_tail(run)}{of_several}"


def _round(run: Mapping[str, Any]) -> str:
    return f"round {run['round']}{', the best by validation' if run.get('best_round') else ''}"


def _shown(run: Mapping[str, Any], last: Any, mean: Any) -> dict[str, Any]:
    """What is known of accuracy, by its title: of the model's own round, and the mean if it is over other rounds."""
    rounds = run["averaged_rounds"] or []
    shown = {} if run["last"] is None else {_round(run): last}
    if len(rounds) > 1:
        shown[f"mean of {len(rounds)} evaluations, rounds {rounds[0]} to {rounds[-1]}"] = mean
    elif rounds and not shown:
        shown[f"round {rounds[0]}"] = mean
    return shown


def _tested_on(run: Mapping[str, Any]) -> str:
    if run["class_counts"] is not None:
        return "Accuracy on the test set. No client held any of its examples."
    if run["evaluated"] == "server":
        return "Accuracy on a test set of the server."
    floor = run["evaluated_from"]
    least = (
        f" Each site evaluated only classes with at least {floor} training examples of its own." if floor > 1 else ""
    )
    return f"Accuracy on test sets of the sites, which were not used for training.{least}"


def _head_and_tail(run: Mapping[str, Any]) -> str:
    if run["class_counts"] is not None:
        data = run["experiment"]["data"]
        if data["imbalance"] != "binary" and tuple(data.get("tail_classes", CUT)) != CUT:
            return "The tail consists of the classes that the experiment names. All others are the head."
        return "Head and tail are the classes with the most and the fewest training examples."
    if run["groups"]["tail"]:
        return (
            "The tail consists of the classes named as such when the deployment was created. All others are the head."
        )
    return "There is no head or tail: only the sites know which classes are rare."


def _classes(card: Mapping[str, Any]) -> str:
    run = card["run"]
    group = {c: name for name in ("head", "middle", "tail") for c in run["groups"][name]}
    shown = _shown(run, (run["last"] or {}).get("per_class"), run["per_class_mean_of_last"])
    accuracies = {f"accuracy, {title}": values for title, values in shown.items()}
    rows = [
        [
            plain(name),
            group.get(c, "–"),
            str(run["class_counts"][c]) if run["class_counts"] else "–",
            str(run["test_counts"][c]) if run["test_counts"] else "–",
            *(percent(values[c] if values else None) for values in accuracies.values()),
        ]
        for c, name in enumerate(card["class_names"])
    ]
    return table(["class", "group", "training examples", "test examples", *accuracies], rows)


def _data(run: Mapping[str, Any]) -> str:
    data, counts = run["experiment"]["data"], run["class_counts"]
    if counts is None:
        return bullets(
            [
                f"source: the {run['clients']} sites of a deployment; the examples stayed there",
                "training examples of each class: known only to the sites",
            ]
        )
    largest, smallest = max(counts), min(counts)
    ratio = f"{largest / smallest:.1f}" if smallest else "unbounded, because a class has no example"
    asked = f", made with an imbalance ratio of {data['ir']:g}" if data["imbalance"] != "natural" else ""
    alpha = f" with alpha {data['alpha']:g}" if judged.has_alpha(data["partition"]) else ""
    return bullets(
        [
            f"source: {plain(data['source'])}",
            f"imbalance: {plain(data['imbalance'])}{asked}; the largest class over the smallest is {ratio}",
            f"training examples: {sum(counts)}, from {largest} in the largest class to {smallest} in the smallest",
            f"clients: {run['clients']}, by the partition {plain(data['partition'])}{alpha}"
            if not baseline(run["experiment"])
            else f"trained {_where(run['experiment'])}",
            f"fingerprint of the split (SHA-256): {run['split']}",
        ]
    )


def _training(card: Mapping[str, Any]) -> str:
    run, experiment = card["run"], card["run"]["experiment"]
    method = experiment["method"]
    sampled = str(experiment.get("clients_per_round", "none")).replace("none", "all")
    start = experiment["net"].get("weights", "none")
    hyper = [[plain(name), plain(value)] for name, value in method.items() if name not in ("name", "preset")]
    facts = [
        f"method: {plain(method['name'])}, preset {plain(method['preset'])}",
        f"net: {plain(card['net'])}, {plain(card['dtype'])}" + (f", from {plain(start)}" if start != "none" else ""),
        f"rounds: {run['round']}; clients in each: {sampled}; seed: {experiment['seed']}",
        f"versions: {', '.join(f'{name} {plain(version)}' for name, version in run['versions'].items())}",
    ]
    return f"{bullets(facts)}\n\n{table(['hyper-parameter', 'value'], hyper)}"


def _limits(card: Mapping[str, Any]) -> str:
    counts, names = card["run"]["class_counts"], card["class_names"]
    rarest = min(range(len(counts)), key=counts.__getitem__) if counts else None
    example = "" if rarest is None else f" ({plain(names[rarest])} from {counts[rarest]})"
    return bullets(
        [
            f"It always answers with one of its {len(names)} classes. For any other input, the answer is meaningless.",
            f"Rare classes were learned from few examples{example}; look at their own accuracy above, not at the "
            "overall accuracy.",
            "The figures hold for test data from the same source. On other data, or with other class shares, "
            "measure again (`redgrape.exported.inference.evaluate_model`).",
            _calibration(card),
            "It is a research result. Do not let it make decisions about people's health, safety, rights or money.",
        ]
    )


def _calibration(card: Mapping[str, Any]) -> str:
    chosen = card.get("calibration")
    if chosen is None:
        return "Its probabilities are not calibrated."
    onnx = " The logits of model.onnx are those before." if card["weights"]["format"] == "onnx" else ""
    return (
        f"Its probabilities were calibrated on {chosen['examples']} validation examples, for the class shares of "
        f"{chosen['shares']}: logits are divided by {chosen['temperature']:.3f}. The class with the highest ratio of "
        f"probability to threshold is chosen; model.json has the thresholds. The figures above are those before.{onnx}"
    )


def _privacy(card: Mapping[str, Any], disclosed: str) -> str:
    run = card["run"]
    if baseline(run["experiment"]):
        return (
            f"This model was trained {_where(run['experiment'])}: no update crossed between clients and a server. The "
            "weights in this folder are computed from the examples and can reveal something about them."
        )
    general = (
        "In federated learning the examples stay with the clients. But what a client sends is computed from them "
        "and can reveal something about them. So can the weights in this folder."
    )
    sums = (
        "This model was trained with secure aggregation: client messages reached the server masked. It "
        "could read the sum over the clients of a round, but no client's own part."
    )
    return "\n\n".join(words for words in (general, disclosed, sums if run.get("secure_aggregation") else "") if words)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
