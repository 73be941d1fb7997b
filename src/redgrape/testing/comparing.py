"""What the clauses look at: all that crosses between the halves of a method, and states of runs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from redgrape import tree
from redgrape.determinism import same_bits_everywhere
from redgrape.engines.in_process import InProcess
from redgrape.method import ClientId, Method
from redgrape.nets.net import Net
from redgrape.rounds import RunState, first_state, sample_clients
from redgrape.testing.cases import SEED, Case, client_half, server_site
from redgrape.testing.engines import kind
from redgrape.tree import Tensors, Tree


class Passed(NamedTuple):
    """A tree on its way from one half of a method to the other."""

    kind: Literal["server", "broadcast", "update", "state"]
    what: str
    tree: Tree


def crossing(method: Method, case: Case | None = None) -> Iterator[Passed]:
    """A run taken apart: every tree as soon as the method has made it, before anything checks it."""
    case = case or Case()
    half, site = client_half(method, case), server_site(case)
    server = first_state(method, InProcess(half), site, case.eligible).server
    yield Passed("server", "the server's first state", server)
    kept: dict[ClientId, Tree] = {}
    for t in range(1, case.rounds + 1):
        here = replace(site, round=t)
        broadcast = method.broadcast(server)
        yield Passed("broadcast", f"the broadcast of round {t}", broadcast)
        updates: dict[ClientId, Tree] = {}
        for k in sample_clients(case.eligible, case.clients_per_round, SEED, t):
            updates[k], kept[k], _ = half.run(k, broadcast, kept.get(k), t)
            yield Passed("update", f"client {k}'s update of round {t}", updates[k])
            yield Passed("state", f"client {k}'s state after round {t}", kept[k])
        with same_bits_everywhere():
            received = case.exchange.receive(updates, method.parts(broadcast["model"], here), here)
            server = method.server_update(server, received, here)
        yield Passed("server", f"the server's state after round {t}", server)


def must_equal(expected: Sequence[RunState], found: Sequence[RunState], what: str) -> None:
    for a, b in zip(expected, found, strict=True):
        ours, theirs = _flat(a), _flat(b)
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in ours or name not in theirs or not same(ours[name], theirs[name]):
                raise AssertionError(f"'{name}' differs after round {a.round} in {what}")


def _flat(state: RunState) -> Tensors:
    return tree.flatten({"server": state.server, **{f"client {k}": s for k, s in state.clients.items()}})


def same(a: Tensor, b: Tensor) -> bool:
    return tree.equal({"t": a}, {"t": b})


def must_be_close(expected: Tensors, found: Tensors, what: str) -> None:
    """To rounding in double precision."""
    for name in sorted(expected.keys() | found.keys()):
        if name not in expected or name not in found or kind(expected[name]) != kind(found[name]):
            raise AssertionError(f"{what} has another '{name}' than the one made from updates")
        if not torch.allclose(expected[name].double(), found[name].double(), rtol=1e-7, atol=1e-9):
            raise AssertionError(f"{what} differs in '{name}' from the one made from updates")


def check_accepted(states: Sequence[RunState], what: str) -> None:
    """Every update was accepted. `rounds` itself stops at a server state that is not finite."""
    for state in states:
        for client, reason in state.record["rejected"].items():
            raise AssertionError(f"with {what}, client {client}'s update of round {state.round}: {reason}")


def check_model(server: Tree, net: Net, what: str) -> None:
    """server["model"] has the names, shapes and dtypes of the net's state."""
    expected = net.state_dict()
    model = server.get("model", {})
    if wrong := sorted(expected.keys() ^ model.keys()):
        raise AssertionError(f"{what}: server['model'] and build() do not both have '{wrong[0]}'")
    for name, t in expected.items():
        if model[name].dtype != t.dtype or model[name].shape != t.shape:
            raise AssertionError(
                f"{what}: '{name}' is {model[name].dtype} {tuple(model[name].shape)}, not {t.dtype} {tuple(t.shape)}"
            )
