"""What averaging methods send, and how the server averages it: the one place where it does.

An update of theirs holds `delta` (new minus old, trained parameters only), `buffers` (values such as BatchNorm's
running statistics), `count` (examples trained on) and `loss` (their mean training loss).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor

from redgrape import robust, tree
from redgrape.acceptance import MOST_EXAMPLES, UpdateRejected
from redgrape.accounting import Mechanism, check_installed
from redgrape.classifier_gradients import mean_over_holders
from redgrape.errors import ConfigError
from redgrape.nets.net import Net
from redgrape.noise import with_noise
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST

if TYPE_CHECKING:
    from redgrape.method import ClientId, ServerSite, Site


class Averaging(BaseModel):
    """How the server averages, which every averaging method can be told: docs/robust.md says what each rule promises.

    Krum and norm clipping act on the updates before the method sees them (`counted`); median and trimmed mean take the
    place of the weighted mean. So all groups of an update are treated alike, and a client is in or out as a whole.
    """

    aggregation: robust.Rule = Field("mean", description="average of the clients' updates; all but mean are robust")
    byzantine: int = Field(
        1, ge=1, le=10**6, description="malicious clients a round that the robust aggregations are to withstand"
    )
    update_norm: float | None = Field(
        None, gt=0, le=LARGEST, description="longest update with norm_clipping; none: a round's median length"
    )
    dp_clip: float | None = Field(
        None, gt=0, le=LARGEST, description="longest update of a client; clients then count alike"
    )
    dp_noise: float = Field(
        0.0, ge=0, le=LARGEST, description="noise on the sum of the updates, in multiples of dp_clip"
    )
    dp_delta: float = Field(1e-5, gt=0, lt=1, description="the delta at which epsilon is told")
    dp_randomness: Literal["secret", "seed"] = Field(
        "secret", description="noise from a key that only the server has, or from the seed, which anybody can repeat"
    )

    noised: ClassVar[bool] = False  # whether all that its server lets out comes from averages that can get noise
    summable: ClassVar[bool] = False  # whether its server half needs only sums over the clients; an heir must say so

    @model_validator(mode="after")
    def _noise_covers_what_is_let_out(self) -> Self:
        if self.dp_noise and self.dp_clip is None:
            raise ValueError(f"dp_noise is {self.dp_noise:g}, and updates have any length; set dp_clip as well")
        if self.dp_clip is not None and self.aggregation != "mean":
            raise ValueError(f"aggregation is {self.aggregation}, and dp_clip bounds a mean; choose one of them")
        if self.dp_noise and not vars(type(self)).get("noised", False):  # an heir may let out more: it must say so
            raise ValueError(
                f"dp_noise is {self.dp_noise:g}, and this method's server lets out more than an average with noise; "
                "redgrape, fedavg, fedavgm, fedopt, fedprox and fed_focal can have it"
            )
        return self

    def mechanisms(self, num_classes: int) -> list[Mechanism]:
        """What a client's data go through in a round, with its noise; none where there is no noise at all."""
        return [Mechanism("model", self.dp_noise, 1)] if self.dp_noise else []

    def check_noise(self, *, has_statistics: bool) -> None:
        """Raise ConfigError where the noise could not keep what it promises: clients of a net that `has_statistics`
        send them as they are."""
        if not self.mechanisms(1):
            return
        check_installed()
        if has_statistics:
            raise ConfigError(
                "this net has running statistics (BatchNorm), which are averaged without noise; choose another net, "
                "or method.dp_noise=0"
            )

    def fewest_answers(self) -> int:
        return robust.fewest_updates(self.aggregation, self.byzantine, self.update_norm)

    def check_clients(self, clients: int) -> None:
        if clients < self.fewest_answers():
            raise ConfigError(
                f"method.aggregation is {self.aggregation}, and against byzantine={self.byzantine} it needs "
                f"{self.fewest_answers()} clients a round; there are {clients}: lower byzantine or ask more clients"
            )

    def counted(self, updates: Mapping[ClientId, Tree]) -> Mapping[ClientId, Tree]:
        """The updates as they enter the average."""
        clients, answers = list(updates), list(updates.values())
        match self.aggregation:
            case "krum" | "multi_krum":
                chosen = robust.krum(answers, self.byzantine, several=self.aggregation == "multi_krum")
                # Distances are between directions. Statistics have none: those of the chosen could be anything.
                buffers = robust.median([update.get("buffers", {}) for update in answers])
                return {clients[i]: {**answers[i], **({"buffers": buffers} if buffers else {})} for i in chosen}
            case "norm_clipping":
                return dict(zip(clients, robust.clip(answers, self.update_norm), strict=True))
            case _ if self.dp_clip is not None:
                return dict(zip(clients, robust.clip(answers, self.dp_clip), strict=True))
            case _:
                return updates

    def why_not_summed(self) -> str | None:
        if not vars(type(self)).get("summable", False):
            return "its server needs more of the clients than sums"
        if self.aggregation != "mean":
            return f"aggregation={self.aggregation} compares single updates"
        if self.dp_clip is not None:
            return "dp_clip shortens single updates at the server"
        return None

    def counts_alike(self, group: str) -> bool:
        """Whether the server's mean of this group of the updates counts clients alike, and not by their examples."""
        return False

    def summand(self, update: Tree) -> dict[str, Any]:
        """n_k, and every group of the update times its weight in the mean: n_k, or one."""
        n = int(update["count"])
        weighted = {
            group: _scaled(value, 1 if self.counts_alike(group) else n)
            for group, value in update.items()
            if group != "count"
        }
        return {**weighted, "count": update["count"]}

    def stand_ins(self, total: Tree, clients: Sequence[ClientId], dtype: torch.dtype) -> dict[ClientId, Tree]:
        """The mean for each client."""
        number, n = len(clients), int(total["count"])
        if not number <= n <= number * MOST_EXAMPLES:
            raise UpdateRejected(f"'count' is {n} in all; {number} clients have at least one example each")
        mean = {
            group: _mean(value, number if self.counts_alike(group) else n, dtype)
            for group, value in total.items()
            if group != "count"
        }
        return {k: {**mean, "count": torch.tensor(n // number)} for k in clients}

    def mean_delta(
        self, updates: Sequence[Tree], weights: Sequence[float], group: str = "delta", site: ServerSite | None = None
    ) -> Tensors:
        """The average of one group of the updates, in the order of the clients' ids. Noise needs the site."""
        groups = [u[group] for u in updates]
        if self.dp_clip is not None:  # all groups of an update together are no longer than that: see `counted`
            mean = tree.weighted_mean(groups, [1.0] * len(groups))
            return self.noisy(mean, self.dp_noise * self.dp_clip / len(groups), group, site)
        match self.aggregation:
            case "median":
                return robust.median(groups)
            case "trimmed_mean":
                return robust.trimmed_mean(groups, self.byzantine)
            case _:
                return tree.weighted_mean(groups, weights)

    def noisy(self, means: Tensors, deviation: float, purpose: str, site: ServerSite | None) -> Tensors:
        if deviation == 0:
            return means
        assert site is not None, "noise is drawn at a site"
        key = site.noise_key(self.dp_randomness)
        return {name: with_noise(t, deviation, key, purpose, name, site.round) for name, t in means.items()}

    def mean_buffers(self, updates: Sequence[Tree], weights: Sequence[float]) -> Tensors:
        """Running statistics averaged like parameters. They are values and have no length to clip: norm clipping takes
        their median."""
        groups: list[Tensors] = [u.get("buffers", {}) for u in updates]
        match self.aggregation:
            case "median" | "norm_clipping":
                return robust.median(groups)
            case "trimmed_mean":
                return robust.trimmed_mean(groups, self.byzantine)
        return tree.weighted_mean(groups, weights)

    def mean_over_holders(
        self, sent: Sequence[Tensors], classifier: Tensors, weights: Sequence[Tensor] | None = None
    ) -> tuple[Tensors, Tensor]:
        """The average of the clients' class gradients over those that hold a class, and which classes have one."""
        match self.aggregation:
            case "median":
                return robust.over_holders(sent, classifier, self.byzantine, robust.median)
            case "trimmed_mean":
                trimmed = partial(robust.trimmed_mean, trim=self.byzantine)
                return robust.over_holders(sent, classifier, self.byzantine, trimmed)
            case "norm_clipping":
                return mean_over_holders(robust.clip_by_class(sent, classifier), classifier, weights)
            case _:
                return mean_over_holders(sent, classifier, weights)


def _scaled(value: Any, weight: int) -> Any:
    """Weight times value, in float64 or in whole numbers."""
    if isinstance(value, Mapping):
        return {name: _scaled(t, weight) for name, t in value.items()}
    return weight * (value.double() if value.is_floating_point() else value)


def _mean(value: Any, weight: int, dtype: torch.dtype) -> Any:
    """Value divided by weight; a mean of whole numbers is rounded up."""
    if isinstance(value, Mapping):
        return {name: _mean(t, weight, dtype) for name, t in value.items()}
    return (value / weight).to(dtype) if value.is_floating_point() else -(-value // weight)


def delta(net: Net, start: Tensors) -> Tensors:
    """theta_k - theta, for the parameters that were trained."""
    return {name: p.detach().cpu() - start[name] for name, p in net.named_parameters() if p.requires_grad}


def buffers(net: Net) -> Tensors:
    """Values that are not trained but follow the training, such as running statistics; none of a frozen encoder. Whole
    numbers, such as BatchNorm's batch counter, say nothing of the data: the server keeps its own."""
    if not net.encoder.training or next(net.buffers(), None) is None:
        return {}
    parameters = {name for name, _ in net.named_parameters()}
    return {
        name: t.detach().cpu().clone()
        for name, t in net.state_dict().items()
        if name not in parameters and t.is_floating_point()
    }


def client_report(net: Net, start: Tensors, count: int, loss: Tensor) -> dict[str, Any]:
    """The update of an averaging method, to which it may add groups of its own."""
    return {
        "delta": delta(net, start),
        "buffers": buffers(net),
        "count": torch.tensor(count),
        "loss": loss.detach().cpu(),
    }


def zeros_like_parameters(model: Tensors, site: Site) -> Tensors:
    """A zero for every parameter of the model, and none for its buffers."""
    return {name: torch.zeros_like(model[name]) for name, _ in site.load(model).named_parameters()}


def sample_weights(updates: Sequence[Tree]) -> list[float]:
    """n_k, the examples that each client trained on."""
    return [float(update["count"]) for update in updates]
