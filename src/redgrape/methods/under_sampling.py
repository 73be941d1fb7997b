"""Under-sampling: a client's frequent classes are cut to the size of its rarest.

In each pass a client uses as many different examples of every class as it has of its rarest, drawn anew. Textbooks then
make the pass shorter. Here it is repeated up to its old length, so that a client makes as many steps as in FedAvg and a
comparison is one of examples, not of steps. A client with one example of its rarest class would be left with one of
each: so no class is cut below `least`, and a class with fewer examples repeats them. n_k: the client's examples; C_k:
the classes that it holds.

    client  u = max(least, min over C_k of n_kc)
            each pass of n_k rows has every class of C_k n_k / |C_k| times (rounded up or down by chance)
            of class c it has at most u different examples
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from redgrape.learning.class_draws import equally_often
from redgrape.method import ClientSite
from redgrape.methods.fedavg import FedAvg


class UnderSampling(FedAvg):
    """FedAvg in which a client uses no more examples of a class than it has of its rarest."""

    least: int = Field(8, ge=1, le=10**9, description="examples below which no class is cut; 1: the plain rule")

    presets = {"paper": {}, "plain": {"least": 1}}
    ingredient = "sampler"
    fidelity = (
        "ours; the rule is common knowledge, and it is applied within a client; that passes keep their length, and "
        "that no class is cut below 8 examples, is our choice"
    )

    def order(self, site: ClientSite, random: torch.Generator) -> Tensor:
        labels = site.data.labels
        rarest = int(labels.unique(return_counts=True)[1].min())
        return equally_often(labels, random, most=max(self.least, rarest))
