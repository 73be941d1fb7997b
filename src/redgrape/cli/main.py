"""The command line. Bad input gets one line on standard error and a fixed exit code (see errors.py)."""

from __future__ import annotations

import argparse
import importlib
import io
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from redgrape import __version__
from redgrape.errors import ConfigError, RedgrapeError, StorageError, enough_memory
from redgrape.methods import RECOMMENDED, WITHOUT_TRAINING
from redgrape.reading.terminal import printable


def _examples(command: str) -> str | None:
    lines = EXAMPLES.get(command)
    return "\n  ".join(["examples:", *lines]) if lines else None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` lists the options")


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


# Flags that set a key of the experiment. Use -c for every other key.
_FLAGS: dict[str, tuple[str, Any, str]] = {
    "--data": (
        "data.source",
        str,
        "digits (default), mnist, cifar10, fars, ..., an image folder, an .npz, a table (.csv, .parquet) or "
        "file.py:function",
    ),
    "--label": ("data.label", str, "the column of a table that holds the classes"),
    "--site": ("data.site", str, "the column of a table that names each row's site"),
    "--test": ("data.test", str, "the column of a table that says test or train, or a value of one: fold=3"),
    "--drop": ("data.drop", names, "columns of a table that are no inputs: id,name"),
    "--imbalance": ("data.imbalance", str, "exponential (default), binary or natural (default for your own data)"),
    "--ir": ("data.ir", float, "imbalance ratio (default: 50)"),
    "--tail": (
        "data.tail_classes",
        names,
        "the tail: names of classes, separated by commas (default: the rarest 30 %%)",
    ),
    "--partition": (
        "data.partition",
        str,
        "class_dirichlet (default), prior_dirichlet, creff, iid, client_lt, like:MATRIX, natural or file.py:function",
    ),
    "--alpha": ("data.alpha", float, "Dirichlet parameter: small is heterogeneous (default: 1)"),
    "--clients": ("data.clients", int, "number of clients (default: 10)"),
    "--clients-per-round": ("clients_per_round", int, "clients sampled per round (default: all)"),
    "--net": ("net.name", str, "cnn (default), resnet8, ..., mlp, linear, efficientnet_lite0 or file.py:function"),
    "--rounds": ("rounds", int, "communication rounds (default: 20)"),
    "--keep": ("keep", str, "the round whose model is kept: last, or best by validation (see data.validation)"),
    "--patience": ("patience", int, "stop if so many rounds after the best by validation none was better"),
    "--epochs": ("method.epochs", int, "local epochs (default: 5)"),
    "--batch-size": ("method.batch_size", int, "examples per local step (default: 64)"),
    "--lr": ("method.lr", float, "local learning rate (default: 0.01)"),
}


# Examples for the help, by command
EXAMPLES = {
    "run": [
        "redgrape run --method fedavg --net mlp --rounds 10",
        "redgrape run experiment.toml -c method.lam=0.2 --out runs/mine",
        "redgrape run --data patients.csv --label diagnosis --site hospital --partition natural --net mlp",
    ],
    "resume": ["redgrape resume runs/mine", "redgrape resume runs/mine --rounds 40"],
    "compare": [
        "redgrape compare --recommended --net mlp --seeds 0,1,2",
        "redgrape compare redgrape redgrape:lam=0.5 redgrape@alone redgrape@pooled --net mlp",
    ],
    "adjust": [f"redgrape adjust runs/mine {WITHOUT_TRAINING} --out runs/adjusted"],
    "reproduce": ["redgrape reproduce", "redgrape reproduce table1 --plan", "redgrape reproduce table1 --only mnist"],
    "sweep": [
        "redgrape sweep method.lam=0.01,0.1,1 --net mlp --seeds 0,1,2 -c data.validation=10 --on validation",
        "redgrape sweep method.lam=0.01..1:log --search 20 --net mlp -c data.validation=10",
    ],
    "ls": ["redgrape ls", "redgrape ls runs/compare --json"],
    "show": ["redgrape show runs/compare/fedavg-seed0"],
    "methods": ["redgrape methods --needs nothing --summable", "redgrape methods redgrape"],
    "data show": ["redgrape data show --data cifar10 --ir 100 --alpha 0.5"],
    "report": ["redgrape report runs/compare"],
    "export": ["redgrape export runs/mine model --calibrate", "redgrape export runs/mine model --format onnx"],
    "evaluate": ["redgrape evaluate runs/mine --by-site", "redgrape evaluate model photos/"],
    "predict": ["redgrape predict model photos/ --out predictions.csv"],
}
WELCOME = """redgrape trains federated models on long-tailed data. To begin:

  redgrape compare fedavg redgrape --net mlp   train two methods, compare them
  redgrape data show --ir 100 --clients 20     show the examples of each client
  redgrape methods                             list the methods

`redgrape --help` lists all commands, `redgrape COMMAND --help` its options."""

GOING_ON = ("compare", "deploy", "reproduce", "sweep")  # run again, these commands continue their work
ENDED = {signal.SIGINT: 130, signal.SIGTERM: 143}  # exit codes of commands ended by a signal


def main(arguments: list[str] | None = None) -> NoReturn:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: the next opened file would take its descriptor
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths may hold any character; a terminal may be ASCII
    code = run(sys.argv[1:] if arguments is None else arguments)
    if code in ENDED.values():
        for number in ENDED:
            signal.signal(number, signal.SIG_DFL)  # the next signal ends the process silently
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code."""
    with ending_at_signals():
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    words = [word for word in arguments if word != "--debug"]
    if not words:
        print(WELCOME, file=sys.stderr)
        return ConfigError.exit_code  # nothing was asked: a script with an empty variable should notice
    try:
        try:
            options = _parser().parse_args(words)
            with enough_memory():
                options.command(options)
        finally:
            sys.stdout.flush()  # here, so that errors are still reported
    except RedgrapeError as error:
        if debug:
            raise
        print(f"redgrape: {_one_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        what = "terminated" if isinstance(error, _Terminated) else "interrupted"
        again = "run the same command" if words and words[0] in GOING_ON else "run `redgrape resume RUN`"
        print(f"redgrape: {what}; {again} to continue from the last finished round", file=sys.stderr)
        return ENDED[signal.SIGTERM if what == "terminated" else signal.SIGINT]
    except BrokenPipeError:  # the reader, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if debug:
            raise
        print(f"redgrape: {_one_line(error)}", file=sys.stderr)
        return StorageError.exit_code
    return 0


class _Terminated(KeyboardInterrupt):
    """SIGTERM: handled like Ctrl-C, but with another exit code."""


@contextmanager
def ending_at_signals() -> Iterator[None]:
    """End cleanly at the first Ctrl-C or SIGTERM and at once at the second. Workers end with the command."""

    def at_once(number: int, _: object) -> NoReturn:
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), b"\x1b[?25h")  # a progress bar hides the cursor
        os._exit(128 + number)

    def in_order(number: int, _: object) -> NoReturn:
        for each in previous:
            signal.signal(each, at_once)
        raise KeyboardInterrupt if number == signal.SIGINT else _Terminated

    handlers = {number: signal.getsignal(number) for number in ENDED}
    previous = {n: handler for n, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in previous:
        signal.signal(number, in_order)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))


def _command(module: str, name: str) -> Any:
    """Return a command that imports its module when called."""

    def call(options: argparse.Namespace) -> None:
        getattr(importlib.import_module(f"redgrape.cli.commands.{module}"), name)(options)

    return call


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="redgrape",
        description="Federated learning on long-tailed data.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"redgrape {__version__}")
    parser.epilog = "Use --debug to show the traceback of an error."
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)

    def add(name: str, module: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            allow_abbrev=False,
            epilog=_examples(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(command=_command(module, name))
        command.add_argument("--json", action="store_true", help="print JSON")
        return command

    command = add("run", "training", "train a method on a long-tailed federation")
    command.add_argument("experiment", nargs="?", type=_path, help="a TOML file (default: built-in settings)")
    command.add_argument("--method", dest="set:method.name", metavar="NAME", help="the method (default: redgrape)")
    command.add_argument(
        "--preset", dest="set:method.preset", metavar="NAME", help="the preset of the method (default: paper)"
    )
    command.add_argument("--seed", dest="set:seed", type=int, metavar="N", help="the seed (default: 0)")
    _add_experiment_flags(command)
    command.add_argument("--out", type=_path, metavar="DIR", help="the run folder (default: a new one below runs/)")
    command.add_argument("--overwrite", action="store_true", help="replace a run of which no round is done")
    _add_execution_flags(command)

    command = add("fit", "training", "fit a head to a pretrained encoder in one round, without training")
    command.add_argument("set:data.source", metavar="DATA", help=_FLAGS["--data"][2].replace(" (default)", ""))
    command.add_argument(
        "--method", dest="set:method.name", metavar="NAME", help=f"the method (default: {WITHOUT_TRAINING})"
    )
    command.add_argument("--preset", dest="set:method.preset", metavar="NAME", help="the preset of the method")
    command.add_argument("--seed", dest="set:seed", type=int, metavar="N", help="the seed (default: 0)")
    _add_experiment_flags(
        command,
        without=("--data", "--keep", "--patience", "--epochs", "--batch-size", "--lr"),
        texts={
            "--net": "efficientnet_lite0 (default), timm:NAME, ..., linear or file.py:function",
            "--rounds": "communication rounds (default: 1)",
        },
    )
    defaults = {"method.name": WITHOUT_TRAINING, "net.name": "efficientnet_lite0", "rounds": 1}
    command.set_defaults(experiment=None, **{f"set:{key}": value for key, value in defaults.items()})
    command.add_argument("--out", type=_path, metavar="DIR", help="the run folder (default: a new one below runs/)")
    command.add_argument("--overwrite", action="store_true", help="replace a run of which no round is done")
    command.add_argument("--export", type=_path, metavar="DIR", help="also write the model to this folder")
    _add_execution_flags(command)

    command = add("adjust", "training", "give the model of a finished run another head, in one round")
    command.add_argument("run", type=_path, help="the run folder")
    command.add_argument("method", metavar="METHOD", help=f"the method, with its settings: {WITHOUT_TRAINING}:rho=0.5")
    command.add_argument(
        "-c", dest="config", action="append", default=[], metavar="KEY=VALUE", help="set any key, e.g. rounds=2"
    )
    command.add_argument("--out", type=_path, metavar="DIR", help="the run folder (default: a new one below runs/)")
    command.add_argument("--overwrite", action="store_true", help="replace a run of which no round is done")
    _add_execution_flags(command)

    command = add("resume", "training", "continue a run, or extend a finished one")
    command.add_argument("run", type=_path, help="the run folder")
    command.add_argument("--rounds", type=int, metavar="N", help="extend the run to N rounds in total")
    _add_execution_flags(command)

    command = add("compare", "training", "train several methods on the same split and seeds")
    command.add_argument(
        "methods",
        nargs="*",
        help="methods, optionally with their own settings: redgrape:lam=0.2,exchange.preset=private; METHOD@alone "
        "trains each client by itself, METHOD@pooled on all data in one place",
    )
    command.add_argument(
        "--recommended",
        action="store_true",
        help=f"also {', '.join(RECOMMENDED)}, and with a frozen encoder {WITHOUT_TRAINING}",
    )
    command.add_argument("--experiment", type=_path, metavar="FILE", help="a TOML file with the other settings")
    command.add_argument("--preset", dest="set:method.preset", metavar="NAME", help="the preset for all methods")
    _add_seed_flags(command)
    _add_experiment_flags(command)
    command.add_argument(
        "--out", type=_path, default=Path("runs/compare"), metavar="DIR", help="folder for the runs (runs/compare)"
    )
    _add_overwrite_flag(command)
    _add_on_flag(command)
    _add_execution_flags(command)

    command = add("reproduce", "reproduce", "run the experiments behind a table or figure of the paper, and write it")
    command.add_argument("name", nargs="?", help="the suite, such as table2 or fig_lambda (default: list all suites)")
    command.add_argument(
        "--scale",
        choices=["paper", "study", "quick"],
        default="quick",
        help="how much to run (default: quick, minutes)",
    )
    command.add_argument(
        "--only", nargs="+", default=[], metavar="WHAT", help="run only these cells, e.g. mnist ir=100 method=redgrape"
    )
    command.add_argument("--seeds", type=_seeds, metavar="0,1,2", help="the seeds (default: those of the scale)")
    command.add_argument("--out", type=_path, default=Path("runs"), metavar="DIR", help="folder with the runs (runs)")
    _add_suite_flags(command)
    command.add_argument("--record", action="store_true", help="add finished cells to the records")
    command.add_argument("--no-run", action="store_true", help="write the tables from existing runs; run nothing")
    command.add_argument("--into", type=_path, metavar="FILE", help="insert the table at its marks in a Markdown page")
    _add_execution_flags(command)

    command = add("sweep", "suites", "run your own grid or search, and write its table")
    command.add_argument("grid", nargs="+", metavar="KEY=V1,V2", help="an axis; with --search also KEY=LOW..HIGH[:log]")
    command.add_argument("--experiment", type=_path, metavar="FILE", help="a TOML file with the other settings")
    command.add_argument("--method", dest="set:method.name", metavar="NAME", help="the method (default: redgrape)")
    command.add_argument(
        "--preset", dest="set:method.preset", metavar="NAME", help="the preset of the method (default: paper)"
    )
    _add_seed_flags(command)
    command.add_argument("--reference", metavar="ROW", help="the row to compare others with (default: the first)")
    command.add_argument("--search", type=_positive, metavar="N", help="let Optuna propose N settings, by validation")
    _add_experiment_flags(command)
    command.add_argument("--out", type=_path, default=Path("runs"), metavar="DIR", help="folder with the runs (runs)")
    command.add_argument("--name", type=_name, default="sweep", help="subfolder of --out for this grid (sweep)")
    _add_on_flag(command)
    _add_suite_flags(command)
    _add_execution_flags(command)

    command = add("ls", "inspection", "list runs")
    command.add_argument("folder", nargs="?", type=_path, default=Path("runs"), help="search below this folder (runs)")
    command = add("show", "inspection", "show one run")
    command.add_argument("run", type=_path, help="the run folder")
    _add_on_flag(command)
    command = add("privacy", "privacy", "report what each party could learn from a run")
    command.add_argument("run", type=_path, help="the run folder")
    command = add("report", "page", "write a self-contained HTML page about runs")
    command.add_argument(
        "folders",
        nargs="+",
        type=_path,
        metavar="RUN_OR_SUITE",
        help="a run, a folder of runs, or a suite (its folder, or its name if it is below runs/)",
    )
    command.add_argument(
        "--out", type=_path, default=Path("report.html"), metavar="FILE", help="the page (report.html)"
    )
    command = add("serve", "page", "show the runs of a folder live in a browser on this machine")
    command.add_argument("folder", nargs="?", type=_path, default=Path("runs"), help="folder with the runs (runs)")
    command.add_argument("--port", type=_port, default=8765, metavar="N", help="the port (8765; 0 for any free port)")
    command = add("methods", "inspection", "list the methods, or show one with its hyper-parameters")
    command.add_argument("name", nargs="?", help="a method")
    command.add_argument("--net", default="cnn", metavar="NAME", help="show message sizes for this net (cnn)")
    command.add_argument(
        "--shape", type=_shape, default=(1, 28, 28), metavar="1,28,28", help="the input shape (1,28,28)"
    )
    command.add_argument("--classes", type=_positive, default=10, metavar="N", help="the number of classes (10)")
    command.add_argument("--needs", metavar="WORDS", help="list methods that need this: nothing, state, counts, data")
    command.add_argument("--summable", action="store_true", help="list methods that work with secure sums alone")

    data = commands.add_parser("data", help="show or download data", description="Show or download data.")
    parts = data.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    text = "print and plot the examples of each client"
    command = parts.add_parser(
        "show",
        help=text,
        description=text,
        allow_abbrev=False,
        epilog=_examples("data show"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(command=_command("data", "show"))
    command.add_argument("experiment", nargs="?", type=_path, help="a TOML file (default: built-in settings)")
    command.add_argument("--seed", dest="set:seed", type=int, metavar="N", help="the seed (default: 0)")
    _add_experiment_flags(command)
    command.add_argument("--data-root", type=_path, metavar="DIR", help="folder with the data files")
    command.add_argument(
        "--out", type=_path, default=Path("federation.png"), metavar="FILE", help="the figure (federation.png)"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command = parts.add_parser("fetch", help="download a data set and verify it", allow_abbrev=False)
    command.set_defaults(command=_command("data", "fetch"))
    command.add_argument("name", help="mnist, fashion_mnist, cifar10 or cifar100")
    command.add_argument("--data-root", type=_path, metavar="DIR", help="folder for the data files")

    command = add("embed", "data", "compute the features of a pretrained encoder once, for later runs")
    command.add_argument("data", help="a public data set, an image folder or an .npz with images")
    command.add_argument("--net", default="efficientnet_lite0", metavar="NAME", help="the encoder (efficientnet_lite0)")
    command.add_argument("--weights", metavar="FILE", help="safetensors file with the weights of the encoder")
    command.add_argument("--size", type=_positive, metavar="N", help="side of the encoder's images (own, 64 to 224)")
    command.add_argument("--image-size", type=_positive, metavar="N", help="resize images in folders to N by N")
    command.add_argument("--data-root", type=_path, metavar="DIR", help="folder with the data files and the cache")
    command.add_argument("--out", type=_path, metavar="FILE", help="also write the features to an .npz file")

    command = add("export", "model", "export the inference model of a run, with a model card")
    command.add_argument("run", type=_path, help="the run folder")
    command.add_argument("out", type=_path, help="the model folder to create")
    command.add_argument(
        "--format", choices=["safetensors", "onnx"], default="safetensors", help="weight format (safetensors)"
    )
    command.add_argument(
        "--calibrate",
        action="store_true",
        help="choose a temperature and thresholds on the run's validation examples, and store them in the model",
    )
    _add_calibration_flags(command)
    command = add("evaluate", "model", "evaluate a run on its own test set, or a model on labelled data")
    command.add_argument("model", type=_path, metavar="RUN_OR_MODEL", help="the folder of a run or of a model")
    command.add_argument(
        "data",
        nargs="?",
        type=_path,
        help="a folder with one sub-folder per class, an .npz with x and y, or a table (default: a run's test set)",
    )
    command.add_argument("--by-site", action="store_true", help="also print the figures of each site of a run")
    _add_on_flag(command)
    command.add_argument("--picture", type=_path, metavar="FILE", help="draw a reliability diagram (.png, .svg, .pdf)")
    _add_calibration_flags(command)
    command.add_argument("--code", type=_path, metavar="FILE", help="the Python file of your own net")
    command = add("predict", "model", "predict the classes of new data with a model")
    command.add_argument("model", type=_path, metavar="RUN_OR_MODEL", help="the folder of a run or of a model")
    command.add_argument("data", type=_path, help="an image, a folder of images, an .npz with x, or a table")
    command.add_argument("--out", type=_path, metavar="FILE", help="write a CSV file with all probabilities")
    command.add_argument("--code", type=_path, metavar="FILE", help="the Python file of your own net")
    _add_deployment(commands)
    return parser


def _add_deployment(commands: Any) -> None:
    text = "run a real federation on Flower; the data stays at the sites"
    deploy = commands.add_parser("deploy", help=text, description=text)
    parts = deploy.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def add(name: str, text: str, folder: str = "the deployment's folder") -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = parts.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(command=_command("deploy", name))
        command.add_argument("folder", type=_path, metavar="DIR", help=folder)
        return command

    command = add("init", "write the files each party needs: certificates, keys, settings, scripts")
    command.add_argument("--sites", required=True, metavar="A,B,C", help="the names of the sites")
    command.add_argument("--host", required=True, metavar="NAME", help="host name at which sites reach the server")
    command.add_argument("--port", type=_port, default=8443, metavar="N", help="the port of the server (8443)")
    command.add_argument("--bind", metavar="ADDRESS", help="the address to listen on (default: that of --host)")
    command.add_argument(
        "--test", type=_path, metavar="DATA", help="a test set at the server (default: sites evaluate)"
    )
    command.add_argument(
        "--like", type=_path, metavar="DATA", help="sample data with all classes, to read classes and shape from"
    )
    command.add_argument("--classes", metavar="A,B,C", help="the class names, or their number (numbered from 0)")
    command.add_argument("--shape", type=_shape, metavar="1,28,28", help="the shape of an input")
    command.add_argument(
        "--input", choices=["uint8", "float"], default="uint8", help="pixels (uint8, the default) or floats"
    )
    command.add_argument("--image-size", type=_positive, metavar="N", help="resize images in folders to N by N")
    command.add_argument("--label", metavar="COLUMN", help="the column of classes, if the sites' data are tables")
    command.add_argument("--drop", metavar="A,B", help="columns of the tables that are no inputs")
    command.add_argument("--categorical", metavar="A,B", help="columns of the tables with numbers that are names")
    command.add_argument("--tail", metavar="A,B", help="classes to report as the tail")
    command.add_argument(
        "--min-count",
        type=_positive,
        default=8,
        metavar="N",
        help="sites report only classes with N examples or more (8)",
    )
    command.add_argument(
        "--min-clients",
        type=_positive,
        default=3,
        metavar="N",
        help="re-balance only classes that N sites hold (3)",
    )
    command.add_argument(
        "--secure-aggregation",
        action=argparse.BooleanOptionalAction,
        help="the server sees only sums over sites, no single update (default from three sites on)",
    )
    command.add_argument(
        "--class-rows", action="store_true", help="sites send a row per class, as RedGrape and CReFF need"
    )
    command.add_argument("--plain", action="store_true", help="no TLS and no keys, for trials on this machine only")

    add("server", "start and monitor the server until Ctrl-C")
    command = add("site", "take part as a site until Ctrl-C", "the site's folder")
    command.add_argument(
        "--data", type=_path, required=True, help="a folder with one sub-folder per class, an .npz, or a table"
    )
    command = add("run", "run or continue an experiment on the sites")
    command.add_argument("experiment", nargs="?", type=_path, help="a TOML file (default: that of the deployment)")
    command.add_argument("--method", dest="set:method.name", metavar="NAME", help="the method")
    command.add_argument("--preset", dest="set:method.preset", metavar="NAME", help="the preset of the method")
    command.add_argument("--net", dest="set:net.name", metavar="NAME", help="the net")
    command.add_argument("--seed", dest="set:seed", type=int, metavar="N", help="the seed")
    command.add_argument("--rounds", dest="set:rounds", type=int, metavar="N", help="communication rounds")
    command.add_argument(
        "-c", dest="config", action="append", default=[], metavar="KEY=VALUE", help="set any key, e.g. method.lam=0.2"
    )
    command.add_argument("--name", type=_name, metavar="NAME", help="name of the run folder below DIR/runs")
    command.add_argument(
        "--simulate",
        type=_path,
        metavar="PATH",
        help="simulate all sites with Flower and Ray, on data in PATH/NAME or PATH/NAME.npz; no site connects",
    )
    command.add_argument(
        "--allow-changes", action="store_true", help="continue a run that another version or machine began"
    )
    command.add_argument("--dry-run", action="store_true", help="print what would run, then exit")
    command.add_argument("--quiet", action="store_true", help="show no progress")
    command.add_argument("--json", action="store_true", help="print JSON")
    add("status", "show the connected sites and the state of the newest run").add_argument(
        "--json", action="store_true", help="print JSON"
    )

    add("renew", "give the server a new certificate before the old one expires")

    text = "look for problems in a deployment and suggest fixes"
    command = commands.add_parser("doctor", help=text, description=text, allow_abbrev=False)
    command.set_defaults(command=_command("doctor", "doctor"))
    command.add_argument("folder", type=_path, metavar="DIR", help="the deployment's folder, or a site's")
    command.add_argument("--data", type=_path, metavar="PATH", help="data of a site, to check as well")
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_experiment_flags(
    command: argparse.ArgumentParser, without: Sequence[str] = (), texts: Mapping[str, str] = MappingProxyType({})
) -> None:
    group = command.add_argument_group("the experiment")
    for flag, (key, kind, text) in _FLAGS.items():
        if flag not in without:
            metavar = kind.__name__.strip("_").upper()
            group.add_argument(flag, dest=f"set:{key}", type=kind, metavar=metavar, help=texts.get(flag, text))
    group.add_argument(
        "-c", dest="config", action="append", default=[], metavar="KEY=VALUE", help="set any key, e.g. method.lam=0.2"
    )


def _add_seed_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_mutually_exclusive_group()
    group.add_argument("--seeds", type=_seeds, metavar="0,1,2", help="the seeds (default: that of the experiment)")
    group.add_argument("--seed", dest="set:seed", type=int, metavar="N", help="a single seed")


def _add_suite_flags(command: argparse.ArgumentParser) -> None:
    _add_overwrite_flag(command)
    command.add_argument("--plan", action="store_true", help="print the cells, their state and estimated time")
    command.add_argument(
        "--results",
        type=_path,
        default=Path("results"),
        metavar="DIR",
        help="folder with records of finished cells (results)",
    )
    command.add_argument(
        "--side-by-side",
        type=_positive,
        metavar="N",
        help="run N cells at once, sharing the workers (default: as many as have a worker for each of their clients)",
    )


def _add_overwrite_flag(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--overwrite",
        action="store_true",
        help="replace runs made with other data or settings",
    )


def _add_on_flag(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--on",
        choices=["test", "validation"],
        default="test",
        help="the set that the table reports (default: test; see data.validation)",
    )


def _add_calibration_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--shares",
        choices=["training", "validation"],
        help="calibrate for these class shares (default: training, or validation if the imbalance was made)",
    )
    command.add_argument("--data-root", type=_path, metavar="DIR", help="folder with the data files of the run")


def _add_execution_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("execution (does not change results, except as noted)")
    group.add_argument(
        "--workers", type=_positive, metavar="N", help="worker processes (default: one per core, or one per GPU)"
    )
    group.add_argument(
        "--device", default="cpu", help="cpu (default), cuda (all GPUs), cuda:N, or auto (a GPU changes the last bits)"
    )
    group.add_argument(
        "--precision",
        default="float32",
        choices=["float32", "bfloat16"],
        help="bfloat16: the encoder multiplies in it, which a GPU does faster (changes results; default: float32)",
    )
    group.add_argument(
        "--stack",
        type=_positive,
        default=1,
        metavar="N",
        help="train N clients of equal size as one; fast for small nets (changes the last bits; default: 1)",
    )
    group.add_argument("--data-root", type=_path, metavar="DIR", help="folder with the data files (or $REDGRAPE_DATA)")
    group.add_argument(
        "--deadline",
        type=_seconds,
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


def _positive(text: str) -> int:
    if not (text.isdecimal() and len(text) < 10 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is not a whole number of at least 1 and below 10^9")
    return int(text)


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; for the current folder write .")
    return Path(text)


def _name(text: str) -> str:
    if not text or text != Path(text).name or text.startswith(".") or "\\" in text:
        raise argparse.ArgumentTypeError(f"'{text}' is not a folder name; use no slashes and no leading dot")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number of seconds")
    return seconds


def _port(text: str) -> int:
    if not (text.isdecimal() and len(text) < 6 and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"'{text}' is not a port; choose 1024 to 65535, or 0 for any free one")
    return int(text)


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(_positive, text.split(",")))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is not a shape such as 1,28,28 or 512") from None


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of seeds such as 0,1,2") from None
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"'{text}' names a seed twice")
    return seeds


if __name__ == "__main__":
    main()
