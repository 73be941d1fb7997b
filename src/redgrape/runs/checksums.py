"""SHA256SUMS: checksums of the small files of a run or a model, in the format of `sha256sum --check`.

A checksum is written before its file. While a file is being replaced, the list holds both its old and its new checksum,
so a crash in between leaves nothing that looks damaged. Files that are not listed or do not exist are not checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from redgrape.errors import StorageError
from redgrape.runs import durable

NAME = "SHA256SUMS"


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write each file atomically, and list its checksum."""
    before = {name: {digest_of(data)} for name in files if (data := _content(folder / name)) is not None}
    after = {name: {digest_of(data)} for name, data in files.items()}
    listed = read(folder)
    _write_list(folder, {**listed, **{name: sums | before.get(name, set()) for name, sums in after.items()}})
    for name, data in files.items():
        durable.replace_file(folder / name, data)
    if any(before.get(name, sums) != sums for name, sums in after.items()):
        _write_list(folder, {**listed, **after})


def add(folder: Path, names: Iterable[str]) -> None:
    """List the current checksums of these files."""
    contents = {name: _content(folder / name) for name in names}
    sums = {name: {digest_of(data)} for name, data in contents.items() if data is not None}
    _write_list(folder, {**read(folder), **sums})


def remove(folder: Path, names: Iterable[str]) -> None:
    """Remove these files from the list, because they are about to change."""
    listed = read(folder)
    if listed.keys() & set(names):
        _write_list(folder, {name: sums for name, sums in listed.items() if name not in set(names)})


def is_whole(folder: Path, name: str) -> bool:
    """Whether the file matches its checksum. True if it is not listed or does not exist."""
    data = _content(folder / name)
    return data is None or fits(folder, name, data)


def fits(folder: Path, name: str, data: bytes) -> bool:
    sums = read(folder).get(name)
    return sums is None or digest_of(data) in sums


def read(folder: Path) -> dict[str, set[str]]:
    path = folder / NAME
    listed: dict[str, set[str]] = {}
    for line in (_content(path) or b"").splitlines():
        digest, _, name = line.decode(errors="replace").partition("  ")
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef") or name not in _LISTABLE:
            raise StorageError(f"'{path}' is damaged; remove it if you know that the other files are good")
        listed.setdefault(name, set()).add(digest)
    return listed


_LISTABLE = {
    "experiment.toml",
    "environment.json",
    "partition.safetensors",
    "metrics.jsonl",
    "times.jsonl",
    "summary.json",
    "evaluation.json",
    "model.json",
    "model.safetensors",
    "model.onnx",
    "README.md",
}


def of(files: Mapping[str, bytes]) -> bytes:
    """The checksum list of these files, for a folder that is created in one step."""
    return _as_text({name: [digest_of(data)] for name, data in files.items()})


def _write_list(folder: Path, listed: Mapping[str, Iterable[str]]) -> None:
    durable.replace_file(folder / NAME, _as_text(listed))


def _as_text(listed: Mapping[str, Iterable[str]]) -> bytes:
    lines = [f"{digest}  {name}\n" for name, sums in sorted(listed.items()) for digest in sorted(sums)]
    return "".join(lines).encode()


def _content(path: Path) -> bytes | None:
    with durable.storage_errors("read", path):
        return durable.ordinary(path).read_bytes() if path.exists() else None


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def hash_of(values: Mapping[str, Any]) -> str:
    """The hash of a description. Equal values give equal hashes."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
