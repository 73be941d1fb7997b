"""The contract between a method and everything else.

A method is a frozen set of hyper-parameters with pure functions over named tensors. It computes. An engine runs its
client half somewhere. An exchange carries: it knows of what parts an update is made, checks, protects and reduces them.
`training.rounds` is the only place that knows all three. State goes in and comes out: a method keeps none on itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeAlias

import torch
from pydantic import ConfigDict, ValidationError
from torch import Tensor

from redgrape import determinism, methods
from redgrape.data.examples import Examples, place
from redgrape.errors import ConfigError, DataError, unknown
from redgrape.exchange.parts import Parts
from redgrape.exchange.received import Received
from redgrape.learning.local_training import LocalTraining
from redgrape.nets.cloning import new_net
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree
from redgrape.validation import one_line

ClientId: TypeAlias = int  # 0 .. num_clients-1, promised by every engine


@dataclass(frozen=True)
class Site:
    """The place and time where one half of a method runs."""

    build: Callable[[], Net]
    num_clients: int
    num_classes: int
    seed: int
    round: int  # 1 .. rounds
    rounds: int
    device: torch.device

    def _path(self) -> tuple[int, ...]:
        return (self.round,)

    def generator(self, purpose: str) -> torch.Generator:
        """A stream of random numbers keyed by (seed, purpose, round) and, at a client, by the client."""
        return determinism.torch_stream(self.seed, purpose, *self._path())

    def load(self, model: Tensors) -> Net:
        """A fresh net with these weights, in training mode; it shares no memory and draws no random numbers."""
        net = new_net(self.build, model)
        return net if self.device.type == "cpu" else net.to(self.device)


@dataclass(frozen=True)
class ClientSite(Site):
    """A client's place: its id and its data, which never leave."""

    client: ClientId
    data: Examples
    min_count: int = 1  # the exchange drops what a client reports of a class with fewer examples
    members: Sequence[ClientSite] = ()  # if it stands for several clients at once (engines/stacked.py)

    @property
    def class_counts(self) -> Tensor:
        """n_{k,c}: how many examples of each class the client holds [C]."""
        return torch.bincount(self.data.labels, minlength=self.num_classes)

    @property
    def reported(self) -> Tensor:
        """The mask of the classes that the client reports: those it holds, from min_count examples on."""
        return self.class_counts >= self.min_count

    def _path(self) -> tuple[int, ...]:
        return (self.round, self.client)

    def inputs(self, rows: Tensor, dtype: torch.dtype, augment: torch.Generator | None = None) -> Tensor:
        """Network inputs of these rows of the data, on the site's device, augmented where a generator is given."""
        return place(self.data.inputs(rows, dtype, augment), self.device)


@dataclass(frozen=True)
class ServerSite(Site):
    """The server's place: what it has of its own, and what it has asked the clients before the first round."""

    auxiliary: Examples | None = None  # a small balanced set, for methods that assume one; no client holds any of it
    survey: Tree = field(default_factory=dict)  # the sum of all clients' answers to Method.survey
    secret: bytes | None = field(default=None, repr=False)  # what the noise of differential privacy is made from

    def noise_key(self, randomness: Literal["secret", "seed"]) -> bytes:
        """The key of noise.py. One made from the seed is no secret: it serves experiments."""
        if randomness == "seed":
            return determinism.key(self.seed, "noise").to_bytes(8, "big")
        if self.secret is None:
            raise ConfigError(
                "noise needs a secret at the server, and this site has none; exchange.randomness=seed needs none"
            )
        return self.secret

    def inputs(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Network inputs of these rows of the auxiliary set, on the site's device."""
        return place(self.auxiliary_set().inputs(rows, dtype), self.device)

    def auxiliary_set(self) -> Examples:
        if self.auxiliary is None or not len(self.auxiliary):
            raise ConfigError(
                "this method needs a small balanced set at the server; hold one out with data.auxiliary=32 (a class)"
            )
        missing = set(range(self.num_classes)) - set(self.auxiliary.labels.tolist())
        if missing:
            raise DataError(
                f"the balanced set at the server has no example of class {min(missing)}; raise data.auxiliary"
            )
        return self.auxiliary


class Method(LocalTraining, ABC):
    """Hyper-parameters as frozen, checked fields; the two halves as pure functions.

    One round: server -> broadcast() -> engine -> client_update() at each client -> exchange -> server_update().
    `server["model"]` is always what one would deploy and evaluate. Every `server_update` takes what was received from
    any non-empty subset of the clients asked.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    uses_auxiliary: ClassVar[bool] = False  # whether the server needs a balanced set of its own
    cheap: ClassVar[Mapping[str, Any]] = {}  # hyper-parameters that only say how much work is done, for quick checks
    fidelity: ClassVar[str] = ""  # what it was written from, and what is uncertain

    def __init__(self, **hyper_parameters: Any) -> None:
        try:
            super().__init__(**hyper_parameters)
        except ValidationError as error:
            raise one_line(error, type(self), "method") from error

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The method with the hyper-parameters of a preset, and these in their place where given."""
        if name not in cls.presets:
            raise unknown("preset", name, cls.presets)
        return cls(**{**cls.presets[name], **overrides})

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (methods.reference(type(self)), dict(self))

    @abstractmethod
    def parts(self, model: Tensors, site: Site) -> Parts:
        """What an update is made of, for clients that receive this model. All that a client sends is described here.
        The exchange checks, protects and reduces it by that."""

    def survey(self, site: ClientSite) -> Tree:
        """What the method must know of the clients before the first round. Each client answers once, and the server
        gets the sum alone. A client without examples answers zeros. Empty: nothing is asked."""
        return {}

    @abstractmethod
    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        """The server's state before the first round; `site.round` is 0."""

    def init_client(self, broadcast: Tree) -> Tree:
        """A client's state before its first round."""
        return {}

    @abstractmethod
    def broadcast(self, server: Tree) -> Tree:
        """What every client of a round receives."""

    @abstractmethod
    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        """One client's round: its update and its new state, which counts once the update has been accepted."""

    @abstractmethod
    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        """The server's new state from what was received."""

    def needs_single(self) -> str:
        """Why reductions do not tell the server half enough, so that it asks `received.each`; empty if they do. Such a
        method runs with neither secure sums nor noise."""
        return ""

    def log(self, server: Tree, received: Received) -> Mapping[str, Tensor]:
        """Small tensors worth recording each round, from the new server state and what made it."""
        return {}


def _revive(reference: type[Method] | str, fields: dict[str, Any]) -> Method:
    """A method in another process, which may have to load its file first."""
    return (methods.load(reference) if isinstance(reference, str) else reference)(**fields)
