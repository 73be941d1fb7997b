"""CReFF: the server re-trains the classifier on features that imitate the clients' gradients.

Shang et al., "Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with Federated
Features", IJCAI 2022, https://arxiv.org/abs/2204.13399. Beside ordinary federated averaging, clients send the
gradient of the re-trained classifier psi on each of their classes. The server keeps a balanced set of made-up
"federated" features, moves them until they give the same gradients, and re-trains psi on them from scratch. The
deployed model is the averaged encoder with psi.

    client  g_{k,c} = grad_psi CE(psi(f(x; P)), c) on its examples of class c, at the received model
            trains (P, head) as FedAvg
    server  (P, head) <- FedAvg;   g_c <- mean over the clients that hold c
            features_c <- 100 steps on D(grad_psi CE(psi(features_c), c), g_c)        for the classes with a gradient
            psi <- a fresh linear classifier, trained on all features
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from redgrape.acceptance import class_rows
from redgrape.class_prior import class_counts
from redgrape.class_reports import PRIVATE, ClassReports, contributors
from redgrape.class_sampling import at_most
from redgrape.classifier_gradients import class_mean_gradients
from redgrape.errors import ConfigError
from redgrape.features import features as encode
from redgrape.features import never_negative
from redgrape.gradient_matching import Distance, match
from redgrape.method import ClientId, ClientSite, ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST

_BATCH = 256


class Creff(ClassReports, FedAvg):
    """The server re-trains the classifier on features whose gradients match the clients'."""

    features_per_class: int = Field(100, ge=1, le=10**6, description="federated features of each class")
    match_steps: int = Field(100, ge=0, le=10**9, description="gradient steps on the features in a round")
    match_lr: float = Field(0.1, gt=0, le=LARGEST, description="learning rate of the features")
    match_distance: Distance = Field("rows", description="cosine by output rows, or of the whole gradient at once")
    retrain_epochs: int = Field(300, ge=1, le=10**9, description="epochs of re-training the classifier on the features")
    retrain_lr: float | None = Field(
        0.01, gt=0, le=LARGEST, description="learning rate of the re-training (none: that of local training)"
    )
    retrain_batch: int = Field(32, ge=1, le=10**9, description="features a step of the re-training")
    gradient_draw: Literal["repeated", "all"] = Field(
        "repeated", description="class gradients on 10 random draws of at most 32 examples, or once on all examples"
    )
    deployed_bias: Literal["psi", "head"] = Field(
        "psi", description="deploy the re-trained weights with their own bias, or with that of the averaged classifier"
    )

    presets: ClassVar = {
        "paper": {},
        "appendix": {"retrain_lr": None},  # the values of RedGrape's appendix where they are others
        "released": {  # as RedGrape's released code runs it
            "match_distance": "whole",
            "gradient_draw": "all",
            "retrain_lr": None,
            "deployed_bias": "head",
            "clip_norm": 1.0,
        },
        "private": PRIVATE,
    }
    fidelity: ClassVar[str] = (
        "from the authors' code read at second hand; its DSA augmentation of the gradient draws is not here: they get "
        "the run's own augmentation"
    )

    cheap: ClassVar = {"retrain_epochs": 2, "match_steps": 2, "features_per_class": 3}
    assumes: ClassVar[str] = "class presence may be seen"
    summable: ClassVar[bool] = True
    class_group: ClassVar[str] = "class_gradients"

    def privacy(self) -> str:
        single = (
            "and, where it has one example of a class, that example's feature vector; of fewer examples than there are "
            "classes, all of theirs"
            if self.min_count == 1
            else f"(they were sent from {self.min_count} examples of a class on) and, where it has fewer examples of "
            "it than there are classes, their feature vectors"
        )
        return (
            "In CReFF a client also sends the classifier's gradient on each of its classes. These expose which classes "
            f"a client holds {single}. The gradients are not in this folder."
        )

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        if "classifier.bias" not in model:
            raise ConfigError("creff needs a classifier with a bias; this net has none")
        weight = model["classifier.weight"]
        C, d = weight.shape
        noise = torch.empty(C, self.features_per_class, d, dtype=weight.dtype)
        return {
            "model": model,
            "psi": _fresh_linear(C, d, weight.dtype, site.generator("first psi")),
            "head": _classifier(model),
            "features": noise.normal_(generator=site.generator("federated features")),
        }

    def broadcast(self, server: Tree) -> Tree:
        head = {f"classifier.{name}": t for name, t in server["head"].items()}
        return {"model": {**server["model"], **head}, "psi": server["psi"]}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        gradients = self._class_gradients(broadcast, site)
        update, state = super().client_update(broadcast, state, site)
        return {**update, "class_gradients": gradients}, state

    def _class_gradients(self, broadcast: Tree, site: ClientSite) -> Tensors:
        """g_{k,c} of the classes that the client reports, at the received encoder in evaluation mode and psi."""
        net = site.load(broadcast["model"])
        net.classifier.load_state_dict(broadcast["psi"])
        labels, reported = site.data.labels, self.reported(class_counts(site))
        classes = reported.nonzero().flatten()
        view = None
        if self.gradient_draw == "all":
            draws = [torch.arange(len(labels))]
        else:
            random, view = site.generator("gradient draws"), site.generator("gradient view")
            draws = [at_most(32, labels, random) for _ in range(10)]
        means = [
            class_mean_gradients(net.classifier, _encoded(net, rows, view, site), classes.to(site.device))
            for rows in (rows[reported[labels[rows]]] for rows in draws)
        ]
        mean = {name: torch.stack([m[name] for m in means]).mean(dim=0).cpu() for name in means[0]}
        return {"classes": classes, **mean}

    def update_like(self, server: Tree, site: ServerSite) -> Tree:
        signed = never_negative(site.load(server["model"]).encoder)
        rows = class_rows(server["psi"], gradients=True, signed=signed)
        return {**super().update_like(server, site), "class_gradients": rows}

    def server_update(self, server: Tree, updates: Mapping[ClientId, Tree], site: ServerSite) -> Tree:
        averaged = self.averaged_model(self.broadcast(server)["model"], updates)
        psi: Tensors = server["psi"]
        sent = [u["class_gradients"] for u in updates.values()]
        means, held = self.mean_over_holders(sent, psi)
        classes = (held & (contributors(sent, len(held)) >= self.min_clients)).nonzero().flatten()
        target = {name: g[classes] for name, g in means.items()}
        features = server["features"].clone()
        features[classes] = match(
            features[classes],
            classes,
            psi["weight"],
            psi["bias"],
            target,
            self.match_distance,
            self.match_steps,
            self.match_lr,
        )
        psi = self._retrained(features, site)
        deployed: dict[str, Any] = {
            **averaged,
            "classifier.weight": psi["weight"].clone(),
            "classifier.bias": psi["bias"].clone() if self.deployed_bias == "psi" else averaged["classifier.bias"],
        }
        return {"model": deployed, "psi": psi, "head": _classifier(averaged), "features": features}

    def log(self, server: Tree, updates: Mapping[ClientId, Tree]) -> Mapping[str, Tensor]:
        sent = [update["class_gradients"] for update in updates.values()]
        return {"class_contributors": contributors(sent, len(server["psi"]["bias"]))}

    def _retrained(self, features: Tensor, site: ServerSite) -> Tensors:
        """A fresh linear classifier trained on the features by plain sgd, with the gradient in closed form.

        The steps are many and tiny, so their number of calls counts: the bias is a column of W for a feature that is
        always one, an epoch's features are put in order at once, and examples are the last axis of the softmax.
        """
        C, n, d = features.shape
        lr = self.learning_rate(site) if self.retrain_lr is None else self.retrain_lr
        random = site.generator("re-training")
        start = _fresh_linear(C, d, features.dtype, random)
        W = torch.cat([start["weight"], start["bias"][:, None]], dim=1)
        h = torch.cat([features.reshape(C * n, d), torch.ones(C * n, 1, dtype=features.dtype)], dim=1)
        target = torch.eye(C, dtype=features.dtype).repeat_interleave(n, dim=1)  # [C, C n]
        for _ in range(self.retrain_epochs):
            order = torch.randperm(C * n, generator=random)
            batches = h[order].split(self.retrain_batch)
            targets = target[:, order].split(self.retrain_batch, dim=1)
            with torch.inference_mode():
                for batch, e in zip(batches, targets, strict=True):
                    residual = torch.softmax(W @ batch.T, dim=0).sub_(e)
                    W.addmm_(residual, batch, alpha=-lr / len(batch))
        return {"weight": W[:, :d].clone(), "bias": W[:, d].clone()}


def _fresh_linear(C: int, d: int, dtype: torch.dtype, random: torch.Generator) -> Tensors:
    """A linear classifier as nn.Linear starts one: uniform within 1 / sqrt(d)."""
    bound = d**-0.5
    return {
        "weight": torch.empty(C, d, dtype=dtype).uniform_(-bound, bound, generator=random),
        "bias": torch.empty(C, dtype=dtype).uniform_(-bound, bound, generator=random),
    }


def _classifier(model: Tensors) -> Tensors:
    """A copy of the model's classifier, since no two leaves of a tree may share memory."""
    return {name: model[f"classifier.{name}"].clone() for name in ("weight", "bias")}


def _encoded(net: Net, rows: Tensor, view: torch.Generator | None, site: ClientSite) -> Iterator[tuple[Tensor, Tensor]]:
    """Features and labels of these rows, augmented by `view` where there is one."""
    for batch in rows.split(_BATCH):
        x = site.inputs(batch, net.classifier.weight.dtype, view)
        yield encode(net.encoder, x, "running"), site.data.labels[batch].to(site.device)
