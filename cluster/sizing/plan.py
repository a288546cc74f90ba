"""From a load and its goals to replicas, caps and what follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.config.model import MAX_THREADS
from cluster.sizing.errors import SizingError
from cluster.sizing.memory import (
    ReplicaMemory,
    held_by_request,
    requests_of_threads,
    requests_that_fit,
    threads_of,
)
from cluster.sizing.queueing import Operation, ReplicaModel, operate, replica_model
from cluster.sizing.request_shape import RequestShape
from cluster.sizing.step_costs import StepCosts

_BISECTIONS = 40
_LEAST_SHARE = 1e-4


@dataclass(frozen=True, slots=True)
class Goals:
    """What has to be served, and how well.

    Either `requests_per_s`, or `users` who each wait for an answer and then think for `think_s`.
    Times in seconds, held by 99 of 100 requests; None where there is no goal. `headroom` is the
    share by which the load may grow, `utilisation` the most of a full replica's rate (of its
    places, with users) that is planned for, `spare` the replicas that may be away.
    """

    requests_per_s: float | None = None
    users: int | None = None
    think_s: float = 0.0
    first_token_s: float | None = None
    token_s: float | None = None
    latency_s: float | None = None
    headroom: float = 0.2
    utilisation: float = 0.8
    spare: int = 1


@dataclass(frozen=True, slots=True)
class Caps:
    """Most requests in one replica, by each thing that bounds them; None where it bounds none."""

    by_memory: int
    by_threads: int
    by_token_time: int | None

    @property
    def requests(self) -> int:
        """The recommended concurrency cap."""
        caps = [self.by_memory, self.by_threads]
        return min([*caps, self.by_token_time] if self.by_token_time is not None else caps)


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked, and what it takes.

    `most` is a replica at the highest load planned for it, `expected` at the load that was asked
    for when all but the spare replicas serve it. `users_each` is None for a rate of requests.
    """

    goals: Goals
    shape: RequestShape
    costs: StepCosts
    memory: ReplicaMemory
    caps: Caps
    replica: ReplicaModel
    most: Operation
    users_each: float | None
    serving_replicas: int
    expected: Operation

    @property
    def replicas(self) -> int:
        """Replicas to run, spare ones included."""
        return self.serving_replicas + self.goals.spare

    @property
    def threads(self) -> int:
        """Threads of one replica at its cap, but for one moment in a hundred."""
        return min(threads_of(self.caps.requests, self.shape), MAX_THREADS)

    @property
    def expected_kv_share(self) -> float:
        """Share of the KV cache in use at the expected load, on average."""
        return self._kv_share(self.expected)

    @property
    def most_kv_share(self) -> float:
        """The same at the highest load planned for a replica."""
        return self._kv_share(self.most)

    def _kv_share(self, operation: Operation) -> float:
        held = held_by_request(self.shape, self.memory.block_size)
        return min(operation.requests * held / self.memory.tokens, 1.0)


def make_plan(goals: Goals, shape: RequestShape, costs: StepCosts, memory: ReplicaMemory) -> Plan:
    """The smallest number of replicas that meets the goals. Raises SizingError where none does."""
    _check(goals)
    caps = _caps(goals, shape, costs, memory)
    replica = replica_model(shape, costs, caps.requests)
    if goals.requests_per_s is not None:
        most = _highest_rate(replica, goals)
        load = goals.requests_per_s
        serving = _replicas(load * (1 + goals.headroom) / most.rate)
        expected = operate(replica, load / serving)
        return Plan(goals, shape, costs, memory, caps, replica, most, None, serving, expected)
    most, users_each = _most_users(replica, goals)
    assert goals.users is not None
    serving = _replicas(goals.users * (1 + goals.headroom) / users_each)
    expected = _closed(replica, goals.users / serving, goals.think_s)
    return Plan(goals, shape, costs, memory, caps, replica, most, users_each, serving, expected)


def _replicas(worth: float) -> int:
    # Sums of floating-point shares may exceed a whole number by a hair.
    return max(1, math.ceil(worth - 1e-9))


def _check(goals: Goals) -> None:
    if (goals.requests_per_s is None) == (goals.users is None):
        raise SizingError("give a load: either requests per second or users")
    if (goals.requests_per_s or goals.users or 0) <= 0:
        raise SizingError("the load must be more than nothing")
    if not 0 < goals.utilisation < 1:
        raise SizingError(f"utilisation {goals.utilisation:g} must lie between 0 and 1")


def _caps(goals: Goals, shape: RequestShape, costs: StepCosts, memory: ReplicaMemory) -> Caps:
    by_memory = requests_that_fit(memory, shape)
    if by_memory < 1:
        raise SizingError(
            f"the KV cache of a replica holds {memory.tokens:,} tokens, and one request takes "
            f"{shape.held_tokens:,.0f} give or take {shape.held_tokens_sd:,.0f}: take a GPU with "
            "more memory, or more --tensor-parallel"
        )
    by_threads = max(1, requests_of_threads(MAX_THREADS, shape))
    one = replica_model(shape, costs, 1)
    if one.step_s(1) <= 0:
        raise SizingError(
            f"a step with one request takes no time ({costs.source}): any number of requests would "
            "do; give --step-time-base or --step-time-per-thread as measured"
        )
    return Caps(by_memory, by_threads, _by_token_time(goals.token_s, one))


def _by_token_time(token_s: float | None, one: ReplicaModel) -> int | None:
    """Requests whose step stays within the time per token; None where any number does."""
    if token_s is None:
        return None
    room_s = token_s - one.base_s
    if one.growth_s == 0 and room_s >= 0:
        return None
    most = math.floor(room_s / one.growth_s + 1e-9) if one.growth_s > 0 else 0
    if most < 1:
        raise SizingError(
            f"a step with one request takes {1000 * one.step_s(1):.1f} ms, longer than the "
            f"{1000 * token_s:g} ms a token that were asked for: no number of replicas helps"
        )
    return most


def _meets(operation: Operation, goals: Goals) -> bool:
    first_token_s = goals.first_token_s or math.inf
    latency_s = goals.latency_s or math.inf
    return operation.first_token_s <= first_token_s and operation.latency_s <= latency_s


def _highest_rate(replica: ReplicaModel, goals: Goals) -> Operation:
    """The replica at the highest rate that meets the goals within the utilisation."""
    least = operate(replica, replica.full_rate * _LEAST_SHARE)
    if not _meets(least, goals):
        raise _unreachable(least, goals)
    high = goals.utilisation
    if _meets(operate(replica, replica.full_rate * high), goals):
        return operate(replica, replica.full_rate * high)
    low = _LEAST_SHARE
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        met = _meets(operate(replica, replica.full_rate * middle), goals)
        low, high = (middle, high) if met else (low, middle)
    return operate(replica, replica.full_rate * low)


def _most_users(replica: ReplicaModel, goals: Goals) -> tuple[Operation, float]:
    """The replica with the most requests inside that meet the goals, and its users.

    As many users as places wait at most, so none of them queues. Those who think are counted by
    the response-time law, users = rate * (latency + think time).
    """
    most = max(1, math.floor(goals.utilisation * replica.cap))
    operation = _inside(replica, most)
    while most > 1 and not _meets(operation, goals):
        most -= 1
        operation = _inside(replica, most)
    if not _meets(operation, goals):
        raise _unreachable(operation, goals)
    return operation, most + operation.rate * goals.think_s


def _closed(replica: ReplicaModel, users: float, think_s: float) -> Operation:
    """The replica with so many users: the number inside at which as many come as end."""
    low, high = 0.0, min(users, float(replica.cap))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        rate = replica.rate(middle)
        low, high = (middle, high) if middle + rate * think_s < users else (low, middle)
    return _inside(replica, high)


def _inside(replica: ReplicaModel, requests: float) -> Operation:
    """The replica with a steady number of requests inside, and nobody waiting."""
    rate = replica.rate(requests)
    step_s = replica.step_s(requests)
    return Operation(
        rate=rate,
        utilisation=rate / replica.full_rate,
        requests=requests,
        busy_requests=math.ceil(requests),
        step_s=step_s,
        busy_step_s=step_s,
        wait_s=0.0,
        first_token_s=2 * step_s + replica.prefill_s,
        latency_s=replica.prefill_s + replica.long_steps * step_s,
        mean_latency_s=requests / rate,
    )


def _unreachable(operation: Operation, goals: Goals) -> SizingError:
    parts = []
    for name, reached, wanted in (
        ("the first token", operation.first_token_s, goals.first_token_s),
        ("a long answer", operation.latency_s, goals.latency_s),
    ):
        if wanted is not None and reached > wanted:
            parts.append(f"{name} takes {reached:.2f} s, {wanted:g} s were asked for")
    return SizingError(
        f"in a replica with nothing else to do {' and '.join(parts)}: no number of replicas helps"
    )
