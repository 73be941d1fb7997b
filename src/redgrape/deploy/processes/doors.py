"""Access control at Flower's ports, and limits on the size of a request.

Flower's SuperLink and SuperNode authenticate nobody but sites, by a signature, and they read the whole request before
they check it. So what they serve is put behind a door:

    a site's part         open to all; little is read until the signature is verified against a registered key
    everything else       only for processes of the same user on this machine
"""

from __future__ import annotations

import asyncio
import binascii
import ipaddress
import os
import struct
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import h11
from starlette.concurrency import run_in_threadpool
from uvicorn.protocols.http.h11_impl import H11Protocol

TABLES = Path("/proc/net")  # the kernel's lists of connections
_ESTABLISHED = "01"  # in other states a connection may have lost its owner, and its user is shown as 0
HEAD_DEADLINE = 10.0  # seconds for the head of a request
LINGER = 2.0  # seconds for the client to read a final answer before the connection ends
HEADS = 256  # connections that may wait for a head at the same time


@dataclass(frozen=True)
class Limit:
    size: int  # bytes of a request's body
    seconds: float  # for all of it


STRANGER = Limit(1 << 16, 10.0)
KNOWN = Limit(1 << 25, 300.0)  # Flower sends tensors in pieces of 5 MiB


class Refused(Exception):
    """A refused request: the status, and why."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Door:
    """An ASGI app in front of another one. `open_to_sites`: the prefixes of the paths of a site's part. `knows`:
    whether the headers of a request are signed by a site."""

    def __init__(
        self, app: Any, open_to_sites: tuple[str, ...] = (), knows: Callable[[Any], bool] | None = None
    ) -> None:
        self._app, self._open, self._knows = app, open_to_sites, knows

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            body = await _read(scope, receive, await self._limit(scope))
        except Refused as error:
            headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": error.status, "headers": headers})
            await send({"type": "http.response.body", "body": str(error).encode()})
            return
        await self._app(scope, _Again(body, receive), send)

    async def _limit(self, scope: Any) -> Limit:
        if scope["type"] == "http" and scope["path"].startswith(self._open):
            signed = self._knows is not None and await run_in_threadpool(self._knows, dict(scope["headers"]))
            return KNOWN if signed else STRANGER
        if owner(scope.get("client"), scope.get("server")) != os.geteuid():
            raise Refused(403, "for this machine's own processes only")
        return KNOWN


async def _read(scope: Any, receive: Any, limit: Limit) -> list[bytes]:
    """The body, in pieces."""
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    size, pieces, more = int(declared), [], True  # h11 has checked that it is a number
    try:
        async with asyncio.timeout(limit.seconds):
            while more and size <= limit.size:
                event = await receive()
                if event["type"] != "http.request":
                    raise Refused(400, "the request ends too early")
                pieces.append(event.get("body", b""))
                size, more = sum(map(len, pieces)), event.get("more_body", False)
    except TimeoutError:
        raise Refused(408, f"a request is to be here within {limit.seconds:g} seconds") from None
    if size > limit.size:
        raise Refused(413, f"a request has at most {limit.size} bytes here")
    return pieces


class _Again:
    """Replays a body that was already read, then continues with what follows."""

    def __init__(self, pieces: list[bytes], receive: Any) -> None:
        self._pieces, self._receive = pieces[::-1], receive

    async def __call__(self) -> Any:
        if not self._pieces:
            return await self._receive()
        body = self._pieces.pop()
        return {"type": "http.request", "body": body, "more_body": bool(self._pieces)}


class Bounded(H11Protocol):  # type: ignore[misc]  # Flower, which brings it, may not be installed
    """uvicorn's connection with a deadline for the head of a request: without one it would wait for ever. If too many
    wait, the oldest is ended. h11 limits a head to 64 KiB."""

    _waiting: ClassVar[dict[Bounded, asyncio.TimerHandle]] = {}  # the oldest first

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._update_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():  # TLS keeps reading until the other side closes too
            self.loop.call_later(LINGER, self.transport.abort)

    def _update_deadline(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self not in self._waiting:
            self._waiting[self] = self.loop.call_later(HEAD_DEADLINE, self.transport.abort)
            if len(self._waiting) > HEADS:
                oldest = next(iter(self._waiting))
                oldest._stop_waiting()
                oldest.transport.abort()

    def _stop_waiting(self) -> None:
        if (timer := self._waiting.pop(self, None)) is not None:
            timer.cancel()


def owner(client: tuple[str, int] | None, server: tuple[str, int] | None) -> int | None:
    """The user id at the other end of a connection; None if that is not on this machine."""
    if client is None or server is None:
        return None
    for table, six in (("tcp", False), ("tcp6", True)):
        ends = _written(*client, six), _written(*server, six)
        try:
            lines = (TABLES / table).read_text(encoding="ascii").splitlines()[1:]
        except FileNotFoundError:  # no IPv6
            continue
        for fields in map(str.split, lines):
            if (fields[1], fields[2], fields[3]) == (*ends, _ESTABLISHED):
                return int(fields[7])
    return None


def _written(host: str, port: int, six: bool) -> str | None:
    """An address in the format of the kernel's list: 32-bit words in this machine's byte order. An IPv6 socket may have
    an IPv4 address."""
    ip: Any = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    if ip.version == 4 and six:
        ip = ipaddress.IPv6Address(f"::ffff:{ip}")
    if (ip.version == 6) != six:
        return None
    words = struct.unpack(f"={len(ip.packed) // 4}I", ip.packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def signed_by_a_site(state: Callable[[], Any]) -> Callable[[dict[bytes, bytes]], bool]:
    """Whether headers are signed with a key that this SuperLink knows, as Flower checks it later. Here it only decides
    how much is read, so the time is not checked. `state` returns Flower's state, which has the keys."""
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    names = [name.lower().encode() for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER)]

    def knows(headers: dict[bytes, bytes]) -> bool:
        try:
            key, signature = (b64decode(headers[name], validate=True) for name in names)
            if state().get_node_id_by_public_key(key) is None:
                return False
            signed = headers[TIMESTAMP_HEADER.lower().encode()]
            return bool(verify_signature(bytes_to_public_key(key), signed, signature))
        except (KeyError, ValueError, TypeError, binascii.Error):
            return False

    return knows
