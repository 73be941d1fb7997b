"""The format of messages between server and site: a small header, and groups of named tensors as safetensors bytes.

Tensors travel as bytes, so processes that pass them on need not load torch. Nothing that is read here is trusted.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from flwr.app import RecordDict

Header: TypeAlias = dict[str, Any]
Parts: TypeAlias = Mapping[str, bytes]

PROTOCOL = 2  # of the questions and answers; both sides must speak the same
LARGEST_HEADER = 1 << 20  # bytes
LARGEST_LETTER = 1 << 34
REFUSED = "REFUSED: "  # begins a line of a site's log if its policy does not allow a question


class NotUnderstood(Exception):
    """What came over the wire is not a valid letter; the message says why."""


def pack(header: Mapping[str, Any], parts: Parts) -> RecordDict:
    """A letter in Flower's format."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    arrays = {name: Array("uint8", (len(data),), "safetensors", data) for name, data in parts.items()}
    return RecordDict({"header": ConfigRecord({"json": json.dumps(header)}), "parts": ArrayRecord(arrays)})


def unpack(content: RecordDict) -> tuple[Header, dict[str, bytes]]:
    try:
        header = _header(str(content.config_records["header"]["json"]))
        return header, {str(name): bytes(array.data) for name, array in content.array_records["parts"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise NotUnderstood(f"it is not a letter of redgrape ({type(error).__name__}: {error})") from error


def _header(text: str | bytes) -> Header:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotUnderstood(f"its header is not JSON ({type(error).__name__})") from error
    if not isinstance(header, dict):
        raise NotUnderstood("its header is not a table")
    return header


def send(connection: socket.socket, header: Mapping[str, Any], parts: Parts) -> None:
    """Send a letter between two processes of one site."""
    head = json.dumps({"header": header, "parts": {name: len(data) for name, data in parts.items()}}).encode()
    connection.sendall(len(head).to_bytes(8, "big") + head)
    for data in parts.values():
        connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Header, dict[str, bytes]]:
    size = int.from_bytes(_exactly(connection, 8), "big")
    if size > LARGEST_HEADER:
        raise NotUnderstood(f"its header has {size} bytes")
    head = _header(_exactly(connection, size))
    try:
        header, sizes = dict(head["header"]), {str(name): int(n) for name, n in head["parts"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotUnderstood("its header names no parts") from error
    if min(sizes.values(), default=0) < 0 or sum(sizes.values()) > LARGEST_LETTER:
        raise NotUnderstood(f"it says that it has {sum(sizes.values())} bytes")
    return header, {name: _exactly(connection, n) for name, n in sizes.items()}


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        block = connection.recv(min(size - len(data), 1 << 20))
        if not block:
            raise NotUnderstood("it ends too early")
        data += block
    return bytes(data)
