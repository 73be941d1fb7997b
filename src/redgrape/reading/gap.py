"""Was federating worth it? What clients reach alone, what pooled data reaches, and what a method closes of the gap."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from redgrape.reading import terminal

if TYPE_CHECKING:
    from redgrape.reading.run_tables import Result

FIGURE = "balanced"


def baseline(experiment: Mapping[str, Any]) -> str:
    """`@alone` or `@pooled` if the run is of a client alone or of pooled data, else empty."""
    data = experiment["data"]
    return "@alone" if data.get("alone", "none") != "none" else "@pooled" if data.get("pooled") else ""


def notes(results: Sequence[Result]) -> list[str]:
    """Lines about class-balanced accuracy, if clients alone or pooled data are among the results."""
    found: dict[str, dict[str, dict[int, float]]] = {"@alone": {}, "@pooled": {}, "": {}}
    for r in results:
        if by_seed := r.by_seed(FIGURE):
            found[baseline(r.runs[0].experiment)][r.title] = by_seed
    alone, pooled, reached = found.values()
    every = {run.experiment["seed"] for r in results for run in r.runs}
    told = [_by_client(r) for r in results if r.title in alone]
    for low, high in itertools.product(alone, pooled):
        told += _share({low: alone[low], high: pooled[high], **reached}, len(every))
    return told


def _share(by_seed: Mapping[str, Mapping[int, float]], seeds: int) -> list[str]:
    """What methods close of the gap between the first two. Means over the seeds that all have: equal seeds give equal
    splits."""
    common = sorted(set.intersection(*map(set, by_seed.values())))
    if not common:
        return [f"no seed has all of {', '.join(by_seed)}, so that their gap is not known"]
    means = {name: sum(values[seed] for seed in common) / len(common) for name, values in by_seed.items()}
    (low, start), (high, end), *reached = means.items()
    over = "" if len(common) == seeds else f", over {len(common)} of {seeds} seeds"
    way = f"from {low} ({_percent(start)}) to {high} ({_percent(end)})"
    if end <= start:
        return [f"there is no gap {way}{over}"]
    shares = {name: 100 * (mean - start) / (end - start) for name, mean in reached}
    beyond = "; above 100 %, the method itself gains too" if max(shares.values(), default=0) > 100 else ""
    closed = ", ".join(f"{name} {share:.0f} %" for name, share in shares.items())
    return [f"share of the gap {way} that is closed{over}: {closed}{beyond}"] if shares else []


def _by_client(result: Result) -> str:
    """The mean over clients, and the worst of them, over the seeds that have all clients."""
    whole = result.by_seed(FIGURE)
    values: dict[str, list[float]] = {}
    for run in result.runs:
        if run.experiment["seed"] in whole and (value := result.of_run(run, FIGURE)) is not None:
            values.setdefault(run.client, []).append(value)
    means = {name: sum(of_client) / len(of_client) for name, of_client in values.items()}
    worst = min(means, key=lambda name: (means[name], name))
    return (
        f"{result.label}: class-balanced accuracy {_percent(sum(means.values()) / len(means))} as the mean of "
        f"{len(means)} clients, {_percent(means[worst])} at the worst ({terminal.printable(worst)})"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
