"""Write docs/methods/NAME.md for every method from its file, with the notes of docs/methods/notes/NAME.md.

.venv/bin/python docs/methods/make_pages.py        # tests/methods/test_method_pages.py fails if a page is out of date
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import torch

from redgrape import methods
from redgrape.learning.local_training import LocalTraining
from redgrape.method import Method
from redgrape.runs import message_sizes

PAGES = Path(__file__).parent
NET, SHAPE, CLASSES = "cnn", (1, 28, 28), 10


def page(name: str) -> str:
    method = methods.load(name)
    parts = [f"# {name}", described(method), use(name, method), hyper_parameters(name, method), sent(method)]
    parts.append(f"## Fidelity\n\n{wrapped(sentence(method.fidelity))}")
    notes = PAGES / "notes" / f"{name}.md"
    if notes.exists():
        parts.append(notes.read_text().strip())
    file = f"[src/redgrape/methods/{name}.py](../../src/redgrape/methods/{name}.py)"
    parts.append(f"How it does beside the others: [README.md](README.md). Code: {file}.")
    return "\n\n".join(parts) + "\n"


def described(method: type[Method]) -> str:
    """The module's docstring, its pseudo-code as a block."""
    paragraphs = (sys.modules[method.__module__].__doc__ or "").strip().split("\n\n")
    return "\n\n".join(f"```text\n{textwrap.dedent(p)}\n```" if p.startswith("    ") else p for p in paragraphs)


def use(name: str, method: type[Method]) -> str:
    extra = " -c data.auxiliary=32" if method.uses_auxiliary else ""
    lines = [f"redgrape run --method {name}{extra}", f"redgrape compare fedavg {name}{extra} --out runs/{name}"]
    text = "## Use\n\n```bash\n" + "\n".join(lines) + "\n```"
    if method.uses_auxiliary:
        text += (
            "\n\nThe auxiliary examples are taken from the training data; no client holds them, also not FedAvg's here."
        )
    return text


def hyper_parameters(name: str, method: type[Method]) -> str:
    shared = LocalTraining.model_fields
    own = {
        key: field
        for key, field in method.model_fields.items()
        if key not in shared or field.default != shared[key].default
    }
    lines = ["## Hyper-parameters", ""]
    if own:
        lines += ["| name | default | meaning |", "|---|---|---|"]
        meaning = {key: str(field.description).replace("|", r"\|") for key, field in own.items()}
        lines += [f"| `{key}` | {shown(field.default)} | {meaning[key]} |" for key, field in own.items()]
        lines += [""]
    text = (
        f"Those of local training (`lr`, `epochs`, ...) are listed by `redgrape methods {name}`. Robust rules, floors "
        "and noise are settings of the exchange ([robust.md](../robust.md), [privacy.md](../privacy.md))."
    )
    lines += [wrapped(text)]
    for preset, values in method.presets.items():
        settings = ", ".join(f"`{key}={shown(value)}`" for key, value in values.items())
        lines += ["", f"Preset `{preset}`: {settings or 'the defaults'}."]
    return "\n".join(lines)


def sent(method: type[Method]) -> str:
    size = message_sizes.payload(method(), NET, SHAPE, CLASSES)
    text = (
        f"With the net `{NET}` for 28x28 images and {CLASSES} classes, a client that holds every class receives "
        f"{size.down:,} bytes and sends {size.up:,} in a round"
    )
    text += f", and keeps {size.kept:,}." if size.kept else "."
    logged = size.logged
    names = ", ".join(f"`{key}`" for key in logged)
    text += f" In `metrics.jsonl` it logs {names}." if logged else " It logs nothing of its own."
    return "## What it sends and logs\n\n" + wrapped(text)


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def shown(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in methods.names():
        (PAGES / f"{name}.md").write_text(page(name))
