"""The source of a method's class prior, as an independent option.

    local       every client uses its own class counts; nothing is sent
    global      the clients' counts, summed before the first round; a secure sum is enough
    estimated   from what the server sees anyway: how the first round's updates, which are trained without a prior,
                moved the classifier's bias and weights

The estimate. In the first steps the features say little, and a client's classifier mostly learns the class prior pi.
For a softmax with bias b and mean feature h, gradient steps move the bias by db = step (pi - p), and every row of the
weights by db times h. So class c's logit moves (1 + |h|^2) times as far as its bias. The update shows h itself: the
rows of dW are db_c h. The server then finds the pi whose simulated bias ends where the clients' average bias did.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from redgrape.errors import ConfigError
from redgrape.tree import Tensors, Tree

if TYPE_CHECKING:
    from redgrape.exchange import Received
    from redgrape.learning.local_training import LocalTraining
    from redgrape.method import ClientSite, ServerSite

PriorSource: TypeAlias = Literal["local", "global", "estimated"]

_ITERATIONS, _SLICES = 30, 200
_EPS = 1e-8  # a class without examples: its logit is pushed so low that it plays no role


@dataclass(frozen=True)
class Prior:
    """A source of the class prior, and its use at server and client."""

    source: PriorSource

    def check(self, method: LocalTraining, own: type[LocalTraining]) -> None:
        """Raise ValueError if the estimate would be silently wrong: it assumes plain sgd steps of one classifier.
        `own`: the class of the loss, which a combination inherits from."""
        plain = method.optimizer == "sgd" and method.clip_norm is None and not method.weight_decay
        if self.source == "estimated" and (not plain or type(method) is not own):
            raise ValueError(
                "prior=estimated needs sgd without clip_norm or weight_decay, and no combination; choose prior=global "
                "or local"
            )

    def survey(self, site: ClientSite) -> Tree:
        """A client's answer before the first round: its class counts if the prior is global."""
        return {"class_counts": site.class_counts} if self.source == "global" else {}

    def needs_single(self) -> str:
        return "prior=estimated looks at single updates; choose global or local" if self.source == "estimated" else ""

    def first(self, model: Tensors, site: ServerSite) -> Tensor:
        """The server's prior before the first round: shares [C], uniform if nothing is known."""
        if self.source == "estimated" and "classifier.bias" not in model:
            raise ConfigError("prior=estimated needs a classifier with a bias; choose prior=global or local")
        if self.source == "global":
            counts: Tensor = site.survey["class_counts"].double()
            return counts / counts.sum()
        return torch.full((site.num_classes,), 1 / site.num_classes, dtype=torch.float64)

    def next(self, prior: Tensor, received: Received, method: LocalTraining, site: ServerSite) -> Tensor:
        """The server's prior after a round: estimated once, from the round trained without a prior."""
        if self.source != "estimated" or site.round != 1:
            return prior
        total, examples = torch.zeros_like(prior), 0.0
        for delta, count in zip(received.each("delta").values(), received.each("count").values(), strict=True):
            walked = method.learning_rate(site) * method.effective_steps(method.steps(int(count)))
            total += float(count) * estimate_prior(delta["classifier.weight"], delta["classifier.bias"], walked)
            examples += float(count)
        share = total / total.sum()
        share[share < 1 / (2 * examples)] = 0  # less than half an example counts as none
        return share / share.sum()

    def log(self, prior: Tensor, site: ClientSite) -> Tensor:
        """log pi_c for a client's training. A class that the estimate missed may still exist: it gets half the share of
        the rarest class found."""
        if self.source == "estimated":
            prior = prior.clamp(min=float(prior[prior > 0].min()) / 2)
        return log_prior(site.class_counts if self.source == "local" else prior).to(site.device)


def log_prior(counts: Tensor) -> Tensor:
    """log pi_c from counts or shares; an empty class gets log 1e-8."""
    share = counts.double() / counts.double().sum()
    return torch.log(share.clamp(min=_EPS))


def post_hoc_shift(prior: Tensor) -> Tensor:
    """log pi_c for shifting trained logits. A class that nobody has counts as equal to the rarest class that somebody
    has: its own log would raise its logit so far that it always won."""
    share = prior.double() / prior.double().sum()
    return torch.log(share.clamp(min=float(share[share > _EPS].min())))


def estimate_prior(weight: Tensor, bias: Tensor, walked: float) -> Tensor:
    """pi from the changes `weight` [C, d] and `bias` [C] of a classifier that started with logits near zero. `walked`
    is the learning rate times the number of plain steps.

    The bias moved by the integral of pi - p over `walked`, so pi = bias / walked + the mean of p on the way. p on the
    way follows from pi. This is a fixed-point iteration, started at the final p.
    """
    moved = bias.double() - bias.double().mean()  # softmax ignores a common shift
    if walked <= 0 or float(moved.abs().max()) == 0:
        return torch.full_like(moved, 1 / len(moved))
    h = (moved[:, None] * weight.double()).sum(dim=0) / moved.square().sum()
    gain = 1 + float(h.square().sum())
    pi = torch.softmax(gain * moved, dim=0)
    for _ in range(_ITERATIONS):
        pi = (moved / walked + _mean_on_the_way(pi, gain, walked)).clamp(min=_EPS)
        pi = pi / pi.sum()
    return pi


def _mean_on_the_way(pi: Tensor, gain: float, walked: float) -> Tensor:
    """The mean of p = softmax(gain b) while b follows db = (pi - p) dt from zero over `walked`."""
    b, total = torch.zeros_like(pi), torch.zeros_like(pi)
    dt = walked / _SLICES
    # The step of an exponential integrator with the softmax's largest slope, 1/4: stable if gain * dt is large.
    rate = gain / 4
    step = (1 - math.exp(-rate * dt)) / rate
    for _ in range(_SLICES):
        p = torch.softmax(gain * b, dim=0)
        total += p
        b = b + step * (pi - p)
    return total / _SLICES


CountSource: TypeAlias = Literal["local", "global"]


@dataclass(frozen=True)
class Counts:
    """A source of the class counts n_c, for methods that need counts and not shares: the client's own, or the sum over
    all clients. The server keeps and sends the sum beside the model."""

    source: CountSource

    def survey(self, site: ClientSite) -> Tree:
        return {"class_counts": site.class_counts} if self.source == "global" else {}

    def first(self, site: ServerSite) -> Tree:
        """Its part of the server's first state."""
        return {"class_counts": site.survey["class_counts"]} if self.source == "global" else {}

    def kept(self, server: Tree) -> Tree:
        """Its part of the server's next state, and of the broadcast."""
        return {"class_counts": server["class_counts"]} if self.source == "global" else {}

    def of(self, broadcast: Tree, site: ClientSite) -> Tensor:
        counts: Tensor = broadcast["class_counts"] if self.source == "global" else site.class_counts
        return counts


def effective_number_weights(counts: Tensor, beta: float) -> Tensor:
    """1 / E_n = (1 - beta) / (1 - beta^n) of each class, in float64, with mean one over the classes that have examples;
    zero for those without."""
    number = counts.double()
    lost = -torch.expm1(number * math.log(beta)) if beta else torch.ones_like(number)  # 1 - beta^n
    weights = torch.where(number > 0, 1 / lost.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    return weights * ((number > 0).sum() / weights.sum())
