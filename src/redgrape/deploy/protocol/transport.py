"""Sends questions to nodes through Flower's grid and receives their replies. Every question has a deadline. A later
answer is ignored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from redgrape.deploy.protocol import messages, wire
from redgrape.deploy.protocol.deadlines import within
from redgrape.deploy.protocol.messages import A, Failure, Letter, Reply

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

T = TypeVar("T")

POLL = 0.1  # seconds between two polls for answers
LINK = 120.0  # seconds for the SuperLink to answer a call, which Flower would repeat for ever
_KINDS = {"train": "train", "evaluate": "evaluate"}  # Flower's types of messages; all others are queries


class NoAnswer(NamedTuple):
    """Why a node gave no answer. `again`: it may only have been busy, and can be asked again. `refused`: its policy
    does not allow the question. `no_state`: it does not have the state that the question names."""

    reason: str
    again: bool
    refused: bool = False
    no_state: bool = False


class Transport:
    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> dict[int, Any]:
        """Flower's descriptions of the connected nodes, by their ids."""
        return {node.node_id: node for node in self._call(self._grid.get_nodes)}

    def ask(self, letters: Mapping[int, Letter], kind: type[A]) -> Iterator[tuple[int, Reply[A] | NoAnswer]]:
        """The replies of nodes to these questions as they arrive; for a node that gives none, the reason."""
        for node, message in self._exchange(letters):
            if message is None:
                yield node, NoAnswer(f"gave no answer within {letters[node][0].deadline:g} seconds", again=True)
            else:
                yield node, _read(message, kind)

    def _exchange(self, letters: Mapping[int, Letter]) -> Iterator[tuple[int, Message | None]]:
        """The answers of nodes as they arrive, and None for each node that gave none in time. Late answers are never
        fetched, so none reaches a later round."""
        from flwr.app import Message

        sent = [
            Message(
                wire.pack(question.to_header(), parts),
                node,
                _KINDS.get(question.kind, "query"),
                ttl=question.deadline,
                group_id=str(question.round),
            )
            for node, (question, parts) in letters.items()
        ]
        seconds = max((question.deadline for question, _ in letters.values()), default=0.0)
        ids = self._call(self._grid.push_messages, sent, seconds=seconds) if sent else []
        waiting = {number: node for number, node in zip(ids, letters, strict=True) if number}
        for node in set(letters) - set(waiting.values()):
            yield node, None
        del sent
        ends = time.monotonic() + seconds
        while waiting and time.monotonic() < ends:
            left = ends - time.monotonic()
            for message in self._call(self._grid.pull_messages, list(waiting), seconds=left):
                number = message.metadata.reply_to_message_id
                if number in waiting:
                    yield waiting.pop(number), message
            if waiting:
                time.sleep(POLL)
        for node in waiting.values():
            yield node, None

    def _call(self, call: Callable[..., Iterable[T]], *words: Any, seconds: float = 0.0) -> list[T]:
        """The result of a call to the SuperLink, which may take this many seconds and a little more."""
        limit = max(seconds, 0.0) + LINK
        return within(
            limit,
            lambda: list(call(*words)),
            f"the SuperLink has not answered for {limit:g} seconds; see server/superlink.log, start the server again, "
            "and repeat the command: the run continues from its checkpoint",
        )


def _read(message: Message, kind: type[A]) -> Reply[A] | NoAnswer:
    if message.has_error():  # from Flower, not from the node
        return NoAnswer(f"failed: {_short(message.error.reason, 300)} (code {message.error.code})", again=True)
    try:
        header, parts = wire.unpack(message.content)
        answer = messages.read_answer(header, kind)
    except wire.NotUnderstood as error:
        return NoAnswer(f"gave an answer that cannot be read: {error}", again=False)
    if isinstance(answer, Failure):
        verb = "refuses" if answer.refused else "answers"
        return NoAnswer(f"{verb}: {_short(answer.error, 500)}", False, answer.refused, answer.no_state)
    return Reply(answer, parts)


def _short(words: object, most: int) -> str:
    return " ".join(str(words).split())[:most]
