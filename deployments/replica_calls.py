"""The gateway's calls to replicas, over a Ray Serve deployment handle."""

from collections.abc import AsyncGenerator
from typing import Any, cast

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from deployments.asgi_relay import AnswerStart, RelayedRequest
from deployments.gateway import ReplicaLostError

LOST = (RayActorError, DeploymentUnavailableError, ReplicaUnavailableError)


class HandleCalls:
    """Calls over a handle; a cancelled or closed call cancels the request at the replica."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._stream = _plain(handle, "stream", stream=True)
        self._whole = _plain(handle, "whole", stream=False)

    async def stream(self, request: RelayedRequest) -> AsyncGenerator[AnswerStart | bytes, None]:
        """The answer piece by piece; raises ReplicaLostError."""
        response = cast(
            "DeploymentResponseGenerator[AnswerStart | bytes]", self._stream.remote(request)
        )
        try:
            async for part in response:
                yield part
        except LOST as error:
            raise ReplicaLostError(str(error)) from error
        finally:
            response.cancel()

    async def whole(self, request: RelayedRequest) -> AnswerStart:
        """The answer in one piece; raises ReplicaLostError."""
        response = cast("DeploymentResponse[AnswerStart]", self._whole.remote(request))
        try:
            return await response
        except LOST as error:
            raise ReplicaLostError(str(error)) from error
        finally:
            response.cancel()


def _plain(handle: DeploymentHandle[Any], method: str, *, stream: bool) -> DeploymentHandle[Any]:
    """The handle for one method; both ends are ours, so the fast pickler will do."""
    return handle.options(
        method_name=method,
        stream=stream,
        request_serialization="pickle",
        response_serialization="pickle",
    )
