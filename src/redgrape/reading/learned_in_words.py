"""What each party could learn in a run, in sentences: the figures of `learned`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
        server += _server_words(reports)
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
        f"how many sites reported each class with at least {_examples(reports['min_count'])}, and the sum of their "
        f"class gradients: {seen['reports']} reports in all, not whose they were",
        f"{seen['sums_of_one_client']} times one site alone reported a class, so that the sum was its own; a sum over "
        f"at most {_examples(limit)} can be solved for their feature vectors: how many there were, only the sites know",
        *(f"of a round's sites together: {words}" for words in reports["beside_gradients"]),
    ]


def _evaluation_words(evaluations: Mapping[str, int], *, summed: bool) -> str:
    whose = "of all sites together" if summed else "of each site"
    floor, number = evaluations["min_count"], evaluations["number"]
    least = f", for classes with at least {_examples(floor)} for training" if floor > 1 else ""
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


def _server_words(reports: Mapping[str, Any]) -> list[str]:
    seen, floor = reports["server"], reports["min_count"]
    beside = [f"of each client: {words}" for words in reports["beside_gradients"]]
    if "pairs" not in seen:
        limit = reports["solvable_up_to"]
        words = [f"{seen['reports']} reports of a class by a client, each of {_examples(floor)} or more"]
        few = f"the exact feature vectors behind reports of at most {_examples(limit)}: how many, only the clients know"
        return [*words, *([few] if floor <= limit else []), *beside]
    back = f", and {seen['pairs_held_back']} were held back" if floor > 1 else ""
    return [
        f"which classes each client holds with at least {_examples(floor)}: {seen['pairs']} pairs of a client and a "
        f"class, in {seen['reports']} reports{back}",
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
