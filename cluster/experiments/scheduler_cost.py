"""The scheduler's own cost per step with many threads, beside vLLM's with as many plain requests.

Both run in lockstep, a step of one after a step of the other, so that whatever else the machine
does meets both. Compared are the steps in which all threads decode: the forked ones belong to few
requests, the plain ones stand alone, with sequences of the same lengths.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from vllm import SamplingParams
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from apar_core.fork_parameters import EXTRA_ARG, ForkParameters
from apar_core.scheduler.fork_scheduler import ForkScheduler
from cluster.experiments.driven_scheduler import (
    BLOCK_SIZE,
    DrivenScheduler,
    StepCost,
    block_hasher,
    build_scheduler,
)

PLAIN, EAGER, ADAPTIVE = "vLLM, plain requests", "ours, eager", "ours, adaptive"
WAYS = (PLAIN, EAGER, ADAPTIVE)

_FORK_ID, _CHILD_ID, _END_ID, _TEXT_ID = 1, 2, 3, 7
_FORK_EVERY_TOKENS = 4
_END_SPREAD_TOKENS = 32
# A limit that no step here reaches: all forks start at once, and the cost of the model is paid.
_NO_LIMIT_MS = 1e6


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """Threads alive at once, of requests with so many each; `steps` in which all of them decode."""

    num_threads: int = 2000
    threads_per_request: int = 8
    prompt_tokens: int = 64
    steps: int = 200

    @property
    def num_requests(self) -> int:
        """Requests that fork."""
        return self.num_threads // self.threads_per_request

    @property
    def final_tokens(self) -> int:
        """Length of the shortest finished sequence: all threads have long begun by then."""
        forking = _FORK_EVERY_TOKENS * self.threads_per_request
        # Plain requests begin over more steps than forks do.
        return self.prompt_tokens + forking + max(forking, self.prompt_tokens // 2) + self.steps

    @property
    def num_blocks(self) -> int:
        """Blocks that hold every sequence, shared or not."""
        longest = self.final_tokens + _END_SPREAD_TOKENS
        return self.num_threads * (cdiv(longest, BLOCK_SIZE) + 1) + 1


@dataclass(frozen=True, slots=True)
class WayCost:
    """Medians of one way's steps with all threads, in seconds, and its cost over the whole run."""

    schedule_s: float
    update_s: float
    step_s: float
    num_steps: int
    run_s_per_kilotoken: float


@dataclass(slots=True)
class SchedulerCosts:
    """All rounds of a load."""

    load: SchedulerLoad
    rounds: list[dict[str, WayCost]] = field(default_factory=list)

    def ratios(self, way: str) -> list[float]:
        """Each round's cost of a step over vLLM's in the same round."""
        return [costs[way].step_s / costs[PLAIN].step_s for costs in self.rounds]

    def run_ratios(self, way: str) -> list[float]:
        """As `ratios`, of whole runs: with beginnings, forks and ends, per token."""
        return [
            costs[way].run_s_per_kilotoken / costs[PLAIN].run_s_per_kilotoken
            for costs in self.rounds
        ]


def measure_round(load: SchedulerLoad, checkpoint: str) -> dict[str, WayCost]:
    """One run of each way, side by side."""
    runs = dict(_runs(load, checkpoint))
    gc.collect()
    while any(not run.has_ended for run in runs.values()):
        for run in runs.values():
            if not run.has_ended:
                run.step()
    return {way: way_cost(run.costs, load.num_threads) for way, run in runs.items()}


def _runs(load: SchedulerLoad, checkpoint: str) -> Iterator[tuple[str, DrivenScheduler]]:
    ways: Mapping[str, tuple[type[Scheduler], dict[str, Any]]] = {
        PLAIN: (Scheduler, {}),
        EAGER: (ForkScheduler, {}),
        ADAPTIVE: (ForkScheduler, {"policy": "adaptive", "token_time_ms": _NO_LIMIT_MS}),
    }
    for way, (scheduler_cls, forks) in ways.items():
        scheduler = build_scheduler(
            scheduler_cls,
            checkpoint,
            max_num_seqs=load.num_threads,
            num_blocks=load.num_blocks,
            forks=forks,
        )
        forked = scheduler_cls is ForkScheduler
        for request in _requests(load, forked=forked):
            scheduler.add_request(request)
        yield way, DrivenScheduler(scheduler, _rule(load, forked=forked))


def _requests(load: SchedulerLoad, *, forked: bool) -> Iterator[Request]:
    hasher = block_hasher()
    parameters = ForkParameters(
        _FORK_ID, _CHILD_ID, True, load.threads_per_request, load.threads_per_request, (_END_ID,)
    )
    extra_args = {EXTRA_ARG: parameters.to_extra_arg()} if forked else None
    for number in range(load.num_requests if forked else load.num_threads):
        # A plain request begins where a thread does, its place in the family taken in turn.
        written = 0 if forked else _FORK_EVERY_TOKENS * (number % load.threads_per_request)
        # Prompts differ from their first token on: nothing is found in the prefix cache.
        prompt = [_TEXT_ID + number, *[_TEXT_ID] * (load.prompt_tokens + written - 1)]
        sampling = SamplingParams(max_tokens=1 << 20, extra_args=extra_args)
        sampling._eos_token_id = _END_ID
        yield Request(
            f"request-{number}",
            prompt,
            sampling,
            None,
            arrival_time=float(number),
            block_hasher=hasher,
        )


def _rule(load: SchedulerLoad, *, forked: bool) -> Callable[[Request], int]:
    """Root threads fork every few tokens; all threads end at about the same length."""
    last_fork = _FORK_EVERY_TOKENS * (load.threads_per_request - 1)

    def next_token(request: Request) -> int:
        number = request.num_output_tokens + 1
        spread = crc32(request.request_id.encode()) % _END_SPREAD_TOKENS
        if request.num_tokens + 1 >= load.final_tokens + spread:
            return _END_ID
        forks = forked and "~" not in request.request_id and number <= last_fork
        return _FORK_ID if forks and number % _FORK_EVERY_TOKENS == 0 else _TEXT_ID

    return next_token


def way_cost(costs: list[StepCost], num_threads: int) -> WayCost:
    """Medians over the steps with all threads. Raises ValueError if there was none."""
    full = [cost for cost in costs if cost.rows == num_threads]
    if not full:
        most = max(cost.rows for cost in costs)
        raise ValueError(f"no step had all {num_threads} threads: {most} at most")
    num_tokens = sum(cost.rows for cost in costs)
    return WayCost(
        schedule_s=statistics.median(cost.schedule_s for cost in full),
        update_s=statistics.median(cost.update_s for cost in full),
        step_s=statistics.median(cost.seconds for cost in full),
        num_steps=len(full),
        run_s_per_kilotoken=1000 * sum(cost.seconds for cost in costs) / num_tokens,
    )
