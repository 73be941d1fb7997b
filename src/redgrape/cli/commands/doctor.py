"""The command doctor."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from redgrape.deploy.processes.supervision import require_flower
from redgrape.errors import ConfigError
from redgrape.reading.terminal import listed


def doctor(options: argparse.Namespace) -> None:
    """List problems of a deployment and how to fix them."""
    require_flower()
    from redgrape.deploy.setup.doctor import examine

    findings = examine(options.folder, options.data)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        marks = {"good": "ok", "warning": "look", "bad": "BAD"}
        print(listed([(f"{marks[finding.how]:<4}  {finding.what}", finding.words) for finding in findings]))
    if bad := [finding for finding in findings if finding.how == "bad"]:
        raise ConfigError(f"{len(bad)} of {len(findings)} checks failed; the first: {bad[0].what}: {bad[0].words}")
