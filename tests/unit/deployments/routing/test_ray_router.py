"""Our router inside Ray Serve's request routing, with fake replicas."""

import asyncio
import gc
from collections import Counter
from typing import Any

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve._private.request_router.common import PendingRequest

from deployments.config.routing import RoutingPolicy, RoutingSettings
from deployments.routing import shared_router
from deployments.routing.ray_router import ThreadRequestRouter, router_config
from deployments.routing.shared_router import Routers, SharedRouter
from deployments.wire.request import RelayedRequest, RequestTerms
from tests.unit.deployments.routing.loads import FORKED

pytestmark = pytest.mark.usefixtures("simulated_time")

DEPLOYMENT = DeploymentID(name="Replica-x", app_name="apar")


class FakeReplica:
    """The part of Ray Serve's `RunningReplica` used by routing."""

    def __init__(self, name: str, *, hangs: bool = False) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.max_ongoing_requests = 8
        self.routing_stats: dict[str, Any] = {}
        self.hangs = hangs
        self.num_asked = 0
        self.full = False
        self.answers: list[int] = []

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.num_asked += 1
        if self.answers:
            return self.answers.pop(0)
        if self.hangs:
            await asyncio.sleep(10 * deadline_s)
        return self.max_ongoing_requests if self.full else 0


@pytest.fixture(autouse=True)
def own_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_router, "ROUTERS", Routers())


def ray_router(*replicas: FakeReplica) -> Any:
    make: Any = ThreadRequestRouter  # Ray Serve's constructor has no types.
    router = make(
        DEPLOYMENT,
        DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=False,
        initial_backoff_s=0.001,
        max_backoff_s=0.01,
    )
    router.queue_len_response_deadline_s = router.max_queue_len_response_deadline_s = 0.02
    router.initialize_state(**RoutingSettings().model_dump(mode="json"))
    router.update_replicas(list(replicas))
    return router


def pending(request_id: str) -> PendingRequest:
    terms = RequestTerms(request_id=request_id)
    request = RelayedRequest("POST", "/v1/completions", b"", [], b"{}", terms)
    return PendingRequest(
        args=[request], kwargs={}, metadata=RequestMetadata(request_id, f"ray-{request_id}")
    )


async def route(router: Any, request_id: str) -> str:
    chosen = await router._choose_replica_for_request(pending(request_id))
    name: str = chosen.replica_id.unique_id
    return name


def shared() -> SharedRouter:
    return shared_router.ROUTERS.router(DEPLOYMENT.name, RoutingSettings())


async def test_a_request_goes_elsewhere_if_the_cheapest_replica_does_not_answer() -> None:
    hung, busy = FakeReplica("hung", hangs=True), FakeReplica("busy")
    router = ray_router(hung, busy)
    for index in range(4):
        shared().moved(f"before-{index}", "busy", RelayedRequest("POST", "/", b"", [], b"").hint)

    assert await asyncio.wait_for(route(router, "1"), 5.0) == "busy"

    # Once when Ray Serve first saw it, once for the request.
    assert hung.num_asked == 2
    assert shared().replica_of("1") == "busy"
    assert shared().num_sent == 5
    assert not router._waiting
    router.on_request_completed(busy.replica_id, "ray-1")
    assert shared().replica_of("1") is None


async def test_a_request_placed_after_all_seemed_full_is_counted() -> None:
    replica = FakeReplica("a")
    replica.max_ongoing_requests = 1
    router = ray_router(replica)
    await asyncio.sleep(0.01)
    replica.answers = [1, 1, 0]
    call = asyncio.ensure_future(route(router, "1"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert shared().replica_of("1") == "a"
    # Refused there; on the retry the other place counts as taken.
    shared().moved("2", "a", RelayedRequest("POST", "/", b"", [], b"").hint)

    assert await asyncio.wait_for(call, 5.0) == "a"

    assert shared().replica_of("1") == "a"
    assert shared().num_sent == 2


async def test_a_refused_request_that_gets_a_place_found_for_another_is_counted() -> None:
    replica = FakeReplica("a")
    replica.max_ongoing_requests = 1
    router = ray_router(replica)
    refused = pending("1")
    assert await router._choose_replica_for_request(refused) is replica
    replica.full = True
    # With a single replica, these two occupy all of Ray Serve's routing tasks.
    younger = [asyncio.create_task(route(router, name)) for name in "23"]
    await asyncio.sleep(0.02)
    router.on_request_completed(replica.replica_id, "ray-1")
    again = asyncio.create_task(router._choose_replica_for_request(refused, is_retry=True))
    await asyncio.sleep(0)

    replica.answers = [0]  # One place.
    assert await asyncio.wait_for(again, 5.0) is replica

    assert not any(call.done() for call in younger)
    assert shared().replica_of("1") == "a"
    assert shared().num_sent == 1
    for call in younger:
        call.cancel()
    await asyncio.wait(younger)
    assert shared().num_sent == 1
    assert not router._waiting


async def test_the_late_end_of_a_refused_call_keeps_the_next_one_counted() -> None:
    replica = FakeReplica("a")
    router = ray_router(replica)
    request = pending("1")
    await router._choose_replica_for_request(request)
    await router._choose_replica_for_request(request, is_retry=True)

    router.on_request_completed(replica.replica_id, "ray-1")
    assert shared().replica_of("1") == "a"

    router.on_request_completed(replica.replica_id, "ray-1")
    assert shared().replica_of("1") is None
    assert not router._sent


async def test_the_end_of_a_refused_call_keeps_a_new_pick() -> None:
    replica = FakeReplica("a")
    router = ray_router(replica)
    request = pending("1")
    await router._choose_replica_for_request(request)
    replica.hangs = True
    again = asyncio.create_task(router._choose_replica_for_request(request, is_retry=True))
    await asyncio.sleep(0.01)

    router.on_request_completed(replica.replica_id, "ray-1")

    assert shared().replica_of("1") == "a"
    again.cancel()
    await asyncio.wait([again])
    assert shared().num_sent == 0


async def test_all_replicas_are_tried_in_turn_until_one_answers() -> None:
    replicas = [FakeReplica(name, hangs=True) for name in "abc"]
    router = ray_router(*replicas)
    call = asyncio.ensure_future(route(router, "1"))
    while min(replica.num_asked for replica in replicas) < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    asked = [replica.num_asked for replica in replicas]
    assert max(asked) - min(asked) <= 1

    call.cancel()
    await asyncio.sleep(0.01)
    assert not router._waiting
    assert shared().num_sent == 0


async def test_requests_are_spread_and_leave_no_state() -> None:
    replicas = [FakeReplica(name) for name in "ab"]
    router = ray_router(*replicas)

    places = Counter(await asyncio.gather(*(route(router, str(index)) for index in range(8))))

    assert places == {"a": 4, "b": 4}
    for index in range(8):
        shared().ended(str(index), FORKED)
    assert shared().num_sent == 0
    assert not router._waiting


async def test_a_model_that_is_removed_and_added_again_is_routed() -> None:
    heard: list[int] = []
    shared_router.ROUTERS.listen(DEPLOYMENT.name, heard.append)
    router = ray_router(FakeReplica("old"))
    await route(router, "1")

    del router
    await asyncio.sleep(0.05)
    gc.collect()
    assert shared_router.ROUTERS.capacity(DEPLOYMENT.name) == 0
    router = ray_router(FakeReplica("new"))

    assert await asyncio.wait_for(route(router, "2"), 5.0) == "new"
    assert shared_router.ROUTERS.capacity(DEPLOYMENT.name) == 1
    assert heard == [0, 1, 0, 1]


def test_ray_serve_makes_our_router_with_the_settings() -> None:
    settings = RoutingSettings(policy=RoutingPolicy.ROUND_ROBIN, affinity=0.5, report_period_s=0.7)
    config = router_config(settings)

    assert config.get_request_router_class() is ThreadRequestRouter
    assert RoutingSettings.model_validate(config.request_router_kwargs) == settings
    assert config.request_routing_stats_period_s == 0.7
