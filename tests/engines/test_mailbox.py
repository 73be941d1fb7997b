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
    theirs = Mailbox(fd=os.dup(ours._fd))
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


def test_letters_stay_below_the_limit_until_the_box_is_cleared() -> None:
    """And what is read of them is no copy; beyond the limit it is one."""
    size = 64 * len(tree.flatten(letter_of(5)))  # each tensor takes 64 bytes
    writer = Mailbox(2 * size)
    reader = Mailbox(2 * size, os.dup(writer._fd))
    seen = [reader.read(writer.write({**letter_of(5), "number": torch.tensor(i)})) for i in range(2)]
    assert not writer.is_full
    seen += [reader.read(writer.write({**letter_of(5), "number": torch.tensor(i)})) for i in (2, 3)]
    assert writer.is_full
    assert [int(letter["number"]) for letter in seen] == [0, 1, 2, 3]
    assert [letter["flag"].untyped_storage().resizable() for letter in seen] == [False, False, True, True]
    assert all(letter["a"]["w"].data_ptr() % 64 == 0 for letter in seen)
    writer.clear()
    reader.read(writer.write({**letter_of(5), "number": torch.tensor(9)}))
    assert [int(letter["number"]) for letter in seen] == [9, 1, 2, 3]
    writer.close()
    reader.close()


def test_a_box_keeps_the_memory_used_of_late_not_the_most_ever_used() -> None:
    writer = Mailbox(1 << 20)
    reader = Mailbox(1 << 20, os.dup(writer._fd))
    kept = []
    for size in (50_000, 10_000, 100, 20_000, 100, 100, 100, 100, 30_000):
        for i in range(3):
            letter = {**letter_of(size), "number": torch.tensor(i)}
            assert tree.equal(reader.read(writer.write(letter)), letter)
        writer.clear()
        kept.append(os.fstat(writer._fd).st_size)
    others = 3 * 64 * 4  # the tensors that are not as long
    largest_of_four = (50_000, 50_000, 50_000, 50_000, 20_000, 20_000, 20_000, 100, 30_000)
    assert kept == [others + 3 * 64 * -(-4 * size // 64) for size in largest_of_four]
    writer.close()
    reader.close()


def test_where_no_descriptor_can_be_passed_the_tensors_themselves_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_HAS_FD_PASSING", False)
    box = Mailbox()
    letter = box.write(letter_of(5))
    assert isinstance(letter, bytes)
    assert tree.equal(box.read(letter), letter_of(5))
    box.close()
