"""Search for the highest request rate that a replica serves within limits.

The search first finds the cap on concurrent requests: the largest at which a saturated replica
meets the limit on time per token. It then bisects the rate. Rates lie on a grid of 3% steps, the
same for all candidates: equal candidates get equal rates, and stricter limits never a higher rate.
A run depends only on its arguments, not on the process that executes it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apar_core.attention.settings import FamilySettings
from apar_core.step_costs.costs import StepBatch, StepCosts
from apar_core.tree import tree_statistics
from cluster.lab.sizing.replica_run import ReplicaDriver, ReplicaLoad, ReplicaRun, Slos
from cluster.lab.sizing.requests import Workload
from cluster.loadtest.arrivals import GammaArrivals, OpenLoop, read_arrivals
from deployments.config.model import MAX_THREADS

if TYPE_CHECKING:
    from cluster.lab.virtual.core import VirtualCores
    from cluster.loadtest.replay_answers import ReplayAnswer

UTILISATION = 0.9
"""Largest planned share of a saturated replica's rate. Above it, a queue takes minutes to reach
its steady length, and no run is long enough."""
_STEP = 1.03
_SIGNIFICANT_DIGITS = 3
# First jump of the rate search in grid steps: 27%.
_JUMP = 8
# Grid steps below its highest rate at which a replica counts as idle: a twentieth of that rate.
_IDLE_STEPS = 100
_IDLE_MEASURED = 100
_CAP_STEP = 1.1
# Distinct requests; a longer run repeats them.
_DISTINCT = 2000
_EVEN_REQUESTS = 200


@dataclass(frozen=True)
class Replica:
    """An engine to try: the hardware's name, step costs, KV cache, and the model's shape.

    num_gpus: GPUs per replica; 0 on a CPU, where scheduling is not asynchronous.
    family: settings of `attention: family`; None: each row reads its own KV blocks.
    """

    hardware: str
    num_gpus: int
    costs: StepCosts
    kv_tokens: int
    config: Mapping[str, Any] = field(hash=False)
    max_model_len: int
    max_step_tokens: int
    block_size: int = 16
    family: FamilySettings | None = None


@dataclass(frozen=True, slots=True)
class SearchConditions:
    """Inputs shared by all candidates: requests, arrivals, limits, and the size of a run.

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
    """A replica, by its index in `Runner.replicas`, with a cap on running requests."""

    replica: int
    cap: int
    forked: bool


@dataclass(frozen=True, slots=True)
class Saturated:
    """A run of a candidate that is always at its cap, and the rate at which requests finish."""

    candidate: Candidate
    run: ReplicaRun
    rate: float
    num_runs: int


@dataclass(frozen=True, slots=True)
class Found:
    """Highest rate of a candidate within the limits.

    place: position of the rate on the grid.
    run: the run at that rate; None if even an idle replica misses a limit (`idle` is its run).
    broken: limits missed one grid step higher; "throughput" if that rate exceeds `UTILISATION` of
        the saturated rate. Without a run, the limits that an idle replica misses.
    """

    saturated: Saturated
    place: int
    run: ReplicaRun | None
    broken: tuple[str, ...]
    num_runs: int
    idle: ReplicaRun | None = None

    @property
    def candidate(self) -> Candidate:
        """The candidate that was searched."""
        return self.saturated.candidate

    @property
    def rate(self) -> float:
        """Requests per second; 0 if no rate is within the limits."""
        return 0.0 if self.run is None else grid_rate(self.place)


@dataclass(frozen=True, slots=True)
class Shape:
    """Means over requests.

    steps: steps of the critical path.
    tokens: generated tokens, with control and end tokens, and the token that asynchronous
        scheduling computes past the end of each thread.
    context: tokens that a generated token attends to. prompt: tokens of the client's prompt.
    """

    steps: float
    tokens: float
    context: float
    prompt: float


@cache
def grid_rate(place: int) -> float:
    """Return the rate at a position of the grid, in requests per second."""
    return float(f"{_STEP**place:.{_SIGNIFICANT_DIGITS}g}")


def rate_place(rate: float) -> int:
    """Return the grid position of the largest grid rate that is not above a rate."""
    place = math.ceil(math.log(rate, _STEP)) + 1
    while grid_rate(place) > rate:
        place -= 1
    return place


class Runner:
    """Runs candidates under common conditions."""

    def __init__(self, replicas: Sequence[Replica], conditions: SearchConditions) -> None:
        self.replicas = tuple(replicas)
        self.conditions = conditions
        self._shapes = {forked: _shape(_requests(conditions), forked) for forked in (True, False)}

    @property
    def forks(self) -> bool:
        """Whether any request forks."""
        return any(request.num_threads > 1 for request in _requests(self.conditions))

    def shape(self, *, forked: bool) -> Shape:
        """Return the mean request."""
        return self._shapes[forked]

    def run(
        self,
        candidate: Candidate,
        rate: float | None,
        slos: Slos | None = None,
        *,
        measured: int | None = None,
        seed: int | None = None,
        is_complete: bool = False,
    ) -> ReplicaRun:
        """Run a candidate at a rate, or saturated if it is None.

        Limits, number of measured requests and seed are those of the conditions by default.
        """
        conditions = self.conditions
        load = ReplicaLoad(
            candidate.cap,
            candidate.forked,
            measured or conditions.measured,
            conditions.seed if seed is None else seed,
        )
        return _run(
            self.replicas[candidate.replica],
            conditions,
            load,
            rate,
            slos or conditions.slos,
            is_complete,
        )

    def largest_cap(self, replica: int, *, forked: bool) -> int:
        """Return how many requests fit into the KV cache on average, at most `MAX_THREADS`."""
        context = self.shape(forked=forked).context
        return max(1, min(MAX_THREADS, int(self.replicas[replica].kv_tokens / context)))

    def estimated_cap(self, replica: int, token_s: float, *, forked: bool) -> int:
        """Estimate the largest cap that meets a time per token, to start the search there."""
        shape, costs = self.shape(forked=forked), self.replicas[replica].costs
        reads_together = forked and self.replicas[replica].family is not None

        def step_s(requests: int) -> float:
            rows = max(1, round(requests * shape.tokens / shape.steps))
            batch = StepBatch(rows, round(rows * shape.context))
            further = rows - requests
            if reads_together and further > 0:
                # All threads of a request read at least the prompt together.
                saved = round(further * shape.prompt)
                batch = replace(
                    batch, saved_tokens=saved, group_passes=1, groups=requests, grouped_rows=rows
                )
            return costs.step_s(batch, overlapped=True)

        cap = self.largest_cap(replica, forked=forked)
        while cap > 1 and step_s(cap) > token_s:
            cap -= max(1, cap // 50)
        return cap


def highest(
    keeps: Callable[[int], bool], start: int, *, jump: int, least: int, most: int
) -> int | None:
    """Return the largest number from `least` to `most` for which `keeps` is true; None if none is.

    `keeps` is assumed to stay false once it is false for a smaller number. The search moves away
    from `start` in doubling jumps, then bisects.
    """
    low, high = least - 1, most + 1
    number = min(max(start, least), most)
    while high - low > 1:
        if keeps(number):
            low = number
            number = min(low + jump, most) if high > most else (low + high) // 2
        else:
            high = number
            number = max(high - jump, least) if low < least else (low + high) // 2
        jump *= 2
    return low if low >= least else None


def find_cap(runs: Runner, replica: int, *, forked: bool) -> Saturated:
    """Return the largest cap at which a saturated replica meets the limit on time per token.

    The cap is at most `Runner.largest_cap`. It is 1 if no cap meets the limit.
    """
    most = runs.largest_cap(replica, forked=forked)
    steps = range(math.ceil(math.log(most, _CAP_STEP)) + 1) if most > 1 else range(1)
    caps = sorted({min(round(_CAP_STEP**step), most) for step in steps})
    limit_s = runs.conditions.slos.token_s
    tried: dict[int, Saturated] = {}

    def keeps(place: int) -> bool:
        tried[place] = saturate(runs, Candidate(replica, caps[place], forked))
        return not tried[place].run.broken

    start = len(caps) - 1
    if limit_s is not None:
        estimate = runs.estimated_cap(replica, limit_s, forked=forked)
        start = max(place for place, cap in enumerate(caps) if cap <= estimate)
    place = highest(keeps, start, jump=2, least=0, most=len(caps) - 1) or 0
    found = tried[place]
    return Saturated(found.candidate, found.run, found.rate, len(tried))


def saturate(runs: Runner, candidate: Candidate, *, is_complete: bool = False) -> Saturated:
    """Run a candidate that is always at its cap."""
    token_slo = Slos(token_s=runs.conditions.slos.token_s)
    run = runs.run(candidate, None, token_slo, is_complete=is_complete)
    rate = run.rows_per_s / runs.shape(forked=candidate.forked).tokens
    return Saturated(candidate, run, rate, 1)


def bisect(runs: Runner, saturated: Saturated) -> Found:
    """Return the highest rate of the grid at which a candidate meets the limits."""
    candidate = saturated.candidate
    if saturated.rate == 0:
        # The run ended in its warm-up: not even one request at a time meets the time per token.
        saturated = saturate(runs, candidate, is_complete=True)
    most = rate_place(UTILISATION * saturated.rate)
    least = most - _IDLE_STEPS
    tried: dict[int, ReplicaRun] = {}

    def keeps(place: int) -> bool:
        tried[place] = runs.run(candidate, grid_rate(place))
        return not tried[place].broken

    place = highest(keeps, most, jump=_JUMP, least=least, most=most)
    num_runs = saturated.num_runs + len(tried)
    if place is None:
        idle = runs.run(candidate, grid_rate(least), measured=_IDLE_MEASURED, is_complete=True)
        return Found(saturated, least, None, tried[least].broken, num_runs + 1, idle)
    broken = ("throughput",) if place == most else tried[place + 1].broken
    return Found(saturated, place, tried[place], broken, num_runs)


def _shape(requests: Sequence[ReplayAnswer], forked: bool) -> Shape:
    every = [tree_statistics(each.tree, len(each.prompt_ids)) for each in requests]
    threads = sum(each.threads for each in every) if forked else len(every)
    # A fork token for every child, an end token for every thread, and one computed past it.
    tokens = sum(each.text_tokens for each in every) + 3 * threads - len(every)
    if forked:
        steps = sum(each.decode_steps for each in every)
        attended = sum(each.attended_tokens for each in every)
    else:
        steps = sum(each.sequential_steps for each in every)
        attended = sum(each.sequential_attended_tokens for each in every)
    number = len(every)
    prompt = sum(len(each.prompt_ids) for each in requests)
    return Shape(steps / number, tokens / number, attended / tokens, prompt / number)


@dataclass(frozen=True, slots=True)
class EvenPoisson:
    """Poisson arrivals, scaled so that every 200 of them take exactly the mean time.

    Otherwise the rate of a run of a few hundred requests would be off by 5% at random.
    """

    rate: float

    def times_s(self, number: int, seed: int) -> list[float]:
        """Return arrival times in seconds; with equal seeds, the rate only scales them."""
        times_s = GammaArrivals(1.0).times_s(number, seed)
        gaps = [after - before for before, after in zip([0.0, *times_s], times_s, strict=False)]
        scaled: list[float] = []
        for begin in range(0, number, _EVEN_REQUESTS):
            part = gaps[begin : begin + _EVEN_REQUESTS]
            scaled.extend(gap * len(part) / sum(part) / self.rate for gap in part)
        return list(accumulate(scaled))


# ---- a run -------------------------------------------------------------------------------------


def _run(
    replica: Replica,
    conditions: SearchConditions,
    load: ReplicaLoad,
    rate: float | None,
    slos: Slos,
    is_complete: bool,
) -> ReplicaRun:
    arrivals: OpenLoop | None = None
    if rate is not None:
        recorded = conditions.arrivals
        arrivals = EvenPoisson(rate) if recorded is None else read_arrivals(recorded, rate)
    core = _cores(replica).build()
    requests = _requests(conditions)
    driver = ReplicaDriver(core, requests, arrivals, load, slos)
    return driver.result(is_complete=is_complete)


@lru_cache(maxsize=8)
def _cores(replica: Replica) -> VirtualCores:
    from cluster.lab.virtual.core import VirtualCores
    from cluster.lab.virtual.engine import VirtualSpec
    from cluster.lab.virtual.shared_reads import Grouping

    # Each engine would log its configuration.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    return VirtualCores(
        VirtualSpec(
            replica.config, replica.costs, replica.kv_tokens, replica.block_size,
            replica.max_model_len, MAX_THREADS, replica.max_step_tokens,
            is_async=replica.num_gpus > 0,
            attention=None if replica.family is None else Grouping("family", replica.family),
        )
    )  # fmt: skip


@lru_cache(maxsize=2)
def _requests(conditions: SearchConditions) -> list[ReplayAnswer]:
    return conditions.workload.requests(
        _DISTINCT, max_tokens=conditions.max_model_len, seed=conditions.seed
    )
