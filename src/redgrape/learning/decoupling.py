"""Decoupled training: the whole net first, and in the last rounds its classifier alone, on the frozen encoder.

An update has the same parts in both stages. What is not trained has not moved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from redgrape.exchange.parts import Direction, Parts, Statistics
from redgrape.tree import Tensors, Tree

if TYPE_CHECKING:
    from redgrape.method import Site


def in_second_stage(share: float, round: int, rounds: int) -> bool:
    """Whether this round is among the last `share` of the rounds: at least one of them, and never all."""
    second = min(rounds - 1, max(1, int(share * rounds + 0.5))) if share else 0
    return round > rounds - second


def starts_second_stage(share: float, site: Site) -> bool:
    """Whether the round after this one is the first of the second stage."""
    return in_second_stage(share, site.round + 1, site.rounds) and not in_second_stage(share, site.round, site.rounds)


def with_unmoved(update: Tree, parts: Parts) -> dict[str, Any]:
    """The update with zeros for parameters that were not trained, and the received values of running statistics."""
    whole = dict(update)
    for name, part in parts.items():
        if isinstance(part, Direction):
            whole[name] = {t: update[name].get(t, torch.zeros_like(like)) for t, like in part.like.items()}
        elif isinstance(part, Statistics):
            whole[name] = {t: like.clone() for t, like in part.like.items()}
    return whole


def with_encoder_of(model: Tensors, old: Tensors) -> Tensors:
    """The classifier of `model` on the encoder of `old`."""
    return {name: t if name.startswith("classifier.") else old[name] for name, t in model.items()}
