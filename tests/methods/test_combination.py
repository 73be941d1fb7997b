"""Methods combined by name."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import pytest
import torch

import redgrape as rg
from redgrape import methods, nets, testing, tree
from redgrape.deploy.protocol import own_parts
from redgrape.errors import ConfigError
from redgrape.learning import classifier
from redgrape.method import Method
from redgrape.methods._combination import CHOICES
from toys import VECTOR, federation, server_site

INGREDIENTS = [name for name in methods.names() if methods.load(name).ingredient]
WHOLE = ["redgrape", "vine"]
SHORT: dict[str, Any] = {"epochs": 2, "batch_size": 3, "lr": 0.1}


def net() -> rg.Net:
    return nets.build("linear", VECTOR, 3, 0)


def final(name: str, **hyper: Any) -> Any:
    data = federation([5, 3, 1], [0, 4, 0], [2, 1, 3], [1, 0, 1])
    method = methods.load(name)(**SHORT, **hyper)
    return rg.train(method, data, net, rounds=3, clients_per_round=3).server


def same(one: Any, other: Any) -> None:
    one, other = tree.flatten(one), tree.flatten(other)
    assert one.keys() == other.keys()
    assert all(torch.equal(t, other[name]) for name, t in one.items())


@pytest.mark.parametrize(
    "name",
    [
        "redgrape+balanced_softmax",
        "vine+scaffold",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("vine+balanced_softmax", "vine+fedprox")),
    ],
)
@pytest.mark.parametrize("clause", testing.CHECKS)
def test_combinations_keep_the_contract(name: str, clause: str) -> None:
    """By default a loss with one whole method, a regulariser with client states with the other."""
    testing.CHECKS[clause](methods.load(name)())


@pytest.mark.parametrize("whole", WHOLE)
def test_an_ingredient_that_does_nothing_changes_nothing(whole: str) -> None:
    same(final(f"{whole}+fedprox", mu=0.0)["model"], final(whole)["model"])
    same(final(f"{whole}+fed_focal", gamma=0.0)["W_hat"], final(whole)["W_hat"])


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_without_its_pull_and_second_stream_the_ingredient_is_left(whole: str, ingredient: str) -> None:
    plain = final(f"{whole}+{ingredient}", lam=0.0, two_stream=False)
    same(plain["model"], final(ingredient)["model"])
    assert not torch.equal(
        final(f"{whole}+{ingredient}")["model"]["classifier.weight"], plain["model"]["classifier.weight"]
    )


@pytest.mark.parametrize("whole", WHOLE)
def test_a_head_changes_what_is_deployed_and_not_the_training(whole: str) -> None:
    """The rows of the deployed classifier have length 1; with tau = 0 only the bias is dropped."""
    trained, scaled = final(whole), final(f"{whole}+tau_norm")
    W = trained["model"]["classifier.weight"]
    torch.testing.assert_close(scaled["model"]["classifier.weight"], W / W.norm(dim=1, keepdim=True))
    same(scaled["W_hat"], trained["W_hat"])
    assert torch.equal(scaled["beneath"]["weight"], W)
    assert torch.equal(final(f"{whole}+tau_norm", tau=0.0)["model"]["classifier.weight"], W)


@pytest.mark.parametrize("head", ["tau_norm", "fednpc"])
@pytest.mark.parametrize("whole", ["fedloge", "rucr"])
def test_a_head_on_a_method_that_deploys_a_head_of_its_own(whole: str, head: str) -> None:
    """What the method trains with is its own classifier, not what it deploys."""
    same(final(f"{whole}+{head}")["trained"], final(whole)["trained"])
    same(final(f"{whole}+{head}")["beneath"], classifier.of(final(whole)["model"]))


def test_methods_whose_helpers_had_the_same_names_can_be_combined() -> None:
    combined, plain = final("lws+logit_adjustment", stage="post_hoc"), final("lws")
    assert torch.equal(combined["scales"], plain["scales"])
    assert not torch.equal(combined["model"]["classifier.bias"], plain["model"]["classifier.bias"])


def test_an_estimated_prior_is_refused_in_a_combination() -> None:
    """Two streams move logits twice as far as the estimate assumes, a regulariser or a sampler changes the steps."""
    for name in ("redgrape+balanced_softmax", "balanced_softmax+fedprox", "vine+logit_adjustment"):
        with pytest.raises(ConfigError, match=r"prior=estimated needs sgd .* no combination"):
            methods.load(name)(prior="estimated")


def test_order_has_no_meaning() -> None:
    same(final("vine+fedprox+balanced_softmax"), final("balanced_softmax+vine+fedprox"))


def test_combined_ingredients_without_a_whole_method_are_those_of_fedavg() -> None:
    same(final("fedprox+balanced_softmax", mu=0.0)["model"], final("balanced_softmax")["model"])


def test_a_combination_reaches_another_process() -> None:
    method = methods.load("vine+fedprox")(mu=0.3, lam=0.2)
    again = pickle.loads(pickle.dumps(method))  # our own bytes
    assert (type(again).__name__, again.mu, again.lam) == ("vine+fedprox", 0.3, 0.2)


def test_defaults_are_those_of_the_part_that_sets_them() -> None:
    assert methods.load("vine+scaffold")().momentum == 0.0
    assert methods.load("vine+balanced_softmax")().momentum == methods.load("vine")().momentum


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("balanced_softmax+fed_focal", "'balanced_softmax' and 'fed_focal' are both a loss; choose one"),
        ("fedprox+scaffold", "both a regulariser"),
        ("vine+redgrape", "'redgrape' and 'vine' are both whole methods"),
        ("feddyn+fedprox", "'feddyn' cannot be combined with 'fedprox': it has a regulariser of its own"),
        ("ratio_loss+fedlc", "'ratio_loss' cannot be combined with 'fedlc': it has a loss of its own"),
        ("crt+over_sampling", "'crt' cannot be combined with 'over_sampling': it has a sampler of its own"),
        ("tau_norm+fednpc", "'fednpc' and 'tau_norm' are both a head"),
        ("lda+fedprox", "'lda' cannot be combined with 'fedprox': its training takes no regulariser"),
        ("lda+coverage", "'lda' cannot be combined with 'coverage': its training takes no client weights"),
        ("vine+nothing", "unknown method 'nothing'"),
        ("vine+", "unknown method ''"),
        ("vine+mine.py", "let its class inherit from that of 'vine' instead"),
        ("mine.py+fedprox", "let its class inherit from that of 'fedprox' instead"),
        ("vine+vine", "'vine' is named twice"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("+", r"\+")):
        methods.load(name)


def accepted() -> Iterator[tuple[str, str]]:
    for pair in itertools.product([name for name in methods.names() if name not in INGREDIENTS], INGREDIENTS):
        with suppress(ConfigError):
            methods.load("+".join(pair))
            yield pair


@pytest.mark.parametrize(("one", "other"), list(accepted()))
def test_no_two_parts_write_the_same_name_of_the_state(one: str, other: str) -> None:
    """An ingredient adds to the state of the next class, and would silently replace what has its name."""

    def own(method: Method) -> set[str]:
        model = {name: t.detach() for name, t in net().state_dict().items()}
        survey = {"class_counts": torch.ones(3, dtype=torch.int64), "holders": torch.ones(3, dtype=torch.int64)}
        auxiliary = rg.Examples(torch.zeros(3, *VECTOR), torch.arange(3))
        server = method.init_server(model, server_site(3, 3, survey=survey, auxiliary=auxiliary))
        return {*server, *method.parts(model, server_site(3, 3))} - {*model, "model", "delta", "count", "loss"}

    assert not own(methods.load(one)()) & own(methods.load(other)())


def test_sites_take_combinations_of_known_methods_only() -> None:
    values = {"method": {"name": "vine+fedprox"}}
    assert own_parts.here(values, {}, cast(Any, None)) == values  # no file of the site is needed
    assert not any(methods.is_known(name) for name in ("vine+mine.py", "vine+", "", None, "vine+ fedprox"))


def test_every_ingredient_makes_a_known_choice() -> None:
    assert {methods.load(name).ingredient for name in INGREDIENTS} <= CHOICES.keys()
