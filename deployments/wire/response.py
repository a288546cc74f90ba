"""The parts in which a response travels from a replica to the gateway.

A stream is one `ResponseStart`, any number of `Piece`s, and one `ResponseEnd`. A whole response is
any number of `Piece`s without body, then one pair of start and end. Either may end with
`ResponseBroken` at any point if the replica cannot continue, or stop if its process has died.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from apar_core.journal import Journal, ThreadDelta

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class ResponseStart:
    """Status, headers and the first piece of the body, with the other facts of that piece.

    `continuable` says whether another replica can continue the answer from its journal.
    """

    status: int
    headers: Headers
    body: bytes
    journal: Journal = ()
    num_tokens: int = 0
    continuable: bool = False
    prompt_tokens: int = 0
    certain_tokens: int = 0

    def __setstate__(self, state: list[Any]) -> None:
        """Unpickle; replicas of an earlier version send fewer fields, those of a later one more."""
        ResponseStart.__init__(self, *state[: len(fields(self))])


class Piece(NamedTuple):
    """A further piece of the body, and what the threads generated since the last part.

    `journal` covers at least the text of all pieces so far; it is empty unless the request's terms
    ask for it. `num_tokens` counts the new tokens of all threads together (thread steps).
    `prompt_tokens` counts all tokens of the prompts that the engine has so far. `certain_tokens`
    counts all text tokens so far that are certain (`TreeStream`), which an ordered stream has sent.
    """

    body: bytes
    journal: Journal = ()
    num_tokens: int = 0
    prompt_tokens: int = 0
    certain_tokens: int = 0

    @classmethod
    def from_wire(cls, wire: tuple[Any, ...]) -> "Piece":
        """Return the piece with these fields."""
        body, journal, *numbers = wire
        return cls(body, tuple(ThreadDelta(*delta) for delta in journal), *numbers)


@dataclass(frozen=True, slots=True)
class ResponseEnd:
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
class ResponseBroken:
    """The replica cannot continue: its engine has died, or it hands its requests to others."""

    reason: str
    engine_died: bool = False


def ends_response(part: object) -> bool:
    """Return whether a part is the last one of its answer."""
    is_whole = isinstance(part, tuple) and isinstance(part[0], ResponseStart)
    return is_whole or isinstance(part, ResponseEnd | ResponseBroken)


ResponsePart = ResponseStart | Piece | ResponseEnd | ResponseBroken
WholeResponse = Piece | tuple[ResponseStart, ResponseEnd] | ResponseBroken
