"""What the threads of a request have generated: from it, an answer can be taken up again."""

from __future__ import annotations

from dataclasses import dataclass


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
