"""A relay with nothing in it: the least that a gateway in front of a replica must do."""

from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.gateway.body import BodyBudget, read_body
from deployments.relay.relay import Retries, relay_answer
from deployments.relay.replica_calls import HandleCalls
from deployments.wire.answer import AnswerEnd
from deployments.wire.request import RelayedRequest

BARE_PREFIX = "/bare"


@serve.ingress()
class BareRelay:
    """Hands every request to one replica and relays its answer; checks and counts nothing."""

    def __init__(self, replica: DeploymentHandle[Any]) -> None:
        self._calls = HandleCalls(replica)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        # A function, because uvicorn takes a bound method for an application of ASGI 2.
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._relay(scope, receive, send)

        return app

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            return
        with BodyBudget(2**20).hold(None) as held:
            body = await read_body(receive, 2**20, held, timeout_s=60.0)
        path = scope["path"].removeprefix(BARE_PREFIX)
        headers = [(b"content-type", b"application/json")]
        streams = b'"stream": true' in body
        request = RelayedRequest(scope["method"], path, b"", headers, body, streams=streams)
        await relay_answer(self._calls, request, send, _Unobserved(), Retries())


class _Unobserved:
    def progress(self, num_tokens: int) -> None: ...

    def retried(self, *, continued: bool) -> None: ...

    def ended(self, end: AnswerEnd | None) -> None: ...
