"""Time of an event loop that passes only while all tasks wait for timers.

A test whose timers run in simulated time has the same result on a machine that stalls.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

CLOCKS = ("time", "monotonic", "perf_counter")
# Rounding must not leave the clock before the timer that it has moved to.
_STEP_S = 1e-9


class SimulatedTime:
    """The clock of the running event loop: it moves to the next timer when no task can run.

    It stands still while the loop's executor works. Not for tests whose tasks wait for sockets.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop: Any = asyncio.get_running_loop()
        self._start_s = self.now_s = loop.time()
        self._select = loop._selector.select
        self._run_in_executor = loop.run_in_executor
        self._num_in_executor = 0
        monkeypatch.setattr(loop, "time", lambda: self.now_s)
        monkeypatch.setattr(loop, "run_in_executor", self._in_executor)
        monkeypatch.setattr(loop._selector, "select", self._pass_time)

    def clock(self, name: str) -> Callable[[], float]:
        """Return a clock that stands at the present time of the module `time`'s, and follows."""
        present_s = getattr(time, name)() - (self.now_s - self._start_s)
        return lambda: present_s + self.now_s - self._start_s

    def _in_executor(self, *arguments: Any) -> Any:
        future = self._run_in_executor(*arguments)
        self._num_in_executor += 1
        future.add_done_callback(self._executor_done)
        return future

    def _executor_done(self, _: object) -> None:
        self._num_in_executor -= 1

    def _pass_time(self, timeout_s: float | None = None) -> Any:
        if timeout_s is None or timeout_s <= 0:
            return self._select(timeout_s)
        if self._num_in_executor:
            return self._select(None)
        events = self._select(0)
        if not events:
            self.now_s += timeout_s + _STEP_S
        return events
