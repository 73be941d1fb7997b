"""Over-sampling: a client's rare classes come as often in its training as its frequent ones.

The oldest remedy for imbalance, here within each client and in the form of class-aware sampling: classes take turns,
and so do the examples of a class. A pass is as long as without it, so a client makes as many steps as in FedAvg. If it
has equally many examples of every class that it holds, every pass has each example once, as in FedAvg. n_k: the
client's examples; C_k: the classes that it holds.

    client  each pass of n_k rows has every class of C_k n_k / |C_k| times (rounded up or down by chance)
            an example of class c comes n_k / (|C_k| n_kc) times (rounded up or down)
"""

from __future__ import annotations

import torch
from torch import Tensor

from redgrape.learning.class_draws import equally_often
from redgrape.method import ClientSite
from redgrape.methods.fedavg import FedAvg


class OverSampling(FedAvg):
    """FedAvg in which every class that a client holds comes equally often in its training."""

    presets = {"paper": {}}
    ingredient = "sampler"
    fidelity = (
        "ours; the rule is common knowledge, and it is applied within a client, whose counts are all that it needs"
    )

    def order(self, site: ClientSite, random: torch.Generator) -> Tensor:
        return equally_often(site.data.labels, random)
