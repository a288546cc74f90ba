"""The gateway's calls to replicas, over a Ray Serve deployment handle."""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

from grpc import StatusCode
from grpc.aio import AioRpcError
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.gateway.body import BodyTooLargeError
from deployments.relay.relay import Progress
from deployments.relay.retries import NoReplicaError, ReplicaBrokenError, ReplicaLostError
from deployments.routing.shared_router import ROUTERS
from deployments.wire.answer import AnswerBroken, AnswerEnd, AnswerStart, Piece
from deployments.wire.request import RelayedRequest

LOST = (RayActorError, DeploymentUnavailableError, ReplicaUnavailableError)
# What gRPC says of a message over the limit of its receiver.
TOO_LARGE = re.compile(r"Received message larger than max \((\d+) vs\. (\d+)\)")


class HandleCalls:
    """Calls over a handle; a cancelled or closed call cancels the request at the replica."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._stream = _plain(handle, "stream")
        # A generator too, which ends with the answer and tells of tokens before: with a unary call
        # over gRPC Ray Serve learns only with the answer that the replica has taken the request.
        self._whole = _plain(handle, "whole")

    @property
    def num_running(self) -> int:
        """Replicas that run, as the Serve controller last said; it need not be alive now."""
        router: Any = self._stream._router
        choice = None if router is None else router._asyncio_router.request_router
        return 0 if choice is None else len(choice.curr_replicas)

    async def stream(
        self, request: RelayedRequest
    ) -> AsyncGenerator[AnswerStart | Piece | AnswerEnd, None]:
        """The answer piece by piece; raises ReplicaLostError."""
        async with aclosing(_parts(self._stream, request)) as parts:
            async for part in parts:
                yield Piece.from_wire(part) if isinstance(part, tuple) else part

    async def whole(
        self, request: RelayedRequest, progress: Progress | None = None
    ) -> tuple[AnswerStart, AnswerEnd]:
        """The answer in one piece, and its cost; raises ReplicaLostError."""
        answers: list[tuple[AnswerStart, AnswerEnd]] = []
        async with aclosing(_parts(self._whole, request)) as parts:
            async for part in parts:
                if not isinstance(part, int):
                    answers.append(part)
                elif progress is not None:
                    progress(part)
        if len(answers) != 1:
            raise TypeError("a whole answer must be one part")
        return answers[0]


async def _parts(
    method: DeploymentHandle[Any], request: RelayedRequest
) -> AsyncGenerator[Any, None]:
    response = cast("DeploymentResponseGenerator[Any]", method.remote(request))
    try:
        await _taken(response, request.replica_wait_s)
        replica = ROUTERS.replica_of(method.deployment_name, request.terms.request_id or "")
        async for part in response:
            if isinstance(part, AnswerBroken):
                raise ReplicaBrokenError(part.reason, engine_died=part.engine_died, replica=replica)
            yield part
    except LOST as error:
        # A node that is lost looks the same as a process that dies of a request, and is no reason
        # to stop: `max_retries` is the bound here.
        raise ReplicaLostError(str(error)) from error
    except AioRpcError as error:
        # A replica that shuts down cancels the calls that it still holds. Our own cancelling never
        # comes back this way.
        if error.code() is StatusCode.CANCELLED:
            raise ReplicaLostError("the replica has cancelled the call") from error
        raise
    finally:
        response.cancel()


async def _taken(response: DeploymentResponseGenerator[Any], wait_s: float) -> None:
    """Wait until a replica has taken the request; raises NoReplicaError and BodyTooLargeError."""
    try:
        async with asyncio.timeout(wait_s):
            await response._fetch_future_result_async()
    except (RuntimeError, AioRpcError) as error:
        # Ray Serve makes a RuntimeError of gRPC's where the replica has not answered yet.
        if sizes := TOO_LARGE.search(str(error)):
            size, limit = sizes.groups()
            raise BodyTooLargeError(
                f"The request takes {size} bytes on its way to a replica, where this cluster takes "
                f"{limit}; see RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH."
            ) from error
        raise
    except TimeoutError as error:
        raise NoReplicaError(f"no replica has taken the request within {wait_s:g} s") from error


def _plain(handle: DeploymentHandle[Any], method: str) -> DeploymentHandle[Any]:
    """The handle for one method; both ends are ours, so the fast pickler will do."""
    return handle.options(
        method_name=method,
        stream=True,
        request_serialization="pickle",
        response_serialization="pickle",
    )
