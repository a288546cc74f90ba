"""The parts that an answer travels in from a replica to the gateway.

A streamed answer is one `AnswerStart`, then any number of `Piece`s, then one `AnswerEnd`; a whole
one is one part of start and end, after any number of plain integers: the tokens that all threads
together have generated since the last one. Either ends with `AnswerBroken` at any point where the
replica cannot go on, or without a word where the replica's process has died.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from apar_core.journal import Journal, ThreadDelta

__all__ = [
    "AnswerBroken",
    "AnswerEnd",
    "AnswerPart",
    "AnswerStart",
    "Headers",
    "Journal",
    "Piece",
    "ThreadDelta",
    "WholeAnswer",
    "WirePiece",
]

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """Status, headers and the first piece of the body, with that piece's tokens and journal.

    `continuable` tells whether the journals of this answer allow another replica to go on with it.
    """

    status: int
    headers: Headers
    body: bytes
    journal: Journal = ()
    num_tokens: int = 0
    continuable: bool = False


WirePiece = tuple[bytes, tuple[tuple[Any, ...], ...], int]
"""A piece as it travels: a stream has hundreds, and pickling a class costs ten times a tuple."""


class Piece(NamedTuple):
    """A further piece of the body, and what the threads generated meanwhile.

    `journal` always covers at least the text of all pieces so far; it is empty unless the request's
    terms ask for it. `num_tokens` counts the tokens that all threads together generated since the
    last part: thread steps, the measure of fairness.
    """

    body: bytes
    journal: Journal = ()
    num_tokens: int = 0

    def to_wire(self) -> WirePiece:
        """The piece in plain tuples."""
        return self.body, tuple(tuple(delta) for delta in self.journal), self.num_tokens

    @classmethod
    def from_wire(cls, wire: WirePiece) -> "Piece":
        """The piece that `to_wire` wrote."""
        body, journal, num_tokens = wire
        return cls(body, tuple(ThreadDelta(*delta) for delta in journal), num_tokens)


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The whole cost of the answer; zeros where the request never reached the engine.

    `replica` is Ray Serve's id of the one that the answer ended on. The request was there for
    `replica_s` seconds, and for `engine_s` of these in its engine.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    threads: int = 0
    forks: int = 0
    critical_path_tokens: int = 0
    replica: str | None = None
    replica_s: float = 0.0
    engine_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AnswerBroken:
    """The replica cannot go on: its engine has died, or it hands its answers over to others."""

    reason: str
    engine_died: bool = False


AnswerPart = AnswerStart | WirePiece | AnswerEnd | AnswerBroken
WholeAnswer = int | tuple[AnswerStart, AnswerEnd] | AnswerBroken
