"""Flags that several commands have, and the kinds of their values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any


def positive(text: str) -> int:
    if not (text.isdecimal() and len(text) < 10 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is not a whole number of at least 1 and below 10^9")
    return int(text)


def path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; for the current folder write .")
    return Path(text)


def name(text: str) -> str:
    if not text or text != Path(text).name or text.startswith(".") or "\\" in text:
        raise argparse.ArgumentTypeError(f"'{text}' is not a folder name; use no slashes and no leading dot")
    return text


def seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number of seconds")
    return seconds


def port(text: str) -> int:
    if not (text.isdecimal() and len(text) < 6 and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"'{text}' is not a port; choose 1024 to 65535")
    return int(text)


def shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(positive, text.split(",")))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is not a shape such as 1,28,28 or 512") from None


def seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of seeds such as 0,1,2") from None
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"'{text}' names a seed twice")
    return seeds


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


# The flags that set a key of the experiment; -c sets every other key.
EXPERIMENT: dict[str, tuple[str, Any, str]] = {
    "--data": (
        "data.source",
        str,
        "digits (default), mnist, cifar10, fars, ..., an image folder, an .npz, a table (.csv, .parquet) or "
        "file.py:function",
    ),
    "--label": ("data.label", str, "the column of a table that holds the classes"),
    "--site": ("data.site", str, "the column of a table that names each row's site"),
    "--test": ("data.test", str, "the column of a table that says test or train, or a value of a column: fold=3"),
    "--drop": ("data.drop", names, "columns of a table that are not inputs: id,name"),
    "--imbalance": ("data.imbalance", str, "exponential (default), binary or natural (default for your own data)"),
    "--ir": ("data.ir", float, "imbalance ratio: largest class over smallest (default: 50)"),
    "--tail": (
        "data.tail_classes",
        names,
        "the tail: names of classes, separated by commas (default: the rarest 30 %%)",
    ),
    "--partition": (
        "data.partition",
        str,
        "class_dirichlet (default), prior_dirichlet, creff, iid, client_lt, like:MATRIX, natural (the data's sites) or "
        "file.py:function",
    ),
    "--alpha": (
        "data.alpha",
        float,
        "Dirichlet parameter: in class_dirichlet, the smaller, the more clients differ (default: 1)",
    ),
    "--clients": ("data.clients", int, "number of clients (default: 10)"),
    "--clients-per-round": ("clients_per_round", int, "clients sampled per round (default: all)"),
    "--net": (
        "net.name",
        str,
        "cnn (default), mlp (default for tables), resnet8, ..., linear, efficientnet_lite0 or file.py:function",
    ),
    "--rounds": ("rounds", int, "communication rounds (default: 20)"),
    "--keep": ("keep", str, "the round whose model is kept: last, or best by validation (see data.validation)"),
    "--patience": ("patience", int, "stop after this many rounds without a better validation result"),
    "--epochs": ("method.epochs", int, "local epochs (default: 5)"),
    "--batch-size": ("method.batch_size", int, "examples per local step (default: 64)"),
    "--lr": ("method.lr", float, "local learning rate (default: 0.01)"),
}


def add_experiment(
    command: argparse.ArgumentParser, without: Sequence[str] = (), texts: Mapping[str, str] = MappingProxyType({})
) -> None:
    group = command.add_argument_group("the experiment")
    for flag, (key, kind, text) in EXPERIMENT.items():
        if flag not in without:
            metavar = kind.__name__.strip("_").upper()
            group.add_argument(flag, dest=f"set:{key}", type=kind, metavar=metavar, help=texts.get(flag, text))
    add_config(group)


def add_config(command: argparse._ActionsContainer, example: str = "method.lam=0.2") -> None:
    command.add_argument(
        "-c", dest="config", action="append", default=[], metavar="KEY=VALUE", help=f"set any key, e.g. {example}"
    )


def add_method(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument("--method", dest="set:method.name", metavar="NAME", help=f"the method (default: {default})")
    command.add_argument(
        "--preset", dest="set:method.preset", metavar="NAME", help="the preset of the method (default: paper)"
    )


def add_out(command: argparse.ArgumentParser, text: str, default: str, metavar: str = "DIR") -> None:
    command.add_argument("--out", type=path, default=Path(default), metavar=metavar, help=f"{text} ({default})")


def add_seeds(command: argparse.ArgumentParser) -> None:
    group = command.add_mutually_exclusive_group()
    group.add_argument("--seeds", type=seeds, metavar="0,1,2", help="the seeds (default: that of the experiment)")
    group.add_argument("--seed", dest="set:seed", type=int, metavar="N", help="a single seed")


def add_suite(command: argparse.ArgumentParser) -> None:
    add_overwrite(command)
    command.add_argument("--plan", action="store_true", help="print the cells, their state and estimated time")
    command.add_argument(
        "--results",
        type=path,
        default=Path("results"),
        metavar="DIR",
        help="folder with records of finished cells (results)",
    )
    command.add_argument(
        "--side-by-side",
        type=positive,
        metavar="N",
        help="run N cells at once, sharing the workers (default: as many as can have a worker per client)",
    )


def add_run_folder(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=path, metavar="DIR", help="the run folder (default: a new one below runs/)")
    command.add_argument("--overwrite", action="store_true", help="replace a run that has finished no round")


def add_overwrite(command: argparse.ArgumentParser) -> None:
    command.add_argument("--overwrite", action="store_true", help="replace runs made with other data or settings")


def add_on(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--on",
        choices=["test", "validation"],
        default="test",
        help="the set that the table reports (default: test; see data.validation)",
    )


def add_calibration(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--shares",
        choices=["training", "validation"],
        help="calibrate for these class shares (default: training, or validation if the imbalance is artificial)",
    )
    command.add_argument("--data-root", type=path, metavar="DIR", help="folder with the data files of the run")


def add_execution(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("execution (does not change results, except as noted)")
    group.add_argument(
        "--workers", type=positive, metavar="N", help="worker processes (default: one per core, or one per GPU)"
    )
    group.add_argument(
        "--device", default="cpu", help="cpu (default), cuda (all GPUs), cuda:N, or auto (a GPU changes the last bits)"
    )
    group.add_argument(
        "--precision",
        default="float32",
        choices=["float32", "bfloat16"],
        help="bfloat16: the encoder multiplies in bfloat16, faster on a GPU (changes results; default: float32)",
    )
    group.add_argument(
        "--stack",
        type=positive,
        default=1,
        metavar="N",
        help="train N clients of equal size as one; fast for small nets (changes the last bits; default: 1)",
    )
    group.add_argument("--data-root", type=path, metavar="DIR", help="folder with the data files (or $REDGRAPE_DATA)")
    group.add_argument(
        "--deadline",
        type=seconds,
        metavar="SECONDS",
        help="treat a worker as hung after this long on one client (default: never; not with --workers 1)",
    )
    group.add_argument(
        "--allow-changes",
        action="store_true",
        help="continue a run that another version or machine began (may change the last bits)",
    )
    group.add_argument("--dry-run", action="store_true", help="print what would run, then exit")
    group.add_argument("--quiet", action="store_true", help="show no progress")
    group.add_argument("--tensorboard", action="store_true", help="also log to RUN/tensorboard (needs that extra)")
