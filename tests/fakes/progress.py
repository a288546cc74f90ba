"""The progress of a run, shown to nobody."""

from __future__ import annotations

from collections.abc import Callable


class NoProgress:
    """Shows nothing, and counts the steps."""

    def __init__(self) -> None:
        self.steps = 0

    def start(self, stage: str, total: int, done: int = 0) -> Callable[[], None]:
        return self._step

    def _step(self) -> None:
        self.steps += 1
