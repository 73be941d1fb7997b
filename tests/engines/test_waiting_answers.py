"""Answers put aside until a round ends: the same bits from memory and from the file, and a bound on memory."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from redgrape import tree
from redgrape.engines.waiting_answers import Shelf
from redgrape.errors import StorageError


def answer(k: int) -> tree.Tree:
    return {
        "delta": {"w": torch.full((3, 5), k + 0.1), "half": torch.tensor([k], dtype=torch.float16)},
        "count": torch.tensor(k),
        "none": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "seen": torch.tensor([True, False]),
        "odd": torch.tensor([float("nan"), -0.0]),
    }


@pytest.mark.parametrize("limit", [0, 300, 1 << 20])
def test_answers_come_back_as_they_were(limit: int, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, limit)
    for _ in range(3):  # rounds
        put = {k: shelf.put(answer(k)) for k in range(10)}
        for k in reversed(range(10)):
            assert tree.equal(put[k], answer(k))
            assert tree.num_bytes(put[k]) == tree.num_bytes(answer(k))
            assert float(put[k]["count"]) == k
            assert {name: t.dtype for name, t in put[k]["delta"].items()} == {"w": torch.float32, "half": torch.float16}
        shelf.clear()
    shelf.close()


def test_memory_holds_no_more_than_the_limit_and_the_file_has_no_name(tmp_path: Path) -> None:
    size = tree.num_bytes(answer(0))
    shelf = Shelf(tmp_path, 2 * size)
    given = [answer(k) for k in range(6)]
    put = [shelf.put(a) for a in given]
    assert [a is b for a, b in zip(given, put, strict=True)] == [True, True, False, False, False, False]
    assert list(tmp_path.iterdir()) == []
    shelf.clear()
    assert shelf.put(given[0]) is given[0]
    shelf.close()


def test_a_file_is_made_only_when_it_is_needed(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "missing")
    shelf.put(answer(1))
    with closing(Shelf(tmp_path / "missing", limit=0)) as small, pytest.raises(StorageError, match="temporary file"):
        small.put(answer(1))


def test_an_answer_of_an_earlier_round_is_not_mistaken(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 0)
    old = shelf.put(answer(1))
    shelf.clear()
    with pytest.raises(EOFError, match="after the end of its round"):
        old["delta"]["w"]
    shelf.close()
