"""Evaluate the model of a finished run on the run's own test or validation examples, and calibrate it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from redgrape.data.examples import Examples
from redgrape.data.federation import Federation
from redgrape.data.prepare import prepare
from redgrape.data.sources import DATASETS
from redgrape.determinism import same_bits_everywhere
from redgrape.errors import ConfigError, DataError, StorageError
from redgrape.exported.export import newest_state, was_in_bfloat16
from redgrape.exported.inference import BY_CALIBRATION, evaluate_batches, evaluate_calibrated
from redgrape.learning import calibration, sums
from redgrape.learning.calibration import Calibration
from redgrape.nets.net import Net
from redgrape.reading.run_view import RunView
from redgrape.runs.embedded import embedder, for_encoder
from redgrape.runs.environment import contents
from redgrape.runs.experiment import Experiment
from redgrape.runs.finished import check_model
from redgrape.runs.folder import RunFolder

Split: TypeAlias = Literal["test", "validation"]
Shares: TypeAlias = Literal["training", "validation"]


@dataclass(frozen=True)
class OwnModel:
    """The model of a finished run, with the run's own data."""

    folder: RunFolder
    experiment: Experiment
    federation: Federation
    net: Net
    round: int
    digest: str  # of its state
    in_bfloat16: bool  # whether the run's encoder multiplied in it; here it computes in float32

    @classmethod
    def open(cls, path: Path, data_root: Path | None = None) -> OwnModel:
        """Raise an error if the run is not finished, or the data is not the run's."""
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
                    f"the data of '{path}' has changed since it began: the {name} was {view.environment[name][:12]} "
                    f"and is {digest[:12]}; restore the old data"
                )
        if experiment.net.is_frozen:
            federation = federation.with_inputs(embedder(experiment.net, federation.input_shape, data_root))
        net = experiment.builder(federation)()
        check_model(state, net.state_dict(), folder)
        net.load_state_dict(state.server["model"])
        rounded = was_in_bfloat16(view.environment)
        return cls(folder, experiment, federation, net.eval(), state.round, view.summary["state"], rounded)

    def examples(self, on: Split) -> Examples:
        found = self.federation.test if on == "test" else self.federation.validation
        if found is None:
            raise ConfigError(
                f"'{self.folder.path}' has no validation examples; hold some out in a new run: -c data.validation=20 "
                "(of each class)"
            )
        return found

    def knows_sites(self, on: Split) -> bool:
        return on in self.federation.sites and bool((self.federation.sites[on] != "").any())

    def batches(self, on: Split) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and labels."""
        examples, cpu = self.examples(on), torch.device("cpu")
        with same_bits_everywhere():
            for start in sums.batch_starts(examples):
                yield sums.logits(self.net, examples, start, cpu), examples.labels[start : start + sums.BATCH]

    def evaluate(self, on: Split = "test", shares: Shares | None = None) -> dict[str, Any]:
        """All figures (`evaluation.detailed`), by site where the examples know theirs, and the training examples of
        each class. If the run has validation examples, also how it does on the test set after calibration on them."""
        place = (self.federation.groups, self.federation.class_names)
        sites = self.federation.sites[on] if self.knows_sites(on) else None
        found = evaluate_batches(self.batches(on), *place, sites)
        found |= {"on": on, "round": self.round, "rounds": self.experiment.rounds}
        found["class_counts"] = self.federation.class_counts.tolist()
        if on == "validation" or self.federation.validation is None:
            return found
        chosen = self.calibration(shares)
        after = evaluate_calibrated(self.batches("test"), *place, Calibration.model_validate(chosen))
        return {**found, "calibration": chosen, "calibrated": {name: after[name] for name in BY_CALIBRATION}}

    def keep(self, scores: Mapping[str, Any]) -> None:
        """Write what the page shows of an evaluation on the test set to the run's folder."""
        kept = {name: scores[name] for name in KEPT if name in scores}
        self.folder.write_evaluation({"state": self.digest, **kept})

    def calibration(self, shares: Shares | None = None) -> dict[str, Any]:
        """Temperature and thresholds, chosen on the validation examples. The test set has no part in it. What does not
        help the other half of these examples if one half chooses it stays as it is: a temperature of 1, equal
        thresholds. `fewest`: validation examples of the rarest class. `shares`: the class shares to calibrate for. By
        default those of training, unless the imbalance was made: then the test set does not have it."""
        labels = self.examples("validation").labels
        shares = shares or ("training" if self.experiment.data.imbalance == "natural" else "validation")
        counts = torch.bincount(labels, minlength=self.federation.num_classes).tolist()
        wanted = self.federation.class_counts.tolist() if shares == "training" else counts
        kept = list(self.batches("validation"))
        with same_bits_everywhere():
            chosen = calibration.fit_what_gains(lambda: kept, calibration.weights_for(counts, wanted))
        return {**chosen.model_dump(), "examples": len(labels), "fewest": min(counts), "shares": shares}


KEPT = ("examples", "ece", "reliability", "sites", "worst_sites", "calibration", "calibrated")
