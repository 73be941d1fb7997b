"""Atomic writes: a file is either complete or absent, even after a crash.

Every step of a save calls `fault_point`, where a test can end the process. Tests crash at each of these steps.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from redgrape.errors import ConfigError, RedgrapeError, StorageError

# O_BINARY exists only on Windows, O_NOFOLLOW everywhere else
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_steps: dict[str, int] = {}


def fault_point(kind: str) -> None:
    """End the process if REDGRAPE_CRASH_AT names this step. For example, `fsync:3` is the third fsync."""
    crash_at = os.environ.get("REDGRAPE_CRASH_AT")
    if crash_at is not None:
        _steps[kind] = _steps.get(kind, 0) + 1
        if crash_at == f"{kind}:{_steps[kind]}":
            os._exit(137)


@contextmanager
def storage_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a StorageError of one line."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot {doing} '{path}': {error.strerror or error}") from error


def ordinary(path: Path, error: type[RedgrapeError] = StorageError) -> Path:
    """Return the path, or raise `error` if it is a pipe or a device, because reading one may never end."""
    with storage_errors("read", path):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise error(f"'{path}' is a pipe or a device; name an ordinary file")
    return path


def check_no_folder(path: Path) -> None:
    """Raise StorageError if no file can be written here, since there is a folder."""
    with storage_errors("write", path):
        if path.is_dir():
            raise StorageError(f"'{path}' is a folder; name a file in it")


def check_free(path: Path) -> None:
    """Raise ConfigError if no new folder can be written here, since there is something."""
    with storage_errors("read", path):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"'{path}' already exists and is not an empty folder; choose another")


def check_is_run(path: Path) -> None:
    """Raise StorageError if this is not the folder of a run."""
    if not (path / "experiment.toml").is_file():
        raise StorageError(f"'{path}' is not a run folder: it has no experiment.toml; `redgrape ls` lists runs")


def check_ordinary(folder: Path) -> None:
    """Raise StorageError if the folder holds anything but files and folders. Through a link, data would be written
    outside the folder. Reading a pipe may never end."""

    def said(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    with storage_errors("read", folder):
        for place, folders, files in os.walk(folder, onerror=said):
            for path in (Path(place, name) for name in (*folders, *files)):
                with suppress(FileNotFoundError):  # another process has just removed it
                    kind = path.lstat().st_mode
                    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                        raise StorageError(
                            f"'{path}' is a link or a special file; remove it, or replace it with a copy"
                        )


def aside(path: Path) -> Path:
    """Where the file or folder lies while it is not whole."""
    return path.with_name(f".{path.name}.tmp")


def is_leftover(path: Path) -> bool:
    """Whether the path is a leftover of a crash."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a new file and flush it to disk. Not atomic: the caller renames the file or its folder into place. An
    existing file is removed first. It may be left over from a crash, or it may be a link from someone else, which would
    redirect the data."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, _NEW, mode), "wb") as file:
        fault_point("write")
        file.write(data)
        file.flush()
        fault_point("fsync")
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace the content of the file atomically."""
    check_no_folder(path)
    temporary = aside(path)
    with storage_errors("write", path):
        try:
            write_file(temporary, data, mode)
            fault_point("rename")
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def create_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Create a folder with these files atomically. It replaces an existing folder, left over from a crash."""
    temporary = aside(path)
    with storage_errors("write", path):
        shutil.rmtree(temporary, ignore_errors=True)
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            sync_folder(path.parent.parent)
        temporary.mkdir()
        for name, data in files.items():
            write_file(temporary / name, data)
        sync_folder(temporary)
        shutil.rmtree(path, ignore_errors=True)
        fault_point("rename")
        temporary.rename(path)
        sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder that nothing needs any more. This is not atomic: after a crash, the next call removes
    the rest."""
    with storage_errors("remove", path):
        fault_point("remove")
        if path.is_dir():
            for file in path.iterdir():
                remove(file)
            path.rmdir()
        else:
            path.unlink()


def remove_folder(path: Path) -> None:
    """Remove a folder atomically. After a crash, its rest lies beside it."""
    path = path.resolve()
    with storage_errors("remove", path):
        shutil.rmtree(aside(path), ignore_errors=True)
        fault_point("rename")
        path.rename(aside(path))
        sync_folder(path.parent)
    remove(aside(path))


def append_line(path: Path, line: str) -> None:
    with storage_errors("write", path):
        is_new = not path.exists()
        with path.open("ab") as file:
            fault_point("write")
            file.write(line.encode() + b"\n")
            file.flush()
            fault_point("fsync")
            os.fsync(file.fileno())
        if is_new:
            sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush the entries of the folder, if the system can (Windows cannot)."""
    fault_point("fsync")
    if os.name == "posix":
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def as_json(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def read_json(path: Path) -> Any:
    with storage_errors("read", path):
        data = path.read_bytes()
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"'{path}' is damaged: {error}") from error
