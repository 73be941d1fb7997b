"""Was federating worth it? What clients reach alone, what pooled data reaches, and what a method closes of the gap."""

from __future__ import annotations

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
    means: dict[str, dict[str, float]] = {"@alone": {}, "@pooled": {}, "": {}}
    for r in results:
        if values := r.by_seed(FIGURE):
            means[baseline(r.runs[0].experiment)][r.title] = sum(values.values()) / len(values)
    alone, pooled, reached = means.values()
    told = [_by_client(r) for r in results if r.title in alone]
    for low, start in alone.items():
        for high, end in pooled.items():
            way = f"from {low} ({_percent(start)}) to {high} ({_percent(end)})"
            if end <= start:
                told.append(f"there is no gap {way}")
            elif reached:
                shares = {name: 100 * (mean - start) / (end - start) for name, mean in reached.items()}
                beyond = "; above 100 %, the method itself gains too" if max(shares.values()) > 100 else ""
                closed = ", ".join(f"{name} {share:.0f} %" for name, share in shares.items())
                told.append(f"share of the gap {way} that is closed: {closed}{beyond}")
    return told


def _by_client(result: Result) -> str:
    """The mean over clients, and the worst of them."""
    values: dict[str, list[float]] = {}
    for run in result.runs:
        if (value := result.of_run(run, FIGURE)) is not None:
            values.setdefault(run.client, []).append(value)
    means = {name: sum(of_client) / len(of_client) for name, of_client in values.items()}
    worst = min(means, key=lambda name: (means[name], name))
    return (
        f"{result.label}: class-balanced accuracy {_percent(sum(means.values()) / len(means))} as the mean of "
        f"{len(means)} clients, {_percent(means[worst])} at the worst ({terminal.printable(worst)})"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
