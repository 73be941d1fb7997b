"""The figure of a comparison by class, and what all figures share. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redgrape.errors import needed
from redgrape.reading import terminal
from redgrape.reading.run_tables import Result, cell, mean_std
from redgrape.runs import durable
from redgrape.runs.figures import LONGEST

POINTS = 100  # with very many classes, a figure shows the means of this many neighbourhoods
GRAPE = "#8e1b3f"
COOLER = ("#4c78a8", "#f2a541", "#54a24b", "#9d755d", "#72b7b2", "#b279a2", "#5f6a72", "#d6a5c9")


def colours(count: int) -> list[str]:
    """Grape red for the last entry, cooler colours for the others."""
    return [*[COOLER[i % len(COOLER)] for i in range(count - 1)], GRAPE]


def pyplot() -> Any:
    needed("matplotlib", "figures need matplotlib", "plots").use("Agg")
    import matplotlib.pyplot as plt

    return plt


def printed(row: str) -> str:
    """A name in a picture: no escapes, no mathematics."""
    return "\n".join(terminal.printable(line).replace("$", r"\$") for line in row.split("\n"))


def draw_per_class(results: Sequence[Result], path: Path) -> None:
    """Plot accuracy per class from head to tail, one line per method (bars: std over seeds), above the class sizes."""
    plt = pyplot()
    environment = results[0].runs[0].environment or {}
    names = environment["class_names"]
    counts = environment["class_counts"] or [1] * len(names)  # in a deployment, only the sites know
    order = sorted(range(len(counts)), key=lambda c: (-counts[c], c))
    places = range(len(order))
    wide, size = len(order) > 30, -(-len(order) // POINTS) if len(order) > LONGEST else 1
    blocks = [order[start : start + size] for start in places[::size]]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(10 if wide else 8, 6), sharex=True, gridspec_kw={"height_ratios": [3, 1]}, layout="constrained"
    )
    for result, colour, marker in zip(results, colours(len(results)), "os^Dv<>phX*P" * 9, strict=False):
        per_class = result.per_class()
        values = [[value for c in block for value in per_class[c]] for block in blocks]
        pairs = [mean_std(known) if known else (math.nan, None) for known in values]
        errors = [100 * (std or 0.0) for _, std in pairs] if size == 1 and any(std for _, std in pairs) else None
        top.errorbar(
            [start + (len(block) - 1) / 2 for start, block in zip(places[::size], blocks, strict=True)],
            [100 * mean for mean, _ in pairs],
            yerr=errors,
            label=f"{printed(result.title)} (tail {cell(result.by_seed('tail'), result.seeds)})",
            color=colour,
            marker=None if wide else marker,
            capsize=3,
            linewidth=2,
        )
    top.set_ylabel("test accuracy, %" + (f", mean of {size} neighbouring classes" if size > 1 else ""))
    top.set_ylim(-3, 103)
    top.legend(loc="lower left")
    top.grid(alpha=0.3)
    groups = environment["groups"]
    for boundary in (len(groups["head"]), len(groups["head"]) + len(groups["middle"])):
        for axis in (top, bottom):
            axis.axvline(boundary - 0.5, color="grey", linestyle=":", linewidth=1)
    start = 0
    for name in ("head", "middle", "tail"):
        if groups[name]:
            middle = start + (len(groups[name]) - 1) / 2
            top.text(middle, 1.01, name, transform=top.get_xaxis_transform(), ha="center", va="bottom", color="grey")
            start += len(groups[name])
    if size > 1:
        bottom.fill_between(places, [counts[c] for c in order], color="lightgrey", edgecolor="grey")
    else:
        bottom.bar(places, [counts[c] for c in order], color="lightgrey", edgecolor="grey")
    bottom.set_yscale("log")
    bottom.set_ylabel("training\nexamples")
    step = max(1, len(order) // 25)
    labels = [terminal.printable(names[c]) for c in order][::step]
    if len(order) > 10:
        turn: dict[str, Any] = {"rotation": 90}
    elif len(order) * max(map(len, labels)) > 80:  # characters side by side
        turn = {"rotation": 20, "ha": "right"}
    else:
        turn = {}
    bottom.set_xticks(list(places)[::step], labels, parse_math=False, **turn)
    bottom.set_xlabel("class, from head to tail")
    figure.savefig(durable.ordinary(path), dpi=130)
    plt.close(figure)
