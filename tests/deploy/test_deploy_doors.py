"""Who is let in where Flower listens, and how much of a request is read: real connections on this machine."""

from __future__ import annotations

import base64
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

import uvicorn
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message

from redgrape.deploy.processes import doors
from redgrape.deploy.processes.doors import Bounded, Door, Limit, signed_by_a_site
from redgrape.deploy.processes.launch import OPEN_TO_SITES, guard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/net tells whose a connection is")

STRANGER = 12345  # a user's number
FLEET, CONTROL = "/v1/fleet/push-object", "/v1/control/start-run"


class Flower:
    """What stands behind the door: notes what has reached it."""

    def __init__(self) -> None:
        self.reached: list[tuple[str, int]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, True
        while more:
            event = await receive()
            size, more = size + len(event["body"]), event["more_body"]
        self.reached.append((scope["path"], size))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


class Listening:
    def __init__(self, host: str, **options: Any) -> None:
        self.flower = Flower()
        config = uvicorn.Config(
            Door(self.flower, **options), host=host, port=0, http=Bounded, ws="none", lifespan="off", log_config=None
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while self._thread.is_alive() and not self._server.started:
            time.sleep(0.01)
        self.address = self._server.servers[0].sockets[0].getsockname()[:2]

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=20)


@pytest.fixture
def superlink() -> Iterator[Listening]:
    listening = Listening("127.0.0.1", open_to_sites=OPEN_TO_SITES, knows=lambda headers: b"signed" in headers)
    yield listening
    listening.close()


def connect(address: tuple[str, int], user: int | None = None) -> socket.socket:
    """`user`: whose the connection is; only root can open one for somebody else."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    if user is not None:
        os.seteuid(user)
    try:
        connection = socket.socket(family)
    finally:
        if user is not None:
            os.seteuid(os.getuid())
    connection.settimeout(20)
    connection.connect(address)
    return connection


def head(path: str, size: int | str, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: here", f"content-length: {size}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def status(connection: socket.socket) -> int:
    """Of the answer; 0 where the connection is ended without any."""
    try:
        answer = connection.recv(1 << 16)
    except ConnectionResetError:
        return 0
    return int(answer.split()[1]) if answer else 0


def ask(address: tuple[str, int], path: str, user: int | None = None) -> int:
    with connect(address, user) as connection:
        connection.sendall(head(path, 0))
        return status(connection)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_another_user_of_the_machine_is_not_let_in(host: str) -> None:
    """At a SuperNode nowhere, at a SuperLink only where sites are."""
    for options in ({}, {"open_to_sites": OPEN_TO_SITES}):
        listening = Listening(host, **options)  # type: ignore[arg-type]
        assert ask(listening.address, CONTROL, STRANGER) == 403
        assert ask(listening.address, FLEET, STRANGER) == (200 if options else 403)
        assert ask(listening.address, CONTROL) == 200
        assert listening.flower.reached == [(FLEET, 0), (CONTROL, 0)][not options :]
        listening.close()


def test_the_user_of_the_process_decides(superlink: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(superlink.address, CONTROL) == 200
    monkeypatch.setattr(doors, "os", SimpleNamespace(geteuid=lambda: os.geteuid() + 1))
    assert ask(superlink.address, CONTROL) == 403


def test_a_connection_without_an_owner_is_nobody_s() -> None:
    """The kernel names user 0 for one whose process has closed it, which is not root's."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = connect(listening.getsockname())
        with listening.accept()[0] as accepted:
            ends = accepted.getpeername(), accepted.getsockname()
            assert doors.owner(*ends) == os.geteuid()
            client.close()
            assert doors.owner(*ends) is None
    assert doors.owner(("10.0.0.9", 5), ("10.0.0.1", 8443)) is None  # another machine's
    assert doors.owner(None, None) is None


def test_addresses_of_both_kinds_are_found() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listening:
        port = listening.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            with connect((host, port)), listening.accept()[0] as accepted:
                assert doors.owner(accepted.getpeername()[:2], accepted.getsockname()[:2]) == os.geteuid()


@pytest.mark.parametrize("declared", [True, False])
def test_of_a_stranger_little_is_read(superlink: Listening, declared: bool) -> None:
    """Whether a request says how long it is, or comes in chunks without an end."""
    with connect(superlink.address) as connection:
        if declared:
            connection.sendall(head(FLEET, 1 << 30))
        else:
            connection.sendall(f"POST {FLEET} HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            sent = 0
            chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
            try:
                while sent < 1 << 28:
                    connection.sendall(chunk)
                    sent += len(chunk)
            except (BrokenPipeError, ConnectionResetError):
                pass
            assert sent < 1 << 24  # the rest was not taken
        assert status(connection) in ((413,) if declared else (413, 0))
    assert superlink.flower.reached == []


def test_of_a_known_site_more_is_read_but_not_without_end(
    superlink: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "KNOWN", Limit(1 << 20, 5.0))
    for size, answer in ((1 << 20, 200), ((1 << 20) + 1, 413)):
        with connect(superlink.address) as connection:
            connection.sendall(head(FLEET, size, "signed: yes") + bytes(size if answer == 200 else 0))
            assert status(connection) == answer
    assert superlink.flower.reached == [(FLEET, 1 << 20)]


def test_requests_that_never_end_are_ended(superlink: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "HEAD_DEADLINE", 0.3)
    monkeypatch.setattr(doors, "STRANGER", Limit(1 << 16, 0.3))
    for said, answer in ((b"", 0), (b"POST /v1/fleet", 0), (head(FLEET, 100) + b"ab", 408)):
        with connect(superlink.address) as connection:
            connection.sendall(said)
            assert status(connection) == answer
    with connect(superlink.address) as connection:  # also the second request of a connection
        connection.sendall(head(FLEET, 0))
        assert status(connection) == 200
        connection.sendall(b"POST /v1/fleet")
        assert status(connection) == 0
    assert superlink.flower.reached == [(FLEET, 0)]


def test_a_head_has_an_end(superlink: Listening) -> None:
    with connect(superlink.address) as connection:
        try:
            connection.sendall(head(FLEET, 0, "x: " + "a" * (1 << 20)))
        except (BrokenPipeError, ConnectionResetError):
            return
        assert status(connection) in (400, 0)
    assert superlink.flower.reached == []


def test_of_too_many_that_wait_the_oldest_is_ended(superlink: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "HEADS", 3)
    waiting = []
    for _ in range(5):
        waiting.append(connect(superlink.address))
        time.sleep(0.05)
    assert [status(connection) for connection in waiting[:2]] == [0, 0]
    for connection in waiting[2:]:
        connection.sendall(head(FLEET, 0))
        assert status(connection) == 200
    for connection in waiting:
        connection.close()


def test_only_the_signature_of_a_registered_key_is_a_site_s() -> None:
    (private, public), (other, _) = generate_key_pairs(), generate_key_pairs()
    key, now = public_key_to_bytes(public), b"2026-01-01T00:00:00+00:00"
    state = SimpleNamespace(get_node_id_by_public_key=lambda asked: 7 if asked == key else None)
    knows = signed_by_a_site(lambda: state)

    def headers(key: bytes, signature: bytes) -> dict[bytes, bytes]:
        names = (b"flwr-public-key", b"flwr-signature")
        both = dict(zip(names, map(base64.b64encode, (key, signature)), strict=True))
        return both | {b"flwr-timestamp": now}

    assert knows(headers(key, sign_message(private, now)))
    assert not knows(headers(key, sign_message(other, now)))
    assert not knows(headers(public_key_to_bytes(other.public_key()), sign_message(other, now)))
    assert not knows({}) and not knows(headers(key, b"")) and not knows({b"flwr-public-key": b"%"})


def test_what_flower_serves_is_behind_a_door_or_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever trust in headers the environment asks for, a client's address is that of its connection."""
    served: dict[str, Any] = {}

    def run(app: Any, **options: Any) -> None:
        served.update(options, app=app)

    app = SimpleNamespace(state=SimpleNamespace(linkstate_factory=SimpleNamespace(state=None)))
    for name, places in (("run", OPEN_TO_SITES), ("Config", ())):
        flower = SimpleNamespace(uvicorn=SimpleNamespace(**{name: run, "Server": "theirs"}))
        guard(flower, name, places)
        getattr(flower.uvicorn, name)(app=app, host="10.0.0.1", proxy_headers=True)
        assert isinstance(served["app"], Door) and flower.uvicorn.Server == "theirs"
        assert (served["host"], served["proxy_headers"], served["http"], served["ws"]) == (
            "10.0.0.1",
            False,
            Bounded,
            "none",
        )
        for unknown in (SimpleNamespace(), SimpleNamespace(uvicorn=SimpleNamespace())):
            with pytest.raises(SystemExit, match="could not be closed"):
                guard(unknown, name)
    assert import_module("flwr.superlink.cli.flower_superlink").uvicorn.run  # what is replaced in the real ones
    assert import_module("flwr.supernode.cli.flower_supernode").uvicorn.Config
    monkeypatch.setattr(doors, "TABLES", doors.TABLES / "nowhere")
    with pytest.raises(SystemExit, match="this needs Linux"):
        guard(SimpleNamespace(uvicorn=SimpleNamespace(run=run)), "run")
