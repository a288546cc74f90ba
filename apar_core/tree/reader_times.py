"""Times of an answer as the reader of an ordered stream sees them.

A token is *certain* when all text before it is complete, so that nothing can be inserted before it
(`TreeStream`). An ordered stream sends a token once it is certain. Without forks, every token is
certain when it is generated.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ReaderTimes:
    """When the text of one answer became certain, in seconds from a common start.

    first_s, last_s: when the first and the last text became certain; None without text.
    longest_silence_s: longest time between two such moments; None with fewer than two.
    amount: of certain text, in the unit of `add`.
    """

    first_s: float | None = None
    last_s: float | None = None
    longest_silence_s: float | None = None
    amount: float = 0.0
    _amount_s: float = 0.0

    @property
    def certain_s(self) -> float | None:
        """Time to certain token: the mean time over the text; None without text."""
        return self._amount_s / self.amount if self.amount else None

    def add(self, amount: float, now_s: float) -> float | None:
        """Note text, in tokens or characters, that became certain at `now_s`.

        Return the silence before it; None for the first text, and for no text.
        """
        if amount <= 0:
            return None
        self.amount += amount
        self._amount_s += amount * now_s
        silence_s = None if self.last_s is None else now_s - self.last_s
        self.last_s = now_s
        if silence_s is None:
            self.first_s = now_s
        elif self.longest_silence_s is None or silence_s > self.longest_silence_s:
            self.longest_silence_s = silence_s
        return silence_s
