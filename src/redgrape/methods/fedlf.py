"""FedLF: logits scaled by the client's class counts, features near their class centres and decorrelated.

Lu et al., "FedLF: Adaptive Logit Adjustment and Feature Optimization in Federated Long-Tailed Learning", ACML 2024,
https://arxiv.org/abs/2409.12105. All three changes are in the local loss.

    client  m_c <- mean feature of its examples of class c at the received model, for the round
            loss = CE(psi_k * z, y) + lambda_1 mean_i |h_i - m_{y_i}|^2 / d + lambda_2 |K|_F^2 / d^2
            psi_kc = alpha + (1 - alpha) n_kc / max_j n_kj;   K the correlation matrix of the batch's features
    inference uses z

Without the last two terms this is FedRS with scale=proportional; with alpha = 1 too, it is FedAvg.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field

from redgrape.learning import class_statistics
from redgrape.learning.margins import proportional_scales
from redgrape.learning.regularisers import decorrelation
from redgrape.method import ClientSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tree
from redgrape.validation import LARGEST


class FedLF(FedAvg):
    """FedAvg with logits scaled by class counts, a pull to class centres and decorrelated features."""

    alpha: float = Field(0.25, ge=0, le=1, description="scale of the logit of a class without local examples")
    centre: float = Field(0.01, ge=0, le=LARGEST, description="lambda_1, the pull to the class centres")
    decorrelate: float = Field(0.01, ge=0, le=LARGEST, description="lambda_2, weight of the decorrelation")

    presets = {"paper": {}}
    fidelity = (
        "from a secondary source, which states the three terms and their weights; the authors' code has only the first "
        "of them, so that the form of the distance (mean squared difference) and that of the decorrelation (FedDecorr) "
        "are our choice; the bias is scaled with its logit"
    )

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        weight = net.classifier.weight
        psi = proportional_scales(site.class_counts, self.alpha).to(weight)
        centres = class_statistics.class_means(net, site, torch.arange(len(site.data))).to(weight)
        optimizer = self.make_optimizer(net.parameters(), site)
        losses = self.losses(net, site)
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            h = net.encoder(x)
            loss = F.cross_entropy(net.classifier(h) * psi, y)
            loss = loss + self.centre * F.mse_loss(h, centres[y]) + self.decorrelate * decorrelation(h)
            loss.backward()
            self.step(optimizer)
            losses.add(loss, y)
        return self.report(net, broadcast["model"], losses, site), state
