"""Clients trained as one against clients trained one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from redgrape import methods, tree
from redgrape.cli import main as cli
from redgrape.data.examples import Examples
from redgrape.data.federation import Federation
from redgrape.engines.stacked import StackedNet
from redgrape.errors import ConfigError
from redgrape.learning.local_training import holds_for_stacks, stackable
from redgrape.method import Method
from redgrape.methods.fedavg import FedAvg
from redgrape.nets.net import Net
from redgrape.rounds import RunState
from redgrape.training import Training, train

C = 4
SIZES = [7, 5, 7, 7, 3, 7, 5, 9]  # stacks of three, of two, and clients alone


def data() -> Federation:
    random = np.random.default_rng(0)
    y = random.integers(0, C, sum(SIZES))
    x = random.random((len(y), 6)) + y[:, None] / 2
    parts = np.split(np.arange(len(y)), np.cumsum(SIZES)[:-1])
    return Federation.from_parts(Examples(x, y), parts, Examples(x, y), C, auxiliary=Examples(x[:12], y[:12]))


def small() -> Net:
    torch.manual_seed(3)
    encoder = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.Tanh())
    return Net(encoder, nn.Linear(4, C)).double()


def last(method: Method, stack: int, workers: int = 1, build: Any = small) -> RunState:
    with Training(
        method, data(), build, rounds=4, clients_per_round=6, seed=1, workers=workers, evaluate_every=9, stack=stack
    ) as training:
        return list(training.steps())[-1].state


STACKING = [name for name in methods.names() if holds_for_stacks(methods.load(name)())]


def test_these_methods_stack() -> None:
    named = {"fed_focal", "fedavg", "fedavgm", "feddyn", "fedic", "fednpc", "fedopt", "fedprox", "scaffold", "tau_norm"}
    assert set(STACKING) == named | {"over_sampling", "under_sampling"}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", STACKING)
def test_stacked_clients_agree_with_single_ones_to_rounding(name: str, optimizer: str) -> None:
    """In float64, after four rounds in which clients come, go and come back with their states."""
    options = {"lr": 0.05, "batch_size": 3, "epochs": 2, "weight_decay": 0.01}
    if optimizer == "adam":
        if name == "scaffold":
            pytest.skip("SCAFFOLD trains with sgd only")
        options["optimizer"] = optimizer
    method = methods.load(name)(**options, **methods.load(name).cheap)
    alone, stacked = last(method, 1), last(method, 3)
    ours, theirs = tree.flatten(stacked.server), tree.flatten(alone.server)
    assert ours.keys() == theirs.keys()
    assert max(float((ours[n] - theirs[n]).abs().max()) for n in ours) < 1e-13
    assert set(stacked.clients) == set(alone.clients)
    for k in alone.clients:
        mine, other = tree.flatten(stacked.clients[k]), tree.flatten(alone.clients[k])
        assert max(float((mine[n] - other[n]).abs().max()) for n in other) < 1e-13
    assert stacked.record["train_loss"] == pytest.approx(alone.record["train_loss"], rel=1e-12)
    assert stacked.record["bytes_up"] == alone.record["bytes_up"]


class Chain(nn.Module):
    """A module whose forward could do anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small().encoder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + 0.0  # type: ignore[no-any-return]


@pytest.mark.parametrize("bias", [True, False])
def test_a_chain_of_known_layers_and_any_other_net_agree(bias: bool) -> None:
    """Layer after layer for the one, vmap for the other."""

    def of(encoder: nn.Module) -> Net:
        torch.manual_seed(4)
        return Net(encoder, nn.Linear(4, C, bias=bias)).double()

    chain, other = (StackedNet(of(e), of(e), 3) for e in (small().encoder, Chain()))
    assert chain._layers is not None
    assert other._layers is None
    x = torch.randn(6, 6, dtype=torch.float64)
    outputs = [net(x) for net in (chain, other)]
    for z in outputs:
        z.square().sum().backward()
    assert torch.allclose(outputs[0], outputs[1], rtol=0, atol=1e-14)
    for p, q in zip(chain.parameters(), other.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-13)
        assert p.grad.is_contiguous()


def test_stacks_do_not_depend_on_the_workers() -> None:
    method = methods.load("scaffold")(lr=0.05, batch_size=3, epochs=2)
    one, two = last(method, 3), last(method, 3, workers=2)
    assert tree.equal(one.server, two.server)
    assert all(tree.equal(one.clients[k], two.clients[k]) for k in one.clients)


def test_a_frozen_encoder_stays_in_a_stack() -> None:
    method = FedAvg(lr=0.1, epochs=1, freeze_encoder=True)
    state = last(method, 3)
    assert torch.equal(state.server["model"]["encoder.0.weight"], small().state_dict()["encoder.0.weight"])
    assert not torch.equal(state.server["model"]["classifier.weight"], small().state_dict()["classifier.weight"])


class Own(FedAvg):
    """Has a loss of its own, and has not said that it holds for stacks."""

    def criterion(self, broadcast: Any, site: Any) -> Any:
        return super().criterion(broadcast, site)


class SaysSo(Own):
    @stackable
    def criterion(self, broadcast: Any, site: Any) -> Any:
        return super().criterion(broadcast, site)


def test_what_overrides_the_client_half_must_say_that_it_holds_for_stacks() -> None:
    """What only the server does is of no matter."""

    class OtherServer(FedAvg):
        def server_update(self, server: Any, received: Any, site: Any) -> Any:
            return super().server_update(server, received, site)

    assert [holds_for_stacks(kind()) for kind in (OtherServer, Own, SaysSo)] == [True, False, True]


def tied() -> Net:
    net = Net(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, C))
    net.encoder[1].weight = net.encoder[0].weight
    return net


@pytest.mark.parametrize(
    ("method", "build", "message"),
    [
        (Own(), small, "method 'Own' cannot be stacked"),
        (methods.load("redgrape")(), small, "method 'RedGrape' cannot be stacked"),
        (FedAvg(clip_norm=1.0), small, "clip_norm"),
        (FedAvg(), tied, "one parameter under two names"),
        (FedAvg(), lambda: Net(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), nn.Linear(5, C)), "BatchNorm"),
        (FedAvg(), lambda: Net(nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5)), nn.Linear(5, C)), "dropout"),
    ],
)
def test_what_cannot_be_stacked_is_refused(method: Method, build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(method, data(), build, rounds=1, stack=2)
    train(method, data(), build, rounds=1)


def test_a_run_records_its_stacks_and_goes_on_with_no_others(tmp_path: Path, capsys: Any) -> None:
    out = str(tmp_path / "run")
    run = f"run --method fedavg --net linear --partition iid --rounds 1 --epochs 1 --workers 1 --quiet --out {out}"
    assert cli.run(f"{run} -c data.head_cap=30 --stack 4".split()) == 0
    assert "4 clients of equal size were trained as one" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["stack"] == 4
    assert cli.run(f"resume {out} --rounds 2 --workers 1 --quiet".split()) == 2
    assert "began with stack 4 and is stack 1 now" in capsys.readouterr().err
    assert cli.run(f"resume {out} --rounds 2 --workers 1 --quiet --stack 4".split()) == 0


def test_a_stack_of_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="stack is 0"):
        train(FedAvg(), data(), small, rounds=1, stack=0)
