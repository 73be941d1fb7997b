"""The contract between a method and everything else.

A method is a frozen set of hyper-parameters with pure functions over named tensors. It does the computing. An engine
runs its client half. An exchange carries the updates: it knows their parts, and checks, protects and reduces them. Only
`rounds.rounds` knows all three. State goes in and comes out: a method keeps none.
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

ClientId: TypeAlias = int  # 0 .. num_clients-1; every engine guarantees this


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
        """A random generator keyed by (seed, purpose, round) and, at a client, by the client."""
        return determinism.torch_stream(self.seed, purpose, *self._path())

    def load(self, model: Tensors) -> Net:
        """A fresh net with these weights, in training mode. It shares no memory, and no random numbers are drawn."""
        net = new_net(self.build, model)
        return net if self.device.type == "cpu" else net.to(self.device)


@dataclass(frozen=True)
class ClientSite(Site):
    """A client's site: its id and its data, which never leaves."""

    client: ClientId
    data: Examples
    min_count: int = 1  # the exchange drops reports of classes with fewer examples
    members: Sequence[ClientSite] = ()  # if this site stands for several clients (engines/stacked.py)

    @property
    def class_counts(self) -> Tensor:
        """n_{k,c}: the client's number of examples of each class [C]."""
        return torch.bincount(self.data.labels, minlength=self.num_classes)

    @property
    def reported(self) -> Tensor:
        """The mask of the classes that the client reports: those with at least min_count examples."""
        return self.class_counts >= self.min_count

    def _path(self) -> tuple[int, ...]:
        return (self.round, self.client)

    def inputs(self, rows: Tensor, dtype: torch.dtype, augment: torch.Generator | None = None) -> Tensor:
        """Network inputs for these rows of the data, on the site's device, augmented if a generator is given."""
        return place(self.data.inputs(rows, dtype, augment), self.device)


@dataclass(frozen=True)
class ServerSite(Site):
    """The server's site: its own data, and what the clients answered before the first round."""

    auxiliary: Examples | None = None  # a small balanced set, for methods that need one; shared with no client
    survey: Tree = field(default_factory=dict)  # the sum of all clients' answers to Method.survey
    secret: bytes | None = field(default=None, repr=False)  # source of differential privacy's noise

    def noise_key(self, randomness: Literal["secret", "seed"]) -> bytes:
        """The key for noise.py. A key made from the seed is not secret: it is for experiments."""
        if randomness == "seed":
            return determinism.key(self.seed, "noise").to_bytes(8, "big")
        if self.secret is None:
            raise ConfigError(
                "noise needs a secret at the server, and this site has none; pass one, or set exchange.randomness=seed"
            )
        return self.secret

    def inputs(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Network inputs for these rows of the auxiliary set, on the site's device."""
        return place(self.auxiliary_set().inputs(rows, dtype), self.device)

    def auxiliary_set(self) -> Examples:
        if self.auxiliary is None or not len(self.auxiliary):
            raise ConfigError(
                "this method needs a small balanced set at the server; hold one out with data.auxiliary=32 (per class)"
            )
        missing = set(range(self.num_classes)) - set(self.auxiliary.labels.tolist())
        if missing:
            raise DataError(
                f"the balanced set at the server has no example of class {min(missing)}; raise data.auxiliary"
            )
        return self.auxiliary


class Method(LocalTraining, ABC):
    """Hyper-parameters are frozen, validated fields; the two halves are pure functions.

    One round: server -> broadcast() -> engine -> client_update() at each client -> exchange -> server_update().
    `server["model"]` is always the model to deploy and evaluate. Every `server_update` accepts what was received from
    any non-empty subset of the clients asked.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # `post_hoc`: only gives a trained model another head
    sums_of_states: ClassVar[tuple[str, ...]] = ()  # groups of the server's state that are sums over client states
    uses_auxiliary: ClassVar[bool] = False  # whether the server needs a balanced set of its own
    cheap: ClassVar[Mapping[str, Any]] = {}  # hyper-parameters that only reduce the work, for quick checks
    ingredient: ClassVar[str] = ""  # the choice that it makes for other methods too; see methods/_combination.py
    fidelity: ClassVar[str] = ""  # its sources, and what is uncertain

    def __init__(self, **hyper_parameters: Any) -> None:
        try:
            super().__init__(**hyper_parameters)
        except ValidationError as error:
            raise one_line(error, type(self), "method") from error

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The method with the hyper-parameters of a preset, except for these overrides."""
        if name not in cls.presets:
            raise unknown("preset", name, cls.presets)
        return cls(**{**cls.presets[name], **overrides})

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (methods.reference(type(self)), dict(self))

    @abstractmethod
    def parts(self, model: Tensors, site: Site) -> Parts:
        """The parts of an update, for clients that receive this model. They describe all that a client sends. The
        exchange checks, protects and reduces updates by them."""

    def survey(self, site: ClientSite) -> Tree:
        """What the method must know about the clients before the first round. Each client answers once, and the server
        half gets only the sum. A client without examples answers zeros. Empty: nothing is asked."""
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
        """One client's round: its update and its new state, which is kept once the update has been accepted."""

    @abstractmethod
    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        """The server's new state from what was received."""

    def needs_single(self) -> str:
        """Why the server half needs `received.each` because reductions are not enough; empty if they are. A method that
        needs single updates runs with neither secure sums nor noise."""
        return ""

    def log(self, server: Tree, received: Received) -> Mapping[str, Tensor]:
        """Small tensors to record each round, from the new server state and what was received."""
        return {}


def _revive(reference: type[Method] | str, fields: dict[str, Any]) -> Method:
    """Rebuild a method in another process, which may have to load its file first."""
    return (methods.load(reference) if isinstance(reference, str) else reference)(**fields)
