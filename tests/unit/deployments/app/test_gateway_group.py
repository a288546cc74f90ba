"""The state that gateways share, without Ray around it."""

import threading
from typing import Any

import pytest
from ray.exceptions import RayActorError

from deployments.app import gateway_group
from deployments.app.autoscaling import gateway_autoscaling, num_nodes
from deployments.app.gateway_group import ActorCalls, GroupMember, SharedState
from deployments.config import ClusterConfig
from deployments.config.autoscaling import AutoscalingConfig
from deployments.config.keys import KeyConfig, hash_of
from deployments.config.limits import LimitsConfig
from deployments.config.model import ModelConfig
from deployments.gateway.callers import Caller
from deployments.gateway.gateway import Gateway
from deployments.wire.errors import RateLimitError
from deployments.wire.response import ResponseStart
from tests.fakes.replicas import JSON, FakeReplicas, settings_of

KEY = KeyConfig(name="a", hash=hash_of("a"), requests_per_minute=2, max_threads=2)


class InProcess:
    """Calls to a `SharedState` in this process, which may be gone."""

    def __init__(self, state: SharedState | None) -> None:
        self.state = state

    async def __call__(self, method: str, *arguments: Any, timeout_s: float = 1.0) -> Any:
        if self.state is None:
            raise RayActorError
        return await getattr(self.state, method)(*arguments)


async def member(
    monkeypatch: pytest.MonkeyPatch, state: SharedState | None, name: str, **limits: Any
) -> tuple[Gateway, GroupMember]:
    monkeypatch.setattr(gateway_group, "ActorCalls", lambda: InProcess(state))
    settings = settings_of(1, keys=(KEY,), limits=LimitsConfig(**limits), gateways=2)
    gateway = Gateway(settings, [FakeReplicas(ResponseStart(200, JSON, b"{}"))])
    group = GroupMember(gateway, name, settings.num_gateways)
    await group.join()
    return gateway, group


async def caller(gateway: Gateway) -> Caller:
    return await gateway.callers.identify([(b"authorization", b"Bearer a")])


async def test_a_key_has_one_rate_and_one_part_of_the_cache_at_all_gateways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = SharedState()
    members = [await member(monkeypatch, state, name) for name in ("first", "second")]
    callers = [await caller(gateway) for gateway, _ in members]

    for each in callers:
        assert each.rates is not None
        await each.rates.admit_request()
    for each in callers:
        assert each.rates is not None
        with pytest.raises(RateLimitError):
            await each.rates.admit_request()
    assert callers[0].cache_salt == callers[1].cache_salt
    for _, group in members:
        await group.leave()


async def test_without_the_actor_requests_pass_and_places_are_divided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.gateway.shared_slots.TRUST_S", -1.0)
    gateway, group = await member(monkeypatch, None, "first")

    limited = (await caller(gateway)).rates
    assert limited is not None
    for _ in range(5):
        await limited.admit_request()
    assert group.slots.of("model", 9) == 4
    await group.leave()


async def test_a_call_whose_actor_does_not_start_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when Ray's global store is lost together with the actor."""
    recovered, num_starts = threading.Event(), 0

    class Actor:
        @property
        def read(self) -> "Actor":
            return self

        async def remote(self, place: str) -> str:
            return place

    def start() -> Actor:
        nonlocal num_starts
        num_starts += 1
        recovered.wait()
        return Actor()

    monkeypatch.setattr(gateway_group, "_started_actor", start)
    calls = ActorCalls()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await calls("read", "place", timeout_s=0.01)
    recovered.set()

    assert await calls("read", "place", timeout_s=60) == "place"
    assert num_starts == 1


async def test_a_gateway_that_is_alone_again_has_all_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway, group = await member(monkeypatch, SharedState(), "first")
    (model,) = gateway._models.values()
    assert model._capacity < model._all_slots

    await group.leave()

    assert model._capacity == model._all_slots


def test_the_number_of_gateways_is_fixed_or_follows_the_nodes() -> None:
    nodes = [
        {"Alive": True, "Resources": {"gateway": 1.0}},
        {"Alive": True, "Resources": {"CPU": 2.0}},
        {"Alive": False, "Resources": {"gateway": 1.0}},
    ]

    assert (num_nodes(nodes, None), num_nodes(nodes, "gateway")) == (2, 1)
    fixed = gateway_autoscaling(ClusterConfig(gateways=3))
    followed = gateway_autoscaling(ClusterConfig(gateways="per-node"))
    assert (fixed.min_replicas, fixed.max_replicas) == (3, 3)
    assert followed.max_replicas > 100


def test_gateways_report_their_queues_often_only_if_a_model_needs_it() -> None:
    scaled = ModelConfig(autoscaling=AutoscalingConfig(max_replicas=4))
    often = gateway_autoscaling(ClusterConfig(models=(ModelConfig(name="other"), scaled)))
    rarely = gateway_autoscaling(ClusterConfig())

    assert often.metrics_interval_s == 1
    assert rarely.metrics_interval_s == 10
