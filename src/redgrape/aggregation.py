"""What averaging methods send, and how the server averages it: the one place where it does.

An update of theirs holds `delta` (new minus old, trained parameters only), `buffers` (values such as BatchNorm's
running statistics), `count` (examples trained on) and `loss` (their mean training loss).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from redgrape import robust, tree
from redgrape.classifier_gradients import mean_over_holders
from redgrape.errors import ConfigError
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree

if TYPE_CHECKING:
    from redgrape.method import ClientId, Site


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
        None, gt=0, allow_inf_nan=False, description="longest update with norm_clipping; none: a round's median length"
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
                return {clients[i]: answers[i] for i in chosen}
            case "norm_clipping":
                return dict(zip(clients, robust.clip(answers, self.update_norm), strict=True))
            case _:
                return updates

    def mean_delta(self, updates: Sequence[Tree], weights: Sequence[float], group: str = "delta") -> Tensors:
        """The average of one group of the updates, in the order of the clients' ids."""
        groups = [u[group] for u in updates]
        match self.aggregation:
            case "median":
                return robust.median(groups)
            case "trimmed_mean":
                return robust.trimmed_mean(groups, self.byzantine)
            case _:
                return tree.weighted_mean(groups, weights)

    def mean_buffers(self, updates: Sequence[Tree], weights: Sequence[float]) -> Tensors:
        """Running statistics averaged like parameters; integers (BatchNorm's batch counter) by their maximum. They are
        values and have no length to clip: norm clipping takes their median."""
        groups: list[Tensors] = [u.get("buffers", {}) for u in updates]
        match self.aggregation:
            case "median" | "norm_clipping":
                return robust.median(groups)
            case "trimmed_mean":
                return robust.trimmed_mean(groups, self.byzantine)
        integers = [name for name, t in groups[0].items() if not t.is_floating_point()]
        floats = [{name: t for name, t in g.items() if t.is_floating_point()} for g in groups]
        return tree.weighted_mean(floats, weights) | {
            name: torch.stack([g[name] for g in groups]).amax(dim=0) for name in integers
        }

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


def delta(net: Net, start: Tensors) -> Tensors:
    """theta_k - theta, for the parameters that were trained."""
    return {name: p.detach().cpu() - start[name] for name, p in net.named_parameters() if p.requires_grad}


def buffers(net: Net) -> Tensors:
    """Values that are not trained but follow the training, such as running statistics; none of a frozen encoder."""
    if not net.encoder.training or next(net.buffers(), None) is None:
        return {}
    parameters = {name for name, _ in net.named_parameters()}
    return {name: t.detach().cpu().clone() for name, t in net.state_dict().items() if name not in parameters}


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
