"""What was tried to make Vine better, as a method of one's own.

    redgrape compare fedavg balanced_softmax vine vine+balanced_softmax benchmarks/vine_variants.py:variant=angle \\
        --experiment experiments/frozen100.toml -c data.validation=20 --seeds 0,1,2

    unweighted    the margin without the class weights pi_c^tau: M_k has a bias towards rare classes
    angle         lambda (1 - cos(g_local, g_bal)): the pull is strong where the two disagree
    server_step   the server moves W along -G too, by `share` of the length of the round's own step
"""

from __future__ import annotations

from typing import Literal
from unittest.mock import patch

import torch
from pydantic import Field

from redgrape import tree
from redgrape.exchange import Received
from redgrape.learning import classifier
from redgrape.method import ClientSite, ServerSite
from redgrape.methods import vine
from redgrape.methods.vine import Balance, Vine
from redgrape.tree import Tensors, Tree


class VineVariants(Vine):
    """Vine with one part changed."""

    variant: Literal["unweighted", "angle", "server_step"] = Field("angle")
    share: float = Field(0.5, description="server_step: length relative to the round's step")

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        server = super().init_server(model, site)
        if self.variant == "unweighted":
            server["class_weights"] = server["class_weights"] * torch.exp(-server["margin"])
        return server

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        with patch.object(vine, "Balance", ByAngle if self.variant == "angle" else Balance):
            return super().client_update(broadcast, state, site)

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        new = super().server_update(server, received, site)
        if self.variant != "server_step":
            return new
        W, was = classifier.of(new["model"]), classifier.of(server["model"])
        length = self.share * tree.norm(tree.sub(W, was).values()) / tree.norm(new["G"].values()).clamp(min=1e-12)
        moved = {f"classifier.{name}": (W[name] - length * g).to(W[name]) for name, g in new["G"].items()}
        return {**new, "model": {**new["model"], **moved}}


class ByAngle(Balance):
    def pull(self) -> Tensors:
        pulled = super().pull()
        if not pulled:
            return pulled
        g_local = {name: p.grad for name, p in self.net.classifier.named_parameters() if p.grad is not None}
        dot = sum((g * pulled[name]).sum() for name, g in g_local.items())
        cos = dot / (tree.norm(g_local.values()) * tree.norm(pulled.values())).clamp(min=1e-12)
        return {name: (1 - cos) * g for name, g in pulled.items()}
