"""The questions and answers between server and site, with the fields of their headers.

Nothing that comes over the wire is trusted. Both sides read headers here, and the type of every field is checked.
Tensors travel beside the header (wire.py). A message names its group of tensors by `carries`.

    join        who the node is, and whether its data fits
    prepare     what takes long before the first round, such as the embeddings of a frozen encoder
    columns     sums over the columns of a table
    survey      what a method must know before the first round
    train       a client's round
    evaluate    the scores of a model on the site's test set
    sum         one stage of a secure sum (secure_sum.py) of the answers to one of the last four
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeAlias, TypeVar

from redgrape.deploy.protocol.wire import PROTOCOL, Header, NotUnderstood, Parts

_TYPES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number", lambda value: type(value) is int and abs(value) < 1 << 63),
    "float": ("seconds above 0", lambda value: type(value) in (int, float) and 0 < value <= 1e9),
    "str": ("text", lambda value: isinstance(value, str)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "dict[str, Any]": ("a table", lambda value: isinstance(value, dict)),
    "list[Any]": ("a list", lambda value: isinstance(value, list)),
    "list[int]": ("a list of whole numbers", lambda v: isinstance(v, list) and all(type(n) is int for n in v)),
}


@dataclass(frozen=True, kw_only=True)
class _Message:
    carries: ClassVar[str] = ""  # the name of its tensors

    def to_header(self) -> Header:
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"protocol": PROTOCOL} | {name: value for name, value in said.items() if value is not None}

    @classmethod
    def from_header(cls, header: Header) -> Self:
        """NotUnderstood if a field is missing or has another type."""
        if header.get("protocol") != PROTOCOL:
            raise NotUnderstood(f"it speaks protocol {str(header.get('protocol'))[:40]}, and we speak {PROTOCOL}")
        said: dict[str, Any] = {}
        for field in fields(cls):
            value = header.get(field.name)
            if value is None and field.default is not MISSING:
                continue
            what, holds = _TYPES[str(field.type).removesuffix(" | None")]
            if not holds(value):
                raise NotUnderstood(f"'{field.name}' must be {what}, and is {str(value)[:40]}")
            said[field.name] = value
        return cls(**said)


@dataclass(frozen=True, kw_only=True)
class Question(_Message):
    kind: ClassVar[str]

    deadline: float  # seconds
    round: int = 0  # none

    def to_header(self) -> Header:
        return {**super().to_header(), "kind": self.kind}


@dataclass(frozen=True, kw_only=True)
class JoinQuestion(Question):
    """`secure_aggregation`: whether the server asks for secure sums only."""

    kind = "join"

    secure_aggregation: bool


@dataclass(frozen=True, kw_only=True)
class OfRun(Question):
    """`files`: SHA-256 of the user's code and the pretrained encoder that the experiment names. `columns`: how rows of
    a table become inputs, once it is known."""

    run: str  # the name under which sites keep their states
    experiment: str  # TOML
    files: dict[str, Any] | None = None
    columns: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class PrepareQuestion(OfRun):
    kind = "prepare"


@dataclass(frozen=True, kw_only=True)
class ColumnsQuestion(OfRun):
    kind = "columns"


@dataclass(frozen=True, kw_only=True)
class SurveyQuestion(OfRun):
    kind = "survey"


@dataclass(frozen=True, kw_only=True)
class TrainQuestion(OfRun):
    """`state`, `state_key`: the round and the key of the client's state that the server counts on; None before the
    client's first. `reach`: how many rounds the server may go back."""

    kind, carries = "train", "broadcast"

    reach: int
    state: int | None = None
    state_key: int | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluateQuestion(OfRun):
    kind, carries = "evaluate", "model"


class Stage(NamedTuple):
    """A stage of a secure sum. The last one says who `arrived` and who was `lost`."""

    name: str
    arrived: list[int] | None = None
    lost: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class SumQuestion(OfRun):
    """A stage of the sum with this name, and all fields of the question whose answers are added."""

    kind = "sum"

    sum: str
    of: str
    stage: str
    arrived: list[int] | None = None
    lost: list[int] | None = None
    reach: int | None = None
    state: int | None = None
    state_key: int | None = None

    @classmethod
    def about(cls, question: Question, name: str, stage: Stage, deadline: float) -> SumQuestion:
        more = {"sum": name, "of": question.kind, "stage": stage.name, "arrived": stage.arrived, "lost": stage.lost}
        return cls.from_header({**question.to_header(), **more, "deadline": deadline})

    def added(self) -> Question:
        """The question whose answers are added."""
        if self.of not in ("columns", "survey", "train", "evaluate"):
            raise NotUnderstood(f"the server asks for a sum of {self.of[:40]!r}, which is not known here")
        return read_question({**self.to_header(), "kind": self.of})


_QUESTIONS: Mapping[str, type[Question]] = {
    question.kind: question
    for question in (
        JoinQuestion,
        PrepareQuestion,
        ColumnsQuestion,
        SurveyQuestion,
        TrainQuestion,
        EvaluateQuestion,
        SumQuestion,
    )
}


def read_question(header: Header) -> Question:
    kind = header.get("kind")
    if not isinstance(kind, str) or kind not in _QUESTIONS:
        raise NotUnderstood(f"the server asks {str(kind)[:40]!r}, which is not known here")
    return _QUESTIONS[kind].from_header(header)


def deadline_of(header: Header) -> float:
    """The deadline of a question in seconds; 0 if the header is invalid, since the answer is then an error at once."""
    try:
        return read_question(header).deadline
    except NotUnderstood:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Answer(_Message):
    site: int


@dataclass(frozen=True, kw_only=True)
class JoinAnswer(Answer):
    """A site that answers only in secure sums does not send its numbers of examples."""

    name: str
    sites: int
    agreement: dict[str, Any]
    secure_aggregation: bool
    evaluates: bool
    redgrape: str
    torch: str
    numpy: str
    machine: str
    cpu: str
    examples: int | None = None
    tests: int | None = None


@dataclass(frozen=True, kw_only=True)
class PrepareAnswer(Answer):
    pass


@dataclass(frozen=True, kw_only=True)
class ColumnsAnswer(Answer):
    carries = "columns"


@dataclass(frozen=True, kw_only=True)
class SurveyAnswer(Answer):
    carries = "survey"


@dataclass(frozen=True, kw_only=True)
class TrainAnswer(Answer):
    """`state_key`: the key of the client's new state; None if it has none."""

    carries = "update"

    round: int
    state_key: int | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluateAnswer(Answer):
    carries = "scores"


@dataclass(frozen=True, kw_only=True)
class SumAnswer(Answer):
    """`layout`: names and shapes of what was masked. `state_key`: as in the answer that was added."""

    layout: list[Any] | None = None
    state_key: int | None = None


@dataclass(frozen=True, kw_only=True)
class Failure(_Message):
    """`refused`: the site's policy does not allow what was asked, so asking again does not help. `no_state`: the site
    does not have the state that the question names."""

    error: str
    site: int | None = None
    refused: bool = False
    no_state: bool = False


A = TypeVar("A", bound=Answer)


@dataclass(frozen=True)
class Reply(Generic[A]):
    """A site's answer with its tensors."""

    answer: A
    parts: Parts


def read_answer(header: Header, kind: type[A]) -> A | Failure:
    """A failure is read whatever protocol the site speaks, since it says so there."""
    if "error" in header:
        return Failure.from_header({**header, "protocol": PROTOCOL})
    return kind.from_header(header)


Letter: TypeAlias = tuple[Question, Parts]
