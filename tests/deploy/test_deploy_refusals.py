"""Who is not let in, and what is not open: real SuperLink and SuperNodes; minutes."""

from __future__ import annotations

import os
import ssl
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import tomli_w
from deployments import OPEN, Federated, Local, Running, family, first_updates, free_port, wait_for
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from test_deploy_doors import connect, head
from test_deploy_doors import status as status_of

from redgrape import tree
from redgrape.deploy.processes.supervision import APP, environment
from redgrape.deploy.setup import certificates
from redgrape.deploy.setup.create import create
from redgrape.deploy.setup.folder import Deployment, write_private

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SMALL = ["-c", "net.name='mlp'", "-c", "method.lr=0.1", "-c", "method.batch_size=8"]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    folder = tmp_path_factory.mktemp("refusals")
    federated = Federated(folder / "data")
    with Local(folder, federated, *OPEN, "--test", folder / "data/test.npz") as deployment:
        deployment.set(deadlines__join=15)
        deployment.start_server()
        for name in ("north", "south"):
            deployment.start_site(name)
        yield deployment


def _west(deployment: Local) -> Path:
    return deployment.path / "sites" / "west"


@pytest.fixture
def west(deployment: Local) -> Iterator[Path]:
    """The folder of a site that is spoilt, and made whole again."""
    folder = _west(deployment)
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    yield folder
    if "west" in deployment.sites:
        deployment.sites["west"].end()
    for path, data in before.items():
        path.write_bytes(data)


def _model_was_sent(folder: Path) -> bool:
    log = folder / "supernode.log"
    return log.exists() and ("Receiving: train" in log.read_text() or "Receiving: evaluate" in log.read_text())


def _set(folder: Path, **changes: object) -> None:
    values = tomllib.loads((folder / "site.toml").read_text())
    (folder / "site.toml").write_text(tomli_w.dumps(values | changes))


def _refused(deployment: Local, folder: Path, words: str) -> None:
    """The site's command ends by itself, in one line that says why."""
    site = deployment.start_site("west")
    assert site.process.wait(timeout=90) == 2, site.text()
    assert words in site.text() and "Traceback" not in site.text(), site.text()
    assert not _model_was_sent(folder)


def test_a_server_with_another_authority_is_refused(deployment: Local, west: Path, tally: Callable[..., None]) -> None:
    (west / "ca.crt").write_bytes(certificates.certificate_bytes(certificates.authority(certificates.new_key())))
    _refused(deployment, west, "not the server of this deployment")
    assert _flower_itself_refuses(deployment, west)
    tally("refused: an authority that the site does not know", 1, 1)


def raw(*words: object, log: Path, home: Path) -> Running:
    """Flower's own command, as redgrape starts it."""
    env = environment(home, {APP: "0" * 64})
    return Running(*words, log=log, program=["-m", "redgrape.deploy.processes.launch"], **env)


def _flower_itself_refuses(deployment: Local, folder: Path) -> bool:
    """Without the look that redgrape takes beforehand."""
    words = ["supernode", "--superlink", f"localhost:{deployment.port}", "--host", "127.0.0.1", "--port", free_port()]
    words += ["--root-certificates", folder / "ca.crt", "--auth-supernode-private-key", folder / "key"]
    words += ["--max-wait-time", "3"]
    node = raw(*words, log=deployment.logs / "raw.log", home=deployment.logs / "flower")
    try:
        return node.process.wait(timeout=90) != 0
    finally:
        node.kill_all()


@pytest.mark.parametrize("fault", ["expired", "host name"])
def test_a_bad_certificate_of_the_server_is_refused(
    tmp_path: Path, fault: str, deployment: Local, tally: Callable[..., None]
) -> None:
    port = free_port()
    options = Deployment(deployment.path).options.model_copy(update={"port": port, "test": None})
    create(tmp_path / "other", options)
    server, site = tmp_path / "other/server", tmp_path / "other/sites/west"
    signing_key, authority = certificates.load_authority(server / "ca.key", server / "ca.crt")
    key = certificates.new_key()
    hosts, days = (["localhost"], -1) if fault == "expired" else (["fl.example.org"], 10)
    (server / "server.key").unlink()
    write_private(server / "server.key", certificates.private_bytes(key))
    certificate = certificates.server_certificate(key, hosts, authority, signing_key, days)
    (server / "server.crt").write_bytes(certificates.certificate_bytes(certificate))
    words = ["superlink", "--host", "127.0.0.1", "--port", port, "--enable-supernode-auth"]
    words += ["--ssl-ca-certfile", server / "ca.crt", "--ssl-certfile", server / "server.crt"]
    words += ["--ssl-keyfile", server / "server.key"]
    link = raw(*words, log=tmp_path / "link.log", home=tmp_path / "flower")
    try:
        link.says("Uvicorn running")
        words = ["deploy", "site", site, "--data", deployment.federated.data("west")]
        done = Running(*words, log=tmp_path / "site.log")
        assert done.process.wait(timeout=90) == 2
        assert ("expired" if fault == "expired" else "mismatch") in done.text()
        assert not _model_was_sent(site)
        if fault == "expired":
            refusing = Running("deploy", "server", tmp_path / "other", log=tmp_path / "server.log")
            assert refusing.process.wait(timeout=90) in (2, 75)  # it does not even start, or the port is taken
    finally:
        link.kill_all()
    tally(f"refused: a server's certificate with a wrong {fault}", 1, 1)


def test_an_unregistered_key_is_refused(deployment: Local, west: Path, tally: Callable[..., None]) -> None:
    private, _ = certificates.site_key_bytes(certificates.new_key())
    (west / "key").write_bytes(private)
    site = deployment.start_site("west")
    site.says("not connected; trying again")
    text = deployment.run("unregistered", *SMALL, "--rounds", 1)
    assert deployment.metrics("unregistered")[0]["answered"] == [0, 1], text
    assert not _model_was_sent(west)
    tally("refused: an unregistered key", 1, 1)


def test_a_swapped_key_is_refused(deployment: Local, west: Path, tally: Callable[..., None]) -> None:
    """West with south's key, while south is away: the server would take it for south."""
    (west / "key").write_bytes((deployment.path / "sites/south/key").read_bytes())
    deployment.sites["south"].end()
    site = deployment.start_site("west")
    site.says("taking part")
    wait_for(lambda: "SuperNode ID" in (west / "supernode.log").read_text(), "a connection", 90)
    text = deployment.run("swapped", *SMALL, "--rounds", 1, "-c", "min_answers=1")
    assert "it says that it is site 'west', but its key is that of 'south'" in text
    assert deployment.metrics("swapped")[0]["answered"] == [0]
    assert not _model_was_sent(west)
    site.end()
    deployment.start_site("south")
    tally("refused: a swapped key", 1, 1)


def test_no_certificates_at_all(deployment: Local, west: Path, tmp_path: Path, tally: Callable[..., None]) -> None:
    _set(west, plain=True)
    site = deployment.start_site("west")
    site.says("not connected; trying again")
    assert not _model_was_sent(west)
    site.end()
    _set(west, plain=True, server="10.0.0.1:8443")
    _refused(deployment, west, "without TLS only this machine is allowed")
    words = ["--sites", "a", "--host", "10.0.0.1", "--classes", "3", "--shape", "4", "--plain"]
    assert "without TLS" in deployment.command("deploy", "init", tmp_path / "plain", *words, code=2)
    tally("refused: no certificates", 3, 3)


def _family(deployment: Local) -> list[int]:
    assert deployment.server is not None
    roots = [deployment.server, *deployment.sites.values()]
    return [
        pid for root in roots if root.process.poll() is None for pid in [root.process.pid, *family(root.process.pid)]
    ]


def _listening(pids: list[int]) -> list[str]:
    """The addresses at which these processes wait for connections, as the kernel writes them."""
    inodes = set()
    for pid in pids:
        try:
            inodes |= {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:  # it has just ended, or closed one
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1].split(":")[0])
    return found


def test_nothing_listens_beyond_the_address_asked_for(deployment: Local, tally: Callable[..., None]) -> None:
    def doors() -> list[str] | None:
        found = _listening(_family(deployment))
        return found if len(found) >= 3 else None  # the server and two sites

    listening = wait_for(doors, "three doors")
    assert set(listening) == {"0100007F"}, listening  # 127.0.0.1
    for pid in _family(deployment):
        try:
            told = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # a process for a message, which has ended
            continue
        if b"FLWR_HOME" in told:
            assert b"FLWR_TELEMETRY_ENABLED=0" in told and b"FLWR_DISABLE_UPDATE_CHECK=1" in told
            assert b"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1" in told
    tally("nothing listens beyond the address asked for", len(listening), len(listening))


CLOSED = ["/v1/control/list-nodes", "/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/openapi.json"]
STRANGER = 12345  # a user's number


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_server_s_machine_reaches_only_the_sites_part(
    deployment: Local, tally: Callable[..., None]
) -> None:
    context = ssl.create_default_context(cafile=str(deployment.path / "server/ca.crt"))

    def status(path: str, user: int) -> int:
        with (
            connect(("127.0.0.1", deployment.port), user) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(head(path, 0))
            return status_of(connection)

    assert [status(path, STRANGER) for path in CLOSED] == [403] * len(CLOSED)
    assert status("/v1/control/list-nodes", os.geteuid()) != 403
    assert status("/v1/fleet/pull-messages", STRANGER) in (400, 401, 415)  # open, but not without a key
    tally("another user of the server's machine starts nothing", len(CLOSED), len(CLOSED))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_a_site_s_machine_reaches_nothing(deployment: Local, tally: Callable[..., None]) -> None:
    def doors() -> list[int] | None:
        commands = [_words(pid).decode().split("\0") for pid in _family(deployment)]
        found = [int(words[words.index("--port") + 1]) for words in commands if "supernode" in words]
        logs = [deployment.path / f"sites/{name}/supernode.log" for name in ("north", "south")]
        ready = all(log.exists() and "SuperNode ID" in log.read_text() for log in logs)
        return found if ready and len(found) == 2 else None

    ports = wait_for(doors, "two SuperNodes")
    for port in ports:
        for path, own in (("/v1/runtime/acquire-task", 200), ("/v1/runtime/pull-task-input", 401), ("/health", 405)):
            for user, answer in ((STRANGER, 403), (os.geteuid(), own)):
                with connect(("127.0.0.1", port), user) as connection:
                    connection.sendall(head(path, 0, f"content-type: {PROTOBUF_MEDIA_TYPE}"))
                    assert status_of(connection) == answer
    tally("another user of a site's machine takes no question", len(ports), len(ports))


def test_a_connection_without_a_key_fills_no_memory(deployment: Local, tally: Callable[..., None]) -> None:
    """An endless request, in chunks and so without its length. The server reads on for a moment, and then hangs up."""
    context = ssl.create_default_context(cafile=str(deployment.path / "server/ca.crt"))
    (link,) = [pid for pid in _family(deployment) if b"superlink\0--host" in _words(pid)]
    before, sent = _memory(link), 0
    with (
        connect(("127.0.0.1", deployment.port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        begin = "POST /v1/fleet/push-object HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
        connection.sendall(f"{begin}content-type: {PROTOBUF_MEDIA_TYPE}\r\n\r\n".encode())
        begun = time.monotonic()
        try:
            while time.monotonic() < begun + 60:
                connection.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
                sent += 1 << 20
        except (OSError, ssl.SSLError):
            pass
    grown = _memory(link) - before
    assert grown < 1 << 25, (sent, grown)
    assert time.monotonic() < begun + 30
    tally("a connection without a key fills no memory", 1, 1)


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _memory(pid: int) -> int:
    """Bytes, at the most so far."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def test_what_single_sites_send_is_not_on_the_server_s_disk(deployment: Local, tally: Callable[..., None]) -> None:
    """Not while the server runs, nor after: the first weights of each site's update are in no file of the server's."""
    deployment.run("traces", *SMALL, "--rounds", 2, "--method", "fedavg", "-c", "min_answers=2")
    updates = first_updates(deployment.folder("traces").experiment(), deployment.federated)
    traces = [tree.flatten(updates[k])["delta/classifier.weight"].numpy().tobytes()[:64] for k in (0, 1)]
    files = [path for path in deployment.path.rglob("*") if path.is_file() and "sites" not in path.parts]
    assert len(files) > 10 and not any(trace in path.read_bytes() for trace in traces for path in files)
    tally("what single sites send is not on the server's disk", len(traces), len(traces))


def test_another_app_is_not_run_at_the_sites(deployment: Local, tmp_path: Path, tally: Callable[..., None]) -> None:
    """What whoever has the server could send."""
    code = deployment.path / "app/redgrape_app/client.py"
    before, trace = code.read_text(), tmp_path / "trace"
    code.write_text(f"open({str(trace)!r}, 'w').close()\n{before}")
    try:
        text = deployment.run("other-app", *SMALL, "--rounds", 1, code=4)
    finally:
        code.write_text(before)
    assert not trace.exists()
    assert "(app in its site.toml)" in text and "NOT RUN" in deployment.sites["north"].text()
    deployment.run("own-app", *SMALL, "--rounds", 1)
    tally("another app is not run at a site", 2, 2)
