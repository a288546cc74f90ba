"""One count for all of Ray's routers of a deployment, and its use by the gateway."""

import threading
import time
from dataclasses import replace

import pytest

from deployments.config.routing import RoutingPolicy, RoutingSettings
from deployments.routing.policies import Reason
from deployments.routing.shared_router import Routers, SharedRouter
from deployments.wire.frames import Address
from tests.fakes.clock import Clock
from tests.unit.deployments.routing.loads import FORKED, HINT, busy


@pytest.fixture
def shared() -> SharedRouter:
    return SharedRouter(RoutingSettings(), seed=1, now=Clock(100.0))


def test_an_assigned_request_is_counted_at_once(shared: SharedRouter) -> None:
    shared.replicas_changed(1, {"a": 4, "b": 4})

    places = [shared.assign(str(index), HINT) for index in range(8)]

    assert sorted(filter(None, places)) == ["a"] * 4 + ["b"] * 4
    assert shared.assign("more", HINT) is None


def test_addresses_change_under_the_lock(shared: SharedRouter) -> None:
    class Guarded(dict[str, Address]):
        def __setitem__(self, name: str, address: Address) -> None:
            assert shared._lock.locked()
            super().__setitem__(name, address)

    shared._addresses = Guarded()
    address = Address("127.0.0.1", 1, "00")

    shared.reported("a", replace(busy(0, 0), address=address.as_text()))

    assert (shared.address_of("a"), shared.addresses) == (address, {address})


def test_a_request_that_is_assigned_again_is_counted_once(shared: SharedRouter) -> None:
    shared.replicas_changed(1, {"a": 4, "b": 4})
    for _ in range(20):
        assert shared.assign("same", HINT) is not None

    assert shared.num_sent == 1


def test_a_replica_counts_while_all_of_rays_routers_know_it(shared: SharedRouter) -> None:
    heard: list[int] = []
    shared.listen(heard.append)
    shared.replicas_changed(1, {"a": 4, "b": 4})
    shared.replicas_changed(2, {"a": 4})
    assert shared.capacity == 1

    shared.replicas_changed(2, {"a": 4, "b": 4})
    shared.replicas_changed(2, {"a": 4, "b": 4})

    assert shared.capacity == 2
    assert heard == [0, 2, 1, 2]


def test_the_last_change_that_a_listener_hears_is_the_last_one(shared: SharedRouter) -> None:
    heard: list[int] = []
    hears_none = threading.Event()

    def listener(capacity: int) -> None:
        if capacity == 0 and heard:
            hears_none.set()
            time.sleep(0.05)  # Another executor's change arrives meanwhile.
        heard.append(capacity)

    shared.replicas_changed(1, {"a": 4})
    shared.listen(listener)
    losing = threading.Thread(target=shared.replicas_changed, args=(1, {}))
    losing.start()
    hears_none.wait()
    shared.replicas_changed(1, {"b": 4})
    losing.join()

    assert heard == [1, 0, 1]


def test_a_dead_replica_gets_nothing_though_another_router_still_lists_it(
    shared: SharedRouter,
) -> None:
    shared.replicas_changed(1, {"a": 4, "b": 4})
    shared.assign("1", HINT)
    shared.died("a")
    shared.replicas_changed(1, {"a": 4, "b": 4, "c": 4})

    assert shared.capacity == 2
    assert {shared.assign(str(index), HINT) for index in range(8)} == {"b", "c"}


def test_a_moved_request_is_counted_at_its_new_replica(shared: SharedRouter) -> None:
    shared.replicas_changed(1, {"a": 1, "b": 1})
    first = shared.assign("1", HINT)
    assert first is not None
    other = "b" if first == "a" else "a"

    shared.moved("1", other, HINT)

    assert shared.assign("2", HINT) == first


def test_reports_and_ends_reach_the_router(shared: SharedRouter) -> None:
    shared.replicas_changed(1, {"a": 64, "b": 64})
    shared.reported("a", busy(30, 300, at_s=99.9))
    assert shared.assign("1", HINT) == "b"

    shared.ended("1", FORKED)

    assert shared.num_sent == 0
    assert shared.decisions() == {Reason.LEAST_LOAD: 1}


def test_changed_settings_apply_at_once_and_keep_the_counts(shared: SharedRouter) -> None:
    shared.replicas_changed(1, {"a": 64, "b": 64})
    shared.reported("a", busy(1, 300, at_s=99.9))
    shared.reported("b", busy(2, 2, at_s=99.9))
    assert shared.assign("1", HINT) == "b"

    shared.configure(RoutingSettings(policy=RoutingPolicy.FEWEST_REQUESTS))

    assert shared.assign("2", HINT) == "a"
    shared.configure(RoutingSettings())
    assert shared.assign("3", HINT) == "b"
    for request in "123":
        shared.ended(request, FORKED)
    assert shared.num_sent == 0
    assert sum(shared.decisions().values()) == 3


def test_replicas_to_avoid_are_assigned_last(shared: SharedRouter) -> None:
    shared.replicas_changed(1, {"a": 64, "b": 64, "c": 1})
    for name, threads in (("a", 0), ("b", 300), ("c", 600)):
        shared.reported(name, busy(threads // 300, threads, at_s=99.9))

    assert shared.assign("1", HINT) == "a"
    assert shared.assign("1", HINT, {"a"}) == "b"
    # The third is full, so only replicas to avoid are left.
    assert shared.assign("1", HINT, {"a", "b"}) == "a"
    assert shared.assign("1", HINT, {"a", "gone"}) == "b"
    assert shared.num_sent == 1


@pytest.mark.parametrize("policy", list(RoutingPolicy))
def test_a_silent_replica_gets_nothing_while_others_have_room(
    policy: RoutingPolicy,
) -> None:
    clock = Clock(100.0)
    shared = SharedRouter(RoutingSettings(policy=policy), seed=1, now=clock)
    shared.replicas_changed(1, {"hung": 64, "b": 8})
    for _ in range(30):
        clock.now_s += 0.2
        shared.reported("b", busy(4, 300, at_s=clock.now_s - 0.1))
        if clock.now_s < 103.0:
            shared.reported("hung", busy(0, 0, at_s=clock.now_s - 0.1))

    assert [shared.assign(name, HINT) for name in "12345"] == ["b"] * 4 + ["hung"]


def test_a_collected_ray_router_hides_no_replica(shared: SharedRouter) -> None:
    heard: list[int] = []
    shared.listen(heard.append)
    shared.replicas_changed(1, {"old": 4})
    shared.left(1)
    assert shared.assign("1", HINT) is None
    shared.died("old")

    shared.replicas_changed(2, {"new": 4})

    assert shared.assign("2", HINT) == "new"
    assert heard == [0, 1, 0, 1]


def test_a_ray_router_may_be_collected_while_the_lock_is_held(shared: SharedRouter) -> None:
    heard: list[int] = []
    shared.replicas_changed(1, {"a": 4, "b": 4})
    shared.replicas_changed(2, {"a": 4})
    shared.listen(heard.append)
    with shared._lock:  # As if the garbage collector ran inside a call.
        shared.left(2)

    assert {shared.assign(str(index), HINT) for index in range(8)} == {"a", "b"}
    assert heard == [1, 2]


def test_many_executors_lose_no_count(shared: SharedRouter) -> None:
    shared.replicas_changed(1, dict.fromkeys("abcd", 10_000))

    def work(name: int) -> None:
        for index in range(300):
            shared.assign(f"{name}-{index}", HINT)
        for index in range(300):
            shared.ended(f"{name}-{index}", FORKED)

    executors = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for executor in executors:
        executor.start()
    for executor in executors:
        executor.join()

    assert shared.num_sent == 0
    assert sum(shared.decisions().values()) == 1200


def test_a_listener_may_come_before_the_router() -> None:
    routers, heard = Routers(), list[int]()
    routers.listen("Replica-x", heard.append)
    assert routers.capacity("Replica-x") == 0
    routers.ended("Replica-x", "1", None)

    router = routers.router("Replica-x", RoutingSettings())
    router.replicas_changed(1, {"a": 4})

    assert routers.router("Replica-x", RoutingSettings()) is router
    assert heard == [0, 1]
    assert routers.capacity("Replica-x") == 1


def test_the_end_of_a_request_reaches_its_deployments_router() -> None:
    routers = Routers()
    router = routers.router("Replica-x", RoutingSettings())
    router.replicas_changed(1, {"a": 4})
    router.assign("1", HINT)

    routers.ended("Replica-y", "1", FORKED)
    assert router.num_sent == 1

    routers.ended("Replica-x", "1", FORKED)
    assert router.num_sent == 0
    assert routers.decisions() == {"Replica-x": {Reason.ONLY_ONE: 1}}
