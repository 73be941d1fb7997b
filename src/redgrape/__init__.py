"""redgrape: federated learning on long-tailed data.

    import redgrape as rg

    federation = rg.data.load("digits", ir=50.0, clients=10)
    result = rg.train(rg.RedGrape(lr=0.02), federation, rg.nets.builder("mlp", federation), rounds=20)
    result.history.to_pandas()

Every method is here by the name of its class: `rg.RedGrape`, `rg.FedAvg`, `rg.CReFF` ... Names are imported when they
are first used, so that `import redgrape` and the command line start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redgrape import data as data
    from redgrape import methods as methods
    from redgrape import nets as nets
    from redgrape import tree as tree
    from redgrape.data.augment import Augment as Augment
    from redgrape.data.examples import Examples as Examples
    from redgrape.data.examples import Pixels as Pixels
    from redgrape.data.federation import Federation as Federation
    from redgrape.errors import RedgrapeError as RedgrapeError
    from redgrape.exchange import Exchange as Exchange
    from redgrape.exported.model import load_model as load_model
    from redgrape.method import ClientSite as ClientSite
    from redgrape.method import Method as Method
    from redgrape.method import ServerSite as ServerSite
    from redgrape.nets.net import Net as Net
    from redgrape.runs.experiment import Experiment as Experiment
    from redgrape.runs.run import run as run
    from redgrape.testing import check_method as check_method
    from redgrape.training import History as History
    from redgrape.training import Result as Result
    from redgrape.training import Training as Training
    from redgrape.training import train as train

__version__ = "0.2.0"

_HOMES = {
    "Augment": "redgrape.data.augment",
    "ClientSite": "redgrape.method",
    "Examples": "redgrape.data.examples",
    "Exchange": "redgrape.exchange",
    "Experiment": "redgrape.runs.experiment",
    "Federation": "redgrape.data.federation",
    "History": "redgrape.training",
    "Method": "redgrape.method",
    "Net": "redgrape.nets.net",
    "Pixels": "redgrape.data.examples",
    "RedgrapeError": "redgrape.errors",
    "Result": "redgrape.training",
    "ServerSite": "redgrape.method",
    "Training": "redgrape.training",
    "check_method": "redgrape.testing",
    "load_model": "redgrape.exported.model",
    "run": "redgrape.runs.run",
    "train": "redgrape.training",
}
_MODULES = ("data", "methods", "nets", "tree")

__all__ = [*sorted(_HOMES), *_MODULES]  # noqa: PLE0604  # the names are strings; ruff cannot see it


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"redgrape.{name}")
    if not name.startswith("_") and (method := importlib.import_module("redgrape.methods").by_class(name)) is not None:
        return method
    raise AttributeError(f"module 'redgrape' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
