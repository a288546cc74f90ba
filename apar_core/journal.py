"""What the threads of a request have generated: from it, an answer can be taken up again."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class ThreadDelta(NamedTuple):
    """What one thread has generated since the last delta of it.

    `path` holds the fork ordinals from the root thread, whose path is empty, down to this one;
    control and end tokens are among the `token_ids`. `finish_reason` is vLLM's `FinishReason`
    value once the thread has ended, else None.
    """

    path: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: int | None = None


Journal = tuple[ThreadDelta, ...]


class JournalBook:
    """A journal that grows, at four bytes a token."""

    def __init__(self, journal: Journal = ()) -> None:
        self._token_ids: dict[tuple[int, ...], array[int]] = {}
        self._reasons: dict[tuple[int, ...], int] = {}
        self.add(journal)

    def add(self, deltas: Iterable[ThreadDelta]) -> None:
        """Take what threads have generated since the last time."""
        for path, token_ids, finish_reason in deltas:
            known = self._token_ids.get(path)
            if known is None:
                self._token_ids[path] = array("i", token_ids)
            else:
                known.extend(token_ids)
            if finish_reason is not None:
                self._reasons[path] = finish_reason

    def journal(self) -> Journal:
        """One delta a thread, parents before their children."""
        return tuple(
            ThreadDelta(path, tuple(self._token_ids[path]), self._reasons.get(path))
            for path in sorted(self._token_ids)
        )


def merged(deltas: Iterable[ThreadDelta]) -> Journal:
    """One delta a thread, parents before their children."""
    book = JournalBook()
    book.add(deltas)
    return book.journal()


def to_plain(journal: Journal) -> list[Any]:
    """The journal as plain lists, fit for msgpack."""
    return [[list(d.path), list(d.token_ids), d.finish_reason] for d in journal]


def from_plain(values: Sequence[Any]) -> Journal:
    """The journal that `to_plain` wrote."""
    return tuple(
        ThreadDelta(tuple(path), tuple(token_ids), finish_reason)
        for path, token_ids, finish_reason in values
    )
