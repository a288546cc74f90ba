"""Calls over a fake handle."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorDiedError, ActorUnavailableError

from apar_core.journal import ThreadDelta
from deployments.relay.replica_calls import HandleCalls
from deployments.wire.errors import BodyTooLargeError, NoReplicaError, ReplicaLostError
from deployments.wire.request import RelayedRequest
from deployments.wire.response import Piece, ResponseBroken, ResponseEnd, ResponseStart

REQUEST = RelayedRequest("POST", "/v1/completions", b"", [], b"{}", replica_wait_s=0.05)
START = ResponseStart(200, [], b"data: 1\n\n")
TOO_LARGE = "SERVER: Received message larger than max (5243200 vs. 4194304)"


class FakeResponse:
    """What a call over a handle returns; raises errors among its parts."""

    def __init__(self, parts: list[Any], *, taken: bool, refused: Exception | None) -> None:
        self._parts = parts
        self._taken = taken
        self._refused = refused
        self.cancelled = False

    async def _fetch_future_result_async(self) -> None:
        if self._refused is not None:
            raise self._refused
        if not self._taken:
            await asyncio.Event().wait()

    async def __aiter__(self) -> AsyncIterator[Any]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            yield part

    def cancel(self) -> None:
        self.cancelled = True


class FakeHandle:
    """A handle whose calls all get the same answer."""

    deployment_name = "Replica-m"
    _router = None

    def __init__(self, *parts: Any, taken: bool = True, refused: Exception | None = None) -> None:
        self.response = FakeResponse(list(parts), taken=taken, refused=refused)

    def options(self, **options: Any) -> "FakeHandle":
        return self

    def remote(self, request: RelayedRequest) -> FakeResponse:
        return self.response


def calls(handle: FakeHandle) -> HandleCalls:
    return HandleCalls(handle)  # type: ignore[arg-type]


async def test_the_parts_of_a_stream_arrive_as_they_were_sent() -> None:
    parts = [START, Piece(b"data: 2\n\n", (ThreadDelta((0, 1), (5, 6), 0),), 2), ResponseEnd(1, 2)]

    assert [part async for part in calls(FakeHandle(*parts)).stream(REQUEST)] == parts


async def test_a_replica_of_an_earlier_version_sends_pieces_as_plain_tuples() -> None:
    handle = FakeHandle(START, (b"2", (((0, 1), (5, 6), 0),), 2), ResponseEnd(1, 2))

    _, piece, _ = [part async for part in calls(handle).stream(REQUEST)]

    assert isinstance(piece, Piece)
    assert piece == Piece(b"2", (ThreadDelta((0, 1), (5, 6), 0),), 2)
    assert isinstance(piece.journal[0], ThreadDelta)


def rpc_error(code: StatusCode, details: str | None = None) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details)


@pytest.mark.parametrize(
    "lost",
    [ResponseBroken("the engine has died"), ActorDiedError(), rpc_error(StatusCode.CANCELLED)],
)
async def test_a_replica_that_cannot_continue_is_lost(lost: object) -> None:
    handle = FakeHandle(START, lost)
    stream = calls(handle).stream(REQUEST)

    assert await anext(stream) == START
    with pytest.raises(ReplicaLostError):
        await anext(stream)
    with pytest.raises(ReplicaLostError):
        await calls(FakeHandle(lost)).whole(REQUEST)

    assert handle.response.cancelled


@pytest.mark.parametrize(
    ("lost", "died"),
    [
        (ResponseBroken("the engine has died", engine_died=True), True),
        (ResponseBroken("the engine has aborted the request"), False),
        # As when its node is lost.
        (ActorUnavailableError("the process is gone", None), False),
        (rpc_error(StatusCode.CANCELLED), False),
    ],
)
async def test_an_engines_death_is_distinguished_from_other_losses(
    lost: object, died: bool
) -> None:
    with pytest.raises(ReplicaLostError) as raised:
        await calls(FakeHandle(lost)).whole(REQUEST)

    assert raised.value.engine_died is died


async def test_a_call_that_would_fail_anywhere_is_not_a_lost_replica() -> None:
    error = rpc_error(StatusCode.RESOURCE_EXHAUSTED)

    with pytest.raises(AioRpcError):
        await calls(FakeHandle(error)).whole(REQUEST)


@pytest.mark.parametrize(
    "refused",
    [
        rpc_error(StatusCode.RESOURCE_EXHAUSTED, TOO_LARGE),
        RuntimeError(f"Unexpected error (StatusCode.RESOURCE_EXHAUSTED): {TOO_LARGE}."),
    ],
)
async def test_a_request_too_large_for_ray_serve_is_refused_with_both_sizes(
    refused: Exception,
) -> None:
    with pytest.raises(BodyTooLargeError, match=r"is 5243200 bytes .* accepts 4194304;"):
        await calls(FakeHandle(START, refused=refused)).whole(REQUEST)


async def test_other_failures_before_a_replica_accepts_are_passed_on() -> None:
    handle = FakeHandle(START, refused=RuntimeError("Unexpected error (StatusCode.INTERNAL)"))

    with pytest.raises(RuntimeError, match="INTERNAL"):
        await calls(handle).whole(REQUEST)


async def test_a_whole_answer_comes_with_its_cost() -> None:
    handle = FakeHandle((START, ResponseEnd(3)))

    assert await calls(handle).whole(REQUEST) == (START, ResponseEnd(3))


async def test_a_whole_answer_reports_tokens_as_it_is_generated() -> None:
    told: list[tuple[int, int]] = []
    # A replica of an earlier version sends a plain number.
    handle = FakeHandle(2, Piece(b"", (), 5, 3), (START, ResponseEnd(3, 9)))

    answer = await calls(handle).whole(REQUEST, lambda *counts: told.append(counts))

    assert answer == (START, ResponseEnd(3, 9))
    assert told == [(2, 0), (5, 3)]
    assert await calls(handle).whole(REQUEST) == (START, ResponseEnd(3, 9))


def test_the_start_of_an_answer_is_read_from_a_replica_of_another_version() -> None:
    state: Any = START.__getstate__()
    for given in (state[:6], [*state, "more"]):
        read = ResponseStart.__new__(ResponseStart)
        read.__setstate__(given)
        assert read == START


async def test_a_request_that_no_replica_accepts_is_cancelled() -> None:
    handle = FakeHandle(START, taken=False)

    with pytest.raises(NoReplicaError, match=r"within 0\.05 s"):
        await calls(handle).whole(REQUEST)

    assert handle.response.cancelled


async def test_a_stream_that_is_closed_cancels_its_call() -> None:
    handle = FakeHandle(START, Piece(b"2"))
    stream = calls(handle).stream(REQUEST)
    await anext(stream)

    await stream.aclose()

    assert handle.response.cancelled
