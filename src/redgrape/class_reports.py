"""Of which classes a client tells the server, and which of them the server lets out: two floors against small numbers.

    client  reports class c        where it holds at least min_count examples of it
    server  releases class c       where at least min_clients of a round report it; else the last release stays

A class gradient of one example gives that example's feature vector away, exactly, and the mean over one client is that
client's. Whether a client serves a class by its own examples (RedGrape's threshold T) is another question: that stays
at the client. docs/privacy.md says what the floors stop and what they do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from redgrape import robust
from redgrape.acceptance import UpdateRejected
from redgrape.aggregation import Averaging
from redgrape.classifier_gradients import per_class
from redgrape.errors import ConfigError
from redgrape.tree import Tensors, Tree

if TYPE_CHECKING:
    from redgrape.method import ClientId

PRIVATE = {"min_count": 8, "min_clients": 3}  # for the preset `private` of the methods that send class gradients


class ClassReports(Averaging):
    """The floors, for methods whose clients send a gradient for each of their classes."""

    min_count: int = Field(1, ge=1, le=10**9, description="a client reports a class from this many examples on")
    min_clients: int = Field(
        1, ge=1, le=10**6, description="the server releases a class that this many clients report; else its last stays"
    )

    class_group: ClassVar[str]  # the group of an update that has the class gradients

    @property
    def reports_classes(self) -> bool:
        return True

    def reported(self, counts: Tensor) -> Tensor:
        """The mask of the classes that a client with these counts reports."""
        return counts >= self.min_count if self.reports_classes else torch.zeros_like(counts, dtype=torch.bool)

    def solvable(self, num_classes: int) -> int:
        """Of how many examples at most a class gradient gives every feature vector away, to who solves for them: with
        n examples it has n n unknowns in (C - 1) (n + 1) equations (docs/privacy.md)."""
        return num_classes - 1

    def told_beside_gradients(self) -> list[str]:
        """What else clients tell of their classes; for the report of a run."""
        return []

    def fewest_contributors(self) -> int:
        """How many clients must report a class for it to be released."""
        return max(self.min_clients, robust.fewest_holders(self.aggregation, self.byzantine))

    def summand(self, update: Tree) -> dict[str, Any]:
        rest = super().summand(_without(self.class_group, update))
        return {**rest, self.class_group: dense(update[self.class_group])}

    def stand_ins(self, total: Tree, clients: Sequence[ClientId], dtype: torch.dtype) -> dict[ClientId, Tree]:
        """Of the gradient of a class as many clients have the mean as reported it."""
        means = super().stand_ins(_without(self.class_group, total), clients, dtype)
        gradients = spread(total[self.class_group], len(clients), dtype)
        return {k: {**mean, self.class_group: sent} for (k, mean), sent in zip(means.items(), gradients, strict=True)}

    def check_clients(self, clients: int) -> None:
        super().check_clients(clients)
        counted = robust.most_counted(self.aggregation, self.byzantine, clients)
        if self.reports_classes and counted < self.min_clients:
            raise ConfigError(
                f"method.min_clients is {self.min_clients}, and of a round's {clients} clients {counted} count: no "
                "class would ever be released; lower min_clients or ask more clients"
            )


def _without(group: str, groups: Tree) -> dict[str, Any]:
    return {name: value for name, value in groups.items() if name != group}


def dense(sent: Tree) -> Tensors:
    """A client's class gradients as tables of all C classes with zeros where it reports none, each times what it counts
    in the mean: one, or the client's examples of the class. `clients` is one where it reports a class."""
    classes, counts = sent["classes"], sent.get("counts")
    rows: Tensors = {name: t for name, t in sent.items() if name not in ("classes", "counts")}
    C = next(iter(rows.values())).shape[1]

    def table(values: Tensor) -> Tensor:
        return values.new_zeros(C, *values.shape[1:]).index_copy(0, classes, values)

    weights = torch.ones_like(classes) if counts is None else counts
    summand = {name: table(t.double() * per_class(weights, t)) for name, t in rows.items()}
    numbers = {"clients": torch.ones_like(classes)} | ({} if counts is None else {"counts": counts})
    return summand | {name: table(t) for name, t in numbers.items()}


def spread(total: Tree, number: int, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """For so many clients class gradients as they send them, from the sum of their dense ones: the mean of a class with
    as many of them as reported it."""
    clients, counts = total["clients"], total.get("counts")
    if (clients < 0).any() or (clients > number).any() or (counts is not None and (counts < clients).any()):
        raise UpdateRejected(f"the numbers of clients that report a class cannot be those of {number} clients")
    weights = (clients if counts is None else counts).clamp(min=1)
    means = {
        name: (t / per_class(weights, t)).to(dtype) for name, t in total.items() if name not in ("clients", "counts")
    }
    if counts is not None:
        means["counts"] = counts // clients.clamp(min=1)
    for place in range(number):
        classes = (clients > place).nonzero().flatten()
        yield {"classes": classes, **{name: mean[classes] for name, mean in means.items()}}


def contributors(sent: Sequence[Tree], C: int) -> Tensor:
    """How many clients report each class [C]."""
    total = torch.zeros(C, dtype=torch.int64)
    for gradients in sent:
        total[gradients["classes"]] += 1  # a client names a class once
    return total
