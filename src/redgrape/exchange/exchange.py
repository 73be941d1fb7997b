"""The exchange: what happens to an update between client and server, for every method.

At the client it drops the rows of classes below min_count. At the server it checks an update by its parts and reduces a
round's updates: by the rule, clipped, with noise. In a secure sum nobody sees single updates, so the client clips its
parts and adds them to the sum. A lying client is then not bounded.

The order is fixed. `refuses` is the one table of incompatible settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from redgrape.errors import ConfigError
from redgrape.exchange import checks, rules, tables
from redgrape.exchange.parts import (
    ClassRows,
    Count,
    Direction,
    Parts,
    Scalar,
    Statistics,
    Sum,
    Weight,
    Weights,
    class_rows,
    directions,
)
from redgrape.exchange.received import FromSum, FromUpdates, Received, weight_of
from redgrape.privacy.account import Mechanism, check_installed
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST, Strict, one_line

if TYPE_CHECKING:
    from redgrape.method import ClientId, ServerSite


_AS_SENT = ("mean", "krum", "multi_krum")  # rules that choose updates, or take all, and change none


class Exchange(Strict):
    """The section [exchange] of an experiment."""

    preset: Literal["plain", "private"] = Field("plain", description="defaults of the other settings")
    rule: rules.Rule = Field("mean", description="average of the clients' updates; all but mean are robust")
    byzantine: int = Field(1, ge=1, le=10**6, description="malicious clients per round that the rule must withstand")
    update_norm: float | None = Field(
        None, gt=0, le=LARGEST, description="longest update with norm_clipping; none: a round's median length"
    )
    clip: float | None = Field(
        None, gt=0, le=LARGEST, description="longest update of a client; clients then have equal weights"
    )
    noise: float = Field(0.0, ge=0, le=LARGEST, description="noise on the sum of the updates, in multiples of clip")
    delta: float = Field(1e-5, gt=0, lt=1, description="the delta at which epsilon is reported")
    randomness: Literal["secret", "seed"] = Field(
        "secret", description="noise from a key that only the server has, or from the seed, which anybody can repeat"
    )
    min_count: int = Field(1, ge=1, le=10**9, description="a client reports a class with at least this many examples")
    min_clients: int = Field(
        1, ge=1, le=10**6, description="the server releases a class only if this many clients report it"
    )
    class_clip: float | None = Field(
        None, gt=0, le=LARGEST, description="longest row of a class that a client reports, all its tensors together"
    )
    class_noise: float = Field(
        0.0,
        ge=0,
        le=LARGEST,
        description="noise on each class's sum of rows, in multiples of class_clip, and on their number",
    )

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {}, "private": {"min_count": 8, "min_clients": 3}}

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise one_line(error, type(self), "exchange") from error

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {**cls.presets.get(str(given.get("preset", "plain")), {}), **given}

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.noise and self.clip is None:
            raise ValueError(f"noise is {self.noise:g}, but updates are not bounded; set clip as well")
        if self.class_noise and self.class_clip is None:
            raise ValueError(
                f"class_noise is {self.class_noise:g}, but class rows are not bounded; set class_clip as well"
            )
        for name in ("clip", "class_clip"):
            if getattr(self, name) is not None and self.rule != "mean":
                raise ValueError(f"rule is {self.rule}, and {name} bounds a mean; choose one of them")
        return self

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise on a sum of updates."""
        return self.noise * (self.clip or 0.0)

    @property
    def class_deviation(self) -> float:
        return self.class_noise * (self.class_clip or 0.0)

    @property
    def is_noisy(self) -> bool:
        return bool(self.noise or self.class_noise)

    def weights(self, part: Direction | Statistics) -> Weights:
        """How clients are weighted in the mean of this part."""
        if isinstance(part, Statistics):
            return "examples"
        return part.weights if self.clip is None else "alike"

    def refuses(
        self, parts: Parts, *, single: str = "", surveys: bool = False, scaled: bool = False, summed: bool = False
    ) -> str | None:
        """Why the settings are incompatible, for every method; None if they are not. `single`: why the method needs
        single updates; `surveys`: it surveys clients before the first round; `scaled`: the clients' data decides how
        the inputs are scaled; `summed`: the updates come as a secure sum."""
        rows = class_rows(parts)
        if summed and single:
            return f"a secure sum shows no single updates, and {single}"
        if summed and self.rule != "mean":
            return f"a secure sum shows no single updates, and exchange.rule={self.rule} compares them"
        sums = [part for part in parts.values() if isinstance(part, Sum)]
        for part in sums:
            # A first message is a client's whole part, a later one only its change: their distance means nothing.
            # A lie that was taken once stays, and small ones add up.
            if part.running and self.rule != "mean":
                return (
                    f"a running sum keeps what a malicious client once added, and exchange.rule={self.rule} does not "
                    f"take it back; {part.instead}"
                )
            if part.running and self.clip is not None:
                return (
                    "clients keep track of what they add to a running sum, and exchange.clip would shorten it; "
                    f"{part.instead}"
                )
        if sums and self.rule in ("median", "trimmed_mean"):
            return (
                f"the server adds parts of the updates up, and exchange.rule={self.rule} gives no sum; choose another"
            )
        whole = any(not t.is_floating_point() for part in sums for t in part.like.values())
        if whole and (self.clip is not None or self.rule == "norm_clipping"):
            return "the server sums whole numbers of the updates, which cannot be clipped; choose another rule"
        if self.rule in ("norm_clipping", "multi_krum") and any(
            isinstance(p, Scalar) and p.weighs for p in parts.values()
        ):
            return (
                f"exchange.rule={self.rule} keeps the clients' weights, and in this method a client can get any weight "
                "by the loss that it claims; choose median or trimmed_mean"
            )
        steps = [part for part in parts.values() if isinstance(part, Direction)]
        if any(part.kept for part in steps) and (self.clip is not None or self.rule not in _AS_SENT):
            setting = "clip" if self.clip is not None else f"rule={self.rule}"
            return (
                f"clients keep what they send in their states, and exchange.{setting} changes it: the server's mean "
                "would no longer be that of the states; choose krum, multi_krum or another method"
            )
        weighed = any(isinstance(part, Scalar) and part.weighs for part in parts.values())
        if self.clip is not None and (weighed or any(part.weights == "sent" for part in steps)):
            return "the method weighs clients in its own way, and exchange.clip weighs all alike; choose another method"
        if self.class_clip is not None and any(part.weights == "count" for part in rows.values()):
            return "class rows are weighted by their examples, and exchange.class_clip needs equal weights"
        if not self.mechanisms(parts, 1):
            return None
        if any(isinstance(part, Statistics) and part.like for part in parts.values()):
            return (
                "this net has running statistics (BatchNorm), which are averaged without noise; choose another net, or "
                "exchange.noise=0"
            )
        if single:
            return f"exchange.noise hides single updates in an average, and {single}"
        if surveys:
            return (
                "the method's survey is released without noise; choose a setting without a survey, or exchange.noise=0"
            )
        if scaled:
            return (
                "the columns of a table are scaled by means and deviations of the clients' rows, which are released "
                "without noise; scale them yourself and pass numbers (.npz), or set exchange.noise=0"
            )
        return None

    def check_fits(
        self, parts: Parts, clients: int, *, single: str = "", surveys: bool = False, scaled: bool = False
    ) -> None:
        """Raise ConfigError if these parts, or rounds of this many clients, are incompatible with the settings."""
        if reason := self.refuses(parts, single=single, surveys=surveys, scaled=scaled):
            raise ConfigError(reason)
        if self.mechanisms(parts, 1):
            check_installed()
        self.check_clients(clients)
        counted = rules.most_counted(self.rule, self.byzantine, clients)
        if class_rows(parts) and counted < self.min_clients:
            raise ConfigError(
                f"exchange.min_clients is {self.min_clients}, but {counted} of a round's {clients} clients count: "
                "no class would ever be released; lower min_clients or ask more clients"
            )

    def check_clients(self, clients: int) -> None:
        if clients < self.fewest_answers():
            raise ConfigError(
                f"exchange.rule is {self.rule}, and against byzantine={self.byzantine} it needs "
                f"{self.fewest_answers()} clients a round; there are {clients}: lower byzantine or ask more clients"
            )

    def fewest_answers(self) -> int:
        """The number of answers a round needs; with fewer the run stops."""
        return rules.fewest_updates(self.rule, self.byzantine, self.update_norm)

    def fewest_contributors(self) -> int:
        """The number of clients that must report a class for it to be released."""
        return max(self.min_clients, rules.fewest_holders(self.rule, self.byzantine))

    def mechanisms(self, parts: Parts, num_classes: int) -> list[Mechanism]:
        """The mechanisms that a client's data passes through in a round; none if there is no noise at all."""
        rows = class_rows(parts)
        if not self.noise and not (rows and self.class_noise):
            return []
        # A client may hold every class. For each, the sum of its rows and the number of clients are released.
        return [
            Mechanism("model", self.noise, 1),
            *(Mechanism(name, self.class_noise, 2 * num_classes) for name in rows),
        ]

    def leave(self, update: Tree, parts: Parts, class_counts: Tensor) -> Tree:
        """The update as it leaves a client with these class counts: without rows of classes below min_count."""
        if self.min_count == 1:
            return update
        kept = {}
        for name in class_rows(parts):
            rows = update[name]
            reported = class_counts[rows["classes"]] >= self.min_count
            kept[name] = {tensor: t[reported] for tensor, t in rows.items()}
        return {**update, **kept}

    def summand(self, update: Tree, parts: Parts, num_classes: int) -> dict[str, Any]:
        """What a client adds to a secure sum instead of its update: dense, weighted, clipped. Neither names nor shapes
        depend on the client's data."""
        if self.clip is not None:
            (update,) = rules.clip([update], directions(parts), self.clip)
        n = int(update["count"]) if "count" in update else 1
        summand: dict[str, Any] = {}
        for name, part in parts.items():
            value = update.get(name, {})
            match part:
                case Count() | Weight():
                    summand[name] = value
                case Scalar():
                    summand[name] = n * value.double()
                case ClassRows():
                    rows = value if self.class_clip is None else tables.clipped(value, part.like, self.class_clip)
                    summand[name] = tables.dense(rows, part.like, num_classes)
                case Sum():
                    summand[name] = {tensor: t.double() if t.is_floating_point() else t for tensor, t in value.items()}
                case _:
                    weight = weight_of(update, self.weights(part))
                    summand[name] = {tensor: weight * t.double() for tensor, t in value.items()}
        return summand

    def receive(self, updates: Mapping[ClientId, Tree], parts: Parts, site: ServerSite) -> Received:
        return FromUpdates(self, parts, updates, site)

    def receive_sum(
        self, total: Tree, clients: Sequence[ClientId], parts: Parts, model: Tensors, site: ServerSite
    ) -> Received:
        """Receive the sum of these clients' summands; UpdateRejected if it cannot be their sum."""
        checks.check_sum(total, self.summand(checks.nothing(parts), parts, site.num_classes), parts, len(clients))
        received = FromSum(self, parts, total, clients, site)
        checks.Inspection(parts, model, site.num_classes).lengths(received.mean_update())
        return received
