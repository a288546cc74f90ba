"""A uniform sample of a stream of lines whose length nobody knows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import IO


class LineReservoir:
    """Keeps `capacity` lines of all that it is given, each with the same chance; all if None.

    Lines that were ever chosen lie in a file, so memory holds only where. The sample depends on
    the seed and on the order of the lines alone. Source: Vitter's algorithm R.
    """

    def __init__(self, spool: IO[bytes], capacity: int | None, seed: str) -> None:
        self._spool = spool
        self._capacity = capacity
        self._random = random.Random(seed)
        self._places: list[tuple[int, int]] = []
        self._num_spooled_bytes = 0
        self.num_seen = 0

    def __len__(self) -> int:
        return len(self._places)

    def offer(self, line: bytes) -> None:
        """Take a line into the sample, or leave it."""
        self.num_seen += 1
        if self._capacity is None or len(self._places) < self._capacity:
            self._places.append(self._store(line))
            return
        index = self._random.randrange(self.num_seen)
        if index < self._capacity:
            self._places[index] = self._store(line)

    def write(self, path: Path) -> None:
        """Write the sample in the order in which its lines came."""
        self._spool.flush()
        with path.open("wb") as file:
            for start, length in sorted(self._places):
                self._spool.seek(start)
                file.write(self._spool.read(length))

    def _store(self, line: bytes) -> tuple[int, int]:
        start = self._num_spooled_bytes
        self._spool.write(line)
        self._num_spooled_bytes += len(line)
        return start, len(line)
