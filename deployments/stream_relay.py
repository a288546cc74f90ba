"""Passes a stream on from replica to client, over the loss of replicas."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from apar_core.journal import Journal, JournalBook
from deployments.answer_parts import AnswerEnd, AnswerStart, Piece
from deployments.answer_sending import send_end, send_piece, send_start, send_whole
from deployments.asgi_relay import RelayedRequest, Send
from deployments.continuation import ClientStream, can_continue
from deployments.error_responses import DONE_EVENT, ErrorAnswer, error_summary
from deployments.retries import ReplicaLostError, Retries

if TYPE_CHECKING:
    from deployments.answers import ReplicaCalls, Watch

Parts = AsyncGenerator[AnswerStart | Piece | AnswerEnd, None]


class StreamRelay:
    """One streamed request, at one replica after another if it must be."""

    def __init__(self, request: RelayedRequest, send: Send, watch: Watch, retries: Retries) -> None:
        terms = replace(request.terms, keeps_journal=retries.config.continue_streams)
        self._request = replace(request, terms=terms)
        self._send = send
        self._watch = watch
        self._retries = retries
        self._stream = ClientStream()
        self._journal = JournalBook()
        self._continuable = False
        # What ends the stream. A client may leave once it has it, and what the answer has cost
        # comes behind it.
        self._last = b""
        self.begun = False
        """Whether the client has got the start of its answer."""
        self.end: AnswerEnd | None = None
        """What the answer has cost, once that is known."""

    async def run(self, replicas: ReplicaCalls) -> None:
        """Relay the answer to its end.

        Raises what went wrong where no replica can help. Once the stream has begun, `end_with`
        must then end it.
        """
        attempts = self._retries.attempts()
        while True:
            try:
                async with aclosing(replicas.stream(self._request)) as parts:
                    return await self._relay(parts)
            except ReplicaLostError as error:
                if self.begun:
                    if self._stream.complete:
                        await self._finish()
                        return
                    if not (self._continuable and can_continue(self._request)):
                        attempts.give_up(error)
                await attempts.another(error, continued=self.begun)
                self._watch.retried(continued=self.begun)
                if self.begun:
                    self._go_on()

    async def end_with(self, error: ErrorAnswer) -> None:
        """End a stream that has begun with an error event."""
        if not self._stream.complete:
            self._last = error.events
        await self._finish()

    async def _finish(self) -> None:
        await send_piece(self._send, self._last)
        await send_end(self._send)

    def _go_on(self) -> None:
        """Let the next replica begin where the last one was lost."""
        terms = replace(self._request.terms, resume=self._journal.journal())
        self._request = replace(self._request, terms=terms)
        self._stream.begin_again()

    async def _relay(self, parts: Parts) -> None:
        start = await anext(parts)
        if not isinstance(start, AnswerStart):
            raise TypeError("a replica's answer must begin with its start")
        if start.status >= 400:
            await self._refused(start, parts)
            return
        self._continuable = start.continuable
        if not self.begun:
            await send_start(self._send, start.status, start.headers)
            self.begun = True
        await self._pass_on(start.body, start.journal, start.num_tokens)
        async for part in parts:
            if isinstance(part, Piece):
                await self._pass_on(part.body, part.journal, part.num_tokens)
            elif isinstance(part, AnswerEnd):
                self.end = part
        self._last += self._stream.flush()
        await self._finish()

    async def _refused(self, start: AnswerStart, parts: Parts) -> None:
        """Pass on an error answer; raises ReplicaLostError for one to a stream that has begun."""
        rest = [part.body async for part in parts if isinstance(part, Piece)]
        body = b"".join([start.body, *rest])
        if self.begun:
            summary = error_summary(start.status, body)
            raise ReplicaLostError(f"a replica would not go on with a stream: {summary}")
        await send_whole(self._send, AnswerStart(start.status, start.headers, body))

    async def _pass_on(self, body: bytes, journal: Journal, num_tokens: int) -> None:
        # What the client has must never be more than the journal tells.
        if journal:
            self._journal.add(journal)
        if num_tokens:
            self._watch.progress(num_tokens)
        events = self._stream.forward(body)
        if events.endswith(DONE_EVENT):
            self._last, events = events, b""
        await send_piece(self._send, events)
