"""When a request is retried after the loss of its replica."""

import asyncio

import pytest

from deployments.config import ClusterConfig
from deployments.config.retries import RetryConfig
from deployments.gateway.gateway import Gateway
from deployments.gateway.settings import gateway_settings
from deployments.relay.relay import Retries
from deployments.wire.errors import NoReplicaError, ReplicaLostError


async def test_pauses_grow_beyond_the_death_of_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    attempts = Retries(RetryConfig(max_retries=4)).attempts()

    for _ in range(4):
        await attempts.another(ReplicaLostError("dead"))

    assert pauses == [0.1, 0.4, 1.6, 2.0]


async def test_after_the_last_retry_the_error_is_raised() -> None:
    retries = Retries(RetryConfig(max_retries=2), first_pause_s=0.0)
    attempts = retries.attempts()
    await attempts.another(ReplicaLostError("dead"))
    await attempts.another(ReplicaLostError("dead"))

    with pytest.raises(ReplicaLostError):
        await attempts.another(ReplicaLostError("dead"))


async def test_a_timeout_without_a_replica_is_not_retried() -> None:
    retries = Retries(RetryConfig(max_retries=9))

    with pytest.raises(NoReplicaError):
        await retries.attempts().another(NoReplicaError("none"))


async def test_the_gateway_takes_the_configured_retries_and_new_ones() -> None:
    first = gateway_settings(ClusterConfig(retries=RetryConfig(max_retries=7)))
    second = gateway_settings(ClusterConfig(retries=RetryConfig(continue_streams=False)))
    gateway = Gateway(first, [object()])  # type: ignore[list-item]
    assert gateway.retries.config.max_retries == 7

    await gateway.reconfigure(second, [object()])  # type: ignore[list-item]

    assert not gateway.retries.config.continue_streams
