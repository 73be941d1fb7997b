"""Secure sums: the server learns only the sum over the sites. The protocol is Flower's SecAgg+.

Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020,
https://eprint.iacr.org/2020/704, with every site a neighbour of every other. Only this module uses Flower's secure
aggregation, which is part of its legacy API. A site goes through four stages, each once:

    keys        two fresh public keys of every site
    shares      each site receives the others' keys. It has two secrets: a random seed and its private key. It sends a
                share of both to each other site, encrypted for it; any t = n // 2 + 1 of the n shares give the secret
    masked      the site's numbers, plus a mask from its seed, plus or minus one mask for each pair of sites, from a key
                that only these two know. In the sum over all sites the masks of pairs cancel
    revealed    for every site whose numbers arrived, the others' shares of its seed; for every site that was lost since
                `shares`, those of its key, from which the masks of its pairs follow. Never both of one site

The stages of a site are Flower's own code, with two corrections. Flower makes masks from 32 bits of a secret, and all
of them could be tried; here masks are AES in counter mode with a key of 256 bits. Flower's server confuses a site that
leaves before it has sent its shares with one that leaves later, and fails; so the server's part is written here.

Flower adds numbers of 31 bits. Ours have 62, as two such halves.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.common import bytes_to_ndarray, ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

from redgrape.deploy.protocol.messages import Reply, Stage, SumAnswer
from redgrape.deploy.protocol.wire import Parts
from redgrape.deploy.setup.folder import FEWEST_IN_SUM
from redgrape.engines import Lost
from redgrape.errors import ConfigError
from redgrape.exchange import fixed_point
from redgrape.exchange.fixed_point import BITS, Layout, Numbers
from redgrape.method import ClientId

MOST = 512  # sites of a sum
STAGES = ("keys", "shares", "masked", "revealed")

_HALF = BITS // 2
_OFFSET = 1 << (BITS - 1)  # numbers have a sign, and halves have none
_MODULUS = 1 << 40  # above MOST times a half
_PARTS = ("weight", "high", "low")  # of a masked vector; Flower puts a weight in front, here the same for all sites

Letters: TypeAlias = Mapping[ClientId, Parts]
Ask: TypeAlias = Callable[[Stage, Letters], Iterable[tuple[ClientId, Reply[SumAnswer] | Lost]]]
_Read = TypeVar("_Read")


def _masks(secret: bytes, modulus: int, shapes: Sequence[tuple[int, ...]]) -> list[Numbers]:
    """Replaces Flower's function with the same arguments. Every secret is used for one sum, so the counter may start at
    zero."""
    stream = Cipher(algorithms.AES(hashlib.sha256(secret).digest()), modes.CTR(bytes(16))).encryptor()
    return [
        (np.frombuffer(stream.update(bytes(8 * math.prod(shape))), "<i8") & (modulus - 1)).reshape(shape)
        for shape in shapes
    ]


# The package has a function of the module's name.
_flower: Any = import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
if not hasattr(_flower, "pseudo_rand_gen"):
    raise ConfigError("this version of Flower masks numbers in an unknown way; install one that pyproject.toml allows")
_flower.pseudo_rand_gen = _masks


def threshold(sites: int) -> int:
    """The number of sites that must stay to the end, and of shares that give a secret: more than half."""
    return sites // 2 + 1


class Member:
    """A site in one sum. It answers only what the protocol allows. `everyone`: the number of sites that must be in the
    sum; None if some may be missing."""

    def __init__(self, me: ClientId, everyone: int | None = None) -> None:
        self._me, self._everyone, self._done = me, everyone, 0
        self._state = _flower.SecAggPlusState(nid=me)

    def answer(self, stage: Stage, parts: Parts, numbers: Numbers | None = None) -> dict[str, bytes]:
        """The parts of a site's answer to one stage. `numbers`: what the site adds in the stage `masked`."""
        if self._done >= len(STAGES) or stage.name != STAGES[self._done]:
            raise ConfigError(f"the server asks for '{stage.name[:20]}' out of turn in a secure sum")
        self._done += 1
        match stage.name:
            case "keys":
                return self._keys()
            case "shares":
                return self._shares(_by_site(parts, "key/"), _by_site(parts, "box key/"))
            case "masked":
                assert numbers is not None
                return self._masked(_by_site(parts, "share/"), numbers)
            case _:
                return self._revealed(stage.arrived or [], stage.lost or [])

    def _keys(self) -> dict[str, bytes]:
        made = _flower._setup(
            self._state,
            {
                Key.SAMPLE_NUMBER: 0,  # set in `shares`, when the number of sites is known
                Key.SHARE_NUMBER: 0,
                Key.THRESHOLD: 0,
                Key.CLIPPING_RANGE: float(1 << (_HALF - 1)),  # so that the step is 1: whole numbers stay as they are
                Key.TARGET_RANGE: 1 << _HALF,
                Key.MOD_RANGE: _MODULUS,
                Key.MAX_WEIGHT: 1.0,
            },
        )
        return {"key": made[Key.PUBLIC_KEY_1], "box key": made[Key.PUBLIC_KEY_2]}

    def _shares(self, keys: Mapping[ClientId, bytes], box_keys: Mapping[ClientId, bytes]) -> dict[str, bytes]:
        if not FEWEST_IN_SUM <= len(keys) <= MOST or keys.keys() != box_keys.keys() or self._me not in keys:
            raise ConfigError(
                f"a secure sum needs the keys of {FEWEST_IN_SUM} to {MOST} sites; the server sent {len(keys)}"
            )
        self._require_everyone(len(keys), "keys")
        self._state.sample_num = self._state.share_num = len(keys)
        self._state.threshold = threshold(len(keys))
        made = _flower._share_keys(self._state, {str(k): [keys[k], box_keys[k]] for k in keys})
        return {f"share/{k}": box for k, box in zip(made[Key.DESTINATION_LIST], made[Key.CIPHERTEXT_LIST], strict=True)}

    def _masked(self, boxes: Mapping[ClientId, bytes], numbers: Numbers) -> dict[str, bytes]:
        self._require_everyone(len(boxes) + 1, "shares")
        configs = {Key.CIPHERTEXT_LIST: list(boxes.values()), Key.SOURCE_LIST: list(boxes)}
        halves = ndarrays_to_parameters(_halves(numbers))
        made = _flower._collect_masked_vectors(self._state, configs, 1, halves)
        arrays = [bytes_to_ndarray(data) for data in made[Key.MASKED_PARAMETERS]]
        return {name: array.astype("<i8").tobytes() for name, array in zip(_PARTS, arrays, strict=True)}

    def _revealed(self, arrived: list[ClientId], lost: list[ClientId]) -> dict[str, bytes]:
        """For each site a share of one of its two secrets, never of both: with both its numbers could be unmasked."""
        held = sorted(self._state.rd_seed_share_dict)
        if sorted(arrived + lost) != held or self._me not in arrived or len(arrived) < self._state.threshold:
            raise ConfigError("the server asks to unmask others than those that took part in a secure sum")
        self._require_everyone(len(arrived), "numbers")
        made = _flower._unmask(self._state, {Key.ACTIVE_NODE_ID_LIST: arrived, Key.DEAD_NODE_ID_LIST: lost})
        return {f"share/{k}": share for k, share in zip(made[Key.NODE_ID_LIST], made[Key.SHARE_LIST], strict=True)}

    def _require_everyone(self, number: int, what: str) -> None:
        if self._everyone not in (None, number):
            raise ConfigError(
                f"this sum must be over all {self._everyone} sites; the server has the {what} of {number}"
            )


@dataclass(frozen=True)
class Summed:
    """The sum over the sites that `answered`, with their answers; for the others, why they are not in it."""

    total: dict[str, Any]
    answered: Mapping[ClientId, SumAnswer]
    lost: Mapping[ClientId, str]


class SumFailed(Exception):
    """There is no sum, and nothing was unmasked unless the message says so. `lost`: why single sites failed."""

    def __init__(self, reason: str, lost: Mapping[ClientId, str]) -> None:
        super().__init__("; ".join([reason, *lost.values()]))


class NotBegun(SumFailed):
    """Too few sites were there to begin. Nobody has computed anything, so it can be tried again."""


@dataclass(frozen=True)
class _Masked:
    answer: SumAnswer
    layout: Layout
    arrays: list[Numbers]


def secure_sum(sites: Mapping[ClientId, str], ask: Ask, fewest: int) -> Summed:
    """The sum of what these sites add, with their names. `ask` sends a stage's question to sites, waits until its
    deadline, and in the stage `masked` includes what they must compute. `fewest`: a sum over fewer sites is not
    unmasked."""
    return _Sum(sites, ask, fewest).total()


class _Sum:
    def __init__(self, sites: Mapping[ClientId, str], ask: Ask, fewest: int) -> None:
        self._sites, self._ask, self._fewest = sites, ask, fewest
        self._lost: dict[ClientId, str] = {}

    def total(self) -> Summed:
        keys = self._stage(Stage("keys"), {k: {} for k in self._sites}, _read_keys)
        self._require(len(keys), max(FEWEST_IN_SUM, self._fewest), "gave their keys", NotBegun)
        enough = threshold(len(keys))
        least = max(enough, self._fewest)

        public = {f"key/{k}": key for k, (key, _) in keys.items()}
        public |= {f"box key/{k}": key for k, (_, key) in keys.items()}
        letters: Letters = {k: public for k in keys}
        boxes = self._stage(Stage("shares"), letters, lambda k, reply: _read_shares(reply, {*keys} - {k}))
        self._require(len(boxes), least, "gave shares of their secrets")

        letters = {k: {f"share/{j}": boxes[j][k] for j in boxes if j != k} for k in boxes}
        masked = self._with_one_layout(self._stage(Stage("masked"), letters, _read_masked))
        self._require(len(masked), least, "gave their part of the sum")

        arrived, lost = list(masked), [k for k in boxes if k not in masked]
        last = Stage("revealed", arrived, lost)
        shares = self._stage(last, {k: {} for k in arrived}, lambda _, reply: _read_shares(reply, {*boxes}))
        self._require(len(shares), enough, "stayed until the sum was unmasked")
        try:
            secrets = {k: combine_shares([given[k] for given in shares.values()]) for k in boxes}
            total = _unmasked([m.arrays for m in masked.values()], secrets, arrived, lost, keys)
        except ValueError as error:
            raise SumFailed("the sites' shares of the secrets do not fit together", self._lost) from error
        outside = {k: why for k, why in self._lost.items() if k not in masked}
        answered = {k: m.answer for k, m in masked.items()}
        return Summed(fixed_point.decode(masked[arrived[0]].layout, total), answered, outside)

    def _stage(
        self, stage: Stage, letters: Letters, read: Callable[[ClientId, Reply[SumAnswer]], _Read]
    ) -> dict[ClientId, _Read]:
        """The readable answers to one stage, in the order of the sites. The other sites are lost."""
        found: dict[ClientId, _Read] = {}
        for k, reply in self._ask(stage, letters):
            if isinstance(reply, Lost):
                self._lost[k] = reply.reason
                continue
            try:
                found[k] = read(k, reply)
            except (KeyError, TypeError, ValueError, EOFError) as error:
                why = str(error)[:200]
                self._lost[k] = f"{self._sites[k]}: its answer '{stage.name}' in a secure sum cannot be read: {why}"
        return dict(sorted(found.items()))

    def _require(self, number: int, least: int, what: str, kind: type[SumFailed] = SumFailed) -> None:
        if number < least:
            raise kind(f"{number} sites {what}, and {least} are needed", self._lost)

    def _with_one_layout(self, masked: dict[ClientId, _Masked]) -> dict[ClientId, _Masked]:
        """The sites whose tensors have the most common names and shapes."""
        if not masked:
            return masked
        layouts = Counter(str(m.layout) for m in masked.values())
        common, _ = layouts.most_common(1)[0]
        for k, m in masked.items():
            if str(m.layout) != common:
                self._lost[k] = f"{self._sites[k]}: its tensors have other names or shapes than those of the others"
        return {k: m for k, m in masked.items() if str(m.layout) == common}


def _unmasked(
    masked: Sequence[Sequence[Numbers]],
    secrets: Mapping[ClientId, bytes],
    arrived: Sequence[ClientId],
    lost: Sequence[ClientId],
    keys: Mapping[ClientId, tuple[bytes, bytes]],
) -> Numbers:
    """The sum of the masked vectors without the masks that remain in it: the sites' own, and those of pairs with a lost
    site."""
    total = [np.sum(arrays, axis=0) for arrays in zip(*masked, strict=True)]
    shapes = [t.shape for t in total]

    def add(sign: int, secret: bytes) -> None:
        for part, mask in zip(total, _masks(secret, _MODULUS, shapes), strict=True):
            np.add(part, sign * mask, out=part)

    for k in arrived:
        add(-1, secrets[k])
    for k in lost:
        private = bytes_to_private_key(secrets[k])
        for j in arrived:  # j added the mask of the pair if its number is above k's, else subtracted it
            add(-1 if j > k else 1, generate_shared_key(private, bytes_to_public_key(keys[j][0])))
    return _whole([t & (_MODULUS - 1) for t in total[1:]], len(arrived))


def _halves(numbers: Numbers) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    """Two numbers of 31 bits for each number of 62, centred on zero as Flower expects."""
    positive, middle = numbers + _OFFSET, 1 << (_HALF - 1)
    high, low = positive >> _HALF, positive & ((1 << _HALF) - 1)
    return [(half - middle).astype(np.float64) for half in (high, low)]


def _whole(halves: Sequence[Numbers], sites: int) -> Numbers:
    """The sum over this many sites from the sums of its halves, modulo 2^64."""
    high, low = (half.astype(np.uint64) for half in halves)
    offset = np.uint64(sites * _OFFSET % (1 << 64))
    return ((high << np.uint64(_HALF)) + low - offset).view(np.int64)


def _read_keys(k: ClientId, reply: Reply[SumAnswer]) -> tuple[bytes, bytes]:
    keys = reply.parts["key"], reply.parts["box key"]
    for key in keys:
        bytes_to_public_key(key)
    return keys


def _read_shares(reply: Reply[SumAnswer], wanted: set[ClientId]) -> dict[ClientId, bytes]:
    shares = _by_site(reply.parts, "share/")
    if shares.keys() != wanted:
        raise ValueError("it has not one share for each site")
    return shares


def _read_masked(k: ClientId, reply: Reply[SumAnswer]) -> _Masked:
    layout = fixed_point.checked_layout(reply.answer.layout)
    numbers = fixed_point.length(layout)
    for name, expected in zip(_PARTS, (1, numbers, numbers), strict=True):
        if len(reply.parts[name]) != 8 * expected:
            raise ValueError(f"'{name}' has {len(reply.parts[name])} bytes, and {8 * expected} are expected")
    return _Masked(reply.answer, layout, [np.frombuffer(reply.parts[name], "<i8") for name in _PARTS])


def _by_site(parts: Parts, prefix: str) -> dict[ClientId, bytes]:
    return {int(name.removeprefix(prefix)): data for name, data in parts.items() if name.startswith(prefix)}
