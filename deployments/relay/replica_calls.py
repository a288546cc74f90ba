"""The gateway's calls to replicas over a Ray Serve deployment handle."""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from grpc import StatusCode
from grpc.aio import AioRpcError
from ray.exceptions import RayActorError
from ray.serve import context
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.relay.relay import Progress
from deployments.routing.shared_router import ROUTERS
from deployments.wire.errors import (
    BodyTooLargeError,
    NoReplicaError,
    ReplicaBrokenError,
    ReplicaLostError,
)
from deployments.wire.request import RelayedRequest
from deployments.wire.response import Piece, ResponseBroken, ResponseEnd, ResponseStart
from deployments.wire.start import StartBoard, StartReport, described

_LOST = (RayActorError, DeploymentUnavailableError, ReplicaUnavailableError)
# gRPC's error for a message over its receiver's limit.
TOO_LARGE = re.compile(r"Received message larger than max \((\d+) vs\. (\d+)\)")


class HandleCalls:
    """`ModelReplicas` over a handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._board = StartBoard(handle.deployment_name)
        self._stream = _for_method(handle, "stream")
        # `whole` is a generator, too: over gRPC, Ray Serve learns only from a unary call's response
        # that the replica has accepted the request. It yields token counts meanwhile.
        self._whole = _for_method(handle, "whole")

    @property
    def num_running(self) -> int:
        """Running replicas, as last reported by the Serve controller; some may have died since."""
        router: Any = self._stream._router
        choice = None if router is None else router._asyncio_router.request_router
        return 0 if choice is None else len(choice.curr_replicas)

    @property
    def num_unreachable(self) -> int:
        """See `ModelReplicas`; a handle has no connections of its own."""
        return 0

    async def answering(self, wait_s: float) -> int:
        """See `ModelReplicas`."""
        if not self.num_running:
            return 0
        signs: list[asyncio.Task[Any]] = []
        try:
            async with asyncio.timeout(wait_s):
                # The public `results_async` would lose all results if the slowest is late.
                calls = await self._stream.broadcast("alive")._fetch_replica_results_async()
                signs = [asyncio.ensure_future(call.get_async()) for call in calls]
                await asyncio.wait(signs)
        except (TimeoutError, *_LOST):
            pass
        finally:
            for sign in signs:
                sign.cancel()
        ended = [sign for sign in signs if sign.done() and not sign.cancelled()]
        return sum(sign.exception() is None and sign.result() is True for sign in ended)

    async def starting(self) -> Sequence[StartReport]:
        """See `ModelReplicas`."""
        return await self._board.reports()

    async def stream(
        self, request: RelayedRequest
    ) -> AsyncGenerator[ResponseStart | Piece | ResponseEnd, None]:
        """Yield the answer piece by piece. Raises ReplicaLostError."""
        async with aclosing(_parts(self._stream, request, self)) as parts:
            async for part in parts:
                # Replicas of an earlier version send pieces as plain tuples.
                yield Piece.from_wire(part) if type(part) is tuple else part

    async def whole(
        self, request: RelayedRequest, progress: Progress | None = None
    ) -> tuple[ResponseStart, ResponseEnd]:
        """Return the whole answer and its cost. Raises ReplicaLostError."""
        return await joined(_parts(self._whole, request, self), progress)


async def joined(
    parts: AsyncGenerator[Any, None], progress: Progress | None
) -> tuple[ResponseStart, ResponseEnd]:
    """Return the whole answer from the parts of a call of `whole`; close them at the end."""
    start: ResponseStart | None = None
    end: ResponseEnd | None = None
    bodies: list[bytes] = []
    async with aclosing(parts):
        async for part in parts:
            if type(part) is tuple:
                # Over the handle, start and end are one part.
                start, end = part
                bodies.append(part[0].body)
            elif isinstance(part, ResponseEnd):
                end = part
            elif isinstance(part, ResponseStart):
                start = part
                bodies.append(part.body)
            elif start is not None:
                bodies.append(part.body)
            elif progress is not None:
                # Replicas of an earlier version send numbers.
                piece = Piece(b"", (), part) if isinstance(part, int) else part
                progress(piece.num_tokens, piece.prompt_tokens)
    if start is None or end is None:
        raise TypeError("a whole answer must have a start and an end")
    return replace(start, body=b"".join(bodies)), end


def unbroken(part: Any, replica: str | None) -> Any:
    """Return a part of an answer. Raises ReplicaBrokenError if the answer broke off."""
    if isinstance(part, ResponseBroken):
        raise ReplicaBrokenError(part.reason, engine_died=part.engine_died, replica=replica)
    return part


async def _parts(
    method: DeploymentHandle[Any], request: RelayedRequest, replicas: HandleCalls
) -> AsyncGenerator[Any, None]:
    _name_calls(request.terms.request_id)
    response = cast("DeploymentResponseGenerator[Any]", method.remote(request))
    replica: str | None = None
    try:
        try:
            await _accepted(response, request.replica_wait_s)
        except NoReplicaError as error:
            if not replicas.num_running:
                error.client_message, error.retry_after_s = described(await replicas.starting())
            raise
        replica = ROUTERS.replica_of(method.deployment_name, request.terms.request_id or "")
        async for part in response:
            yield unbroken(part, replica)
    except _LOST as error:
        # Not counted as a death of the engine: the loss of a node looks the same as a process that
        # this request has killed. `max_retries` bounds the attempts.
        raise ReplicaLostError(str(error), replica=replica) from error
    except AioRpcError as error:
        # A replica that shuts down cancels its remaining calls. Our own cancellation never arrives
        # as this error.
        if error.code() is StatusCode.CANCELLED:
            raise ReplicaLostError("the replica has cancelled the call", replica=replica) from error
        raise
    finally:
        response.cancel()


def _name_calls(request_id: str | None) -> None:
    """Give all calls of this request the same id in Ray Serve, whose router counts by it.

    A request that came through Ray Serve has one already.
    """
    if request_id and not context._get_serve_request_context()._internal_request_id:
        context._set_request_context(_internal_request_id=request_id)


async def _accepted(response: DeploymentResponseGenerator[Any], wait_s: float) -> None:
    """Wait until a replica has accepted the request.

    Raises NoReplicaError after `wait_s`, and BodyTooLargeError for a message over gRPC's limit.
    """
    try:
        async with asyncio.timeout(wait_s):
            await response._fetch_future_result_async()
    except (RuntimeError, AioRpcError) as error:
        # Ray Serve turns gRPC's error into a RuntimeError if the replica has not answered yet.
        if sizes := TOO_LARGE.search(str(error)):
            size, limit = sizes.groups()
            raise BodyTooLargeError(
                f"The request is {size} bytes on its way to a replica, and this cluster accepts "
                f"{limit}; see RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH."
            ) from error
        raise
    except TimeoutError as error:
        raise NoReplicaError(f"no replica accepted the request within {wait_s:g} s") from error


def _for_method(handle: DeploymentHandle[Any], method: str) -> DeploymentHandle[Any]:
    return handle.options(
        method_name=method,
        stream=True,
        # Both ends run this code, so the fast pickler suffices.
        request_serialization="pickle",
        response_serialization="pickle",
    )
