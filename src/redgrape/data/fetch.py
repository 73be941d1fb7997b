"""Downloads the public image sets. A file appears under its name only once it is complete and its digest matches."""

from __future__ import annotations

import functools
import http.client
import os
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from redgrape.data.sources import DATASETS, Dataset, data_root, digest_of, one_line
from redgrape.errors import DataError, StorageError, unknown

Progress = Callable[[str, int, int | None], None]

TIMEOUT_SECONDS = 30
BLOCK = 1 << 20


def fetch(name: str, root: Path | None = None, *, progress: Progress | None = None) -> Path:
    """Fetch the missing or damaged files of this image set and return its folder.

    progress: called with the file's name, the bytes so far, and the total if the server gives it.
    """
    if name not in DATASETS:
        raise unknown("dataset to fetch", name, DATASETS)
    dataset = DATASETS[name]
    folder = data_root(root) / dataset.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        missing = [file for file in dataset.files if not _is_right(folder / file, dataset.files[file])]
        for published in [dataset.archive] if dataset.archive and missing else missing:
            _fetch_one(published, missing, dataset, folder, progress)
    except OSError as error:
        raise StorageError(f"cannot write to {folder}: {error.strerror or one_line(error)}") from error
    return folder


def _fetch_one(published: str, missing: list[str], dataset: Dataset, folder: Path, progress: Progress | None) -> None:
    """Fetch one published file from the first address with a correct copy, and install its contents."""
    failures = []
    for home in dataset.urls:
        try:
            with _partial(folder / published) as partial:
                _write(partial, _download(home + published, published, progress))
                if dataset.archive:
                    _extract(partial, missing, dataset, folder)
                else:
                    _install(partial, folder / published, dataset.files[published])
            return
        except DataError as error:
            failures.append(f"{home}: {error}")
    raise DataError(f"cannot fetch {published} of {dataset.name} ({'; '.join(failures)}); try again")


def _download(url: str, name: str, progress: Progress | None) -> Iterator[bytes]:
    received, total = 0, None
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310 - an address of sources.py
            length = response.headers.get("Content-Length")
            total = int(length) if length else None
            while block := response.read(BLOCK):
                received += len(block)
                if progress is not None:
                    progress(name, received, total)
                yield block
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(f"the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(one_line(error)) from error
    if total is not None and received != total:
        raise DataError(f"the connection ended after {received} of {total} bytes")


def _extract(archive: Path, missing: list[str], dataset: Dataset, folder: Path) -> None:
    """Extract the missing files from the archive. Its names are only compared with ours, never used as paths."""
    targets = {f"{dataset.folder}/{file}": file for file in missing}
    try:
        with tarfile.open(archive, "r|gz") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isreg() and member.name in targets else None
                if content is not None:
                    file = targets.pop(member.name)
                    with _partial(folder / file) as partial:
                        blocks = iter(functools.partial(content.read, BLOCK), b"")
                        _write(partial, blocks)
                        _install(partial, folder / file, dataset.files[file])
    except (tarfile.TarError, zlib.error, EOFError) as error:
        raise DataError(f"the archive is damaged: {one_line(error)}") from error
    if targets:
        raise DataError(f"the archive has no {', '.join(targets)}")


def _install(partial: Path, path: Path, expected: str) -> None:
    found = digest_of(partial, expected.partition(":")[0])
    if found != expected:
        raise DataError(f"{path.name} is not the right file: expected {expected}, found {found}")
    partial.replace(path)


def _is_right(path: Path, expected: str) -> bool:
    return path.is_file() and digest_of(path, expected.partition(":")[0]) == expected


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """A temporary name next to the path, on the same file system, removed afterwards."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def _write(path: Path, blocks: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
