"""What a deployment holds the server's experiment to. The server's command looks at it before a run, and every site
again before it answers, by its own site.toml.

    min_count      of a class of which it holds fewer examples no site sends how many, or a gradient; and where there is
                   such a floor, no gradient that can be solved for the examples behind it. The update of the model
                   itself may still tell of such a class
    min_clients    no class is released that fewer sites report
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from redgrape import nets
from redgrape.exchange import Parts
from redgrape.method import Site
from redgrape.privacy import floors
from redgrape.runs.experiment import Experiment
from redgrape.training import exchanged
from redgrape.tree import Tree

if TYPE_CHECKING:
    from redgrape.deploy.setup.folder import DeployOptions, SiteOptions


def why_refused(experiment: Experiment, options: DeployOptions | SiteOptions) -> str | None:
    """Why the experiment discloses, or releases, more than the options allow, or cannot run by them; else None."""
    if experiment.net.name not in nets.NETS:
        return f"net '{experiment.net.name}' is not one of redgrape's own, which are all that sites train"
    if experiment.data.letterbox or experiment.data.normalise:
        return "data.letterbox and data.normalise have no effect at sites; leave them out"
    exchange, single = experiment.exchange, experiment.method.create().needs_single()
    parts, survey = crossing(experiment, options)
    summed = options.secure_aggregation
    if reason := exchange.refuses(parts, single=single, surveys=bool(survey), summed=summed):
        without = "; or set secure_aggregation=false in deploy.toml and every site.toml" if summed else ""
        return f"method '{experiment.method.name}' cannot run so: {reason}{without}"
    return floors.too_much(
        exchange,
        parts,
        survey,
        min_count=options.min_count,
        min_clients=options.min_clients,
        secure_aggregation=summed,
        num_classes=len(options.data.classes),
    )


def crossing(experiment: Experiment, options: DeployOptions | SiteOptions) -> tuple[Parts, Tree]:
    """The parts of an update, and an answer to the survey, by the experiment and what is agreed on the data."""
    sites = options.sites if isinstance(options.sites, int) else len(options.sites)
    shape, classes, seed = options.data.shape, len(options.data.classes), experiment.seed
    build = partial(nets.build, experiment.net.name, shape, classes, seed)
    site = Site(build, sites, classes, seed, 0, experiment.rounds, torch.device("cpu"))
    return exchanged(experiment.method.create(), site)
