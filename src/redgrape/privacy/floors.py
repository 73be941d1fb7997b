"""What the sites' floors refuse: update parts, or a survey, that would disclose too few examples or too few sites."""

from __future__ import annotations

from collections.abc import Iterable

from redgrape.exchange import Exchange, Parts
from redgrape.exchange.parts import balanced_sums, class_rows, class_sums


def too_much(
    exchange: Exchange,
    parts: Parts,
    survey: Iterable[str],
    *,
    min_count: int,
    min_clients: int,
    secure_aggregation: bool,
    num_classes: int,
) -> str | None:
    """Why these parts and a survey with these names disclose more than the floors allow; None if they do not."""
    rows = class_rows(parts)
    alone = [] if secure_aggregation else class_sums(parts)
    if (rows or alone) and exchange.min_count < min_count:
        return (
            f"exchange.min_count is {exchange.min_count}, but no site reports a class with fewer than "
            f"{min_count} examples (min_count in deploy.toml and site.toml); raise it"
        )
    if rows and exchange.min_clients < min_clients:
        return (
            f"exchange.min_clients is {exchange.min_clients}, and no class is released that fewer than "
            f"{min_clients} sites report (min_clients in deploy.toml and site.toml); raise it"
        )
    few = min(balanced_sums(parts).values(), default=min_clients)
    if few < min_clients and not exchange.noise:
        return (
            f"min_holders of the method is {few}, and no class is released that fewer than {min_clients} sites hold "
            "(min_clients in deploy.toml and site.toml); raise it"
        )
    if secure_aggregation or min_count == 1:  # sites disclose only parts of sums, or may disclose anything
        return None
    solvable = num_classes - 1
    gradients = [part for part in rows.values() if part.gradient]
    if gradients and solvable >= exchange.min_count:
        return (
            f"class gradients of up to {solvable} examples can be solved for every one of them, and this experiment "
            f"sends them from {exchange.min_count} on; raise exchange.min_count to {solvable + 1}, or use secure "
            "aggregation"
        )
    if drawn := [part.drawn for part in gradients if part.drawn is not None and part.drawn <= solvable]:
        return (
            f"class gradients of up to {solvable} examples can be solved for every one of them, and the method draws "
            f"{min(drawn)} of a class at a time; let it use all of them, or use secure aggregation"
        )
    if balanced := ", ".join(balanced_sums(parts)):
        return (
            f"in '{balanced}' of a single site a class with one example weighs as much as the others, and sites tell "
            f"of no class of which they hold fewer than {min_count} examples; use secure aggregation, or set "
            "min_count=1 in deploy.toml and every site.toml"
        )
    if asked := ", ".join(survey):
        return (
            f"the method asks every client for its {asked}, and sites tell of no class of which they hold fewer than "
            f"{min_count} examples; use secure aggregation, or set min_count=1 in deploy.toml and every site.toml"
        )
    return None
