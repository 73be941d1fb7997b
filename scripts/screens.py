"""Everything that the documents show, made anew: terminal screens by tmux, pages by chromium, charts by redgrape.

Nothing in docs/ changes. `build/screens/index.html` shows the new picture beside the one of docs/images. Pictures that
take hours are shown as they are, with their page and command.
"""

from __future__ import annotations

import argparse
import html
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build/screens"
WIDTHS = (1400, 1200, 390)  # a screen with the tabs of the site, a laptop and a telephone
COLUMNS, LINES = 80, 50
PAGES = ["index", "quickstart", "tutorials/photos", "tutorials/fars", "tutorials/new-method", "own-data"]
PAGES += ["methods/index", "methods/redgrape", "results", "api", "gallery"]

WITHOUT_TRAINING = [
    "redgrape --help",
    "redgrape methods",
    "redgrape methods redgrape",
    "redgrape reproduce",
    "redgrape reproduce table2 --plan",
    "redgrape data show experiments/demo.toml --out build/screens/who_holds_what.png",
    "redgrape run --device cuda",
]
TRAINING = [
    "redgrape compare fedavg redgrape --experiment experiments/demo.toml --out build/screens/runs/demo",
    "redgrape ls build/screens/runs/demo",
    "redgrape show build/screens/runs/demo/redgrape-seed0",
    "redgrape privacy build/screens/runs/demo/redgrape-seed0",
    "redgrape compare fedavg redgrape creff --experiment experiments/demo.toml --net mlp --seeds 0,1 --rounds 12 "
    "--out build/screens/runs/page",
    "redgrape report build/screens/runs/page --out build/screens/report.html",
]
STUDIES = ["table2", "table5", "cifar10_resnet8"]  # drawn from the records in results/
LONG = {
    "growth.png": "performance.md: python benchmarks/growth.py --plot docs/images/growth.png",
    "mnist_lt_per_class.png": "overview.md: redgrape compare fedavg redgrape redgrape:placement=after_step "
    "--seeds 0,1,2 --experiment experiments/mnist_lt.toml --out runs/mnist_lt",
    "peers.png": "performance.md: python benchmarks/peers/draw.py compute1.json compute5.json overhead.json "
    "--out docs/images/peers.png, after three commands that measure",
    "privacy.png": "privacy.md: python benchmarks/privacy_price.py --figure docs/images/privacy.png",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/screens", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--no-training", action="store_true", help="leave out what has to train first")
    options = parser.parse_args()
    for tool in ("chromium", "tmux"):
        if shutil.which(tool) is None:
            print(f"error: {tool} is not installed; install it with the packages of your system", file=sys.stderr)
            return 1
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    commands = WITHOUT_TRAINING + ([] if options.no_training else TRAINING)
    screens = {command: screen(command) for command in commands}
    subprocess.run([sys.executable, "scripts/docs.py"], cwd=ROOT, check=True)
    for width in WIDTHS:
        for page in PAGES:
            photograph(ROOT / f"build/site/{page}.html", f"site-{page.replace('/', '-')}-{width}", width)
        if not options.no_training:
            photograph(OUT / "report.html", f"report-{width}", width)
    if not options.no_training:
        photograph(OUT / "report.html", "report", 1100, 1700)
        shutil.copy(OUT / "runs/demo/per_class.png", OUT / "demo_per_class.png")
    for suite in STUDIES:
        words = ["reproduce", suite, "--scale", "study", "--no-run", "--out", str(OUT / "runs")]
        subprocess.run([sys.executable, "-m", "redgrape", *words], cwd=ROOT, check=True, capture_output=True)  # noqa: S603
        shutil.copy(OUT / f"runs/{suite}-study/curves.png", OUT / f"{suite}-study.png")
    (OUT / "index.html").write_text(overview(screens), encoding="utf-8")
    print("open build/screens/index.html")
    return 0


def screen(command: str) -> str:
    """What a terminal of 80 columns shows after the command, with its history."""
    print(command, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        done = Path(folder) / "done"
        line = (
            f"cd {shlex.quote(str(ROOT))}; PATH={ROOT}/.venv/bin:$PATH; clear; {command}; echo $? > {done}; sleep 600"
        )
        tmux = ["tmux", "-S", f"{folder}/socket"]
        size = ["-x", str(COLUMNS), "-y", str(LINES)]
        subprocess.run([*tmux, "new-session", "-d", *size, "sh", "-c", line], check=True)  # noqa: S603  # our own command
        try:
            while not done.exists() or not done.read_text():
                time.sleep(0.2)
            shown = subprocess.run(  # noqa: S603  # our own command
                [*tmux, "capture-pane", "-p", "-S", "-"], check=True, capture_output=True, text=True
            ).stdout
        finally:
            subprocess.run([*tmux, "kill-server"], check=False)  # noqa: S603  # our own command
    return f"$ {command}\n{shown.rstrip()}\n"


def photograph(page: Path, name: str, width: int, height: int = 1600) -> None:
    with tempfile.TemporaryDirectory() as profile:
        quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        size = [f"--window-size={width},{height}", "--hide-scrollbars", "--virtual-time-budget=3000"]
        picture = OUT / f"{name}.png"
        command = ["chromium", *quiet, *size, f"--user-data-dir={profile}", f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=300)  # noqa: S603  # our own command


def overview(screens: dict[str, str]) -> str:
    parts = [f"<pre>{html.escape(text)}</pre>" for text in screens.values()]
    for old in sorted((ROOT / "docs/images").glob("*.png")):
        both = [p for p in (OUT / old.name, old) if p.exists()]
        parts += [f"<h2>{old.name}</h2>", *(f'<img width="48%" src="{os.path.relpath(p, OUT)}">' for p in both)]
        parts += [f"<p>{html.escape(LONG[old.name])}</p>"] if old.name in LONG else []
    for picture in sorted(OUT.glob("*-*[0-9].png")):
        parts += [f"<h2>{picture.name}</h2>", f'<img style="max-width: 100%" src="{picture.name}">']
    return f"<!doctype html><meta charset=utf-8><title>Screens</title>{''.join(parts)}\n"


if __name__ == "__main__":
    sys.exit(main())
