"""One HTTP request in the gateway: its id, log record and response."""

import re
import time
import uuid
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from starlette.types import Message, Scope, Send

from apar_core.tree.reader_times import ReaderTimes
from deployments.client_headers import REQUEST_ID
from deployments.config.keys import TOKEN_PREFIX
from deployments.gateway.body import RequestBody
from deployments.gateway.callers import Caller
from deployments.gateway.gateway_trace import RequestTrace
from deployments.gateway.request_log import RequestRecord, content_of
from deployments.relay.relay import ReplicaCalls
from deployments.wire.errors import ERROR_EVENTS, error_code, event_error_code
from deployments.wire.response import Headers
from deployments.wire.routes import ResponseForm, form_of, generates

# Anthropic's clients look for this one.
_ANTHROPIC_ID = b"request-id"
_FALLBACK_OF = b"x-apar-fallback-of"
# Fits into a log, a header and an engine's request id without escaping.
_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
# An API key that somebody has put into a path or an id by mistake; both are logged.
_TOKEN = re.compile(TOKEN_PREFIX + r"[\w-]{20,}")


class Exchange:
    """A request and its response, which is sent with the request's id and rate headers."""

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
        kept = sane and _TOKEN.search(given.decode()) is None
        self.request_id = given.decode() if kept else unique
        # A client may reuse an id while an earlier request with it still runs.
        self.unique_id = f"{self.request_id}-{unique[:8]}" if kept else unique
        # A server in front of the gateway may return a sane id itself.
        self._sends_id = sends_id or not sane
        self.form = form_of(scope["path"])
        path = _TOKEN.sub(f"{TOKEN_PREFIX}...", scope["path"])
        self.record = RequestRecord(self.request_id, scope["method"], path)
        self._trace = trace
        self.record.trace_id = None if trace is None else trace.trace_id
        self.rate_headers: Headers = []
        self.caller: Caller | None = None
        self._fields: dict[str, Any] = {}
        self._failed = False
        self._reader = ReaderTimes()
        self._content: list[bytes] | None = [] if keeps_content else None
        self._send = send
        self._began_s = time.monotonic()
        self.arrived_at_s = time.time()

    def called_by(self, caller: Caller) -> None:
        """Note the caller."""
        self.caller = caller
        self.record.key = caller.name

    def begin(self, model: str, body: RequestBody | None, adapter: str | None = None) -> None:
        """Note the model, its adapter, and the request's body, if it has one."""
        self.record.model, self.record.adapter = model, adapter
        if body is None:
            return
        self.record.stream = body.streams and generates(self.record.path)
        if self._content is not None:
            self._fields = body.fields
        if self._trace is not None:
            self._trace.asked(body.fields)

    def fell_back(self, model: str, name: str) -> None:
        """Note that another model answers, under its own name or one of its adapters'."""
        record = self.record
        record.fallback_of = record.adapter or record.model
        record.model, record.adapter = model, None if name == model else name

    def queueing(self) -> None:
        """Note that the request now waits in the model's queue."""
        if self._trace is not None:
            self._trace.queueing()

    def sending(self) -> None:
        """Note that the request now goes to a replica."""
        self.record.sent_s = self._elapsed_s()
        if self._trace is not None:
            self._trace.sending()

    def calls(self, replicas: ReplicaCalls, deployment: str) -> ReplicaCalls:
        """Return the calls to a deployment's replicas, traced if the request is."""
        return replicas if self._trace is None else self._trace.calls(replicas, deployment)

    def certain(self, num_tokens: int) -> None:
        """Note how many text tokens the client of a stream has with the next piece.

        The count begins anew on a replica that continues the stream.
        """
        self._reader.add(num_tokens - self._reader.amount, self._elapsed_s())

    def send(self, message: Message) -> Awaitable[None]:
        """Send an ASGI message; not a coroutine itself, because each piece passes through here."""
        if message["type"] == "http.response.start":
            message = self._started(message)
        else:
            if self._content is not None:
                self._content.append(message.get("body", b""))
        if self._failed and "body" in message:
            self.record.error_code = error_code(message["body"]) or self.record.error_code
        elif message.get("body", b"").startswith(ERROR_EVENTS):
            self.record.error_code = event_error_code(message["body"])
        return self._send(message)

    def _started(self, message: Message) -> Message:
        self.record.status = message["status"]
        self._failed = message["status"] >= HTTPStatus.BAD_REQUEST
        self.record.first_byte_s = self._elapsed_s()
        headers = [item for item in message["headers"] if item[0].lower() != REQUEST_ID]
        if self._sends_id:
            headers.append((REQUEST_ID, self.request_id.encode()))
        if self.record.fallback_of is not None:
            headers.append((_FALLBACK_OF, quote(self.record.fallback_of, safe="/ ").encode()))
        if self.form is ResponseForm.MESSAGES:
            headers.append((_ANTHROPIC_ID, self.request_id.encode()))
        return {**message, "headers": [*headers, *self.rate_headers]}

    def close(self) -> None:
        """Log the request; nothing may be sent afterwards."""
        record = self.record
        record.total_s = self._elapsed_s()
        if record.stream and self._reader.certain_s is not None:
            record.certain_s = round(self._reader.certain_s, 6)
            if self._reader.longest_silence_s is not None:
                record.longest_silence_s = round(self._reader.longest_silence_s, 6)
        content = None
        if self._content is not None:
            content = content_of(self._fields, b"".join(self._content))
        self.record.write(content)
        if self._trace is not None:
            self._trace.end(self.record)

    def _elapsed_s(self) -> float:
        return round(time.monotonic() - self._began_s, 6)
