"""Partitions: which client holds which training rows. Every row goes to exactly one client.

Each kind is a function (labels, clients, alpha, seed) -> owner, the client of each row. The alphas of different kinds
are not comparable: see the docstring of each kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from redgrape import own_code
from redgrape.data import count_matrix
from redgrape.data.count_matrix import LIKE
from redgrape.data.federation import Groups
from redgrape.determinism import numpy_stream
from redgrape.errors import ConfigError, DataError, unknown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]

ATTEMPTS = 10
CREFF_GROUP = 10


def partition(
    labels: Rows,
    kind: str,
    clients: int,
    alpha: float,
    seed: int,
    natural: NDArray[Any] | None = None,
    tail: Sequence[int] | None = None,
) -> list[Rows]:
    """Each client's rows, sorted. `natural` holds each row's client for the kind of that name. That kind and `like:`
    bring their number of clients, and need neither `clients` nor `alpha`. `tail`: the classes that `client_lt` gives to
    few clients; without it those with the fewest rows."""
    if kind == "natural":
        return _by_owner(*_natural(labels, natural))
    if kind.startswith(LIKE):
        return _by_owner(*_like(labels, kind.removeprefix(LIKE), seed))
    check_kind(kind)
    if clients < 1:
        raise ConfigError(f"clients is {clients}; there must be at least 1")
    if clients > len(labels):
        raise DataError(f"{clients} clients cannot share {len(labels)} training examples; lower clients")
    if not (math.isfinite(alpha) and alpha > 0):
        raise ConfigError(f"alpha is {alpha:g}; it must be a finite number above 0")
    if kind == "client_lt":
        return _by_owner(_client_lt(labels, clients, alpha, seed, tail), clients)
    if kind in KINDS:
        return _by_owner(KINDS[kind](labels, clients, alpha, seed), clients)
    return _by_owner(_own(kind, labels, clients, alpha, seed), clients)


def check_kind(kind: str) -> str:
    """The kind itself. Raise ConfigError if there is none of this name."""
    if kind.startswith(LIKE):
        count_matrix.check_name(kind.removeprefix(LIKE))
    elif kind not in KINDS and kind != "natural" and not is_own(kind):
        raise unknown("partition", kind, [*KINDS, "natural", *(f"{LIKE}{name}" for name in count_matrix.names())])
    return kind


def is_own(kind: str) -> bool:
    """Whether this kind is the name of the user's own code."""
    return own_code.is_own(kind) and not kind.startswith(LIKE)


def client_names(kind: str, natural: NDArray[Any] | None) -> list[str] | None:
    """The names of the clients, in the order of the parts, if this kind knows them."""
    if kind.startswith(LIKE):
        return count_matrix.read(kind.removeprefix(LIKE)).clients
    return [str(name) for name in np.unique(natural)] if kind == "natural" and natural is not None else None


def _own(name: str, labels: Rows, clients: int, alpha: float, seed: int) -> Rows:
    """By the user's function, with the arguments and the result of those below."""
    owner = np.asarray(own_code.load(name, "partition")(labels, clients, alpha, seed))
    if owner.shape != labels.shape or owner.dtype.kind not in "iu":
        raise DataError(
            f"'{name}' gives {owner.dtype} of shape {owner.shape}; it must give the number of a client for each of "
            f"{len(labels)} rows"
        )
    if owner.min() < 0 or owner.max() >= clients:
        raise DataError(f"'{name}' gives clients {owner.min()} to {owner.max()}; there are clients 0 to {clients - 1}")
    return owner.astype(np.int64)


def _class_dirichlet(labels: Rows, clients: int, alpha: float, seed: int) -> Rows:
    """Each class is cut among the clients in proportions ~ Dir(alpha 1_K) (Yurochkin et al., ICML 2019; NIID-Bench).

    Client sizes differ. A draw that leaves a client fewer than max(2, min(10, N / 2K)) rows is repeated a few times.
    Rows that are still missing are then moved from the largest clients.
    """
    least = min(max(2, min(10, len(labels) // (2 * clients))), len(labels) // clients)
    for attempt in range(ATTEMPTS):
        random = numpy_stream(seed, "partition class_dirichlet", attempt)
        owner = np.empty(len(labels), dtype=np.int64)
        for c in np.unique(labels):
            rows = random.permutation(np.flatnonzero(labels == c))
            owner[rows] = _cut(len(rows), _dirichlet(random, np.full(clients, alpha)))
        if np.bincount(owner, minlength=clients).min() >= least:
            return owner
    return _top_up(owner, clients, least, random)


def _prior_dirichlet(labels: Rows, clients: int, alpha: float, seed: int) -> Rows:
    """Each client draws its class mixture q_k ~ Dir(alpha * global prior) and takes floor(N / K) rows, the last client
    the rest (the idea of Hsu et al., 2019, with the refill of FedNLP, as RedGrape uses it).

    Classes are processed in label order. Rows that a class cannot provide are refilled from the other classes, in
    proportion to what they have left, rounded up, the scarcest first. With many classes a small alpha asks for more of
    one class than exists, and the refill then makes clients alike: skew is not monotone in alpha.
    """
    random = numpy_stream(seed, "partition prior_dirichlet")
    classes, counts = np.unique(labels, return_counts=True)
    pools = [random.permutation(np.flatnonzero(labels == c)) for c in classes]
    left = counts.copy()
    owner = np.empty(len(labels), dtype=np.int64)
    for client in range(clients):
        size = len(labels) // clients if client < clients - 1 else int(left.sum())
        wanted = np.rint(_dirichlet(random, alpha * counts / len(labels)) * size).astype(np.int64)
        wanted = np.diff(np.minimum(np.cumsum(wanted), size), prepend=0)
        before = left.copy()
        for c in np.flatnonzero(wanted):
            given = min(wanted[c], left[c])
            left[c] -= given
            left -= _refill(left, int(wanted[c] - given))
        left -= _refill(left, size - int((before - left).sum()))
        for pool, start, end in zip(pools, left, before, strict=True):
            owner[pool[start:end]] = client
    return owner


def _creff(labels: Rows, clients: int, alpha: float, seed: int) -> Rows:
    """CReFF's partition (Shang et al., IJCAI 2022): clients in groups of ten, each group on a random chunk of the rows.

    In a group each class is divided by Dir(alpha 1) among the clients that hold less than their share so far. The group
    is drawn again while a client has less than half of its share. Finally all rows, by client and in a client by class,
    are cut into equal parts. So a boundary that moves takes few classes along. Boundaries are truncated as in its code.
    """
    random = numpy_stream(seed, "partition creff")
    shuffled = random.permutation(len(labels))
    ends = np.minimum(np.arange(CREFF_GROUP, clients + CREFF_GROUP, CREFF_GROUP), clients)
    owner = np.empty(len(labels), dtype=np.int64)
    first = 0
    for end, rows in zip(ends, np.split(shuffled, ends[:-1] * len(labels) // clients), strict=True):
        owner[rows] = first + _creff_group(labels[rows], end - first, alpha, random)
        first = end
    in_order = shuffled[np.lexsort((labels[shuffled], owner[shuffled]))]
    for client, rows in enumerate(np.array_split(in_order, clients)):
        owner[rows] = client
    return owner


def _creff_group(labels: Rows, clients: int, alpha: float, random: np.random.Generator) -> Rows:
    share = len(labels) / clients
    for _ in range(ATTEMPTS):
        owner = np.empty(len(labels), dtype=np.int64)
        sizes = np.zeros(clients, dtype=np.int64)
        for c in np.unique(labels):
            rows = np.flatnonzero(labels == c)
            open_clients = np.flatnonzero(sizes < share)  # Dir(alpha), masked and normalised, is Dir on the rest
            proportions = _dirichlet(random, np.full(len(open_clients), alpha))
            owner[rows] = open_clients[_cut(len(rows), proportions, np.floor)]
            sizes += np.bincount(owner[rows], minlength=clients)
        if sizes.min() >= int(share / 2):
            return owner
    return _top_up(owner, clients, int(share / 2), random)


def _iid(labels: Rows, clients: int, alpha: float, seed: int) -> Rows:
    """A random split into equal parts; alpha is not used."""
    owner = np.empty(len(labels), dtype=np.int64)
    for client, rows in enumerate(
        np.array_split(numpy_stream(seed, "partition iid").permutation(len(labels)), clients)
    ):
        owner[rows] = client
    return owner


def _client_lt(labels: Rows, clients: int, alpha: float, seed: int, tail: Sequence[int] | None = None) -> Rows:
    """The tail is with few clients; all else is as in `iid`: equal sizes, and the other classes at random.

    One draw q ~ Dir(alpha 1_K) divides every tail class, so that the same clients hold the whole tail. The expected
    sum of q_k^2, one over the effective number of holders, is (alpha + 1) / (K alpha + 1). What exceeds the size of a
    client goes to the others at random.
    """
    random = numpy_stream(seed, "partition client_lt")
    sizes = np.array([len(part) for part in np.array_split(labels, clients)])
    share = _dirichlet(random, np.full(clients, alpha))
    owner = np.full(len(labels), -1)
    for c in Groups.by_count(np.bincount(labels).tolist(), tail).tail:
        rows = random.permutation(np.flatnonzero(labels == c))
        owner[rows] = _cut(len(rows), share)
    for client in np.flatnonzero(np.bincount(owner[owner >= 0], minlength=clients) > sizes):
        owner[random.permutation(np.flatnonzero(owner == client))[sizes[client] :]] = -1
    rest = random.permutation(np.flatnonzero(owner < 0))
    owner[rest] = np.repeat(np.arange(clients), sizes - np.bincount(owner[owner >= 0], minlength=clients))
    return owner


def _like(labels: Rows, name: str, seed: int) -> tuple[Rows, int]:
    """Each class is cut among the clients in the proportions of a class of a count matrix. Both are ranked by size from
    0. Of C classes, that of rank r follows the one of rank floor(r M / C) of the M there. So with more classes here
    several follow the same one there, and with fewer some there are skipped.

    The sizes of classes stay what they are.
    """
    matrix = count_matrix.read(name)
    random = numpy_stream(seed, "partition like")
    here = np.argsort(-np.bincount(labels), kind="stable")
    there = np.argsort(-matrix.counts.sum(axis=0), kind="stable")
    owner = np.empty(len(labels), dtype=np.int64)
    for rank, c in enumerate(here):
        of_class = matrix.counts[:, there[rank * len(there) // len(here)]]
        rows = random.permutation(np.flatnonzero(labels == c))
        if len(rows):
            owner[rows] = _cut(len(rows), of_class / of_class.sum())
    sizes = np.bincount(owner, minlength=len(matrix.clients))
    if not sizes.all():
        raise DataError(
            f"client '{matrix.clients[int(sizes.argmin())]}' of '{LIKE}{name}' would get none of {len(labels)} "
            "training examples; choose larger data, or another partition"
        )
    return owner, len(matrix.clients)


def _natural(labels: Rows, natural: NDArray[Any] | None) -> tuple[Rows, int]:
    """The clients that the data names, numbered in sorted order; those without rows drop out."""
    if natural is None:
        raise DataError(
            "this data names no clients; give it a `client` array or choose another partition than 'natural'"
        )
    if len(natural) != len(labels):
        raise DataError(f"{len(natural)} client ids for {len(labels)} training examples; there must be one for each")
    names, owner = np.unique(natural, return_inverse=True)
    return owner.astype(np.int64), len(names)


KINDS = {
    "class_dirichlet": _class_dirichlet,
    "prior_dirichlet": _prior_dirichlet,
    "creff": _creff,
    "iid": _iid,
    "client_lt": _client_lt,
}


def _by_owner(owner: Rows, clients: int) -> list[Rows]:
    order = np.argsort(owner, kind="stable").astype(np.int64)
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def _dirichlet(random: np.random.Generator, concentration: NDArray[np.float64]) -> NDArray[np.float64]:
    """Dir(concentration), in logarithms: for a small alpha every gamma draw underflows to zero.

    Gamma(a) = Gamma(a + 1) * U^(1/a).
    """
    uniform = 1 - random.random(len(concentration))  # in (0, 1]
    log_gamma = np.log(random.standard_gamma(concentration + 1)) + np.log(uniform) / concentration
    weights = np.exp(log_gamma - log_gamma.max())
    proportions: NDArray[np.float64] = weights / weights.sum()
    return proportions


def _cut(n: int, proportions: NDArray[np.float64], whole: Callable[..., Any] = np.rint) -> Rows:
    """The part of each of n items, divided in order in these proportions.

    Boundaries are rounded, not truncated: else the last part would hold an item of every class, however rare.
    """
    ends = whole(np.cumsum(proportions) * n)
    ends[np.flatnonzero(proportions)[-1] :] = n
    return np.searchsorted(ends, np.arange(n), side="right")


def _refill(left: Rows, missing: int) -> Rows:
    """Take `missing` items from what is left of each class, in proportion, rounded up, the scarcest class first."""
    if missing == 0:
        return np.zeros_like(left)
    scarcest = np.argsort(left, kind="stable")
    share = np.ceil(left[scarcest] * missing / left.sum()).astype(np.int64)
    given = np.empty_like(left)
    given[scarcest] = np.diff(np.minimum(np.cumsum(share), missing), prepend=0)
    return given


def _top_up(owner: Rows, clients: int, least: int, random: np.random.Generator) -> Rows:
    """Move rows so that every client has at least `least`. They come one at a time from whichever client is then the
    largest, which lowers the largest clients to one level."""
    sizes = np.bincount(owner, minlength=clients)
    missing = np.maximum(least - sizes, 0)
    low, high = least, int(sizes.max())  # the highest level that frees enough rows lies in [low, high]
    while low < high:
        level = (low + high + 1) // 2
        if np.maximum(sizes - level, 0).sum() >= missing.sum():
            low = level
        else:
            high = level - 1
    kept = np.minimum(sizes, low)
    kept[np.flatnonzero(sizes > low)[: (sizes - kept).sum() - missing.sum()]] += 1
    order = np.lexsort((random.random(len(owner)), owner))
    rank = np.arange(len(owner)) - (np.cumsum(sizes) - sizes)[owner[order]]
    moved = order[rank >= kept[owner[order]]]
    owner = owner.copy()
    owner[random.permutation(moved)] = np.repeat(np.arange(clients), missing)
    return owner
