"""CReFF: the server re-trains the classifier on features that imitate the clients' gradients.

Shang et al., "Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with Federated
Features", IJCAI 2022, https://arxiv.org/abs/2204.13399. Besides ordinary federated averaging, clients send the
gradient of the re-trained classifier psi on each of their classes. The server keeps a balanced set of synthetic
"federated" features. It optimises them until they give the same gradients, and re-trains psi on them from scratch.
The deployed model is the averaged encoder with psi.

    client  g_{k,c} = grad_psi CE(psi(f(x; P)), c) on its examples of class c, at the received model
            trains (P, head) as FedAvg
    server  (P, head) <- FedAvg;   g_c <- mean over the clients that hold c
            features_c <- 100 steps on D(grad_psi CE(psi(features_c), c), g_c)        for the classes with a gradient
            psi <- a fresh linear classifier, trained on all features
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from redgrape.errors import ConfigError
from redgrape.exchange import Parts, Received
from redgrape.learning import classifier
from redgrape.learning.class_draws import at_most
from redgrape.learning.gradient_matching import Distance, match
from redgrape.method import ClientSite, ServerSite, Site
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST

DRAWS, DRAWN = 10, 32  # draws of the examples behind a class gradient, and their size


class CReFF(FedAvg):
    """The server re-trains the classifier on features whose gradients match the clients'."""

    features_per_class: int = Field(100, ge=1, le=10**6, description="federated features of each class")
    match_steps: int = Field(100, ge=0, le=10**9, description="gradient steps on the features in a round")
    match_lr: float = Field(0.1, gt=0, le=LARGEST, description="learning rate of the features")
    match_distance: Distance = Field("rows", description="cosine by output rows, or of the whole gradient at once")
    retrain_epochs: int = Field(300, ge=1, le=10**9, description="epochs of re-training the classifier on the features")
    retrain_lr: float | None = Field(
        0.01, gt=0, le=LARGEST, description="learning rate of the re-training (none: that of local training)"
    )
    retrain_batch: int = Field(32, ge=1, le=10**9, description="features per step of the re-training")
    gradient_draw: Literal["repeated", "all"] = Field(
        "repeated", description="class gradients on 10 random draws of at most 32 examples, or once on all examples"
    )
    deployed_bias: Literal["psi", "head"] = Field(
        "psi", description="deploy the re-trained weights with their own bias, or with that of the averaged classifier"
    )

    presets = {
        "paper": {},
        "appendix": {"retrain_lr": None},  # the values of RedGrape's appendix that differ
        "released": {  # as RedGrape's released code runs it
            "match_distance": "whole",
            "gradient_draw": "all",
            "retrain_lr": None,
            "deployed_bias": "head",
            "clip_norm": 1.0,
        },
    }
    fidelity = (
        "from the authors' code (shangxinyi/CReFF-FL at fbec98f); its DSA augmentation of the gradient draws is not "
        "here: they get the run's own augmentation"
    )

    cheap = {"retrain_epochs": 2, "match_steps": 2, "features_per_class": 3}

    def parts(self, model: Tensors, site: Site) -> Parts:
        rows = classifier.gradient_rows(model, site, drawn=None if self.gradient_draw == "all" else DRAWN)
        return {**super().parts(model, site), "class_gradients": rows}

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        if "classifier.bias" not in model:
            raise ConfigError("creff needs a classifier with a bias; this net has none")
        weight = model["classifier.weight"]
        C, d = weight.shape
        noise = torch.empty(C, self.features_per_class, d, dtype=weight.dtype)
        return {
            "model": model,
            "psi": classifier.fresh_classifier(classifier.of(model), site.generator("first psi")),
            "head": _classifier(model),
            "features": noise.normal_(generator=site.generator("federated features")),
        }

    def broadcast(self, server: Tree) -> Tree:
        return {"model": classifier.with_W(server["model"], server["head"]), "psi": server["psi"]}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        gradients = self._class_gradients(broadcast, site)
        update, state = super().client_update(broadcast, state, site)
        return {**update, "class_gradients": gradients}, state

    def _class_gradients(self, broadcast: Tree, site: ClientSite) -> Tensors:
        """g_{k,c} for the classes that the client reports, at psi and the received encoder in evaluation mode."""
        net = site.load(broadcast["model"])
        net.classifier.load_state_dict(broadcast["psi"])
        if self.gradient_draw == "all":
            return classifier.local_class_gradients(net, site)
        labels, classes = site.data.labels, site.reported.nonzero().flatten()
        random, view = site.generator("gradient draws"), site.generator("gradient view")
        draws = [at_most(DRAWN, labels, random) for _ in range(DRAWS)]
        reported = (rows[site.reported[labels[rows]]] for rows in draws)
        batches = (classifier.encoded(net, site, rows, view) for rows in reported)
        means = (classifier.class_mean_gradients(net.classifier, each, classes.to(site.device)) for each in batches)
        total = next(means)
        for mean in means:  # added up one by one: a table of 100 classes and 1,280 features has 51 MB
            for name, gradient in mean.items():
                total[name] += gradient
        return {"classes": classes, **{name: (t / DRAWS).cpu() for name, t in total.items()}}

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        averaged = received.moved(self.broadcast(server)["model"], self.server_lr)
        psi: Tensors = server["psi"]
        table, released = received.table("class_gradients")
        classes = released.nonzero().flatten()
        features = server["features"].clone()
        features[classes] = match(
            features[classes],
            classes,
            psi["weight"],
            psi["bias"],
            {name: g[classes] for name, g in table.items()},
            self.match_distance,
            self.match_steps,
            self.match_lr,
        )
        psi = self._retrained(features, psi, site)
        deployed: dict[str, Any] = {
            **averaged,
            "classifier.weight": psi["weight"].clone(),
            "classifier.bias": psi["bias"].clone() if self.deployed_bias == "psi" else averaged["classifier.bias"],
        }
        return {"model": deployed, "psi": psi, "head": _classifier(averaged), "features": features}

    def _retrained(self, features: Tensor, like: Tensors, site: ServerSite) -> Tensors:
        """A fresh linear classifier trained on the features by plain sgd, with the gradient in closed form.

        The steps are many and tiny, so the number of calls matters. The bias is a column of W for a feature that is
        always one, an epoch's features are ordered at once, and examples are the last axis of the softmax.
        """
        C, n, d = features.shape
        lr = self.learning_rate(site) if self.retrain_lr is None else self.retrain_lr
        random = site.generator("re-training")
        start = classifier.fresh_classifier(like, random)
        W = torch.cat([start["weight"], start["bias"][:, None]], dim=1)
        h = torch.cat([features.reshape(C * n, d), torch.ones(C * n, 1, dtype=features.dtype)], dim=1)
        target = torch.eye(C, dtype=features.dtype).repeat_interleave(n, dim=1)  # [C, C n]
        shuffled = torch.empty_like(h)  # once: new pages in every epoch would cost a quarter of the time
        for _ in range(self.retrain_epochs):
            order = torch.randperm(C * n, generator=random)
            batches = torch.index_select(h, 0, order, out=shuffled).split(self.retrain_batch)
            targets = target[:, order].split(self.retrain_batch, dim=1)
            with torch.inference_mode():
                for batch, e in zip(batches, targets, strict=True):
                    residual = torch.softmax(W @ batch.T, dim=0).sub_(e)
                    W.addmm_(residual, batch, alpha=-lr / len(batch))
        return {"weight": W[:, :d].clone(), "bias": W[:, d].clone()}


def _classifier(model: Tensors) -> Tensors:
    """A copy of the model's classifier, since no two leaves of a tree may share memory."""
    return {name: model[f"classifier.{name}"].clone() for name in ("weight", "bias")}
