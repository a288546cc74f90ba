"""Journal of the tokens that a request's threads have generated; another engine can continue it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from apar_core.tree.thread_names import ThreadPath


class EndReason(IntEnum):
    """Why a thread has ended, with the values of vLLM's `FinishReason`.

    Gateways read journals too, and have no vLLM.
    """

    STOP = 0
    LENGTH = 1
    ABORT = 2


class ThreadDelta(NamedTuple):
    """Tokens that one thread has generated since its last delta.

    `token_ids` include control and end tokens. `finish_reason` is a value of vLLM's `FinishReason`
    once the thread has ended, else None.
    """

    path: ThreadPath
    token_ids: tuple[int, ...]
    finish_reason: int | None = None

    @property
    def stopped(self) -> bool:
        """Whether the thread has ended by itself, or at a stop string."""
        return self.finish_reason == EndReason.STOP

    @property
    def was_refused(self) -> bool:
        """Whether a fork opened no thread: its child ends by length before any token."""
        return self.finish_reason == EndReason.LENGTH and not self.token_ids


Journal = tuple[ThreadDelta, ...]


class JournalBook:
    """Growing journal that merges the deltas of each thread; takes four bytes per token."""

    def __init__(self) -> None:
        self._token_ids: dict[ThreadPath, array[int]] = {}
        self._reasons: dict[ThreadPath, int] = {}

    def add(self, deltas: Iterable[ThreadDelta]) -> None:
        """Append the deltas to their threads."""
        for path, token_ids, finish_reason in deltas:
            known = self._token_ids.get(path)
            if known is None:
                self._token_ids[path] = array("i", token_ids)
            else:
                known.extend(token_ids)
            if finish_reason is not None:
                self._reasons[path] = finish_reason

    def journal(self) -> Journal:
        """Return one delta per thread, parents before their children."""
        return tuple(
            ThreadDelta(path, tuple(self._token_ids[path]), self._reasons.get(path))
            for path in sorted(self._token_ids)
        )


def to_plain(journal: Journal) -> list[Any]:
    """Return the journal as plain lists for msgpack."""
    return [[list(d.path), list(d.token_ids), d.finish_reason] for d in journal]


def from_plain(values: Sequence[Any]) -> Journal:
    """Return the journal that `to_plain` wrote."""
    return tuple(
        ThreadDelta(tuple(path), tuple(token_ids), finish_reason)
        for path, token_ids, finish_reason in values
    )
