"""Which replica probably still has the beginning of a prompt in its prefix cache."""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from deployments.wire.request import RequestHint

# Of the known beginnings of a prompt only the longest are looked at; a shorter one is on the
# same replicas, and saves less.
_LOOKED_AT = 3
_NEVER = -np.inf


class PrefixTable:
    """Hashes of prompts' beginnings, and how much each replica had been sent when it got them.

    vLLM forgets the blocks used longest ago; so a replica is taken to hold a beginning until it
    has been sent as many tokens as its cache holds.
    """

    def __init__(self, max_entries: int) -> None:
        self._rows: OrderedDict[int, int] = OrderedDict()
        self._max_entries = max_entries
        self._marks: NDArray[np.float64] = np.empty((0, 0))

    def __len__(self) -> int:
        return len(self._rows)

    def resize(self, num_slots: int) -> None:
        """Make room for more replicas."""
        wider = np.full((self._marks.shape[0], num_slots), _NEVER)
        wider[:, : self._marks.shape[1]] = self._marks
        self._marks = wider

    def forget(self, slot: int) -> None:
        """The replica in a slot has gone, and its cache with it."""
        self._marks[:, slot] = _NEVER

    def sent(self, hint: RequestHint, slot: int, sent_tokens: float) -> None:
        """A replica gets a prompt, and has been sent so many tokens by then."""
        for prefix in hint.prefix_hashes:
            row = self._row(prefix)
            self._marks[row, slot] = sent_tokens

    def held_tokens(
        self, hint: RequestHint, sent_tokens: NDArray[np.float64], cache_tokens: NDArray[np.float64]
    ) -> NDArray[np.float64] | None:
        """Tokens of the prompt that each replica probably holds; None if none holds any.

        `sent_tokens` and `cache_tokens` are per slot: all ever sent there, and the cache's size.
        """
        known = [
            (row, covered)
            for prefix, covered in zip(hint.prefix_hashes, covered_tokens(hint), strict=True)
            if (row := self._rows.get(prefix)) is not None
        ]
        if not known:
            return None
        oldest = sent_tokens - cache_tokens
        held = np.zeros(len(sent_tokens))
        for row, covered in known[-_LOOKED_AT:]:
            marks = self._marks[row]
            # Before its first report a cache has no bound, and `oldest` is as low as `_NEVER`.
            held[(marks > _NEVER) & (marks >= oldest)] = covered
        return held

    def _row(self, prefix: int) -> int:
        """The row of a beginning, now the last used one."""
        row = self._rows.get(prefix)
        if row is not None:
            self._rows.move_to_end(prefix)
            return row
        if len(self._rows) >= self._max_entries:
            _, row = self._rows.popitem(last=False)
        else:
            row = len(self._rows)
            if row >= self._marks.shape[0]:
                self._grow()
        self._marks[row] = _NEVER
        self._rows[prefix] = row
        return row

    def _grow(self) -> None:
        added = min(max(64, self._marks.shape[0]), self._max_entries)
        more = np.full((added, self._marks.shape[1]), _NEVER)
        self._marks = np.concatenate([self._marks, more])


def covered_tokens(hint: RequestHint) -> tuple[int, ...]:
    """Tokens up to the end of each piece; even pieces where the hint does not say."""
    count = len(hint.prefix_hashes)
    if len(hint.prefix_tokens) == count:
        return hint.prefix_tokens
    return tuple(hint.prompt_tokens * (index + 1) // count for index in range(count))
