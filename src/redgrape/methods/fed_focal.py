"""Fed-Focal Loss: the focal loss in local training.

Sarkar et al., "Fed-Focal Loss for Imbalanced Data Classification in Federated Learning", 2020,
https://arxiv.org/abs/2011.06283, with the loss of Lin et al., ICCV 2017. Examples that the model already gets right
count less, so rare and hard ones count more. The loss does not use the global imbalance. With gamma = 0 it is FedAvg.

    L = -(1 - p_y)^gamma log p_y, averaged over the batch                                Eq. (17) of RedGrape's appendix
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import Field
from torch import Tensor

from redgrape.learning.local_training import stackable
from redgrape.method import ClientSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tree
from redgrape.validation import LARGEST


class FedFocal(FedAvg):
    """FedAvg with the focal loss, which emphasises hard examples."""

    gamma: float = Field(2.0, ge=0, le=LARGEST, description="how much less an easy example counts")

    ingredient = "loss"
    fidelity = (
        "the loss as RedGrape's paper states and uses it; the original also selects clients, from what we know of it "
        "at second hand, and that part is not here"
    )

    @stackable
    def criterion(self, broadcast: Tree, site: ClientSite) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda z, y: focal_loss(z, y, self.gamma)


def focal_loss(z: Tensor, y: Tensor, gamma: float) -> Tensor:
    log_p = torch.log_softmax(z, dim=1).gather(1, y[:, None]).squeeze(1)
    # 1 - p_y can round below zero, and a fractional power is NaN there; 0^gamma has no finite slope for gamma < 1
    return -(((1 - log_p.exp()).clamp(min=torch.finfo(z.dtype).tiny)) ** gamma * log_p).mean()
