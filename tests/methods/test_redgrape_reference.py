"""RedGrape against an independent reading of the paper (redgrape_reference.py), number for number, and the proof that
this comparison would notice an error: every deliberate mistake in the reading is told apart from the package."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf

import pytest
import torch
from redgrape_reference import EQUIVALENT, MUTANTS, Data, L, Outcome, Part, Setting, of_class, run
from torch import Tensor, nn

import redgrape as rg
from toys import random

CLASSES, INPUTS, FEATURES, T = 5, 5, 8, 4
SAME, DIFFERENT = 1e-10, 1e-6

# Examples of each class at each client: exactly T, fewer, or none. Class 4 is nobody's; 1 and 3 have a single holder.
COUNTS = [
    [4, 4, 2, 0, 0],
    [1, 0, 4, 3, 0],
    [3, 0, 4, 0, 0],
]


def _client(k: int) -> Data:
    y = torch.tensor([c for c in range(CLASSES) for _ in range(COUNTS[k][c])])
    centres = random(CLASSES, INPUTS, seed=1)
    x = centres[y] + 0.7 * random(len(y), INPUTS, seed=10 + k)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(20 + k))
    return x[order], y[order]


CLIENTS = [_client(k) for k in range(len(COUNTS))]
P0 = {"weight": 0.5 * random(FEATURES, INPUTS, seed=2), "bias": 0.1 * random(FEATURES, seed=3)}
W0 = {"weight": 0.4 * random(CLASSES, FEATURES, seed=4), "bias": 0.1 * random(CLASSES, seed=5)}


def make_net() -> rg.Net:
    net = rg.Net(nn.Sequential(nn.Linear(INPUTS, FEATURES), nn.Tanh()), nn.Linear(FEATURES, CLASSES)).double()
    net.encoder[0].load_state_dict(P0)
    net.classifier.load_state_dict(W0)
    return net


@dataclass(frozen=True)
class Case:
    setting: Setting
    rounds: int = 3
    clients_per_round: int | None = None


BASE = Setting(lam=0.5, threshold=T, lr=0.2, momentum=0.9, epochs=2)
AFTER = replace(BASE, placement="after_step")

CASES = {
    f"{placement} {norm_} momentum {momentum}": Case(replace(BASE, placement=placement, norm=norm_, momentum=momentum))
    for placement, norm_, momentum in product(("in_gradient", "after_step"), ("joint", "per_tensor"), (0.0, 0.9))
} | {
    "copy": Case(replace(BASE, extra_init="copy")),
    "copy after_step": Case(replace(AFTER, extra_init="copy")),
    "default": Case(replace(BASE, extra_init="default")),
    "default after_step": Case(replace(AFTER, extra_init="default")),
    "clip": Case(replace(BASE, clip_norm=0.05)),
    "clip after_step": Case(replace(AFTER, clip_norm=0.05)),
    "clip after_step per_tensor": Case(replace(AFTER, clip_norm=0.05, norm="per_tensor")),
    "clip rarely": Case(replace(BASE, clip_norm=1.0)),
    "weight decay": Case(replace(BASE, weight_decay=0.1)),
    "weight decay after_step": Case(replace(AFTER, weight_decay=0.1)),
    "server_lr": Case(replace(BASE, server_lr=0.5)),
    "one stream": Case(replace(BASE, two_stream=False)),
    "no prototypes": Case(replace(BASE, use_prototypes=False)),
    "no real data": Case(replace(BASE, use_real_data=False)),
    "threshold inf": Case(replace(BASE, threshold=inf)),
    "lambda 0": Case(replace(AFTER, lam=0.0)),
    "unseen mean": Case(replace(BASE, unseen="mean")),
    "unseen mean after_step per_tensor": Case(replace(AFTER, unseen="mean", norm="per_tensor")),
    "drawn at every step": Case(replace(BASE, balanced_draw="step")),
    "count": Case(replace(BASE, prototype_weights="count")),
    "min_count": Case(replace(BASE, min_count=2)),
    "one client absent": Case(BASE, rounds=6, clients_per_round=2),
    "one client absent after_step": Case(replace(AFTER, unseen="mean"), rounds=6, clients_per_round=2),
    "one client present": Case(BASE, rounds=6, clients_per_round=1),
    "one step": Case(replace(BASE, epochs=1)),
    "one round": Case(BASE, rounds=1),
}

# Where each mutant must be noticed; all others in the literal reading.
LITERAL = "in_gradient joint momentum 0.9"
NOTICED = {
    "server_lr ignored": "server_lr",
    "old prototypes dropped": "one client absent",
    "old prototypes unused": "one client absent",
    "min_count ignored": "min_count",
    "ratio after clipping": "clip after_step",
    "ratio with weight decay": "weight decay",
    "clipped before the bracket": "clip",
    "clipped without W_hat": "clip",
    "clipping scales up": "clip rarely",
    "learning rate twice": "after_step joint momentum 0.0",
    "balanced gradient after the step": "after_step joint momentum 0.0",
}


@cache
def trained(name: str) -> rg.Result:
    return train(CASES[name])


def train(case: Case) -> rg.Result:
    s = case.setting
    method = rg.RedGrape(
        lam=s.lam,
        threshold=s.threshold,
        placement=s.placement,
        norm=s.norm,
        extra_init=s.extra_init,
        unseen=s.unseen,
        balanced_draw=s.balanced_draw,
        prototype_weights=s.prototype_weights,
        use_prototypes=s.use_prototypes,
        use_real_data=s.use_real_data,
        two_stream=s.two_stream,
        optimizer="sgd",
        lr=s.lr,
        momentum=s.momentum,
        weight_decay=s.weight_decay,
        batch_size=64,
        epochs=s.epochs,
        clip_norm=s.clip_norm,
        server_lr=s.server_lr,
    )
    clients = [rg.Examples(x, y) for x, y in CLIENTS]
    federation = rg.Federation(clients=clients, test=clients[0], num_classes=CLASSES)
    return rg.train(
        method,
        federation,
        build=make_net,
        rounds=case.rounds,
        clients_per_round=case.clients_per_round,
        exchange=rg.Exchange(min_count=s.min_count),
    )


def sampled(name: str) -> list[list[int]]:
    return [list(entry["clients"]) for entry in trained(name).history]


@cache
def reference(name: str, mutate: str | None = None) -> dict[str, Tensor]:
    W_hat = random_extra() if CASES[name].setting.extra_init == "default" else None
    return flat(run(P0, W0, CLIENTS, sampled(name), CASES[name].setting, mutate, W_hat))


@cache
def random_extra() -> Part:
    """W_hat as the package draws it: steps this short leave every number where it is."""
    still = replace(BASE, extra_init="default", lr=1e-300)
    return train(Case(still, rounds=1)).server["W_hat"]


def flat(outcome: Outcome) -> dict[str, Tensor]:
    """The reference's outcome under the package's names; a class without a prototype has zeros."""
    model, table = outcome.model, outcome.prototypes
    tensors = {f"model.encoder.0.{name}": value for name, value in model["P"].items()}
    tensors |= {f"model.classifier.{name}": value for name, value in model["W"].items()}
    tensors |= {f"W_hat.{name}": value for name, value in model.get("W_hat", {}).items()}
    for name, value in W0.items():
        rows = [table[c][name] if c in table else torch.zeros_like(value) for c in range(CLASSES)]
        tensors[f"prototypes.{name}"] = torch.stack(rows)
    tensors["seen"] = torch.tensor([c in table for c in range(CLASSES)])
    return tensors


def package(name: str) -> dict[str, Tensor]:
    server = trained(name).server
    groups = ["model", "prototypes"] + (["W_hat"] if CASES[name].setting.two_stream else [])
    tensors = {f"{group}.{key}": value for group in groups for key, value in server[group].items()}
    return tensors | {"seen": server["seen"]}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of any number; infinite where one is not finite or the classes seen differ."""
    assert a.keys() == b.keys()
    assert all(a[name].shape == b[name].shape for name in a)
    if not torch.equal(a["seen"], b["seen"]):
        return inf
    differences = torch.stack([(a[name] - b[name]).abs().max() for name in a if name != "seen"])
    return float(differences.nan_to_num(nan=inf).max())


@pytest.mark.parametrize("name", CASES)
def test_the_package_agrees_with_the_paper(name: str) -> None:
    ours, theirs = package(name), reference(name)
    assert all(value.dtype == torch.float64 for key, value in ours.items() if key != "seen")
    assert ours["seen"].dtype == torch.bool
    assert len(sampled(name)) == CASES[name].rounds
    assert distance(ours, theirs) < SAME
    assert distance(theirs, {key: value if key == "seen" else 0 * value for key, value in theirs.items()}) > 0.1


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_error_would_be_noticed(mutant: str) -> None:
    name = NOTICED.get(mutant, LITERAL)
    assert distance(reference(name, mutant), reference(name)) > DIFFERENT
    assert distance(reference(name, mutant), package(name)) > DIFFERENT


@pytest.mark.parametrize("mutant", EQUIVALENT)
@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_noticed_is_no_error(mutant: str, name: str) -> None:
    assert distance(reference(name, mutant), reference(name)) < SAME, EQUIVALENT[mutant]


def test_errors_that_only_some_settings_forgive() -> None:
    """Without momentum and clipping both placements are the same step; without prototypes every real class has the
    same weight, T, a common factor; and a threshold that nobody reaches leaves prototypes only."""
    for norm_ in ("joint", "per_tensor"):
        same = f"in_gradient {norm_} momentum 0.0", f"after_step {norm_} momentum 0.0"
        assert distance(package(same[0]), package(same[1])) < SAME
        assert distance(reference(same[0], "placement swapped"), reference(same[0])) < SAME
    summed = "real gradient summed over samples"
    assert distance(reference("no prototypes", summed), reference("no prototypes")) < SAME
    assert distance(package("no real data"), package("threshold inf")) < SAME


def test_the_extra_head_starts_on_its_own() -> None:
    """The default W_hat is drawn like a linear layer of PyTorch: uniform within 1/sqrt(d), and neither W nor zeros."""
    for key, value in random_extra().items():
        assert value.shape == W0[key].shape
        assert 0.5 < float(value.abs().max()) * FEATURES**0.5 <= 1
        assert float((value - W0[key]).abs().min()) > 0


def test_a_holder_drops_out() -> None:
    """The case of partial participation has what it is there for: a class seen before whose holders are all absent."""
    before: set[int] = set()
    kept: set[int] = set()
    for chosen in sampled("one client absent")[:-1]:
        held = {c for k in chosen for c in range(CLASSES) if COUNTS[k][c]}
        kept |= before - held
        before |= held
    assert kept


def test_prototypes_are_slopes_of_the_loss() -> None:
    """Class 3 has one holder: after one round its prototype is the slope of that client's loss at the first model."""
    data, step = of_class(CLIENTS[1], 3), 1e-6
    for key, tensor in W0.items():
        for index in product(*(range(size) for size in tensor.shape)):
            slope = (_loss_near(key, index, step, data) - _loss_near(key, index, -step, data)) / (2 * step)
            for tensors in (package("one round"), reference("one round")):
                assert abs(float(tensors[f"prototypes.{key}"][3][index]) - slope) < 1e-8


def _loss_near(key: str, index: tuple[int, ...], step: float, data: Data) -> float:
    """L(P, W; data) at the first model with one number of W moved."""
    W = {name: value.clone() for name, value in W0.items()}
    W[key][index] += step
    return float(L(P0, [W], data))


def test_without_re_balancing_the_heads_move_together() -> None:
    """W and W_hat have the same instance gradient; only the re-balancing tells them apart."""
    for tensors in (package("lambda 0"), reference("lambda 0")):
        for key, start in W0.items():
            moved = tensors[f"model.classifier.{key}"] - start
            assert float(moved.abs().max()) > 0.01
            assert float((moved - tensors[f"W_hat.{key}"]).abs().max()) < 1e-12
