"""What the server half of a method receives from a round: reductions over its clients, not their updates.

`FromUpdates` reduces by the rule of the exchange. `FromSum` has only a secure sum, and so only means. Both have the
same interface, so a method cannot tell which one it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from redgrape import tree
from redgrape.exchange import plausible, rules, tables
from redgrape.exchange.parts import (
    ClassRows,
    Count,
    Direction,
    Part,
    Parts,
    Scalar,
    Statistics,
    Sum,
    Weight,
    Weights,
    directions,
)
from redgrape.privacy.noise import with_noise
from redgrape.tree import Tensors, Tree

if TYPE_CHECKING:
    from redgrape.exchange.exchange import Exchange
    from redgrape.method import ClientId, ServerSite


class Received(ABC):
    """A round's answers, reduced. `clients`: those with an accepted answer, in order of their ids."""

    def __init__(self, exchange: Exchange, parts: Parts, clients: Sequence[ClientId], site: ServerSite) -> None:
        self.exchange, self.parts, self.clients, self.site = exchange, parts, list(clients), site

    def mean(self, part: str, weights: Sequence[float] | None = None) -> Tensors:
        """The mean of a Direction or of Statistics. `weights`: each client's weight, from a method that needs single
        updates and decides it itself. By default the part decides; weights are equal if updates are clipped."""
        described = self.parts[part]
        mean = self._mean(part, described, weights)
        if isinstance(described, Direction):
            return self._noisy(mean, self.exchange.deviation / len(self.clients), part)
        return mean

    def total(self, part: str) -> Tensors:
        """The total of a Sum; real numbers in float64."""
        total = self._total(part)
        real = {name: t for name, t in total.items() if t.is_floating_point()}
        return total | self._noisy(real, self.exchange.deviation, part)

    def statistics(self) -> Tensors:
        """The means of all running statistics, by their names in the model."""
        groups = [self.mean(name) for name, part in self.parts.items() if isinstance(part, Statistics)]
        return {name: t for group in groups for name, t in group.items()}

    def moved(self, model: Tensors, lr: float) -> Tensors:
        """model + lr mean(delta), with the means of its running statistics."""
        return {**tree.add(model, self.mean("delta"), lr), **self.statistics()}

    def table(self, part: str, old: Tensors | None = None) -> tuple[Tensors, Tensor]:
        """For each class the mean of ClassRows over the clients that report it, and the mask of released classes. A
        class that is not released keeps its row of `old` (None: zeros)."""
        described = self.parts[part]
        assert isinstance(described, ClassRows)
        old = tables.empty(described.like, self.site.num_classes) if old is None else old
        if self.exchange.class_clip is not None:
            return self._noisy_table(part, described, old)
        means, released = self._rows(part, described, old), self.released(part)
        for c in ((self.contributors(part) > 0) & ~released).nonzero().flatten().tolist():
            for name, t in means.items():
                t[c] = old[name][c]
        return means, released

    def _noisy_table(self, part: str, described: ClassRows, old: Tensors) -> tuple[Tensors, Tensor]:
        """Add noise to the sum of each class's rows, none longer than class_clip, and to the number of its clients. The
        mean is their ratio. Nothing else from the clients is used, so nothing else is released."""
        number, released = self._number(part), self.released(part)
        new = {name: t.clone() for name, t in old.items()}
        for c in released.nonzero().flatten().tolist():
            total = self._noisy(self._clipped_row(part, described, c), self.exchange.class_deviation, f"{part}/{c}")
            for name, t in total.items():
                new[name][c] = (t / number[c]).to(new[name].dtype)
        return new, released

    def released(self, part: str) -> Tensor:
        """The mask of the classes that enough clients report: min_clients, or as many as the rule needs."""
        return self._number(part) >= self.exchange.fewest_contributors()

    def _number(self, part: str) -> Tensor:
        """The number of clients that report each class, with noise if the class rows get noise."""
        number = self.contributors(part).double()
        noise = self.exchange.class_noise if self.exchange.class_clip is not None else 0.0
        return self._noisy({"number": number}, noise, "contributors")["number"]

    def _noisy(self, values: Tensors, deviation: float, purpose: str) -> Tensors:
        if deviation == 0:
            return values
        key = self.site.noise_key(self.exchange.randomness)
        return {name: with_noise(t, deviation, key, purpose, name, self.site.round) for name, t in values.items()}

    def record(self) -> dict[str, Any]:
        """The figures about the answers in a round's record."""
        found: dict[str, Any] = self._losses() if "loss" in self.parts else {"train_loss": None}
        for name, part in self.parts.items():
            if isinstance(part, ClassRows):
                found["class_contributors"] = self.contributors(name).tolist()
                found["class_released"] = self.released(name).tolist()
        return found

    @abstractmethod
    def each(self, part: str) -> Mapping[ClientId, Any]:
        """Each client's own part, for a method that says why it needs single updates."""

    @abstractmethod
    def _losses(self) -> dict[str, Any]:
        """The mean of the clients' training losses, weighted by examples, and which losses were capped as
        implausible."""

    @abstractmethod
    def contributors(self, part: str) -> Tensor:
        """How many clients report each class [C]."""

    @abstractmethod
    def num_bytes(self) -> int:
        """The number of bytes that the clients sent."""

    @abstractmethod
    def _mean(self, part: str, described: Part, weights: Sequence[float] | None) -> Tensors: ...

    @abstractmethod
    def _total(self, part: str) -> Tensors: ...

    @abstractmethod
    def _rows(self, part: str, described: ClassRows, old: Tensors) -> Tensors:
        """The mean row of each class that somebody reports; the row of `old` for the others."""

    @abstractmethod
    def _clipped_row(self, part: str, described: ClassRows, c: int) -> Tensors:
        """The sum of the clients' rows of a class, none longer than class_clip, in float64."""


class FromUpdates(Received):
    """Reductions over the clients' updates, which may lie on disk."""

    def __init__(self, exchange: Exchange, parts: Parts, updates: Mapping[ClientId, Tree], site: ServerSite) -> None:
        accepted, names = list(updates.values()), directions(parts)
        clients, counted = list(updates), accepted
        match exchange.rule:
            case "krum" | "multi_krum":
                chosen = rules.krum(accepted, names, exchange.byzantine, several=exchange.rule == "multi_krum")
                clients, counted = [clients[i] for i in chosen], [accepted[i] for i in chosen]
            case "norm_clipping":
                counted = rules.clip(accepted, names, exchange.update_norm)
            case _ if exchange.clip is not None:
                counted = rules.clip(accepted, names, exchange.clip)
        super().__init__(exchange, parts, clients, site)
        self._answered, self._accepted, self._counted = list(updates), accepted, counted

    def each(self, part: str) -> Mapping[ClientId, Any]:
        values = [update.get(part, {}) for update in self._counted]
        if isinstance(self.parts.get(part), Scalar):
            most = plausible.most([float(number) for number in values], self.site.num_classes)
            values = [number.clamp(-most, most) for number in values]
        return dict(zip(self.clients, values, strict=True))

    def _losses(self) -> dict[str, Any]:
        claimed, examples = [float(u["loss"]) for u in self._accepted], _examples(self._accepted)
        most = plausible.most(claimed, self.site.num_classes)
        mean = sum(max(-most, min(loss, most)) * n for loss, n in zip(claimed, examples, strict=True)) / sum(examples)
        capped = {str(k): loss for k, loss in zip(self._answered, claimed, strict=True) if abs(loss) > most}
        return {"train_loss": mean, **({"capped_loss": capped} if capped else {})}

    def contributors(self, part: str) -> Tensor:
        return tables.contributors([update[part] for update in self._counted], self.site.num_classes)

    def num_bytes(self) -> int:
        return sum(tree.num_bytes(update) for update in self._accepted)

    def _mean(self, part: str, described: Part, weights: Sequence[float] | None) -> Tensors:
        groups: list[Tensors] = [update.get(part, {}) for update in self._counted]
        if isinstance(described, Statistics):
            return self._mean_statistics(part, groups)
        match self.exchange.rule:
            case "median":
                return rules.median(groups)
            case "trimmed_mean":
                return rules.trimmed_mean(groups, self.exchange.byzantine)
        assert isinstance(described, Direction)
        chosen = self.exchange.weights(described)
        if chosen == "alike" or weights is None:
            weights = [weight_of(update, chosen) for update in self._counted]
        return tree.weighted_mean(groups, weights)

    def _mean_statistics(self, part: str, groups: Sequence[Tensors]) -> Tensors:
        """Statistics are values without a length to clip or compare, so rules based on lengths and distances take the
        median of all clients."""
        match self.exchange.rule:
            case "mean":
                return tree.weighted_mean(groups, _examples(self._counted))
            case "trimmed_mean":
                return rules.trimmed_mean(groups, self.exchange.byzantine)
            case _:
                return rules.median([update.get(part, {}) for update in self._accepted])

    def _total(self, part: str) -> Tensors:
        groups: list[Tensors] = [update[part] for update in self._counted]
        total: Tensors = {}
        for name, first in groups[0].items():
            exact = torch.zeros(first.shape, dtype=torch.float64 if first.is_floating_point() else first.dtype)
            for group in groups:
                exact += group[name]
            total[name] = exact
        return total

    def _rows(self, part: str, described: ClassRows, old: Tensors) -> Tensors:
        sent: Sequence[Tree] = [update[part] for update in self._counted]
        weights = [rows["counts"] for rows in sent] if described.weights == "count" else None
        exchange, fewest = self.exchange, self.exchange.fewest_contributors()
        match exchange.rule:
            case "median":
                return tables.over_holders(sent, old, fewest, rules.median)
            case "trimmed_mean":
                return tables.over_holders(sent, old, fewest, partial(rules.trimmed_mean, trim=exchange.byzantine))
            case "norm_clipping":
                sent = list(tables.clip_by_class(sent, described.like, self.site.num_classes))
        return tables.mean_over_holders(sent, old, weights)

    def _clipped_row(self, part: str, described: ClassRows, c: int) -> Tensors:
        assert self.exchange.class_clip is not None
        sent: list[Tree] = [update[part] for update in self._counted]
        total = {name: torch.zeros(t.shape, dtype=torch.float64) for name, t in described.like.items()}
        for rows in sent:
            place = (rows["classes"] == c).nonzero().flatten()
            if len(place):
                row = tables.clipped({n: t[place] for n, t in rows.items()}, described.like, self.exchange.class_clip)
                for name in total:
                    total[name] += row[name][0]
        return total


def weight_of(update: Tree, weights: Weights) -> float:
    """A client's weight in a mean. By examples it is n_k, or one if the method has no count."""
    match weights:
        case "alike":
            return 1.0
        case "examples":
            return float(update.get("count", 1))
        case "sent":
            return float(update["weight"])


def _examples(updates: Sequence[Tree]) -> list[float]:
    return [weight_of(update, "examples") for update in updates]


class FromSum(Received):
    """Means from the sum of the clients' summands. A secure sum gives it in float64 and whole numbers."""

    def __init__(
        self, exchange: Exchange, parts: Parts, total: Tree, clients: Sequence[ClientId], site: ServerSite
    ) -> None:
        super().__init__(exchange, parts, clients, site)
        self._sum = total

    def each(self, part: str) -> Mapping[ClientId, Any]:
        raise AssertionError("a secure sum has no single updates; the exchange refuses methods that need them")

    def _losses(self) -> dict[str, Any]:
        return {"train_loss": float(self._sum["loss"]) / self._examples}

    def contributors(self, part: str) -> Tensor:
        number: Tensor = self._sum[part]["clients"]
        return number

    def num_bytes(self) -> int:
        return len(self.clients) * tree.num_bytes(self._sum)

    @property
    def _examples(self) -> int:
        return int(self._sum["count"]) if "count" in self._sum else len(self.clients)

    def _mean(self, part: str, described: Part, weights: Sequence[float] | None) -> Tensors:
        assert weights is None and isinstance(described, Direction | Statistics)
        match self.exchange.weights(described):
            case "alike":
                weight = float(len(self.clients))
            case "examples":
                weight = float(self._examples)
            case "sent":
                weight = float(self._sum["weight"])
        return {name: (self._sum[part][name] / weight).to(like.dtype) for name, like in described.like.items()}

    def _total(self, part: str) -> Tensors:
        described = self.parts[part]
        assert isinstance(described, Sum)
        return {name: self._sum[part][name] for name in described.like}

    def _rows(self, part: str, described: ClassRows, old: Tensors) -> Tensors:
        sums, clients = self._sum[part], self.contributors(part)
        weights = sums.get("counts", clients)
        means: Tensors = {}
        for name, before in old.items():
            mean = (sums[name] / tables.per_class(weights.clamp(min=1), before)).to(before.dtype)
            means[name] = torch.where(tables.per_class(clients > 0, before), mean, before)
        return means

    def _clipped_row(self, part: str, described: ClassRows, c: int) -> Tensors:
        return {name: self._sum[part][name][c] for name in described.like}  # each was clipped at its site

    def mean_update(self) -> dict[str, Any]:
        """The mean of each part in the form that one client would send, to be checked like an update."""
        update: dict[str, Any] = {}
        for name, part in self.parts.items():
            match part:
                case Count():
                    update[name] = self._sum[name] // len(self.clients)
                case Weight():
                    # The sum is within its bound; the mean count is rounded down, so the mean may be above.
                    most = part.most * (self._examples // len(self.clients))
                    update[name] = (self._sum[name] / len(self.clients)).clamp(max=most)
                case Scalar():
                    update[name] = (self._sum[name] / self._examples).to(part.like.dtype)
                case Sum():
                    sums, n = self._sum[name], len(self.clients)
                    update[name] = {t: (sums[t] / n).to(like.dtype) for t, like in part.like.items()}
                case ClassRows():
                    clients = self.contributors(name)
                    classes = (clients > 0).nonzero().flatten()
                    rows = self._rows(name, part, tables.empty(part.like, self.site.num_classes))
                    update[name] = {"classes": classes, **{n: t[classes] for n, t in rows.items()}}
                    if part.weights == "count":
                        update[name]["counts"] = (self._sum[name]["counts"] // clients.clamp(min=1))[classes]
                case _:
                    update[name] = self._mean(name, part, None)
        return update
