"""Hands the outputs of a stream on in intervals, so that each costs the server less.

At a small model's pace most of a server's time goes into waking a task, building a chunk and
sending it, once for every token. Outputs that come close together are merged before any of that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Protocol, cast

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState

_REQUESTS_A_STEP = 16
_MOST_STEPS = 4


class OutputQueue(Protocol):
    """Where vLLM's output processor puts what a request's task waits for."""

    def put(self, output: Any) -> None: ...


class PacedQueue:
    """Passes on the first output, the last one and errors at once, all others merged.

    The merged ones pass when the event loop's clock is at a multiple of the interval, so those of
    all streams travel together: that wakes every process on the way once, not once a stream.
    """

    def __init__(self, queue: OutputQueue, interval_s: Callable[[], float]) -> None:
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
        # One of several choices ends before its request does, and the request's end waits for none.
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
            interval_s = self._interval_s()
            self._due_s = (math.floor(self._loop.time() / interval_s) + 1) * interval_s
            self._queue.put(output)


def interval_under_load(least_s: float, num_requests: int) -> float:
    """The interval while so many requests are answered: the more, the longer, up to fourfold.

    A few streams are shown smoothly; many leave the server time for tokens rather than chunks.
    """
    return least_s * min(1 + num_requests // _REQUESTS_A_STEP, _MOST_STEPS)


def pace(state: RequestState, interval_s: Callable[[], float]) -> None:
    """Pace a request's outputs if it streams and a task waits for them."""
    if state.queue is None or state.output_kind != RequestOutputKind.DELTA:
        return
    # vLLM only ever puts into the queue of a request's state; its task keeps the collector.
    state.queue = cast(RequestOutputCollector, PacedQueue(state.queue, interval_s))
