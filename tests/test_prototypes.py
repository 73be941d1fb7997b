"""The forms of prototypes: what factors of a low rank lose, what half precision loses, and what a sum does not."""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import redgrape as rg
from redgrape import classifier_gradients, nets, testing, tree
from redgrape.classifier_gradients import mean_over_holders
from redgrape.errors import ConfigError
from redgrape.half_precision import pack, round_, unpack
from redgrape.method import ClientSite, ServerSite
from redgrape.methods.redgrape import RedGrape
from redgrape.numerics import same_bits_everywhere
from redgrape.prototypes import Exact, LowRank, truncated

C, D = 6, 9
CPU = torch.device("cpu")
U16 = 2.0**-11  # the largest relative error of rounding to float16

FORMS = {
    "table": {},
    "sum": {"prototype_message": "sum"},
    "rank": {"prototype_rank": 2},
    "half": {"prototype_precision": "half"},
    "rank, half, sum": {"prototype_rank": 2, "prototype_precision": "half", "prototype_message": "sum"},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with same_bits_everywhere():
        yield


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def best_of_rank(g: Tensor, rank: int) -> Tensor:
    U, S, Vh = torch.linalg.svd(g, full_matrices=False)
    return (U[:, :rank] * S[:rank]) @ Vh[:rank]


def discarded(g: Tensor, rank: int) -> float:
    """What Eckart and Young leave: the root of the sum of the squares of the other singular values."""
    return float(torch.linalg.svdvals(g)[rank:].norm())


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# One product, cut to a rank


@pytest.mark.parametrize("rank", [1, 2, 4, 9])
@pytest.mark.parametrize(("classes", "examples", "features"), [(6, 3, 9), (6, 5, 9), (6, 6, 9), (9, 40, 6), (7, 1, 4)])
def test_a_truncated_product_is_the_best_of_its_rank(classes: int, examples: int, features: int, rank: int) -> None:
    """Against the singular values of the dense product, on both sides of n < min(C, d)."""
    A, B = random(classes, examples), random(examples, features, seed=1)
    left, right = truncated(A, B, rank)
    assert left.shape == (classes, rank) and right.shape == (rank, features)
    close(left @ right, best_of_rank(A @ B, rank))
    assert float((A @ B - left @ right).norm()) == pytest.approx(discarded(A @ B, rank), rel=1e-9, abs=1e-12)


def test_what_is_sent_are_singular_vectors() -> None:
    """Orthogonal, largest first, of a fixed sign, and zero beyond the rank: not the examples that they were made of."""
    A, B = random(6, 3), random(3, 9, seed=1)
    left, right = truncated(A, B, 4)
    S = torch.linalg.svdvals(A @ B)
    close(left.norm(dim=0)[:3], S[:3])
    close(left[:, :3].T @ left[:, :3], torch.diag(S[:3] ** 2))
    close(right[:3] @ right[:3].T, torch.eye(3, dtype=torch.float64))
    assert not left[:, 3].any() and not right[3].any()
    assert all(column[column.abs().argmax()] > 0 for column in left[:, :3].T)
    cosines = (right[:3] @ B.T).abs() / B.norm(dim=1)
    assert float(cosines.max()) < 0.99


def test_a_product_of_zero_has_no_factors() -> None:
    left, right = truncated(torch.zeros(6, 3), random(3, 9), 2)
    assert not left.any() and not right.any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("examples", [2, 20])
def test_what_is_not_finite_is_noticed(value: float, examples: int) -> None:
    B = random(examples, 9)
    B[0, 0] = value
    assert all(torch.isnan(factor).all() for factor in truncated(random(6, examples), B, 2))


# A client's prototypes


def classifier(bias: bool = True) -> nn.Linear:
    linear = nn.Linear(D, C, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        for i, p in enumerate(linear.parameters()):
            p.copy_(random(*p.shape, seed=20 + i))
    return linear


def batches(counts: list[int], size: int = 4, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Features and labels of so many examples of each class, mixed."""
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))]
    h = random(len(y), D, seed=seed)
    return list(zip(h.split(size), y.split(size), strict=True))


COUNTS = [1, 3, 0, 5, 6, 30]  # below and above min(C, d) = 6


@pytest.mark.parametrize("rank", [1, 2, 3, C - 1])
def test_local_factors_lose_the_discarded_singular_values(rank: int) -> None:
    """And nothing at rank C - 1, which no prototype exceeds; nor of a class with at most so many examples."""
    classes = torch.tensor([0, 1, 3, 4, 5])
    exact = Exact().local(classifier(), batches(COUNTS), classes)
    found = LowRank(rank).local(classifier(), batches(COUNTS), classes)
    close(found["bias"], exact["bias"])
    for i, c in enumerate(classes.tolist()):
        error = float((found["left"][i] @ found["right"][i] - exact["weight"][i]).norm())
        assert error == pytest.approx(discarded(exact["weight"][i], rank), rel=1e-9, abs=1e-12)
        assert (error < 1e-12) == (rank >= min(COUNTS[c], C - 1))


def test_a_prototype_of_one_example_gives_its_features_at_rank_one() -> None:
    [(h, y)] = batches([0, 0, 1, 0, 0, 0])
    sent = LowRank(1).local(classifier(), [(h, y)], torch.tensor([2]))
    feature = (sent["left"][0] @ sent["right"][0])[0] / sent["bias"][0, 0]
    close(feature, h[0], 1e-10)


def test_a_classifier_without_bias_has_factors_only() -> None:
    W = {"weight": classifier().weight.detach()}
    table = LowRank(2).none(W)
    sent = LowRank(2).local(classifier(bias=False), batches(COUNTS), torch.tensor([0, 1]))
    new, _ = LowRank(2).mean([{"classes": torch.tensor([0, 1]), **sent}], table, None)
    assert set(sent) == set(new) == {"left", "right"}
    assert set(LowRank(2).sum(new, torch.ones(C, dtype=torch.bool), torch.float64)) == {"weight"}


# The mean over holders


def answer(held: dict[int, int], rank: int, seed: int) -> dict[str, Tensor]:
    """A client's factors of these classes, by how many examples it has of each."""
    classes = torch.tensor(sorted(held))
    counts = [held.get(c, 0) for c in range(C)]
    sent = LowRank(rank).local(classifier(), batches(counts, seed=seed), classes)
    return {"classes": classes, **sent, "counts": torch.tensor([held[c] for c in sorted(held)])}


def table_of(seed: int, rank: int) -> dict[str, Tensor]:
    shapes = {"left": (C, C, rank), "right": (C, rank, D), "bias": (C, C)}
    return {name: random(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("block", [1, 1 << 25])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_mean_of_factors_is_the_truncated_mean_of_the_products(
    rank: int, weighted: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class 0 has three holders, class 1 two, class 5 one; the others keep the old prototype. At rank 3 the three
    clients' nine columns are more than min(C, d), and the dense way is taken."""
    sent = [answer({0: 7, 1: 4}, rank, 31), answer({0: 2, 5: 9}, rank, 32), answer({0: 5, 1: 8}, rank, 33)]
    old = table_of(50, rank)
    weights = [s["counts"] for s in sent] if weighted else None
    monkeypatch.setattr(classifier_gradients, "_TABLE_BLOCK", block)
    new, held = LowRank(rank).mean(sent, old, weights)
    assert held.nonzero().flatten().tolist() == [0, 1, 5]
    for c in range(C):
        holders = [(s, i) for s in sent for i in (s["classes"] == c).nonzero().flatten().tolist()]
        if not holders:
            assert all(torch.equal(new[name][c], old[name][c]) for name in old)
            continue
        w = [float(s["counts"][i]) if weighted else 1.0 for s, i in holders]
        mean = sum(w_k * s["left"][i] @ s["right"][i] for w_k, (s, i) in zip(w, holders, strict=True)) / sum(w)
        close(new["left"][c] @ new["right"][c], best_of_rank(mean, rank))
        close(new["bias"][c], sum(w_k * s["bias"][i] for w_k, (s, i) in zip(w, holders, strict=True)) / sum(w))


def test_the_mean_is_exact_where_the_rank_suffices() -> None:
    """At rank C - 1 = 5 the factors' mean is the mean of the exact prototypes; with one holder it is the client's."""
    held = [{0: 7, 1: 2}, {0: 1, 1: 9}, {5: 3}]
    exact = []
    for k, counts in enumerate(held):
        classes = torch.tensor(sorted(counts))
        gradients = Exact().local(classifier(), batches([counts.get(c, 0) for c in range(C)], seed=60 + k), classes)
        exact.append({"classes": classes, **gradients})
    expected, _ = Exact().mean(exact, Exact().none(dict(classifier().state_dict())), None)
    sent = [answer(counts, C - 1, 60 + k) for k, counts in enumerate(held)]
    found, _ = LowRank(C - 1).mean(sent, LowRank(C - 1).none(dict(classifier().state_dict())), None)
    for c in (0, 1, 5):
        close(found["left"][c] @ found["right"][c], expected["weight"][c])
    close(found["bias"], expected["bias"])
    close(found["left"][5] @ found["right"][5], sent[2]["left"][0] @ sent[2]["right"][0])


# Tables in blocks


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
    monkeypatch.setattr(classifier_gradients, "_TABLE_BLOCK", block)
    found, held = mean_over_holders(sent, {name: g[0] for name, g in old.items()}, weights, old)
    for name, g in old.items():
        sums, total = torch.zeros(g.shape, dtype=torch.float64), torch.zeros(40, dtype=torch.float64)
        for s, w in zip(sent, weights, strict=True):
            sums.index_add_(0, s["classes"], w.reshape(-1, *[1] * (g.dim() - 1)) * s[name].double())
            total.index_add_(0, s["classes"], w.double())
        mean = (sums / total.clamp(min=1).reshape(-1, *[1] * (g.dim() - 1))).float()
        for c in range(40):
            assert torch.equal(found[name][c], (mean if total[c] else g)[c])
    assert held.nonzero().flatten().tolist() == [0, 3, 5, 20, 39]


@pytest.mark.parametrize(("classes", "features"), [(300, 33), (129, 64), (130, 1), (70, 5), (3, 2)])
def test_the_exact_sum_has_the_same_bits_in_blocks(
    classes: int, features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"weight": random(classes, classes, features).float(), "bias": random(classes, classes, seed=1).float()}
    mask = random(classes, seed=2) > -0.5
    monkeypatch.setattr(classifier_gradients, "_TABLE_BLOCK", 1)
    found = Exact().sum(table, mask, torch.float32)
    for name, g in table.items():
        assert torch.equal(found[name], g[mask].sum(dim=0))


@pytest.mark.parametrize("chosen", [[], [2], [0, 3, 4, 5]])
def test_the_sum_of_factors_is_the_sum_of_the_products(chosen: list[int]) -> None:
    table, mask = table_of(70, 3), torch.zeros(C, dtype=torch.bool)
    mask[chosen] = True
    found = LowRank(3).sum(table, mask, torch.float64)
    close(found["weight"], (table["left"] @ table["right"])[mask].sum(dim=0))
    close(found["bias"], table["bias"][mask].sum(dim=0))


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


@pytest.mark.parametrize("form", [Exact(), LowRank(2)])
def test_an_answer_is_read_once_for_each_block(form: Any) -> None:
    held = [{0: 7, 1: 4, 5: 2}, {0: 2, 5: 9}]
    sent = []
    for k, counts in enumerate(held):
        gradients = form.local(
            classifier(), batches([counts.get(c, 0) for c in range(C)], seed=k), torch.tensor([*counts])
        )
        sent.append(Counting({"classes": torch.tensor([*counts]), **{name: pack(g) for name, g in gradients.items()}}))
    old = form.none(dict(classifier().state_dict()))
    found, _ = form.mean(sent, old, None)
    expected, _ = form.mean([s.answer for s in sent], old, None)
    assert tree.equal(found, expected)
    for s in sent:
        assert all(times == 1 for name, times in s.asked.items() if name != "classes")
        assert {name for name in s.asked} == set(s.answer)


@pytest.mark.parametrize("precision", ["single", "half"])
def test_the_exact_mean_holds_one_new_table_and_a_block(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 classes and 700 features are a table of 4.5 MB. A block is 4 classes, 0.9 MB in float64; sums, a client's part
    of them and what is made of them are a few blocks."""
    monkeypatch.setattr(classifier_gradients, "_TABLE_BLOCK", 4 * 40 * 700)
    block, size = 4 * 40 * 700 * 8, 40 * 40 * 700 * 4
    old = {"weight": random(40, 40, 700).float()}
    sent: list[dict[str, Any]] = [
        {"classes": torch.arange(40), "weight": random(40, 40, 700, seed=k).float()} for k in range(3)
    ]
    if precision == "half":
        sent = [{"classes": s["classes"], "weight": pack(s["weight"])} for s in sent]
    with Live() as live:
        new, _ = Exact().mean(sent, old, None)
        if precision == "half":
            new = {name: round_(g) for name, g in new.items()}
    assert size <= live.most <= size + 4 * block < 2 * size
    assert live.now >= size


def test_local_factors_are_made_class_by_class() -> None:
    """20 classes of 40 examples, of rank 3: the table [m, C, d] would take 20 dense gradients. Neither is it made nor
    is more held than the features, the factors and the work of one class."""
    linear, classes = nn.Linear(30, 20, dtype=torch.float64), torch.arange(20)
    h, y = random(800, 30), torch.arange(20).repeat(40)
    with Live() as live:
        sent = LowRank(3).local(linear, [(h, y)], classes)
    table = 20 * 20 * 30 * 8
    kept = h.nbytes + y.nbytes + sum(g.nbytes for g in sent.values())
    assert live.largest <= max(h.nbytes, *(g.nbytes for g in sent.values()))
    assert live.most < kept + table / 2


def test_a_class_of_few_examples_takes_no_dense_gradient() -> None:
    with Live() as live:
        truncated(random(200, 5), random(5, 300, seed=1), 4)
    assert live.largest < 200 * 300 * 8 / 2


# Half precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_half_precision_has_its_bound(dtype: torch.dtype) -> None:
    """Classes of 1e30 and 1e-25, of many sizes within one class, and of zeros. Float64 is rounded twice, by way of
    float32, hence the margin."""
    table = random(5, 40, 50, dtype=dtype)
    table[0] *= 1e30
    table[1] *= 1e-25
    table[2] *= 10 ** (-16 * torch.rand(40, 50, generator=torch.Generator().manual_seed(0), dtype=dtype))
    table[4] = 0
    packed = pack(table)
    assert packed["half"].dtype == torch.float16 and packed["exponent"].dtype == torch.int16
    assert torch.isfinite(packed["half"]).all()
    found, largest = unpack(packed, dtype), table.flatten(1).abs().amax(dim=1)[:, None, None]
    error, plain = (found - table).abs(), table.abs() >= 2.0**-28 * largest
    assert found.dtype == dtype
    assert (error[plain] <= 1.001 * U16 * table.abs()[plain]).all()
    assert (error <= torch.maximum(1.001 * U16 * table.abs(), 2.0**-39 * largest)).all()
    assert plain[2].any() and not plain[2].all()
    assert float(error.max()) > 0


@pytest.mark.parametrize("largest", [65504.0, 65520.0, 1e6, 3e38, 1.0, 1 - 2.0**-13, 2.0**-130, 0.0])
def test_what_was_rounded_once_is_not_changed_again(largest: float) -> None:
    """Also where the largest number rounds up to a power of two, and beyond float16's range."""
    table = random(1, 400, seed=8).float()
    table = table / table.abs().max() * 2.0 ** (-40 * torch.rand(400, generator=torch.Generator().manual_seed(1)))
    table[0, 0] = 1.0
    table *= largest
    once = unpack(pack(table), torch.float32)
    assert torch.isfinite(once).all()
    assert once[0, 0] == pytest.approx(largest, rel=U16, abs=1e-38)
    assert tree.equal(pack(once), pack(unpack(pack(once), torch.float32)))
    assert torch.equal(unpack(pack(once), torch.float32), once)
    assert torch.equal(round_(table.clone()), once)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_half_precision_does_not_hide_what_is_not_finite(value: float) -> None:
    table = random(3, 4, seed=1).float()
    table[1, 2] = value
    found = unpack(pack(table), torch.float32)
    assert torch.isfinite(found[[0, 2]]).all()
    assert torch.equal(found[1, 2], torch.tensor(value)) or (math.isnan(value) and math.isnan(found[1, 2]))


def test_parts_of_a_packed_table() -> None:
    table = random(5, 6, 3).float()
    mask, rows = torch.tensor([True, False, True, True, False]), slice(2, 5)
    whole = unpack(pack(table), torch.float32)
    assert torch.equal(unpack(pack(table), torch.float32, mask), whole[mask])
    assert torch.equal(unpack(pack(table), torch.float64, mask, rows), whole[mask][:, rows].double())
    assert torch.equal(unpack(table, torch.float32, torch.tensor([3, 1]), rows), table[[3, 1], rows])


def test_factors_in_half_precision_have_their_bound() -> None:
    """Each of the r outer products errs by at most (2 u + u^2) times its singular value."""
    A, B = random(20, 50), random(50, 30, seed=1)
    left, right = truncated(A, B, 4)
    rough = round_(left[None].clone())[0] @ round_(right[None].clone())[0]
    singular = torch.linalg.svdvals(A @ B)[:4]
    error = float((rough - left @ right).norm())
    assert 0 < error <= (2 * U16 + U16**2) * 1.001 * float(singular.sum())


# RedGrape with them


def examples(counts: list[int], seed: int) -> rg.Examples:
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return rg.Examples(random(len(y), D, seed=seed) + y[:, None] / 2, y)


CLIENTS = [[9, 3, 1, 0, 0, 2], [0, 8, 4, 0, 1, 0], [2, 0, 9, 1, 0, 12]]


def build(dtype: torch.dtype = torch.float32) -> rg.Net:
    return nets.build("linear", (D,), C, seed=0).to(dtype)


def trained(dtype: torch.dtype = torch.float32, rounds: int = 4, **options: Any) -> rg.Result:
    federation = rg.Federation([examples(c, k) for k, c in enumerate(CLIENTS)], examples([1] * C, 9), C)
    method = RedGrape(epochs=1, batch_size=4, threshold=3, lam=0.5, **options)
    return rg.train(method, federation, functools.partial(build, dtype), rounds=rounds, clients_per_round=2)


def sites(method: RedGrape, client: int = 0, round: int = 2) -> tuple[ServerSite, ClientSite]:
    place = {"build": build, "num_clients": 3, "num_classes": C, "seed": 0, "rounds": 5, "device": CPU}
    data = examples(CLIENTS[client], client)
    return ServerSite(round=0, **place), ClientSite(round=round, client=client, data=data, **place)


def after_a_round(method: RedGrape) -> dict[str, Any]:
    """The server when clients 0 and 1 have answered in round 1: nobody has class 3 yet."""
    server = method.init_server(dict(build().state_dict()), sites(method)[0])
    updates = {k: one_client(method, server, k, 1) for k in (0, 1)}
    return dict(method.server_update(server, updates, sites(method)[0]))


def one_client(method: RedGrape, server: Any, client: int, round: int = 2) -> Any:
    at_server, site = sites(method, client, round)
    received = {**method.broadcast(server), **method.message(server, method.request(site), at_server)}
    return method.client_update(received, {}, site)[0]


@pytest.mark.parametrize("unseen", ["skip", "mean"])
@pytest.mark.parametrize("form", ["sum", "rank", "half", "rank, half, sum"])
def test_a_sum_gives_the_bits_that_the_table_gives(form: str, unseen: Any) -> None:
    options = {**FORMS[form], "unseen": unseen, "threshold": 3, "epochs": 1, "max_age": 1}
    by_table = RedGrape(**{**options, "prototype_message": "table"})
    by_sum = RedGrape(**{**options, "prototype_message": "sum"})
    server = after_a_round(by_table)
    assert tree.equal(server, after_a_round(by_sum))
    for k in range(3):
        assert tree.equal(one_client(by_table, server, k), one_client(by_sum, server, k))
    stale = server | {"age": torch.tensor([0, 1, 2, 0, 3, 0])}
    assert not tree.equal(one_client(by_sum, stale, 1), one_client(by_sum, server, 1))
    assert tree.equal(one_client(by_table, stale, 1), one_client(by_sum, stale, 1))


@pytest.mark.parametrize("options", [{}, {"prototype_rank": 2}, {"prototype_precision": "half"}])
def test_a_run_by_sums_has_the_bits_of_a_run_by_tables(options: dict[str, Any]) -> None:
    by_table, by_sum = trained(**options), trained(**options, prototype_message="sum")
    assert tree.equal(by_table.server, by_sum.server)
    assert all(b["bytes_down"] < a["bytes_down"] for a, b in zip(by_table.history, by_sum.history, strict=True))


def test_a_run_at_the_full_rank_is_the_exact_run_to_rounding() -> None:
    """C - 1 = 5, which no prototype exceeds. A rank of one is far from it."""
    exact, full, one = (trained(torch.float64, prototype_rank=rank).server["model"] for rank in (None, C - 1, 1))
    moved = {name: float((exact[name] - t).norm()) for name, t in build(torch.float64).state_dict().items()}
    for name, t in exact.items():
        assert float((full[name] - t).norm()) < 1e-12 * moved[name]
        assert 1e-4 * moved[name] < float((one[name] - t).norm()) < moved[name]


def test_a_run_in_half_precision_is_near_the_exact_run() -> None:
    exact, half = trained().server["model"], trained(prototype_precision="half").server["model"]
    for name, t in build().state_dict().items():
        assert 0 < float((exact[name] - half[name]).norm()) < 1e-3 * float((exact[name] - t).norm())


def test_the_server_keeps_what_the_wire_carries() -> None:
    """In the net's dtype, rounded: a broadcast rounds nothing further."""
    method = RedGrape(prototype_precision="half", epochs=1)
    server = after_a_round(method)
    sent = method.broadcast(server)["prototypes"]
    for name, g in server["prototypes"].items():
        assert g.dtype == torch.float32 and g.any()
        assert torch.equal(unpack(sent[name], torch.float32), g)


@pytest.mark.parametrize(
    ("options", "numbers", "packed"),
    [
        ({}, C * D + C, 0),
        ({"prototype_rank": 2}, C * 2 + 2 * D + C, 0),
        ({"prototype_precision": "half"}, C * D + C, 2),
        ({"prototype_rank": 2, "prototype_precision": "half"}, C * 2 + 2 * D + C, 3),
    ],
)
def test_bytes_by_hand(options: dict[str, Any], numbers: int, packed: int) -> None:
    """A class takes its numbers, of four bytes or two, and a two-byte exponent for each packed tensor. Client 0 holds
    four classes and sends their numbers (int64) as well. A table has all six; a sum is C d + C numbers of four bytes,
    and a request is C truth values."""
    a_class = numbers * (2 if packed else 4) + 2 * packed
    model = 4 * (C * D + C)
    method = RedGrape(**options, epochs=1)
    server = after_a_round(method)
    assert tree.num_bytes(one_client(method, server, 0)["prototypes"]) == 4 * (8 + a_class)
    assert tree.num_bytes(method.broadcast(server)) == 2 * model + C + C * a_class
    by_sum = RedGrape(**options, epochs=1, prototype_message="sum")
    at_server, site = sites(by_sum)
    request = by_sum.request(site)
    assert tree.num_bytes(by_sum.broadcast(server)) == 2 * model + C
    assert tree.num_bytes(request) == C
    assert tree.num_bytes(by_sum.message(server, request, at_server)) == model
    assert tree.num_bytes(method.request(site)) == 0
    assert tree.num_bytes(method.message(server, {}, at_server)) == 0


def test_a_client_asks_for_the_classes_that_it_has_not_enough_of() -> None:
    method = RedGrape(prototype_message="sum", threshold=3)
    assert method.request(sites(method)[1])["missing"].tolist() == [False, False, True, True, True, True]
    without = RedGrape(prototype_message="sum", threshold=3, use_real_data=False)
    assert without.request(sites(without)[1])["missing"].all()


@pytest.mark.parametrize(("rank", "fits"), [(C - 1, True), (C, False), (100, False)])
def test_a_rank_that_no_prototype_has_is_refused(rank: int, fits: bool) -> None:
    method = RedGrape(prototype_rank=rank)
    if fits:
        method.init_server(dict(build().state_dict()), sites(method)[0])
        return
    with pytest.raises(
        ConfigError, match=rf"prototype_rank is {rank}, but .* 6 classes and 9 features .* below 6; lower"
    ):
        method.init_server(dict(build().state_dict()), sites(method)[0])


@pytest.mark.parametrize("rank", [0, -1, 1.5])
def test_a_rank_is_a_positive_whole_number(rank: Any) -> None:
    with pytest.raises(ConfigError, match="prototype_rank"):
        RedGrape(prototype_rank=rank)


@pytest.mark.parametrize("form", FORMS)
def test_a_client_that_diverges_is_rejected(form: str) -> None:
    """Its prototypes are not finite, and are seen to be; the factors of nothing but NaN do not stop the run."""
    method = RedGrape(**FORMS[form], epochs=1)
    server = after_a_round(method)
    broken = server | {"model": {**server["model"], "classifier.weight": torch.full((C, D), math.nan)}}
    sent = one_client(method, broken, 0)["prototypes"]
    assert any(t.is_floating_point() and not torch.isfinite(t).all() for t in tree.flatten(sent).values())


def test_what_is_told() -> None:
    plain = RedGrape().privacy()
    assert "at least" not in plain and "rank" not in plain and "sum" not in plain
    ranked = RedGrape(prototype_rank=4).privacy()
    assert "cut to rank 4 hides nothing of a class with 4 examples or fewer: the gradient of one example has" in ranked
    assert "4 examples or fewer. " in RedGrape(prototype_rank=4, min_count=2).privacy()
    asked = "it tells the server of which classes it has at least 5 examples"
    assert asked in RedGrape(prototype_message="sum", threshold=5).privacy()
    assert asked in RedGrape(prototype_message="sum", threshold=5, use_prototypes=False).privacy()
    assert "in a sum over classes" in RedGrape(prototype_message="sum").privacy()
    assert "at least" not in RedGrape(prototype_message="sum", threshold=math.inf).privacy()
    assert RedGrape(use_prototypes=False, prototype_rank=4).privacy() == ""


# The contract


@pytest.mark.parametrize("clause", testing.CHECKS)
@pytest.mark.parametrize("form", ["rank", "rank, half, sum"])
def test_the_contract_is_kept(form: str, clause: str) -> None:
    if clause == "float64_stays_float64" and "half" in form:
        pytest.skip("half precision on the wire is what was asked for")
    testing.CHECKS[clause](RedGrape(**FORMS[form]))


CLAUSES = [
    "nothing_that_was_passed_is_modified",
    "updates_share_no_memory",
    "leaves_are_named_tensors",
    "engines_agree",
]


@pytest.mark.parametrize("clause", CLAUSES)
@pytest.mark.parametrize("form", ["sum", "half"])
def test_the_contract_is_kept_by_each_on_its_own(form: str, clause: str) -> None:
    testing.CHECKS[clause](RedGrape(**FORMS[form]))


def test_half_precision_is_on_the_wire_alone() -> None:
    """A net in float64 has its prototypes in float64 at the server."""
    server = trained(torch.float64, prototype_precision="half", prototype_rank=2).server
    assert all(t.dtype == torch.float64 for t in tree.flatten(server).values() if t.is_floating_point())
