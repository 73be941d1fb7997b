"""LDAM with deferred re-weighting: rare classes get larger margins, and towards the end larger weights.

Cao et al., "Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss", NeurIPS 2019,
https://arxiv.org/abs/1906.07413. The classifier is a cosine: rows and features have length one. An example must win by
a margin that grows with the rarity of its class. In the last fifth of the rounds, classes are also weighted by the
inverse of their effective number of examples (see class_balanced.py); so the features are learnt before that.

    z_c = cos(w_c, h),   m_c = max_margin (min_j n_j / n_c)^(1/4)
    client  loss = CE(s (z - m_y e_y), y), the mean over the batch weighted by v_y
            v = 1 until round (1 - deferred) R, then v_c ~ (1 - beta) / (1 - beta^{n_c})
    server  averages, and scales each row of W to length one

The deployed classifier is linear: W h with rows of length one and no bias. Since h is the same for all classes, its
decisions are those of the cosine; its probabilities are softmax(|h| z) and not softmax(s z).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from redgrape.exchange import Received
from redgrape.learning.prior import Counts, CountSource, effective_number_weights
from redgrape.method import ClientSite, ServerSite, Site
from redgrape.methods.fedavg import FedAvg
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST


class LDAM(FedAvg):
    """Margins that grow with the rarity of a class, on a cosine classifier, with re-weighting at the end."""

    clip_norm: float | None = Field(
        10.0, gt=0, le=LARGEST, description="clip the gradient to this norm; that of a cosine grows with 1 / |h|"
    )
    max_margin: float = Field(0.5, ge=0, le=LARGEST, description="m of the rarest class")
    scale: float = Field(30.0, gt=0, le=LARGEST, description="s, by which cosines are multiplied in the loss")
    deferred: float = Field(0.2, ge=0, le=1, description="share of the rounds, at the end, with class weights")
    beta: float = Field(0.9999, ge=0, lt=1, description="of the class weights; see class_balanced")
    counts: CountSource = Field("global", description="class counts: the sum over all clients, or the client's own")

    presets = {"paper": {}}
    fidelity = (
        "from the authors' code: s, the margins, the weighted mean and the share of deferred re-weighting are its; "
        "margins are over the classes with examples only; a net's classifier is linear, so the deployed one has the "
        "decisions of the cosine but not its probabilities; rows are scaled to length one after each round; the "
        "clipping of gradients and the sources of the counts are ours"
    )

    def survey(self, site: ClientSite) -> Tree:
        return Counts(self.counts).survey(site)

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        return {"model": with_unit_rows(model), **Counts(self.counts).first(site)}

    def broadcast(self, server: Tree) -> Tree:
        return {"model": server["model"], **Counts(self.counts).kept(server)}

    def trainable(self, model: Tensors, site: Site) -> Net:
        net = super().trainable(model, site)
        if net.classifier.bias is not None:  # a cosine has none; it stays zero
            net.classifier.bias.requires_grad_(False)
        return net

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        W, counts = net.classifier.weight, Counts(self.counts).of(broadcast, site)
        m, v = margins(counts, self.max_margin).to(W), self._class_weights(counts, site).to(W)
        regularise = self.regulariser(net, broadcast, state, site)
        optimizer = self.make_optimizer(net.parameters(), site)
        losses = self.losses(net, site)
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            z = F.linear(F.normalize(net.encoder(x)), F.normalize(W))
            loss = F.cross_entropy(self.scale * (z - F.one_hot(y, len(m)) * m), y, weight=v)
            loss.backward()
            regularise()
            self.step(optimizer)
            losses.add(loss, y)
        return self.report(net, broadcast["model"], losses, site), state

    def _class_weights(self, counts: Tensor, site: ClientSite) -> Tensor:
        begun = site.round > (1 - self.deferred) * site.rounds
        return effective_number_weights(counts, self.beta if begun else 0.0)

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        moved = received.moved(server["model"], self.server_lr)
        return {"model": with_unit_rows(moved), **Counts(self.counts).kept(server)}


def margins(counts: Tensor, largest: float) -> Tensor:
    """m_c, in float64; zero for a class without examples, which would else have the largest."""
    number = counts.double()
    fewest = number[number > 0].min()
    return torch.where(number > 0, largest * (fewest / number.clamp(min=1)) ** 0.25, 0.0)


def with_unit_rows(model: Tensors) -> dict[str, Any]:
    """The model with rows of W of length one, and no bias: its decisions are those of the cosine."""
    head = {"classifier.weight": F.normalize(model["classifier.weight"])}
    if "classifier.bias" in model:
        head["classifier.bias"] = torch.zeros_like(model["classifier.bias"])
    return {**model, **head}
