"""cRT and LWS: two stages of training, and what is deployed after each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import redgrape as rg
from redgrape import methods, testing
from redgrape.learning.decoupling import in_second_stage
from redgrape.method import Method
from redgrape.methods.crt import CRT
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.lws import LWS
from redgrape.testing.cases import Case, batchnorm_net, run
from toys import federation

COUNTS = [6, 3, 0], [0, 4, 2], [3, 3, 3]
HEAD = ("classifier.weight", "classifier.bias")


def build() -> rg.Net:
    return rg.nets.build("mlp", (5,), 3, 0).double()


def servers(method: Method, rounds: int = 5, counts: Any = COUNTS) -> list[Any]:
    with rg.Training(method, federation(*counts), build, rounds=rounds) as training:
        return [step.state.server for step in training.steps()]


def equal(one: Any, other: Any, names: Any = None) -> bool:
    return all(torch.equal(one[name], other[name]) for name in names or one)


@pytest.mark.parametrize(
    ("share", "rounds", "second"),
    [(0.1, 30, 3), (0.1, 4, 1), (0.0, 9, 0), (0.9, 2, 1), (0.5, 1, 0), (0.3, 10, 3), (0.99, 10, 9)],
)
def test_how_many_rounds_are_of_the_second_stage(share: float, rounds: int, second: int) -> None:
    assert sum(in_second_stage(share, t, rounds) for t in range(1, rounds + 1)) == second
    assert not in_second_stage(share, 1, rounds)


@pytest.mark.parametrize("kind", [CRT, LWS])
def test_the_first_stage_is_fedavg_bit_for_bit(kind: type[FedAvg]) -> None:
    plain = servers(FedAvg())
    for share, same in ((0.0, 5), (0.4, 3)):
        found = servers(kind(head_share=share))  # type: ignore[call-arg]
        assert all(equal(plain[t]["model"], found[t]["model"]) for t in range(same))
        assert same == 5 or not equal(plain[same]["model"], found[same]["model"])


@pytest.mark.parametrize("name", ["crt", "lws"])
def test_the_encoder_and_its_statistics_stay_in_the_second_stage(name: str) -> None:
    states = [
        s.server["model"] for s in run(methods.load(name)(head_share=0.4, epochs=1, batch_size=4), Case(rounds=5))
    ]
    encoder = [name for name in batchnorm_net().state_dict() if name.startswith("encoder.")]
    assert equal(states[2], states[3], encoder) and equal(states[3], states[4], encoder)
    assert not equal(states[1], states[2], ["encoder.2.running_mean"])
    assert not torch.equal(states[3]["classifier.weight"], states[4]["classifier.weight"])


def test_crt_starts_anew_once_and_deploys_no_classifier_that_was_just_drawn() -> None:
    method = CRT(head_share=0.4, lr=1e-9)  # which moves next to nothing
    found = servers(method)
    first, drawn = build().state_dict(), found[0]["new_classifier"]
    assert [bool(server["starts_anew"]) for server in found] == [False, False, True, False, False]
    torch.testing.assert_close(found[2]["model"]["classifier.weight"], first["classifier.weight"])
    for server in found[3:]:
        torch.testing.assert_close(server["model"]["classifier.weight"], drawn["weight"])
        torch.testing.assert_close(server["model"]["classifier.bias"], drawn["bias"])
    assert not torch.allclose(drawn["weight"], first["classifier.weight"])


@pytest.mark.parametrize("kind", [CRT, LWS])
def test_a_step_of_the_second_stage_is_a_plain_reading_of_its_formula(kind: Any) -> None:
    """One client with two, one and three examples: a pass has two rows of each class."""
    counts, options = [[2, 1, 3]], {"momentum": 0.0, "lr": 0.5, "epochs": 1, "batch_size": 6}
    before, after = servers(kind(head_share=0.5, **options), 2, counts)
    net = build()
    net.load_state_dict(before["model"])
    if kind is CRT:
        net.classifier.load_state_dict(before["new_classifier"])
    part = federation(*counts).client(0)
    site = rg.ClientSite(build, 1, 3, 0, 2, 2, torch.device("cpu"), 0, part)
    rows = kind(head_share=0.5).order(site, site.generator("batches"))
    assert torch.bincount(part.labels[rows]).tolist() == [2, 2, 2]
    x, y = part.inputs(rows, torch.float64), part.labels[rows]
    scales = torch.ones(3, dtype=torch.float64, requires_grad=True)
    loss: Any = sum(F.cross_entropy(scales * net(x[y == c]), y[y == c]) for c in range(3)) / 3
    loss.backward()
    if kind is LWS:
        assert scales.grad is not None
        s = 1 - 0.5 * scales.grad
        torch.testing.assert_close(after["scales"], s)
        wanted = {"classifier.weight": s[:, None] * net.classifier.weight, "classifier.bias": s * net.classifier.bias}
    else:
        wanted = {f"classifier.{n}": p - 0.5 * p.grad for n, p in net.classifier.named_parameters()}  # type: ignore[operator]
    for name in HEAD:
        torch.testing.assert_close(after["model"][name], wanted[name].detach())


def test_lws_goes_on_with_the_rows_and_not_with_what_is_deployed() -> None:
    """Two rounds of scales on the same rows: what is deployed is their product, once."""
    found = servers(LWS(head_share=0.4, lr=0.1))
    for server in found[2:]:
        assert equal(server["rows"], found[2]["model"], HEAD)
        torch.testing.assert_close(
            server["model"]["classifier.weight"], server["scales"][:, None] * server["rows"]["classifier.weight"]
        )
    assert not torch.equal(found[3]["scales"], found[4]["scales"])
    assert torch.equal(found[2]["scales"], torch.ones(3).double())


@pytest.mark.parametrize("clause", ["nothing_that_was_passed_is_modified", "sums_are_enough_where_it_says_so"])
@pytest.mark.parametrize("name", ["crt+balanced_softmax+fedprox", "lws+coverage+balanced_softmax"])
def test_ingredients_of_both_stages_keep_the_contract(name: str, clause: str) -> None:
    testing.CHECKS[clause](methods.load(name)())
