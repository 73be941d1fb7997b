"""A self-contained HTML document with style, script and data. It makes no external requests.

The Content-Security-Policy names the script and the style by their SHA-256, so text from a run cannot
become either of them. The data is JSON in a block that browsers do not execute.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import redgrape

_DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="redgrape {version}">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main id="page"><noscript>This page draws its charts with its own script; please allow it to run.</noscript></main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def document(data: Mapping[str, Any], title: str) -> str:
    """The page for this data. If the data contains `live`, the page asks its own server for updates."""
    style, script = style_and_script()
    return _DOCUMENT.format(
        policy=html.escape(policy(live=bool(data.get("live")))),
        version=redgrape.__version__,
        title=html.escape(title),
        style=style,
        script=script,
        data=_embedded(data),
    )


def policy(*, live: bool) -> str:
    style, script = style_and_script()
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        f"connect-src '{'self' if live else 'none'}'; base-uri 'none'; form-action 'none'"
    )


@cache
def style_and_script() -> tuple[str, str]:
    folder = resources.files("redgrape.reading.page")
    return (folder / "page.css").read_text(encoding="utf-8"), (folder / "page.js").read_text(encoding="utf-8")


def _hash(inline: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


def _embedded(data: Mapping[str, Any]) -> str:
    """ASCII JSON that cannot close the HTML block that contains it."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")
