"""Remix: mixed examples get the label of the rarer class.

Chou et al., "Remix: Rebalanced Mixup", ECCV 2020 workshops, https://arxiv.org/abs/2007.03943. Mixup trains on weighted
means of two examples and of their labels. Remix gives the whole label to the rarer class, if the other is kappa times
as frequent and has less than tau of the mixture. So the border moves towards the frequent class. tau = 0 is mixup.

    client  for each batch: lambda ~ Beta(1, 1), and a partner j for each example i, from the same batch
            x = lambda x_i + (1 - lambda) x_j
            lambda_y = 0  if n_i / n_j >= kappa    and lambda < tau
                       1  if n_i / n_j <= 1/kappa  and 1 - lambda < tau
                       lambda otherwise
            loss = mean over the batch of lambda_y CE(z, y_i) + (1 - lambda_y) CE(z, y_j)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from redgrape.exchange import Received
from redgrape.learning.prior import Counts, CountSource
from redgrape.method import ClientSite, ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST


class Remix(FedAvg):
    """Trains on mixtures of examples, which get the label of the rarer class."""

    kappa: float = Field(3.0, ge=1, le=LARGEST, description="how many times as frequent the other class must be")
    tau: float = Field(0.5, ge=0, le=1, description="share below which the frequent class loses the label")
    counts: CountSource = Field("global", description="class counts: the sum over all clients, or the client's own")

    presets = {"paper": {}}
    fidelity = (
        "from a secondary source, which states its rule from public code; clients mix their own examples only, and the "
        "sources of the counts are ours"
    )

    def survey(self, site: ClientSite) -> Tree:
        return Counts(self.counts).survey(site)

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        return {**super().init_server(model, site), **Counts(self.counts).first(site)}

    def broadcast(self, server: Tree) -> Tree:
        return {**super().broadcast(server), **Counts(self.counts).kept(server)}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        counts = Counts(self.counts).of(broadcast, site).to(site.device)
        regularise = self.regulariser(net, broadcast, state, site)
        optimizer = self.make_optimizer(net.parameters(), site)
        losses, random = self.losses(net, site), site.generator("mixing")
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            lam = float(torch.rand((), generator=random, dtype=torch.float64))
            j = torch.randperm(len(y), generator=random).to(site.device)
            z = net(lam * x + (1 - lam) * x[j])
            lam_y = self.label_share(lam, counts[y], counts[y[j]]).to(z.dtype)
            each = lam_y * F.cross_entropy(z, y, reduction="none")
            loss = (each + (1 - lam_y) * F.cross_entropy(z, y[j], reduction="none")).mean()
            loss.backward()
            regularise()
            self.step(optimizer)
            losses.add(loss, y)
        return self.report(net, broadcast["model"], losses, site), state

    def label_share(self, lam: float, n_i: Tensor, n_j: Tensor) -> Tensor:
        """lambda_y of each example, in float64."""
        share = torch.full_like(n_i, lam, dtype=torch.float64)
        if 1 - lam < self.tau:
            share[self.kappa * n_i <= n_j] = 1.0
        if lam < self.tau:
            share[n_i >= self.kappa * n_j] = 0.0
        return share

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        return {**super().server_update(server, received, site), **Counts(self.counts).kept(server)}
