"""Long tails: the published totals, and what cannot be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redgrape.data.longtail import binary, choose, exponential, natural
from redgrape.errors import ConfigError, DataError

MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@pytest.mark.parametrize(
    ("classes", "size", "ir", "total", "smallest"),
    [
        (10, 5000, 10, 20431, 500),
        (10, 5000, 50, 13996, 100),
        (10, 5000, 100, 12406, 50),
        (100, 500, 10, 19573, 50),
        (100, 500, 50, 12608, 10),
        (100, 500, 100, 10847, 5),
    ],
)
def test_cifar_totals_are_those_of_ldam(classes: int, size: int, ir: float, total: int, smallest: int) -> None:
    sizes = exponential([size] * classes, ir)
    assert (sum(sizes), sizes[0], sizes[-1]) == (total, size, smallest)


def test_mnist_starts_from_the_size_of_class_0() -> None:
    sizes = exponential(MNIST_COUNTS, 100)
    assert sizes[0] == 5923
    assert sizes[9] == 59  # 5923 / 100
    assert all(size <= available for size, available in zip(sizes, MNIST_COUNTS, strict=True))


def test_powers_that_are_whole_numbers_are_not_cut_to_the_one_before() -> None:
    assert exponential([1000] * 4, 1000) == [1000, 100, 10, 1]


def test_a_class_that_is_too_small_is_named_with_both_counts() -> None:
    with pytest.raises(DataError, match=r"asks for 5923 examples of class 4, which has 5842; set head_cap to 5421"):
        exponential(MNIST_COUNTS, 1)
    assert exponential(MNIST_COUNTS, 1, head_cap=5421) == [5421] * 10


def test_head_cap_lowers_n_0() -> None:
    assert exponential([5000] * 10, 100, head_cap=1000)[0] == 1000
    assert exponential([5000] * 10, 100, head_cap=1000)[-1] == 10


def test_binary_cuts_the_tail_classes_alone() -> None:
    assert binary([100, 90, 80, 3], 10, (1, 3)) == [100, 9, 80, 1]
    assert binary([100, 90, 80, 3], 10, (1, 3), head_cap=50) == [50, 5, 50, 1]
    assert binary([100, 0], 10, (1,)) == [100, 0]


def test_natural_keeps_the_sizes_below_the_cap() -> None:
    assert natural([5, 20, 1]) == [5, 20, 1]
    assert natural([5, 20, 1], head_cap=4) == [4, 4, 1]


@pytest.mark.parametrize("ir", [0.5, 0, -1, float("nan"), float("inf")])
def test_an_impossible_ratio_is_refused(ir: float) -> None:
    with pytest.raises(ConfigError, match="imbalance ratio must be"):
        exponential([10, 10], ir)
    with pytest.raises(ConfigError, match="imbalance ratio must be"):
        binary([10, 10], ir, (0,))


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tail class 2 is outside the classes 0 \.\. 1"):
        binary([10, 10], 2, (2,))
    with pytest.raises(ConfigError, match="tail class -1"):
        binary([10, 10], 2, (-1,))
    with pytest.raises(ConfigError, match="2 of 2 classes"):
        binary([10, 10], 2, (0, 1))
    with pytest.raises(ConfigError, match="at least 2 classes"):
        exponential([10], 2)
    with pytest.raises(ConfigError, match="head_cap is 0"):
        natural([10, 10], head_cap=0)


@given(
    counts=st.lists(st.integers(0, 40), min_size=2, max_size=6),
    data=st.data(),
    seed=st.integers(0, 2**32),
)
def test_choose_draws_exactly_the_sizes_without_replacement(counts: list[int], data: st.DataObject, seed: int) -> None:
    sizes = [data.draw(st.integers(0, n)) for n in counts]
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    rows = choose(labels, sizes, seed)
    assert (np.diff(rows) > 0).all()
    assert np.bincount(labels[rows], minlength=len(counts)).tolist() == sizes
    assert (rows == choose(labels, sizes, seed)).all()


def test_choose_depends_on_seed_and_purpose() -> None:
    labels = np.zeros(1000, dtype=np.int64)
    draws = [choose(labels, [100], 0), choose(labels, [100], 1), choose(labels, [100], 0, "validation")]
    assert all((a != b).any() for a, b in ((draws[0], draws[1]), (draws[0], draws[2])))


def test_choose_draws_from_each_class_by_itself() -> None:
    """Two classes of 1,000 examples: 100 at other places in each, and those of a class whatever the other one keeps."""
    labels = np.repeat([0, 1], 1000)
    first, second = np.split(choose(labels, [100, 100], 0), 2)
    assert (first != second - 1000).any()
    assert (choose(labels, [7, 100], 0)[7:] == second).all()


def test_choose_refuses_more_than_there_are() -> None:
    with pytest.raises(DataError, match="3 examples of class 1 were asked for, but there are 2"):
        choose(np.array([0, 1, 1]), [1, 3], 0)
