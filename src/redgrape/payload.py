"""What a method sends in a round, found by running one on made-up data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from redgrape import nets, tree
from redgrape.data.examples import Examples
from redgrape.data.federation import Federation
from redgrape.engines import ClientHalf
from redgrape.errors import ConfigError
from redgrape.method import Method, ServerSite
from redgrape.tree import Tree

LARGEST_TRY = 1 << 28  # numbers: 1 GB of float32
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Payload:
    """Bytes that one client receives and sends in a round, for a client that holds every class; what it keeps; and
    whether it was asked something before the first round."""

    down: int
    up: int
    kept: int
    surveyed: bool


def payload(method: Method, net: str, shape: tuple[int, ...], num_classes: int) -> Payload:
    site, _, broadcast, update, state = _one_client_round(method, net, shape, num_classes)
    return Payload(tree.num_bytes(broadcast), tree.num_bytes(update), tree.num_bytes(state), bool(site.survey))


def logged(method: Method, net: str, shape: tuple[int, ...], num_classes: int) -> list[str]:
    """The names of what the method adds to a round's record."""
    _, server, _, update, _ = _one_client_round(method, net, shape, num_classes)
    return sorted(method.log(server, {0: update}))


def _one_client_round(
    method: Method, net: str, shape: tuple[int, ...], num_classes: int
) -> tuple[ServerSite, Tree, Tree, Tree, Tree]:
    """Site, server, broadcast, update and client state of a round: one client with two examples of every class."""
    build = partial(nets.build, net, shape, num_classes, 0)
    if 2 * num_classes * math.prod(shape) > LARGEST_TRY:
        raise ConfigError(f"{num_classes} classes of {'x'.join(map(str, shape))} inputs are too many numbers to try")
    labels = torch.arange(num_classes).repeat(2)
    examples = Examples(torch.rand(len(labels), *shape, generator=torch.Generator().manual_seed(0)), labels)
    federation = Federation([examples], examples, num_classes, auxiliary=examples)
    half = ClientHalf(method.model_copy(update={"epochs": 1}), federation, build, 0, 1, _CPU)
    site = ServerSite(build, 1, num_classes, 0, 0, 1, _CPU, examples, dict(half.survey([0]))[0])
    server = tree.ordered(method.init_server(build().state_dict(), site))
    broadcast = tree.ordered(method.broadcast(server))
    answer = half.run(0, broadcast, None, 1)
    return site, server, broadcast, answer.update, answer.state
