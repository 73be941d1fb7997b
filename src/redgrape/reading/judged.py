"""The number of evaluation examples per class, and notes for the reader if there are few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from redgrape.data.count_matrix import brings_clients

FEW = 10
EITHER_END = 10  # with very many classes, this many of the largest and of the smallest are shown
NAMED = 8  # above this many classes, the rest is counted, not named


def counts_of(environment: Mapping[str, Any] | None, summary: Mapping[str, Any] | None, on: str = "test") -> Any:
    """The evaluation examples of each class. Deployments and older runs do not record them. They are then the row sums
    of the confusion matrix, or None if there is no such matrix."""
    if (known := (environment or {}).get(f"{on}_counts")) is not None:
        return known
    confusion = (summary or {}).get("confusion") if on == "test" else None
    if isinstance(confusion, Mapping):
        counts = [0] * confusion["classes"]
        for true, examples in zip(confusion["true"], confusion["examples"], strict=True):
            counts[true] += examples
        return counts
    return None if confusion is None else [sum(row) for row in confusion]


def has_alpha(partition: str) -> bool:
    """Whether the partition takes an alpha."""
    return partition != "iid" and not brings_clients(partition)


def clients_in(environment: Mapping[str, Any]) -> int:
    """The number of clients. Older runs do not record names, deployments and very large runs no counts."""
    known = map(environment.get, ("client_names", "client_counts", "sites"))
    return len(next(filter(None, known), []))


def over_classes(counts: Sequence[int] | None) -> str:
    """The number of classes in a mean over classes, in words, if some classes have no example. Else empty."""
    return f"{sum(map(bool, counts))} of {len(counts)} classes" if counts and not all(counts) else ""


def notes(
    names: Sequence[str], counts: Sequence[int] | None, training: Sequence[int] | None, on: str = "test"
) -> list[str]:
    """Notes on classes with no evaluation example, with few, and with no training example."""
    if counts is None or len(counts) != len(names):
        return []
    none = [name for name, n in zip(names, counts, strict=True) if n == 0]
    few = [f"{name} ({n})" for name, n in zip(names, counts, strict=True) if 0 < n < FEW]
    unlearned = [name for name, n, t in zip(names, counts, training or [1] * len(names), strict=True) if n and not t]
    found = {
        f"no {on} example of {_listed(none)}, which no figure judges": none,
        f"fewer than {FEW} {on} examples of {_listed(few)}: one is over 10 points of accuracy": few,
        f"no training example of {_listed(unlearned)}, which cannot be recognised": unlearned,
    }
    return [words for words, classes in found.items() if classes]


def taken(names: Sequence[str], validation: Sequence[int] | None, training: Sequence[int] | None) -> list[str]:
    """A note on rare classes of which validation took examples that training lacks now."""
    known = zip(names, validation or [], training or [], strict=False)
    rare = [f"{name} ({v} of {v + t})" for name, v, t in known if v and t < FEW]
    return (
        [f"validation took training examples of {_listed(rare)}; a smaller data.validation takes fewer"] if rare else []
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"class{'es' if len(names) > 1 else ''} {', '.join(map(str, names[:NAMED]))}{more}"
