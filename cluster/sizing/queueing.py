"""How a replica fares under a rate of requests: processor sharing up to its cap, then a queue.

With j requests at once a step takes base + j * growth, and a request needs so many steps. So they
end at the rate j / (steps * step(j)), which is all that the number of requests depends on when
arrivals are a Poisson process, whatever the lengths of answers (insensitivity of processor sharing
with state-dependent rates: Cohen, "The multiple phase service network with generalized processor
sharing", 1979). What comes beyond the cap waits in order of arrival.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.sizing.request_shape import RequestShape
from cluster.sizing.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """One replica as the queue sees it; times in seconds."""

    base_s: float
    growth_s: float
    steps: float
    long_steps: float
    prefill_s: float
    cap: int

    def step_s(self, requests: float) -> float:
        """A step with so many requests, their share of prefilling newcomers included."""
        return self.base_s + self.growth_s * requests

    def rate(self, requests: float) -> float:
        """Requests that end a second while so many are inside; at most the cap are served."""
        served = min(requests, self.cap)
        return served / (self.steps * self.step_s(served)) if served > 0 else 0.0

    @property
    def full_rate(self) -> float:
        """Requests a second that a replica filled to its cap keeps up with."""
        return self.rate(self.cap)


def replica_model(shape: RequestShape, costs: StepCosts, cap: int) -> ReplicaModel:
    """The replica that serves such requests.

    What a request adds to steps is spread over its own: its threads, what they read, and, as one
    comes for each that ends, a prompt.
    """
    prefill_s = shape.prompt_tokens * costs.prefill_token_s
    work_s = (
        shape.generated_tokens * costs.thread_s
        + shape.attended_tokens * costs.attended_token_s
        + prefill_s
    )
    return ReplicaModel(
        costs.base_s, work_s / shape.steps, shape.steps, shape.long_steps, prefill_s, cap
    )


@dataclass(frozen=True, slots=True)
class Operation:
    """A replica under a steady rate of requests.

    `requests` are inside on average, `busy_requests` but for one moment in a hundred;
    `wait_s` is the wait for a place, `first_token_s` and `latency_s` are from arrival, all of them
    but for one request in a hundred; `mean_latency_s` by Little's law.
    """

    rate: float
    utilisation: float
    requests: float
    busy_requests: int
    step_s: float
    busy_step_s: float
    wait_s: float
    first_token_s: float
    latency_s: float
    mean_latency_s: float


def operate(replica: ReplicaModel, rate: float, share: float = 0.99) -> Operation:
    """How a replica fares at a rate below `full_rate`; `share` of the requests fare no worse."""
    utilisation = rate / replica.full_rate
    if not 0 < utilisation < 1:
        raise ValueError(f"{rate} requests/s is not within 0 and {replica.full_rate}")
    chances = _chances(replica, rate)
    # The last of them stands for the cap and the queue behind it, which shrinks geometrically.
    queue_chance = chances[-1]
    waiting = queue_chance * utilisation / (1 - utilisation)
    inside = sum(number * chance for number, chance in enumerate(chances))
    busy = _quantile(chances, share)
    tail = 1 - share
    wait_s = 0.0
    if queue_chance > tail:
        wait_s = math.log(queue_chance / tail) / (replica.full_rate - rate)
    busy_step_s = replica.step_s(busy)
    # A step may have just begun; the next computes the prompt, with the share of others in it.
    first_token_s = wait_s + 2 * busy_step_s + replica.prefill_s
    # A long request lives through many states of the replica: it sees their mean.
    seen_s = replica.step_s(_seen(chances))
    latency_s = wait_s + replica.prefill_s + replica.long_steps * seen_s
    return Operation(
        rate=rate,
        utilisation=utilisation,
        requests=inside,
        busy_requests=busy,
        step_s=replica.step_s(inside),
        busy_step_s=busy_step_s,
        wait_s=wait_s,
        first_token_s=first_token_s,
        latency_s=latency_s,
        mean_latency_s=(inside + waiting) / rate,
    )


def _chances(replica: ReplicaModel, rate: float) -> list[float]:
    """The chance of each number of requests inside; the cap stands for all states with a queue."""
    logs = [0.0]
    for number in range(1, replica.cap + 1):
        logs.append(logs[-1] + math.log(rate / replica.rate(number)))
    # States with a queue: 1 + u + u^2 + ... of the state that is just full.
    logs[-1] -= math.log(1 - rate / replica.full_rate)
    highest = max(logs)
    weights = [math.exp(each - highest) for each in logs]
    total = sum(weights)
    return [weight / total for weight in weights]


def _quantile(chances: list[float], share: float) -> int:
    reached = 0.0
    for number, chance in enumerate(chances):
        reached += chance
        if reached >= share:
            return number
    return len(chances) - 1


def _seen(chances: list[float]) -> float:
    """Requests inside as a request that is inside sees them: each state weighs by its requests."""
    weight = sum(number * chance for number, chance in enumerate(chances))
    return sum(number * number * chance for number, chance in enumerate(chances)) / weight
