"""The parts in which an answer travels from a replica to the gateway.

A streamed answer is one `AnswerStart`, any number of `Piece`s, and one `AnswerEnd`. A whole answer
is any number of plain integers (tokens that all threads generated since the last one), then one
pair of start and end. Either may end with `AnswerBroken` at any point if the replica cannot
continue, or simply stop if the replica's process has died.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

from apar_core.journal import Journal, ThreadDelta

Headers = list[tuple[bytes, bytes]]


class Fields:
    """Base of dataclasses that frames consist of: pickles them as their fields, in order.

    Python's default for frozen dataclasses with slots takes four times as long.
    """

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Rebuild the value from its fields."""
        return type(self), attrgetter(*self.__match_args__)(self)


@dataclass(frozen=True, slots=True)
class AnswerStart(Fields):
    """Status, headers and the first piece of the body, with that piece's tokens and journal.

    `continuable` says whether another replica can continue the answer from its journal.
    """

    status: int
    headers: Headers
    body: bytes
    journal: Journal = ()
    num_tokens: int = 0
    continuable: bool = False


WirePiece = tuple[bytes, tuple[tuple[Any, ...], ...], int]
"""A `Piece` as it is sent: a stream has hundreds, and a class pickles ten times slower."""


class Piece(NamedTuple):
    """A further piece of the body, and what the threads generated since the last part.

    `journal` covers at least the text of all pieces so far; it is empty unless the request's terms
    ask for it. `num_tokens` counts the new tokens of all threads together (thread steps).
    """

    body: bytes
    journal: Journal = ()
    num_tokens: int = 0

    def to_wire(self) -> WirePiece:
        """Return the piece as plain tuples."""
        return self.body, tuple(tuple(delta) for delta in self.journal), self.num_tokens

    @classmethod
    def from_wire(cls, wire: WirePiece) -> "Piece":
        """Return the piece that `to_wire` wrote."""
        body, journal, num_tokens = wire
        return cls(body, tuple(ThreadDelta(*delta) for delta in journal), num_tokens)


@dataclass(frozen=True, slots=True)
class AnswerEnd(Fields):
    """The cost of the whole answer; zeros if the request never reached the engine.

    `replica` is Ray Serve's id of the replica that finished the answer. The request spent
    `replica_s` seconds there, `engine_s` of them in the engine.
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
class AnswerBroken(Fields):
    """The replica cannot continue: its engine has died, or it hands its requests to others."""

    reason: str
    engine_died: bool = False


def ends_answer(part: object) -> bool:
    """Return whether a part is the last one of its answer."""
    is_whole = isinstance(part, tuple) and isinstance(part[0], AnswerStart)
    return is_whole or isinstance(part, AnswerEnd | AnswerBroken)


AnswerPart = AnswerStart | WirePiece | AnswerEnd | AnswerBroken
WholeAnswer = int | tuple[AnswerStart, AnswerEnd] | AnswerBroken
