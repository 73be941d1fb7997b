"""Run an experiment in its folder, from the beginning or from the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from redgrape.data.embedding import Progress
from redgrape.data.federation import FederatedData, Federation
from redgrape.data.prepare import prepare
from redgrape.engines import ClientHalf, Engine
from redgrape.errors import ConfigError, DataError, StorageError
from redgrape.method import Site
from redgrape.nets import pretrained
from redgrape.privacy.disclosure import disclosures
from redgrape.privacy.ledger import PrivacyLedger
from redgrape.rounds import RunState, exchanged
from redgrape.runs.embedded import embedder, for_encoder
from redgrape.runs.environment import DECIDING, about, file_digests, machine, still_needed
from redgrape.runs.experiment import Experiment
from redgrape.runs.figures import best_round, has_stopped, window
from redgrape.runs.finished import check_model, digest_of_state, last_state, summarize
from redgrape.runs.folder import RunFolder
from redgrape.training import Step, Training
from redgrape.tree import Tensors


@dataclass(frozen=True)
class Prepared:
    """What a run needs: its data, the environment to record, and a factory for its engine. The factory is None for the
    engines of this machine."""

    federation: FederatedData
    environment: dict[str, Any]
    engine: Callable[[ClientHalf], Engine] | None = None


@dataclass(frozen=True)
class Venue:
    """Where a run takes place: everything that differs between clients on this machine and elsewhere. `prepare` gets
    the environment in which the run began, or None for a new run. `tell_lost` gets the record of a round, and the notes
    of the run."""

    prepare: Callable[[Experiment, Mapping[str, Any] | None], Prepared]
    client_name: Callable[[int], str]
    tell_lost: Callable[[Mapping[str, Any], list[str]], None]
    knows_partition: bool  # whether the partition is known here


class Run:
    """One run in its folder. `steps()` executes the rounds that are not done yet.

    for step in Run(RunFolder.open(path), workers=2).steps():
        ...
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        workers: int,
        device: str = "cpu",
        precision: str = "float32",
        data_root: Path | None = None,
        allow_changes: bool = False,
        deadline: float | None = None,
        stack: int = 1,
        rounds: int | None = None,
        venue: Venue | None = None,
        embedding: Progress | None = None,
    ) -> None:
        """`rounds`: extend the run to this many rounds. `venue`: None for this machine. `embedding`: told of examples
        as they are embedded."""
        self.folder = folder
        self.experiment = folder.experiment() if rounds is None else folder.experiment().with_rounds(rounds)
        self._is_extended = rounds is not None
        self.ledger = PrivacyLedger(folder.path)
        self.workers, self.device, self.precision, self.allow_changes = workers, device, precision, allow_changes
        self.deadline, self.stack = deadline, stack
        self.venue = this_machine(device, precision, stack, data_root, embedding) if venue is None else venue
        self._judged: list[Mapping[str, Any]] = []  # the records of the rounds done, if validation decides
        self.notes: list[str] = []  # for the user, such as a skipped damaged checkpoint
        self.data_notes: list[str] = []  # the same in every new run on this data

    def steps(self) -> Iterator[Step]:
        """Execute the remaining rounds. Each is committed before it is yielded."""
        with self.folder.locked():
            state, before = self._stored()
            known = self._known_summary(state) if before is not None else None
            if known is None:
                state, mistakes, averaged = yield from self._train(before, state)
            else:
                self._put_in_order(state)
                mistakes, averaged = {"confusion": known["confusion"]}, len(known.get("averaged_rounds", []))
            assert state is not None  # there is at least one round
            summary = summarize(self.folder, self.experiment, self._kept(state), mistakes, averaged or 1)
            if state.round < self.experiment.rounds:
                summary["stopped_after"] = state.round
            self.folder.write_summary(summary)

    def _stored(self) -> tuple[RunState | None, dict[str, Any] | None]:
        """The last intact state, and the environment in which the run began; None for a new run."""
        self.folder.check_experiment(may_differ=["rounds"] if self._is_extended else [])
        state, wrong = self.folder.checkpoints.latest()
        before = self._environment_before(state)
        self._check_files(before, state)
        if not self.folder.has_whole_times():
            self.notes.append("times.jsonl is damaged; this changes no result")
        self.notes += [f"{reason}; continuing from round {state.round if state else 0}" for reason in wrong]
        if self.experiment.is_validated and state is not None:
            self._judge([record for record in self.folder.metrics() if record["round"] <= state.round])
        return state, before

    def _train(
        self, before: Mapping[str, Any] | None, state: RunState | None
    ) -> Generator[Step, None, tuple[RunState, dict[str, Any], int]]:
        """Execute the rounds after `state`. Return the last state, the mistakes of the final model, and the number of
        evaluations in the mean of the run."""
        prepared = self.venue.prepare(self.experiment, before)
        partition = prepared.federation if isinstance(prepared.federation, Federation) else None
        self.data_notes += partition.notes if partition is not None and state is None else []
        environment = self._checked_environment(prepared, partition, before, state)
        with self._training(prepared, state) as training:
            if state is not None:
                check_model(state, training.build().state_dict(), self.folder)
            model = first_model(self.experiment, prepared) if state is None else None
            self._put_in_order(state)
            if environment is not None:
                self.folder.write_environment(environment, partition)
            if self.stack > 1:
                self.notes.append(
                    f"up to {self.stack} clients of equal size were trained as one: the figures agree with separate "
                    "training up to rounding"
                )
            states = self.folder.checkpoints.states(prepared.federation.num_clients)
            steps = training.steps(state, model, states, self.folder.path, partial(self._account, training))
            for step in self._committed(steps):
                state = step.state
                yield step
            assert state is not None  # there is at least one round
            records = self.folder.metrics()
            due = [record for record in records if training.is_evaluated(record["round"])]
            self.notes += [*self._refused_throughout(records), *_not_evaluated(due)]
            if self._has_stopped():
                best = best_round(self._judged)
                self.notes.append(f"stopped after round {state.round}: validation was best in round {best}")
            scores = training.engine.evaluate(self._kept(state).server["model"], "test")
            mistakes = {} if scores is None else {"confusion": scores.confusion_cells()}
            return state, mistakes, sum("test" in record for record in due[-window(state.round) :])

    def _committed(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps until the run stops, each written to the folder before it is yielded."""
        for step in steps if not self._has_stopped() else ():
            self.folder.append(step.record, {**step.seconds, "workers": self.workers})
            self._judge([step.record])
            round = step.state.round
            is_kept = round in (self.experiment.rounds, self.folder.checkpoints.best_round)
            if is_kept or self._has_stopped() or round % self.experiment.checkpoint_every == 0:
                self.folder.save(step.state, self.experiment)
            self.venue.tell_lost(step.record, self.notes)
            yield step
            if self._has_stopped():
                return

    def _judge(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Remember the rounds that decide which model is kept, or when to stop."""
        if self.experiment.is_validated:
            self._judged += records
        if self.experiment.keep == "best":
            self.folder.checkpoints.best_round = best_round(self._judged)

    def _has_stopped(self) -> bool:
        return has_stopped(self._judged, self.experiment.patience)

    def _kept(self, state: RunState) -> RunState:
        """The state whose model is the result: the last, or that of the best round."""
        best = self.folder.checkpoints.best_round
        return state if best in (0, state.round) else self.folder.checkpoints.after(best)

    def _put_in_order(self, state: RunState | None) -> None:
        """Prepare the folder so that the run can continue. Checks come first: nothing is written or removed before."""
        self.folder.sweep()
        if self._is_extended:
            self.folder.write_experiment(self.experiment)
        self.folder.cut_after(state.round if state else 0)

    def _refused_throughout(self, records: Sequence[Mapping[str, Any]]) -> list[str]:
        """Notes on clients that answered, but had every answer rejected, in the whole run."""
        counted = {str(k) for record in records for k in record["answered"]}
        last = {k: (record["round"], reason) for record in records for k, reason in record["rejected"].items()}
        return [
            f"{self.venue.client_name(int(k))} was rejected in every round that it answered (in round {round}: "
            f"{reason}); metrics.jsonl lists every such round under 'rejected'"
            for k, (round, reason) in sorted(last.items(), key=lambda item: int(item[0]))
            if k not in counted
        ]

    def _check_files(self, before: Mapping[str, Any] | None, state: RunState | None) -> None:
        """Raise ConfigError if a file that is read again has changed since the run began. Without a checkpoint, that is
        every file: also the initial weights."""
        if before is None:
            return
        known = before.get("files", {})
        for name, digest in (file_digests if state is None else still_needed)(self.experiment).items():
            if known.get(name, digest) != digest:
                raise ConfigError(
                    f"'{name}' has changed since '{self.folder.path}' began; start a new run with --out, or "
                    "restore the old file"
                )

    def _account(self, training: Training, state: RunState) -> dict[str, Any]:
        """Record the privacy budget that a round with noise spends, before its result is released."""
        exchange = training.exchange
        if mechanisms := exchange.mechanisms(training.parts, training.federation.num_classes):
            clients = [k for k in state.record["answered"] if k not in state.record.get("left_out", [])]
            spent = self.ledger.spend(state.round, clients, digest_of_state(state), mechanisms, exchange.delta)
            return {"epsilon": spent}
        return {}

    def _training(self, prepared: Prepared, state: RunState | None) -> Training:
        e, federation = self.experiment, prepared.federation
        method = e.method.create()
        secret = None
        if e.exchange.mechanisms(exchanged(method, site_of(e, federation))[0], 1):
            self.ledger.require(state.round if state else 0)
            if e.exchange.randomness == "secret":
                secret = self.ledger.secret(is_new=state is None)
        return Training(
            method,
            federation,
            e.builder(federation),
            rounds=e.rounds,
            clients_per_round=e.clients_per_round,
            seed=e.seed,
            workers=self.workers,
            device=self.device,
            precision=self.precision,
            evaluate_every=e.evaluate_every,
            min_answers=e.min_answers,
            deadline=self.deadline,
            stack=self.stack,
            exchange=e.exchange,
            secret=secret,
            engine=prepared.engine,
        )

    def _has_partition(self) -> bool:
        return not self.venue.knows_partition or self.folder.has_partition()

    def _checked_environment(
        self, prepared: Prepared, partition: Federation | None, before: Mapping[str, Any] | None, state: RunState | None
    ) -> dict[str, Any] | None:
        """The environment to write, or None to keep the old one. Raise an error if the run cannot continue here."""
        here = prepared.environment | {"discloses": discloses(self.experiment, prepared.federation)}
        history = list((before or {}).get("changes", []))
        if before is None:
            if state is None:
                return here
            if partition is not None and self.folder.has_partition() and not self.folder.is_partition(partition):
                raise DataError(
                    f"the data of '{self.folder.path}' has changed since it began: the split differs from "
                    "partition.safetensors; restore the old data or start a new run"
                )
            return here | {"changes": [{"after_round": state.round, "environment.json": ["lost", "written again"]}]}
        for name in ("split", "data"):
            if before.get(name, here[name]) != here[name]:
                raise DataError(
                    f"the data of '{self.folder.path}' has changed since it began: the {name} was "
                    f"{before[name][:12]} and is {here[name][:12]}; restore the old data or start a new run"
                )
        changed = [name for name in DECIDING if name in here and before.get(name, here[name]) != here[name]]
        if changed and state is not None:  # before the first checkpoint, nothing depends on it
            words = ", ".join(f"{name} {before[name]} and is {name} {here[name]} now" for name in changed)
            if not self.allow_changes:
                raise ConfigError(
                    f"'{self.folder.path}' began with {words}, so its bits may differ; continue where it began, or "
                    "accept this with --allow-changes"
                )
            self.notes.append(f"the run began with {words}: bits may differ")
            history += [{"after_round": state.round, **{name: [before[name], here[name]] for name in changed}}]
        if not self._has_partition():
            self.notes.append("partition.safetensors was damaged or missing and is written again")
        elif not changed:
            return None
        return here | ({"changes": history} if history else {})

    def _environment_before(self, state: RunState | None) -> dict[str, Any] | None:
        """The environment in which the run began. None for a new run."""
        if state is None and not (self.folder.path / "environment.json").exists():
            return None
        try:
            return self.folder.environment()
        except StorageError as error:
            if not self.allow_changes:
                raise StorageError(f"{error}; use --allow-changes to continue without it") from error
            self.notes.append(f"{error}; it is written again, without its old content")
            return None

    def _known_summary(self, state: RunState | None) -> dict[str, Any] | None:
        """The summary with the confusion matrix of the final model, if the run is finished and the model evaluated. The
        metrics have no such matrix: a line a round would bloat them."""
        is_finished = state is not None and (state.round == self.experiment.rounds or self._has_stopped())
        if state is None or not is_finished or not self._has_partition():
            return None
        try:
            summary, kept = self.folder.summary() or {}, digest_of_state(self._kept(state))
            return summary if "confusion" in summary and summary.get("state") == kept else None
        except (StorageError, AttributeError):
            self.notes.append("summary.json is damaged and is written again")
            return None


def run(
    experiment: Experiment | Mapping[str, Any],
    folder: Path | str,
    *,
    workers: int = 1,
    device: str = "cpu",
    precision: str = "float32",
    data_root: Path | None = None,
) -> RunFolder:
    """Run an experiment in its own folder and return the folder. `.summary()` has the result, `.metrics()` a record per
    round. If the folder already holds a run of the same experiment, that run continues."""
    described = experiment if isinstance(experiment, Experiment) else Experiment.parse(experiment)
    path = Path(folder)
    there = RunFolder.open(path) if (path / "experiment.toml").exists() else RunFolder.create(path, described)
    if there.experiment().hash() != described.hash():  # one may name fewer of its defaults
        raise ConfigError(f"'{path}' holds another experiment; choose another folder")
    for _ in Run(there, workers=workers, device=device, precision=precision, data_root=data_root).steps():
        pass
    return there


def this_machine(
    device: str, precision: str, stack: int, data_root: Path | None, progress: Progress | None = None
) -> Venue:
    """Clients on this machine. Their data is prepared here. `progress` is told of embeddings."""

    def prepared(experiment: Experiment, before: Mapping[str, Any] | None) -> Prepared:
        federation = prepare(experiment.data, experiment.seed, data_root)
        if experiment.net.is_pretrained:
            federation = federation.with_inputs(partial(for_encoder, experiment.net.name))
        files = file_digests(experiment) if before is None else before.get("files", {})
        versions = machine(device, precision) | pretrained.version(experiment.net.name)
        environment = versions | about(federation) | {"files": files, "stack": stack}
        if experiment.net.is_frozen:
            federation = federation.with_inputs(embedder(experiment.net, federation.input_shape, data_root, progress))
        return Prepared(federation, environment)

    def tell_lost(record: Mapping[str, Any], notes: list[str]) -> None:
        """Add one note per client. metrics.jsonl lists every round."""
        for client, reason in record["lost"].items():
            if not any(note.startswith(f"client {client} failed") for note in notes):
                notes.append(
                    f"client {client} failed three times in round {record['round']} and was left out of it ({reason}); "
                    "metrics.jsonl lists every such round under 'lost'"
                )

    return Venue(prepared, lambda client: f"client {client}", tell_lost, knows_partition=True)


def _not_evaluated(due: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note on the evaluations that are missing among the records of rounds with one."""
    if not (skipped := [str(record["round"]) for record in due if "test" not in record]):
        return []
    named = ", ".join(skipped[:10]) + (", ..." if len(skipped) > 10 else "")
    return [f"{len(skipped)} of {len(due)} evaluations are missing (in round {named}); figures are of the others"]


def site_of(experiment: Experiment, federation: FederatedData) -> Site:
    """The site before the first round, used to find out what an experiment exchanges."""
    place = (experiment.builder(federation), federation.num_clients, federation.num_classes)
    return Site(*place, experiment.seed, 0, experiment.rounds, torch.device("cpu"))


def discloses(experiment: Experiment, federation: FederatedData) -> dict[str, Any]:
    """What a run of this experiment discloses."""
    method = experiment.method.create()
    parts, survey = exchanged(method, site_of(experiment, federation))
    return disclosures(experiment.exchange, parts, survey, method.needs_single(), federation.num_classes)


def first_model(experiment: Experiment, prepared: Prepared) -> Tensors:
    """The initial weights: those of the run that the experiment starts from, if it names one."""
    model = experiment.first_model(prepared.federation)
    if experiment.start is None:
        return model
    folder = RunFolder.open(Path(experiment.start))
    if folder.environment()["split"] != prepared.environment["split"]:
        raise DataError(
            f"'{folder.path}' was trained on another split, so it may know test examples of this one; start from a run "
            "with the same data and seed"
        )
    started: Tensors = last_state(folder).server["model"]
    if {name: t.shape for name, t in started.items()} != {name: t.shape for name, t in model.items()}:
        raise ConfigError(
            f"'{folder.path}' has another net than '{experiment.net.name}'; start from a run with this net"
        )
    return started
