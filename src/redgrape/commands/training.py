"""run, resume, compare."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from redgrape import report
from redgrape.errors import ConfigError
from redgrape.experiment import Experiment, override, read_toml
from redgrape.progress import Progress
from redgrape.runs import Run
from redgrape.store import RunFolder


def run(options: argparse.Namespace) -> None:
    experiment = Experiment.parse(described(options))
    out = options.out or Path("runs") / run_name(experiment)
    if options.dry_run:
        print(f"# would run in {out}\n# experiment {experiment.hash()}\n{experiment.to_toml()}", end="")
        return
    folder = RunFolder.create(out, experiment)
    carry_out(folder, options, label=report.run_label(experiment.method.resolved()))
    finish(folder, options)


def resume(options: argparse.Namespace) -> None:
    folder = RunFolder.open(options.run)
    experiment = folder.experiment()
    if options.rounds is not None and options.rounds != experiment.rounds:
        if options.rounds < experiment.rounds:
            raise ConfigError(f"--rounds is {options.rounds}, and the run is set to {experiment.rounds}; choose more")
        _warn_of_schedules(experiment)
        Run(folder, workers=1).extend(options.rounds)
    carry_out(folder, options, label=report.run_label(experiment.method.resolved()))
    finish(folder, options)


def compare(options: argparse.Namespace) -> None:
    """Several methods on the same split and seeds."""
    cells = []
    for spec in options.methods:
        for seed in options.seeds:
            values = described(options)
            method = method_spec(spec, values.get("method", {}))
            experiment = Experiment.parse({**values, "seed": seed, "method": method})
            cells.append((spec, experiment, options.out / f"{_file_name(spec)}-seed{seed}"))
    if options.dry_run:
        for spec, experiment, path in cells:
            print(f"{path}  {spec}  seed {experiment.seed}  {experiment.rounds} rounds  {experiment.hash()[:12]}")
        return
    finished = []
    for spec, experiment, path in cells:
        folder = _same_or_new(path, experiment)
        label = spec if len(options.seeds) == 1 else f"{spec} seed {experiment.seed}"
        carry_out(folder, options, label=label)
        finished.append((spec, report.RunView.read(path)))
    results = report.collect(finished)
    picture = options.out / "per_class.png"
    report.draw_per_class(results, picture)
    (options.out / "table.md").write_text(f"{report.markdown(results)}\n\n{report.caption(results)}\n")
    if options.json:
        values = {r.label: {figure: r.values(figure) for figure in report.FIGURES} for r in results}
        print(json.dumps({"table": values, "picture": str(picture)}))
        return
    report.print_table(results)
    print(f"accuracy per class: {picture}")


def described(options: argparse.Namespace) -> dict[str, Any]:
    """The experiment's values: the file, then flags, then key=value assignments."""
    values = read_toml(options.experiment) if options.experiment else {}
    for key, value in vars(options).items():
        if key.startswith("set:") and value is not None:
            *sections, name = key.removeprefix("set:").split(".")
            node = values
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = value
    for assignment in options.config:
        override(values, assignment)
    return values


def method_spec(spec: str, shared: dict[str, Any]) -> dict[str, Any]:
    """`redgrape:placement=after_step,lam=0.2` -> the method section; what the other flags set holds for all methods."""
    name, _, hyper = spec.partition(":")
    method: dict[str, Any] = {**shared, "name": name}
    for assignment in filter(None, hyper.split(",")):
        override(method, assignment)
    return method


def run_name(experiment: Experiment) -> str:
    source = Path(experiment.data.source).stem
    return _file_name(f"{experiment.method.name}-{source}-seed{experiment.seed}-{experiment.hash()[:8]}")


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(text).name if text.endswith(".py") else text).strip("-.")[:100]


def _same_or_new(path: Path, experiment: Experiment) -> RunFolder:
    """The folder of a run that was begun before, or a new one."""
    if not (path / "experiment.toml").is_file():
        return RunFolder.create(path, experiment)
    folder = RunFolder.open(path)
    if folder.experiment().hash() != experiment.hash():
        raise ConfigError(f"'{path}' holds another experiment; name another folder with --out")
    return folder


def carry_out(folder: RunFolder, options: argparse.Namespace, label: str) -> None:
    workers = options.workers or (os.cpu_count() or 1 if options.device == "cpu" else 1)
    this = Run(folder, workers=workers, device=options.device, data_root=options.data_root)
    done = report.RunView.read(folder.path).rounds_done
    progress = Progress(label, done, this.experiment.rounds, as_json=options.json, quiet=options.quiet)
    with progress:
        for step in this.steps():
            progress.step(step)
    for note in this.notes:
        print(f"note: {note}", file=sys.stderr)


def finish(folder: RunFolder, options: argparse.Namespace) -> None:
    view = report.RunView.read(folder.path)
    if options.json:
        print(json.dumps({"folder": str(folder.path), "summary": view.summary}))
        return
    report.print_table(report.collect([(view.label, view)]))
    print(f"run folder: {folder.path}")


def _warn_of_schedules(experiment: Experiment) -> None:
    decaying = [k for k, v in experiment.method.resolved().items() if k.endswith("_schedule") and v != "constant"]
    if decaying:
        print(
            f"note: {', '.join(decaying)} decays over all rounds: the extended run is not what a longer one would be",
            file=sys.stderr,
        )
