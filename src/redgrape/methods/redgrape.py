"""RedGrape: classifier re-balancing with local real data and global gradient prototypes.

Yang et al., "Integrating Local Real Data with Global Gradient Prototypes for Classifier Re-Balancing in Federated
Long-Tailed Learning", IJCAI 2023, https://arxiv.org/abs/2301.10394. Two classifiers share the encoder P: their sum is
trained on the data as it is, which keeps the representation honest, and one of them, W, is also pulled towards what a
balanced data set would ask of it. A client takes a class's part of that pull from its own examples where it has enough
of them, and from the global gradient prototype of the class where it has not. Only P and W are deployed.

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

Where the paper can be read in two ways, docs/paper.md says which way was taken and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from redgrape import tree
from redgrape.acceptance import class_rows
from redgrape.accounting import Mechanism
from redgrape.aggregation import client_report, sample_weights
from redgrape.class_reports import PRIVATE, ClassReports, contributors
from redgrape.class_sampling import at_most
from redgrape.classifier_gradients import (
    class_mean_gradients,
    mean_over_holders,
    per_class,
    summed_gradient,
    table_sum,
)
from redgrape.features import Statistics, features, never_negative
from redgrape.method import ClientId, ClientSite, ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.nets.net import Net
from redgrape.schedule import Schedule, decay
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST

_PROTOTYPE_BATCH = 256
_TINY = 1e-12  # a balanced gradient below this norm has no direction
_BY_CLASS = ("median", "trimmed_mean", "norm_clipping")  # rules that look at the numbers of a prototype


class RedGrape(ClassReports, FedAvg):
    """Re-balances the classifier during local training, with real examples and gradient prototypes."""

    lam: float = Field(0.1, ge=0, le=LARGEST, description="lambda, the strength of the re-balancing")
    lam_schedule: Schedule = Field("constant", description="decay of lambda over the rounds")
    lam_final: float = Field(0.01, ge=0, le=1, description="fraction of lambda in the last round, where it decays")
    threshold: float = Field(8.0, ge=1, description="T: real examples serve a class from this many on (inf: never)")
    placement: Literal["in_gradient", "after_step"] = Field(
        "in_gradient", description="re-balance through the optimizer, as Eq. (12), or by a plain step after its step"
    )
    norm: Literal["joint", "per_tensor"] = Field(
        "joint", description="one norm over weight and bias together, or one ratio for each"
    )
    extra_init: Literal["default", "zeros", "copy"] = Field(
        "default", description="start of W_hat: an independent nn.Linear, zeros, or W's own start"
    )
    unseen: Literal["skip", "mean"] = Field(
        "skip", description="a class without a prototype adds nothing, or the mean of the prototypes that there are"
    )
    balanced_draw: Literal["round", "step"] = Field("round", description="draw D_bal once a round, or for every step")
    balanced_stats: Statistics = Field(
        "batch",
        description="BatchNorm on D_bal: the batch's statistics, also updating the buffers, or the running ones",
    )
    prototype_weights: Literal["uniform", "count"] = Field(
        "uniform", description="average prototypes over clients alike, or by their examples of the class"
    )
    prototype_view: Literal["plain", "augmented"] = Field(
        "plain", description="make prototypes from the examples as they are, or from an augmented view"
    )
    max_age: int | None = Field(None, ge=0, le=10**9, description="do not use prototypes older than this many rounds")
    prototype_clip: float | None = Field(
        None, gt=0, le=LARGEST, description="longest prototype of a class, weight and bias together"
    )
    prototype_noise: float = Field(
        0.0,
        ge=0,
        le=LARGEST,
        description="noise on each class's sum of prototypes, in multiples of prototype_clip, and on their number",
    )
    use_prototypes: bool = Field(True, description="ablation: serve missing classes by prototypes")
    use_real_data: bool = Field(True, description="ablation: serve classes by real examples")
    two_stream: bool = Field(True, description="ablation: train the second classifier W_hat")

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "released": {
            "placement": "after_step",
            "norm": "per_tensor",
            "clip_norm": 1.0,
            "unseen": "mean",
            "balanced_stats": "batch_update",
            "prototype_view": "augmented",
        },
        "private": PRIVATE,
    }

    assumes: ClassVar[str] = "class presence may be seen"
    noised: ClassVar[bool] = True
    summable: ClassVar[bool] = True
    class_group: ClassVar[str] = "prototypes"
    fidelity: ClassVar[str] = (
        "from the paper, with the preset `released` after the authors' code; docs/paper.md lists every choice"
    )

    @model_validator(mode="after")
    def _threshold_counts_examples(self) -> Self:
        if math.isfinite(self.threshold) and self.threshold != int(self.threshold):
            raise ValueError(f"threshold is {self.threshold}; it counts examples: pass a whole number or inf")
        return self

    @model_validator(mode="after")
    def _noise_on_prototypes(self) -> Self:
        if self.prototype_noise and self.prototype_clip is None:
            raise ValueError(
                f"prototype_noise is {self.prototype_noise:g}, and prototypes have any length; set prototype_clip too"
            )
        if self.prototype_clip is not None:
            for name in ("aggregation", "prototype_weights"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} is {value}, and prototype_clip is for plain means")
        return self

    def mechanisms(self, num_classes: int) -> list[Mechanism]:
        if not self.dp_noise and not (self.use_prototypes and self.prototype_noise):
            return []
        model = Mechanism("model", self.dp_noise, 1)
        # A client may hold every class. Of each, the sum of prototypes and the number of clients are let out.
        return (
            [model, Mechanism("prototypes", self.prototype_noise, 2 * num_classes)] if self.use_prototypes else [model]
        )

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        W = classifier_of(model)
        C = site.num_classes
        server: dict[str, Any] = {
            "model": model,
            "prototypes": {name: w.new_zeros(C, *w.shape) for name, w in W.items()},
            "seen": torch.zeros(C, dtype=torch.bool),
            "age": torch.zeros(C, dtype=torch.int64),  # rounds since the class's prototype was made
        }
        if self.two_stream:
            server["W_hat"] = self._first_W_hat(W, site)
        return server

    def _first_W_hat(self, W: Tensors, site: ServerSite) -> Tensors:
        match self.extra_init:
            case "zeros":
                return {name: torch.zeros_like(w) for name, w in W.items()}
            case "copy":
                return {name: w.clone() for name, w in W.items()}
            case "default":  # nn.Linear's own: uniform within 1 / sqrt(d), weight and bias alike
                bound, generator = 1 / math.sqrt(W["weight"].shape[1]), site.generator("W_hat")
                return {name: torch.empty_like(w).uniform_(-bound, bound, generator=generator) for name, w in W.items()}

    def broadcast(self, server: Tree) -> Tree:
        sent = {"model": server["model"], "seen": self._usable(server), "prototypes": server["prototypes"]}
        return sent | ({"W_hat": server["W_hat"]} if self.two_stream else {})

    def _usable(self, server: Tree) -> Tensor:
        """The classes that have a prototype, and not too old a one."""
        seen: Tensor = server["seen"]
        return seen if self.max_age is None else seen & (server["age"] <= self.max_age)

    def real_classes(self, site: ClientSite) -> Tensor:
        """The mask of L_bal: the classes of which the client holds at least T examples."""
        counts = torch.bincount(site.data.labels, minlength=site.num_classes)
        return counts >= self.threshold if self.use_real_data else torch.zeros_like(counts, dtype=torch.bool)

    def told_beside_gradients(self) -> list[str]:
        counts = "the number of examples behind every class that is reported"
        return [counts] if self.prototype_weights == "count" else []

    @property
    def reports_classes(self) -> bool:
        return self.use_prototypes

    def why_not_summed(self) -> str | None:
        if self.prototype_clip is not None:
            return "prototype_clip shortens single prototypes at the server"
        return super().why_not_summed()

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        """Algorithm 1."""
        net = self.load_for_training(broadcast["model"], site)
        W, W_hat = net.classifier, linear_like(net.classifier, broadcast.get("W_hat"))
        prototypes = self._local_prototypes(net, site)  # line 1
        balance = Balance(self, broadcast, net, site)
        optimizer = self.make_optimizer([*net.parameters(), *W_hat.parameters()], site)
        total = torch.zeros((), dtype=W.weight.dtype, device=site.device)
        for x, y in self.batches(site, net):  # line 2
            optimizer.zero_grad()
            h = net.encoder(x)
            z = W(h) + W_hat(h) if self.two_stream else W(h)
            loss = F.cross_entropy(z, y)
            loss.backward()  # lines 3 and 4: Eq. (6), (7); every gradient is taken before any parameter moves
            pull = balance.pull()  # line 5 and the second term of Eq. (12)
            if self.placement == "in_gradient":  # line 6
                for name, p in W.named_parameters():
                    p.grad += pull[name]  # type: ignore[operator]  # backward() has filled it
            self.step(optimizer)
            if self.placement == "after_step":
                with torch.no_grad():
                    for name, p in W.named_parameters():
                        p.sub_(pull[name], alpha=self.learning_rate(site))
            total += loss.detach() * len(y)
        update = client_report(net, broadcast["model"], len(site.data), total / (self.epochs * len(site.data)))
        update["prototypes"] = prototypes
        if self.two_stream:
            update["delta_W_hat"] = tree.sub(parameters_of(W_hat), broadcast["W_hat"])
        return update, state  # line 8

    def _local_prototypes(self, net: Net, site: ClientSite) -> Tree:
        """Eq. (10) for each class of which the client holds min_count examples: their numbers as `classes`, and the
        mean gradients weight [m, C, d] and bias [m, C]. W alone, evaluation mode, one forward pass."""
        labels = site.data.labels
        counts = torch.bincount(labels, minlength=site.num_classes)
        sent = self.reported(counts)
        classes = sent.nonzero().flatten()
        view = site.generator("prototype view") if self.prototype_view == "augmented" else None

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for rows in sent[labels].nonzero().flatten().split(_PROTOTYPE_BATCH):
                x = site.inputs(rows, net.classifier.weight.dtype, view)
                yield features(net.encoder, x, "running"), labels[rows].to(site.device)

        gradients = class_mean_gradients(net.classifier, batches(), classes.to(site.device))
        prototypes = {"classes": classes, **{name: g.cpu() for name, g in gradients.items()}}
        return prototypes | ({"counts": counts[classes]} if self.prototype_weights == "count" else {})

    def update_like(self, server: Tree, site: ServerSite) -> Tree:
        row = {name: g[0] for name, g in server["prototypes"].items()}
        signed = never_negative(site.load(server["model"]).encoder)
        rows = class_rows(row, counted=self.prototype_weights == "count", gradients=True, signed=signed)
        like = {**super().update_like(server, site), "prototypes": rows}
        return like | ({"delta_W_hat": server["W_hat"]} if self.two_stream else {})

    def server_update(self, server: Tree, updates: Mapping[ClientId, Tree], site: ServerSite) -> Tree:
        prototypes, held = self._global_prototypes(server["prototypes"], updates, site)
        new: dict[str, Any] = {
            "model": self.averaged_model(server["model"], updates, site),  # Eq. (13)
            "prototypes": prototypes,  # Eq. (14)
            "seen": server["seen"] | held,
            "age": torch.where(held | ~server["seen"], 0, server["age"] + 1),
        }
        if self.two_stream:  # Eq. (13) again
            answers = list(updates.values())
            moved = self.mean_delta(answers, sample_weights(answers), "delta_W_hat", site)
            new["W_hat"] = tree.add(server["W_hat"], moved, self.server_lr)
        return new

    def _global_prototypes(
        self, old: Tensors, updates: Mapping[ClientId, Tree], site: ServerSite | None = None
    ) -> tuple[Tensors, Tensor]:
        """Eq. (14): the mean over the clients that report a class; and which classes have a new one. The old prototype
        stays where fewer than min_clients do."""
        sent = [update["prototypes"] for update in updates.values()]
        if self.prototype_clip is not None:
            return self._noisy_prototypes(sent, old, self.prototype_clip, site)
        weights = [s["counts"] for s in sent] if self.prototype_weights == "count" else None
        if self.aggregation in _BY_CLASS:
            mean, held = self.mean_over_holders(sent, {name: g[0] for name, g in old.items()}, weights)
            mean = {name: torch.where(per_class(held, g), g, old[name]) for name, g in mean.items()}
        else:
            mean, held = mean_over_holders(sent, {name: g[0] for name, g in old.items()}, weights, old)
        released = held & (contributors(sent, len(held)) >= self.min_clients)
        for c in (held & ~released).nonzero().flatten().tolist():
            for name, g in mean.items():
                g[c] = old[name][c]
        return mean, released

    def _noisy_prototypes(
        self, sent: Sequence[Tree], old: Tensors, longest: float, site: ServerSite | None
    ) -> tuple[Tensors, Tensor]:
        """Eq. (14) with noise: for each class the sum of the prototypes, none longer than `longest`, and the number of
        clients get noise; the mean is their ratio, and released where that number with its noise reaches min_clients.
        Nothing else of the clients is used, so that nothing else is let out."""
        number = contributors(sent, len(old["weight"])).double()
        number = self.noisy({"number": number}, self.prototype_noise, "contributors", site)["number"]
        released = number >= self.min_clients
        new = {name: g.clone() for name, g in old.items()}
        for c in released.nonzero().flatten().tolist():
            total = clipped_sum([row_of(s, c, old) for s in sent if c in s["classes"]], longest, old)
            total = self.noisy(total, self.prototype_noise * longest, f"prototypes/{c}", site)
            for name, t in total.items():
                new[name][c] = (t / number[c]).to(new[name].dtype)
        return new, released

    def privacy(self) -> str:
        if not self.use_prototypes:
            return ""
        counts = " and how many examples of each" if self.prototype_weights == "count" else ""
        single = (
            "Where a client has one example of a class, the prototype is the gradient of that example alone, and the "
            "example's exact feature vector (the encoder's output) can be computed from it."
            if self.min_count == 1
            else f"They were sent from {self.min_count} examples of a class on, so that none is of a single example; "
            "a prototype still gives weighted means of its examples' feature vectors, and of fewer examples than there "
            "are classes every one of them."
        )
        passed_on = (
            "Where only one client of a round holds a class, all clients of the next round receive that client's "
            "prototype."
            if self.min_clients == 1
            else f"Clients received the mean for classes of which at least {self.min_clients} clients of a "
            "round had sent a prototype."
        )
        return (
            "In RedGrape a client also sends a gradient prototype for each of its classes. Gradient prototypes expose "
            f"which classes a client holds{counts}. {single} {passed_on} The prototypes are not in this folder."
        )

    def log(self, server: Tree, updates: Mapping[ClientId, Tree]) -> Mapping[str, Tensor]:
        sent = [update["prototypes"] for update in updates.values()]
        return {
            "prototype_seen": server["seen"],
            "prototype_age": server["age"],
            "class_contributors": contributors(sent, len(server["seen"])),
        }


class Balance:
    """The local balanced data set of one client and round, and the pull it has on W."""

    def __init__(self, method: RedGrape, broadcast: Tree, net: Net, site: ClientSite) -> None:
        self.method, self.net, self.site = method, net, site
        self.lam = method.lam * decay(method.lam_schedule, site.round, site.rounds, method.lam_final)
        self.draws, self.views = site.generator("balanced draw"), site.generator("balanced view")
        self.labels = site.data.labels
        real = method.real_classes(site)
        self.real_classes = real.nonzero().flatten()  # L_bal
        self.T = int(method.threshold) if len(self.real_classes) else 0
        self.constant = self._prototype_sum(broadcast, ~real)
        self.active = site.round > 1 and (len(self.real_classes) > 0 or bool((broadcast["seen"] & ~real).any()))
        self.drawn: tuple[Tensor, Tensor] | None = None

    def _prototype_sum(self, broadcast: Tree, missing: Tensor) -> Tensors:
        """sum over the classes outside L_bal of g_pro[c], the part of Eq. (11) that is constant over a round."""
        available = broadcast["seen"] & missing
        factor = 1.0
        if self.method.unseen == "mean" and available.any():  # each class without a prototype gets the others' mean
            factor = int(missing.sum()) / int(available.sum())
        total = table_sum(broadcast["prototypes"], available, self.net.classifier.weight.dtype)
        return {name: (g * factor).to(self.site.device) for name, g in total.items()}

    def _examples(self) -> tuple[Tensor, Tensor]:
        """D_bal: T examples of each class of L_bal, without replacement; one view of them for the whole round."""
        if self.drawn is None or self.method.balanced_draw == "step":
            rows = at_most(self.T, self.labels, self.draws)
            rows = rows[torch.isin(self.labels[rows], self.real_classes)]
            x = self.site.inputs(rows, self.net.classifier.weight.dtype, self.views)
            self.drawn = x, self.labels[rows].to(self.site.device)
        return self.drawn

    def pull(self) -> Tensors:
        """lambda g_bal ||g_local|| / ||g_bal||, the second term of Eq. (12), where g_local stands in W's .grad."""
        W = self.net.classifier
        g_local = {name: p.grad for name, p in W.named_parameters() if p.grad is not None}
        nothing = {name: torch.zeros_like(g) for name, g in g_local.items()}
        if not self.active or self.lam == 0:
            return nothing
        g_bal = self._balanced_gradient()
        if self.method.norm == "joint":
            local, balanced = tree.norm(g_local.values()), tree.norm(g_bal.values())
            return {name: _scaled(self.lam, g, local, balanced) for name, g in g_bal.items()}
        return {name: _scaled(self.lam, g, g_local[name].norm(), g.norm()) for name, g in g_bal.items()}

    def _balanced_gradient(self) -> Tensors:
        """g_bal, Eq. (11). Every class of L_bal has T examples, so the sum of the classes' mean gradients (Eq. 8) is
        the sum over D_bal divided by T: one forward pass, no graph, W alone."""
        C = self.site.num_classes
        if not len(self.real_classes):
            return {name: g / C for name, g in self.constant.items()}
        x, y = self._examples()
        real = summed_gradient(self.net.classifier, features(self.net.encoder, x, self.method.balanced_stats), y)
        return {name: (g / self.T + self.constant[name]) / C for name, g in real.items()}


def _scaled(lam: float, g_bal: Tensor, local: Tensor, balanced: Tensor) -> Tensor:
    """lambda g_bal ||g_local|| / ||g_bal||, and zero where g_bal has no direction."""
    usable = torch.isfinite(balanced) & (balanced >= _TINY)
    return torch.where(usable, lam * (local / balanced.clamp(min=_TINY)) * g_bal, torch.zeros_like(g_bal))


def row_of(sent: Tree, c: int, table: Tensors) -> Tensors:
    """A client's prototype of class c, in float64."""
    row = (sent["classes"] == c).nonzero().flatten()
    return {name: sent[name][row].double()[0] for name in table}


def clipped_sum(prototypes: Sequence[Tensors], longest: float, table: Tensors) -> Tensors:
    """The sum of one class's prototypes, each shortened to `longest` where it is longer; zero where there are none."""
    total = {name: torch.zeros(g.shape[1:], dtype=torch.float64) for name, g in table.items()}
    for prototype in prototypes:
        length = float(tree.norm(prototype.values()))
        for name, t in prototype.items():
            total[name] += t * min(1.0, longest / length) if length > 0 else t
    return total


def classifier_of(model: Tensors) -> Tensors:
    """W of the paper among the model's named tensors, by the names `weight` and `bias`."""
    return {name.removeprefix("classifier."): t for name, t in model.items() if name.startswith("classifier.")}


def parameters_of(classifier: nn.Linear) -> Tensors:
    return {name: p.detach().cpu() for name, p in classifier.named_parameters()}


def linear_like(classifier: nn.Linear, values: Tensors | None) -> nn.Linear:
    """A second classifier of the same shape with these values; one that is not trained where there are none."""
    twin: nn.Linear = nn.utils.skip_init(
        nn.Linear,
        classifier.in_features,
        classifier.out_features,
        bias=classifier.bias is not None,
        device=classifier.weight.device,
        dtype=classifier.weight.dtype,
    )
    if values is None:
        return twin.requires_grad_(False)
    twin.load_state_dict(values)
    return twin
