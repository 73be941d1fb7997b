"""Terms that methods add to the loss of a batch, as plain functions of its logits and features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_EPS = 1e-8  # added to a variance


def decorrelation(h: Tensor) -> Tensor:
    """|K|_F^2 / d^2 with K the correlation matrix of a batch of features [n, d]: Shi et al., "Towards Understanding and
    Mitigating Dimensional Collapse in Heterogeneous Federated Learning", ICLR 2023. Zero for a single example."""
    if len(h) < 2:
        return h.new_zeros(())
    centred = h - h.mean(dim=0)
    variance = centred.square().mean(dim=0)
    standard = centred / (variance + _EPS).sqrt()
    n, d = h.shape
    gram = standard @ standard.T if n < d else standard.T @ standard  # both have the norm of n K
    return gram.square().sum() / (n * d) ** 2


def distillation(z: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(softmax(teacher / T), softmax(z / T)), the mean over a batch of logits, without a factor T^2."""
    target = torch.log_softmax(teacher / temperature, dim=1)
    return F.kl_div(torch.log_softmax(z / temperature, dim=1), target, reduction="batchmean", log_target=True)
