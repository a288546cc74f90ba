"""Cost of one routing decision at several numbers of replicas: `python -m benchmarks.router_cost`.

Prints the median microseconds of choosing a replica, of counting a request as sent and later as
ended, and of taking a report; over replicas that have all reported, for prompts of two turns of
which the first is known.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

from cluster.config.routing import RoutingPolicy, RoutingSettings
from deployments.routing.policies import Router, build_router
from deployments.wire.answer import AnswerEnd
from deployments.wire.load import ReplicaLoad
from deployments.wire.request import RequestHint

CAP = 64
END = AnswerEnd(100, 300, 5, 4, 120)


def report(number: random.Random, taken_at_s: float) -> ReplicaLoad:
    """A report of a replica at medium load."""
    threads = number.randrange(10, 90)
    step_s = 0.01 + 0.0001 * threads
    return ReplicaLoad(
        requests=20,
        threads=threads,
        waiting_forks=0,
        blocks=4096,
        free_blocks=number.randrange(100, 4000),
        block_size=16,
        tokens_per_s=threads / step_s,
        step_s=step_s,
        taken_at_s=taken_at_s,
    )


def median_us(action: Callable[[int], None], rounds: int) -> float:
    """Median time of the action, called with 0, 1, 2 and so on."""
    times = []
    for index in range(rounds):
        begin = time.perf_counter()
        action(index)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def hint(index: int) -> RequestHint:
    """A second turn: the system prompt and the first turn come again, the last piece is new."""
    return RequestHint(200, 512, (1, 2 + index % 50, 1_000_000 + index), True, (40, 120, 200))


def measure(policy: RoutingPolicy, num_replicas: int, rounds: int) -> dict[str, float]:
    """Median microseconds of each of the router's operations."""
    number = random.Random(0)
    router: Router = build_router(RoutingSettings(policy=policy))
    names = [f"replica-{index}" for index in range(num_replicas)]
    router.replicas_changed(dict.fromkeys(names, CAP))
    for name in names:
        router.reported(name, report(number, 0.0), 0.0)
    for index in range(num_replicas):
        router.sent(f"before-{index}", names[index], hint(index), 1.0)

    def choose(index: int) -> None:
        router.choose(hint(index))

    def send_and_end(index: int) -> None:
        router.sent(str(index), names[index % num_replicas], hint(index), 2.0)
        router.ended(str(index), END, 2.1)

    return {
        "choose": median_us(choose, rounds),
        "sent + ended": median_us(send_and_end, rounds),
        "reported": median_us(
            lambda index: router.reported(
                names[index % num_replicas], report(number, 3.0 + index), 3.0 + index
            ),
            rounds,
        ),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--rounds", type=int, default=5000)
    arguments = parser.parse_args()
    print(f"{'policy':16} {'replicas':>8} {'choose':>10} {'sent+ended':>10} {'reported':>10}  (us)")
    for policy in RoutingPolicy:
        for count in arguments.replicas:
            cost = measure(policy, count, arguments.rounds)
            figures = " ".join(f"{value:10.1f}" for value in cost.values())
            print(f"{policy:16} {count:8} {figures}")


if __name__ == "__main__":
    main()
