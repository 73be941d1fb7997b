"""Ratio Loss: class weights that the server finds with its own small balanced set.

Wang et al., "Addressing Class Imbalance in Federated Learning", AAAI 2021, https://arxiv.org/abs/2008.06217. The
server trains a copy of the global model on each class of an auxiliary set separately and measures how the classifier
moves. If one class moves an entry much more than any other class, the ratio of these movements tells how much weight
the class needs. The clients weight their losses by it. The method needs extra data: `data.auxiliary` examples per
class, held out before the long tail is cut. Of a rare class these may be more than all clients hold.

    Delta_q = W after training on class q's auxiliary examples, minus W                          for every class q
    mask_p  = entries where Delta_p is the largest and no other class's |Delta| reaches 1/1.25 of it
    R_p     = |sum_{mask_p} Delta_p| / |sum_{mask_p} mean_{q != p} Delta_q|
    client  loss = mean_i (alpha + beta R_{y_i}) CE_i                                    Eq. (18) of RedGrape's appendix
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from redgrape import determinism
from redgrape.exchange import Received
from redgrape.learning.features import batchnorms
from redgrape.method import ClientSite, ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST

_NO_DENOMINATOR = 10.0  # R if the others do not move at all
_LARGEST_RATIO = 5000.0
_DISTINCT = 0.80  # the paper's 1.25, inverted


class RatioLoss(FedAvg):
    """Class weights from how a server-side balanced set moves the classifier (needs auxiliary data)."""

    alpha: float = Field(1.0, ge=0, le=LARGEST, description="constant part of a class's weight")
    beta: float = Field(0.1, ge=0, le=LARGEST, description="part of the weight that follows the ratio")
    auxiliary_epochs: int = Field(2, ge=1, le=10**9, description="epochs on each class's auxiliary examples")

    presets = {"paper": {}, "released": {"auxiliary_epochs": 1, "clip_norm": 1.0}}
    uses_auxiliary = True
    cheap = {"auxiliary_epochs": 1}
    fidelity = (
        "from the authors' code (balanced-fl/Addressing-Class-Imbalance-FL at cd0e996); the paper's own text was not "
        "compared; an entry that no class raises counts for none, where the code gives it to a class that alone "
        "leaves it as it is; the monitor that estimates class counts is not part of the loss and not here"
    )

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        site.auxiliary_set()
        return {"model": model, "class_weights": torch.ones(site.num_classes, dtype=model["classifier.weight"].dtype)}

    def broadcast(self, server: Tree) -> Tree:
        return {"model": server["model"], "class_weights": server["class_weights"]}

    def criterion(self, broadcast: Tree, site: ClientSite) -> Callable[[Tensor, Tensor], Tensor]:
        weights = broadcast["class_weights"].to(site.device)
        # A plain mean: torch's weighted cross-entropy would divide by the sum of the weights.
        return lambda z, y: (weights[y] * F.cross_entropy(z, y, reduction="none")).mean()

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        with determinism.global_stream(
            determinism.key(site.seed, "auxiliary training", site.round)
        ):  # dropout draws from it
            ratio = class_ratios(self._movements(server["model"], site))
        return {
            "model": received.moved(server["model"], self.server_lr),
            "class_weights": self.alpha + self.beta * ratio,
        }

    def _movements(self, model: Tensors, site: ServerSite) -> Tensor:
        """Delta_q for every class: [C, C, d]."""
        labels = site.auxiliary_set().labels
        movements = []
        for q in range(site.num_classes):
            net = site.load(model)
            if self.freeze_encoder:
                net.encoder.requires_grad_(False).eval()
            rows = (labels == q).nonzero().flatten()
            if len(rows) == 1:  # BatchNorm has no statistics of a single example
                for layer in batchnorms(net):
                    layer.eval()
            optimizer = self.make_optimizer(net.parameters(), site)
            for _ in range(self.auxiliary_epochs):
                for batch in self._cut(rows, has_batchnorm=bool(batchnorms(net))):
                    optimizer.zero_grad()
                    z = net(site.inputs(batch, net.classifier.weight.dtype))
                    F.cross_entropy(z, labels[batch].to(site.device)).backward()
                    optimizer.step()
            movements.append(net.classifier.weight.detach().cpu() - model["classifier.weight"])
        return torch.stack(movements)

    def log(self, server: Tree, received: Received) -> Mapping[str, Tensor]:
        return {"class_weights": server["class_weights"]}


def class_ratios(movements: Tensor) -> Tensor:
    """R of every class, from the movements Delta [C, C, d]."""
    C = len(movements)
    largest, owner = movements.max(dim=0)  # signed: the class that raises an entry most
    near = (movements.abs() > _DISTINCT * largest.abs()).sum(dim=0)  # this includes the owner itself
    distinct = (near < 2) & (largest != 0)
    mask = (owner == torch.arange(C)[:, None, None]) & distinct
    others = (movements.sum(dim=0) - movements) / (C - 1)
    numerator = (movements * mask).sum(dim=(1, 2)).abs()
    denominator = (others * mask).sum(dim=(1, 2)).abs()
    ratio = torch.where(denominator > 0, numerator / denominator.clamp(min=1e-30), _NO_DENOMINATOR)
    return ratio.clamp(max=_LARGEST_RATIO)
