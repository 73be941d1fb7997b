"""The contract, for every method that comes with redgrape; and its power: for every clause, a method that breaks it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import ConfigDict, PrivateAttr

from redgrape import methods, testing, tree
from redgrape.method import ClientSite, Method
from redgrape.methods.balanced_softmax import BalancedSoftmax
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.logit_adjustment import LogitAdjustment
from redgrape.methods.redgrape import RedGrape


@pytest.mark.parametrize("clause", testing.CHECKS)
@pytest.mark.parametrize("name", methods.names())
def test_every_method_keeps_the_contract(name: str, clause: str) -> None:
    testing.CHECKS[clause](methods.load(name)())


def test_four_workers() -> None:
    testing.engines_agree(RedGrape(), [4])


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

    def server_update(self, server, updates, site):
        model = self.averaged_model(server["model"], updates)
        return {"model": model, "momentum": tree.sub(model, server["model"])}


@pytest.mark.parametrize("clause", testing.CHECKS)
def test_state_in_its_place_is_no_offence(clause: str) -> None:
    testing.CHECKS[clause](Stateful())


class Thawed(FedAvg):
    model_config = ConfigDict(frozen=False)


class StateOnSelf(FedAvg):
    def server_update(self, server, updates, site):
        object.__setattr__(self, "rounds_done", site.round)
        return super().server_update(server, updates, site)


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
    def server_update(self, server, updates, site):
        return super().server_update(server, updates, site) | {"progress": site.round / site.rounds}


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
    def server_update(self, server, updates, site):
        new = super().server_update(server, updates, site)
        server["model"]["classifier.bias"].copy_(new["model"]["classifier.bias"])
        return new


class ModifiesUpdates(FedAvg):
    def server_update(self, server, updates, site):
        for update in updates.values():
            update["delta"]["classifier.bias"].clamp_(-1e-3, 1e-3)
        return super().server_update(server, updates, site)


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
    def server_update(self, server, updates, site):
        model = self.averaged_model(server["model"], updates)
        return {"model": {name: t for name, t in model.items() if not name.endswith("num_batches_tracked")}}


class AddsAName(FedAvg):
    def init_server(self, model, site):
        return {"model": model | {"extra": torch.zeros(3)}}


class ModelElsewhere(FedAvg):
    def init_server(self, model, site):
        return {"weights": model}

    def broadcast(self, server):
        return {"model": server["weights"]}

    def server_update(self, server, updates, site):
        return {"weights": self.averaged_model(server["weights"], updates)}


class FloatCounter(FedAvg):
    def server_update(self, server, updates, site):
        model = self.averaged_model(server["model"], updates)
        return {"model": {n: t.float() if n.endswith("num_batches_tracked") else t for n, t in model.items()}}


class ExtrapolatesVariances(FedAvg):
    def server_update(self, server, updates, site):
        new = super().server_update(server, updates, site)["model"]
        name = "encoder.2.running_var"
        return {"model": {**new, name: server["model"][name] + 100 * (new[name] - server["model"][name])}}


class Noisy(FedAvg):
    """Adds a number to the classifier's bias on the server."""

    def server_update(self, server, updates, site):
        model = self.averaged_model(server["model"], updates)
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
    def server_update(self, server, updates, site):
        spread = torch.stack([u["delta"]["classifier.bias"] for u in updates.values()]).std(dim=0, correction=0)
        if len(updates) < 2:
            raise ValueError("the spread of one update")
        return super().server_update(server, updates, site) | {"spread": spread}


class DividesByTheOthers(FedAvg):
    def server_update(self, server, updates, site):
        return super().server_update(server, updates, site) | {"share": torch.tensor(1.0) / (len(updates) - 1)}


class TakesAnything(FedAvg):
    def check_update(self, update, like, declared, site):
        pass


class ForgetsOnResume(FedAvg):
    """A round counter outside the state, as a new instance starts it again."""

    _rounds: int = PrivateAttr(default=0)

    def server_update(self, server, updates, site):
        self._rounds += 1
        model = self.averaged_model(server["model"], updates)
        return {"model": model | {"classifier.bias": model["classifier.bias"] / self._rounds}}


_visits: dict[int, int] = {}


class StateInTheModule(Changed):
    """Which in one process is one, and in worker processes several."""

    def change(self, update, broadcast, site):
        _visits[0] = 1 if site.round == 1 and site.client == 0 else _visits.get(0, 0) + 1
        return update | {"count": update["count"] + _visits[0]}


class MeanOfEachClass(Changed):
    """NaN for a class without examples at the client."""

    def change(self, update, broadcast, site):
        counts = torch.bincount(site.data.labels, minlength=site.num_classes)
        return update | {"share": counts / counts}


class MeanOverAllClients(FedAvg):
    """NaN for a class without examples among the clients that answered."""

    def client_update(self, broadcast, state, site):
        update, state = super().client_update(broadcast, state, site)
        return update | {"counts": torch.bincount(site.data.labels, minlength=site.num_classes)}, state

    def server_update(self, server, updates, site):
        counts = torch.stack([u["counts"] for u in updates.values()]).sum(dim=0)
        return super().server_update(server, updates, site) | {"inverse": counts / counts}


class NeedsTwoExamples(Changed):
    def change(self, update, broadcast, site):
        if len(site.data) < 2:
            raise ValueError("one example has no neighbour")
        return update


class CutsBatchesItself(FedAvg):
    def _cut(self, order, has_batchnorm):
        return list(order.split(self.batch_size))


class NeedsEveryClient(FedAvg):
    def server_update(self, server, updates, site):
        inverse = torch.zeros(site.num_clients)
        for k in range(site.num_clients):
            inverse[k] = 1.0 / float(updates[k]["count"])
        return super().server_update(server, updates, site) | {"inverse": inverse}


class TooManyClients(Changed):
    def change(self, update, broadcast, site):
        return update | {"one_hot": torch.eye(8)[site.client].clone()}


class NeedsBatchNorm(FedAvg):
    def server_update(self, server, updates, site):
        buffers = [u["buffers"]["encoder.2.running_mean"] for u in updates.values()]
        return super().server_update(server, updates, site) | {"mean": torch.stack(buffers).mean(dim=0)}


class SinglePrecision(Changed):
    def change(self, update, broadcast, site):
        return update | {"delta": {name: t.float() for name, t in update["delta"].items()}}


class SaysThatSumsAreEnough(NeedsTwoAnswers):
    summable: ClassVar[bool] = True


class SumsOnlyWhatItHolds(RedGrape):
    summable: ClassVar[bool] = True

    def summand(self, update):
        return FedAvg.summand(self, {n: g for n, g in update.items() if n != "prototypes"}) | {
            "sent": update["prototypes"]
        }


class GivesNoReason(FedAvg):
    def why_not_summed(self):
        return ""


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
    (TakesAnything, "bad_updates_are_left_out", "DIVERGED in round 1: server tensor"),
    (ForgetsOnResume, "resumed_run_equals_straight_run", "resumed after round 1"),
    (StateInTheModule, "engines_agree", "a pool of"),
    (MeanOfEachClass, "clients_of_one_class", "'share' is not finite"),
    (MeanOverAllClients, "classes_that_nobody_holds", "'inverse' is not finite"),
    (NeedsTwoExamples, "clients_of_one_example", "one example has no neighbour"),
    (CutsBatchesItself, "last_batch_of_one", "more than 1 value per channel"),
    (NeedsEveryClient, "clients_without_examples", "KeyError: 0"),
    (TooManyClients, "few_of_many_clients", "IndexError"),
    (NeedsBatchNorm, "every_kind_of_net", "'buffers'"),
    (SinglePrecision, "float64_stays_float64", "is torch.float32"),
    (SaysThatSumsAreEnough, "sums_are_enough_where_it_says_so", "differs in 'spread'"),
    (SumsOnlyWhatItHolds, "sums_are_enough_where_it_says_so", "depends on the client"),
    (GivesNoReason, "sums_are_enough_where_it_says_so", "says nothing"),
]


@pytest.mark.parametrize(("broken", "clause", "sentence"), BROKEN, ids=[f"{b.__name__}-{c}" for b, c, _ in BROKEN])
def test_every_offence_is_named(broken: type[Method], clause: str, sentence: str) -> None:
    with pytest.raises(AssertionError, match=f"^{broken.__name__} breaks '{clause}': .*{sentence}"):
        testing.CHECKS[clause](broken())


def test_every_clause_has_an_offender() -> None:
    """Except the number of threads, which only the engine could let through."""
    assert {clause for _, clause, _ in BROKEN} == testing.CHECKS.keys() - {"threads_change_nothing"}


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


ROBUST_PATHS = [
    "nothing_that_was_passed_is_modified",
    "order_of_clients_changes_nothing",
    "clients_of_one_class",
    "float64_stays_float64",
]


@pytest.mark.parametrize("clause", ROBUST_PATHS)
@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "norm_clipping"])
@pytest.mark.parametrize("name", methods.names())
def test_every_method_keeps_the_contract_with_a_robust_average(name: str, rule: str, clause: str) -> None:
    testing.CHECKS[clause](methods.load(name)(aggregation=rule))


@pytest.mark.parametrize("rule", ["krum", "multi_krum"])
@pytest.mark.parametrize("name", methods.names())
def test_ten_of_fifty_clients_with_krum(name: str, rule: str) -> None:
    """The other clauses ask fewer clients than Krum needs."""
    testing.CHECKS["few_of_many_clients"](methods.load(name)(aggregation=rule, byzantine=2))


VARIANTS = [
    BalancedSoftmax(prior="local"),
    BalancedSoftmax(prior="estimated"),
    LogitAdjustment(stage="post_hoc"),
    LogitAdjustment(stage="post_hoc", prior="estimated"),
]


@pytest.mark.parametrize("clause", [name for name in testing.CHECKS if name != "engines_agree"])
@pytest.mark.parametrize("method", VARIANTS, ids=lambda m: "-".join([type(m).__name__, m.prior]))
def test_every_source_of_a_prior_keeps_the_contract(method: Method, clause: str) -> None:
    testing.CHECKS[clause](method)
