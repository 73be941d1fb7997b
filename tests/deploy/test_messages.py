"""What crosses between server and site is held to its types, in both directions."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from redgrape.deploy.protocol import messages
from redgrape.deploy.protocol.messages import (
    ColumnsAnswer,
    ColumnsQuestion,
    EvaluateAnswer,
    EvaluateQuestion,
    Failure,
    JoinAnswer,
    JoinQuestion,
    PrepareAnswer,
    PrepareQuestion,
    Stage,
    SumAnswer,
    SumQuestion,
    SurveyAnswer,
    SurveyQuestion,
    TrainAnswer,
    TrainQuestion,
)
from redgrape.deploy.protocol.wire import PROTOCOL, NotUnderstood

OF_RUN: dict[str, Any] = {
    "deadline": 2.5,
    "run": "a",
    "experiment": "[net]",
    "files": {"a.py": "0f"},
    "columns": {"label": "c"},
}
TRAIN = TrainQuestion(**OF_RUN, round=3, reach=4, state=2, state_key=9)
SUM = SumQuestion.about(TRAIN, "s", Stage("revealed", [0, 2], [1]), deadline=9.0)
QUESTIONS = [
    JoinQuestion(deadline=30.0, secure_aggregation=True),
    PrepareQuestion(**OF_RUN),
    ColumnsQuestion(**OF_RUN),
    SurveyQuestion(**OF_RUN),
    TRAIN,
    replace(TRAIN, state=None, state_key=None),
    EvaluateQuestion(**OF_RUN),
    SUM,
]
JOIN = JoinAnswer(
    site=1,
    name="south",
    sites=3,
    agreement={"classes": ["a", "b"]},
    secure_aggregation=False,
    evaluates=True,
    redgrape="1",
    torch="2",
    numpy="3",
    machine="m",
    cpu="c",
    examples=5,
    tests=0,
)
ANSWERS = [
    JOIN,
    replace(JOIN, examples=None, tests=None),
    PrepareAnswer(site=0),
    ColumnsAnswer(site=1),
    SurveyAnswer(site=0),
    TrainAnswer(site=0, round=3, state_key=7),
    EvaluateAnswer(site=2),
    SumAnswer(site=2, layout=[["x", "real", [3]]], state_key=5),
]


def crossed(message: Any) -> Any:
    return json.loads(json.dumps(message.to_header()))


@pytest.mark.parametrize("message", [*QUESTIONS, *ANSWERS], ids=lambda message: type(message).__name__)
def test_what_is_read_is_what_was_written_and_nothing_else_is_taken(message: Any) -> None:
    header = crossed(message)
    assert type(message).from_header(header) == message
    assert type(message).from_header(header | {"more": 1}) == message
    for field in fields(message):
        if field.name in header:
            with pytest.raises(NotUnderstood, match=f"'{field.name}' must be"):
                type(message).from_header(header | {field.name: object()})
    with pytest.raises(NotUnderstood, match="protocol 99"):
        type(message).from_header(header | {"protocol": 99})


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.kind)
def test_a_question_is_known_by_its_kind(question: messages.Question) -> None:
    assert messages.read_question(crossed(question)) == question
    assert messages.deadline_of(crossed(question)) == question.deadline
    assert messages.deadline_of(crossed(question) | {"kind": "dance"}) == 0


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), 10**400, "5", True])
def test_a_deadline_is_a_finite_time(seconds: Any) -> None:
    """Zero would be none at all."""
    with pytest.raises(NotUnderstood, match="'deadline' must be seconds above 0"):
        messages.read_question(crossed(TRAIN) | {"deadline": seconds})


def test_a_stage_of_a_sum_has_all_of_the_question_whose_answers_are_added() -> None:
    assert SUM.added() == replace(TRAIN, deadline=9.0)
    assert (SUM.arrived, SUM.lost) == ([0, 2], [1])
    for of in ("join", "sum", "dance"):
        with pytest.raises(NotUnderstood, match=f"a sum of '{of}'"):
            replace(SUM, of=of).added()


def test_a_failure_is_read_whatever_protocol_its_site_speaks() -> None:
    header = {"protocol": 7, "site": 1, "round": 3, "error": "too old"}
    assert messages.read_answer(header, TrainAnswer) == Failure(site=1, error="too old")
    with pytest.raises(NotUnderstood, match="'error' must be text"):
        messages.read_answer({"protocol": PROTOCOL, "error": [1]}, TrainAnswer)
