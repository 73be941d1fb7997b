"""What all methods stand on: trees, keys, the rounds, FedAvg, evaluation, and the engines when something goes wrong."""

from __future__ import annotations

import functools
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import redgrape as rg
from redgrape import determinism, nets, tree
from redgrape.data.federation import Groups
from redgrape.engines import ClientHalf
from redgrape.engines.in_process import InProcess
from redgrape.engines.pool import Pool
from redgrape.errors import ConfigError, Diverged, TooFewClients
from redgrape.exchange import Count, Direction, Parts, Statistics
from redgrape.learning import evaluation
from redgrape.learning.schedule import decay
from redgrape.method import ClientSite, ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.redgrape import RedGrape
from redgrape.rounds import RunState, rounds, sample_clients
from redgrape.training import Training, check_net
from toys import VECTOR, examples, federation

C = 3
LINEAR = functools.partial(nets.build, "linear", VECTOR, C, seed=0)


def mlp() -> rg.Net:
    return nets.build("mlp", VECTOR, C, seed=0).double()


# Trees


def test_weighted_mean() -> None:
    """Weights 1 and 3: (1 * 1 + 3 * 5) / 4 = 4 and (1 * 2 - 3 * 2) / 4 = -1."""
    mean = tree.weighted_mean([{"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([5.0, -2.0])}], [1, 3])
    assert mean["a"].tolist() == [4.0, -1.0]
    assert mean["a"].dtype == torch.float32


def test_weighted_mean_is_rounded_once() -> None:
    """(1e8 + 1 - 1e8) / 3: in float32 the 1 would be lost next to 1e8."""
    mean = tree.weighted_mean([{"a": torch.tensor(v)} for v in (1e8, 1.0, -1e8)], [1, 1, 1])
    assert float(mean["a"]) == pytest.approx(1 / 3, abs=1e-7)


def test_arithmetic_by_name() -> None:
    a = {"w": torch.tensor([1.0, 2.0]), "kept": torch.tensor(7)}
    b = {"w": torch.tensor([10.0, 20.0])}
    assert tree.add(a, b, 0.5)["w"].tolist() == [6.0, 12.0]
    assert tree.add(a, b)["kept"] is a["kept"]
    assert tree.sub(b, a)["w"].tolist() == [9.0, 18.0]
    assert float(tree.norm([torch.tensor([3.0]), torch.tensor([[4.0, 12.0]])])) == 13.0


def awkward_tree() -> dict[str, Any]:
    return {
        "model": {"encoder.0.weight": torch.randn(2, 3, dtype=torch.float64).T, "steps": torch.tensor(2**62)},
        "seen": torch.tensor([True, False]),
        "none": torch.zeros(0, 4),
        "halves": torch.tensor([1.0, math.inf, -0.0], dtype=torch.float16),
        "scalar": torch.tensor(math.nan),
        "deep": {"er": {"still": torch.tensor([1, 2], dtype=torch.uint8)}},
    }


def test_trees_survive_bytes() -> None:
    before = awkward_tree()
    after = tree.from_bytes(tree.to_bytes(before))
    assert tree.equal(before, after)
    flat_before, flat_after = tree.flatten(before), tree.flatten(after)
    assert list(flat_before) == list(flat_after) == sorted(flat_before)
    assert "deep/er/still" in flat_after and after["deep"]["er"]["still"].tolist() == [1, 2]
    for name, t in flat_before.items():
        assert (flat_after[name].dtype, flat_after[name].shape) == (t.dtype, t.shape)
        torch.testing.assert_close(flat_after[name], t, rtol=0, atol=0, equal_nan=True)
    assert tree.unflatten(flat_before).keys() == before.keys()
    assert tree.from_bytes(tree.to_bytes({})) == {}


def test_equal_looks_at_bits() -> None:
    zero = {"a": torch.tensor([0.0])}
    assert tree.equal(zero, {"a": torch.tensor([0.0])})
    assert tree.equal({"a": torch.tensor(math.nan)}, {"a": torch.tensor(math.nan)})
    for other in ({"a": torch.tensor([-0.0])}, {"b": torch.tensor([0.0])}, {"a": torch.tensor(0.0)}, {}):
        assert not tree.equal(zero, other)
    assert not tree.equal(zero, {"a": torch.tensor([0.0], dtype=torch.float64)})


def test_num_bytes() -> None:
    """3 float64, 2 bool, and 0 float32: 24 + 2 + 0."""
    group = {"a": torch.zeros(3).double(), "b": {"c": torch.zeros(2, dtype=torch.bool), "d": torch.zeros(0)}}
    assert tree.num_bytes(group) == 26


# Keys and schedules


def test_streams_depend_on_every_part_of_their_key_and_on_nothing_else() -> None:
    names = [(0, "batches", 1, 2), (1, "batches", 1, 2), (0, "augment", 1, 2), (0, "batches", 2, 1), (0, "batches", 12)]
    draws = [torch.rand(4, generator=determinism.torch_stream(*name)).tolist() for name in names]
    assert len({tuple(d) for d in draws}) == len(names)
    backwards = [torch.rand(4, generator=determinism.torch_stream(*name)).tolist() for name in reversed(names)]
    assert backwards == draws[::-1]
    by_numpy = [tuple(determinism.numpy_stream(*name).random(4)) for name in names]
    assert len(set(by_numpy)) == len(names)
    assert by_numpy[0] == tuple(determinism.numpy_stream(*names[0]).random(4))


def test_streams_are_the_same_on_every_machine() -> None:
    """A key is a hash, not Python's: written down once, so that stored runs stay reproducible."""
    assert determinism.key(0, "batches", 1, 2) == 4351805590977214935


def test_the_global_stream_is_put_back() -> None:
    before = torch.get_rng_state()
    with pytest.raises(KeyError), determinism.global_stream(5):
        inside = torch.rand(3)
        raise KeyError
    assert torch.equal(before, torch.get_rng_state())
    with determinism.global_stream(5):
        assert torch.equal(inside, torch.rand(3))


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1, 1, 1]),
        ("linear", [1, 0.58, 0.16]),  # halfway: (1 + 0.16) / 2
        ("cosine", [1, 0.58, 0.16]),  # the same halfway, where the cosine is 0
        ("exponential", [1, 0.4, 0.16]),  # halfway: sqrt(0.16)
    ],
)
def test_decay(schedule: Any, factors: list[float]) -> None:
    assert [decay(schedule, t, 3, 0.16) for t in (1, 2, 3)] == pytest.approx(factors)
    assert decay(schedule, 1, 1, 0.16) == 1


def test_cosine_differs_from_linear_on_the_way() -> None:
    """A quarter of the way: 0.16 + 0.84 (1 + cos(pi / 4)) / 2."""
    assert decay("cosine", 2, 5, 0.16) == pytest.approx(0.16 + 0.42 * (1 + math.sqrt(0.5)))


def test_the_learning_rate_decays() -> None:
    method = FedAvg(lr=0.4, lr_schedule="linear", lr_final=0.5)
    site = [ServerSite(LINEAR, 1, C, 0, t, 3, torch.device("cpu")) for t in (1, 2, 3)]
    assert [method.learning_rate(s) for s in site] == pytest.approx([0.4, 0.3, 0.2])


# FedAvg


def test_the_server_step() -> None:
    """Two clients of 1 and 3 examples, server_lr 0.5. Weight: 10 + 0.5 (1 * 2 + 3 * 6) / 4 = 12.5; running mean, not
    touched by server_lr: (1 * 1 + 3 * 5) / 4 = 4; the counter of batches is the server's own."""
    model = {
        "w": torch.tensor([10.0]),
        "bn.running_mean": torch.tensor([100.0]),
        "bn.num_batches_tracked": torch.tensor(1),
        "frozen": torch.tensor([8.0]),
    }

    def answer(delta: float, mean: float, count: int) -> dict[str, Any]:
        buffers = {"bn.running_mean": torch.tensor([mean])}
        return {"delta": {"w": torch.tensor([delta])}, "buffers": buffers, "count": torch.tensor(count)}

    site = ServerSite(LINEAR, 2, C, 0, 1, 1, torch.device("cpu"))
    statistics = {"bn.running_mean": model["bn.running_mean"]}
    parts: Parts = {"delta": Direction({"w": model["w"]}), "buffers": Statistics(statistics, {}), "count": Count()}
    received = rg.Exchange().receive({4: answer(2.0, 1.0, 1), 6: answer(6.0, 5.0, 3)}, parts, site)
    new = FedAvg(server_lr=0.5).server_update({"model": model}, received, site)
    assert {name: t.tolist() for name, t in new["model"].items()} == {
        "w": [12.5],
        "bn.running_mean": [4.0],
        "bn.num_batches_tracked": 1,
        "frozen": [8.0],
    }
    assert new["model"]["bn.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        ({"momentum": 0.9, "weight_decay": 0.1}, functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1)),
        ({"optimizer": "adam", "weight_decay": 0.1}, functools.partial(torch.optim.Adam, weight_decay=0.1)),
        ({"optimizer": "adamw", "weight_decay": 0.1}, functools.partial(torch.optim.AdamW, weight_decay=0.1)),
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_one_client_is_plain_training(options: dict[str, Any], optimizer: Any) -> None:
    """One client, full batches, three epochs, two rounds: three steps of PyTorch, twice, each with a new optimizer.
    A round's training loss is the mean over its three steps."""
    data = examples([4, 2, 1])
    method = FedAvg(lr=0.1, epochs=3, batch_size=64, **options)
    result = rg.train(method, rg.Federation([data], data, C), mlp, rounds=2)
    net = mlp()
    for record in result.history:
        step, losses = optimizer(net.parameters(), lr=0.1), []
        for _ in range(3):
            step.zero_grad()
            loss = F.cross_entropy(net(data.x), data.y)
            loss.backward()
            step.step()
            losses.append(loss.item())
        assert record["train_loss"] == pytest.approx(sum(losses) / 3, rel=1e-12)
    for name, t in net.state_dict().items():
        torch.testing.assert_close(result.server["model"][name], t, rtol=1e-12, atol=1e-12)
    assert record["test"]["loss"] == pytest.approx(F.cross_entropy(net(data.x), data.y).item(), rel=1e-12)
    assert all(t.dtype == torch.float64 for t in result.net.state_dict().values())


def test_clipping_limits_the_step() -> None:
    """One step of SGD with learning rate 0.5 on a gradient clipped to 0.01 is 0.005 long."""
    result = rg.train(FedAvg(lr=0.5, epochs=1, clip_norm=0.01), federation([3, 2, 1]), mlp, rounds=1)
    moved = tree.sub(result.server["model"], dict(mlp().state_dict()))
    assert float(tree.norm(moved.values())) == pytest.approx(0.005, rel=1e-4)


def test_clients_alike_make_the_model_that_each_has_and_the_loss_falls() -> None:
    alone = rg.train(FedAvg(epochs=1, lr=0.1), federation([5, 5, 5]), mlp, rounds=6)
    data = examples([5, 5, 5])
    twins = rg.train(FedAvg(epochs=1, lr=0.1), rg.Federation([data] * 3, examples([2] * C, 99), C), mlp, rounds=6)
    for name, t in alone.server["model"].items():
        torch.testing.assert_close(twins.server["model"][name], t, rtol=1e-10, atol=1e-10)
    losses = [record["test"]["loss"] for record in alone.history]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("method", [FedAvg, RedGrape])
def test_a_frozen_encoder_stays_and_the_classifier_learns(method: type[FedAvg]) -> None:
    model = rg.train(method(freeze_encoder=True, lr=0.1), federation([5, 2, 1], [1, 2, 5]), mlp, rounds=2).server[
        "model"
    ]
    for name, t in mlp().state_dict().items():
        assert torch.equal(model[name], t) == name.startswith("encoder.")


# The rounds


def test_a_loaded_net_shares_no_memory_and_draws_no_random_numbers() -> None:
    """Though building it draws: else the order of a client's batches would depend on how often a net is loaded."""

    def build() -> rg.Net:
        return rg.Net(nn.Dropout(0.5), nn.Linear(5, C))

    model, before = dict(build().state_dict()), torch.get_rng_state()
    net = ServerSite(build, 1, C, 0, 1, 1, torch.device("cpu")).load(model)
    assert torch.equal(before, torch.get_rng_state())
    assert net.training
    for name, t in net.state_dict().items():
        assert torch.equal(t, model[name])
        assert t.data_ptr() != model[name].data_ptr()


def test_sampling_is_a_function_of_seed_and_round() -> None:
    chosen = [sample_clients(range(50), 10, seed, t) for seed in (0, 1) for t in range(1, 21)]
    assert chosen == [sample_clients(range(50), 10, seed, t) for seed in (0, 1) for t in range(1, 21)]
    assert len({tuple(c) for c in chosen}) == 40
    assert all(c == sorted(set(c)) and len(c) == 10 for c in chosen)
    assert {k for c in chosen for k in c} == set(range(50))
    assert sample_clients([3, 1, 8], 5, 0, 1) == [1, 3, 8]


def test_every_method_meets_the_same_clients_and_none_without_examples() -> None:
    counts = [[2, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 0, 2], [3, 0, 0]]
    histories = [
        rg.train(method, federation(*counts), LINEAR, rounds=8, clients_per_round=2, seed=4).history
        for method in (FedAvg(epochs=1), RedGrape(epochs=1, lr=0.3))
    ]
    clients = [[record["clients"] for record in history] for history in histories]
    assert clients[0] == clients[1]
    assert {k for c in clients[0] for k in c} == {0, 2, 4, 5}
    assert all(len(c) == 2 for c in clients[0])


def test_divergence_names_round_client_and_tensor() -> None:
    with pytest.raises(
        Diverged, match=r"^DIVERGED in round 1: client 0: tensor 'delta/\S+' is not finite; lower the le"
    ):
        rg.train(FedAvg(lr=1e9, weight_decay=1e9), federation([5, 2, 1], [3, 3, 3]), mlp, rounds=3)


def test_one_diverging_client_is_left_out_and_recorded() -> None:
    """Client 1's inputs are so large that its second step overflows; the round is client 0's."""
    data = [examples([5, 2, 1]), rg.Examples(examples([2, 2, 2], 1).x * 1e200, examples([2, 2, 2]).y)]
    test = examples([2] * C, 99)
    both = rg.train(FedAvg(epochs=2, lr=0.1), rg.Federation(data, test, C), mlp, rounds=1)
    alone = rg.train(FedAvg(epochs=2, lr=0.1), rg.Federation(data[:1], test, C), mlp, rounds=1)
    record = both.history[0]
    assert (record["clients"], record["answered"], list(record["rejected"])) == ([0, 1], [0], ["1"])
    assert "is not finite" in record["rejected"]["1"]
    assert tree.equal(both.server, alone.server)


class Remembering(FedAvg):
    """Counts a client's visits in its state, and knows the round."""

    def init_client(self, broadcast):
        return {"visits": torch.tensor(0)}

    def client_update(self, broadcast, state, site):
        update, _ = super().client_update(broadcast, state, site)
        return update, {"visits": state["visits"] + 1}

    def server_update(self, server, received, site):
        return super().server_update(server, received, site) | {"round": torch.tensor(site.round)}


class LosesClientOne(InProcess):
    """Until round 3."""

    def run_clients(self, broadcast, clients, states, round):
        answers = super().run_clients(broadcast, clients, states, round)
        return ((k, a) for k, a in answers if k != 1 or round == 3)


class SpoilsClientOne(InProcess):
    """Until round 3."""

    def run_clients(self, broadcast, clients, states, round):
        for k, answer in super().run_clients(broadcast, clients, states, round):
            if k == 1 and round < 3:
                answer.update["delta"]["classifier.bias"][0] = math.nan
            yield k, answer


@pytest.mark.parametrize("engine", [LosesClientOne, SpoilsClientOne])
def test_a_client_whose_update_does_not_count_keeps_its_old_state(engine: type[InProcess]) -> None:
    """Client 0 is heard three times, client 1 only in round 3: for the server that was its first visit."""
    half = ClientHalf(Remembering(epochs=1), federation([2, 1, 1], [1, 1, 2]), LINEAR, 0, 3, torch.device("cpu"))
    site = ServerSite(LINEAR, 2, C, 0, 0, 3, torch.device("cpu"))
    states = list(rounds(half.method, engine(half), site, eligible=[0, 1], clients_per_round=2))
    visits = [{k: int(s["visits"]) for k, s in state.clients.items()} for state in states]
    assert visits == [{0: 1}, {0: 2}, {0: 3, 1: 1}]
    assert [state.record["answered"] for state in states] == [[0], [0], [0, 1]]
    assert [int(state.server["round"]) for state in states] == [state.round for state in states] == [1, 2, 3]


def test_history() -> None:
    """Two clients of 4 and 3 examples. The linear net has 3 * 5 + 3 = 18 float32: 72 bytes down to each client; up come
    the same 18 and the loss as float32, and the count as int64: 72 + 4 + 8."""
    data = federation([2, 1, 1], [1, 1, 1], validation=examples([1, 0, 1], 5))
    result = rg.train(FedAvg(epochs=1), data, LINEAR, rounds=2)
    assert [record["round"] for record in result.history] == [1, 2]
    for record in result.history:
        assert record.keys() == {
            *(
                "round",
                "clients",
                "answered",
                "rejected",
                "lost",
                "train_loss",
                "bytes_down",
                "bytes_up",
                "test",
                "validation",
            )
        }
        assert record["clients"] == record["answered"] == [0, 1]
        assert record["rejected"] == record["lost"] == {}
        assert record["bytes_down"] == 2 * 72
        assert record["bytes_up"] == 2 * (72 + 4 + 8)
        for split in ("test", "validation"):
            fields = {"accuracy", "balanced", "macro_f1", "head", "middle", "tail", "loss", "per_class"}
            assert record[split].keys() == fields
    assert record["validation"]["per_class"][1] is None
    start = LINEAR()
    own = [data.client(k) for k in range(2)]
    losses = [F.cross_entropy(start(d.inputs(torch.arange(len(d)), torch.float32)), d.labels).item() for d in own]
    assert result.history[0]["train_loss"] == pytest.approx((4 * losses[0] + 3 * losses[1]) / 7, rel=1e-6)
    assert not result.net.training
    predicted = result.net(data.test.x.float()).argmax(dim=1)
    assert record["test"]["accuracy"] == int((predicted == data.test.y).sum()) / len(data.test)


def test_the_last_ten_rounds_are_evaluated_and_before_them_every_so_many() -> None:
    history = rg.train(FedAvg(epochs=1), federation([1, 1, 1]), LINEAR, rounds=16, evaluate_every=4).history
    assert [record["round"] for record in history if "test" in record] == [4, *range(7, 17)]


def test_training_continues_from_a_state() -> None:
    """And the caller may stop when it likes."""
    data = federation([5, 2, 1], [1, 2, 5])
    with Training(RedGrape(epochs=1), data, mlp, rounds=4) as training:
        straight = list(training.steps())
        first = RunState(2, straight[1].state.server, straight[1].state.clients)
        resumed = list(training.steps(first))
    assert [step.state.round for step in resumed] == [3, 4]
    assert [step.record for step in resumed] == [step.record for step in straight[2:]]
    assert tree.equal(resumed[-1].state.server, straight[-1].state.server)
    assert all(step.seconds.keys() == {"train", "evaluate"} for step in straight)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rounds": 0}, "rounds is 0"),
        ({"clients_per_round": 0}, "clients_per_round is 0; choose 1 to 3"),
        ({"clients_per_round": 4}, "clients_per_round is 4; choose 1 to 3"),
        ({"workers": 0}, "workers is 0"),
        ({"min_answers": 0}, "min_answers is 0; choose 1 to 2"),
        ({"min_answers": 3}, "min_answers is 3; choose 1 to 2"),
        ({"deadline": 0.0}, "deadline is 0.0"),
        ({"evaluate_every": 0}, "evaluate_every is 0"),
        ({"device": "gpu7"}, "device 'gpu7' cannot be used here"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Training(FedAvg(), federation([1, 1, 1], [1, 1, 1], [0, 0, 0]), LINEAR, **{"rounds": 1, **options})


@pytest.mark.parametrize(
    ("net", "says"),
    [
        (nn.Linear(5, 3), r"build\(\) returned a Linear; it must return redgrape.Net"),
        (rg.Net(nn.Identity(), nn.Sequential(nn.Linear(5, 3))), r"build\(\) returned a Net; it must return"),
        (rg.Net(nn.Identity(), nn.Linear(5, 7)), "the net's classifier has 7 outputs for 3 classes"),
        (rg.Net(nn.Identity(), nn.Linear(6, 3)), r"the net does not take inputs of shape \(5,\): "),
        (rg.Net(nn.Unflatten(1, (1, 5)), nn.Linear(5, 3)), r"outputs have shape \(1, 3\); it must give one number"),
    ],
)
def test_nets_that_do_not_fit(net: nn.Module, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_net(net, federation([1, 1, 1]))


# Evaluation


def test_scores() -> None:
    """Of class 0, 3 of 4 are right; of class 1, 2 of 2; of class 2, 1 of 4; class 3 has no example. In all 6 of 10; the
    mean of 3/4, 1 and 1/4 is 2/3; head (0 and 1) 5 of 6; tail (2 and 3) 1 of 4; the middle is empty."""
    confusion = torch.tensor([[3, 1, 0, 0], [0, 2, 0, 0], [1, 0, 1, 2], [0, 0, 0, 0]])
    record = evaluation.of_confusion(confusion, 5.0).record(Groups(head=(0, 1), middle=(), tail=(3, 2)))
    assert record == {
        "accuracy": 0.6,
        "balanced": pytest.approx(2 / 3),
        "macro_f1": pytest.approx((6 / 8 + 4 / 5 + 2 / 5) / 3),  # 2 TP / (tested + predicted); class 3 is not tested
        "head": pytest.approx(5 / 6),
        "middle": None,
        "tail": 0.25,
        "loss": 0.5,
        "per_class": [0.75, 1.0, 0.25, None],
    }


def test_scores_of_several_batches() -> None:
    """600 examples are three batches of at most 256; a net that always says class 1."""
    net = rg.Net(nn.Identity(), nn.Linear(1, 2))
    net.classifier.load_state_dict({"weight": torch.zeros(2, 1), "bias": torch.tensor([0.0, 1.0])})
    test = rg.Examples(torch.zeros(600, 1), torch.tensor([0] * 100 + [1] * 500))
    data = rg.Federation([test], test, 2)
    scores = InProcess(ClientHalf(FedAvg(), data, lambda: net, 0, 1, torch.device("cpu"))).evaluate(
        net.state_dict(), "test"
    )
    assert scores.confusion.tolist() == [[0, 100], [0, 500]]
    assert scores.loss == pytest.approx((100 * math.log(1 + math.e) + 500 * math.log(1 + 1 / math.e)) / 600, rel=1e-6)


@pytest.mark.parametrize(("classes", "sizes"), [(10, (3, 4, 3)), (100, (30, 40, 30)), (4, (1, 1, 2)), (2, (1, 0, 1))])
def test_head_middle_and_tail(classes: int, sizes: tuple[int, int, int]) -> None:
    """The first and the last 30 % of the classes by count; k >= int(0.7 C) is tail, as in the paper's tables."""
    groups = Groups.by_count([1000 - c for c in range(classes)])
    assert (len(groups.head), len(groups.middle), len(groups.tail)) == sizes
    assert groups.head + groups.middle + groups.tail == tuple(range(classes))


def test_groups_go_by_count_and_a_given_tail_is_the_tail() -> None:
    assert Groups.by_count([5, 9, 9, 1]) == Groups((1,), (2,), (0, 3))
    assert Groups.by_count([5, 9, 9, 1], tail=[0, 1]) == Groups((2, 3), (), (1, 0))
    data = federation([9, 1, 4], tail=[1])
    assert (data.groups.head, data.groups.tail) == ((0, 2), (1,))


def test_a_fingerprint_is_of_every_clients_rows_and_labels() -> None:
    """A split with another label, boundary or order of the clients is another. With labels 1 and 0, the rows 0 and 1 of
    one client are the numbers 0, 1, 1, 0, and those of two clients are so too: the sizes tell them apart."""
    test = rg.Examples(torch.zeros(1, 1), torch.tensor([0]))

    def made(labels: list[int], *parts: list[int]) -> str:
        train = rg.Examples(torch.zeros(3, 1), torch.tensor(labels))
        return rg.Federation.from_parts(train, [np.array(part) for part in parts], test, 2).fingerprint()

    splits = [made([1, 0, 0], *parts) for parts in ([[0, 1]], [[0], [1]], [[1], [0]], [[0, 2]], [[0, 1, 2]])]
    assert len({*splits, made([1, 1, 0], [0, 1])}) == 6
    assert made([1, 0, 0], [0, 1]) == splits[0] == made([1, 0, 1], [0, 1])  # nobody holds the last row


# Worker processes


def test_a_build_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"build cannot be sent to worker processes .*workers=1"):
        rg.train(FedAvg(), federation([1, 1, 1]), lambda: LINEAR(), rounds=1, workers=2)


def test_memory_and_file_give_the_same_bits(tmp_path: Path) -> None:
    """Pixels in memory, in one process; in memory, in workers; mapped from a part of a file, in workers."""
    shape = (1, 8, 8)
    pixels = np.random.Generator(np.random.Philox(0)).integers(0, 256, (60, *shape), dtype=np.uint8)
    np.save(tmp_path / "pixels.npy", pixels)
    mapped = np.load(tmp_path / "pixels.npy", mmap_mode="r")
    labels = np.arange(50) % C
    parts = [np.arange(0, 25), np.arange(25, 32), np.arange(40, 45)]
    build = functools.partial(nets.build, "resnet8", shape, C, seed=0)
    servers, histories = [], []
    for x, workers in ((pixels[10:], 1), (pixels[10:], 2), (mapped[10:], 2)):
        train = rg.Examples(x, labels, rg.Pixels((0.5,), (0.25,)), rg.Augment(crop=1, flip=True))
        data = rg.Federation.from_parts(train, parts, train.take(np.arange(32, 40)), C)
        result = rg.train(RedGrape(epochs=1, batch_size=8), data, build, rounds=2, workers=workers)
        servers.append(result.server)
        histories.append(result.history)
    assert tree.equal(servers[0], servers[1])
    assert tree.equal(servers[0], servers[2])
    assert histories[0] == histories[1] == histories[2]


class Accident(FedAvg):
    """Sends random numbers, by key. At client 1 an accident happens, only once where a file is named to remember it."""

    kind: Literal["killed", "hung", "error", "memory"] = "killed"
    file: str = ""

    def client_update(self, broadcast, state, site: ClientSite):
        if site.client == 1 and not (self.file and Path(self.file).exists()):
            if self.file:
                Path(self.file).touch()
            match self.kind:
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hung":
                    time.sleep(600)
                case "error":
                    raise ArithmeticError("a mistake in the method")
                case "memory":
                    raise MemoryError
        generator = site.generator("noise")
        delta = {name: torch.randn(t.shape, generator=generator) for name, t in sorted(broadcast["model"].items())}
        return {"delta": delta, "buffers": {}, "count": torch.tensor(len(site.data)), "loss": torch.tensor(1.0)}, {}


def accident(**options: Any) -> ClientHalf:
    data = federation([2, 1, 1], [1, 2, 3], [1, 0, 0], [1, 1, 1])
    return ClientHalf(Accident(**options), data, LINEAR, 0, 3, torch.device("cpu"))


def after_three_rounds(half: ClientHalf, engine: Any) -> tree.Tree:
    site = ServerSite(LINEAR, 4, C, 0, 0, 3, torch.device("cpu"))
    states = list(rounds(half.method, engine, site, eligible=range(4), clients_per_round=4))
    assert all(state.record["answered"] == [0, 1, 2, 3] for state in states)
    return states[-1].server


@pytest.mark.parametrize("kind", ["killed", "hung"])
def test_a_worker_lost_in_the_middle_of_a_round_is_replaced(kind: Any, tmp_path: Path) -> None:
    half = accident(kind=kind, file=str(tmp_path / "happened"))
    with Pool(half, 2, deadline=3.0 if kind == "hung" else None) as pool:
        before = {worker.process.pid for worker in pool._workers}
        pooled = after_three_rounds(half, pool)
        assert (tmp_path / "happened").exists()
        assert len(before - {worker.process.pid for worker in pool._workers}) == 1
    assert tree.equal(pooled, after_three_rounds(half, InProcess(half)))


class KeepsAnUpdate(FedAvg):
    """Its server holds on to what a client sent, as it is."""

    def needs_single(self):
        return "it keeps one of them"

    def init_server(self, model, site):
        return {"model": model, "kept": {name: torch.zeros_like(t) for name, t in model.items()}}

    def server_update(self, server, received, site):
        first = server["kept"] if site.round > 1 else received.each("delta")[0]
        return {**super().server_update(server, received, site), "kept": first}


def test_what_the_server_keeps_of_an_update_outlives_the_round() -> None:
    """Answers lie in memory that the workers overwrite in the next round."""
    half = ClientHalf(KeepsAnUpdate(), accident().federation, LINEAR, 0, 3, torch.device("cpu"))
    with Pool(half, 2) as pool:
        pooled = after_three_rounds(half, pool)
    assert tree.equal(pooled, after_three_rounds(half, InProcess(half)))


def test_many_more_clients_than_workers_give_the_same_bits() -> None:
    """Workers get several tasks at once then; one of them dies in the middle and its tasks go to another."""
    counts = [[1 + k % 3, 2, k % 2] for k in range(60)]
    half = ClientHalf(FedAvg(epochs=1), federation(*counts), LINEAR, 0, 3, torch.device("cpu"))
    site = ServerSite(LINEAR, 60, C, 0, 0, 3, torch.device("cpu"))

    class DiesOnTheWay(Pool):
        def _answering(self):
            found = super()._answering()
            if not hasattr(self, "killed"):
                self.killed = True
                victim = max(self._workers, key=lambda worker: len(worker.tasks))
                assert len(victim.tasks) > 2
                os.kill(victim.process.pid, signal.SIGKILL)
            return found

    with DiesOnTheWay(half, 2) as pool:
        pooled = list(rounds(half.method, pool, site, eligible=range(60), clients_per_round=60))
    alone = list(rounds(half.method, InProcess(half), site, eligible=range(60), clients_per_round=60))
    assert [state.record for state in pooled] == [state.record for state in alone]
    assert tree.equal(pooled[-1].server, alone[-1].server)


def test_a_worker_lost_between_two_rounds_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "happened").touch()
    half = accident(file=str(tmp_path / "happened"))

    class KilledBeforeEveryRound(Pool):
        def run_clients(self, broadcast, clients, states, round):
            victim = self._workers[round % 2].process
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
            return super().run_clients(broadcast, clients, states, round)

    with KilledBeforeEveryRound(half, 2) as pool:
        pooled = after_three_rounds(half, pool)
    assert tree.equal(pooled, after_three_rounds(half, InProcess(half)))


@pytest.mark.parametrize(("kind", "reason"), [("killed", "ended with code -9"), ("hung", "no answer within the dead")])
def test_a_client_that_takes_every_worker_down_is_left_out(kind: Any, reason: str) -> None:
    """And the round is that of the others, whose answers are what they were."""
    half = accident(kind=kind)
    site = ServerSite(LINEAR, 4, C, 0, 0, 1, torch.device("cpu"))
    with Pool(half, 2, deadline=1.0 if kind == "hung" else None) as pool:
        (state,) = rounds(half.method, pool, site, eligible=range(4), clients_per_round=4)
    assert state.record["answered"] == [0, 2, 3]
    assert list(state.record["lost"]) == ["1"] and reason in state.record["lost"]["1"]
    (without,) = rounds(half.method, InProcess(half), site, eligible=[0, 2, 3], clients_per_round=3)
    assert tree.equal(state.server, without.server)


def test_too_few_answers_stop_the_run() -> None:
    half = accident(kind="killed")
    site = ServerSite(LINEAR, 4, C, 0, 0, 1, torch.device("cpu"))
    says = r"^3 of 4 clients gave an accepted answer in round 1, and 4 are needed; client 1: the process ended"
    with Pool(half, 2) as pool, pytest.raises(TooFewClients, match=says):
        list(rounds(half.method, pool, site, eligible=range(4), clients_per_round=4, min_answers=4))


def test_a_mistake_in_a_method_is_shown_as_it_happened() -> None:
    half = accident(kind="error")
    with Pool(half, 1) as pool, pytest.raises(RuntimeError, match=r"(?s)client 1 raised .*ArithmeticError: a mistake"):
        after_three_rounds(half, pool)
    with pytest.raises(ArithmeticError, match="a mistake in the method"):
        after_three_rounds(half, InProcess(half))


def test_a_worker_without_enough_memory_says_so_in_one_line() -> None:
    half = accident(kind="memory")
    with Pool(half, 1) as pool, pytest.raises(ConfigError, match=r"^not enough memory; choose .* fewer --workers$"):
        after_three_rounds(half, pool)


def test_after_a_mistake_no_worker_is_started_before_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would take time, and its own error would hide the mistake."""
    half = accident(kind="error")
    with Pool(half, 2) as pool:
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="a mistake"):
            patched.setattr(pool, "_start", lambda i: pytest.fail("a worker was started"))
            after_three_rounds(half, pool)
        assert not all(worker.process.is_alive() for worker in pool._workers)
        with pytest.raises(RuntimeError, match="a mistake"):
            after_three_rounds(half, pool)


def test_workers_end_when_another_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], Pool._start

    def once(self, index):
        if started:
            raise OSError("too many processes")
        started.append(start(self, index))
        return started[0]

    monkeypatch.setattr(Pool, "_start", once)
    with pytest.raises(OSError, match="too many processes"):
        Pool(accident(), 2)
    assert not started[0].process.is_alive()


def test_no_worker_outlives_its_pool() -> None:
    pool = Pool(accident(kind="error"), 2)
    processes = [worker.process for worker in pool._workers]
    assert all(process.is_alive() for process in processes)
    pool.close()
    assert not any(process.is_alive() for process in processes)


class RefusesOnce(FedAvg):
    """Client 0 raises in round 2, once; client 1 is slow, so that its answer is still on its way then."""

    file: str = ""

    def client_update(self, broadcast: tree.Tree, state: tree.Tree, site: rg.ClientSite) -> tuple[tree.Tree, tree.Tree]:
        if site.round == 2 and not Path(self.file).exists():
            if site.client == 0:
                Path(self.file).touch()
                raise rg.RedgrapeError("client 0 has had enough")
            time.sleep(1.0)
        return super().client_update(broadcast, state, site)


def test_an_answer_that_comes_too_late_is_not_taken_for_another(tmp_path: Path) -> None:
    """After an error the same training goes on, and a worker that was busy then does not answer with the old round."""
    method = RefusesOnce(epochs=1, file=str(tmp_path / "refused"))
    data = federation([2, 1, 1], [1, 1, 2])
    with rg.Training(method, data, LINEAR, rounds=4, workers=2) as training:
        steps = training.steps()
        first = next(steps)
        with pytest.raises(rg.RedgrapeError, match=r"^client 0 has had enough$"):
            next(steps)
        *_, last = training.steps(first.state)
    assert tree.equal(last.state.server, rg.train(FedAvg(epochs=1), data, LINEAR, rounds=4).server)


def test_a_build_that_gives_one_net_twice_is_refused() -> None:
    net = LINEAR()
    with pytest.raises(ConfigError, match="the same net twice"):
        rg.train(FedAvg(), federation([2, 1, 1], [1, 1, 2]), lambda: net, rounds=1)


def test_inputs_that_do_not_agree_are_refused() -> None:
    y = torch.arange(6) % 2
    pixels, floats = torch.zeros(6, 4, dtype=torch.uint8), torch.zeros(6, 4)
    with pytest.raises(rg.RedgrapeError, match="test inputs are 4 floats, and training inputs 4 pixels"):
        rg.Federation([rg.Examples(pixels, y)], rg.Examples(floats, y), 2)
    with pytest.raises(rg.RedgrapeError, match="client 1's inputs are 4 pixels with mean"):
        rg.Federation([rg.Examples(pixels, y), rg.Examples(pixels, y, rg.Pixels((0.5,)))], rg.Examples(pixels, y), 2)
    train = rg.Examples(floats, y)
    for parts, words in (([[0, 9]], "rows reach from 0 to 9"), ([[0, 1], [1]], "belongs to two clients")):
        with pytest.raises(rg.RedgrapeError, match=words):
            rg.Federation.from_parts(train, [np.array(p) for p in parts], train, 2)


def test_objects_are_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """In a notebook. A line per round is printed if asked for."""
    data = federation([3, 2, 1], [1, 1, 1])
    assert repr(data).startswith("Federation(2 clients, 3 classes, 9 training and ")
    assert re.fullmatch(r"Examples\(\d+ of shape \d+(x\d+)*, float64\)", repr(data.test))
    result = rg.train(FedAvg(epochs=1), data, mlp, rounds=2)
    assert capsys.readouterr().err == ""
    assert re.fullmatch(r"Result\(2 rounds, accuracy [\d.]+ %(, tail [\d.]+ %)?\)", repr(result))
    rg.train(FedAvg(epochs=1), data, mlp, rounds=2, evaluate_every=2, progress=True)
    assert [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()] == ["round 1/2", "round 2/2"]


def test_training_does_not_import_the_compiler() -> None:
    """torch._dynamo and sympy take over a second, longer than the first rounds of a small net."""
    code = """
import sys, torch, redgrape as rg
examples = rg.Examples(torch.randn(8, 5), torch.arange(8) % 2)
federation = rg.Federation([examples, examples], examples, 2)
for method in (rg.RedGrape(lr=0.1), rg.Vine(lr=0.1), rg.CReFF(lr=0.1, match_steps=2, retrain_epochs=1)):
    rg.train(method, federation, rg.Net(torch.nn.Flatten(), torch.nn.Linear(5, 2)), rounds=2)
print({"sympy", "torch._dynamo"} & set(sys.modules))
"""
    printed = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=120, check=True)
    assert printed.stdout == "set()\n"
