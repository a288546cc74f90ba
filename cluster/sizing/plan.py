"""From a load and its limits to hardware, replicas and a cap on concurrent requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.sizing.errors import SizingError
from cluster.sizing.replica_run import ReplicaRun
from cluster.sizing.search import (
    NEAR,
    Candidate,
    Conditions,
    Found,
    Replica,
    Runner,
    all_at_once,
    bisect,
    estimated_start,
    grid_rate,
    largest_cap,
)

# Caps that are tried after the largest one, as shares of the most requests that ran at once under
# it. A cap above that number changes nothing.
_CAP_SHARES = (0.85, 0.7)
# The confirming run has other arrivals, and more of them.
_CONFIRMED_TIMES = 2.5
_OPTIONS = {"first token": "--first-token", "time per token": "--token", "latency": "--latency"}


@dataclass(frozen=True, slots=True)
class Load:
    """What has to be served.

    requests_per_s or users: exactly one of them. A user sends a request, waits for the answer,
        and thinks for `think_s` seconds before the next.
    headroom: growth of the load to plan for, as a share of it.
    spare: replicas that may be missing.
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
        """Return the replicas that serve the load and its headroom at a rate for each."""
        if self.requests_per_s is not None:
            worth = self.requests_per_s / rate
        else:
            assert self.users is not None
            # Response time law: requests under way or thought about.
            worth = self.users / (rate * (mean_latency_s + self.think_s))
        # Floating-point sums may exceed a whole number slightly.
        return max(1, math.ceil(worth * (1 + self.headroom) - 1e-9))

    def rate_each(self, serving: int, mean_latency_s: float) -> float:
        """Return the rate of each of so many replicas without the headroom."""
        if self.requests_per_s is not None:
            return self.requests_per_s / serving
        assert self.users is not None
        return self.users / serving / (mean_latency_s + self.think_s)


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate with the replicas that it needs; None where no number of them is enough."""

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
    """A recommendation, and what was tried for it.

    best: the recommended candidate; its rate and run are those of the confirming run.
    searched: the same by the bisection alone, whose rate may be higher.
    choices: all candidates with forks, by hardware and cap.
    sequential: the best candidate without forks on the same hardware, None if nothing forks.
    expected_rate, expected: each replica at the load without headroom.
    """

    load: Load
    conditions: Conditions
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

    @property
    def num_runs(self) -> int:
        """Simulated runs of all bisections."""
        sequential = () if self.sequential is None else (self.sequential,)
        return sum(choice.found.num_runs for choice in (*self.choices, *sequential))


Started = Callable[[str, int], Callable[[], None]]
"""Begins a stage with a number of steps; the returned function is called after each."""


def make_plan(
    load: Load,
    runs: Runner,
    *,
    caps: Sequence[int] = (),
    prices: Sequence[float] = (),
    started: Started = lambda _stage, _total: lambda: None,
) -> Plan:
    """Find the hardware and cap that serve a load within its limits at the least cost.

    `caps` replaces the caps that are tried by default. The cost is the number of GPUs, or their
    price if `prices` has one for each replica's GPU; ties go to fewer replicas, then to the
    hardware named first. Raises SizingError if no candidate keeps the limits.
    """
    search = _Search(load, runs, tuple(caps), tuple(prices), started)
    indices = range(len(runs.replicas))
    choices = search.best_caps(indices, forked=True)
    possible = [choice for choice in choices if choice.replicas is not None]
    if not possible:
        raise SizingError(_impossible(choices, runs))
    searched = min(possible, key=_cost)
    forks = any(len(request.threads) > 1 for request in runs.requests())
    hardware = searched.found.candidate.replica
    done = started("confirm", 1)
    best, expected_rate, expected = search.confirmed(searched)
    done()
    sequential = None
    if forks:
        flat = [
            choice
            for choice in search.best_caps([hardware], forked=False)
            if choice.replicas is not None
        ]
        sequential = min(flat, key=_cost) if flat else None
    return Plan(
        load, runs.conditions, tuple(runs.replicas), best, searched, tuple(choices), sequential,
        expected_rate, expected,
    )  # fmt: skip


class _Search:
    """The bisections of one plan."""

    def __init__(
        self,
        load: Load,
        runs: Runner,
        caps: tuple[int, ...],
        prices: tuple[float, ...],
        started: Started,
    ) -> None:
        self._load = load
        self._runs = runs
        self._caps = caps
        self._prices = prices
        self._started = started

    def best_caps(self, indices: Sequence[int], *, forked: bool) -> list[Choice]:
        """Return the candidates of replicas: the given caps, or those found to matter."""
        runs = self._runs
        requests = runs.requests()
        name = "forked" if forked else "sequential"
        first: list[Candidate] = []
        for index in indices:
            largest = largest_cap(runs.replicas[index], requests, forked=forked)
            first.extend(Candidate(index, cap, forked) for cap in self._caps or (largest,))
        starts = [
            estimated_start(
                runs.replicas[each.replica], each.cap, requests, runs.conditions.slos,
                forked=forked,
            )
            for each in first
        ]  # fmt: skip
        found = self._bisected(f"{name}, largest cap" if not self._caps else name, first, starts)
        if not self._caps:
            lower = [
                (Candidate(each.candidate.replica, cap, forked), each.place)
                for each in found
                if each.run is not None
                for cap in _lower_caps(each.run)
            ]
            found += self._bisected(
                f"{name}, lower caps",
                [candidate for candidate, _ in lower],
                [place for _, place in lower],
                NEAR,
            )
        found.sort(key=lambda each: (each.candidate.replica, -each.candidate.cap))
        return [self.choice(each) for each in found]

    def _bisected(
        self, stage: str, candidates: list[Candidate], starts: list[int], *jump: int
    ) -> list[Found]:
        if not candidates:
            return []
        done = self._started(stage, len(candidates))

        def search(candidate: Candidate, start: int) -> Found:
            found = bisect(self._runs, candidate, start, *jump)
            done()
            return found

        return all_at_once(
            [
                lambda candidate=candidate, start=start: search(candidate, start)
                for candidate, start in zip(candidates, starts, strict=True)
            ]
        )

    def choice(self, found: Found) -> Choice:
        """Return a candidate with the replicas that the load needs of it."""
        if found.run is None:
            return Choice(found, None, None, None)
        serving = self._load.serving(found.rate, found.run.mean_latency_s)
        replicas = serving + self._load.spare
        index = found.candidate.replica
        gpus = replicas * self._runs.replicas[index].num_gpus
        price = gpus * self._prices[index] if self._prices else None
        return Choice(found, serving, replicas, gpus, price)

    def confirmed(self, searched: Choice) -> tuple[Choice, float, ReplicaRun]:
        """Return a candidate at the highest rate that a longer run with other arrivals confirms.

        And the rate and the run of each replica at the load without headroom.
        """
        runs, found = self._runs, searched.found
        seed = runs.conditions.seed + 1
        measured = round(_CONFIRMED_TIMES * runs.conditions.measured)

        def run(rate: float) -> ReplicaRun:
            return runs.run(
                found.candidate, rate, measured=measured, seed=seed, is_complete=True
            )

        place = found.place
        while (confirming := run(grid_rate(place))).broken:
            place -= 1
        best = self.choice(replace(found, place=place, run=confirming))
        assert best.serving is not None
        # A lower rate has a lower latency, and so users send a little more; headroom covers it.
        rate = self._load.rate_each(best.serving, confirming.mean_latency_s)
        return best, rate, run(rate)


def _lower_caps(run: ReplicaRun) -> list[int]:
    caps = {max(1, round(share * run.peak_running)) for share in _CAP_SHARES}
    return sorted(caps - {run.peak_running})


def _cost(choice: Choice) -> tuple[float, int, int, int]:
    assert choice.gpus is not None
    assert choice.replicas is not None
    cost = choice.gpus if choice.price is None else choice.price
    # With equal rates, a lower cap protects the running requests better in a burst.
    candidate = choice.found.candidate
    return cost, choice.replicas, candidate.replica, -choice.found.place * 10_000 + candidate.cap


def _impossible(choices: Sequence[Choice], runs: Runner) -> str:
    """Say which limits no number of replicas keeps, and what an idle one reaches."""
    limits = runs.conditions.slos.named()
    parts = []
    for choice in choices:
        idle = choice.found.idle
        assert idle is not None
        hardware = runs.replicas[choice.found.candidate.replica].hardware
        reached = ", ".join(
            f"{_OPTIONS[name]} {limits[name]:g}s (p99 {idle.times[name].p99_s:.3g}s)"
            for name in choice.found.broken
            if name in limits
        )
        part = f"on an idle {hardware}: {reached}"
        if part not in parts:
            parts.append(part)
    return f"no number of replicas keeps these limits {'; '.join(parts)}"
