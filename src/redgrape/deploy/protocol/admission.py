"""What a deployment allows an experiment to do. The server's command checks it by deploy.toml before a run. Every site
checks it again before it answers, by its own site.toml.

    secure_aggregation    only methods whose server needs nothing but sums
    class_rows            methods that send a row for each class, such as RedGrape's prototypes, only if this is true;
                          without secure sums also those that send sums over each class, such as LDA's, or a sum
                          in which classes count alike, such as Vine's
    min_count             no site sends a gradient of a class with fewer examples, or how many there are. If this is
                          above 1, no gradient may be solvable for the examples behind it. The update of the model
                          itself may still disclose such a class
    min_clients           no class is released if fewer sites report or hold it
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from redgrape import nets, own_code
from redgrape.errors import ConfigError
from redgrape.exchange import Parts
from redgrape.exchange.parts import balanced_sums, class_rows, class_sums, of_data
from redgrape.method import Site
from redgrape.privacy import floors
from redgrape.rounds import exchanged
from redgrape.runs.experiment import Experiment
from redgrape.tree import Tree

if TYPE_CHECKING:
    from redgrape.deploy.setup.folder import DeployOptions, SiteOptions


class NotAllowed(ConfigError):
    """A site's policy does not allow what the server asks."""


def why_refused(experiment: Experiment, options: DeployOptions | SiteOptions) -> str | None:
    """Why the options do not allow the experiment; None if they do."""
    name = experiment.net.name
    if own_code.is_own(name) and not experiment.net.is_pretrained and not own_code.names_file(name):
        return f"net '{name}' is a function of a module; sites take one of a file: file.py:function"
    if experiment.data.letterbox or experiment.data.normalise:
        return "data.letterbox and data.normalise have no effect at sites; leave them out"
    exchange, single = experiment.exchange, experiment.method.create().needs_single()
    parts, survey = crossing(experiment, options)
    summed, name, sites = options.secure_aggregation, experiment.method.name, number_of(options)
    if summed and of_data(parts) and (experiment.clients_per_round or sites) < sites:
        return (
            f"clients_per_round is {experiment.clients_per_round}, and a secure sum of '{', '.join(of_data(parts))}' "
            f"must be over all {sites} sites: two sums over different sites would give that of one site; leave it out"
        )
    alone = [] if summed else [*class_sums(parts), *balanced_sums(parts)]
    if (rows := [*class_rows(parts), *alone]) and not options.class_rows:
        return (
            f"method '{name}' sends class rows ({', '.join(rows)}), and class_rows is false; choose another method, "
            "or set class_rows=true in deploy.toml and every site.toml"
        )
    scaled = bool(options.data.numbers)
    if reason := exchange.refuses(parts, single=single, surveys=bool(survey), scaled=scaled, summed=summed):
        without = "; or set secure_aggregation=false in deploy.toml and every site.toml" if summed else ""
        return f"method '{name}' cannot run so: {reason}{without}"
    return floors.too_much(
        exchange,
        parts,
        survey,
        min_count=options.min_count,
        min_clients=options.min_clients,
        secure_aggregation=summed,
        num_classes=len(options.data.classes),
    )


def sums_must_be_whole(experiment: Experiment, options: DeployOptions | SiteOptions) -> bool:
    """Whether a secure sum of updates must be over all sites: a sum with a site, and one without it, would give what
    the site sends about its data in every round."""
    return bool(of_data(crossing(experiment, options)[0]))


def number_of(options: DeployOptions | SiteOptions) -> int:
    return options.sites if isinstance(options.sites, int) else len(options.sites)


def crossing(experiment: Experiment, options: DeployOptions | SiteOptions) -> tuple[Parts, Tree]:
    """The parts of an update, and a template of an answer to the survey."""
    sites, shape, classes, seed = number_of(options), options.data.shape, len(options.data.classes), experiment.seed
    build = partial(nets.build, **experiment.net.trained, shape=experiment.net.inputs(shape))
    site = Site(
        partial(build, num_classes=classes, seed=seed), sites, classes, seed, 0, experiment.rounds, torch.device("cpu")
    )
    return exchanged(experiment.method.create(), site)
