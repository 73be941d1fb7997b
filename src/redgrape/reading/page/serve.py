"""Show the runs of a folder live to a browser on this machine. Read-only, takes no lock.

    GET /                                    the page
    GET /runs                                every run below the folder: state and progress
    GET /news?run=ID&rows=N&stamp=S&run=...  what the page draws of these runs, less what it has: the rows it knows are
                                             left out, and so is a run's description while its stamp is the same

Anything else is 404. A request names a run by its id in the list of existing runs, so no path is built from a request.
A page of another host that resolves its name to this machine is refused by the Host header.
"""

from __future__ import annotations

import errno
import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redgrape.errors import ConfigError, StorageError
from redgrape.reading import run_view
from redgrape.reading.page.document import document, policy
from redgrape.reading.page.figures import page_data, text
from redgrape.reading.page.reading import FILES, Reading

ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class _Known:
    """The cached content of a run, valid while its files do not change."""

    stamps: tuple[Any, ...]
    reading: Reading | None  # None: damaged
    row: dict[str, Any]  # in the list of runs


class Runs:
    """The runs at or below a folder, by id. A run is read again when its files change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, _Known] = {}
        self._one_at_a_time = threading.Lock()

    def paths(self) -> dict[str, Path]:
        return {path.relative_to(self.folder).as_posix(): path for path in run_view.find_runs(self.folder)}

    def listed(self) -> list[dict[str, Any]]:
        rows = []
        for key, path in self.paths().items():
            known = self._read(key, path)
            state = known.reading.state if known.reading else "damaged"  # a lock changes no file time
            rows.append({**known.row, "state": state})
        return rows

    def news(self, asked: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
        """The data that a page lacks, given its number of rows and its description stamp for each run."""
        paths = self.paths()
        known = {key: self._read(key, paths[key]) for key in asked if key in paths}
        data = page_data(
            {key: run.reading for key, run in known.items() if run.reading},
            [(key, run.row["reason"]) for key, run in known.items() if not run.reading],
        )
        changed, splits, rounds = {}, {}, {}
        for key, run in data["runs"].items():
            rows, stamp = asked[key]
            if (now := _digest(run)) != stamp:
                changed[key] = {**run, "stamp": now}
                if run["split"] in data["splits"]:
                    splits[run["split"]] = data["splits"][run["split"]]
            columns = data["rounds"][key]
            start = max(0, min(rows, len(columns.get("round", ()))))
            rounds[key] = {"from": start, "columns": {name: values[start:] for name, values in columns.items()}}
        return {**data, "runs": changed, "splits": splits, "rounds": rounds, "there": list(data["runs"])}

    def _read(self, key: str, path: Path) -> _Known:
        with self._one_at_a_time:
            records = [file for file in (path, path.parent) if file.is_file()]
            stamps = tuple(map(_stamp, [*records, *(path / name for name in FILES)]))
            known = self._known.get(key)
            if known is None or known.stamps != stamps:
                known = self._known[key] = _read_run(key, path, stamps)
            return known


def _read_run(key: str, path: Path, stamps: tuple[Any, ...]) -> _Known:
    row = {"id": key, "name": text(key), "changed": max(stamp[0] for stamp in stamps if stamp) // 10**6}
    try:
        reading = Reading.of(path)
    except (StorageError, OSError) as error:
        return _Known(stamps, None, {**row, "reason": text(error)})
    data = page_data({key: reading})
    if data["damaged"]:
        return _Known(stamps, None, {**row, "reason": data["damaged"][0]["reason"]})
    run, setting = data["runs"][key], data["settings"][0]
    row |= {name: run[name] for name in ("seed", "done", "rounds", "result")}
    return _Known(stamps, reading, {**row, "method": setting["methods"][0]["label"], "setting": setting["title"]})


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


class Server(ThreadingHTTPServer):
    """Answers only browsers on this machine."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self.runs = Runs(folder)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                why = "in use" if error.errno == errno.EADDRINUSE else "not allowed"
                raise ConfigError(f"port {port} is {why}; name another with --port, 0 for any that is free") from error
            raise
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that disconnects in the middle of an answer."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "redgrape", ""
    timeout = 30

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in self.server.hosts:
            self._answer(403, "text/plain", f"this is {self.server.address}, and the request asks for another host\n")
            return
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, keep_blank_values=True, max_num_fields=3000)
        except ValueError:
            self.send_error(404)
            return
        match parts.path:
            case "/":
                page = document({"live": True, "folder": text(self.server.runs.folder)}, "redgrape runs")
                self._answer(200, "text/html", page)
            case "/runs":
                self._answer(200, "application/json", json.dumps(self.server.runs.listed(), allow_nan=False))
            case "/news":
                asked = _asked(query)
                known = self.server.runs.paths()
                if asked is None or not asked.keys() <= known.keys():
                    self.send_error(404)
                else:
                    self._answer(200, "application/json", json.dumps(self.server.runs.news(asked), allow_nan=False))
            case _:
                self.send_error(404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        code = 405 if code == 501 else code  # methods without a do_..., such as POST
        self._answer(code, "text/plain", f"{code}\n")

    def _answer(self, code: int, kind: str, body: str) -> None:
        content = body.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", f"{policy(live=True)}; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        if code == 405:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests: their text is untrusted."""


def _asked(query: Mapping[str, list[str]]) -> dict[str, tuple[int, str]] | None:
    """Parse the query as {run: (rows, stamp)}. None if the three lists do not match."""
    keys, rows, stamps = (query.get(name, []) for name in ("run", "rows", "stamp"))
    if not len(keys) == len(rows) == len(stamps) or not all(n.isdecimal() and len(n) < 10 for n in rows):
        return None
    return {key: (int(n), stamp) for key, n, stamp in zip(keys, rows, stamps, strict=True)}
