"""FedLC: logits calibrated by the client's own class counts.

Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022,
https://arxiv.org/abs/2209.00189. A client that sees little of a class overfits to the classes that it sees much of.
FedLC takes a margin from each logit in training, which is larger for a class with fewer local examples. So the client
must learn its rare classes with a larger distance.

    client  loss = CE(z - tau n_k^(-1/4), y) over the classes that the client holds;   inference uses z

With tau = 0 and clients that hold every class, this is FedAvg.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from redgrape.learning.margins import LEFT_OUT, quarter_margins
from redgrape.method import ClientSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tree


class FedLC(FedAvg):
    """FedAvg with margins in the training logits, by the client's own class counts."""

    tau: float = Field(1.0, ge=0, le=1000, description="the margin of a class with one example")

    presets = {"paper": {}}
    ingredient = "loss"
    fidelity = (
        "from a secondary source, which states its margins; the loss as printed leaves the true class out of the "
        "denominator, is unbounded below and diverges, so here the true class is in it; a class that the client lacks "
        "has no share in the softmax"
    )

    def criterion(self, broadcast: Tree, site: ClientSite) -> Callable[[Tensor, Tensor], Tensor]:
        counts = site.class_counts
        shift = torch.where(counts > 0, -self.tau * quarter_margins(counts), LEFT_OUT).to(site.device)
        return lambda z, y: F.cross_entropy(z + shift.to(z.dtype), y)
