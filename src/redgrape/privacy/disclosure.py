"""What an experiment discloses, by the parts of an update. A run records it before it trains."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from redgrape.exchange import ClassRows, Direction, Exchange, Parts, Sum, Weight
from redgrape.exchange.parts import class_rows


def disclosures(
    exchange: Exchange, parts: Parts, survey: Iterable[str], single: str, num_classes: int
) -> dict[str, Any]:
    """What a method and its exchange disclose. Readers of a run take it from there, and need not load the method, which
    may be a file."""
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
