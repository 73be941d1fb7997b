"""What each party could learn in a run, counted from the records in its folder.

The server sees every update unmasked, and with it the classes that a client reports. With secure aggregation it sees
the sum over a round's clients, and how many clients reported each class. Clients see what the server releases: the
model, and what the method computes from class rows. A report of a single example is that example's feature vector. A
gradient of n < C examples can be solved for all their feature vectors: it has n n unknowns in (C - 1) (n + 1) equations
(docs/privacy.md). A class released from one client is that client's report.
Counts are of reports (client, class, round) and releases (class, round).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redgrape.errors import StorageError
from redgrape.exchange import ClassRows, Direction, Exchange, Parts, Sum, Weight
from redgrape.exchange.parts import class_rows
from redgrape.privacy.ledger import PrivacyLedger
from redgrape.reading import gap
from redgrape.reading.judged import clients_in
from redgrape.reading.run_view import RunView
from redgrape.runs.figures import unpacked


def disclosures(
    exchange: Exchange, parts: Parts, survey: Iterable[str], single: str, num_classes: int
) -> dict[str, Any]:
    """What a method and its exchange disclose, by the parts of an update. A run records it, so readers of the run need
    not load its method, which may be a file."""
    reports = None
    for part in class_rows(parts).values():
        counts = "the number of examples behind every class that is reported"
        reports = {
            "min_count": exchange.min_count,
            "min_clients": exchange.min_clients,
            "fewest_contributors": exchange.fewest_contributors(),
            "solvable_up_to": num_classes - 1 if part.gradient else 1,
            "beside_gradients": [counts] if part.weights == "count" else [],
        }
    sentences = [_rows_words(name, part, exchange) for name, part in class_rows(parts).items()]
    sentences += [_sums_words(n, exchange) for n, part in parts.items() if isinstance(part, Sum) and part.counted]
    if any(isinstance(part, Weight) for part in parts.values()):
        sentences.append(
            "A client also sends its weight in the averages, one number that the method makes of its class counts."
        )
    if asked := ", ".join(survey):
        sentences.append(
            f"Before the first round each client was asked for its {asked}. The method needs the sum alone; without a "
            "secure sum, whoever adds the answers up sees each client's own."
        )
    if single:
        sentences.append(f"The server looks at single updates: {single}.")
    return {
        "averages": any(isinstance(part, Direction) for part in parts.values()),
        "beyond_averaging": " ".join(sentences),
        "class_reports": reports,
        "randomness": exchange.randomness,
    }


def _rows_words(name: str, part: ClassRows, exchange: Exchange) -> str:
    """What class rows expose, in words."""
    counts = " and how many examples of each" if part.weights == "count" else ""
    what = "the classifier's gradient on" if part.gradient else "a row for"
    few = (
        "of fewer examples than there are classes a gradient can be solved for every feature vector."
        if part.gradient
        else "a row is a mean over the client's examples of the class."
    )
    single = (
        "If a client has one example of a class, that example's exact feature vector follows from it;"
        if exchange.min_count == 1
        else f"Only classes with at least {exchange.min_count} examples were sent, so none is of a single example;"
    )
    released = (
        "If only one client of a round reports a class, what the server makes of it is that client's own."
        if exchange.min_clients == 1
        else f"The server uses a class only if at least {exchange.min_clients} clients of a round report it."
    )
    return (
        f"A client also sends {what} each of its classes ('{name}'). These expose which classes a client holds"
        f"{counts}. {single} {few} {released} They are not in this folder."
    )


def _sums_words(name: str, exchange: Exchange) -> str:
    """What sums over examples expose, in words."""
    single = (
        "The sum of a single example is its exact feature vector."
        if exchange.min_count == 1
        else f"They are of classes with at least {exchange.min_count} examples at the client."
    )
    return (
        f"A client also sends sums over its examples by class ('{name}'). These expose how many examples of each class "
        f"it holds, and their mean feature vector. {single} A secure sum shows only those of all clients of a round "
        "together, which are one client's own if no other has the class."
    )


def recorded_disclosures(run: RunView) -> dict[str, Any]:
    """What a run discloses, as it recorded it."""
    environment, name = run.environment, run.experiment["method"]["name"]
    if environment is None:
        raise StorageError(f"'{run.path}' has not started; let it finish a round first")
    if "discloses" not in environment:
        raise StorageError(
            f"'{run.path}' does not record what its method '{name}' discloses; run it again with this redgrape"
        )
    return dict(environment["discloses"])


def disclosed(run: RunView) -> dict[str, Any]:
    """The figures of a run for `redgrape privacy`, in JSON types only."""
    discloses = recorded_disclosures(run)
    records, environment, baseline = run.metrics, run.environment or {}, gap.baseline(run.experiment)
    answers = [] if baseline else [len(record["answered"]) for record in records]
    facts: dict[str, Any] = {
        "run": str(run.path),
        "method": run.experiment["method"]["name"] + baseline,
        "baseline": baseline.removeprefix("@") or None,
        "preset": run.experiment.get("exchange", {}).get("preset", "plain"),
        "rounds": len(records),
        "clients": clients_in(environment) or None,
        "classes": len(environment["class_names"]),
        "answers": sum(answers),
        "secure_aggregation": bool(environment.get("secure_aggregation")),
        "fewest_answers": min(answers, default=None),
        "averages": discloses.get("averages", True),  # so did all methods of older runs
        "beyond_averaging": "" if baseline else discloses["beyond_averaging"],
        "evaluations_at_sites": _evaluations_at_sites(records, environment),
        "columns": _columns(environment),
        "class_reports": None,
        "noise": _noise(run, discloses["randomness"]),
    }
    if not baseline and (reports := discloses["class_reports"]) is not None:
        held = environment.get("client_counts")  # [clients, C]; with real sites only the sites know them
        counts = None if held is None else torch.tensor(held)
        rounds = [_Round(reports, record, counts, run.path) for record in records]
        facts["class_reports"] = {
            **{name: value for name, value in reports.items() if name != "fewest_contributors"},
            "server": _seen_by_server(reports, rounds, counts),
            "clients": _seen_by_clients(reports, rounds),
        }
        if facts["secure_aggregation"]:
            alone = sum(int((r.contributors == 1).sum()) for r in rounds)
            facts["class_reports"]["server"]["sums_of_one_client"] = alone
    return facts


def _evaluations_at_sites(
    records: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]
) -> dict[str, int] | None:
    """The number of evaluations, and the fewest training examples of a class in them; None if the server has a test
    set."""
    if environment.get("evaluated") != "sites":
        return None
    floor = 1 if environment.get("secure_aggregation") else environment.get("min_count", 1)
    return {"number": sum("test" in record for record in records), "min_count": floor}


def _columns(environment: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the run knows of the columns of its table; None if its data is no table."""
    if (table := environment.get("input", {}).get("table")) is None:
        return None
    values = {c["name"]: len(c["categories"]) for c in table["columns"] if c["categories"] is not None}
    most = max(values, key=values.__getitem__, default=None)
    return {
        "numbers": len(table["columns"]) - len(values),
        "categories": len(values),
        "most_values": None if most is None else {"column": most, "values": values[most]},
        "agreed": "sites" in environment,  # the sites of a deployment know the categories before they begin
    }


def _noise(run: RunView, randomness: str | None) -> dict[str, Any] | None:
    ledger = PrivacyLedger(run.path)
    if any("epsilon" in record for record in run.metrics):
        ledger.require(len(run.metrics))
    releases = ledger.releases()
    if not releases:
        return None
    last = releases[-1]
    return {
        "epsilon": last["epsilon"],
        "delta": last["delta"],
        "releases": len(releases),
        "most_rounds": last["most_rounds"],
        "mechanisms": last["mechanisms"],
        "randomness": randomness,
    }


class _Round:
    """One round's reports and releases, by class."""

    def __init__(self, reports: Mapping[str, Any], record: Mapping[str, Any], counts: Tensor | None, run: Path) -> None:
        self.answered: list[int] = record["answered"]
        self.examples: Tensor | None = None  # behind the reports of each class, if known
        reported: Tensor | None = None
        if counts is not None:
            counted = counts[[k for k in self.answered if k not in record.get("left_out", [])]]
            reported = counted >= reports["min_count"]
            self.examples = (counted * reported).sum(dim=0)
        if "class_contributors" in record:
            self.contributors = torch.tensor(unpacked(record["class_contributors"]))
        elif reported is not None:  # an older run, without this record
            self.contributors = reported.sum(dim=0)
        else:
            raise StorageError(f"'{run}' does not record who reported a class; run it again with this redgrape")
        released = self.contributors >= reports["fewest_contributors"]
        self.released = torch.tensor(unpacked(record["class_released"])) if "class_released" in record else released


def _seen_by_server(reports: Mapping[str, Any], rounds: Sequence[_Round], counts: Tensor | None) -> dict[str, Any]:
    if counts is None:
        return {"reports": sum(int(r.contributors.sum()) for r in rounds)}
    reported = counts >= reports["min_count"]
    took_part = torch.zeros(len(counts), dtype=torch.int64)
    for r in rounds:
        took_part[r.answered] += 1
    of_one, solvable = reported & (counts == 1), reported & (counts <= reports["solvable_up_to"])

    def in_all(pairs: Tensor) -> int:
        return int((pairs * took_part[:, None]).sum())

    def once(pairs: Tensor) -> int:
        return int((pairs & (took_part > 0)[:, None]).sum())

    return {
        "reports": in_all(reported),
        "pairs": once(reported),  # (client, class)
        "pairs_held_back": once((counts > 0) & ~reported),
        "single_example_reports": in_all(of_one),
        "single_examples": once(of_one),
        "solvable_pairs": once(solvable),
        "solvable_examples": int((counts * solvable)[took_part > 0].sum()),
        "classes_of_clients": {
            str(k): reported[k].nonzero().flatten().tolist() for k in took_part.nonzero().flatten().tolist()
        },
    }


def _seen_by_clients(reports: Mapping[str, Any], rounds: Sequence[_Round]) -> dict[str, Any]:
    alone = [r.released & (r.contributors == 1) for r in rounds]
    behind = [int(r.contributors[r.released].min()) for r in rounds if r.released.any()]
    known = [(r.released, r.examples) for r in rounds if r.examples is not None]  # all rounds, or none
    limit = reports["solvable_up_to"]
    return {
        "releases": sum(int(r.released.sum()) for r in rounds),
        "fewest_contributors": min(behind, default=None),
        "releases_from_one_client": sum(int(a.sum()) for a in alone),
        "releases_of_one_example": sum(int((r & (n == 1)).sum()) for r, n in known) if known else None,
        "solvable_releases": sum(int((r & (n <= limit) & (n > 0)).sum()) for r, n in known) if known else None,
        "held_back": sum(int((~r.released & (r.contributors > 0)).sum()) for r in rounds),
        "classes_released": sorted({c for r in rounds for c in r.released.nonzero().flatten().tolist()}),
    }


def in_words(facts: Mapping[str, Any]) -> dict[str, list[str]]:
    """The figures in words: a few sentences for each party."""
    parties = _federation_words(facts) if facts["baseline"] is None else BASELINES[facts["baseline"]]
    if facts["columns"] is not None:
        parties = {**parties, "anyone who gets the model": [_column_words(facts, facts["columns"])]}
    return {**parties, "differential privacy": _noise_words(facts)}


BASELINES = {
    "pooled": {"whoever trains": ["all examples: they are in one place, and whoever trains holds them"]},
    "alone": {"the server and the other clients": ["nothing: a client trains alone, and nothing is exchanged"]},
}


def _column_words(facts: Mapping[str, Any], columns: Mapping[str, Any]) -> str:
    words = []
    if count := columns["numbers"]:
        words.append(f"means and deviations of {_counted(count, 'column')} of numbers")
    if count := columns["categories"]:
        most = columns["most_values"]
        known = "as agreed before" if columns["agreed"] else "even one that a single row has"
        words.append(
            f"every value of {_counted(count, 'column')} of categories (most: '{most['column']}', "
            f"{_counted(most['values'], 'value')}), {known}"
        )
    sums = "" if facts["baseline"] else "; they come from sums over the clients"
    seen = "" if facts["baseline"] or facts["secure_aggregation"] else ", and the server sees each client's own"
    return "; ".join(words) + sums + seen


def _federation_words(facts: Mapping[str, Any]) -> dict[str, list[str]]:
    reports = facts["class_reports"]
    clients = [
        "the model of every round that they took part in, and so the sum of what the others changed"
        + _fewest_words(facts["fewest_answers"])
    ]
    server = [
        f"{facts['answers']} updates of the model, each with its client's number of examples and training loss; the "
        "classifier's part of an update tells much about the labels behind it"
    ]
    if not facts["averages"]:
        server = [f"{facts['answers']} answers, without an update of the model"]
    if facts["secure_aggregation"]:
        server = _sum_words(facts)
    elif reports is None:
        server += [facts["beyond_averaging"]] if facts["beyond_averaging"] else ["no class by name, from the updates"]
    else:
        server += _server_words(facts, reports)
    if (evaluations := facts["evaluations_at_sites"]) is not None:
        server += [_evaluation_words(evaluations, summed=facts["secure_aggregation"])]
    if reports is not None:
        clients += _client_words(facts, reports["clients"])
    return {"the server": server, "the clients": clients}


def _fewest_words(fewest: int | None) -> str:
    if fewest is None:
        return ""
    if fewest == 1:
        return "; in a round that a single client answered, that client's own change"
    return f"; the fewest answers in a round were {fewest}"


def _sum_words(facts: Mapping[str, Any]) -> list[str]:
    what = "updates of the model, their numbers of examples and their training losses"
    sentences = [
        f"{facts['rounds']} sums (secure aggregation), each over {facts['fewest_answers']} sites or more: of their "
        f"{what if facts['averages'] else 'answers'}; no site's own, nor what it "
        "answered where models were evaluated at the sites",
        "who took part in which round; two sums over different sites differ by what the sites in one alone sent",
        "a site's own numbers, if the server breaks the protocol, or has more than half of a round's sites or all "
        "other sites on its side",
    ]
    if (reports := facts["class_reports"]) is None:
        beyond = facts["beyond_averaging"]
        return [*sentences, f"of all sites together, and of none by itself: {beyond}"] if beyond else sentences
    seen, limit = reports["server"], reports["solvable_up_to"]
    return [
        *sentences,
        f"how many sites reported each class, from {_examples(reports['min_count'])} on, and the sum of their class "
        f"gradients: {seen['reports']} reports in all, not whose they were",
        f"{seen['sums_of_one_client']} times one site alone reported a class, so that the sum was its own; a sum over "
        f"at most {_examples(limit)} can be solved for their feature vectors: how many there were, only the sites know",
        *(f"of a round's sites together: {words}" for words in reports["beside_gradients"]),
    ]


def _evaluation_words(evaluations: Mapping[str, int], *, summed: bool) -> str:
    whose = "of all sites together" if summed else "of each site"
    floor, number = evaluations["min_count"], evaluations["number"]
    least = f", from {_examples(floor)} for training on" if floor > 1 else ""
    return (
        f"{whose}, by {_counted(number, 'evaluation')} there, how many test examples of which class were taken for "
        f"which{least}; where these were held out, they are a known share of all of the class"
    )


def _noise_words(facts: Mapping[str, Any]) -> list[str]:
    if (noise := facts["noise"]) is None:
        return ["none: nothing got noise, epsilon is infinite"]
    words = ", ".join(f"{m['name']} {m['multiplier']:g} ({m['times']} a round)" for m in noise["mechanisms"])
    spent = (
        "epsilon is infinite, because not everything released got noise"
        if noise["epsilon"] is None
        else f"epsilon {noise['epsilon']:.4g} at delta {noise['delta']:g}"
    )
    holds = (
        "every site clips its own update, and the server is honest: it sees their sum without noise"
        if facts["secure_aggregation"]
        else "the server is honest: it sees the updates without noise, and metrics.jsonl is made from them"
    )
    sentences = [
        f"{spent}; noise multipliers: {words}; {noise['releases']} releases, "
        f"a client in at most {noise['most_rounds']}",
        "this bounds what the clients, and anyone who gets the model, can learn about all data of one client; it "
        f"holds if {holds}",
    ]
    if noise["randomness"] == "seed":
        sentences += ["the noise came from the seed: whoever knows the seed can remove it, and epsilon is meaningless"]
    return sentences


def _server_words(facts: Mapping[str, Any], reports: Mapping[str, Any]) -> list[str]:
    seen, floor = reports["server"], reports["min_count"]
    beside = [f"of each client: {words}" for words in reports["beside_gradients"]]
    if "pairs" not in seen:
        limit = reports["solvable_up_to"]
        words = [f"{seen['reports']} reports of a class by a client, each of {_examples(floor)} or more"]
        few = f"the exact feature vectors behind reports of at most {_examples(limit)}: how many, only the clients know"
        return [*words, *([few] if floor <= limit else []), *beside]
    back = f", and {seen['pairs_held_back']} were held back" if floor > 1 else ""
    return [
        f"which classes each client holds, from {_examples(floor)} on: {seen['pairs']} pairs of a client and a class, "
        f"in {seen['reports']} reports{back}",
        f"the exact feature vector of {_examples(seen['single_examples'])}, the only ones of their class at their "
        f"client, in {seen['single_example_reports']} reports",
        f"with some work the feature vectors of {_examples(seen['solvable_examples'])} in {seen['solvable_pairs']} "
        "pairs, those among them: of so few examples a report can be solved for all; of the others a weighted mean",
        *beside,
    ]


def _client_words(facts: Mapping[str, Any], seen: Mapping[str, Any]) -> list[str]:
    single, solvable = seen["releases_of_one_example"], seen["solvable_releases"]
    exact = (
        f", and {single} of a single example, whose exact feature vector every client could compute; {solvable} were "
        "of so few examples that each can be solved for all of its examples"
    )
    least = f"; the fewest clients behind one were {seen['fewest_contributors']}" if seen["releases"] else ""
    return [
        f"what the server makes of class rows of {len(seen['classes_released'])} of {facts['classes']} classes, "
        f"released {seen['releases']} times{least}; {seen['held_back']} times one was held back because too few "
        "clients had reported the class",
        f"{seen['releases_from_one_client']} releases were from one client alone{'' if single is None else exact}",
    ]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _examples(count: int) -> str:
    return _counted(count, "example")


def leak_in_one_line(facts: Mapping[str, Any]) -> str | None:
    """What a run without floors disclosed; None if there was nothing to hold back."""
    reports = facts["class_reports"]
    if reports is None or reports["min_count"] > 1 or "pairs" not in reports["server"]:
        return None
    server, clients = reports["server"], reports["clients"]
    return (
        f"privacy, {facts['method']}: the server learned which classes each client holds ({server['pairs']} pairs) "
        f"and could compute the exact features of {_examples(server['single_examples'])}, with some work of "
        f"{server['solvable_examples']}; {clients['releases_from_one_client']} releases were of one client alone; "
        "exchange.preset=private keeps such classes back, `redgrape privacy RUN` tells more"
    )
