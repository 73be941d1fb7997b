"""FedAvg with label smoothing: your own method in one file.

Every client trains on softened labels: the true class gets 1 - s + s / C, each other class s / C. The server averages
as in FedAvg. With s = 0 it is FedAvg, bit for bit.

    client  theta_k <- theta; for each batch: theta_k <- theta_k - eta_l grad CE_s(theta_k; batch)
    client  sends theta_k - theta, n_k
    server  theta <- theta + eta_s sum_k n_k / (sum_i n_i) (theta_k - theta)

Run it:    redgrape compare fedavg examples/my_method.py --rounds 20
Check it:  python examples/my_method.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from redgrape import ClientSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tree


class LabelSmoothing(FedAvg):
    """Federated averaging of models trained with softened labels."""

    smoothing: float = Field(0.1, ge=0, lt=1, description="s, the share of a label that is spread over all classes")

    def criterion(self, broadcast: Tree, site: ClientSite) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda z, y: F.cross_entropy(z, y, label_smoothing=self.smoothing)


if __name__ == "__main__":
    from redgrape.testing import check_method

    check_method(LabelSmoothing)
    print("LabelSmoothing keeps the contract")
