"""FedAvg with label smoothing: a method of one's own, in one file.

Every client trains on softened labels: the true class gets 1 - s + s / C, each other class s / C. The server averages
as in FedAvg. With s = 0 it is FedAvg, bit for bit.

    client  theta_k <- theta; for each batch: theta_k <- theta_k - eta_l grad CE_s(theta_k; batch)
    client  sends theta_k - theta, n_k
    server  theta <- theta + eta_s sum_k n_k / (sum_i n_i) (theta_k - theta)

Run it:    redgrape compare fedavg examples/my_method.py --rounds 20
Check it:  python examples/my_method.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field

from redgrape import ClientSite
from redgrape.aggregation import client_report
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tree


class LabelSmoothing(FedAvg):
    """Federated averaging of models trained with softened labels."""

    smoothing: float = Field(0.1, ge=0, lt=1, description="s, the share of a label that is spread over all classes")

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        optimizer = self.make_optimizer(net.parameters(), site)
        total = torch.zeros((), dtype=net.classifier.weight.dtype, device=site.device)
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y, label_smoothing=self.smoothing)
            loss.backward()
            self.step(optimizer)
            total += loss.detach() * len(y)
        mean_loss = total / (self.epochs * len(site.data))
        return client_report(net, broadcast["model"], len(site.data), mean_loss), state


if __name__ == "__main__":
    from redgrape.testing import check_method

    check_method(LabelSmoothing)
    print("LabelSmoothing keeps the contract")
