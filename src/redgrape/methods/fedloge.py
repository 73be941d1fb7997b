"""FedLoGe: features learn towards a fixed sparse head, and the global head is trained beside it and re-aligned.

Xiao et al., "FedLoGe: Joint Local and Generic Federated Learning under Long-tailed Data", ICLR 2024,
https://arxiv.org/abs/2401.08977. The encoder is trained through a head E that nobody moves: an equiangular tight frame
of which most entries are zero, so that noise in the other features does not count. The deployed head W learns on
detached features. Its rows get long for frequent classes, and are scaled to equal length for inference.

    server  E <- frame of equal angles with a share beta of each row zeroed; the rest minimises
                 sum_c (|e_c| - r)^2 - mean_c min_{j != c} angle(e_c, e_j)                         at the start, by Adam
    client  loss = CE(E h, y) + CE(W stop(h), y)        the first term moves the encoder, the second W
    server  averages encoder and W as FedAvg;   deployed: z_c = l w_c h / |w_c| + b_c
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from redgrape.exchange import Received
from redgrape.learning import classifier
from redgrape.method import ClientSite, ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST


class FedLoGe(FedAvg):
    """Trains the encoder through a fixed sparse head, and deploys a head with rows of equal length."""

    beta: float = Field(0.6, ge=0, lt=1, description="share of the entries of the fixed head that are zero")
    length: float = Field(0.1, gt=0, le=1000, description="r, the length of the rows of the fixed head")
    row_length: float = Field(1.7, gt=0, le=1000, description="l, the length of the rows of the deployed head")
    shape_steps: int = Field(10_000, ge=0, le=10**7, description="steps that shape the fixed head, once")
    shape_lr: float = Field(1e-4, gt=0, le=LARGEST, description="their learning rate")

    presets = {"paper": {}}
    cheap = {"shape_steps": 5}
    fidelity = (
        "from the authors' code; zeros are drawn for each class, so that no class loses its vector; the fixed head has "
        "no bias, and its rows have exactly the length r in the end; personal heads, which do not change the global "
        "model, are not here; with more classes than features the frame starts from random directions"
    )

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        W = model["classifier.weight"]
        C, d = W.shape
        random = site.generator("fixed head")
        kept = torch.rand(C, d, generator=random).argsort(dim=1) >= int(self.beta * d)
        if d >= C:
            start = classifier.equiangular(C, d, random).T
        else:
            start = torch.empty(C, d, dtype=torch.float64).normal_(generator=random)
        E = shaped(F.normalize(start * kept, dim=1), kept, self.length, self.shape_steps, self.shape_lr)
        return self._server(model, E.to(W.dtype).contiguous())

    def _server(self, trained: Tensors, E: Tensor) -> dict[str, Any]:
        """The server state. The deployed model has the scaled rows; training goes on with those kept beside it."""
        W = classifier.of(trained)
        deployed = {**trained, "classifier.weight": self.row_length * F.normalize(W["weight"], dim=1)}
        if "bias" in W:
            deployed["classifier.bias"] = W["bias"].clone()  # no two leaves of a tree may share memory
        return {"model": deployed, "trained": W, "E": E}

    def broadcast(self, server: Tree) -> Tree:
        return {"model": classifier.with_W(server["model"], server["trained"]), "E": server["E"]}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        E = broadcast["E"].to(site.device)
        optimizer = self.make_optimizer(net.parameters(), site)
        losses = self.losses(net, site)
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            h = net.encoder(x)
            loss = F.cross_entropy(h @ E.T, y) + F.cross_entropy(net.classifier(h.detach()), y)
            loss.backward()
            self.step(optimizer)
            losses.add(loss, y)
        return self.report(net, broadcast["model"], losses, site), state

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        return self._server(received.moved(self.broadcast(server)["model"], self.server_lr), server["E"])


def shaped(E: Tensor, kept: Tensor, length: float, steps: int, lr: float) -> Tensor:
    """Rows that minimise sum_c (|e_c| - r)^2 minus the mean angle to the nearest row, and have length r. Only entries
    that are `kept` move."""
    rows = E.clone().requires_grad_()
    optimizer = torch.optim.Adam([rows], lr=lr)
    for _ in range(steps):
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        cosines = (rows / norms) @ (rows / norms).T
        nearest = cosines.masked_fill(torch.eye(len(E), dtype=torch.bool), -1).amax(dim=1)
        loss = (norms - length).square().sum() - torch.acos(nearest.clamp(-0.99999, 0.99999)).mean()
        (gradient,) = torch.autograd.grad(loss, rows)
        rows.grad = gradient * kept
        optimizer.step()
    return length * F.normalize(rows.detach(), dim=1)
