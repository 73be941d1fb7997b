"""The reliability diagram: how often a model is right among examples of which it is equally certain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redgrape.errors import ConfigError
from redgrape.reading.pictures import colours, pyplot
from redgrape.runs import durable

FORMATS = (".png", ".svg", ".pdf")


def check_ending(path: Path) -> None:
    if path.suffix not in FORMATS:
        raise ConfigError(f"'{path}' has no known ending; choose from {', '.join(FORMATS)}")


def draw(scores: Mapping[str, Any], path: Path) -> None:
    """Draw accuracy over certainty, before calibration and after it if there is one, above the examples of each bin."""
    check_ending(path)
    plt = pyplot()
    after = {"after calibration": scores["calibrated"]} if "calibrated" in scores else {}
    lines = {"before calibration" if after else "the model": scores, **after}
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(6, 6), sharex=True, gridspec_kw={"height_ratios": [3, 1]}, layout="constrained"
    )
    top.plot([0, 100], [0, 100], color="grey", linestyle=":", linewidth=1)
    for (name, of), colour, marker in zip(lines.items(), colours(len(lines)), "os", strict=False):
        bins = [row for row in of["reliability"] if row["examples"]]
        certainty = [100 * row["certainty"] for row in bins]
        label = f"{name} (error {100 * of['ece']:.1f} %)"
        top.plot(certainty, [100 * row["accuracy"] for row in bins], color=colour, marker=marker, label=label)
        bottom.plot(certainty, [row["examples"] for row in bins], color=colour, marker=marker)
    top.set_ylabel("right, %")
    top.set_ylim(-3, 103)
    top.legend(loc="upper left")
    top.grid(alpha=0.3)
    bottom.set_yscale("log")
    bottom.set_ylabel("examples")
    bottom.set_xlabel("highest probability, %")
    figure.savefig(durable.ordinary(path), dpi=130)
    plt.close(figure)
