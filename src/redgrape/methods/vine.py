"""Vine: RedGrape's re-balancing by one summed gradient, which needs only sums over the clients.

This method is ours. With threshold T = inf, RedGrape's Eq. (11) uses only the *sum* of the global prototypes. So no
table of classes is sent: each client sends one matrix of the classifier's size, and the server adds up the changes. In
a secure sum nobody sees the gradient of a single class or client. H_c clients hold class c.

    survey  H_c and the class counts, secure sums. A class with H_c < min_holders is not shared: it has no part in G
    server  sends theta^{t-1} and G
    client  1  M_k <- sum_i m_{y_i} (p_i - e_{y_i}) [h_i; 1]^T / (H_{y_i} n_{k,y_i}) at the received model: its part of
               the sum over the classes of the mean over their holders. p_i = softmax(z_i + log m), m = pi^tau with tau
               the margin and pi the class shares: a rare class that is memorised (p = 1 at tau = 0) still pulls
            2  for each local step, with W_hat beside W as in RedGrape; W_hat starts as a copy of W:
                  g_bal <- G / C [ + 1/C sum_{c in L_bal} m_c (grad_c(D_bal; now) - grad_c(D_bal; received)) ]
                  W <- W - eta_l [ g_local + lambda g_bal ||mean g_local|| / ||g_bal|| ]         RedGrape's Eq. (12)
               mean g_local: of the round so far; a batch's own is mostly noise, and the pull would be too long.
               A class that is not shared has no row in W_hat. At clients that lack it, its training logit gets log pi_c
               - mean_j log pi_j, j over the shared classes, so that they hardly push it down; holders train it plainly
            3  sends theta_k - theta^{t-1}, n_k and M_k - S_k, and adds that to S_k, what it has sent so far
    server  G <- G + sum of what arrived: the sum of all clients' latest M_k, whoever was sampled

With all clients sampled, no margin, no correction, `length=batch` and `extra_init=default` this is RedGrape with
threshold=inf. Without memory, for clients that are seen once, G <- K / |S| sum_k M_k. Messages are rounded to the net's
precision. S_k is what arrived, so G carries only the rounding of each client's last message, however many came before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from redgrape import tree
from redgrape.exchange import Direction, Parts, Received, Sum
from redgrape.learning import classifier, rebalancing
from redgrape.learning.class_draws import balanced
from redgrape.learning.features import features
from redgrape.learning.local_training import replaceable
from redgrape.learning.margins import LEFT_OUT
from redgrape.learning.prior import log_prior
from redgrape.learning.schedule import Schedule, decay
from redgrape.method import ClientSite, ServerSite, Site
from redgrape.methods.fedavg import FedAvg
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST


class Vine(FedAvg):
    """Re-balances the classifier by one summed gradient of all clients, which a secure sum can compute."""

    lam: float = Field(0.1, ge=0, le=LARGEST, description="lambda, the strength of the re-balancing")
    lam_schedule: Schedule = Field("constant", description="decay of lambda over the rounds")
    lam_final: float = Field(0.01, ge=0, le=1, description="fraction of lambda in the last round, if it decays")
    memory: bool = Field(True, description="clients remember M_k and send its change; else they send M_k itself")
    weights: Literal["holders", "counts", "alike"] = Field(
        "holders", description="weights within a class: 1 / H_c, by examples, or 1 / K, which needs no survey"
    )
    margin: float = Field(0.5, ge=0, le=1, description="tau: 0 re-weights classes, 1 adds log pi to the logits of M_k")
    min_holders: int = Field(1, ge=1, le=10**6, description="a class that fewer clients hold has no part in G")
    correction: Literal["none", "real"] = Field("none", description="follow own examples of a class within a round")
    threshold: int = Field(8, ge=1, le=10**9, description="T: examples of a class that the correction uses")
    norm: rebalancing.Norm = Field("joint", description="one ratio for weight and bias, or one for each")
    length: Literal["batch", "mean"] = Field(
        "mean", description="the length of g_local in Eq. (12): of a batch's, or of the mean of the round so far"
    )
    extra_init: classifier.Start = Field("copy", description="initial W_hat: W's start, a new nn.Linear, or zeros")
    two_stream: bool = Field(True, description="ablation: train the second classifier W_hat")

    presets = {
        "paper": {},
        "stateless": {"memory": False},
        "unsurveyed": {"memory": False, "weights": "alike", "margin": 0.0},
    }
    fidelity = "ours; from RedGrape's equations"
    sums_of_states = ("G",)

    @model_validator(mode="after")
    def _counts_are_known(self) -> Self:
        for name, needs in {"min_holders": self.min_holders > 1, "margin": self.margin > 0}.items():
            if self.weights == "alike" and needs:
                off = {"min_holders": 1, "margin": 0}[name]
                raise ValueError(
                    f"{name} is {getattr(self, name)}, and weights=alike asks nobody which classes it holds; choose "
                    f"weights=holders, or {name}={off}"
                )
        return self

    def parts(self, model: Tensors, site: Site) -> Parts:
        W = classifier.of(model)
        summed = Sum(W, self.memory, instead="choose method.preset=stateless", min_holders=self.min_holders)
        parts = super().parts(model, site) | {"gradient": summed}
        return parts | ({"delta_W_hat": Direction(W)} if self.two_stream else {})

    def survey(self, site: ClientSite) -> Tree:
        if self.weights == "alike":
            return {}
        held = {"holders": (site.class_counts > 0).long()}
        counted = self.weights == "counts" or self.margin > 0 or self.min_holders > 1
        return held | ({"class_counts": site.class_counts} if counted else {})

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        W = classifier.of(model)
        holders = site.survey.get("holders", torch.full((site.num_classes,), site.num_clients))
        number = site.survey["class_counts"] if self.weights == "counts" else holders
        weights = torch.where(holders >= self.min_holders, 1 / number.double().clamp(min=1), 0.0)
        server: dict[str, Any] = {"model": model, "G": _zeros(W), "class_weights": weights}
        if self.margin or self.min_holders > 1:
            log_pi, shared = log_prior(site.survey["class_counts"]), weights > 0
            number_shared = shared.double().sum().clamp(min=1)
            tau_log_pi = torch.where(shared, self.margin * log_pi, LEFT_OUT)
            server["margin"] = tau_log_pi - (tau_log_pi.logsumexp(0) - number_shared.log())  # the mean of pi^tau is 1
        if self.min_holders > 1:
            usual = (log_pi * shared).sum() / number_shared
            server["home"] = torch.where((holders > 0) & ~shared, log_pi - usual, 0.0)
        if self.two_stream:
            server["W_hat"] = classifier.first(W, self.extra_init, site.generator("W_hat"))
        if self.two_stream and self.min_holders > 1:
            server["W_hat"] = {name: _only(shared, t) for name, t in server["W_hat"].items()}
        return server

    def broadcast(self, server: Tree) -> Tree:
        dtype = server["model"]["classifier.weight"].dtype
        sent = {name: server[name] for name in ("model", "class_weights", "margin", "home") if name in server}
        sent["G"] = {name: g.to(dtype) for name, g in server["G"].items()}
        return sent | ({"W_hat": server["W_hat"]} if self.two_stream else {})

    def init_client(self, broadcast: Tree) -> Tree:
        return {"sent": _zeros(broadcast["G"])} if self.memory else {}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        W, W_hat = net.classifier, classifier.linear_like(net.classifier, broadcast.get("W_hat"))
        gradient = self._summed_gradient(net, broadcast, site)  # M_k
        balance = Balance(self, broadcast, net, site)
        optimizer = self.make_optimizer([*net.parameters(), *W_hat.parameters()], site)
        criterion, regularise = self.criterion(broadcast, site), self.regulariser(net, broadcast, state, site)
        losses = self.losses(net, site)
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            h = net.encoder(x)
            loss = criterion(W(h) + W_hat(h) if self.two_stream else W(h), y)
            loss.backward()
            for name, g in balance.pull().items():
                W.get_parameter(name).grad += g  # type: ignore[operator]  # backward() has filled it
            if self.two_stream and "home" in broadcast:
                for p in W_hat.parameters():
                    p.grad = _only(broadcast["class_weights"] > 0, p.grad)  # type: ignore[arg-type]  # filled, as above
            regularise()
            self.step(optimizer)
            losses.add(loss, y)
        if self.memory:
            gradient = {name: (g.double() - state["sent"][name]).to(g.dtype) for name, g in gradient.items()}
            state = {"sent": {name: s + gradient[name].double() for name, s in state["sent"].items()}}
        update = {**self.report(net, broadcast["model"], losses, site), "gradient": gradient}
        if self.two_stream:
            update["delta_W_hat"] = tree.sub(tree.parameters(W_hat), broadcast["W_hat"])
        return update, state

    def _summed_gradient(self, net: Net, broadcast: Tree, site: ClientSite) -> Tensors:
        """M_k, at the received model in evaluation mode."""
        own = site.class_counts.clamp(min=1) if self.weights != "counts" else torch.ones_like(site.class_counts)
        margin = _margin(broadcast, net)
        weights = (broadcast["class_weights"] / own).to(margin) * margin.exp()
        batches = classifier.encoded(net, site, torch.arange(len(site.data)))
        gradient = classifier.weighted_gradient(net.classifier, batches, weights, margin)
        return {name: g.cpu() for name, g in gradient.items()}

    @replaceable
    def criterion(self, broadcast: Tree, site: ClientSite) -> Callable[[Tensor, Tensor], Tensor]:
        plain = super().criterion(broadcast, site)
        if "home" not in broadcast:
            return plain
        shift = torch.where(site.class_counts > 0, 0.0, broadcast["home"])  # a holder's would show its examples
        return lambda z, y: plain(z + shift.to(z), y)

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        total = received.total("gradient")
        if self.memory:
            G = {name: g + total[name] for name, g in server["G"].items()}
        else:
            G = {name: g * (site.num_clients / len(received.clients)) for name, g in total.items()}
        moved: dict[str, Any] = {"model": received.moved(server["model"], self.server_lr)}
        if self.two_stream:
            moved["W_hat"] = tree.add(server["W_hat"], received.mean("delta_W_hat"), self.server_lr)
        return {**server, **moved, "G": G}


class Balance:
    """The pull of the summed gradient on W in one client's round."""

    def __init__(self, method: Vine, broadcast: Tree, net: Net, site: ClientSite) -> None:
        self.method, self.net, self.site = method, net, site
        self.lam = method.lam * decay(method.lam_schedule, site.round, site.rounds, method.lam_final)
        self.G = {name: g.to(site.device) for name, g in broadcast["G"].items()}
        self.margin = _margin(broadcast, net)
        self.active = site.round > 1 and self.lam > 0
        self.sum_local: Tensors = {}
        self.steps = 0
        real = site.class_counts >= method.threshold if method.correction == "real" else torch.zeros(0)
        real_classes = (real & (broadcast["class_weights"] > 0)).nonzero().flatten() if len(real) else real
        self.drawn: tuple[Tensor, Tensor] | None = None
        if self.active and len(real_classes):
            random = site.generator("balanced draw"), site.generator("balanced view")
            self.drawn = balanced(site, method.threshold, real_classes, net.classifier.weight.dtype, *random)
            self.received = self._on_real_data()

    def pull(self) -> Tensors:
        if not self.active:
            return {}
        g_local = {name: p.grad for name, p in self.net.classifier.named_parameters() if p.grad is not None}
        if self.method.length == "mean":
            self.steps += 1
            self.sum_local = {name: g + self.sum_local.get(name, 0) for name, g in g_local.items()}
            g_local = {name: g / self.steps for name, g in self.sum_local.items()}
        g_bal = {name: g / self.site.num_classes for name, g in self._sum().items()}
        return rebalancing.pull(self.lam, g_local, g_bal, self.method.norm)

    def _sum(self) -> Tensors:
        """C g_bal: the summed gradient, and the change since then on the client's own examples."""
        if self.drawn is None:
            return self.G
        now = self._on_real_data()
        return {name: g + (now[name] - self.received[name]) for name, g in self.G.items()}

    def _on_real_data(self) -> Tensors:
        """The sum over L_bal of grad_c(D_bal), the mean gradient of each class."""
        assert self.drawn is not None
        x, y = self.drawn
        batches = [(features(self.net.encoder, x, "running"), y)]
        weights = self.margin.exp() / self.method.threshold
        return classifier.weighted_gradient(self.net.classifier, batches, weights, self.margin)


def _margin(broadcast: Tree, net: Net) -> Tensor:
    """tau log pi, added to the logits of M_k; LEFT_OUT for classes without enough holders. Its exp weights a class."""
    weight = net.classifier.weight
    return broadcast["margin"].to(weight) if "margin" in broadcast else torch.zeros_like(weight[:, 0])


def _only(classes: Tensor, t: Tensor) -> Tensor:
    """The rows of these classes, and zero for the others."""
    return t * classes.to(t).reshape(-1, *[1] * (t.dim() - 1))


def _zeros(like: Tensors) -> Tensors:
    return {name: torch.zeros_like(t, dtype=torch.float64) for name, t in like.items()}
