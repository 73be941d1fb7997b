"""Flower's ClientApp: passes a question to the site's resident process and returns its answer.

Flower starts it in a separate process for every message; torch is not loaded there. In a simulation there is no
resident process, and the site answers here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from redgrape.deploy.processes.supervision import DEPLOYMENT, SIMULATED_DATA, SOCKET
from redgrape.deploy.protocol import messages, wire
from redgrape.deploy.protocol.wire import Header

if TYPE_CHECKING:
    from redgrape.deploy.protocol.site import DeployedSite

EXTRA = 30.0  # seconds beyond the resident process's own deadline

app = ClientApp()


def _answer(message: Message, context: Context) -> Message:
    header, parts = wire.unpack(message.content)
    if SOCKET in os.environ:
        answer = _ask_resident(header, parts)
    else:
        answer = _simulated(int(context.node_config["partition-id"])).answer(header, parts)
    return Message(wire.pack(*answer), reply_to=message)


for register in (app.train, app.evaluate, app.query):
    register()(_answer)


def _ask_resident(header: Header, parts: Mapping[str, bytes]) -> tuple[Header, Mapping[str, bytes]]:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(messages.deadline_of(header) + EXTRA)
            connection.connect(os.environ[SOCKET])
            wire.send(connection, header, parts)
            return wire.receive(connection)
    except (OSError, wire.NotUnderstood) as error:
        return messages.Failure(error=f"the site's resident process gave no answer ({error})").to_header(), {}


@cache
def _simulated(index: int) -> DeployedSite:
    """A site of a fully simulated deployment. Its data is PATH/NAME or PATH/NAME.npz."""
    from redgrape.deploy.processes.simulated import data_of
    from redgrape.deploy.protocol.site import DeployedSite
    from redgrape.deploy.setup.folder import Deployment, SiteFolder

    deployment, data = Deployment(Path(os.environ[DEPLOYMENT])), Path(os.environ[SIMULATED_DATA])
    name = deployment.options.sites[index]
    folder = SiteFolder(deployment.site(name))
    return DeployedSite(folder, data_of(data, name), deployment.server / "simulated" / name)
