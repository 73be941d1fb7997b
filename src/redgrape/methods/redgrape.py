"""RedGrape: classifier re-balancing with local real data and global gradient prototypes.

Yang et al., "Integrating Local Real Data with Global Gradient Prototypes for Classifier Re-Balancing in Federated
Long-Tailed Learning", IJCAI 2023, https://arxiv.org/abs/2301.10394. Two classifiers share the encoder P. Their sum is
trained on the data as it is, which keeps the representation honest. One of them, W, is also pulled along the gradient
of a balanced data set. For each class, a client takes its part of this pull from its own examples if it has enough of
them, else from the global gradient prototype of the class. Only P and W are deployed.

Algorithm 1 with the paper's symbols; t counts rounds, i local steps, theta = (P, W, W_hat):

    server  sends theta^{t-1} and the prototypes g_pro[c] that the clients of round t-1 made
    client  1  g_pro[k,c] <- grad_W CE(W f(D_{k,c}; P)) at the received model, for its classes        Eq. (10)
               D_bal <- T examples of each class of which it holds at least T; L_bal <- those classes
    client  2  for each local step:
            3     P, W_hat <- plain step on CE((W + W_hat) f(x; P))                                   Eq. (6)
            4     g_local <- grad_W of the same loss                                                  Eq. (7)
            5     g_bal <- 1/C [ sum_{c in L_bal} grad_W CE(W f(D_bal,c; P)) + sum_{other c} g_pro[c] ]  Eq. (8), (11)
            6     W <- W - eta_l [ g_local + lambda g_bal ||g_local|| / ||g_bal|| ]                   Eq. (12)
    client  8  sends theta_k - theta^{t-1}, n_k and g_pro[k,c]
    server  theta^t <- theta^{t-1} + eta_s sum_k n_k / (sum_i n_i) (theta_k - theta^{t-1})            Eq. (13)
            g_pro[c] <- mean over the clients that hold c; where nobody does, the old one stays       Eq. (14)

docs/paper.md lists every choice that the paper leaves ambiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from redgrape import tree
from redgrape.exchange import Direction, Parts, Received
from redgrape.learning import classifier, rebalancing
from redgrape.learning.class_draws import balanced
from redgrape.learning.features import Statistics, features
from redgrape.learning.local_training import WholeOrInfinite
from redgrape.learning.schedule import Schedule, decay
from redgrape.method import ClientSite, ServerSite, Site
from redgrape.methods.fedavg import FedAvg
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST


class RedGrape(FedAvg):
    """Re-balances the classifier during local training, with real examples and gradient prototypes."""

    lam: float = Field(0.1, ge=0, le=LARGEST, description="lambda, the strength of the re-balancing")
    lam_schedule: Schedule = Field("constant", description="decay of lambda over the rounds")
    lam_final: float = Field(0.01, ge=0, le=1, description="fraction of lambda in the last round, if it decays")
    threshold: WholeOrInfinite = Field(8.0, ge=1, description="T: a class with at least this many examples uses them")
    placement: Literal["in_gradient", "after_step"] = Field("in_gradient", description="where Eq. (12) adds the pull")
    norm: rebalancing.Norm = Field("joint", description="one ratio for weight and bias, or one for each")
    extra_init: classifier.Start = Field("default", description="initial W_hat: a new nn.Linear, zeros, or W's start")
    unseen: Literal["skip", "mean"] = Field("skip", description="a class without prototype adds nothing, or the mean")
    balanced_draw: Literal["round", "step"] = Field("round", description="draw D_bal once per round, or for every step")
    balanced_stats: Statistics = Field("batch", description="BatchNorm statistics that D_bal uses and updates")
    prototype_weights: Literal["uniform", "count"] = Field("uniform", description="a client's weight in Eq. (14)")
    prototype_view: Literal["plain", "augmented"] = Field("plain", description="examples behind the prototypes")
    max_age: int | None = Field(None, ge=0, le=10**9, description="do not use prototypes older than this many rounds")
    use_prototypes: bool = Field(True, description="ablation: use prototypes for missing classes")
    use_real_data: bool = Field(True, description="ablation: use real examples of classes")
    two_stream: bool = Field(True, description="ablation: train the second classifier W_hat")

    presets = {
        "paper": {},
        "released": {
            "placement": "after_step",
            "norm": "per_tensor",
            "clip_norm": 1.0,
            "unseen": "mean",
            "balanced_stats": "batch_update",
            "prototype_view": "augmented",
        },
    }
    fidelity = "from the paper; preset `released` after the authors' code; see docs/paper.md"

    def parts(self, model: Tensors, site: Site) -> Parts:
        parts = super().parts(model, site)
        if self.use_prototypes:
            parts["prototypes"] = classifier.gradient_rows(model, site, self.prototype_weights)
        if self.two_stream:
            parts["delta_W_hat"] = Direction(classifier.of(model))
        return parts

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        W, C = classifier.of(model), site.num_classes
        server: dict[str, Any] = {"model": model, "prototypes": classifier.empty_table(W, C)}
        server |= {"seen": torch.zeros(C, dtype=torch.bool), "age": torch.zeros(C, dtype=torch.int64)}
        if self.two_stream:
            server["W_hat"] = classifier.first(W, self.extra_init, site.generator("W_hat"))
        return server

    def broadcast(self, server: Tree) -> Tree:
        usable = server["seen"] if self.max_age is None else server["seen"] & (server["age"] <= self.max_age)
        sent = {"model": server["model"], "seen": usable, "prototypes": server["prototypes"]}
        return sent | ({"W_hat": server["W_hat"]} if self.two_stream else {})

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        """Algorithm 1."""
        net = self.load_for_training(broadcast["model"], site)
        W, W_hat = net.classifier, classifier.linear_like(net.classifier, broadcast.get("W_hat"))
        prototypes = self._local_prototypes(net, site) if self.use_prototypes else {}  # line 1
        balance = Balance(self, broadcast, net, site)
        optimizer = self.make_optimizer([*net.parameters(), *W_hat.parameters()], site)
        criterion, regularise = self.criterion(broadcast, site), self.regulariser(net, broadcast, state, site)
        losses = self.losses(net, site)
        for x, y in self.batches(site, net):  # line 2
            optimizer.zero_grad()
            h = net.encoder(x)
            loss = criterion(W(h) + W_hat(h) if self.two_stream else W(h), y)
            loss.backward()  # lines 3 and 4: Eq. (6), (7); every gradient is taken before any parameter moves
            pull = balance.pull()  # line 5 and the second term of Eq. (12)
            if self.placement == "in_gradient":  # line 6
                for name, p in W.named_parameters():
                    p.grad += pull[name]  # type: ignore[operator]  # backward() has filled it
            regularise()
            self.step(optimizer)
            if self.placement == "after_step":
                with torch.no_grad():
                    for name, p in W.named_parameters():
                        p.sub_(pull[name], alpha=self.learning_rate(site))
            losses.add(loss, y)
        update = {**self.report(net, broadcast["model"], losses, site), "prototypes": prototypes}
        if self.two_stream:
            update["delta_W_hat"] = tree.sub(tree.parameters(W_hat), broadcast["W_hat"])
        return update, state  # line 8

    def _local_prototypes(self, net: Net, site: ClientSite) -> Tensors:
        """Eq. (10), by W alone."""
        view = site.generator("prototype view") if self.prototype_view == "augmented" else None
        return classifier.local_class_gradients(net, site, view, counted=self.prototype_weights == "count")

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        g_pro, new = server["prototypes"], torch.zeros_like(server["seen"])
        if self.use_prototypes:
            g_pro, new = received.table("prototypes", g_pro)  # Eq. (14)
        age = torch.where(new | ~server["seen"], 0, server["age"] + 1)
        moved = {"model": received.moved(server["model"], self.server_lr)}  # Eq. (13)
        if self.two_stream:
            moved["W_hat"] = tree.add(server["W_hat"], received.mean("delta_W_hat"), self.server_lr)
        return {**moved, "prototypes": g_pro, "seen": server["seen"] | new, "age": age}

    def log(self, server: Tree, received: Received) -> Mapping[str, Tensor]:
        return {"prototype_seen": server["seen"], "prototype_age": server["age"]}


class Balance:
    """The local balanced data set of one client and round, and its pull on W."""

    def __init__(self, method: RedGrape, broadcast: Tree, net: Net, site: ClientSite) -> None:
        self.method, self.net, self.site = method, net, site
        self.lam = method.lam * decay(method.lam_schedule, site.round, site.rounds, method.lam_final)
        self.draws, self.views = site.generator("balanced draw"), site.generator("balanced view")
        real = site.class_counts >= (method.threshold if method.use_real_data else torch.inf)
        missing, available = ~real, broadcast["seen"] & ~real
        self.real_classes = real.nonzero().flatten()  # L_bal
        # The part of Eq. (11) that is constant over a round. Each class without a prototype gets the others' mean.
        factor = int(missing.sum()) / max(1, int(available.sum())) if method.unseen == "mean" else 1.0
        summed = classifier.table_sum(broadcast["prototypes"], available, net.classifier.weight.dtype)
        self.from_prototypes = {name: (g * factor).to(site.device) for name, g in summed.items()}
        self.active = site.round > 1 and (len(self.real_classes) > 0 or bool(available.any())) and self.lam > 0
        self.drawn: tuple[Tensor, Tensor] | None = None

    def pull(self) -> Tensors:
        """lambda g_bal ||g_local|| / ||g_bal||, the second term of Eq. (12), with g_local in W's .grad."""
        g_local = {name: p.grad for name, p in self.net.classifier.named_parameters() if p.grad is not None}
        if not self.active:
            return {name: torch.zeros_like(g) for name, g in g_local.items()}
        return rebalancing.pull(self.lam, g_local, self._balanced_gradient(), self.method.norm)

    def _balanced_gradient(self) -> Tensors:
        """g_bal, Eq. (11). Every class of L_bal has T examples, so the sum of the classes' mean gradients (Eq. 8) is
        the sum over D_bal divided by T: one forward pass, no graph, W alone."""
        C, W = self.site.num_classes, self.net.classifier
        if not len(self.real_classes):
            return {name: g / C for name, g in self.from_prototypes.items()}
        if self.drawn is None or self.method.balanced_draw == "step":  # D_bal
            T = int(self.method.threshold)
            self.drawn = balanced(self.site, T, self.real_classes, W.weight.dtype, self.draws, self.views)
        x, y = self.drawn
        real = classifier.summed_gradient(W, features(self.net.encoder, x, self.method.balanced_stats), y)
        return {name: (g / self.method.threshold + self.from_prototypes[name]) / C for name, g in real.items()}
