"""FedVLS: distils what the received model knows of vacant classes, and holds back logits of other classes.

Guo et al., "Exploring Vacant Classes in Label-Skewed Federated Learning", AAAI 2025, https://arxiv.org/abs/2401.02329.
A client forgets the classes that it lacks, its vacant classes. The received model still knows them, so the client
keeps its distribution over them. A second term lowers the logits of a class on the examples of all others.

    client  loss = CE(z + log pi_k, y)
                 + mu sum_c pi_kc [ log sum_{i: y_i != c} exp(z_ic - log pi_kc + log 1/C) - log n ]     suppression
                 + lambda mean_i KL(softmax(z'_i over vacant classes), softmax(z_i over vacant classes))
            z' are the logits of the received model, n the examples of the batch, pi_k the client's class shares
    inference uses z

With lambda = mu = 0 it is balanced softmax with prior=local. A class that all examples of a batch have adds nothing to
the suppression. With no or one vacant class the last term is zero.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from redgrape.learning.features import features
from redgrape.learning.prior import log_prior
from redgrape.learning.regularisers import distillation
from redgrape.method import ClientSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tree
from redgrape.validation import LARGEST


class FedVLS(FedAvg):
    """Balanced softmax by local counts, which keeps what the received model knows of missing classes."""

    lam: float = Field(0.1, ge=0, le=LARGEST, description="lambda, weight of the distillation of vacant classes")
    suppress: float = Field(0.005, ge=0, le=LARGEST, description="mu, weight of the suppression")

    presets = {"paper": {}}
    fidelity = (
        "from the authors' code; lambda is that of its example for CIFAR-10, and its default is 1; its suppression "
        "also adds exp(0) for each example of the class itself, which is left out here; the received model runs in "
        "evaluation mode"
    )

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        teacher = site.load(broadcast["model"])
        log_pi = log_prior(site.class_counts).to(net.classifier.weight)
        vacant = (site.class_counts == 0).nonzero().flatten().to(site.device)
        optimizer = self.make_optimizer(net.parameters(), site)
        losses = self.losses(net, site)
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            z = net(x)
            loss = F.cross_entropy(z + log_pi, y) + self.suppress * suppression(z, y, site.class_counts)
            if self.lam and len(vacant) > 1:
                with torch.no_grad():
                    known = teacher.classifier(features(teacher.encoder, x, "running"))
                loss = loss + self.lam * distillation(z[:, vacant], known[:, vacant])
            loss.backward()
            self.step(optimizer)
            losses.add(loss, y)
        return self.report(net, broadcast["model"], losses, site), state


def suppression(z: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """sum_c pi_c [log sum_{i: y_i != c} exp(z_ic - log pi_c + log 1/C) - log n], over the classes that the client holds
    and that not all examples have."""
    n, C = z.shape
    others = y[:, None] != torch.arange(C, device=y.device)
    counted = (counts > 0).to(z.device) & others.any(dim=0)
    log_pi = log_prior(counts).to(z)[counted]
    spread = z[:, counted] - log_pi - math.log(C)
    log_mean = spread.masked_fill(~others[:, counted], -torch.inf).logsumexp(dim=0) - math.log(n)
    return (log_pi.exp() * log_mean).sum()
