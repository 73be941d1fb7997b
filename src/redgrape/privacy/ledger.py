"""The records that a run with noise keeps in its folder, so that the reported epsilon is never too small.

    noise.key        32 random bytes, readable by the owner only: whoever has them can remove the noise
    privacy.jsonl    a line for every release: round, clients, digest of the release, epsilon so far

A line is on disk before its release is made, and no line is ever withdrawn. A round that runs again after a crash gives
the same bits if the same clients answer, and is then the same release. With other answers it is one more release.
Each line carries a checksum over itself and the line before, which detects a changed or lost line. The checkpoint
detects lines lost at the end, because it holds the rounds that they describe.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redgrape.errors import StorageError
from redgrape.privacy.account import Mechanism, epsilon, most_rounds
from redgrape.runs import durable
from redgrape.runs.checksums import hash_of

KEY, RELEASES = "noise.key", "privacy.jsonl"


class PrivacyLedger:
    def __init__(self, folder: Path) -> None:
        self._key, self._lines = folder / KEY, folder / RELEASES

    def secret(self, *, is_new: bool) -> bytes:
        """The key of the run's noise, drawn from the system if the run `is_new`."""
        if not self._key.exists():
            if not is_new:
                raise StorageError(f"'{self._key}' is missing, and the run's noise cannot go on without; put it back")
            durable.replace_file(self._key, secrets.token_bytes(32), mode=0o600)
        with durable.storage_errors("read", self._key):
            mode, key = self._key.stat().st_mode, self._key.read_bytes()
        if os.name == "posix" and mode & 0o077:
            raise StorageError(f"'{self._key}' can be read by others, who could take the noise off; chmod 600 it")
        if len(key) != 32:
            raise StorageError(f"'{self._key}' is damaged: it has {len(key)} bytes, not 32")
        return key

    def releases(self) -> list[dict[str, Any]]:
        """Every release so far, in order."""
        if not self._lines.exists():
            return []
        with durable.storage_errors("read", self._lines):
            whole = self._lines.read_bytes().split(b"\n")[:-1]  # a truncated line was never released
        found: list[dict[str, Any]] = []
        before = ""
        for line in whole:
            try:
                release = json.loads(line)
                before, expected = release.pop("checksum"), hash_of({**release, "before": before})
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise StorageError(f"'{self._lines}' is damaged: {error}") from error
            if before != expected:
                raise StorageError(f"'{self._lines}' is damaged or was edited in line {len(found) + 1}")
            found.append({**release, "checksum": before})
        return found

    def require(self, rounds: int) -> None:
        """Raise StorageError unless each of these finished rounds is recorded."""
        missing = set(range(1, rounds + 1)) - {release["round"] for release in self.releases()}
        if missing:
            raise StorageError(
                f"'{self._lines}' does not tell of round {min(missing)}, which was released: what the run has spent "
                "is not known any more; put the file back"
            )

    def spend(
        self, round: int, clients: Sequence[int], digest: str, mechanisms: Sequence[Mechanism], delta: float
    ) -> float | None:
        """Record a release before it is made. Return the epsilon spent including it (None: infinite)."""
        releases = self.releases()
        for release in releases:
            if (release["round"], release["digest"]) == (round, digest):
                return _epsilon(release)
        rounds = most_rounds([*releases, {"clients": clients}])
        spent = epsilon(mechanisms, rounds, delta)
        known = [release["epsilon"] for release in releases]
        line = {
            "round": round,
            "clients": list(clients),
            "digest": digest,
            "most_rounds": rounds,
            "delta": delta,
            "mechanisms": [m._asdict() for m in mechanisms],
            "epsilon": None if math.isinf(spent) or None in known else max([spent, *known]),
        }
        self._cut_torn_line()
        before = releases[-1]["checksum"] if releases else ""
        durable.append_line(self._lines, json.dumps({**line, "checksum": hash_of({**line, "before": before})}))
        return _epsilon(line)

    def _cut_torn_line(self) -> None:
        data = self._lines.read_bytes() if self._lines.exists() else b""
        if data and not data.endswith(b"\n"):
            durable.replace_file(self._lines, data[: data.rfind(b"\n") + 1])


def _epsilon(release: Mapping[str, Any]) -> float | None:
    value = release["epsilon"]
    return None if value is None else float(value)
