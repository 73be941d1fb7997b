"""The contract, for every method that comes with redgrape; and its power: for every clause, a method that breaks it."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import ConfigDict, PrivateAttr
from torch import Tensor

from redgrape import methods, testing, tree
from redgrape.exchange import Exchange, Sum
from redgrape.exchange.checks import Inspection
from redgrape.method import ClientSite, Method
from redgrape.methods.balanced_softmax import BalancedSoftmax
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.logit_adjustment import LogitAdjustment
from redgrape.methods.redgrape import RedGrape
from redgrape.rounds import exchanged
from redgrape.testing.cases import Case, float64_net, run, server_site, small
from redgrape.testing.comparing import check_accepted, crossing, must_equal
from redgrape.testing.engines import Reversed


@pytest.mark.parametrize("clause", testing.CHECKS)
@pytest.mark.parametrize("name", methods.names())
def test_every_method_keeps_the_contract(name: str, clause: str) -> None:
    testing.CHECKS[clause](methods.load(name)())


def test_four_workers() -> None:
    testing.CHECKS["engines_agree"](RedGrape(), [4])


PATHS = [
    "nothing_that_was_passed_is_modified",
    "any_clients_may_be_missing",
    "resumed_run_equals_straight_run",
    "clients_of_one_example",
    "classes_that_nobody_holds",
    "float64_stays_float64",
]


@pytest.mark.parametrize("clause", PATHS)
@pytest.mark.parametrize("name", methods.names())
def test_presets_take_other_paths_and_keep_the_contract(name: str, clause: str) -> None:
    method = methods.load(name)
    for preset in [preset for preset, values in method.presets.items() if values]:
        testing.CHECKS[clause](method.preset(preset))


class Stateful(FedAvg):
    """What no clause may object to: state on the server and on the clients, in its place."""

    def init_server(self, model, site):
        return {"model": model, "momentum": {name: torch.zeros_like(t) for name, t in model.items()}}

    def init_client(self, broadcast):
        return {"visits": torch.tensor(0), "last": tree.sub(broadcast["model"], broadcast["model"])}

    def client_update(self, broadcast, state, site):
        update, _ = super().client_update(broadcast, state, site)
        update["delta"] = tree.add(update["delta"], {name: state["last"][name] for name in update["delta"]}, 0.1)
        last = {**state["last"], **{name: t.clone() for name, t in update["delta"].items()}}
        return update, {"visits": state["visits"] + 1, "last": last}

    def server_update(self, server, received, site):
        model = received.moved(server["model"], self.server_lr)
        return {"model": model, "momentum": tree.sub(model, server["model"])}


@pytest.mark.parametrize("clause", testing.CHECKS)
def test_state_in_its_place_is_no_offence(clause: str) -> None:
    testing.CHECKS[clause](Stateful())


class Thawed(FedAvg):
    model_config = ConfigDict(frozen=False)


class StateOnSelf(FedAvg):
    def server_update(self, server, received, site):
        object.__setattr__(self, "rounds_done", site.round)
        return super().server_update(server, received, site)


class StateInPrivateAttribute(FedAvg):
    _memory: dict = PrivateAttr(default_factory=dict)

    def client_update(self, broadcast, state, site):
        self._memory[site.client] = site.round
        return super().client_update(broadcast, state, site)


class StateOnTheClass(FedAvg):
    memory: ClassVar[dict[int, int]] = {}

    def client_update(self, broadcast, state, site):
        self.memory[site.client] = self.memory.get(site.client, 0) + 1
        return super().client_update(broadcast, state, site)


class Changed(FedAvg):
    """A method whose updates are FedAvg's, changed by `change`."""

    def client_update(self, broadcast, state, site):
        update, state = super().client_update(broadcast, state, site)
        return self.change(update, broadcast, site), state

    def change(self, update: dict[str, Any], broadcast: Mapping[str, Any], site: ClientSite) -> dict[str, Any]:
        raise NotImplementedError


class FloatLeaf(Changed):
    def change(self, update, broadcast, site):
        return update | {"norm": 1.5}


class FloatLeafInServer(FedAvg):
    def server_update(self, server, received, site):
        return super().server_update(server, received, site) | {"progress": site.round / site.rounds}


class NumberedLeaves(Changed):
    def change(self, update, broadcast, site):
        return update | {"losses": {0: update["loss"].clone()}}


class SlashInName(Changed):
    def change(self, update, broadcast, site):
        return update | {"a/b": update["loss"].clone()}


class TwoNamesForOneTensor(Changed):
    def change(self, update, broadcast, site):
        return update | {"again": update["delta"]["classifier.bias"]}


class ModifiesBroadcast(Changed):
    def change(self, update, broadcast, site):
        broadcast["model"]["classifier.bias"].mul_(0.5)
        return update


class ModifiesServer(FedAvg):
    def server_update(self, server, received, site):
        new = super().server_update(server, received, site)
        server["model"]["classifier.bias"].copy_(new["model"]["classifier.bias"])
        return new


class ModifiesUpdates(FedAvg):
    def needs_single(self):
        return "the server shortens the bias of each"

    def server_update(self, server, received, site):
        for delta in received.each("delta").values():
            delta["classifier.bias"].clamp_(-1e-3, 1e-3)
        return super().server_update(server, received, site)


class ModifiesClientState(Stateful):
    def client_update(self, broadcast, state, site):
        update, new = super().client_update(broadcast, state, site)
        state["visits"].add_(1)
        return update, {**new, "visits": state["visits"]}


class SendsBackTheBroadcast(Changed):
    def change(self, update, broadcast, site):
        return update | {"received": broadcast["model"]["classifier.bias"]}


class SendsAViewOfTheBroadcast(Changed):
    def change(self, update, broadcast, site):
        return update | {"received": broadcast["model"]["classifier.weight"][1:]}


class SendsTheData(Changed):
    def change(self, update, broadcast, site):
        return update | {"examples": site.data.x[:1]}


class LosesAName(FedAvg):
    def server_update(self, server, received, site):
        model = received.moved(server["model"], self.server_lr)
        return {"model": {name: t for name, t in model.items() if not name.endswith("num_batches_tracked")}}


class AddsAName(FedAvg):
    def init_server(self, model, site):
        return {"model": model | {"extra": torch.zeros(3)}}


class ModelElsewhere(FedAvg):
    def init_server(self, model, site):
        return {"weights": model}

    def broadcast(self, server):
        return {"model": server["weights"]}

    def server_update(self, server, received, site):
        return {"weights": received.moved(server["weights"], self.server_lr)}


class FloatCounter(FedAvg):
    def server_update(self, server, received, site):
        model = received.moved(server["model"], self.server_lr)
        return {"model": {n: t.float() if n.endswith("num_batches_tracked") else t for n, t in model.items()}}


class ExtrapolatesVariances(FedAvg):
    def server_update(self, server, received, site):
        new = super().server_update(server, received, site)["model"]
        name = "encoder.2.running_var"
        return {"model": {**new, name: server["model"][name] + 100 * (new[name] - server["model"][name])}}


class Noisy(FedAvg):
    """Adds a number to the classifier's bias on the server."""

    def server_update(self, server, received, site):
        model = received.moved(server["model"], self.server_lr)
        return {"model": model | {"classifier.bias": model["classifier.bias"] + self.noise()}}

    def noise(self) -> float:
        raise NotImplementedError


class NoiseFromTorch(Noisy):
    def noise(self):
        return float(torch.rand(()))


class NoiseFromNumPy(Noisy):
    def noise(self):
        return np.random.rand()


class NoiseFromPython(Noisy):
    def noise(self):
        return random.random()


class NoiseFromTheMachine(Noisy):
    def noise(self):
        return random.SystemRandom().random()


class DrawsForNothing(Noisy):
    def noise(self):
        return 0 * float(torch.rand(()))


class SeedsForItself(Noisy):
    def noise(self):
        torch.manual_seed(3)
        return float(torch.rand(()))


_before: list[int] = []


class RemembersWhoCameBefore(Changed):
    def change(self, update, broadcast, site):
        _before.append(site.client)
        return update | {"count": update["count"] + (_before[-2] if len(_before) > 1 else 0)}


class NeedsTwoAnswers(FedAvg):
    def server_update(self, server, received, site):
        deltas = received.each("delta").values()
        spread = torch.stack([delta["classifier.bias"] for delta in deltas]).std(dim=0, correction=0)
        if len(deltas) < 2:
            raise ValueError("the spread of one update")
        return super().server_update(server, received, site) | {"spread": spread}


class DividesByTheOthers(FedAvg):
    def server_update(self, server, received, site):
        return super().server_update(server, received, site) | {
            "share": torch.tensor(1.0) / (len(received.clients) - 1)
        }


class ForgetsOnResume(FedAvg):
    """A round counter outside the state, as a new instance starts it again."""

    _rounds: int = PrivateAttr(default=0)

    def server_update(self, server, received, site):
        self._rounds += 1
        model = received.moved(server["model"], self.server_lr)
        return {"model": model | {"classifier.bias": model["classifier.bias"] / self._rounds}}


_visits: dict[int, int] = {}


class StateInTheModule(Changed):
    """Which in one process is one, and in worker processes several."""

    def change(self, update, broadcast, site):
        _visits[0] = 1 if site.round == 1 and site.client == 0 else _visits.get(0, 0) + 1
        return update | {"count": update["count"] + _visits[0]}


class CountsClasses(FedAvg):
    """A method whose clients also send what `counted` makes of their class counts."""

    def parts(self, model, site):
        return {**super().parts(model, site), "classes": Sum({"counted": torch.zeros(site.num_classes)})}

    def client_update(self, broadcast, state, site):
        update, state = super().client_update(broadcast, state, site)
        return update | {"classes": {"counted": self.counted(site.class_counts.float())}}, state

    def counted(self, counts: Tensor) -> Tensor:
        return counts


class MeanOfEachClass(CountsClasses):
    """NaN for a class without examples at the client."""

    def counted(self, counts):
        return counts / counts


class MeanOverAllClients(CountsClasses):
    """NaN for a class without examples among the clients that answered."""

    def server_update(self, server, received, site):
        counts = received.total("classes")["counted"]
        return super().server_update(server, received, site) | {"inverse": counts / counts}


class NeedsTwoExamples(Changed):
    def change(self, update, broadcast, site):
        if len(site.data) < 2:
            raise ValueError("one example has no neighbour")
        return update


class CutsBatchesItself(FedAvg):
    def _cut(self, order, has_batchnorm):
        return list(order.split(self.batch_size))


class NeedsEveryClient(FedAvg):
    def server_update(self, server, received, site):
        counts = received.each("count")
        inverse = torch.tensor([1.0 / float(counts[k]) for k in range(site.num_clients)])
        return super().server_update(server, received, site) | {"inverse": inverse}


class TooManyClients(Changed):
    def change(self, update, broadcast, site):
        return update | {"one_hot": torch.eye(8)[site.client].clone()}


class NeedsBatchNorm(FedAvg):
    def server_update(self, server, received, site):
        mean = received.mean("buffers")["encoder.2.running_mean"]
        return super().server_update(server, received, site) | {"mean": mean}


class SinglePrecision(Changed):
    def change(self, update, broadcast, site):
        return update | {"delta": {name: t.float() for name, t in update["delta"].items()}}


class SumsOnlyWhatItHolds(CountsClasses):
    """Sends nothing for a class that the client does not hold."""

    def client_update(self, broadcast, state, site):
        update, state = super().client_update(broadcast, state, site)
        return update if site.class_counts[0] else update | {"classes": {}}, state


class CountsItself(FedAvg):
    """Uses how many clients there are, which a sum does not change, and what each counts, which it hides."""

    def server_update(self, server, received, site):
        return super().server_update(server, received, site) | {"largest": max(received.each("count").values())}


class KnowsWhatASumIs(FedAvg):
    def server_update(self, server, received, site):
        kind = torch.tensor(float(hasattr(received, "mean_update")))
        return super().server_update(server, received, site) | {"kind": kind}


class AnswersOneToASurvey(FedAvg):
    def survey(self, site):
        return {"clients": torch.tensor(1)}


class AnswersWhatItHolds(FedAvg):
    def survey(self, site):
        return {"classes": site.class_counts.nonzero().flatten()}


BROKEN: list[tuple[type[Method], str, str]] = [
    (Thawed, "hyper_parameters_are_frozen", "'optimizer' can be assigned"),
    (StateOnSelf, "no_state_is_kept_on_the_method", "changed 'rounds_done'"),
    (StateInPrivateAttribute, "no_state_is_kept_on_the_method", "changed '_memory'"),
    (StateOnTheClass, "no_state_is_kept_on_the_method", "changed 'StateOnTheClass.memory'"),
    (FloatLeaf, "leaves_are_named_tensors", "client 0's update of round 1/norm is a float"),
    (FloatLeafInServer, "leaves_are_named_tensors", "state after round 1/progress is a float"),
    (NumberedLeaves, "leaves_are_named_tensors", "0 is not a name"),
    (SlashInName, "leaves_are_named_tensors", "'a/b' is not a name"),
    (TwoNamesForOneTensor, "leaves_are_named_tensors", "share memory"),
    (ModifiesBroadcast, "nothing_that_was_passed_is_modified", "the broadcast of round 1 was modified"),
    (ModifiesServer, "nothing_that_was_passed_is_modified", "the broadcast of round 1 was modified"),
    (ModifiesUpdates, "nothing_that_was_passed_is_modified", "update of round 1 was modified"),
    (ModifiesClientState, "nothing_that_was_passed_is_modified", "client .'s state after round . was modified"),
    (SendsBackTheBroadcast, "updates_share_no_memory", "the broadcast's 'model/classifier.bias'"),
    (SendsAViewOfTheBroadcast, "updates_share_no_memory", "the broadcast's 'model/classifier.weight'"),
    (SendsTheData, "updates_share_no_memory", "the client's inputs"),
    (LosesAName, "model_keeps_names_shapes_and_dtypes", "'encoder.2.num_batches_tracked'"),
    (AddsAName, "model_keeps_names_shapes_and_dtypes", "the server's first state: .* 'extra'"),
    (ModelElsewhere, "model_keeps_names_shapes_and_dtypes", "server\\['model'\\]"),
    (FloatCounter, "model_keeps_names_shapes_and_dtypes", "num_batches_tracked"),
    (FloatCounter, "batchnorm_buffers_stay_sound", "must stay torch.int64"),
    (ExtrapolatesVariances, "batchnorm_buffers_stay_sound", "is negative"),
    (NoiseFromTheMachine, "same_seed_gives_same_bits", "a second run"),
    (NoiseFromTorch, "global_random_numbers_are_not_used", "global seed of torch"),
    (NoiseFromNumPy, "global_random_numbers_are_not_used", "global seed of"),
    (NoiseFromPython, "global_random_numbers_are_not_used", "global seed of"),
    (DrawsForNothing, "global_random_state_is_left_alone", "moved torch's global random state"),
    (SeedsForItself, "global_random_state_is_left_alone", "moved torch's global random state"),
    (RemembersWhoCameBefore, "order_of_clients_changes_nothing", "reversed order"),
    (NeedsTwoAnswers, "any_clients_may_be_missing", "ValueError: the spread of one update"),
    (DividesByTheOthers, "any_clients_may_be_missing", "'share' is not finite"),
    (ForgetsOnResume, "resumed_run_equals_straight_run", "resumed after round 1"),
    (StateInTheModule, "engines_agree", "a pool of"),
    (MeanOfEachClass, "clients_of_one_class", "'classes/counted' is not finite"),
    (MeanOverAllClients, "classes_that_nobody_holds", "'inverse' is not finite"),
    (NeedsTwoExamples, "clients_of_one_example", "one example has no neighbour"),
    (CutsBatchesItself, "last_batch_of_one", "more than 1 value per channel"),
    (NeedsEveryClient, "clients_without_examples", "KeyError: 0"),
    (TooManyClients, "few_of_many_clients", "IndexError"),
    (NeedsBatchNorm, "every_kind_of_net", "'buffers'"),
    (SinglePrecision, "float64_stays_float64", "is torch.float32"),
    (CountsItself, "sums_are_enough_where_it_says_so", "a secure sum has no single updates"),
    (KnowsWhatASumIs, "sums_are_enough_where_it_says_so", "differs in 'kind'"),
    (SumsOnlyWhatItHolds, "sums_are_enough_where_it_says_so", "depends on the client"),
    (CountsItself, "exchanges_carry_it", "a secure sum has no single updates"),
    (AnswersOneToASurvey, "a_survey_of_nothing_is_zero", "must answer a survey with zeros"),
    (AnswersWhatItHolds, "a_survey_of_nothing_is_zero", "client 0's answer .* other names or shapes"),
]


@pytest.mark.parametrize(("broken", "clause", "sentence"), BROKEN, ids=[f"{b.__name__}-{c}" for b, c, _ in BROKEN])
def test_every_offence_is_named(broken: type[Method], clause: str, sentence: str) -> None:
    with pytest.raises(AssertionError, match=f"^{broken.__name__} breaks '{clause}': .*{sentence}"):
        testing.CHECKS[clause](broken())


def test_every_clause_has_an_offender() -> None:
    """Except the number of threads, which only the engine could let through, and bad updates, which only the exchange
    could."""
    excepted = {"threads_change_nothing", "bad_updates_are_left_out"}
    assert {clause for _, clause, _ in BROKEN} == testing.CHECKS.keys() - excepted


def test_bad_updates_are_seen_if_the_exchange_lets_them_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inspection, "lengths", lambda *_: {"delta": 0.0})
    with pytest.raises(AssertionError, match="breaks 'bad_updates_are_left_out'"):
        testing.CHECKS["bad_updates_are_left_out"](FedAvg())


class Misspelt(FedAvg):
    def client_update(self, broadcast, state, site):
        return super().client_update(broadcast["modle"], state, site)


class Asserting(FedAvg):
    def server_update(self, server, received, site):
        assert site.round == 2, "not the second round"
        return super().server_update(server, received, site)


class HandsOnNothing(FedAvg):
    def broadcast(self, server):
        return {"model": server["model"], "rate": torch.tensor(0.1)}

    def criterion(self, broadcast, site):
        return None


@pytest.mark.parametrize("clause", ["leaves_are_named_tensors", "clients_of_one_class"])
@pytest.mark.parametrize(
    ("crashing", "cause", "where"),
    [
        (Misspelt, KeyError, rf"KeyError: 'modle' \({__file__}:\d+, in client_update\)"),
        (Asserting, AssertionError, rf"AssertionError: not the second round.* \({__file__}:\d+, in server_update\)"),
        (HandsOnNothing, TypeError, r"TypeError: .* \(.*fedavg\.py:\d+, in client_update\)"),
    ],
)
def test_a_crash_is_told_with_its_line_in_the_method(crashing: Any, cause: Any, where: str, clause: str) -> None:
    """In the method's own file, else in that of the method it builds on. The cause stays chained."""
    with pytest.raises(AssertionError, match=rf"^{crashing.__name__} breaks '{clause}': {where}$") as told:
        testing.CHECKS[clause](crashing())
    assert type(told.value.__cause__) is cause


class CrashesBelow(FedAvg):
    def client_update(self, broadcast, state, site):
        return _below(broadcast)


def _below(broadcast):
    return broadcast["modle"]


class ReturnsNone(FedAvg):
    def client_update(self, broadcast, state, site):
        super().client_update(broadcast, state, site)


class BroadcastsNumber(FedAvg):
    def broadcast(self, server):
        return {**super().broadcast(server), "rate": 0.1}


class ForgetsServer(FedAvg):
    def server_update(self, server, received, site):
        return None


class WrongShape(FedAvg):
    def client_update(self, broadcast, state, site):
        update, state = super().client_update(broadcast, state, site)
        return {**update, "delta": {name: t.reshape(-1)[:1] for name, t in update["delta"].items()}}, state


class AssignsToSelf(FedAvg):
    def client_update(self, broadcast, state, site):
        self.last = state
        return super().client_update(broadcast, state, site)


class Exits(FedAvg):
    def client_update(self, broadcast, state, site):
        sys.exit("done")


class LogsNumber(FedAvg):
    def log(self, server, received):
        return {"heard": len(received.clients)}


class LogsTaken(FedAvg):
    def log(self, server, received):
        return {"train_loss": torch.tensor(0.0)}


@pytest.mark.parametrize(
    ("crashing", "words"),
    [
        (Exits, r"Exits.client_update raises SystemExit: done \(.*, in client_update\)"),
        (LogsNumber, r"LogsNumber cannot run: TypeError: the log/heard is a int; leaves must be tensors"),
        (LogsTaken, r"LogsTaken cannot run: ValueError: the log has 'train_loss', which each record"),
        (AssignsToSelf, r"AssignsToSelf.client_update raises ValidationError: last: Instance is frozen \(.*:\d+, in"),
        (ReturnsNone, r"ReturnsNone cannot run: .*client_update returns a NoneType; it must return \(update, state\)"),
        (BroadcastsNumber, r"BroadcastsNumber cannot run: .*the broadcast/rate is a float; leaves must be tensors"),
        (ForgetsServer, r"ForgetsServer cannot run: .*the server's state is a NoneType; it must be a dict of tensors"),
        (WrongShape, r"WrongShape cannot run: .*'delta/.*' is \[1\]; it must be \["),
        (Misspelt, r"Misspelt.client_update raises KeyError: 'modle' \(.*, in client_update\)"),
        (Asserting, r"Asserting.server_update raises AssertionError: not the second round"),
        (CrashesBelow, r"CrashesBelow.client_update raises KeyError: 'modle' \(.*, in _below\)"),
    ],
)
def test_a_method_that_cannot_run_breaks_no_clause(crashing: type[Method], words: str) -> None:
    with pytest.raises(AssertionError, match=f"^{words}"):
        testing.check_method(crashing)


def test_a_broken_clause_blames_no_line_of_the_method() -> None:
    with pytest.raises(AssertionError, match=r"clone first$"):
        testing.CHECKS["nothing_that_was_passed_is_modified"](ModifiesServer())


def test_check_method_stops_at_the_first_offence() -> None:
    with pytest.raises(AssertionError, match=r"^StateOnSelf breaks 'no_state_is_kept_on_the_method'"):
        testing.check_method(StateOnSelf)


def test_check_method_runs_every_clause(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, Method]] = []
    for name in testing.CHECKS:
        monkeypatch.setitem(testing.CHECKS, name, lambda method, *_, name=name: ran.append((name, method)))
    testing.check_method(FedAvg, workers=[])
    testing.check_method(FedAvg(lr=0.5), workers=[])
    assert [name for name, _ in ran] == [*testing.CHECKS] * 2
    assert ran[0][1] == FedAvg() and ran[-1][1] == FedAvg(lr=0.5)


SUMMING = ("vine", "lda", "ncm", "fed3r")  # clients add to a running sum


RULES = ["median", "trimmed_mean", "krum", "multi_krum", "norm_clipping"]


def parts_alike() -> dict[str, list[str]]:
    """The methods by what a rule sees of them: the kinds of their parts and weights, and whether the server needs
    single updates."""
    alike: dict[str, list[str]] = {}
    for name in methods.names():
        method = small(methods.load(name)())
        parts, _ = exchanged(method, server_site(Case()))
        kinds = sorted(f"{type(part).__name__} {getattr(part, 'weights', '')}" for part in parts.values())
        alike.setdefault(f"{kinds} {bool(method.needs_single())}", []).append(name)
    return alike


def rules_to_try() -> list[tuple[str, str]]:
    """Every rule for one method of each kind, one rule in turn for the others. That a run stays finite with any rule is
    part of the contract of every method."""
    alike = list(parts_alike().values())
    others = [name for _, *rest in alike for name in rest]
    return [
        *((first, rule) for first, *_ in alike for rule in RULES),
        *((name, RULES[place % len(RULES)]) for place, name in enumerate(others)),
    ]


@pytest.mark.parametrize(("name", "rule"), rules_to_try())
def test_every_method_keeps_the_contract_with_a_robust_rule(name: str, rule: Any) -> None:
    """Nothing that was passed is modified, double precision stays, and the order of the clients changes nothing. Seven
    clients, among them clients of a single class."""
    counts = ((9, 0, 0, 0), (0, 8, 4, 0), (2, 0, 9, 1), (5, 3, 4, 2), (3, 3, 3, 3), (8, 8, 1, 0), (0, 0, 5, 0))
    case = Case(counts, float64_net, clients_per_round=7, rounds=2, exchange=Exchange(rule=rule, byzantine=2))
    method = small(methods.load(name)())
    if case.exchange.refuses(exchanged(method, server_site(case))[0], single=method.needs_single()):
        drifts = name in ("feddyn", "scaffold") and "krum" not in rule  # clients' states would part from their mean
        assert drifts or name in SUMMING or (name, rule) in {("climb", "norm_clipping"), ("climb", "multi_krum")}
        return
    kept = [(passed, tree.to_bytes(passed.tree)) for passed in crossing(method, case)]
    for passed, bits in kept:
        assert tree.to_bytes(passed.tree) == bits, passed.what
        dtypes = {t.dtype for t in tree.flatten(passed.tree).values() if t.is_floating_point()}
        assert dtypes <= {torch.float64}, passed.what
    straight = run(method, case)
    check_accepted(straight, rule)
    must_equal(straight, run(method, case, Reversed), "reversed order")


VARIANTS = [
    BalancedSoftmax(prior="local"),
    BalancedSoftmax(prior="estimated"),
    LogitAdjustment(stage="post_hoc"),
    LogitAdjustment(stage="post_hoc", prior="estimated"),
]


OF_A_PRIOR = ["clients_of_one_class", "few_of_many_clients", "order_of_clients_changes_nothing", "exchanges_carry_it"]
OF_A_PRIOR += ["sums_are_enough_where_it_says_so", "a_survey_of_nothing_is_zero", "leaves_are_named_tensors"]


@pytest.mark.parametrize("clause", [*PATHS, *OF_A_PRIOR])
@pytest.mark.parametrize("method", VARIANTS, ids=lambda m: "-".join([type(m).__name__, m.prior]))
def test_every_source_of_a_prior_keeps_the_contract(method: Method, clause: str) -> None:
    testing.CHECKS[clause](method)
