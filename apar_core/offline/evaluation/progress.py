"""How the stages of an evaluation tell how far they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class ShowProgress(Protocol):
    """Shows how far a stage is."""

    def start(self, stage: str, total: int) -> Callable[[], None]:
        """Begin a stage; call what it returns once a step."""
