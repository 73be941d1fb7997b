"""What a finished run leaves: its last state, and the summary of its results."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from redgrape import tree
from redgrape.determinism import same_bits_everywhere
from redgrape.errors import ConfigError, StorageError
from redgrape.rounds import RunState
from redgrape.runs.experiment import Experiment
from redgrape.runs.figures import FIGURES, OF_MANY_CLASSES, mean_of_known
from redgrape.runs.folder import RunFolder
from redgrape.tree import Tensors, Tree


def last_state(folder: RunFolder) -> RunState:
    """The state of a finished run, from which another starts: the last, or that of the best round if it is kept."""
    if folder.experiment().exchange.is_noisy:
        raise ConfigError(
            f"'{folder.path}' was trained with noise, and another run would use the clients' data again, outside its "
            "account of epsilon; start from a run without noise"
        )
    summary = folder.summary() or {}
    best = summary.get("best_round")  # if the experiment keeps its model
    state = folder.checkpoints.after(best) if best else folder.checkpoints.latest()[0]
    if state is None or digest_of_state(state) != summary.get("state"):
        raise ConfigError(f"'{folder.path}' is not finished; finish it with `redgrape resume`, or name another run")
    return state


def check_model(state: RunState, model: Tensors, folder: RunFolder) -> None:
    """Raise StorageError if a checkpoint, which may be untrusted, holds another model."""
    stored = state.server.get("model")
    found = {name: t.shape for name, t in tree.flatten(stored).items()} if isinstance(stored, Mapping) else {}
    if found != {name: t.shape for name, t in model.items()}:
        raise StorageError(
            f"the checkpoint of round {state.round} in '{folder.path}' holds another model than the experiment"
        )


def summarize(
    folder: RunFolder, experiment: Experiment, state: RunState, mistakes: Mapping[str, Any], averaged: int
) -> dict[str, Any]:
    """The result of a run: means over the last evaluations, and the `mistakes` of the final model (empty if it was not
    evaluated). A finished run keeps the number that it `averaged`: earlier versions took up to ten of any run. If the
    model of the best round is kept, its evaluation is the result. Figures are None if no round could be evaluated."""
    evaluated = [record for record in folder.metrics() if "test" in record][-averaged:]
    best = folder.checkpoints.best_round
    if best:
        evaluated = [record for record in folder.metrics() if record["round"] == best]
    tests = [record["test"] for record in evaluated]
    per_class = [test["per_class"] for test in tests] or [[None] * len(folder.environment()["class_names"])]
    return {
        "experiment": experiment.hash(),
        "method": experiment.method.name,
        "extra_data": experiment.method.create().uses_auxiliary,
        "seed": experiment.seed,
        "rounds": experiment.rounds,
        **({"best_round": best} if best else {}),
        "split": folder.environment()["split"],
        "state": digest_of_state(state),
        "averaged_rounds": [record["round"] for record in evaluated],
        "mean_of_last": _means(tests) or dict.fromkeys(FIGURES),
        "validation": _means([record["validation"] for record in evaluated if "validation" in record]) or None,
        "per_class": [mean_of_known(values) for values in zip(*per_class, strict=True)],
        "last": tests[-1] if tests else None,
        **mistakes,
        "classifier_norms": classifier_norms(state.server),
    }


def classifier_norms(server: Tree) -> dict[str, list[float]]:
    """The weight norm of each class in the deployed classifier (`model`), and in classifiers used only for training."""
    deployed = server["model"]["classifier.weight"]
    classifiers = {"model": deployed}
    for name, group in server.items():
        weight = group.get("weight") if isinstance(group, Mapping) else None
        if isinstance(weight, torch.Tensor) and weight.shape == deployed.shape and not torch.equal(weight, deployed):
            classifiers[name] = weight
    with same_bits_everywhere():
        return {name: w.double().norm(dim=1).tolist() for name, w in classifiers.items()}


def digest_of_state(state: RunState) -> str:
    return hashlib.sha256(tree.to_bytes(state.server)).hexdigest()


def _means(scores: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    named = [f for f in (*FIGURES, *OF_MANY_CLASSES) if all(f in score for score in scores)]  # older rounds lack some
    return {figure: mean_of_known([score[figure] for score in scores]) for figure in named} if scores else {}
