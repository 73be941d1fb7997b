"""Client weights by class coverage, and how the exchange treats weights that clients send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import redgrape as rg
from redgrape import methods, nets, testing, tree
from redgrape.engines import ClientHalf
from redgrape.engines.in_process import InProcess
from redgrape.errors import ConfigError, TooFewClients
from redgrape.exchange import Exchange, Weight
from redgrape.exchange.checks import Inspection, UpdateRejected
from redgrape.method import Method
from redgrape.methods.coverage import Coverage, class_mass
from redgrape.methods.fedavg import FedAvg
from redgrape.privacy.disclosure import disclosures
from redgrape.rounds import PLAIN, exchanged
from redgrape.testing.engines import Spoiling
from redgrape.training import Training
from toys import VECTOR, Summing, federation, server_site

COUNTS = [5, 3, 1], [8, 0, 0], [2, 1, 3], [1, 0, 1]


def build() -> rg.Net:
    return nets.build("linear", VECTOR, 3, 0)


def states(
    method: Method, engine: Callable[[ClientHalf], Any] = InProcess, exchange: Exchange = PLAIN, rounds: int = 3
) -> list[Any]:
    data = federation(*COUNTS)
    with Training(method, data, build, rounds=rounds, engine=engine, exchange=exchange) as training:
        return [step.state for step in training.steps()]


def model(method: Method, **more: Any) -> Any:
    return states(method, **more)[-1].server["model"]


def updates(method: Method) -> dict[int, Any]:
    """Each client's first update."""
    found: dict[int, Any] = {}

    class Keeping(InProcess):
        def run_clients(self, *args: Any) -> Iterator[Any]:
            for k, answer in super().run_clients(*args):
                found[k] = answer.update
                yield k, answer

    states(method, Keeping, rounds=1)
    return found


def test_weights_worked_out_by_hand() -> None:
    """N = 16, 4, 5 of 25 examples. beta = 1: every class has 25 / 3, so an example of it 25 / (3 N_c). beta = 1/2: the
    sum of the roots is 4 + 2 + sqrt 5."""
    even = class_mass(torch.tensor([16, 4, 5, 0]), 1.0)
    assert even.tolist() == pytest.approx([25 / 48, 25 / 12, 5 / 3, 0])
    half = class_mass(torch.tensor([16, 4, 5, 0]), 0.5)
    scale = 25 / (6 + 5**0.5)
    assert half.tolist() == pytest.approx([scale / 4, scale / 2, scale / 5**0.5, 0])
    assert class_mass(torch.tensor([16, 4, 5, 0]), 0.0).tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_weights_of_all_clients_add_up_to_the_examples(beta: float) -> None:
    sent = updates(Coverage(coverage=beta, most_weight=1000.0))
    assert sum(float(update["weight"]) for update in sent.values()) == pytest.approx(25)
    mass = class_mass(torch.tensor([16, 4, 5]), beta)
    for k, counts in enumerate(COUNTS):
        assert float(sent[k]["weight"]) == pytest.approx(float((torch.tensor(counts) * mass).sum()))


def test_a_weight_is_at_most_kappa_for_each_example() -> None:
    sent = updates(Coverage(coverage=1.0, most_weight=1.1))
    assert float(sent[2]["weight"]) == pytest.approx(1.1 * 6)  # 2 x 25/48 + 25/12 + 5 would be 8.1
    assert float(sent[1]["weight"]) == pytest.approx(8 * 25 / 48)


def test_without_coverage_it_is_fedavg_bit_for_bit() -> None:
    for engine in (InProcess, Summing):
        plain, none = model(FedAvg(), engine=engine), model(Coverage(coverage=0.0), engine=engine)
        assert all(torch.equal(t, none[name]) for name, t in plain.items())


@pytest.mark.parametrize("whole", ["vine", "redgrape"])
def test_without_coverage_a_combination_is_the_whole_method(whole: str) -> None:
    plain, none = model(methods.load(whole)()), model(methods.load(f"{whole}+coverage")(coverage=0.0))
    assert all(torch.equal(t, none[name]) for name, t in plain.items())
    assert not torch.equal(
        plain["classifier.bias"], model(methods.load(f"{whole}+coverage")(coverage=1.0))["classifier.bias"]
    )


def test_the_server_steps_along_the_weighted_mean() -> None:
    method = Coverage(coverage=1.0)
    sent = updates(method)
    [state] = states(method, rounds=1)
    start = build().state_dict()
    total = sum(float(u["weight"]) for u in sent.values())
    for name, t in start.items():
        step = sum(float(u["weight"]) * u["delta"][name].double() for u in sent.values()) / total
        torch.testing.assert_close(state.server["model"][name], (t + step.float()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["coverage", "vine+coverage"])
def test_a_secure_sum_gives_the_same_mean(name: str) -> None:
    method = methods.load(name)(coverage=1.0, **({"memory": False} if "vine" in name else {}))
    plain, summed = (states(method, engine) for engine in (InProcess, Summing))
    for one, other in zip(plain, summed, strict=True):
        theirs = tree.flatten(other.server)
        for tensor, t in tree.flatten(one.server).items():
            torch.testing.assert_close(theirs[tensor], t, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"rule": "median"}, False),
        ({"rule": "trimmed_mean"}, False),
        ({"rule": "norm_clipping"}, True),
    ],
    ids=str,
)
def test_settings_that_take_clients_alike_do_so_with_sent_weights(settings: dict[str, Any], kept: bool) -> None:
    plain, weighted = (
        model(Coverage(coverage=beta), exchange=Exchange(**settings))["classifier.bias"] for beta in (0.0, 1.0)
    )
    assert torch.equal(plain, weighted) != kept


def test_a_clip_that_would_weigh_clients_alike_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weighs clients in its own way, and exchange\.clip weighs all alike"):
        model(Coverage(), exchange=Exchange(clip=1.0))


@pytest.mark.parametrize(
    ("claimed", "words"),
    [
        (30.1, "'weight' is 30.1; with 6 examples it must be above 0 and at most 30"),
        (0.0, "'weight' is 0; with 6"),
        (-1.0, "'weight' is -1; with 6"),
        (float("nan"), "'weight' is not finite"),
    ],
)
def test_a_lying_weight_is_refused(claimed: float, words: str) -> None:
    method = Coverage()
    update = updates(method)[2]
    site = server_site(4, 3)
    inspection = Inspection(method.parts(build().state_dict(), site), build().state_dict(), 3)
    inspection.lengths(update)
    inspection.lengths({**update, "weight": torch.tensor(30.0, dtype=torch.float64)})  # a lie within the bound
    with pytest.raises(UpdateRejected, match=words):
        inspection.lengths({**update, "weight": torch.tensor(claimed, dtype=torch.float64)})


def test_a_weight_in_another_precision_is_refused() -> None:
    update = updates(Coverage())[2]
    inspection = Inspection(Coverage().parts(build().state_dict(), server_site(4, 3)), build().state_dict(), 3)
    with pytest.raises(UpdateRejected, match=r"'weight' is torch.float32; it must be torch.float64"):
        inspection.lengths({**update, "weight": update["weight"].float()})


def test_a_large_but_honest_weight_is_no_long_update() -> None:
    """Weights grow with the data; the model's length is no measure of them."""
    update = updates(Coverage())[2]
    inspection = Inspection(Coverage().parts(build().state_dict(), server_site(4, 3)), build().state_dict(), 3)
    many = {"count": torch.tensor(10**6), "weight": torch.tensor(3e6, dtype=torch.float64)}
    assert "weight" not in inspection.lengths({**update, **many})


def test_a_client_with_a_lying_weight_is_left_out_of_its_round() -> None:
    def lie(flat: dict[str, Any]) -> Any:
        return tree.unflatten({**flat, "weight": torch.tensor(1e6, dtype=torch.float64)})

    [state] = states(Coverage(), lambda half: Spoiling(half, lie), rounds=1)
    assert state.record["answered"] == [0, 2, 3]
    assert "'weight' is 1e+06; with 8 examples" in state.record["rejected"]["1"]


@pytest.mark.parametrize("total", [0.0, -3.0, 126.0])
def test_a_sum_of_weights_that_cannot_be_is_not_applied(total: float) -> None:
    def spoil(found: dict[str, Any]) -> None:
        found["weight"] = torch.tensor(total, dtype=torch.float64)

    with pytest.raises(TooFewClients, match="with 25 examples it must be above 0 and at most 125"):
        states(Coverage(), lambda half: Summing(half, spoil), rounds=1)


def test_a_sum_in_which_all_claim_the_most_is_applied() -> None:
    """The mean count is rounded down, and must not make honest weights too large."""

    def spoil(found: dict[str, Any]) -> None:
        found["weight"] = torch.tensor(125.0, dtype=torch.float64)

    assert states(Coverage(), lambda half: Summing(half, spoil), rounds=1)


@pytest.mark.parametrize("name", ["coverage+scaffold", "feddyn+coverage", "climb+coverage"])
def test_methods_with_weights_of_their_own_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="does not weigh them by their examples; leave 'coverage' out"):
        exchanged(methods.load(name)(), server_site(4, 3))


@pytest.mark.parametrize("clause", testing.CHECKS)
def test_vine_with_coverage_keeps_the_contract(clause: str) -> None:
    testing.CHECKS[clause](methods.load("vine+coverage+over_sampling+balanced_softmax")())


def test_the_weight_is_told_among_what_a_client_sends() -> None:
    parts, survey = exchanged(Coverage(), server_site(4, 3))
    assert isinstance(parts["weight"], Weight)
    assert "its weight in the averages" in disclosures(PLAIN, parts, survey, "", 3)["beyond_averaging"]
