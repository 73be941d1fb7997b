"""FedNH: class prototypes that start far apart and slowly take in the clients' class means.

Dai et al., "Tackling Data Heterogeneity in Federated Learning with Class Prototypes", AAAI 2023,
https://arxiv.org/abs/2212.02758. The classifier is a set of unit vectors, one for each class. Clients train the encoder
towards them and do not move them. The server moves them a little towards the classes' mean features. So rare classes
keep their place: every class has a vector of the same length, whoever holds it.

    server  W_c <- orthogonal unit vectors, at the start
    client  trains the encoder and the scale s on CE(s W h / |h|, y); W is fixed
            mu_kc <- mean of h / |h| over its examples of class c after training, scaled to length 1
            sends the change of the encoder and of s, and mu_kc with n_kc for its classes
    server  averages the changes, all clients alike
            mu_c <- sum_k n_kc mu_kc, scaled to length 1;   W_c <- rho W_c + (1 - rho) mu_c, scaled to length 1
            a class that nobody reports keeps its W_c

The deployed logits are W h. They choose the same class as the cosines, because |h| is common to all classes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from redgrape import tree
from redgrape.exchange import ClassRows, Direction, Parts, Received
from redgrape.learning import class_statistics
from redgrape.method import ClientSite, ServerSite, Site
from redgrape.methods.fedavg import FedAvg
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree


class FedNH(FedAvg):
    """A cosine classifier of class prototypes, which the server moves towards the clients' class means."""

    rho: float = Field(0.9, ge=0, le=1, description="share of the old prototype in the new one")
    scale: float = Field(1.0, gt=0, le=1000, description="s at the start: what multiplies the cosines in training")
    learn_scale: bool = Field(True, description="train s; else it stays as it is")

    presets = {
        "paper": {},
        "released": {"clip_norm": 10.0},
        "fixed": {"scale": 30.0, "learn_scale": False, "clip_norm": 10.0},  # a setting of the authors' code
    }
    fidelity = (
        "from the authors' code; with more classes than features no orthogonal vectors exist, and the start is then "
        "unit rows of a matrix with orthogonal columns; the deployed logits are not divided by |h|, so probabilities "
        "are not those of training"
    )

    def trainable(self, model: Tensors, site: Site) -> Net:
        net = super().trainable(model, site)
        net.classifier.requires_grad_(False)
        return net

    def parts(self, model: Tensors, site: Site) -> Parts:
        parts, W = self.training_parts(model, site, "alike"), model["classifier.weight"]
        trained = {name: model[name] for name, p in self.trainable(model, site).named_parameters() if p.requires_grad}
        parts["delta"] = Direction({**trained, "scale": W.new_zeros(())}, "alike")
        return parts | {"means": ClassRows({"mean": W[0]}, "count")}

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        W = model["classifier.weight"]
        drawn = torch.empty(W.shape, dtype=torch.float64).normal_(generator=site.generator("prototypes"))
        wide = W.shape[0] > W.shape[1]
        Q = torch.linalg.qr(drawn if wide else drawn.T)[0]
        unit = F.normalize(Q if wide else Q.T, dim=1).to(W.dtype).contiguous()
        first = {**model, "classifier.weight": unit}
        if "classifier.bias" in model:
            first["classifier.bias"] = torch.zeros_like(model["classifier.bias"])
        return {"model": first, "scale": W.new_tensor(self.scale)}

    def broadcast(self, server: Tree) -> Tree:
        return {"model": server["model"], "scale": server["scale"]}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        W, scale = net.classifier.weight, broadcast["scale"].to(site.device).clone().requires_grad_()
        optimizer = self.make_optimizer([*net.parameters(), scale], site)
        losses = self.losses(net, site)
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            loss = F.cross_entropy(scale * (F.normalize(net.encoder(x), dim=1) @ W.T), y)
            loss.backward()
            if not self.learn_scale:
                scale.grad = None
            self.step(optimizer)
            losses.add(loss, y)
        update = self.report(net, broadcast["model"], losses, site)
        update["delta"]["scale"] = scale.detach().cpu() - broadcast["scale"]
        return {**update, "means": self._means(net, site)}, state

    def _means(self, net: Net, site: ClientSite) -> Tensors:
        """mu_kc and n_kc of the classes that the client reports."""
        classes = site.reported.nonzero().flatten()
        mu = class_statistics.class_means(net, site, class_statistics.reported_rows(site), unit=True)[classes]
        mean = F.normalize(mu, dim=1).to(net.classifier.weight.dtype)
        return {"classes": classes, "counts": site.class_counts[classes], "mean": mean}

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        delta = received.mean("delta")
        model: dict[str, Any] = {**tree.add(server["model"], delta, self.server_lr), **received.statistics()}
        means, released = received.table("means")
        model["classifier.weight"] = moved(model["classifier.weight"], means["mean"], released, self.rho)
        return {"model": model, "scale": server["scale"] + self.server_lr * delta["scale"]}


def moved(W: Tensor, means: Tensor, released: Tensor, rho: float) -> Tensor:
    """The prototypes after a step towards the class means [C, d] of the released classes."""
    towards = rho * W + (1 - rho) * F.normalize(means, dim=1)
    return torch.where(released[:, None], F.normalize(towards, dim=1), W)
