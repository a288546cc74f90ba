"""The parts that an answer travels in from a replica to the gateway.

A streamed answer is one `AnswerStart`, then any number of `Piece`s, then one `AnswerEnd`; a whole
one is one part of start and end. Either ends with `AnswerBroken` at any point where the replica
cannot go on, or without a word where the replica's process has died.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Piece:
    """A further piece of the body, and what the threads generated meanwhile.

    `journal` always covers at least the text of all pieces so far; it is empty unless the request's
    terms ask for it. `num_tokens` counts the tokens that all threads together generated since the
    last part: thread steps, the measure of fairness.
    """

    body: bytes
    journal: Journal = ()
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The whole cost of the answer; zeros where the request never reached the engine."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    threads: int = 0
    forks: int = 0
    critical_path_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AnswerBroken:
    """The replica cannot go on: its engine has died, or it hands its answers over to others."""

    reason: str


AnswerPart = AnswerStart | Piece | AnswerEnd | AnswerBroken
WholeAnswer = tuple[AnswerStart, AnswerEnd] | AnswerBroken
