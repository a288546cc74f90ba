"""State of the engine core on its way to vLLM's own server, for its metrics.

vLLM's statistics of the scheduler have a fixed set of fields. The state travels as one more output,
of no request, which `ForkOutputProcessor` takes out. It goes to the first API process: that one's
counters are those of the engine, however many API processes share it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from apar_core.scheduler.core_state import CoreState, core_state
from apar_core.vllm_names import EngineCoreOutput, EngineCoreOutputs

STATE_ID = "apar-state"
"""In place of a request's id; those of vLLM's requests end with a random suffix."""
REPORT_S = 1.0
"""Time between two states of an engine with requests."""
_FIRST_CLIENT = 0


class StateReports:
    """Adds an engine core's state to a step's outputs: once a second, and when it has become idle.

    `engine` is the engine's index among data-parallel ones. `family_counts` is set once the worker
    is known, if it has such counts.
    """

    def __init__(self, engine: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.family_counts: Callable[[], Mapping[str, int]] | None = None
        self._engine = engine
        self._clock = clock
        self._due_s = 0.0
        # Of the last report.
        self._was_idle = True
        self._num_steps = 0

    def attach(self, outputs: dict[int, EngineCoreOutputs], scheduler: Any) -> None:
        """Add the scheduler's state to the outputs of a step, if it is due."""
        now_s, is_idle = self._clock(), not scheduler.requests
        num_steps = scheduler.step_clock.num_steps
        if is_idle:
            if self._was_idle and num_steps == self._num_steps:
                return
        elif now_s < self._due_s:
            return
        self._due_s, self._was_idle, self._num_steps = now_s + REPORT_S, is_idle, num_steps
        counts = None if self.family_counts is None else self.family_counts()
        state = replace(core_state(scheduler, counts), step_costs=None)
        report = {"engine": self._engine, "state": asdict(state)}
        # The one field that carries plain values of any kind.
        output = EngineCoreOutput(STATE_ID, [], kv_transfer_params=report)
        outputs.setdefault(_FIRST_CLIENT, EngineCoreOutputs()).outputs.append(output)


def take_state(outputs: list[EngineCoreOutput]) -> tuple[int, CoreState] | None:
    """Remove the state from outputs of an engine core; return it with the engine's index."""
    if not outputs or outputs[-1].request_id != STATE_ID:
        return None
    report = outputs.pop().kv_transfer_params or {}
    return report["engine"], CoreState.from_plain(report["state"])
