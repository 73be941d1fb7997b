"""Run the tests that do harm, and make a table of what they say they tried: fault, tries, survived, limit."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = ["runs/test_faults.py", "runs/test_configurations.py", "cli/test_strangers.py", "runs/test_folder.py"]
TESTS += ["exchange/test_checks.py", "exchange/test_rules.py", "deploy/test_deploy_slow.py"]
TESTS += ["deploy/test_deploy_refusals.py", "deploy/test_secure_sum.py", "deploy/test_deploy_secure.py"]
BEGIN, END = "<!-- faults:begin -->", "<!-- faults:end -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="try each fault a few times only")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the table into this page, at its marks")
    parser.add_argument("-k", dest="which", metavar="WORDS", help="only tests with these words in their names")
    parser.add_argument("--count-only", type=Path, metavar="FILE", help="make the table of what this file counts")
    options = parser.parse_args()
    if options.count_only:
        code, tried = 0, counted(options.count_only)
    else:
        code, tried = run(options)
    text = table(tried)
    print(text)
    if options.into:
        before, _, rest = options.into.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        options.into.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")
    return code


def run(options: argparse.Namespace) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of the tests, and what they counted."""
    marks = ["-m", "not slow"] if options.quick else ["-m", "slow or not slow"]
    chosen = ["-k", options.which] if options.which else []
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.jsonl"
        pytest = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=--strict-markers"]
        command = [*pytest, *marks, *chosen, *(f"tests/{name}" for name in TESTS)]
        environment = {**os.environ, "REDGRAPE_FAULTS": str(counts)}
        done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)  # noqa: S603  # our own tests
        return done.returncode, counted(counts)


def counted(path: Path) -> list[dict[str, Any]]:
    """Of every fault the largest number of tries, summed over its parts, in the order in which they were tried."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        entry = json.loads(line)
        key = entry["fault"], entry.get("part", "")
        if entry["tries"] >= best.setdefault(key, entry)["tries"]:
            best[key] = entry
    faults: dict[str, dict[str, Any]] = {}
    for (fault, _), entry in best.items():
        before = faults.get(fault, {"tries": 0, "survived": 0})
        summed = {name: before[name] + entry[name] for name in ("tries", "survived")}
        faults[fault] = {**entry, **summed}
    return list(faults.values())


def table(entries: list[dict[str, Any]]) -> str:
    rows = [["fault", "tries", "survived", "limit"], ["---", "---:", "---:", "---:"]]
    rows += [[e["fault"], f"{e['tries']:,}", f"{e['survived']:,}", e.get("limit", "all")] for e in entries]
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
    notes = [f"- {e['fault']}: {e['note']}." for e in entries if e["note"]]
    return f"\n{text}" + (f"\n{chr(10).join(notes)}\n" if notes else "") + "\n"


if __name__ == "__main__":
    sys.exit(main())
