"""Build the documentation site: the pages of docs/, the README as its start, the reference of the Python names.

The same links lead somewhere on a forge and on the site. On the site a link to a file of the repository leads to a page
that shows the file. A notebook becomes a page with its stored outputs. The gallery has every picture of the pages.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import tomli_w

import redgrape
from redgrape import methods

ROOT = Path(__file__).resolve().parent.parent
AT_TOP = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
LANGUAGES = {".py": "python", ".toml": "toml", ".cff": "yaml"}
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


class Mistake(Exception):
    """What is wrong with the pages, in one line."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/docs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--serve", action="store_true", help="show the site on this machine after it is built")
    parser.add_argument("--port", type=int, default=8000, help="with --serve (8000)")
    parser.add_argument("--out", type=Path, default=ROOT / "build", metavar="FOLDER", help="default: build")
    options = parser.parse_args()
    try:
        site = build(options.out.resolve())
    except Mistake as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 1
    print(f"written: {os.path.relpath(site)}")
    if options.serve:
        serve(site, options.port)
    return 0


def build(out: Path) -> Path:
    """The folder of the finished site. Whatever the builder warns of is an error."""
    config = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    pages, site = out / "docs", out / "site"
    for folder in (pages, site):
        shutil.rmtree(folder, ignore_errors=True)
    collect(pages)
    project = config["project"]
    project["nav"] = sections(project["nav"], pages)
    project["docs_dir"], project["site_dir"] = str(pages.relative_to(out)), str(site.relative_to(out))
    project["plugins"]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT / "src")]
    (out / "zensical.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    plain = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=out, env=plain, capture_output=True, text=True, check=False)  # noqa: S603  # our own command
    said, _, _ = (done.stdout + done.stderr).partition("Traceback")
    if done.returncode or re.search(r"warning|error", said, re.IGNORECASE):
        raise Mistake(f"the site is not right\n{said.strip()}")
    return site


def sections(nav: list[dict[str, list[str]]], pages: Path) -> list[dict[str, list[str]]]:
    """The sections with their patterns filled in. Every page has one place; files of the repository need none."""
    placed: list[str] = []
    filled = []
    for section in nav:
        for title, patterns in section.items():
            names: list[str] = []
            for pattern in patterns:
                found = sorted(path.relative_to(pages).as_posix() for path in pages.glob(pattern))
                if not found and "*" not in pattern:
                    raise Mistake(f"zensical.toml names '{pattern}', which is no page of docs/")
                names += [name for name in found if name not in placed + names]
            placed += names
            filled.append({title: names})
    everything = {path.relative_to(pages).as_posix() for path in pages.rglob("*.md")}
    if orphans := sorted(name for name in everything - set(placed) if not name.startswith("source/")):
        raise Mistake(f"no section of zensical.toml names {', '.join(orphans)}; add it to one")
    return filled


def collect(pages: Path) -> None:
    """Put all pages below one folder, with links that lead there."""
    left_out = shutil.ignore_patterns("notes", "__pycache__")
    shutil.copytree(ROOT / "docs", pages, ignore=left_out)
    texts = {
        path.relative_to(pages).as_posix(): ROOT / "docs" / path.relative_to(pages) for path in pages.rglob("*.md")
    }
    texts |= {name: ROOT / source for source, name in AT_TOP.items()}
    texts |= {place(path): path for path in (ROOT / "docs").rglob("*.ipynb")}
    shown: set[Path] = set()
    for name, source in texts.items():
        text = with_links(source, name, shown)
        (pages / name).write_text(with_reference(text) if name == "api.md" else text, encoding="utf-8")
        for picture, content in pictures(source).items():
            (pages / name).with_name(picture).write_bytes(content)
    (pages / "gallery.md").write_text(gallery(pages, texts), encoding="utf-8")
    for path in sorted(shown):
        page = pages / place(path)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(shown_file(path), encoding="utf-8")


def place(path: Path) -> str:
    """Where a file of the repository stands on the site."""
    name = path.relative_to(ROOT).as_posix()
    if name in AT_TOP:
        return AT_TOP[name]
    name = f"{name.removesuffix('.ipynb')}.md" if path.suffix == ".ipynb" else name
    return name.removeprefix("docs/") if name.startswith("docs/") else f"source/{name.strip('.')}.md"


def with_links(source: Path, name: str, shown: set[Path]) -> str:
    """The text of a page with its links as the site needs them. Files that need a page of their own go to `shown`."""

    def moved(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        address, hash_sign, anchor = target.partition("#")
        if not address or "://" in address or address.startswith("mailto:"):
            return match[0]
        path = (source.parent / address).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            raise Mistake(f"{source.relative_to(ROOT)} links to '{target}', which is not there")
        new = place(path)
        if new.startswith("source/"):
            shown.add(path)
            shown.update(files_of(path))
        return f"{mark}[{words}]({os.path.relpath(new, Path(name).parent)}{hash_sign}{anchor})"

    if source.suffix == ".ipynb":
        return "\n\n".join(shown_cells(source, lambda text: LINK.sub(moved, text))) + "\n"
    return outside_code(source.read_text(encoding="utf-8"), lambda text: LINK.sub(moved, text))


def shown_cells(notebook: Path, change: Callable[[str], str]) -> Iterator[str]:
    """The cells of a notebook with their stored outputs as Markdown; `change` goes over the text, not over code."""
    names = iter(pictures(notebook))
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield outside_code(source, change)
            continue
        if source.startswith("!"):
            yield f"```bash\n{re.sub('^!', '', source, flags=re.MULTILINE)}\n```"
        elif source.startswith("%%writefile "):
            head, _, text = source.partition("\n")
            yield f"`{head.split()[1]}`:\n\n```python\n{text}\n```"
            continue
        else:
            yield f"```python\n{source}\n```"
        for output in cell["outputs"]:
            if "image/png" in output.get("data", {}):
                yield f"![{cell['metadata']['caption']}]({next(names)})"
            else:
                text = "".join(output.get("text") or output["data"]["text/plain"])
                yield f"```text\n{text.strip(chr(10))}\n```"


def pictures(source: Path) -> dict[str, bytes]:
    """The pictures that a notebook shows, in order, by the names of their files beside its page."""
    if source.suffix != ".ipynb":
        return {}
    cells = json.loads(source.read_text(encoding="utf-8"))["cells"]
    found = [output["data"] for cell in cells for output in cell.get("outputs", []) if "data" in output]
    encoded = [data["image/png"] for data in found if "image/png" in data]
    return {f"{source.stem}-{n}.png": base64.b64decode(text) for n, text in enumerate(encoded, start=1)}


def outside_code(text: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def files_of(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (each for each in sorted(path.iterdir()) if each.suffix in LANGUAGES)


def shown_file(path: Path) -> str:
    """A page with the file itself, or with the files of a folder. The search leaves it out."""
    name = path.relative_to(ROOT).as_posix()
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
    if path.is_dir():
        return head + "".join(f"- [{each.name}]({path.name}/{each.name}.md)\n" for each in files_of(path))
    return f"{head}````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}````\n"


def with_reference(text: str) -> str:
    """The page of the Python names, each section followed by what the code says about the names it lists. The last is
    that of the methods, which are found, not listed."""
    first, *rest = re.split(r"(?m)^(?=## )", text)
    full = [first]
    for section in rest:
        names = re.findall(r"^- \[`rg\.(\w+)`\]", section, re.MULTILINE)
        names = names or [methods.load(name).__name__ for name in methods.names()]
        full.append(section.rstrip() + "\n\n" + "".join(f"::: {home(name)}\n\n" for name in names))
    return "".join(full)


def home(name: str) -> str:
    """The full name of what stands behind `rg.name`."""
    found: Any = getattr(redgrape, name)
    return found.__name__ if type(found) is type(redgrape) else f"{found.__module__}.{found.__qualname__}"


def gallery(pages: Path, texts: dict[str, Path]) -> str:
    """Every picture of the pages, with the page that explains it."""
    seen: set[str] = set()
    figures = []
    for name in sorted(texts):
        text = (pages / name).read_text(encoding="utf-8")
        title = re.search(r"^# (.+)$", text, re.MULTILINE)
        for mark, words, target in LINK.findall(FENCE.sub("", text)):
            picture = os.path.normpath(Path(name).parent / target)
            if mark and picture not in seen:
                seen.add(picture)
                about = f"[{title[1] if title else name}]({name})"
                figures.append(f"<figure markdown>\n\n![{words}]({picture})\n\n{words}. {about}\n\n</figure>\n")
    return f'# Gallery\n\n<div class="gallery" markdown>\n\n{chr(10).join(figures)}\n</div>\n'


def serve(site: Path, port: int) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"open http://127.0.0.1:{server.server_port} (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    sys.exit(main())
