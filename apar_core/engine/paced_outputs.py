"""Hands the outputs of a stream on in intervals, so that each costs the server less.

At a small model's pace most of a server's time goes into waking a task, building a chunk and
sending it, once for every token. Outputs that come close together are merged before any of that.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, Protocol, cast

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState


class OutputQueue(Protocol):
    """Where vLLM's output processor puts what a request's task waits for."""

    def put(self, output: Any) -> None: ...


class PacedQueue:
    """Passes on the first output, the last one and errors at once, all others merged.

    The merged ones pass when the event loop's clock is at a multiple of `interval_s`, so those of
    all streams travel together: that wakes every process on the way once, not once a stream.
    """

    def __init__(self, queue: OutputQueue, interval_s: float) -> None:
        self._queue = queue
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._held: RequestOutput | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = float("-inf")

    def put(self, output: Any) -> None:
        """Take an output of the request; never blocks."""
        if not isinstance(output, RequestOutput):
            self._flush()
            self._queue.put(output)
            return
        if self._held is None:
            self._held = output
        else:
            self._held.add(output, aggregate=True)
        if output.finished or self._loop.time() >= self._due_s:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._due_s, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held is not None:
            output, self._held = self._held, None
            periods = math.floor(self._loop.time() / self._interval_s)
            self._due_s = (periods + 1) * self._interval_s
            self._queue.put(output)


def pace(state: RequestState, interval_s: float) -> None:
    """Pace a request's outputs if it streams and a task waits for them."""
    if state.queue is None or state.output_kind != RequestOutputKind.DELTA:
        return
    # vLLM only ever puts into the queue of a request's state; its task keeps the collector.
    state.queue = cast(RequestOutputCollector, PacedQueue(state.queue, interval_s))
