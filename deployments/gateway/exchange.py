"""One HTTP request and its answer, as the gateway sees them: id, headers, times, record."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Scope, Send

from deployments.gateway.request_log import RequestRecord, content_of
from deployments.wire.answer import Headers
from deployments.wire.errors import ERROR_EVENT, error_code, event_error_code

if TYPE_CHECKING:
    from deployments.gateway.callers import Caller
    from deployments.gateway.gateway_trace import RequestTrace
    from deployments.relay.relay import ReplicaCalls

REQUEST_ID = b"x-request-id"
# What can stand in a log, a header and an engine's request id as it is.
_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Exchange:
    """Passes the messages of the answer on, each start with the request's id and rates."""

    def __init__(
        self,
        scope: Scope,
        send: Send,
        *,
        keeps_content: bool = False,
        sends_id: bool = True,
        trace: RequestTrace | None = None,
    ) -> None:
        unique = uuid.uuid4().hex
        given = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
        sane = _SANE_ID.fullmatch(given) is not None
        self.request_id = given.decode() if sane else unique
        # A client may send one id twice, while the first request still runs.
        self.unique_id = f"{self.request_id}-{unique[:8]}" if sane else unique
        # A server before us may send a sane id back by itself.
        self._sends_id = sends_id or not sane
        self.record = RequestRecord(self.request_id, scope["method"], scope["path"])
        self._trace = trace
        self.record.trace_id = None if trace is None else trace.trace_id
        self.rate_headers: Headers = []
        self.caller: Caller | None = None
        self._fields: dict[str, Any] = {}
        self._failed = False
        self._content: list[bytes] | None = [] if keeps_content else None
        self._send = send
        self._began_s = time.monotonic()

    def called_by(self, caller: Caller) -> None:
        """Note whose request it is."""
        self.caller = caller
        self.record.key = caller.name

    def begin(self, model: str, fields: dict[str, Any]) -> None:
        """Note what the request is about."""
        if self._content is not None:
            # The parsed body takes several times its bytes, and a request may run for minutes.
            self._fields = fields
        self.record.model = model
        self.record.stream = bool(fields.get("stream"))
        if self._trace is not None:
            self._trace.asked(fields)

    def queueing(self) -> None:
        """Note that the request waits for a place at the replicas now."""
        if self._trace is not None:
            self._trace.queueing()

    def calls(self, replicas: ReplicaCalls, deployment: str) -> ReplicaCalls:
        """The calls to a deployment's replicas, seen by the request's trace if it has one."""
        return replicas if self._trace is None else self._trace.calls(replicas, deployment)

    def send(self, message: Message) -> Awaitable[None]:
        """An ASGI `send`; no coroutine of its own, because each piece of a stream passes it."""
        if message["type"] == "http.response.start":
            message = self._started(message)
        elif self._content is not None:
            self._content.append(message.get("body", b""))
        if self._failed and "body" in message:
            self.record.error_code = error_code(message["body"]) or self.record.error_code
        elif message.get("body", b"").startswith(ERROR_EVENT):
            self.record.error_code = event_error_code(message["body"])
        return self._send(message)

    def _started(self, message: Message) -> Message:
        self.record.status = message["status"]
        self._failed = message["status"] >= HTTPStatus.BAD_REQUEST
        self.record.first_byte_s = self._elapsed_s()
        headers = [item for item in message["headers"] if item[0].lower() != REQUEST_ID]
        if self._sends_id:
            headers.append((REQUEST_ID, self.request_id.encode()))
        return {**message, "headers": [*headers, *self.rate_headers]}

    def sending(self) -> None:
        """Note that the request goes to a replica now."""
        self.record.sent_s = self._elapsed_s()
        if self._trace is not None:
            self._trace.sending()

    def close(self) -> None:
        """Log the request; nothing more may be sent."""
        self.record.total_s = self._elapsed_s()
        content = None
        if self._content is not None:
            content = content_of(self._fields, b"".join(self._content))
        self.record.write(content)
        if self._trace is not None:
            self._trace.end(self.record)

    def _elapsed_s(self) -> float:
        return round(time.monotonic() - self._began_s, 6)
