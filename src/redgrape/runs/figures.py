"""The figures of an evaluation that runs report, by their names in a record, and how a record is stored."""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

FIGURES = ("accuracy", "balanced", "macro_f1", "head", "middle", "tail")
OF_MANY_CLASSES = ("many", "medium", "few", "top5")  # reported from 100 classes on
LAST = 10  # the result of a run is the mean of this many last evaluations, as in the paper
LONGEST = 300  # longer lists of numbers are packed: as text, 8,142 numbers take 150 KB in every round
_PACKED = re.compile(r"zlib-([dq?]):")
_CLIENTS = ("clients", "answered", "left_out")  # their numbers stay text


def window(rounds: int) -> int:
    """The number of last evaluations in the mean of a run. It is at most half of the rounds: the first ones are a
    warm-up."""
    return max(1, min(LAST, rounds // 2))


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are there. None if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def best_round(records: Iterable[Mapping[str, Any]]) -> int:
    """The first round with the highest class-balanced accuracy on the validation examples. 0 if there is none."""
    found = [(record["validation"]["balanced"], -record["round"]) for record in records if "validation" in record]
    judged = [pair for pair in found if pair[0] is not None]
    return -max(judged)[1] if judged else 0


def has_stopped(records: Sequence[Mapping[str, Any]], patience: int | None) -> bool:
    """Whether the last record is an evaluation, `patience` rounds or more after the best round."""
    if patience is None or not records or "validation" not in records[-1]:
        return False
    return bool(records[-1]["round"] - best_round(records) >= patience)


def packed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of a round, with its long lists of numbers as strings, `zlib-d:...`: the type (d: float64, q: int64, ?:
    bool), and the numbers in little-endian order, compressed by zlib, in base64. None is stored as NaN."""
    return _each(record, lambda name, value: value if name in _CLIENTS else _packed(value))


def unpacked_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of a round as it was before it was packed."""
    return _each(record, lambda _, value: unpacked(value))


def _each(record: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    evaluations = ("test", "validation")
    return {
        name: _each(value, change) if name in evaluations and isinstance(value, Mapping) else change(name, value)
        for name, value in record.items()
    }


def _packed(value: Any) -> Any:
    kinds = set(map(type, value)) - {type(None)} if isinstance(value, list) and len(value) > LONGEST else set()
    if not kinds or not kinds <= {bool, int, float}:
        return value
    kind = "?" if kinds == {bool} else "q" if kinds == {int} else "d"
    if kind != "d" and None in value:
        return value
    numbers = struct.pack(f"<{len(value)}{kind}", *[math.nan if v is None else v for v in value])
    return f"zlib-{kind}:{base64.b64encode(zlib.compress(numbers, 9)).decode()}"


def unpacked(value: Any, longest: int = 10**6) -> Any:
    """A list of numbers from a record, packed or not. ValueError if it is damaged, or longer than `longest`."""
    if not isinstance(value, str) or not (packed := _PACKED.match(value)):
        return value
    kind, size = packed[1], struct.calcsize(f"<{packed[1]}")
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b64decode(value[packed.end() :], validate=True), longest * size + 1)
    except (zlib.error, binascii.Error) as error:
        raise ValueError(f"a packed list of numbers is damaged: {error}") from error
    if not stream.eof or len(data) % size:
        raise ValueError(f"a packed list of numbers is cut off, or longer than {longest}")
    numbers = struct.unpack(f"<{len(data) // size}{kind}", data)
    return [None if math.isnan(v) else v for v in numbers]
