"""FedETF: a fixed classifier whose class vectors are as far apart as possible.

Li et al., "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and Fixed
Classifier", ICCV 2023, https://arxiv.org/abs/2303.10058. All clients train towards the same class vectors, those of a
simplex equiangular tight frame (ETF), which nobody moves. A projection V from the features to R^C, the space of the
class vectors, is trained with the encoder.

    server  E <- sqrt(C / (C - 1)) Q (I - 1 1^T / C), Q a random orthogonal matrix; its columns are the class vectors
    client  u = V h / |V h|;   loss = CE(s E^T u + log n_k, y)        trains the encoder, V and the scale s
    server  averages them as FedAvg;   inference uses E^T V h

The classifier of the net is V in training and E^T V in the deployed model, which chooses the same class as E^T u.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from redgrape.exchange import Direction, Parts, Received
from redgrape.learning import classifier
from redgrape.learning.margins import log_counts
from redgrape.method import ClientSite, ServerSite, Site
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree


class FedETF(FedAvg):
    """Trains towards fixed class vectors of equal angles, with balanced softmax by local counts."""

    scale: float = Field(10.0, gt=0, le=1000, description="s at the start: what multiplies the cosines in training")

    presets = {"paper": {}, "resnet": {"scale": 1.0}}
    fidelity = (
        "from the authors' code: s starts at 10 for its small CNN and at 1 for its ResNets, and a class that a client "
        "lacks counts as one example; its personalisation is not here; the deployed logits are not divided by |V h|, "
        "so probabilities are not those of training"
    )

    def parts(self, model: Tensors, site: Site) -> Parts:
        parts = super().parts(model, site)
        return parts | {"delta_scale": Direction({"scale": model["classifier.weight"].new_zeros(())})}

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        W = model["classifier.weight"]
        E = classifier.equiangular(len(W), len(W), site.generator("class vectors")).to(W.dtype)
        return _server(model, W.new_tensor(self.scale), E)

    def broadcast(self, server: Tree) -> Tree:
        return {"model": classifier.with_W(server["model"], server["V"]), "scale": server["scale"], "E": server["E"]}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        E, scale = broadcast["E"].to(site.device), broadcast["scale"].to(site.device).clone().requires_grad_()
        log_n = log_counts(site.class_counts).to(E)
        optimizer = self.make_optimizer([*net.parameters(), scale], site)
        losses = self.losses(net, site)
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            u = F.normalize(net(x), dim=1)
            loss = F.cross_entropy(scale * (u @ E) + log_n, y)
            loss.backward()
            self.step(optimizer)
            losses.add(loss, y)
        update = self.report(net, broadcast["model"], losses, site)
        return {**update, "delta_scale": {"scale": scale.detach().cpu() - broadcast["scale"]}}, state

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        trained = received.moved(self.broadcast(server)["model"], self.server_lr)
        scale = server["scale"] + self.server_lr * received.mean("delta_scale")["scale"]
        return _server(trained, scale, server["E"])


def _server(trained: Tensors, scale: Tensor, E: Tensor) -> dict[str, Any]:
    """The server state, from a model whose classifier is V."""
    V = classifier.of(trained)
    deployed = classifier.with_W(trained, {name: E.T @ t for name, t in V.items()})
    return {"model": deployed, "V": V, "scale": scale, "E": E}
