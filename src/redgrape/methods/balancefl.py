"""BalanceFL: class-balanced local training that keeps what the received model knows of missing classes.

Shuai et al., "BalanceFL: Addressing Class Imbalance in Long-Tail Federated Learning", IPSN 2022,
https://doi.org/10.1109/IPSN54338.2022.00029. A client should train as if its data were balanced and complete. For the
classes that it holds it draws examples equally often, and varies the features of rare classes by noise. For the classes
that it lacks it keeps the distribution of the received model. H_k: the classes that the client holds.

    client  S <- sum_c n_kc cov_c / n_k, cov_c the covariance of its features of class c at the received model
            draws batches in which each class of H_k comes equally often
            u_i = h_i + N(0, S) with probability 1 - n_kc / max_j n_kj for c = y_i, else h_i
            loss = mean_i CE(W u_i over H_k, y_i)
                 + lambda mean_i KL(softmax(z'_i / T), softmax(z_i / T)), both over the classes not in H_k
                 - epsilon sum_i entropy(softmax(z_i over H_k))
            z are the logits of h, z' those of the received model
    inference uses z

With lambda = epsilon = 0 and without noise it is over-sampling, with the logits of missing classes left out.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from redgrape.learning.class_draws import equally_often
from redgrape.learning.features import features
from redgrape.learning.regularisers import distillation
from redgrape.method import ClientSite
from redgrape.methods.fedavg import FedAvg
from redgrape.nets.net import Net
from redgrape.tree import Tree
from redgrape.validation import LARGEST


class BalanceFL(FedAvg):
    """Class-balanced draws with noise on rare classes' features, and distillation of missing classes."""

    lam: float = Field(1.0, ge=0, le=LARGEST, description="lambda, weight of the distillation of missing classes")
    temperature: float = Field(2.0, gt=0, le=LARGEST, description="T, temperature of the distillation")
    entropy: float = Field(0.002, ge=0, le=LARGEST, description="epsilon, reward for the entropy of each example")
    noise: float = Field(1.0, ge=0, le=LARGEST, description="factor of the noise on features; 0 adds none")
    present: Literal["client", "batch"] = Field(
        "client", description="which classes count as held: those of the client, or those of the batch"
    )

    presets = {
        "paper": {},
        "released": {"present": "batch", "optimizer": "adam", "lr": 0.005, "weight_decay": 1e-4},
    }
    fidelity = (
        "from the authors' code; there the classes of the batch count as held (preset released), draws are independent "
        "of each other, noise comes from a pool of 500 vectors, and the received model distils in training mode; here "
        "classes and their examples take turns, each noise vector is new, and it distils in evaluation mode"
    )

    def order(self, site: ClientSite, random: torch.Generator) -> Tensor:
        return equally_often(site.data.labels, random)

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        teacher = site.load(broadcast["model"])
        root = self.noise * spread(net, site, self.batch_size) if self.noise else None
        counts, random = site.class_counts, site.generator("feature noise")
        chance = 1 - counts.double() / counts.max()
        in_client = (counts > 0).to(site.device)
        optimizer = self.make_optimizer(net.parameters(), site)
        losses = self.losses(net, site)
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            h = net.encoder(x)
            u = h if root is None else h + drawn(root, chance[y.cpu()], random).to(h)
            held = in_client if self.present == "client" else torch.bincount(y, minlength=site.num_classes) > 0
            z, kept = net.classifier(h), held.nonzero().flatten()
            loss = F.cross_entropy(net.classifier(u)[:, kept], torch.searchsorted(kept, y))
            loss = loss - self.entropy * summed_entropy(z[:, kept])
            if self.lam and int((~held).sum()) > 1:
                with torch.no_grad():
                    known = teacher.classifier(features(teacher.encoder, x, "running"))
                loss = loss + self.lam * distillation(z[:, ~held], known[:, ~held], self.temperature)
            loss.backward()
            self.step(optimizer)
            losses.add(loss, y)
        return self.report(net, broadcast["model"], losses, site), state


def spread(net: Net, site: ClientSite, batch_size: int) -> Tensor:
    """R with R^T R = S = sum_c n_c cov_c / n over the client's features. A class with one example has no covariance.
    BatchNorm uses the batch's statistics, as in training: the noise must fit the features that it is added to."""
    rows, n = torch.randperm(len(site.data), generator=site.generator("spread")), site.class_counts.double()
    inputs = (site.inputs(batch, net.classifier.weight.dtype) for batch in rows.split(batch_size))
    h, y = torch.cat([features(net.encoder, x, "batch") for x in inputs]).cpu().double(), site.data.labels[rows]
    means = torch.zeros(len(n), h.shape[1]).double().index_add_(0, y, h) / n.clamp(min=1)[:, None]
    weights = n / (n - 1).clamp(min=1) / len(y)  # of an example's square in n_c cov_c / n
    R: Tensor = torch.linalg.qr((h - means[y]) * weights[y].sqrt()[:, None], mode="r").R
    return R


def drawn(root: Tensor, chance: Tensor, random: torch.Generator) -> Tensor:
    """For each example a vector of N(0, R^T R) with its chance, else zero."""
    noise = torch.empty(len(chance), len(root), dtype=torch.float64).normal_(generator=random) @ root
    return noise * (torch.rand(len(chance), generator=random, dtype=torch.float64) < chance)[:, None]


def summed_entropy(z: Tensor) -> Tensor:
    """The entropy of softmax(z), summed over the batch."""
    log_p = torch.log_softmax(z, dim=1)
    return -(log_p.exp() * log_p).sum()
