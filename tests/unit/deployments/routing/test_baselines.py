"""The usual policies, each by what is particular to it."""

from collections import Counter

from cluster.config.routing import RoutingPolicy, RoutingSettings
from deployments.routing.policies import (
    FewestRequests,
    PowerOfTwo,
    RandomChoice,
    RoundRobin,
    build_router,
)
from deployments.routing.policies import Router, ThreadRouter
from tests.unit.deployments.routing.loads import HINT, busy


def test_round_robin_takes_the_replicas_in_turn_and_passes_over_full_ones() -> None:
    router = RoundRobin()
    router.replicas_changed({"a": 9, "b": 9, "c": 9})
    assert [router.choose(HINT, 0.0) for _ in range(4)] == ["a", "b", "c", "a"]

    router.reported("b", busy(9, 9), 0.0)
    assert [router.choose(HINT, 0.0) for _ in range(3)] == ["c", "a", "c"]


def test_fewest_requests_counts_requests_and_not_threads() -> None:
    router = FewestRequests()
    router.replicas_changed({"a": 9, "b": 9})
    router.reported("a", busy(1, 50), 0.0)
    router.reported("b", busy(2, 2), 0.0)

    assert router.choose(HINT, 0.0) == "a"


def places(router: Router) -> Counter[str | None]:
    router.replicas_changed(dict.fromkeys("abcd", 99))
    for name, requests in zip("abcd", (1, 2, 3, 4), strict=True):
        router.reported(name, busy(requests, requests), 0.0)
    return Counter(router.choose(HINT, 0.0) for _ in range(1200))


def test_power_of_two_takes_the_better_of_two() -> None:
    counts = places(PowerOfTwo(seed=3))

    # Of the six pairs the best replica is in three, the next in two that it wins, and so on.
    assert counts["d"] == 0
    assert 520 < counts["a"] < 680
    assert 320 < counts["b"] < 480
    assert 140 < counts["c"] < 260


def test_random_choice_takes_any() -> None:
    counts = places(RandomChoice(seed=3))

    assert all(220 < counts[name] < 380 for name in "abcd")


def test_the_policy_of_the_settings_is_built() -> None:
    built = {policy: type(build_router(RoutingSettings(policy=policy))) for policy in RoutingPolicy}

    assert built == {
        RoutingPolicy.THREADS: ThreadRouter,
        RoutingPolicy.POWER_OF_TWO: PowerOfTwo,
        RoutingPolicy.FEWEST_REQUESTS: FewestRequests,
        RoutingPolicy.ROUND_ROBIN: RoundRobin,
        RoutingPolicy.RANDOM: RandomChoice,
    }
