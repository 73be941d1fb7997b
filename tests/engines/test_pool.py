"""Many more clients than workers: boxes and pipes that are too small for what waits in them."""

from __future__ import annotations

import functools

import pytest
import torch

from redgrape import nets, tree
from redgrape.engines import Answer, ClientHalf, pool
from redgrape.engines.in_process import InProcess
from redgrape.methods.fedavg import FedAvg
from toys import VECTOR, federation

CLIENTS = 90
LINEAR = functools.partial(nets.build, "linear", VECTOR, 3, seed=0)


def assert_same_answers(method: FedAvg, states: dict[int, tree.Tree], deadline: float | None = None) -> None:
    """In workers as in this process."""
    data = federation(*[[1 + k % 3, 2, k % 2] for k in range(CLIENTS)])
    half = ClientHalf(method, data, LINEAR, 0, 1, torch.device("cpu"))
    round_one = {"model": dict(LINEAR().state_dict())}, range(CLIENTS), states, 1
    alone = dict(InProcess(half).run_clients(*round_one))
    with pool.Pool(half, 2, deadline) as workers:
        for _ in range(2):
            pooled = dict(workers.run_clients(*round_one))
            assert [k for k, answer in alone.items() if not same(answer, pooled[k])] == []


def same(a: object, b: object) -> bool:
    assert isinstance(a, Answer) and isinstance(b, Answer)
    return tree.equal({"update": a.update, "state": a.state}, {"update": b.update, "state": b.state})


@pytest.mark.parametrize("room", [0, 2000, 20_000])  # bytes: of an answer there are 400
def test_no_answer_is_overwritten_before_it_is_read(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a worker that has many tasks queued and no room for what it answers."""
    monkeypatch.setattr(pool, "OUTBOXES", room)
    assert_same_answers(FedAvg(epochs=1), {})


class LongNames(FedAvg):
    """Its letters fill the pipe between two processes, in both directions."""

    def client_update(self, broadcast, state, site):
        return {name: t + 1 for name, t in state.items()}, state


def test_a_full_pipe_to_a_busy_worker_keeps_nobody_waiting_for_ever() -> None:
    state = {f"{i}{'x' * 10_000}": torch.tensor(i) for i in range(10)}
    assert_same_answers(LongNames(), dict.fromkeys(range(CLIENTS), state))


@pytest.mark.parametrize("deadline", [1e7, float("inf")])
def test_a_deadline_may_be_as_long_as_one_likes(deadline: float) -> None:
    assert_same_answers(FedAvg(epochs=1), {}, deadline)
