"""FedNPC: the trained classifier forgets part of its bias, by a few steps on random features with random labels.

Gao et al., "FedNPC: Stochastic Noise-driven Post-hoc Classifier Calibration Method for Federated Long-tailed Learning",
CVPR 2026 Findings, https://github.com/JintongGao/FedNPC. Random features say nothing about classes, and all labels are
equally likely. So the best answer is the uniform one, and each step moves the classifier towards it. Classes that it
prefers for no reason lose most. Training is FedAvg and does not see it.

    server  W' <- W, the averaged classifier, and S times:
                h_1 .. h_M ~ N(0, I), y_1 .. y_M uniform over the classes
                W' <- one step of sgd with momentum on mean_i CE(W' h_i, y_i)
    deployed   W'

The mean step has a closed form: with p = softmax(W' h), E[(p - e_y) h^T] = E[diag(p) - p p^T] W'. It shortens the rows,
long ones most, and draws all logits together.

It needs nothing from the clients. `redgrape adjust RUN fednpc` does it to the model of a finished run.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import nn

from redgrape import tree
from redgrape.exchange import Received
from redgrape.learning import classifier
from redgrape.learning.sgd import Sgd
from redgrape.method import ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST


class FedNPC(FedAvg):
    """FedAvg whose deployed classifier made a few steps on random features with random labels."""

    noise_steps: int | None = Field(
        None, ge=0, le=10**6, description="S, steps on random features; none: 27 for up to 20 classes, else 49"
    )
    noise_samples: int = Field(10_000, ge=1, le=10**7, description="M, random features of a step")
    noise_lr: float = Field(0.1, gt=0, le=LARGEST, description="learning rate of these steps")
    noise_momentum: float = Field(0.9, ge=0, lt=1, description="their momentum")

    presets = {"paper": {}, "post_hoc": {}}
    ingredient = "head"
    cheap = {"noise_steps": 3, "noise_samples": 20}
    fidelity = (
        "from the authors' code; it makes up to 27 steps for 10 classes and 49 for 100, and keeps the step that is "
        "best on the test set; here all steps are made, and their number is fixed beforehand"
    )

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        return self._deployed(super().init_server(model, site), site)

    def _deployed(self, trained: Tree, site: ServerSite) -> dict[str, Any]:
        """The server state. The deployed model has the new classifier; training goes on with that kept beside it."""
        W = classifier.of(trained["model"])
        deployed = classifier.with_W(trained["model"], self._fitted_to_noise(W, site))
        return {**trained, "model": deployed, "beneath": W}

    def _fitted_to_noise(self, W: Tensors, site: ServerSite) -> Tensors:
        (C, d), dtype = W["weight"].shape, W["weight"].dtype
        random = site.generator("random features")
        head = nn.Linear(d, C, bias="bias" in W, device="meta")  # draws nothing
        head.load_state_dict({name: t.clone() for name, t in W.items()}, assign=True)
        optimizer = Sgd(list(head.parameters()), self.noise_lr, self.noise_momentum, 0.0)
        usual = 27 if C <= 20 else 49
        for _ in range(usual if self.noise_steps is None else self.noise_steps):
            y = torch.randint(C, (self.noise_samples,), generator=random)
            h = torch.empty(self.noise_samples, d, dtype=dtype).normal_(generator=random)
            gradient = classifier.summed_gradient(head, h, y)
            for name, p in head.named_parameters():
                p.grad = gradient[name] / self.noise_samples
            optimizer.step()
        return {name: t.clone() for name, t in tree.parameters(head).items()}

    def broadcast(self, server: Tree) -> Tree:
        return super().broadcast(classifier.beneath_head(server))

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        return self._deployed(super().server_update(classifier.beneath_head(server), received, site), site)
