"""Tables of class rows: means over the clients that report a class, and sums over classes, block by block."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from redgrape import tree
from redgrape.exchange import tables
from redgrape.exchange.tables import contributors, mean_over_holders
from redgrape.learning.classifier import table_sum


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def many(k: int, classes: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    m = len(classes)
    weight, bias = random(m, 40, 7, seed=k, dtype=dtype), random(m, 40, seed=10 + k, dtype=dtype)
    return {"classes": torch.tensor(classes), "weight": weight, "bias": bias}


@pytest.mark.parametrize("block", [1, 3 * 40 * 7, 1 << 22])
def test_the_exact_mean_has_the_same_bits_in_blocks_of_any_size(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As made at once: sums in float64 in the order of the clients, divided, and rounded to float32."""
    sent = [many(1, [0, 3, 39], torch.float32), many(2, [3, 20], torch.float32), many(3, [39, 5, 3], torch.float32)]
    weights = [torch.tensor([2, 5, 1]), torch.tensor([1, 3]), torch.tensor([7, 2, 4])]
    old = {"weight": random(40, 40, 7, seed=4).float(), "bias": random(40, 40, seed=5).float()}
    monkeypatch.setattr(tables, "_BLOCK", block)
    found = mean_over_holders(sent, old, weights)
    for name, g in old.items():
        sums, total = torch.zeros(g.shape, dtype=torch.float64), torch.zeros(40, dtype=torch.float64)
        for s, w in zip(sent, weights, strict=True):
            sums.index_add_(0, s["classes"], w.reshape(-1, *[1] * (g.dim() - 1)) * s[name].double())
            total.index_add_(0, s["classes"], w.double())
        mean = (sums / total.clamp(min=1).reshape(-1, *[1] * (g.dim() - 1))).float()
        for c in range(40):
            assert torch.equal(found[name][c], (mean if total[c] else g)[c])
    assert contributors(sent, 40)[[0, 3, 5, 20, 39]].tolist() == [1, 3, 1, 1, 2]
    assert contributors(sent, 40).sum() == 8 and contributors([], 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("classes", "features"), [(300, 33), (129, 64), (130, 1), (70, 5), (3, 2)])
def test_the_exact_sum_has_the_same_bits_in_blocks(
    classes: int, features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"weight": random(classes, classes, features).float(), "bias": random(classes, classes, seed=1).float()}
    mask = random(classes, seed=2) > -0.5
    monkeypatch.setattr(tables, "_BLOCK", 1)
    found = table_sum(table, mask, torch.float32)
    for name, g in table.items():
        assert torch.equal(found[name], g[mask].sum(dim=0))


class Live(TorchDispatchMode):
    """The bytes of the tensors that were made and are still there, the most of them at once, and the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.users: dict[int, int] = {}
        self.now = self.most = self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = function(*args, **(kwargs or {}))
        for t in [t for t in tree_leaves(result) if isinstance(t, Tensor)]:
            place, size = t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()
            if not size or (place in known and place not in self.users):
                continue  # a view of what was there before
            if place not in self.users:
                self.users[place], self.now = 0, self.now + size
            self.users[place] += 1
            weakref.finalize(t, self._gone, place, size)
            self.largest = max(self.largest, size)
        self.most = max(self.most, self.now)
        return result

    def _gone(self, place: int, size: int) -> None:
        self.users[place] -= 1
        if not self.users[place]:
            del self.users[place]
            self.now -= size


class Counting(Mapping[str, Any]):
    """A client's answer that may lie on a disk, and how often each part of it was asked for."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.answer, self.asked = answer, Counter[str]()

    def __getitem__(self, name: str) -> Any:
        self.asked[name] += 1
        value = self.answer[name]
        return Counting(value) if isinstance(value, Mapping) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.answer)

    def __len__(self) -> int:
        return len(self.answer)


def test_an_answer_is_read_once_for_each_block() -> None:
    sent = [Counting(many(k, classes, torch.float32)) for k, classes in enumerate(([0, 1, 5], [0, 39]))]
    old = tables.empty({"weight": torch.zeros(40, 7), "bias": torch.zeros(40)}, 40)
    assert tree.equal(mean_over_holders(sent, old), mean_over_holders([s.answer for s in sent], old))
    for s in sent:
        assert all(times == 1 for name, times in s.asked.items() if name != "classes")
        assert {name for name in s.asked} == set(s.answer)


def test_the_mean_holds_one_new_table_and_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 classes and 700 features are a table of 4.5 MB. A block is 4 classes, 0.9 MB in float64; sums, a client's part
    of them and what is made of them are a few blocks."""
    monkeypatch.setattr(tables, "_BLOCK", 4 * 40 * 700)
    block, size = 4 * 40 * 700 * 8, 40 * 40 * 700 * 4
    old = {"weight": random(40, 40, 700).float()}
    sent = [{"classes": torch.arange(40), "weight": random(40, 40, 700, seed=k).float()} for k in range(3)]
    with Live() as live:
        mean_over_holders(sent, old)
    assert size <= live.most <= size + 4 * block < 2 * size
