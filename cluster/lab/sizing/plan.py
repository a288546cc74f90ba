"""From a load and its limits to hardware, replicas and a cap on concurrent requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cluster.lab.experiments.parts import StartStage
from cluster.lab.grid import Grid, grid
from cluster.lab.sizing.errors import SizingError
from cluster.lab.sizing.replica_run import ReplicaRun
from cluster.lab.sizing.search import (
    Candidate,
    Found,
    Replica,
    Runner,
    SearchConditions,
    bisect,
    find_cap,
    grid_rate,
    rate_place,
    saturate,
)

# This share of the cap found is also tried.
_LOWER_CAP = 0.6
# The confirming run has other arrivals, and this many times the requests.
_CONFIRMED_TIMES = 2.5
OPTIONS = {"first token": "--first-token", "time per token": "--token", "latency": "--latency"}
"""The option of `apar plan` for each limit."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load to serve.

    requests_per_s, users: exactly one of them is set. A user sends a request, waits for the answer,
        and thinks for `think_s` seconds before the next.
    headroom: growth of the load to plan for, as a share of it.
    spare: extra replicas, so that as many may be missing.
    """

    requests_per_s: float | None = None
    users: int | None = None
    think_s: float = 0.0
    headroom: float = 0.2
    spare: int = 1

    def __post_init__(self) -> None:
        if (self.requests_per_s is None) == (self.users is None):
            raise SizingError("give a load: either requests per second or users")
        if (self.requests_per_s or self.users or 0) <= 0:
            raise SizingError("the load must be above 0")

    def serving(self, rate: float, mean_latency_s: float) -> int:
        """Return how many replicas serve the load and its headroom at `rate` each."""
        if self.requests_per_s is not None:
            worth = self.requests_per_s / rate
        else:
            assert self.users is not None
            # Response time law: a user either waits for an answer or thinks.
            worth = self.users / (rate * (mean_latency_s + self.think_s))
        # Floating-point sums may slightly exceed a whole number.
        return max(1, math.ceil(worth * (1 + self.headroom) - 1e-9))

    def rate_each(self, serving: int, mean_latency_s: float) -> float:
        """Return the rate of each of `serving` replicas, without headroom."""
        if self.requests_per_s is not None:
            return self.requests_per_s / serving
        assert self.users is not None
        return self.users / serving / (mean_latency_s + self.think_s)


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate and the replicas it needs; None if no number of replicas is enough."""

    found: Found
    serving: int | None
    replicas: int | None
    gpus: int | None
    price: float | None = None

    @property
    def run(self) -> ReplicaRun:
        """The run at the highest rate. Only for candidates that have one."""
        assert self.found.run is not None
        return self.found.run


@dataclass(frozen=True, slots=True)
class Plan:
    """A recommendation, and the candidates tried.

    best: the recommended candidate, with the confirmed rate and the confirming run.
    searched: the same candidate as bisection found it; its rate may be higher.
    choices: all candidates, in the order of hardware, forks and cap.
    sequential: the best candidate without forks on the same hardware; None if nothing forks.
    expected_rate, expected: rate and run of each replica at the load without headroom.
    """

    load: Load
    conditions: SearchConditions
    replicas: tuple[Replica, ...]
    best: Choice
    searched: Choice
    choices: tuple[Choice, ...]
    sequential: Choice | None
    expected_rate: float
    expected: ReplicaRun

    @property
    def hardware(self) -> Replica:
        """The recommended replica."""
        return self.replicas[self.best.found.candidate.replica]

    @property
    def num_replicas(self) -> int:
        """Replicas to run, spare ones included."""
        assert self.best.replicas is not None
        return self.best.replicas

    @property
    def num_serving(self) -> int:
        """Replicas to run, without the spare ones."""
        assert self.best.serving is not None
        return self.best.serving


def make_plan(
    load: Load,
    runs: Runner,
    *,
    caps: Sequence[int] = (),
    prices: Sequence[float] = (),
    start_stage: StartStage = lambda _stage, _total: lambda: None,
    processes: int = 1,
) -> Plan:
    """Find the hardware and cap that serve a load within its limits at the lowest cost.

    `caps` replaces the caps that are tried by default. The cost is the number of GPUs, or their
    price if `prices` has one for each replica's GPU; ties go to fewer replicas, then to the
    hardware named first. Raises SizingError if no candidate meets the limits.
    """
    modes = (True, False) if runs.forks else (False,)
    searches = [
        (find_candidates, index, forked, cap)
        for index in range(len(runs.replicas))
        for forked in modes
        for cap in (caps or (None,))
    ]
    choose = partial(choice_of, load, runs, prices)
    with grid(processes, partial, _call, runs) as run_all:
        done = start_stage("candidates", len(searches))
        found: dict[Any, list[Found]] = {}
        for task, candidates in run_all(searches):
            found[task] = candidates
            done()
        choices = [choose(each) for task in searches for each in found[task]]
        searched, sequential = _best(choices, runs)
        done = start_stage("confirmation", 1)
        best, expected_rate, expected = _confirmed(load, searched, choose, runs, run_all)
        done()
    return Plan(
        load, runs.conditions, runs.replicas, best, searched, tuple(choices), sequential,
        expected_rate, expected,
    )  # fmt: skip


def _call(runs: Runner, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(runs, *arguments)


def _best(choices: Sequence[Choice], runs: Runner) -> tuple[Choice, Choice | None]:
    """Return the best choice, and the best without forks on its hardware if others fork."""
    possible = [choice for choice in choices if choice.replicas is not None]
    candidates = [each for each in possible if each.found.candidate.forked == runs.forks]
    if not candidates:
        raise SizingError(_impossible(choices, runs))
    searched = min(candidates, key=_cost)
    hardware = searched.found.candidate.replica
    flat = [
        choice
        for choice in possible
        if not choice.found.candidate.forked and choice.found.candidate.replica == hardware
    ]
    return searched, min(flat, key=_cost) if flat and runs.forks else None


def find_candidates(runs: Runner, index: int, forked: bool, cap: int | None) -> list[Found]:
    """Return a replica's candidates: the given cap, or the best cap and a lower one."""

    def found_with(cap: int) -> Found:
        return bisect(runs, saturate(runs, Candidate(index, cap, forked), is_complete=True))

    if cap is not None:
        return [found_with(cap)]
    best = bisect(runs, find_cap(runs, index, forked=forked))
    lower = round(_LOWER_CAP * best.candidate.cap)
    # Forks are compared with the best cap of sequential decoding.
    return [best, found_with(lower)] if forked and lower > 0 and best.run is not None else [best]


def choice_of(load: Load, runs: Runner, prices: Sequence[float], found: Found) -> Choice:
    """Return a candidate with the number of replicas that the load needs."""
    if found.run is None:
        return Choice(found, None, None, None)
    serving = load.serving(found.rate, found.run.mean_latency_s)
    replicas = serving + load.spare
    index = found.candidate.replica
    gpus = replicas * runs.replicas[index].num_gpus
    return Choice(found, serving, replicas, gpus, gpus * prices[index] if prices else None)


def confirming_run(runs: Runner, candidate: Candidate, rate: float) -> ReplicaRun:
    """Run a candidate for longer than in the search, with other arrivals."""
    conditions = runs.conditions
    measured = round(_CONFIRMED_TIMES * conditions.measured)
    seed = conditions.seed + 1
    return runs.run(candidate, rate, measured=measured, seed=seed, is_complete=True)


def _confirmed(
    load: Load,
    searched: Choice,
    choose: Callable[[Found], Choice],
    runs: Runner,
    run_all: Grid,
) -> tuple[Choice, float, ReplicaRun]:
    """Confirm a candidate in a longer run, lowering its rate if needed.

    Returns the candidate at the confirmed rate, and the rate and run of each replica at the load
    without headroom.
    """
    found = searched.found

    def expected_rate(choice: Choice) -> float:
        # A lower rate has a lower latency, so users send more requests; headroom covers this.
        assert choice.serving is not None
        rate = load.rate_each(choice.serving, choice.run.mean_latency_s)
        return grid_rate(rate_place(rate) + 1)

    rate, place = expected_rate(searched), found.place
    rates = dict.fromkeys((grid_rate(place), rate))
    tasks = [(confirming_run, found.candidate, each) for each in rates]
    done = {task[-1]: run for task, run in run_all(tasks)}
    confirming, expected = done[grid_rate(place)], done[rate]
    while confirming.broken:
        place -= 1
        confirming = confirming_run(runs, found.candidate, grid_rate(place))
    best = choose(replace(found, place=place, run=confirming))
    if (final_rate := expected_rate(best)) != rate:
        expected = confirming_run(runs, found.candidate, final_rate)
    return best, final_rate, expected


def _cost(choice: Choice) -> tuple[float, int, int, int]:
    assert choice.gpus is not None
    assert choice.replicas is not None
    cost = choice.gpus if choice.price is None else choice.price
    # With equal rates, a lower cap protects the running requests better in a burst.
    candidate = choice.found.candidate
    return cost, choice.replicas, candidate.replica, -choice.found.place * 10_000 + candidate.cap


def _impossible(choices: Sequence[Choice], runs: Runner) -> str:
    """Say which limits no number of replicas can meet, and what an idle replica reaches."""
    limits = runs.conditions.slos.named()
    parts = []
    for choice in choices:
        idle = choice.found.idle
        assert idle is not None
        hardware = runs.replicas[choice.found.candidate.replica].hardware
        reached = ", ".join(
            f"{OPTIONS[name]} {limits[name]:g}s (p99 {idle.times[name].p99_s:.3g}s)"
            for name in choice.found.broken
            if name in limits
        )
        part = f"on an idle {hardware}: {reached}"
        if part not in parts:
            parts.append(part)
    return f"no number of replicas meets these limits: {'; '.join(parts)}"
