"""What one can be told, as it happens, of the threads of a client's request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

# vLLM takes seconds to import, and the process that composes the application reads this module.
if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput


class ThreadObserver(Protocol):
    """Sees when threads begin, fork, generate and end, in the event loop of the API process.

    Threads go by their engine request ids. What is `replayed` happened in another engine, from
    which this one has taken the request over.
    """

    def began(self, root_id: str, choice: int | None) -> None:
        """The engine is about to get a request; `choice` is its number among several (`n`)."""

    def forked(self, parent_id: str, child_id: str) -> None:
        """A thread has generated a fork token; told before anything of the child."""

    def generated(self, output: EngineCoreOutput, *, replayed: bool) -> None:
        """One thread's output of one step; the output belongs to the caller."""
