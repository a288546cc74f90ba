"""Merge the outputs of a stream within an interval, to save server time per token.

With a small model, most of a server's time goes into waking a task, building a chunk and sending
it, once per token. Outputs that arrive close together are merged before that.

The engine core does the same for most requests, and saves more (`scheduler/held_outputs.py`). This
is for the others, for example those with stop strings, log-probabilities or a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from apar_core.scheduler.held_outputs import next_multiple
from apar_core.vllm_names import RequestOutputCollector, RequestState


class OutputQueue(Protocol):
    """Queue into which vLLM's output processor puts a request's outputs."""

    def put(self, output: Any) -> None: ...


class PacedQueue:
    """Passes on the first output, the last one and errors at once, and merges all others.

    Merged outputs pass when the event loop's clock is at a multiple of the interval. So the outputs
    of all streams travel together and wake each process on their way once, not once per stream.
    """

    def __init__(self, queue: OutputQueue, interval_s: Callable[[], float]) -> None:
        self._queue = queue
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._held: RequestOutput | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = float("-inf")

    def put(self, output: Any) -> None:
        """Add an output of the request; never blocks."""
        if not isinstance(output, RequestOutput):
            self._flush()
            self._queue.put(output)
            return
        if self._held is None:
            self._held = output
        else:
            self._held.add(output, aggregate=True)
        # With several choices, each choice's last output passes at once.
        ends = output.finished or any(choice.finished() for choice in output.outputs)
        if ends or self._loop.time() >= self._due_s:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._due_s, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held is not None:
            output, self._held = self._held, None
            self._due_s = next_multiple(self._loop.time(), self._interval_s())
            self._queue.put(output)


def pace(state: RequestState, interval_s: Callable[[], float]) -> None:
    """Pace the outputs of a streaming request that a task waits for."""
    if state.queue is None or state.output_kind != RequestOutputKind.DELTA:
        return
    # vLLM only puts into the queue of a request's state; the task holds the collector itself.
    state.queue = cast(RequestOutputCollector, PacedQueue(state.queue, interval_s))
