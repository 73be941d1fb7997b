"""The grammar of the command line: every command with its arguments. Commands are imported when they are called."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from redgrape import __version__
from redgrape.cli import flags
from redgrape.errors import ConfigError
from redgrape.methods import RECOMMENDED, WITHOUT_TRAINING

Add: TypeAlias = Callable[[str, str, str], argparse.ArgumentParser]  # name, module of commands/, help

# For the help, by command
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` lists the options")


def build() -> argparse.ArgumentParser:
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
        command = _add_command(commands, name, module, text, EXAMPLES.get(name))
        command.add_argument("--json", action="store_true", help="print JSON")
        return command

    _add_training(add)
    _add_suites(add)
    _add_reading(add)
    _add_data(add, commands)
    _add_models(add)
    _add_deployment(commands)
    return parser


def _add_command(
    commands: Any, name: str, module: str, text: str, examples: Sequence[str] | None = None
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text,
        allow_abbrev=False,
        epilog="\n  ".join(["examples:", *examples]) if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def call(options: argparse.Namespace) -> None:  # the module is imported only now
        getattr(importlib.import_module(f"redgrape.cli.commands.{module}"), name)(options)

    command.set_defaults(command=call)
    return command


def _add_training(add: Add) -> None:
    command = add("run", "training", "train a method on a long-tailed federation")
    command.add_argument("experiment", nargs="?", type=flags.path, help="a TOML file (default: built-in settings)")
    flags.add_method(command, "redgrape")
    command.add_argument("--seed", dest="set:seed", type=int, metavar="N", help="the seed (default: 0)")
    flags.add_experiment(command)
    flags.add_run_folder(command)
    flags.add_execution(command)

    command = add("fit", "training", "fit a head to a pretrained encoder in one round, without training")
    command.add_argument(
        "set:data.source", metavar="DATA", help=flags.EXPERIMENT["--data"][2].replace(" (default)", "")
    )
    flags.add_method(command, WITHOUT_TRAINING)
    command.add_argument("--seed", dest="set:seed", type=int, metavar="N", help="the seed (default: 0)")
    flags.add_experiment(
        command,
        without=("--data", "--keep", "--patience", "--epochs", "--batch-size", "--lr"),
        texts={
            "--net": "efficientnet_lite0 (default), timm:NAME, ..., linear or file.py:function",
            "--rounds": "communication rounds (default: 1)",
        },
    )
    defaults = {"method.name": WITHOUT_TRAINING, "net.name": "efficientnet_lite0", "rounds": 1}
    command.set_defaults(experiment=None, **{f"set:{key}": value for key, value in defaults.items()})
    flags.add_run_folder(command)
    command.add_argument("--export", type=flags.path, metavar="DIR", help="also write the model to this folder")
    flags.add_execution(command)

    command = add("adjust", "training", "give the model of a finished run another classifier, in one round")
    command.add_argument("run", type=flags.path, help="the run folder")
    command.add_argument("method", metavar="METHOD", help=f"the method, with its settings: {WITHOUT_TRAINING}:rho=0.5")
    flags.add_config(command, "rounds=2")
    flags.add_run_folder(command)
    flags.add_execution(command)

    command = add("resume", "training", "continue a run, or extend a finished one")
    command.add_argument("run", type=flags.path, help="the run folder")
    command.add_argument("--rounds", type=int, metavar="N", help="extend the run to N rounds in total")
    flags.add_execution(command)

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
    command.add_argument("--experiment", type=flags.path, metavar="FILE", help="a TOML file with the other settings")
    command.add_argument("--preset", dest="set:method.preset", metavar="NAME", help="the preset for all methods")
    flags.add_seeds(command)
    flags.add_experiment(command)
    flags.add_out(command, "folder for the runs", "runs/compare")
    flags.add_overwrite(command)
    flags.add_on(command)
    flags.add_execution(command)


def _add_suites(add: Add) -> None:
    command = add("reproduce", "reproduce", "run the experiments behind a table or figure of the paper, and write it")
    command.add_argument(
        "name", nargs="?", help="the suite, such as table2, or your own, mine.toml (default: list all suites)"
    )
    command.add_argument(
        "--scale",
        choices=["paper", "study", "quick"],
        default="quick",
        help="how much to run (default: quick, minutes)",
    )
    command.add_argument(
        "--only", nargs="+", default=[], metavar="WHAT", help="run only these cells, e.g. mnist ir=100 method=redgrape"
    )
    command.add_argument("--seeds", type=flags.seeds, metavar="0,1,2", help="the seeds (default: those of the scale)")
    flags.add_out(command, "folder with the runs", "runs")
    flags.add_suite(command)
    command.add_argument("--record", action="store_true", help="add finished cells to the records")
    command.add_argument("--no-run", action="store_true", help="write the tables from existing runs; run nothing")
    command.add_argument(
        "--into", type=flags.path, metavar="FILE", help="insert the table at its marks in a Markdown page"
    )
    flags.add_execution(command)

    command = add("sweep", "suites", "run your own grid or search, and write its table")
    command.add_argument("grid", nargs="+", metavar="KEY=V1,V2", help="an axis; with --search also KEY=LOW..HIGH[:log]")
    command.add_argument("--experiment", type=flags.path, metavar="FILE", help="a TOML file with the other settings")
    flags.add_method(command, "redgrape")
    flags.add_seeds(command)
    command.add_argument("--reference", metavar="ROW", help="the row to compare others with (default: the first)")
    command.add_argument(
        "--search", type=flags.positive, metavar="N", help="let Optuna propose N settings, by validation"
    )
    flags.add_experiment(command)
    flags.add_out(command, "folder with the runs", "runs")
    command.add_argument("--name", type=flags.name, default="sweep", help="subfolder of --out for this grid (sweep)")
    flags.add_on(command)
    flags.add_suite(command)
    flags.add_execution(command)


def _add_reading(add: Add) -> None:
    command = add("ls", "inspection", "list runs")
    command.add_argument(
        "folder", nargs="?", type=flags.path, default=Path("runs"), help="search below this folder (runs)"
    )
    command = add("show", "inspection", "show one run")
    command.add_argument("run", type=flags.path, help="the run folder")
    flags.add_on(command)
    command = add("privacy", "privacy", "report what each party could learn from a run")
    command.add_argument("run", type=flags.path, help="the run folder")
    command = add("report", "page", "write a self-contained HTML page about runs")
    command.add_argument(
        "folders",
        nargs="+",
        type=flags.path,
        metavar="RUN_OR_SUITE",
        help="a run, a folder of runs, or a suite (its folder, or its name if it is below runs/)",
    )
    flags.add_out(command, "the page", "report.html", metavar="FILE")
    command = add("serve", "page", "show the runs of a folder live in a browser on this machine")
    command.add_argument("folder", nargs="?", type=flags.path, default=Path("runs"), help="folder with the runs (runs)")
    command.add_argument(
        "--port", type=flags.port, default=8765, metavar="N", help="the port (8765; 0 for any free port)"
    )
    command = add("methods", "inspection", "list the methods, or show one with its hyper-parameters")
    command.add_argument("name", nargs="?", help="a method")
    command.add_argument("--net", default="cnn", metavar="NAME", help="show message sizes for this net (cnn)")
    command.add_argument(
        "--shape", type=flags.shape, default=(1, 28, 28), metavar="1,28,28", help="the input shape (1,28,28)"
    )
    command.add_argument("--classes", type=flags.positive, default=10, metavar="N", help="the number of classes (10)")
    command.add_argument("--needs", metavar="WORDS", help="list methods that need this: nothing, state, counts, data")
    command.add_argument("--summable", action="store_true", help="list methods that work with secure sums alone")


def _add_data(add: Add, commands: Any) -> None:
    data = commands.add_parser("data", help="show or download data", description="Show or download data.")
    parts = data.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    text = "print and plot the examples of each client"
    command = _add_command(parts, "show", "data", text, EXAMPLES["data show"])
    command.add_argument("experiment", nargs="?", type=flags.path, help="a TOML file (default: built-in settings)")
    command.add_argument("--seed", dest="set:seed", type=int, metavar="N", help="the seed (default: 0)")
    flags.add_experiment(command)
    command.add_argument("--data-root", type=flags.path, metavar="DIR", help="folder with the data files")
    flags.add_out(command, "the figure", "federation.png", metavar="FILE")
    command.add_argument("--json", action="store_true", help="print JSON")
    command = _add_command(parts, "fetch", "data", "download a data set and verify it")
    command.add_argument("name", help="mnist, fashion_mnist, cifar10 or cifar100")
    command.add_argument("--data-root", type=flags.path, metavar="DIR", help="folder for the data files")

    command = add("embed", "data", "compute the features of a pretrained encoder once, for later runs")
    command.add_argument("data", help="a public data set, an image folder or an .npz with images")
    command.add_argument("--net", default="efficientnet_lite0", metavar="NAME", help="the encoder (efficientnet_lite0)")
    command.add_argument("--weights", metavar="FILE", help="safetensors file with the weights of the encoder")
    command.add_argument(
        "--size", type=flags.positive, metavar="N", help="side of the encoder's images (default: own, 64 to 224)"
    )
    command.add_argument("--image-size", type=flags.positive, metavar="N", help="resize images in folders to N by N")
    command.add_argument("--data-root", type=flags.path, metavar="DIR", help="folder with the data files and the cache")
    command.add_argument("--out", type=flags.path, metavar="FILE", help="also write the features to an .npz file")


def _add_models(add: Add) -> None:
    command = add("export", "model", "export the inference model of a run, with a model card")
    command.add_argument("run", type=flags.path, help="the run folder")
    command.add_argument("out", type=flags.path, help="the model folder to create")
    command.add_argument(
        "--format", choices=["safetensors", "onnx"], default="safetensors", help="weight format (safetensors)"
    )
    command.add_argument(
        "--calibrate",
        action="store_true",
        help="choose a temperature and thresholds on the run's validation examples, and store them in the model",
    )
    flags.add_calibration(command)
    command = add("evaluate", "model", "evaluate a run on its own test set, or a model on labelled data")
    command.add_argument("model", type=flags.path, metavar="RUN_OR_MODEL", help="the folder of a run or of a model")
    command.add_argument(
        "data",
        nargs="?",
        type=flags.path,
        help="a folder with one sub-folder per class, an .npz with x and y, or a table (default: a run's test set)",
    )
    command.add_argument("--by-site", action="store_true", help="also print the figures of each site of a run")
    flags.add_on(command)
    command.add_argument(
        "--picture", type=flags.path, metavar="FILE", help="draw a reliability diagram (.png, .svg, .pdf)"
    )
    flags.add_calibration(command)
    command.add_argument("--code", type=flags.path, metavar="FILE", help="the Python file of your own net")
    command = add("predict", "model", "predict the classes of new data with a model")
    command.add_argument("model", type=flags.path, metavar="RUN_OR_MODEL", help="the folder of a run or of a model")
    command.add_argument("data", type=flags.path, help="an image, a folder of images, an .npz with x, or a table")
    command.add_argument("--out", type=flags.path, metavar="FILE", help="write a CSV file with all probabilities")
    command.add_argument("--code", type=flags.path, metavar="FILE", help="the Python file of your own net")


def _add_deployment(commands: Any) -> None:
    text = "run a real federation on Flower; the data stays at the sites"
    deploy = commands.add_parser("deploy", help=text, description=text)
    parts = deploy.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def add(name: str, text: str, folder: str = "the deployment's folder") -> argparse.ArgumentParser:
        command = _add_command(parts, name, "deploy", text)
        command.add_argument("folder", type=flags.path, metavar="DIR", help=folder)
        return command

    command = add("init", "write the files each party needs: certificates, keys, settings, scripts")
    command.add_argument("--sites", required=True, metavar="A,B,C", help="the names of the sites")
    command.add_argument("--host", required=True, metavar="NAME", help="host name at which sites reach the server")
    command.add_argument("--port", type=flags.port, default=8443, metavar="N", help="the port of the server (8443)")
    command.add_argument("--bind", metavar="ADDRESS", help="the address to listen on (default: that of --host)")
    command.add_argument(
        "--test", type=flags.path, metavar="DATA", help="a test set at the server (default: sites evaluate)"
    )
    command.add_argument(
        "--like", type=flags.path, metavar="DATA", help="sample data that has all classes; sets classes and shape"
    )
    command.add_argument("--classes", metavar="A,B,C", help="the class names, or their number (numbered from 0)")
    command.add_argument("--shape", type=flags.shape, metavar="1,28,28", help="the shape of an input")
    command.add_argument(
        "--input", choices=["uint8", "float"], default="uint8", help="pixels (uint8, the default) or floats"
    )
    command.add_argument("--image-size", type=flags.positive, metavar="N", help="resize images in folders to N by N")
    command.add_argument("--label", metavar="COLUMN", help="the column of classes, if the sites' data are tables")
    command.add_argument("--drop", metavar="A,B", help="columns of the tables that are not inputs")
    command.add_argument("--categorical", metavar="A,B", help="columns of the tables whose numbers are codes")
    command.add_argument("--tail", metavar="A,B", help="classes to report as the tail")
    command.add_argument(
        "--min-count",
        type=flags.positive,
        default=8,
        metavar="N",
        help="sites report only classes with at least N examples (8)",
    )
    command.add_argument(
        "--min-clients",
        type=flags.positive,
        default=3,
        metavar="N",
        help="re-balance or release only classes that at least N sites hold (3)",
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
        "--data", type=flags.path, required=True, help="a folder with one sub-folder per class, an .npz, or a table"
    )
    command = add("run", "run or continue an experiment on the sites")
    command.add_argument("experiment", nargs="?", type=flags.path, help="a TOML file (default: that of the deployment)")
    command.add_argument("--method", dest="set:method.name", metavar="NAME", help="the method")
    command.add_argument("--preset", dest="set:method.preset", metavar="NAME", help="the preset of the method")
    command.add_argument("--net", dest="set:net.name", metavar="NAME", help="the net")
    command.add_argument("--seed", dest="set:seed", type=int, metavar="N", help="the seed")
    command.add_argument("--rounds", dest="set:rounds", type=int, metavar="N", help="communication rounds")
    flags.add_config(command)
    command.add_argument("--name", type=flags.name, metavar="NAME", help="name of the run folder below DIR/runs")
    command.add_argument(
        "--simulate",
        type=flags.path,
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
    command = _add_command(commands, "doctor", "doctor", text)
    command.add_argument("folder", type=flags.path, metavar="DIR", help="the deployment's folder, or a site's")
    command.add_argument("--data", type=flags.path, metavar="PATH", help="data of a site, to check as well")
    command.add_argument("--json", action="store_true", help="print JSON")
