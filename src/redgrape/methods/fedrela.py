"""FedReLa: late in training, examples of frequent classes that look like a rarer class get its label.

"FedReLa: Imbalanced Federated Learning via Re-Labeling", ICML 2026, https://github.com/guangzhengh/FedReLa. Where
classes overlap, a model of imbalanced data decides for the frequent class. Moving some labels there moves the border.
Only the clients' own labels change, so any loss goes with it. n_c: the client's examples of class c.

    rounds 1 .. R - R_2      FedAvg
    rounds R - R_2 + 1 .. R  the first time, the client draws its labels anew, and keeps them:
        p_i <- probabilities of example i at the received model
        z_ic = (p_ic - mean) / deviation, both over the client's examples of the same class y_i
        t_c <- the z_c that a share q of all its examples exceeds
        r_c = 1 - (n_c - min_j n_j) / (max_j n_j - min_j n_j), the rarity of class c
        example i goes to class c with probability tanh(z_ic - t_c) (r_c - r_{y_i}), if both factors are above zero;
        of several such classes it takes the most probable
    then FedAvg with the new labels, at f times the learning rate

A class that the client lacks is its rarest, and gets examples too. With equally many examples of every class no label
changes.
"""

from __future__ import annotations

import dataclasses

import torch
from pydantic import Field
from torch import Tensor

from redgrape.learning.classifier import encoded
from redgrape.learning.decoupling import in_second_stage
from redgrape.method import ClientSite, Site
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tree

_LEAST = 1e-6  # a smaller deviation counts as this one


class FedReLa(FedAvg):
    """FedAvg whose clients give some examples of frequent classes the label of a rarer one, once."""

    share: float = Field(0.1, ge=0, lt=1, description="R_2 / R, the share of rounds with the new labels")
    exceed: float = Field(0.05, ge=0, le=1, description="q, the share of examples above the threshold of a class")
    lr_factor: float = Field(0.1, gt=0, le=1, description="f, what multiplies the learning rate in these rounds")

    presets = {"paper": {}}
    fidelity = (
        "from the authors' code; there it is on FedETF and FedLoGe, here on FedAvg, or with a loss in a combination; "
        "probabilities are of one pass in evaluation mode, where the code averages five passes with augmentation; a "
        "sampled client draws its labels at its first visit in the last rounds"
    )

    def learning_rate(self, site: Site) -> float:
        late = in_second_stage(self.share, site.round, site.rounds)
        return super().learning_rate(site) * (self.lr_factor if late else 1.0)

    def init_client(self, broadcast: Tree) -> Tree:
        return {**super().init_client(broadcast), "drawn": torch.tensor(False)}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        if in_second_stage(self.share, site.round, site.rounds):
            labels = state["labels"] if state["drawn"] else self._labels(broadcast, site)
            state = {**state, "drawn": torch.tensor(True), "labels": labels}
            site = labelled(site, labels)
        return super().client_update(broadcast, state, site)

    def _labels(self, broadcast: Tree, site: ClientSite) -> Tensor:
        net = site.load(broadcast["model"])
        with torch.no_grad():
            batches = encoded(net, site, torch.arange(len(site.data)))
            p = torch.cat([net.classifier(h).double().softmax(dim=1).cpu() for h, _ in batches])
        chances = flip_chances(p, site.data.labels, site.class_counts, self.exceed)
        return drawn(site.data.labels, chances, site.generator("new labels"))


def flip_chances(p: Tensor, y: Tensor, counts: Tensor, exceed: float) -> Tensor:
    """The probability of each example to get the label of each class [n, C]; not above zero: never."""
    n = counts.double()
    per_class, none = n.clamp(min=1)[:, None], torch.zeros(len(n), len(n), dtype=torch.float64)
    centred = p - (none.index_add(0, y, p) / per_class)[y]
    deviation = (none.index_add(0, y, centred.square()) / per_class).sqrt().clamp(min=_LEAST)
    z = centred / deviation[y]
    above = min(int(exceed * len(y)), len(y) - 1)
    threshold = z.topk(above + 1, dim=0).values[-1]
    rarity = 1 - (n - n.min()) / (n.max() - n.min()).clamp(min=1)
    return torch.tanh(z - threshold) * (rarity - rarity[y][:, None]).clamp(min=0)


def drawn(y: Tensor, chances: Tensor, random: torch.Generator) -> Tensor:
    """New labels: each class is drawn with its chance, and the most probable of those drawn is taken."""
    flips = torch.rand(chances.shape, generator=random, dtype=torch.float64) < chances
    return torch.where(flips.any(dim=1), chances.masked_fill(~flips, -1).argmax(dim=1), y)


def labelled(site: ClientSite, labels: Tensor) -> ClientSite:
    """The same client with other labels."""
    data = site.data
    y = labels if data.rows is None else data.y.index_put((data.rows,), labels)
    return dataclasses.replace(site, data=dataclasses.replace(data, y=y))
