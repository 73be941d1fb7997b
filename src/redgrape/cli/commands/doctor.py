"""The command doctor."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from redgrape.deploy.processes.supervision import require_flower
from redgrape.errors import ConfigError
from redgrape.reading.terminal import cell


def doctor(options: argparse.Namespace) -> None:
    """List problems of a deployment and how to fix them."""
    require_flower()
    from rich.console import Console
    from rich.table import Table

    from redgrape.deploy.setup.doctor import examine

    findings = examine(options.folder, options.data)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        table = Table()
        for title in ("", "what", "how it is"):
            table.add_column(title, overflow="fold")
        for finding in findings:
            mark = {"good": "ok", "warning": "look", "bad": "BAD"}[finding.how]
            table.add_row(mark, cell(finding.what), cell(finding.words))
        console = Console()
        if not console.is_terminal:
            console.width = 200
        console.print(table)
    if bad := [finding for finding in findings if finding.how == "bad"]:
        raise ConfigError(f"{len(bad)} of {len(findings)} checks failed; the first: {bad[0].what}: {bad[0].words}")
