"""The contract between a method and everything else.

A method is a frozen set of hyper-parameters with pure functions over named tensors. An engine runs the client half
somewhere; `training.rounds` runs the server half. Nothing else knows both. State goes in and comes out: a method keeps
none on itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeAlias

import torch
from pydantic import ConfigDict, ValidationError
from torch import Tensor

from redgrape import acceptance, keys, methods, tree
from redgrape.acceptance import Declared
from redgrape.data.examples import Examples, place
from redgrape.errors import ConfigError, DataError, unknown
from redgrape.local import LocalTraining
from redgrape.nets.copies import new_net
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
        return keys.torch_stream(self.seed, purpose, *self._path())

    def load(self, model: Tensors) -> Net:
        """A fresh net with these weights, in training mode; it shares no memory and draws no random numbers."""
        net = new_net(self.build, model)
        return net if self.device.type == "cpu" else net.to(self.device)


@dataclass(frozen=True)
class ClientSite(Site):
    """A client's place: its id and its data, which never leave."""

    client: ClientId
    data: Examples
    members: Sequence[ClientSite] = ()  # where it stands for several clients at once (engines/stacked.py)

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
            return keys.key(self.seed, "noise").to_bytes(8, "big")
        if self.secret is None:
            raise ConfigError(
                "noise needs a secret at the server, and this site has none; dp_randomness=seed needs none"
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

    One round: server -> broadcast() -> engine -> client_update() at each client -> {client: update} -> server_update()
    -> server. `server["model"]` is always what one would deploy and evaluate. Every
    `server_update` accepts the updates of any non-empty subset of the clients asked.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    uses_auxiliary: ClassVar[bool] = False  # whether the server needs a balanced set of its own
    stacks: ClassVar[bool] = False  # whether its client half holds for several clients at once (engines/stacked.py)
    cheap: ClassVar[Mapping[str, Any]] = {}  # hyper-parameters that only say how much work is done, for quick checks
    assumes: ClassVar[str] = ""  # what else it needs that plain averaging does not
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

    def survey(self, site: ClientSite) -> Tree:
        """What the method must know of the clients before the first round. Every client answers once, and the server
        gets the sum of the answers alone, so that a secure sum could make it. Empty: nothing is asked."""
        return {}

    def survey_like(self, site: ServerSite) -> Tree:
        """What an answer to `survey` looks like: a tensor of the same shape and dtype under every name. Whole numbers
        count examples. A class that writes a `survey` of its own and none of this may answer anything finite."""
        return {}

    def surveys(self, site: ServerSite) -> bool:
        """Whether clients are asked before the first round."""
        described = type(self).survey_like is not Method.survey_like
        return type(self).survey is not Method.survey and (not described or bool(self.survey_like(site)))

    def check_survey(self, answer: Tree, examples: int, site: ServerSite, *, of_sum: bool = False) -> None:
        """Raise `acceptance.UpdateRejected` where a client's answer to the survey must not count. `examples`: how many
        it has at most. `of_sum`: the answer is the sum over all clients, and `examples` are all of theirs."""
        like = tree.flatten(self.survey_like(site))
        acceptance.check_survey(answer, like, examples, exact=bool(like), of_sum=of_sum)

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

    def update_like(self, server: Tree, site: ServerSite) -> Tree:
        """What an update looks like: a tensor of the same shape and dtype under every name (its numbers mean nothing),
        or `acceptance.Rows`. A class that writes a `client_update` of its own and none of this may send more."""
        return {}

    def check_update(self, update: Tree, like: Tree, declared: Declared | None, site: ServerSite) -> None:
        """Raise `acceptance.UpdateRejected` where a client's update must not count. `like`: this round's `update_like`;
        `declared`: what the client said of itself when it joined, where that is known."""
        acceptance.check(update, like, declared, site.num_classes, exact=self._describes_updates())

    def _describes_updates(self) -> bool:
        """Whether `update_like` was written for this `client_update`, and not for one that it inherits from."""
        first = next(c for c in type(self).__mro__ if {"update_like", "client_update"} & vars(c).keys())
        return "update_like" in vars(first) and first is not Method

    def fewest_answers(self) -> int:
        """How many answers a round needs; below it the run stops."""
        return 1

    def check_clients(self, clients: int) -> None:
        """Raise ConfigError where a round of so many clients cannot be enough."""
        if clients < self.fewest_answers():
            raise ConfigError(f"this method needs {self.fewest_answers()} clients a round, and there are {clients}")

    def counted(self, updates: Mapping[ClientId, Tree]) -> Mapping[ClientId, Tree]:
        """The updates that `server_update` gets, of those that were accepted: some may be left out, or shortened."""
        return updates

    def why_not_summed(self) -> str | None:
        """Why sums over a round's clients do not tell the server half enough; None where they do, so that the clients
        can be summed securely: then the method has a `summand` and `stand_ins`."""
        return "its server needs more of the clients than sums"

    def why_class_counts(self) -> str | None:
        """What makes every client tell how many examples of each class it has, and what to choose instead; None where
        they do not. A survey that nothing is said of counts as one that asks for it."""
        return None if type(self).survey is Method.survey else "its survey asks clients what they hold"

    def summand(self, update: Tree) -> Tree:
        """What a client adds to a secure sum in place of sending its update. Neither its names nor its shapes tell what
        the client holds."""
        raise NotImplementedError

    def stand_ins(self, total: Tree, clients: Sequence[ClientId], dtype: torch.dtype) -> Mapping[ClientId, Tree]:
        """Updates of which `server_update` and `log` make what they would make of the clients' own: of the sum of their
        summands (whole numbers, and float64) the mean, for each of these clients. `dtype`: that of the net.
        `acceptance.UpdateRejected` where the sum cannot be that of so many clients."""
        raise NotImplementedError

    @abstractmethod
    def server_update(self, server: Tree, updates: Mapping[ClientId, Tree], site: ServerSite) -> Tree:
        """The server's new state from the updates that arrived, which come in the order of the clients' ids."""

    def privacy(self) -> str:
        """What a client's messages tell beyond those of plain averaging; for the card of a model."""
        return ""

    def log(self, server: Tree, updates: Mapping[ClientId, Tree]) -> Mapping[str, Tensor]:
        """Small tensors worth recording each round, from the new server state and the updates that made it."""
        return {}


def _revive(reference: type[Method] | str, fields: dict[str, Any]) -> Method:
    """A method in another process, which may have to load its file first."""
    return (methods.load(reference) if isinstance(reference, str) else reference)(**fields)
