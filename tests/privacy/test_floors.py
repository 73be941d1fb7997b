"""What the floors of sites refuse, by the parts of an update alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from redgrape.exchange import Exchange
from redgrape.exchange.parts import ClassRows, Count, Direction, Part, Sum
from redgrape.privacy.floors import too_much

MODEL: dict[str, Part] = {"delta": Direction({"w": torch.zeros(3)}), "count": Count()}
GRADIENTS = MODEL | {"prototypes": ClassRows({"weight": torch.zeros(3)}, gradient=True)}
MEANS = MODEL | {"means": ClassRows({"mean": torch.zeros(3)})}


def refused(parts: dict[str, Part], *survey: str, exchange: Exchange | None = None, **floors: Any) -> str | None:
    values: dict[str, Any] = {"min_count": 8, "min_clients": 3, "secure_aggregation": False, "num_classes": 4}
    return too_much(exchange or Exchange(preset="private"), parts, survey, **values | floors)


def test_an_update_without_class_rows_is_never_refused() -> None:
    assert refused(MODEL, exchange=Exchange(), num_classes=100) is None


@pytest.mark.parametrize("summed", [False, True])
def test_class_rows_keep_to_both_floors_also_in_sums(summed: bool) -> None:
    for parts in (GRADIENTS, MEANS):
        assert refused(parts, secure_aggregation=summed) is None
        few = refused(parts, secure_aggregation=summed, exchange=Exchange(min_count=7, min_clients=3))
        assert "min_count is 7" in str(few)
        alone = refused(parts, secure_aggregation=summed, exchange=Exchange(min_count=8, min_clients=2))
        assert "min_clients is 2" in str(alone)


def test_gradients_of_fewer_examples_than_classes_are_refused_where_there_is_a_floor() -> None:
    assert refused(GRADIENTS, num_classes=8) is None
    assert "raise exchange.min_count to 9" in str(refused(GRADIENTS, num_classes=9))
    assert refused(MEANS, num_classes=9) is None
    assert refused(GRADIENTS, num_classes=9, secure_aggregation=True) is None
    assert refused(GRADIENTS, num_classes=9, min_count=1) is None


def test_gradients_of_drawn_examples_count_as_those_of_so_many() -> None:
    drawn = MODEL | {"rows": ClassRows({"weight": torch.zeros(3)}, gradient=True, drawn=32)}
    floor = Exchange(min_count=100, min_clients=3)
    assert refused(drawn, exchange=floor, num_classes=32) is None
    assert "the method draws 32 of a class" in str(refused(drawn, exchange=floor, num_classes=33))
    assert refused(drawn, exchange=floor, num_classes=33, secure_aggregation=True) is None


def test_a_sum_in_which_classes_count_alike_keeps_to_the_floors() -> None:
    """The update of a single site would show a class with one example; a sum shows a class of one site."""

    def alike(least: int) -> dict[str, Part]:
        return MODEL | {"gradient": Sum({"weight": torch.zeros(3)}, min_holders=least)}

    assert "in 'gradient' of a single site a class with one example" in str(refused(alike(3)))
    assert refused(alike(3), min_count=1) is None
    assert refused(alike(3), secure_aggregation=True) is None
    assert "min_holders of the method is 2" in str(refused(alike(2), secure_aggregation=True))
    noise = Exchange(clip=1.0, noise=1.0)
    assert refused(alike(1), secure_aggregation=True, exchange=noise) is None, "the noise hides a site"


def test_sums_by_class_of_a_single_site_keep_to_min_count() -> None:
    """They show how many examples of a class a site has; a secure sum does not."""
    counts = {"n": torch.zeros(4, dtype=torch.int64)}
    sums = MODEL | {"sums": Sum(counts, counted="n")}
    assert refused(sums) is None
    assert "min_count is 7" in str(refused(sums, exchange=Exchange(min_count=7, min_clients=3)))
    assert refused(sums, secure_aggregation=True, exchange=Exchange(min_count=7, min_clients=3)) is None


def test_a_survey_is_for_sums_and_for_sites_without_a_floor() -> None:
    """Whatever it asks for."""
    assert "asks every client for its anything, more" in str(refused(MODEL, "anything", "more"))
    assert refused(MODEL, "anything", secure_aggregation=True) is None
    assert refused(MODEL, "anything", min_count=1) is None
