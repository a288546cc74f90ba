"""A replica counts calls inside, not their choices."""

import asyncio
from typing import Any

import pytest

from apar_core.engine.request_follower import RequestFollower
from apar_core.fork_parameters import KeyTerms
from apar_core.scheduler.core_state import CoreState
from deployments.replica.answering import Answering
from deployments.replica.replica import LoadReporter, Replica
from deployments.wire.request import RelayedRequest
from tests.fakes.core_states import a_core_state


class FakeEngine:
    """An engine that runs eight choices of each of three calls."""

    errored = False

    async def core_state(self) -> CoreState:
        return a_core_state(
            requests=24, threads=30, deferred_threads=2, kv_blocks=100, free_blocks=75
        )

    def get_num_unfinished_requests(self) -> int:
        return 24

    def follow(
        self, request_id: str, follower: RequestFollower, terms: KeyTerms | None = None
    ) -> None:
        raise AssertionError("the application asks for nothing")

    def unfollow(self, request_id: str) -> None:
        raise AssertionError("nothing was followed")

    def end(self, request_id: str) -> bool:
        return False


class FakeReplica(Replica):
    """A replica with a fake engine and application."""

    def __init__(self) -> None:
        self._engine: Any = FakeEngine()
        self._load_reporter = LoadReporter(block_size=16)
        Answering.__init__(self, self._engine, self._run, "a")
        self.may_end = asyncio.Event()

    async def _run(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/broken":
            raise RuntimeError("broken")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        if scope["path"] == "/left":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"b"})

    def __del__(self) -> None:  # type: ignore[override]  # There is no engine to shut down.
        pass


def request(path: str = "/v1/completions") -> RelayedRequest:
    return RelayedRequest("POST", path, b"", [], b'{"n": 8}')


async def reported(replica: Replica) -> tuple[float, float]:
    load, scaling = await replica.record_routing_stats(), await replica.record_autoscaling_stats()
    assert load["threads"] == scaling["threads"] == 30
    assert load["waiting_forks"] == scaling["waiting_forks"] == 2
    assert scaling["kv_use"] == 0.25
    return load["requests"], scaling["requests"]


@pytest.mark.usefixtures("simulated_time")
async def test_a_request_with_eight_choices_is_one() -> None:
    replica = FakeReplica()
    streams = [replica.stream(request()) for _ in range(2)]
    for stream in streams:
        await anext(stream)
    whole = asyncio.ensure_future(anext(replica.whole(request())))
    await asyncio.sleep(0.01)

    assert await reported(replica) == (3, 3)

    replica.may_end.set()
    await whole
    for stream in streams:
        async for _ in stream:
            pass
    assert await reported(replica) == (0, 0)


async def test_a_cancelled_or_failed_request_is_no_longer_inside() -> None:
    replica = FakeReplica()
    stream = replica.stream(request("/left"))
    await anext(stream)
    assert await reported(replica) == (1, 1)

    await stream.aclose()  # type: ignore[attr-defined]
    assert await reported(replica) == (0, 0)
    with pytest.raises(RuntimeError, match="broken"):
        await anext(replica.stream(request("/broken")))
    assert await reported(replica) == (0, 0)
