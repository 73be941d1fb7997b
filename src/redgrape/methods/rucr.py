"""RUCR: features drawn to global class means, and a classifier re-trained on mixtures with them.

Huang et al., "Federated Learning With Long-Tailed Data via Representation Unification and Classifier Rectification",
IEEE Transactions on Information Forensics and Security 2024, https://ieeexplore.ieee.org/document/10534053. Clients
share the mean features of their classes. A contrast pulls each feature to the global mean of its class. In the last
rounds each client also re-trains the classifier on equally many virtual features of every class: mixtures of the global
mean and of random features of the client. Only the deployed classifier is re-trained; training goes on without it.

    client  mu_kc <- mean feature of its examples of class c at the received model, and the same as a unit vector
            loss = CE(z, y) + a CE(v, y), with v_c = cos(h, mu_c) / T for the classes that it holds and 0 for others,
                   and log pi_y added to v_y
            in the last R_2 rounds: W' <- its trained W; m features lambda u_c + (1 - lambda) h / |h| for each class,
                   lambda ~ U(low, high), h any of its features at the received model; trains W' on them
            sends the change of the model, that of W' (zero before), and both means of its classes with their counts
    server  mu_c, u_c <- their means over the clients, by counts; a class that nobody reports keeps its own
            averages the model as FedAvg, and W' beside it;   deployed: W' in the last R_2 rounds, W before

Before a class has a mean, its cosine is zero. With a = 0 and R_2 = 0 it is FedAvg.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from redgrape import tree
from redgrape.exchange import ClassRows, Direction, Parts, Received
from redgrape.learning import class_statistics, classifier
from redgrape.learning.decoupling import in_second_stage
from redgrape.learning.margins import LEFT_OUT
from redgrape.learning.prior import Counts, log_prior
from redgrape.method import ClientSite, ServerSite, Site
from redgrape.methods.fedavg import FedAvg
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST

_COUNTS = Counts("global")


class RUCR(FedAvg):
    """Draws features to global class means, and re-trains the classifier on mixtures with them."""

    contrast: float = Field(0.15, ge=0, le=LARGEST, description="a, weight of the contrast to the class means")
    temperature: float = Field(0.9, gt=0, le=LARGEST, description="T, temperature of the contrast")
    head_share: float = Field(0.1, ge=0, lt=1, description="R_2 / R, the share of rounds that re-train the classifier")
    virtual: int = Field(100, ge=1, le=10**6, description="m, virtual features of each class")
    low: float = Field(0.35, ge=0, le=1, description="smallest share of the class mean in a mixture")
    high: float = Field(0.95, ge=0, le=1, description="largest share of the class mean in a mixture")
    retrain_epochs: int = Field(50, ge=0, le=10**9, description="passes over the virtual features in a round")
    retrain_lr: float = Field(0.01, gt=0, le=LARGEST, description="learning rate of the re-training")
    retrain_batch: int = Field(256, ge=1, le=10**9, description="virtual features per step")

    presets = {"paper": {}}
    cheap = {"retrain_epochs": 2, "virtual": 3}
    fidelity = (
        "from the authors' code; there clients send their means and train on the global ones in the same round, here "
        "they are used in the next; features of the received model are those of evaluation mode, pi is "
        "that of all clients, not of a round's, and 20 of 200 rounds re-train"
    )

    def parts(self, model: Tensors, site: Site) -> Parts:
        like = model["classifier.weight"][0]
        rows = ClassRows({"mean": like, "unit": like}, "count")
        return {**super().parts(model, site), "means": rows, "delta_head": Direction(classifier.of(model))}

    def survey(self, site: ClientSite) -> Tree:
        return _COUNTS.survey(site)

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        W = model["classifier.weight"]
        means = {"mean": torch.zeros_like(W), "unit": torch.zeros_like(W)}
        return {"model": model, "trained": _copied(classifier.of(model)), "means": means, **_COUNTS.first(site)}

    def broadcast(self, server: Tree) -> Tree:
        model = classifier.with_W(server["model"], server["trained"])
        return {"model": model, "means": server["means"], **_COUNTS.kept(server)}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        log_pi = log_prior(_COUNTS.of(broadcast, site)).to(net.classifier.weight)
        held = broadcast["means"]["mean"] * (site.class_counts > 0)[:, None]
        unit = F.normalize(held, dim=1).to(site.device)
        optimizer = self.make_optimizer(net.parameters(), site)
        losses = self.losses(net, site)
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            h = net.encoder(x)
            loss = F.cross_entropy(net.classifier(h), y)
            loss = loss + self.contrast * contrast(h, y, unit, self.temperature, log_pi)
            loss.backward()
            self.step(optimizer)
            losses.add(loss, y)
        received, head = site.load(broadcast["model"]), classifier.of(broadcast["model"])
        moved = {name: torch.zeros_like(t) for name, t in head.items()}
        if in_second_stage(self.head_share, site.round, site.rounds):
            W = tree.parameters(net.classifier)
            moved = tree.sub(self._retrained(W, received, broadcast["means"]["unit"].to(site.device), site), head)
        update = self.report(net, broadcast["model"], losses, site)
        return {**update, "means": _means(received, site), "delta_head": moved}, state

    def _retrained(self, W: Tensors, received: Net, u: Tensor, site: ClientSite) -> Tensors:
        """W trained on virtual features of all classes that have a mean. A class without one has no share."""
        random, known = site.generator("re-training"), u.any(dim=1)
        own = torch.cat([h for h, _ in classifier.encoded(received, site, torch.arange(len(site.data)))])
        y = known.nonzero().flatten().repeat_interleave(self.virtual)
        lam = self.low + (self.high - self.low) * torch.rand(len(y), 1, generator=random, dtype=u.dtype).to(u.device)
        others = torch.randint(len(own), (len(y),), generator=random)
        h = lam * u[y] + (1 - lam) * F.normalize(own[others], dim=1)
        head, shift = classifier.linear_like(received.classifier, W), torch.where(known, 0.0, LEFT_OUT).to(u)
        for _ in range(self.retrain_epochs if len(y) else 0):
            for rows in torch.randperm(len(y), generator=random).split(self.retrain_batch):
                g = classifier.summed_gradient(head, h[rows], y[rows], shift)
                for name, p in head.named_parameters():
                    p.data.sub_(g[name], alpha=self.retrain_lr / len(rows))
        return tree.parameters(head)

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        before = self.broadcast(server)["model"]
        model = received.moved(before, self.server_lr)
        trained = _copied(classifier.of(model))
        if in_second_stage(self.head_share, site.round, site.rounds):
            head = tree.add(classifier.of(before), received.mean("delta_head"), self.server_lr)
            model = classifier.with_W(model, head)
        means, _ = received.table("means", server["means"])
        return {"model": model, "trained": trained, "means": means, **_COUNTS.kept(server)}


def contrast(h: Tensor, y: Tensor, unit: Tensor, temperature: float, log_pi: Tensor) -> Tensor:
    """CE(v, y) with v_c = cos(h, mu_c) / T, zero for a class whose vector is zero, and log pi_y added to v_y."""
    v = F.normalize(h, dim=1) @ unit.T / temperature
    return F.cross_entropy(v + F.one_hot(y, len(unit)) * log_pi, y)


def _means(received: Net, site: ClientSite) -> Tensors:
    """mu_kc, as it is and as a unit vector, and n_kc of the classes that the client reports."""
    classes, rows = site.reported.nonzero().flatten(), class_statistics.reported_rows(site)
    mean = class_statistics.class_means(received, site, rows)[classes].to(received.classifier.weight.dtype)
    return {"classes": classes, "counts": site.class_counts[classes], "mean": mean, "unit": F.normalize(mean, dim=1)}


def _copied(tensors: Tensors) -> Tensors:
    return {name: t.clone() for name, t in tensors.items()}  # no two leaves of a tree may share memory
