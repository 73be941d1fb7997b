"""A run folder that was edited with care: its other files vouch for what was changed, as a stranger's could."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

from redgrape.runs.checksums import hash_of


def vouch_for(run: Path) -> Path:
    (run / "SHA256SUMS").unlink(missing_ok=True)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    if (run / "summary.json").exists():
        described = tomllib.loads((run / "experiment.toml").read_text())
        summary = json.loads((run / "summary.json").read_bytes())
        (run / "summary.json").write_text(json.dumps({**summary, "experiment": hash_of(described)}))
    return run
