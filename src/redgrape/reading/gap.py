"""Was federating worth it? What clients reach alone, what pooled data reaches, and what a method closes of the gap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from redgrape.reading import terminal

if TYPE_CHECKING:
    from redgrape.reading.run_tables import Result

FIGURE = "balanced"


def notes(results: Sequence[Result]) -> list[str]:
    """Lines about class-balanced accuracy, if clients alone or pooled data are among the results."""
    alone = {r.label: mean for r in results if _trained(r, "alone") and (mean := _mean(r.values(FIGURE))) is not None}
    pooled = {r.label: mean for r in results if _trained(r, "pooled") and (mean := _mean(r.values(FIGURE))) is not None}
    told = [_by_client(r) for r in results if r.label in alone]
    others = [r for r in results if not _trained(r, "alone") and not _trained(r, "pooled")]
    reached = {r.title: mean for r in others if (mean := _mean(r.values(FIGURE))) is not None}
    for low, start in alone.items():
        for high, end in pooled.items():
            way = f"from {low} ({_percent(start)}) to {high} ({_percent(end)})"
            if end <= start:
                told.append(f"there is no gap {way}")
            elif reached:
                shares = ", ".join(f"{name} {100 * (m - start) / (end - start):.0f} %" for name, m in reached.items())
                told.append(f"share of the gap {way} that federating closes: {shares}")
    return told


def _trained(result: Result, where: str) -> bool:
    """Whether the runs are of clients alone, or of pooled data."""
    return all(run.experiment["data"].get(where) not in (None, "none", False) for run in result.runs)


def _by_client(result: Result) -> str:
    """The mean over clients, and the worst of them."""
    values: dict[str, list[float]] = {}
    for run in result.runs:
        values.setdefault(run.experiment["data"]["alone"], []).extend(result.of_run(run, FIGURE))
    means = {name: mean for name, of_client in values.items() if (mean := _mean(of_client)) is not None}
    worst = min(means, key=lambda name: (means[name], name))
    return (
        f"{result.label}: class-balanced accuracy {_percent(sum(means.values()) / len(means))} as the mean of "
        f"{len(means)} clients, {_percent(means[worst])} at the worst ({terminal.printable(worst)})"
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
