"""The parts that an answer travels in from a replica to the gateway.

An answer is one `AnswerStart`, then any number of `Piece`s, then one `AnswerEnd` if the replica
has lived so long.
"""

from dataclasses import dataclass

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class ThreadDelta:
    """What one thread has generated since the last delta of it.

    `path` holds the fork ordinals from the root thread, whose path is empty, down to this one;
    control and end tokens are among the `token_ids`. `finish_reason` is vLLM's `FinishReason`
    value once the thread has ended, else None.
    """

    path: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: int | None = None


Journal = tuple[ThreadDelta, ...]


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """Status, headers and the first piece of the body."""

    status: int
    headers: Headers
    body: bytes
    journal: Journal = ()


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
