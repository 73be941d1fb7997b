"""RUCR: where it is FedAvg, its contrast and class means by hand, and plain readings of both stages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import redgrape as rg
import toys
from redgrape import tree
from redgrape.methods.fedavg import FedAvg
from redgrape.methods.rucr import RUCR, contrast
from toys import close, net

C = 4
SKEWED = [[9, 4, 1, 0], [0, 7, 3, 0], [4, 0, 0, 0]]  # nobody holds class 3
LOCAL: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 4}


def after(method: rg.Method, rounds: int = 2, data: rg.Federation | None = None) -> list[Any]:
    with rg.Training(method, data or toys.federation(*SKEWED), net, rounds=rounds) as training:
        return [step.state.server for step in training.steps()]


def loaded(model: dict[str, Tensor]) -> rg.Net:
    made = net()
    made.load_state_dict(model)
    return made


def test_without_its_two_parts_it_is_fedavg() -> None:
    close(after(RUCR(contrast=0.0, head_share=0.0, **LOCAL))[-1]["model"], after(FedAvg(**LOCAL))[-1]["model"])


def test_the_first_round_has_no_means_and_is_fedavg() -> None:
    ours, plain = (after(method, rounds=3) for method in (RUCR(head_share=0.0, **LOCAL), FedAvg(**LOCAL)))
    close(ours[0]["model"], plain[0]["model"])
    assert not torch.allclose(ours[1]["model"]["encoder.0.weight"], plain[1]["model"]["encoder.0.weight"])


def test_training_does_not_see_the_retrained_classifier() -> None:
    without, with_it = (after(RUCR(head_share=share, virtual=5, **LOCAL), 4)[-1] for share in (0.0, 0.5))
    assert tree.equal(without["trained"], with_it["trained"])
    for name, t in without["model"].items():
        assert torch.equal(t, with_it["model"][name]) == name.startswith("encoder.")


def test_contrast_by_hand() -> None:
    """h along the first of two means, T = 1/2, a third class that the client lacks: v = (2 + log pi_0, 0, 0)."""
    h, unit = torch.tensor([[5.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    log_pi = torch.tensor([0.25, 0.5, 0.25]).log()
    own = 0.25 * math.exp(2)
    found = contrast(h, torch.tensor([0]), unit, 0.5, log_pi)
    assert float(found) == pytest.approx(-math.log(own / (own + 2)), rel=1e-6)
    found = contrast(h, torch.tensor([1]), unit, 0.5, log_pi)
    assert float(found) == pytest.approx(-math.log(0.5 / (0.5 + math.exp(2) + 1)), rel=1e-6)


def test_means_of_classes_that_the_client_lacks_do_not_count() -> None:
    site = rg.ClientSite(net, 1, C, 0, 1, 2, torch.device("cpu"), 0, toys.examples([5, 3, 0, 0]))
    start, counts = dict(net().state_dict()), torch.tensor([9, 5, 3, 1])

    def moved(mean: Tensor) -> Any:
        broadcast = {"model": start, "means": {"mean": mean, "unit": mean}, "class_counts": counts}
        return RUCR(**LOCAL).client_update(broadcast, {}, site)[0]["delta"]

    means, lacking, held = toys.random(C, 6), toys.random(C, 6), toys.random(C, 6)
    lacking[2:], held[:2], lacking[:2], held[2:] = -means[2:], -means[:2], means[:2], means[2:]
    assert tree.equal(moved(means), moved(lacking)) and not tree.equal(moved(means), moved(held))


def test_the_contrast_knows_how_frequent_a_class_is_over_all_clients() -> None:
    """The client's loss changes with the summed class counts, which are not its own, and not with their scale."""
    site = rg.ClientSite(net, 1, C, 0, 1, 2, torch.device("cpu"), 0, toys.examples([5, 3, 0, 0]))
    start, means = dict(net().state_dict()), toys.random(C, 6)

    def moved(*counts: int) -> Any:
        broadcast = {"model": start, "means": {"mean": means, "unit": means}, "class_counts": torch.tensor(counts)}
        return RUCR(**LOCAL).client_update(broadcast, {}, site)[0]["delta"]

    close(moved(9, 5, 3, 1), moved(18, 10, 6, 2))
    assert not torch.allclose(moved(9, 5, 3, 1)["encoder.0.weight"], moved(5, 9, 3, 1)["encoder.0.weight"])


def test_the_means_are_those_of_all_examples_at_the_received_model() -> None:
    """By counts, the mean of the clients' means is the mean of all; the unit vectors are averaged by counts too."""
    server = after(RUCR(**LOCAL), rounds=1)[0]
    parts = [toys.examples(held, k) for k, held in enumerate(SKEWED)]
    h = [net().encoder(data.inputs(torch.arange(len(data)), torch.float64)).detach() for data in parts]
    of_0 = [f[data.labels == 0] for f, data in zip(h, parts, strict=True)]
    torch.testing.assert_close(server["means"]["mean"][0], torch.cat(of_0).mean(dim=0))
    units = [F.normalize(f.mean(dim=0), dim=0) for f in (of_0[0], of_0[2])]
    torch.testing.assert_close(server["means"]["unit"][0], (9 * units[0] + 4 * units[1]) / 13)
    assert not server["means"]["mean"][3].any() and not server["means"]["unit"][3].any()


def test_it_is_the_sum_of_its_terms() -> None:
    """The second round of a single client that lacks class 3: two full-batch steps towards the means of the first."""
    data, lr = toys.examples([5, 3, 2, 0]), 0.1
    x, y = data.inputs(torch.arange(10), torch.float64), data.labels
    method = RUCR(contrast=0.6, temperature=0.7, head_share=0.0, lr=lr, momentum=0.0, epochs=2, batch_size=10)
    first, second = after(method, data=rg.Federation([data], data, C))
    start = net().encoder(x).detach()
    unit = F.normalize(torch.stack([start[y == c].mean(dim=0) for c in range(3)]), dim=1)
    pi, plain = torch.tensor([0.5, 0.3, 0.2]).double(), loaded(first["model"])
    for _ in range(2):
        h = plain.encoder(x)
        v = torch.cat([F.cosine_similarity(h[:, None], unit, dim=2) / 0.7, torch.zeros(10, 1)], dim=1).exp()
        own = pi[y] * v[torch.arange(10), y]
        contrasted = -(own / (v.sum(dim=1) - v[torch.arange(10), y] + own)).log().mean()
        total = F.cross_entropy(plain.classifier(h), y) + 0.6 * contrasted
        for p, g in zip(plain.parameters(), torch.autograd.grad(total, list(plain.parameters())), strict=True):
            p.data -= lr * g
    close({name: p.detach() for name, p in plain.named_parameters()}, second["model"])


def test_mixtures_of_means_alone_train_as_by_autograd() -> None:
    """With lambda = 1 the virtual features are the means of the first round. Class 3 has none: its row stays."""
    data = toys.examples([5, 3, 2, 0])
    method = RUCR(low=1.0, high=1.0, head_share=0.5, virtual=2, retrain_epochs=3, retrain_lr=0.5, **LOCAL)
    first, second = after(method, data=rg.Federation([data], data, C))
    head, u = loaded({**second["model"], **renamed(second["trained"])}).classifier, first["means"]["unit"][:3]
    for _ in range(3):
        loss = F.cross_entropy(head(u)[:, :3], torch.arange(3))
        for p, g in zip(head.parameters(), torch.autograd.grad(loss, list(head.parameters())), strict=True):
            p.data -= 0.5 * g
    for name, p in head.named_parameters():
        torch.testing.assert_close(second["model"][f"classifier.{name}"], p.detach())
    assert torch.equal(second["model"]["classifier.weight"][3], second["trained"]["weight"][3])


def test_mixtures_are_of_means_and_own_features() -> None:
    """With the draws of the client's key, and the features of the received model; one step on all mixtures."""
    data = toys.examples([5, 3, 2, 0])
    method = RUCR(head_share=0.5, virtual=4, retrain_epochs=1, retrain_lr=0.5, **LOCAL)
    first, second = after(method, data=rg.Federation([data], data, C))
    site = rg.ClientSite(net, 1, C, 0, 2, 2, torch.device("cpu"), 0, data)
    random, y = site.generator("re-training"), torch.arange(3).repeat_interleave(4)
    lam = 0.35 + 0.6 * torch.rand(12, 1, generator=random, dtype=torch.float64)
    rows = torch.randint(10, (12,), generator=random)
    own = loaded(first["model"]).encoder(data.inputs(rows, torch.float64)).detach()
    h = lam * first["means"]["unit"][y] + (1 - lam) * own / own.norm(dim=1, keepdim=True)
    head = loaded({**second["model"], **renamed(second["trained"])}).classifier
    gradients = torch.autograd.grad(F.cross_entropy(head(h)[:, :3], y), list(head.parameters()))
    for (name, p), g in zip(head.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(second["model"][f"classifier.{name}"], p.detach() - 0.5 * g)


def renamed(head: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"classifier.{name}": t for name, t in head.items()}
