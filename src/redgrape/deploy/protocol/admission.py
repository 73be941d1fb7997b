"""What a deployment holds the server's experiment to. The server's command looks at it before a run, and every site
again before it answers, by its own site.toml.

    min_count      of a class of which it holds fewer examples no site sends how many, or a gradient; and where there is
                   such a floor, no gradient that can be solved for the examples behind it. The update of the model
                   itself may still tell of such a class
    min_clients    no class is released that fewer sites report
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from redgrape import nets
from redgrape.exchange import Exchange, Parts
from redgrape.exchange.parts import class_rows
from redgrape.method import Site
from redgrape.runs.experiment import Experiment
from redgrape.training import exchanged

if TYPE_CHECKING:
    from redgrape.deploy.setup.folder import DeployOptions, SiteOptions


def why_refused(experiment: Experiment, options: DeployOptions | SiteOptions) -> str | None:
    """Why the experiment discloses, or releases, more than the options allow, or cannot run by them; else None."""
    method, exchange, data = experiment.method.create(), experiment.exchange, options.data
    sites = options.sites if isinstance(options.sites, int) else len(options.sites)
    build = partial(nets.build, experiment.net.name, data.shape, len(data.classes), experiment.seed)
    site = Site(build, sites, len(data.classes), experiment.seed, 0, experiment.rounds, torch.device("cpu"))
    parts, survey = exchanged(method, site)
    summed = options.secure_aggregation
    if reason := exchange.refuses(parts, single=method.needs_single(), surveys=bool(survey), summed=summed):
        without = "; or set secure_aggregation=false in deploy.toml and every site.toml" if summed else ""
        return f"method '{experiment.method.name}' cannot run so: {reason}{without}"
    return _too_much(exchange, parts, survey, options)


def _too_much(
    exchange: Exchange, parts: Parts, survey: Iterable[str], options: DeployOptions | SiteOptions
) -> str | None:
    rows = class_rows(parts)
    if rows and exchange.min_count < options.min_count:
        return (
            f"exchange.min_count is {exchange.min_count}, and no site reports a class of which it holds fewer than "
            f"{options.min_count} examples (min_count in deploy.toml and site.toml); raise it"
        )
    if rows and exchange.min_clients < options.min_clients:
        return (
            f"exchange.min_clients is {exchange.min_clients}, and no class is released that fewer than "
            f"{options.min_clients} sites report (min_clients in deploy.toml and site.toml); raise it"
        )
    if options.secure_aggregation or options.min_count == 1:  # sites tell nothing but parts of sums, or anything
        return None
    solvable = len(options.data.classes) - 1
    if any(part.gradient for part in rows.values()) and solvable >= exchange.min_count:
        return (
            f"class gradients of up to {solvable} examples can be solved for every one of them, and this experiment "
            f"sends them from {exchange.min_count} on; raise exchange.min_count to {solvable + 1}, or use secure "
            "aggregation"
        )
    if asked := ", ".join(survey):
        return (
            f"the method asks every client for its {asked}, and sites tell of no class with fewer than "
            f"{options.min_count} examples; use secure aggregation, or min_count=1 in deploy.toml and every site.toml"
        )
    return None
