"""Routing decisions of our router, in this process, for two real replicas."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, suppress
from typing import Any

import psutil
import pytest

from cluster.local_ray import free_port, local_ray
from deployments.config import ClusterConfig
from deployments.config.model import ModelConfig
from deployments.config.routing import RoutingSettings
from deployments.gateway.body import RequestBody
from deployments.routing.policies import Reason
from deployments.routing.shared_router import ROUTERS, SharedRouter
from deployments.wire.errors import ReplicaLostError
from deployments.wire.request import RelayedRequest, RequestHint, RequestTerms
from deployments.wire.response import ResponseEnd, ResponseStart

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
CAP = 4
PATIENCE_S = 90.0
REPLICA = "ray::ServeReplica:routing:Replica-routed"
MODEL = ModelConfig(
    name="routed",
    replicas=2,
    max_concurrency=CAP,
    cpu_threads=1,
    kv_cache_gib=0.1,
)
FORKING = "Give me 5 tips for learning guitar."


class Client:
    """Calls the replicas as the gateway does, and reports the end of each call to the router."""

    def __init__(self, calls: Any, router: SharedRouter, inside: Callable[[], list[int]]) -> None:
        """`inside` returns the number of running requests of each replica."""
        self.calls = calls
        self.router = router
        self.inside = inside
        self.places: dict[str, str] = {}
        self._count = 0

    def request(self, messages: list[dict[str, str]], **fields: Any) -> RelayedRequest:
        """Build a chat completion with an id and a hint."""
        self._count += 1
        body = {"model": "routed", "messages": messages, "temperature": 0, "stream": True} | fields
        raw = json.dumps(body).encode()
        return RelayedRequest(
            "POST",
            "/v1/chat/completions",
            b"",
            [(b"content-type", b"application/json")],
            raw,
            RequestTerms(request_id=f"request-{self._count}"),
            RequestBody(raw).hint(),
        )

    async def parts(self, request: RelayedRequest) -> AsyncGenerator[Any, None]:
        """Yield the parts of an answer and note its replica."""
        request_id = request.terms.request_id or ""
        end: ResponseEnd | None = None
        try:
            async with aclosing(self.calls.stream(request)) as parts:
                async for part in parts:
                    if isinstance(part, ResponseStart):
                        assert part.status == 200, part.body
                        self.places[request_id] = self.router.replica_of(request_id) or ""
                    if isinstance(part, ResponseEnd):
                        end = part
                    yield part
        finally:
            ROUTERS.ended(MODEL.deployment_name, request_id, end)

    async def place(self, messages: list[dict[str, str]], **fields: Any) -> str:
        """Run a chat to its end and return its replica."""
        request = self.request(messages, **fields)
        async with aclosing(self.parts(request)) as parts:
            async for _ in parts:
                pass
        return self.places[request.terms.request_id or ""]


def processes(title: str) -> list[psutil.Process]:
    """Return the live descendants of this process whose command line begins with `title`."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # raised for zombies too
            if " ".join(child.cmdline()).startswith(title):
                found.append(child)
    return found


@pytest.fixture(scope="module")
def application() -> Iterator[None]:
    """Ray Serve in this process, with an application of ours beside the one of these tests."""
    tiny = ModelConfig(checkpoint="apar-tiny", cpu_threads=1, kv_cache_gib=0.1)
    with local_ray(num_cpus=2):
        from deployments.app.service import running

        with running(ClusterConfig(port=free_port(), models=(tiny,))):
            yield


@pytest.fixture(scope="module")
def client(application: None) -> Iterator[Client]:
    from ray import serve

    from deployments.app.application import ClusterFacts, build_replicas
    from deployments.relay.replica_calls import HandleCalls

    replicas = build_replicas(MODEL, ClusterConfig(), ClusterFacts())

    class Front:
        """Ray Serve lets no ingress have a router of its own."""

        def __init__(self, replicas: Any) -> None:
            del replicas

    front = serve.deployment(name="Front", ray_actor_options={"num_cpus": 0})(Front)
    serve.run(front.bind(replicas), name="routing", route_prefix=None)
    try:
        handle = serve.get_deployment_handle(MODEL.deployment_name, "routing")
        # No event loop runs here, so the handle brings its own.
        handle._init(_run_router_in_separate_loop=True)

        def inside() -> list[int]:
            loads = handle.broadcast("load").results(timeout_s=30)
            return [load["requests_inside"] for load in loads]

        calls = HandleCalls(handle)
        router = ROUTERS.router(MODEL.deployment_name, RoutingSettings())
        until(lambda: router.capacity == 2)
        yield Client(calls, router, inside)
    finally:
        serve.delete("routing")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_a_burst_is_spread_and_leaves_nothing_behind(client: Client) -> None:
    before = client.router.decisions().get(Reason.LEAST_LOAD, 0)

    places = Counter(await asyncio.gather(*(client.place(user(FORKING)) for _ in range(8))))

    assert sorted(places.values()) == [4, 4]
    assert client.router.num_sent == 0
    assert client.router.decisions()[Reason.LEAST_LOAD] > before


async def test_the_router_learns_what_requests_bring(client: Client) -> None:
    for _ in range(4):
        await asyncio.gather(*(client.place(user(FORKING)) for _ in range(8)))

    forecast = client.router._router.forecaster.forecast(RequestHint())
    assert forecast.threads > 2
    rows = [row for row in client.router._router.table.rows if row is not None]
    assert len(rows) == 2
    assert all(row.load is not None and row.load.blocks > 0 for row in rows)


async def test_no_replica_runs_more_than_its_cap_and_all_are_answered(client: Client) -> None:
    most = 0
    calls = [asyncio.create_task(client.place(user(FORKING))) for _ in range(24)]
    while not all(call.done() for call in calls):
        most = max(most, *await asyncio.to_thread(client.inside))
        await asyncio.sleep(0.05)

    places = Counter(call.result() for call in calls)
    # A look now and then need not find the fullest moment.
    assert 1 < most <= CAP
    assert len(places) == 2
    assert client.router.num_sent == 0


async def test_the_turns_of_a_conversation_stay_at_one_replica(client: Client) -> None:
    for subject in ("guitar", "sleep", "bread"):
        messages = [
            {"role": "system", "content": f"You know all about {subject}. " * 30},
            *user(f"Give me 3 tips for {subject}."),
        ]
        places = set()
        for turn in range(3):
            places.add(await client.place(messages, max_tokens=40))
            messages += [{"role": "assistant", "content": f"Answer {turn}."}, *user("And more?")]
            await asyncio.sleep(5 * RoutingSettings().report_period_s)  # as people pause

        assert len(places) == 1


async def test_a_cancelled_request_is_no_longer_counted(client: Client) -> None:
    request = client.request(user(FORKING))
    async with aclosing(client.parts(request)) as parts:
        await anext(parts)
        assert client.router.num_sent == 1

    assert client.router.num_sent == 0


async def test_all_go_to_the_other_replica_when_one_is_killed(client: Client) -> None:
    victim = processes(REPLICA)[0]
    victim.kill()
    lost = 0
    deadline = time.monotonic() + PATIENCE_S
    while client.router.capacity == 2:
        assert time.monotonic() < deadline
        try:
            await client.place(user("Hello"), max_tokens=4)
        except ReplicaLostError:
            lost += 1

    places = {await client.place(user("Hello"), max_tokens=4) for _ in range(4)}

    assert lost <= 1
    assert len(places) == 1
    await asyncio.to_thread(until, lambda: client.router.capacity == 2)
    both = await asyncio.gather(*(client.place(user(FORKING)) for _ in range(8)))
    assert len(set(both)) == 2
