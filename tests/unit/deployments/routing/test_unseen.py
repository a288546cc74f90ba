"""Routers that do not see each other do not all take the same replica."""

import pytest

from cluster.config.routing import RoutingSettings
from deployments.routing.policies import ThreadRouter
from deployments.wire.load import ReplicaLoad
from deployments.wire.request import RequestHint

HINT = RequestHint(prompt_tokens=100)
CAPS = {f"replica-{number}": 100 for number in range(8)}


def report(requests: int, taken_at_s: float) -> ReplicaLoad:
    return ReplicaLoad(requests, 2 * requests, 0, 4096, 3000, 16, 300.0, 0.02, taken_at_s)


def send(router: ThreadRouter, request_id: str, now_s: float) -> str:
    replica_id = router.choose(HINT, now_s)
    assert replica_id is not None
    router.sent(request_id, replica_id, HINT, now_s)
    return replica_id


def routers(number: int) -> list[ThreadRouter]:
    """Routers that have long sent in turn, one request each 10 ms, and got fresh reports.

    All replicas look the same but one, which has just become the least loaded.
    """
    found = [ThreadRouter(RoutingSettings(), seed) for seed in range(number)]
    for router in found:
        router.replicas_changed(CAPS)
    sent: dict[str, list[int]] = {name: [] for name in CAPS}
    for index in range(1600):
        sent[send(found[index % number], f"r{index}", 0.01 * index)].append(index)
        if index >= 400:
            found[index % number].ended(f"r{index - 400}", None, 0.01 * index)
    left = {name: [index for index in indices if index >= 1200] for name, indices in sent.items()}
    for index in left["replica-3"][10:]:
        found[index % number].ended(f"r{index}", None, 16.0)
    for name in CAPS:
        for router in found:
            requests = len(left[name]) if name != "replica-3" else 10
            router.reported(name, report(requests, 16.0), 16.2)
    return found


def shares_of_the_best(found: list[ThreadRouter], late_s: float) -> float:
    """How many of 80 requests, sent so long after the report, go to the least loaded replica."""
    chosen = [
        send(found[index % len(found)], f"late{index}", 16.2 + late_s + 0.001 * index)
        for index in range(80)
    ]
    return chosen.count("replica-3") / len(chosen)


def test_one_router_sees_all_and_fills_the_least_loaded_replica_first() -> None:
    (router,) = routers(1)

    assert shares_of_the_best([router], late_s=1.0) > 0.3
    assert router._unseen.requests == 0


def test_many_routers_spread_what_they_send_on_old_reports() -> None:
    found = routers(8)

    # Of two drawn of eight, one is the best in a quarter of the draws; before, all went there.
    assert shares_of_the_best(found, late_s=1.0) < 0.5
    # Seven of eight requests are others'; a hundred a second, for 1.2 s.
    assert found[0]._unseen.requests == pytest.approx(7 / 8 * 120, rel=0.25)
    assert found[0]._unseen.num_compared(8) == 2
    assert found[0]._unseen.num_compared(512) > 2


def test_with_fresh_reports_all_replicas_are_compared() -> None:
    router = routers(2)[0]
    for name in CAPS:
        router.reported(name, report(50, 16.4), 16.4)

    router.choose(HINT, 16.401)

    assert router._unseen.num_compared(8) == 8


def test_a_replica_that_reports_no_more_makes_the_other_reports_no_older() -> None:
    router = routers(2)[0]
    now_s = 16.2
    while now_s < 60.0:
        now_s += 0.2
        for name in CAPS:
            if name != "replica-3" or now_s < 20.0:
                router.reported(name, report(50, now_s - 0.001), now_s)

    router.choose(HINT, now_s + 0.001)

    assert router._unseen.num_compared(7) == 7
