"""Where the time of an engine's steps goes, by part, while everything runs in this process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from apar_core.engine.offline_engine import OfflineEngine

SCHEDULE = "schedule"
INPUTS = "model inputs"
MODEL = "model forward"
LOGITS = "logits"
PROCESSORS = "logits processors"
SAMPLING = "sampling"
TOKENS = "sampled tokens to lists"
UPDATE = "scheduler update"
OUTPUTS = "output processing"
DETOKENISING = "detokenising"
OTHER = "other"
PARTS = (
    SCHEDULE,
    INPUTS,
    MODEL,
    LOGITS,
    PROCESSORS,
    SAMPLING,
    TOKENS,
    UPDATE,
    OUTPUTS,
    DETOKENISING,
    OTHER,
)


class PartTimers:
    """Seconds by part; a part's time is its own, without that of parts called within it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self._clock = clock
        self._inner_s = 0.0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted for a part."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            outer_s, self._inner_s = self._inner_s, 0.0
            began_s = self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                took_s = self._clock() - began_s
                self.seconds[part] += took_s - self._inner_s
                self.calls[part] += 1
                self._inner_s = outer_s + took_s

        return call


@contextmanager
def timed_steps(engine: OfflineEngine, timers: PartTimers) -> Iterator[None]:
    """Time the parts of an engine's steps while the context lasts."""
    with ExitStack() as stack:
        for owner, name, part in _timed_calls(engine):
            stack.enter_context(_replaced(owner, name, timers, part))
        yield


def _timed_calls(engine: OfflineEngine) -> Iterator[tuple[Any, str, str]]:
    """(owner, method, part): names of vLLM's that the contract test of this module checks."""
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer

    llm_engine: Any = engine.llm.llm_engine
    runner = model_runner(engine)
    yield llm_engine, "step", OTHER
    yield engine.scheduler, "schedule", SCHEDULE
    yield engine.scheduler, "update_from_output", UPDATE
    for name in ("_update_states", "_prepare_inputs", "_build_attention_metadata", "_preprocess"):
        yield runner, name, INPUTS
    yield runner, "_model_forward", MODEL
    yield runner.model, "compute_logits", LOGITS
    yield runner, "_sample", SAMPLING
    yield runner, "_bookkeeping_sync", TOKENS
    for processor in runner.input_batch.logitsprocs.all:
        yield processor, "apply", PROCESSORS
        yield processor, "update_state", PROCESSORS
    yield llm_engine.output_processor, "process_outputs", OUTPUTS
    yield BaseIncrementalDetokenizer, "update", DETOKENISING


def model_runner(engine: OfflineEngine) -> Any:
    """The model runner of an engine whose worker lives in this process."""
    core: Any = engine.llm.llm_engine
    return core.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


@contextmanager
def _replaced(owner: Any, name: str, timers: PartTimers, part: str) -> Iterator[None]:
    own = name in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, timers.timed(part, original))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
