"""Nets copied from a template against nets built anew."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from redgrape import nets
from redgrape.nets import cloning
from redgrape.nets.cloning import new_net
from redgrape.nets.net import Net

IMAGE = (3, 8, 8)


class Odd(nn.Module):
    """State of every kind that a module can have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.linear.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.seen: list[int] = [1]
        self.again = [self.linear]  # a module in a list is no child, but must be the copy's own
        self.plain = torch.tensor([0.0, 1.0, 2.0, 3.0])  # neither parameter nor buffer
        self.zero = torch.tensor(0.0)  # false, as an empty list is
        self.array = np.full(4, 0.5, np.float32)
        self.counts: Counter[str] = Counter()
        self.of_lists: defaultdict[str, list[int]] = defaultdict(list)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.absent = None
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        self.of_lists["seen"].append(len(x))
        plain = self.plain + self.zero + torch.from_numpy(self.array)
        return self.norm(self.again[0](x)) + self.tied(x) + self.table + self.frozen + plain  # type: ignore[no-any-return]


def odd() -> Net:
    return Net(Odd(), nn.Linear(4, 3))


def weights(build: Any) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(t.shape, generator=random).abs() if t.is_floating_point() else t + 3
        for name, t in build().state_dict().items()
    }


def gradients(net: Net, x: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)  # dropout
    net(x).square().sum().backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [*nets.NETS, "odd"])
def test_a_copy_is_what_building_and_loading_gives(name: str) -> None:
    shape = (4,) if name == "odd" else IMAGE
    build = odd if name == "odd" else functools.partial(nets.build, name, shape, 3, 0)
    given = weights(build)
    if name == "odd":  # tied: one tensor under two names
        given["encoder.tied.weight"] = given["encoder.linear.weight"].clone()
    built = build()
    built.load_state_dict(given)
    built.train().to(memory_format=torch.channels_last)
    before = torch.get_rng_state()
    copied = new_net(build, given)
    assert torch.equal(torch.get_rng_state(), before)
    assert cloning._templates[build] is not None
    x = torch.rand(6, *shape, generator=torch.Generator().manual_seed(2))
    assert repr(copied) == repr(built)
    assert [n for n, _ in copied.named_parameters()] == [n for n, _ in built.named_parameters()]
    ours, theirs = gradients(copied, x), gradients(built, x)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    state = built.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in copied.state_dict().items())
    assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in built.parameters()]


def test_copies_share_nothing_and_leave_the_template_alone() -> None:
    given = weights(odd)
    given["encoder.tied.weight"] = given["encoder.linear.weight"].clone()
    one, two = new_net(odd, given), new_net(odd, given)
    one.encoder.requires_grad_(False).eval()
    one(torch.rand(2, 4))
    with torch.no_grad():
        for t in [*one.parameters(), *one.buffers()]:
            t.zero_()
    assert one.encoder.again[0] is one.encoder.linear is not two.encoder.linear
    assert one.encoder.linear.weight is one.encoder.tied.weight
    for net in (two, new_net(odd, given)):
        assert net.encoder.seen == [1] and not net.encoder.of_lists
        assert net.encoder.plain is not one.encoder.plain and torch.equal(net.encoder.plain, torch.arange(4.0))
        assert all(m.training for m in net.modules())
        assert net.encoder.linear.weight.requires_grad
        assert torch.equal(net.encoder.table, torch.arange(4.0))
        assert torch.equal(net.classifier.weight, given["classifier.weight"])


def hooked() -> Net:
    net = Net(nn.Linear(4, 4), nn.Linear(4, 3))
    net.encoder.register_forward_hook(lambda *_: None)
    return net


def parametrized() -> Net:
    net = Net(nn.Linear(4, 4), nn.Linear(4, 3))
    nn.utils.parametrizations.weight_norm(net.encoder)
    return net


@pytest.mark.parametrize("build", [hooked, parametrized])
def test_a_net_that_is_more_than_its_tensors_is_built_anew(build: Any) -> None:
    given = build().state_dict()
    net = new_net(build, given)
    assert cloning._templates[build] is None
    assert all(torch.equal(t, given[n]) for n, t in net.state_dict().items())


def test_weights_that_do_not_fit_are_refused_by_torch() -> None:
    build = functools.partial(nets.build, "linear", (4,), 3, 0)
    given = build().state_dict()
    new_net(build, given)
    with pytest.raises(RuntimeError, match="size mismatch"):
        new_net(build, {**given, "classifier.bias": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="Missing key"):
        new_net(build, {"classifier.bias": given["classifier.bias"]})
