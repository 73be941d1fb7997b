"""Client states on disk: what comes back, what damage is found, how much the folder holds."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from redgrape import tree
from redgrape.errors import StorageError
from redgrape.runs.client_states import StateFiles, StateFolder, files_in_use


def state(client: int, round: int, size: int = 50) -> tree.Tree:
    return {"c": {"w": torch.full((size,), float(round)), "k": torch.tensor(client)}}


def round_of(states: StateFiles, client: int) -> int:
    return int(states[client]["c"]["w"][0])


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "clients")


def committed(folder: StateFolder, states: StateFiles) -> tree.Tree:
    folder.commit()
    return states.to_index()


def test_a_state_comes_back_with_every_bit_and_older_snapshots_stay(folder: StateFolder) -> None:
    empty = StateFiles(folder, 10)
    assert len(empty) == 0
    assert empty.get(3) is None
    one = empty.updated({7: state(7, 1), 3: state(3, 1)})
    two = one.updated({3: state(3, 2)})
    assert list(two) == [3, 7]
    assert [round_of(one, 3), round_of(two, 3), round_of(two, 7)] == [1, 2, 1]
    assert tree.equal(two[3], state(3, 2))
    for nobody in (-1, 4, 10):
        with pytest.raises(KeyError):
            two[nobody]


def test_an_index_finds_the_states_again(folder: StateFolder) -> None:
    states = StateFiles(folder, 10).updated({k: state(k, 1) for k in range(0, 10, 3)})
    index = tree.from_bytes(tree.to_bytes(committed(folder, states)))
    again = StateFiles.from_index(StateFolder(folder.path), index)
    assert list(again) == [0, 3, 6, 9]
    assert all(tree.equal(again[k], states[k]) for k in again)
    assert files_in_use(tree.to_bytes(index)) == {1}


def test_any_flipped_bit_and_any_cut_is_detected(folder: StateFolder) -> None:
    states = StateFiles(folder, 3).updated({k: state(k, 1, size=3) for k in range(3)})
    index = committed(folder, states)
    whole = folder.file(1).read_bytes()
    for i in range(len(whole)):
        folder.file(1).write_bytes(whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :])
        with pytest.raises(StorageError, match="is damaged: the state of client"):
            StateFiles.from_index(folder, index)
    for end in range(0, len(whole), 7):
        folder.file(1).write_bytes(whole[:end])
        with pytest.raises(StorageError, match="is damaged"):
            StateFiles.from_index(folder, index)
    folder.file(1).unlink()
    with pytest.raises(StorageError, match="cannot read"):
        StateFiles.from_index(folder, index)


@pytest.mark.parametrize(
    "spoiled",
    [
        {"num_clients": torch.tensor(1)},  # fewer than the ids say
        {"client": torch.tensor([-9, 2])},
        {"file": torch.tensor([1, 1, 1])},
        {"sha256": torch.zeros(2, 31, dtype=torch.uint8)},
        {"bytes": None},
    ],
)
def test_an_index_that_does_not_fit_is_refused(folder: StateFolder, spoiled: dict[str, torch.Tensor | None]) -> None:
    index = committed(folder, StateFiles(folder, 3).updated({k: state(k, 1) for k in (0, 2)}))
    index = {name: t for name, t in {**index, **spoiled}.items() if t is not None}
    with pytest.raises(StorageError, match="damaged"):
        StateFiles.from_index(folder, index)


def test_a_committed_file_is_never_written_again(folder: StateFolder) -> None:
    states = StateFiles(folder, 4).updated({0: state(0, 1)})
    folder.commit()
    before = hashlib.sha256(folder.file(1).read_bytes()).digest()
    states = states.updated({1: state(1, 2)}).updated({2: state(2, 3)})
    assert folder.numbers() == [1, 2]
    assert hashlib.sha256(folder.file(1).read_bytes()).digest() == before
    assert [round_of(states, k) for k in states] == [1, 2, 3]


def test_the_folder_stays_within_about_twice_the_states_however_many_rounds(folder: StateFolder) -> None:
    """40 clients, 4 a round, a checkpoint a round: without moving, the oldest file would live for dozens of rounds."""
    random = np.random.default_rng(0)
    states, newest, indices = StateFiles(folder, 40), {}, []
    for t in range(1, 201):
        sampled = random.choice(40, size=4, replace=False).tolist()
        states = states.updated({k: state(k, t) for k in sampled})
        newest |= dict.fromkeys(sampled, t)
        indices = [*indices, tree.to_bytes(committed(folder, states))][-2:]
        folder.keep_only(set().union(*map(files_in_use, indices)))
        if t > 50:
            held = sum(folder.size(n) for n in folder.numbers())
            assert held <= 3 * 40 * len(tree.to_bytes(state(0, t)))  # twice, and what the older checkpoint still needs
    assert {k: round_of(states, k) for k in states} == newest
    assert len(folder.numbers()) < 40
