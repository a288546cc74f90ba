"""The highest rate of requests that a replica serves within limits, by bisection over runs.

Rates lie on a grid of 3% steps, the same for all candidates, so that equal candidates get equal
rates and stricter limits never a higher one. Runs are independent of each other and of the process
that does them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apar_core.step_costs.costs import StepBatch, StepCosts
from apar_core.workload.arrivals import GammaArrivals, OpenLoop, read_arrivals
from apar_core.workload.replay_answers import ReplayAnswer
from apar_core.tree import tree_statistics
from cluster.config.model import MAX_THREADS
from cluster.sizing.replica_run import ReplicaLoad, ReplicaRun, Slos, run_replica
from cluster.sizing.requests import Workload

if TYPE_CHECKING:
    from apar_core.virtual.core import VirtualCores

_STEP = 1.03
_SIGNIFICANT_DIGITS = 3
# Steps of the grid from the estimate to a rate on the other side of the limits: 27% and 6%.
FAR = 8
NEAR = 2
_IDLE_JUMP = 64
# Share of the time that a replica is busy with single requests when it counts as idle.
_IDLE_SHARE = 0.1
_IDLE_MEASURED = 100
# Requests that are made; a run repeats them.
_DISTINCT = 2000


@dataclass(frozen=True)
class Replica:
    """An engine to be tried: the hardware's name, step costs, KV cache, and the model's shape.

    num_gpus: GPUs per replica, 0 on a CPU, whose engine does not schedule ahead.
    """

    hardware: str
    num_gpus: int
    costs: StepCosts
    kv_tokens: int
    config: Mapping[str, Any] = field(hash=False)
    max_model_len: int
    max_step_tokens: int
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all candidates share: the requests and when they come, limits, and the size of a run.

    arrivals: file of recorded times, scaled to each rate; None for a Poisson process.
    """

    workload: Workload
    slos: Slos
    max_model_len: int
    arrivals: Path | None = None
    measured: int = 400
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica with a cap on its concurrent requests, with forks or without.

    replica: its index in the question.
    """

    replica: int
    cap: int
    forked: bool


@dataclass(frozen=True, slots=True)
class Found:
    """The highest rate of a candidate within the limits, by its place on the grid.

    run: at that rate; None if even an idle replica misses a limit, then `idle` is its run.
    broken: limits that are missed one step of the grid above.
    """

    candidate: Candidate
    place: int
    run: ReplicaRun | None
    broken: tuple[str, ...]
    num_runs: int
    idle: ReplicaRun | None = None

    @property
    def rate(self) -> float:
        """The rate in requests per second, 0 if there is none."""
        return 0.0 if self.run is None else grid_rate(self.place)


def grid_rate(index: int) -> float:
    """Return the rate at a place of the grid, in requests per second."""
    return float(f"{_STEP**index:.{_SIGNIFICANT_DIGITS}g}")


class Runner:
    """Does runs of candidates in worker processes, or in this one if there are none."""

    def __init__(
        self, replicas: Sequence[Replica], conditions: Conditions, pool: ProcessPoolExecutor | None
    ) -> None:
        self.replicas = replicas
        self.conditions = conditions
        self._pool = pool
        self._in_process = threading.Lock()

    def run(
        self,
        candidate: Candidate,
        rate: float,
        *,
        measured: int | None = None,
        seed: int | None = None,
        is_complete: bool = False,
    ) -> ReplicaRun:
        """Run a candidate at a rate."""
        conditions = self.conditions
        task = (
            self.replicas[candidate.replica],
            conditions,
            ReplicaLoad(
                candidate.cap,
                candidate.forked,
                measured or conditions.measured,
                conditions.seed if seed is None else seed,
            ),
            rate,
            is_complete,
        )
        if self._pool is None:
            with self._in_process:
                return _run(*task)
        return self._pool.submit(_run, *task).result()

    def requests(self) -> list[ReplayAnswer]:
        """Return the requests of a run."""
        return _requests(self.conditions)


@contextmanager
def runner(
    replicas: Sequence[Replica], conditions: Conditions, processes: int
) -> Iterator[Runner]:
    """Provide a runner with so many worker processes; with one, runs are done in this process."""
    if processes == 1:
        yield Runner(replicas, conditions, None)
        return
    # A forked copy of a process with threads may hang.
    with ProcessPoolExecutor(processes, get_context("spawn"), _prepare_worker) as pool:
        try:
            yield Runner(replicas, conditions, pool)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def all_at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of calls that mostly wait for worker processes, in order."""
    if not calls:
        return []
    with ThreadPoolExecutor(len(calls)) as executor:
        futures: list[Future[Any]] = [executor.submit(call) for call in calls]
        return [future.result() for future in futures]


def bisect(runs: Runner, candidate: Candidate, start: int, jump: int = FAR) -> Found:
    """Return the highest rate of the grid at which a candidate keeps the limits.

    The search begins at the place `start` of the grid and goes on by `jump` to a rate on the other
    side. Higher rates are taken to be no easier.
    """
    tried: dict[int, ReplicaRun] = {}

    def keeps(index: int) -> bool:
        if index not in tried:
            tried[index] = runs.run(candidate, grid_rate(index))
        return not tried[index].broken

    low = high = start
    is_possible = False
    if keeps(start):
        while keeps(high := low + jump):
            low = high
    else:
        while not keeps(low := high - jump):
            high, jump = low, 2 * jump
            if jump < _IDLE_JUMP or is_possible:
                continue
            # Perhaps no rate is low enough.
            idle = idle_run(runs, candidate)
            if idle.broken:
                return Found(candidate, 0, None, idle.broken, len(tried) + 1, idle)
            is_possible = True
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return Found(candidate, low, tried[low], tried[high].broken, len(tried))


def idle_run(runs: Runner, candidate: Candidate) -> ReplicaRun:
    """Return the run of a replica that serves one request at a time for most of its time."""
    shape = _shape(runs.requests(), forked=candidate.forked)
    replica = runs.replicas[candidate.replica]
    alone_s = shape.steps * replica.costs.step_s(StepBatch(1, round(shape.context)))
    return runs.run(
        candidate, _IDLE_SHARE / alone_s, measured=_IDLE_MEASURED, is_complete=True
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """Means over the requests: steps, rows per step, and tokens that a row attends to."""

    steps: float
    rows: float
    context: float


def _shape(requests: Sequence[ReplayAnswer], *, forked: bool) -> _Shape:
    every = [tree_statistics(each.tree, len(each.prompt_ids)) for each in requests]
    if forked:
        steps = sum(each.decode_steps for each in every)
        attended = sum(each.attended_tokens for each in every)
        tokens = sum(each.text_tokens + each.control_tokens for each in every)
    else:
        steps = tokens = sum(each.sequential_steps for each in every)
        attended = sum(each.sequential_attended_tokens for each in every)
    return _Shape(steps / len(every), tokens / steps, attended / tokens)


def largest_cap(replica: Replica, requests: Sequence[ReplayAnswer], *, forked: bool) -> int:
    """Return how many requests' KV cache fits at once on average, at most an engine's threads."""
    shape = _shape(requests, forked=forked)
    return max(1, min(MAX_THREADS, int(replica.kv_tokens / shape.context)))


def estimated_start(
    replica: Replica, cap: int, requests: Sequence[ReplayAnswer], slos: Slos, *, forked: bool
) -> int:
    """Return a place on the grid from which the bisection has a short way to go.

    Little's law for as many requests as have room and keep the time per token. Only the number of
    runs depends on it, up to the grid's step.
    """
    shape = _shape(requests, forked=forked)
    number, limit_s = min(cap, largest_cap(replica, requests, forked=forked)), slos.token_s

    def step_s(number: int) -> float:
        rows = max(1, round(number * shape.rows))
        batch = StepBatch(rows, round(rows * shape.context))
        return replica.costs.step_s(batch, overlapped=True)

    while limit_s is not None and number > 1 and step_s(number) > limit_s:
        number -= max(1, number // 50)
    rate = number / (shape.steps * step_s(number))
    index = 0
    while grid_rate(index) < rate:
        index += 1
    while grid_rate(index) > rate:
        index -= 1
    return index


# ---- in the worker processes --------------------------------------------------------------------


def _prepare_worker() -> None:
    # vLLM and Triton write to standard error at import and exit, over the progress bar.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["OMP_NUM_THREADS"] = "1"


def _run(
    replica: Replica, conditions: Conditions, load: ReplicaLoad, rate: float, is_complete: bool
) -> ReplicaRun:
    arrivals: OpenLoop = GammaArrivals(rate)
    if conditions.arrivals is not None:
        arrivals = read_arrivals(conditions.arrivals, rate)
    return run_replica(
        _cores(replica).build(), _requests(conditions), arrivals, load, conditions.slos,
        is_complete=is_complete,
    )  # fmt: skip


@lru_cache(maxsize=8)
def _cores(replica: Replica) -> VirtualCores:
    from apar_core.virtual.core import VirtualCores
    from apar_core.virtual.engine import VirtualSpec

    return VirtualCores(
        VirtualSpec(
            replica.config, replica.costs, replica.kv_tokens, replica.block_size,
            replica.max_model_len, MAX_THREADS, replica.max_step_tokens,
            is_async=replica.num_gpus > 0,
        )
    )  # fmt: skip


@lru_cache(maxsize=2)
def _requests(conditions: Conditions) -> list[ReplayAnswer]:
    return conditions.workload.requests(
        _DISTINCT, max_tokens=conditions.max_model_len, seed=conditions.seed
    )
