"""Evaluate the model of a finished run on the run's own test set."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from redgrape.data.prepare import prepare
from redgrape.data.sources import DATASETS
from redgrape.determinism import same_bits_everywhere
from redgrape.errors import DataError, StorageError
from redgrape.exported.export import newest_state
from redgrape.exported.inference import evaluate_batches
from redgrape.learning import sums
from redgrape.reading.run_tables import RunView
from redgrape.runs.embedded import embedder, for_encoder
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import check_model, contents


def evaluate_run(path: Path, data_root: Path | None = None) -> dict[str, Any]:
    """All figures (`evaluation.detailed`), and the training examples of each class. The data must be the run's."""
    folder, view = RunFolder.open(path), RunView.read(path)
    if view.summary is None or view.environment is None:
        raise StorageError(f"'{path}' is not finished; continue it with `redgrape resume {path}`")
    state, experiment = newest_state(folder, view), folder.experiment()
    federation = prepare(experiment.data, experiment.seed, data_root)
    if experiment.net.is_pretrained:
        federation = federation.with_inputs(partial(for_encoder, experiment.net.name))
    here = {"split": federation.fingerprint()}
    if experiment.data.source not in DATASETS:  # files of public sets are verified, so the split is enough
        here["data"] = contents(federation)
    for name, digest in here.items():
        if view.environment.get(name, digest) != digest:
            raise DataError(
                f"the data of '{path}' has changed since it began: the {name} was {view.environment[name][:12]} and is "
                f"{digest[:12]}; restore the old data"
            )
    if experiment.net.is_frozen:
        federation = federation.with_inputs(embedder(experiment.net, federation.input_shape, data_root))
    net = experiment.builder(federation)()
    check_model(state, net.state_dict(), folder)
    net.load_state_dict(state.server["model"])
    net.eval()
    test, cpu = federation.test, torch.device("cpu")
    with same_bits_everywhere():
        batches = ((sums.logits(net, test, s, cpu), test.labels[s : s + sums.BATCH]) for s in sums.batch_starts(test))
        scores = evaluate_batches(batches, federation.groups, federation.class_names)
    return {**scores, "class_counts": federation.class_counts.tolist()}
