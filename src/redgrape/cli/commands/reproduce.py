"""The command reproduce. Its list of suites needs no torch."""

from __future__ import annotations

import argparse
import json

from redgrape.reading.suites import files
from redgrape.reading.terminal import listed


def reproduce(options: argparse.Namespace) -> None:
    if options.name is not None:
        from redgrape.cli.commands import suites

        suites.reproduce(options)
        return
    titles = {name: files.title(name) for name in files.names()}
    print(json.dumps(titles) if options.json else listed(list(titles.items())))
