"""redgrape: federated learning on long-tailed data.

The public names are imported when they are first used, so that `import redgrape` and the command line start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redgrape import methods as methods
    from redgrape import nets as nets
    from redgrape.data.augment import Augment as Augment
    from redgrape.data.examples import Examples as Examples
    from redgrape.data.examples import Pixels as Pixels
    from redgrape.data.federation import Federation as Federation
    from redgrape.errors import RedgrapeError as RedgrapeError
    from redgrape.exchange import Exchange as Exchange
    from redgrape.method import ClientSite as ClientSite
    from redgrape.method import Method as Method
    from redgrape.method import ServerSite as ServerSite
    from redgrape.nets.net import Net as Net
    from redgrape.training import Result as Result
    from redgrape.training import Training as Training
    from redgrape.training import train as train

__version__ = "0.1.0"

_HOMES = {
    "Augment": "redgrape.data.augment",
    "ClientSite": "redgrape.method",
    "Examples": "redgrape.data.examples",
    "Exchange": "redgrape.exchange",
    "Federation": "redgrape.data.federation",
    "Method": "redgrape.method",
    "Net": "redgrape.nets.net",
    "Pixels": "redgrape.data.examples",
    "RedgrapeError": "redgrape.errors",
    "Result": "redgrape.training",
    "ServerSite": "redgrape.method",
    "Training": "redgrape.training",
    "train": "redgrape.training",
}
_MODULES = ("methods", "nets")

__all__ = [*sorted(_HOMES), *_MODULES]  # noqa: PLE0604  # the names are strings; ruff cannot see it


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"redgrape.{name}")
    raise AttributeError(f"module 'redgrape' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
