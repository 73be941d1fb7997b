"""Fetching from a server on this machine: what is right arrives whole, what is wrong leaves nothing behind."""

from __future__ import annotations

import gzip
import hashlib
import io
import socket
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from redgrape.data.fetch import fetch
from redgrape.data.sources import DATASETS, Dataset
from redgrape.errors import ConfigError, DataError, StorageError

CONTENT = {"one.bin": b"first" * 1000, "two.bin": b"second" * 1000}
DIGESTS = {
    "one.bin": "sha256:" + hashlib.sha256(CONTENT["one.bin"]).hexdigest(),
    "two.bin": "md5:" + hashlib.md5(CONTENT["two.bin"]).hexdigest(),
}


class Server:
    """Answers from a table of path -> body; one in `cut` breaks off half way, one in `unmeasured` tells no length."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.unmeasured: set[str] = set()
        self.requests: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append(self.path)
                if self.path not in outer.bodies:
                    self.send_error(404)
                    return
                body = outer.bodies[self.path]
                self.send_response(200)
                if self.path not in outer.unmeasured:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) // 2] if self.path in outer.cut else body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


@pytest.fixture
def plain(server: Server, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """A set whose files are published one by one, right at `main` and at `mirror`."""
    dataset = Dataset("tiny", "tiny-folder", DIGESTS, (f"{server.url}/main/", f"{server.url}/mirror/"), ("a", "b"))
    monkeypatch.setitem(DATASETS, "tiny", dataset)
    for name, content in CONTENT.items():
        server.bodies[f"/main/{name}"] = server.bodies[f"/mirror/{name}"] = content
    return dataset


@pytest.fixture
def packed(server: Server, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """A set that is published as an archive."""
    dataset = Dataset("tiny", "tiny-folder", DIGESTS, (f"{server.url}/",), ("a", "b"), archive="tiny.tar.gz")
    monkeypatch.setitem(DATASETS, "tiny", dataset)
    return dataset


def archive(members: list[tuple[str | tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member, content in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def files_under(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


WHOLE = {f"tiny-folder/{name}": content for name, content in CONTENT.items()}


def test_files_arrive_whole_and_are_not_fetched_twice(plain: Dataset, server: Server, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int | None]] = []
    assert fetch("tiny", tmp_path, progress=lambda *step: steps.append(step)) == tmp_path / "tiny-folder"
    assert files_under(tmp_path) == WHOLE
    assert steps[-1] == ("two.bin", 6000, 6000)
    assert server.requests == ["/main/one.bin", "/main/two.bin"]
    fetch("tiny", tmp_path)
    assert len(server.requests) == 2
    (tmp_path / "tiny-folder" / "two.bin").write_bytes(b"damaged")
    fetch("tiny", tmp_path)
    assert server.requests[2:] == ["/main/two.bin"]
    assert files_under(tmp_path) == WHOLE


def test_a_server_that_tells_no_length(plain: Dataset, server: Server, tmp_path: Path) -> None:
    server.unmeasured.add("/main/one.bin")
    steps: list[tuple[str, int, int | None]] = []
    fetch("tiny", tmp_path, progress=lambda *step: steps.append(step))
    assert ("one.bin", 5000, None) in steps
    assert files_under(tmp_path) == WHOLE


@pytest.mark.parametrize("fault", ["missing", "wrong", "cut"])
def test_the_mirror_helps_out(fault: str, plain: Dataset, server: Server, tmp_path: Path) -> None:
    spoil(server, "/main/one.bin", fault)
    fetch("tiny", tmp_path)
    assert files_under(tmp_path) == WHOLE
    assert server.requests == ["/main/one.bin", "/mirror/one.bin", "/main/two.bin"]


def spoil(server: Server, path: str, fault: str) -> None:
    if fault == "missing":
        del server.bodies[path]
    elif fault == "wrong":
        server.bodies[path] = b"x" + server.bodies[path][1:]
    else:
        server.cut.add(path)


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("missing", "the server answered 404"),
        ("wrong", "two.bin is not the right file: expected md5:"),
        ("cut", r"3000 of 6000 bytes|3000 bytes read, 3000 more expected"),
    ],
)
def test_failure_is_one_line_and_leaves_nothing_half_written(
    fault: str, complaint: str, plain: Dataset, server: Server, tmp_path: Path
) -> None:
    for home in ("main", "mirror"):
        spoil(server, f"/{home}/two.bin", fault)
    with pytest.raises(DataError, match=complaint) as raised:
        fetch("tiny", tmp_path)
    assert "\n" not in str(raised.value)
    assert "/main/" in str(raised.value)
    assert "/mirror/" in str(raised.value)
    assert files_under(tmp_path) == {"tiny-folder/one.bin": CONTENT["one.bin"]}


def test_nobody_listens(plain: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        home = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        monkeypatch.setitem(DATASETS, "tiny", replace(plain, urls=(home,)))
        with pytest.raises(DataError, match=r"cannot fetch one.bin of tiny \(.*refused.*\); try again$"):
            fetch("tiny", tmp_path)
    assert files_under(tmp_path) == {}


def test_an_unknown_set() -> None:
    with pytest.raises(ConfigError, match="unknown dataset to fetch 'minst'; did you mean 'mnist'"):
        fetch("minst")


def test_a_folder_that_cannot_be_made(plain: Dataset, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write to"):
        fetch("tiny", tmp_path / "file")


def test_an_archive_gives_only_the_files_of_the_table(packed: Dataset, server: Server, tmp_path: Path) -> None:
    server.bodies["/tiny.tar.gz"] = archive(
        [
            ("../evil.bin", b"evil"),
            ("tiny-folder/../../evil.bin", b"evil"),
            (str(tmp_path / "evil.bin"), b"evil"),
            ("tiny-folder/readme.html", b"not wanted"),
            *((f"tiny-folder/{name}", content) for name, content in CONTENT.items()),
            ("tiny-folder/one.bin", b"a second file of the same name"),
        ]
    )
    root = tmp_path / "inner" / "root"
    fetch("tiny", root)
    assert files_under(root) == WHOLE
    assert files_under(tmp_path) == {f"inner/root/{name}": content for name, content in WHOLE.items()}
    fetch("tiny", root)
    assert len(server.requests) == 1


def test_links_in_an_archive_are_no_files(packed: Dataset, server: Server, tmp_path: Path) -> None:
    link = tarfile.TarInfo("tiny-folder/one.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    server.bodies["/tiny.tar.gz"] = archive([(link, b""), ("tiny-folder/two.bin", CONTENT["two.bin"])])
    with pytest.raises(DataError, match=r"the archive has no tiny-folder/one\.bin"):
        fetch("tiny", tmp_path)
    assert files_under(tmp_path) == {"tiny-folder/two.bin": CONTENT["two.bin"]}
    assert not (tmp_path / "tiny-folder" / "one.bin").is_symlink()


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (
            archive([("tiny-folder/one.bin", b"other"), ("tiny-folder/two.bin", b"other")]),
            "one.bin is not the right file",
        ),
        (archive([(f"tiny-folder/{n}", c * 50) for n, c in CONTENT.items()])[:-600], "damaged|not the right file"),
        (b"no archive at all", "the archive is damaged"),
        (gzip.compress(b"no archive inside" * 100, mtime=0), "the archive is damaged"),
        (b"", "the archive is damaged"),
    ],
)
def test_a_wrong_archive_leaves_nothing(
    body: bytes, complaint: str, packed: Dataset, server: Server, tmp_path: Path
) -> None:
    server.bodies["/tiny.tar.gz"] = body
    with pytest.raises(DataError, match=complaint) as raised:
        fetch("tiny", tmp_path)
    assert "\n" not in str(raised.value)
    assert files_under(tmp_path) == {}


def test_every_published_set_can_be_fetched() -> None:
    for dataset in DATASETS.values():
        assert dataset.files
        assert all(url.startswith(("https://", "http://")) and url.endswith("/") for url in dataset.urls)
        lengths = {"sha256": 64, "md5": 32}
        assert all(len(value) == lengths[kind] for kind, _, value in (d.partition(":") for d in dataset.files.values()))
