"""Trees handed from one process to another through shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from redgrape import tree
from redgrape.engines import shared_memory
from redgrape.engines.shared_memory import Mailbox

pytestmark = pytest.mark.skipif(not shared_memory._HAS_FD_PASSING, reason="needs file descriptors to pass")


@pytest.fixture
def boxes() -> Iterator[tuple[Mailbox, Mailbox]]:
    """The two ends, with a map of the memory each, as in two processes."""
    ours = Mailbox()
    theirs = Mailbox(os.dup(ours._fd))
    yield ours, theirs
    ours.close()
    theirs.close()


def letter_of(size: int) -> tree.Tree:
    return {
        "a": {"w": torch.arange(float(size)).reshape(-1, 1).T, "half": torch.tensor([1.5], dtype=torch.float16)},
        "flag": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 3),
        "number": torch.tensor(size),
        "odd": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float64),
    }


def test_trees_of_any_size_arrive_with_every_bit(boxes: tuple[Mailbox, Mailbox]) -> None:
    """Also larger than any before, smaller, and empty."""
    writer, reader = boxes
    for size in (1, 1000, 3, 100_000, 0, 7):
        assert tree.equal(reader.read(writer.write(letter_of(size))), letter_of(size))
    assert reader.read(writer.write({})) == {}


def test_what_was_read_stays_when_the_next_is_written(boxes: tuple[Mailbox, Mailbox]) -> None:
    writer, reader = boxes
    first = reader.read(writer.write(letter_of(50)))
    writer.write({"a": {"w": torch.zeros(100)}})
    assert tree.equal(first, letter_of(50))
    assert first["a"]["w"].data_ptr() % 16 == 0  # a kernel's last bits may depend on it


def test_where_no_descriptor_can_be_passed_the_tensors_themselves_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_HAS_FD_PASSING", False)
    box = Mailbox()
    letter = box.write(letter_of(5))
    assert isinstance(letter, bytes)
    assert tree.equal(box.read(letter), letter_of(5))
    box.close()
