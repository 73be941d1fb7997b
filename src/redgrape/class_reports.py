"""Of which classes a client tells the server, and which of them the server lets out: two floors against small numbers.

    client  reports class c        where it holds at least min_count examples of it
    server  releases class c       where at least min_clients of a round report it; else the last release stays

A class gradient of one example gives that example's feature vector away, exactly, and the mean over one client is that
client's. Whether a client serves a class by its own examples (RedGrape's threshold T) is another question: that stays
at the client. docs/privacy.md says what the floors stop and what they do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from redgrape import robust
from redgrape.aggregation import Averaging
from redgrape.errors import ConfigError
from redgrape.tree import Tree

PRIVATE = {"min_count": 8, "min_clients": 3}  # for the preset `private` of the methods that send class gradients


class ClassReports(Averaging):
    """The floors, for methods whose clients send a gradient for each of their classes."""

    min_count: int = Field(1, ge=1, le=10**9, description="a client reports a class from this many examples on")
    min_clients: int = Field(
        1, ge=1, le=10**6, description="the server releases a class that this many clients report; else its last stays"
    )

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

    def fewest_contributors(self) -> int:
        """How many clients must report a class for it to be released."""
        return max(self.min_clients, robust.fewest_holders(self.aggregation, self.byzantine))

    def check_clients(self, clients: int) -> None:
        super().check_clients(clients)
        counted = robust.most_counted(self.aggregation, self.byzantine, clients)
        if self.reports_classes and counted < self.min_clients:
            raise ConfigError(
                f"method.min_clients is {self.min_clients}, and of a round's {clients} clients {counted} count: no "
                "class would ever be released; lower min_clients or ask more clients"
            )


def contributors(sent: Sequence[Tree], C: int) -> Tensor:
    """How many clients report each class [C]."""
    total = torch.zeros(C, dtype=torch.int64)
    for gradients in sent:
        total[gradients["classes"]] += 1  # a client names a class once
    return total
