"""What the threads of a request have generated: from it, an answer can be taken up again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


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


def merged(deltas: Iterable[ThreadDelta]) -> Journal:
    """One delta a thread, parents before their children."""
    token_ids: dict[tuple[int, ...], list[int]] = {}
    reasons: dict[tuple[int, ...], int | None] = {}
    for delta in deltas:
        token_ids.setdefault(delta.path, []).extend(delta.token_ids)
        reasons[delta.path] = delta.finish_reason
    return tuple(
        ThreadDelta(path, tuple(token_ids[path]), reasons[path]) for path in sorted(token_ids)
    )


def to_plain(journal: Journal) -> list[Any]:
    """The journal as plain lists, fit for msgpack."""
    return [[list(d.path), list(d.token_ids), d.finish_reason] for d in journal]


def from_plain(values: Sequence[Any]) -> Journal:
    """The journal that `to_plain` wrote."""
    return tuple(
        ThreadDelta(tuple(path), tuple(token_ids), finish_reason)
        for path, token_ids, finish_reason in values
    )
