"""GPUs, of which none is at hand: every method on a simulated one, and workers over a list of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from redgrape import methods, tree
from redgrape.engines.in_process import InProcess
from redgrape.learning.evaluation import Scores
from redgrape.method import Method
from redgrape.testing.cases import Case, client_half, named_net, server_site, small
from redgrape.training import RunState, rounds
from simulated_gpu import simulated_gpu


def trained(method: Method, case: Case, device: torch.device) -> tuple[list[RunState], Scores]:
    """Both halves of the method and the evaluation on a device."""
    half = replace(client_half(method, case), device=device)
    site = replace(server_site(case), device=device)
    engine = InProcess(half)
    asked = {"eligible": case.eligible, "clients_per_round": case.clients_per_round}
    states = list(rounds(method, engine, site, exchange=case.exchange, **asked))
    return states, engine.evaluate(states[-1].server["model"], "test")


@pytest.mark.parametrize("case", [Case(rounds=2), named_net("cnn")], ids=lambda case: case.net)
@pytest.mark.parametrize("name", methods.names())
def test_every_method_runs_on_a_gpu(name: str, case: Case) -> None:
    """No tensor is left on the CPU, nothing of the GPU leaves a client or reaches a checkpoint, and the result is that
    of the CPU."""
    method = small(methods.load(name)())
    expected, scores = trained(method, case, torch.device("cpu"))
    with simulated_gpu() as gpu:
        found, on_gpu = trained(method, case, gpu)
    for before, after in zip(expected, found, strict=True):
        kept = {**tree.flatten(after.server), **tree.flatten({str(k): s for k, s in after.clients.items()})}
        assert {type(t) for t in kept.values()} == {torch.Tensor}
        torch.testing.assert_close(tree.flatten(after.server), tree.flatten(before.server))
    assert on_gpu.right.tolist() == scores.right.tolist()
