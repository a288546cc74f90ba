"""One request inside a replica: its terms, and what the engine tells of it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from apar_core.engine.request_follower import RequestFollower
from apar_core.fork_parameters import KeyTerms
from deployments.wire.answer import AnswerEnd, AnswerStart, Piece
from deployments.wire.request import RequestTerms

if TYPE_CHECKING:
    from deployments.tracing.engine_trace import EngineTrace


class FollowingEngine(Protocol):
    """The part of an engine that tells of its requests."""

    def follow(
        self, request_id: str, follower: RequestFollower, terms: KeyTerms | None = None
    ) -> None:
        """Tell a follower of a request, which runs on the terms of its key."""

    def unfollow(self, request_id: str) -> None:
        """Tell it no more."""


class FollowedRequest:
    """Follows a request in the engine, and writes what it learns on the parts of the answer."""

    def __init__(
        self, engine: FollowingEngine, terms: RequestTerms, trace: EngineTrace | None = None
    ) -> None:
        self.terms = terms
        self._engine = engine
        self._trace = trace
        self._follower = RequestFollower(
            keeps_journal=terms.keeps_journal, resume=terms.resume, observer=trace
        )
        self._engine_request_id: str | None = None
        self._came_s = time.monotonic()

    @property
    def follower(self) -> RequestFollower:
        """What is known of the request in the engine."""
        return self._follower

    @property
    def aborted(self) -> bool:
        """Whether the engine core has given the request up, as it does before it exits."""
        return self._follower.aborted

    def begin(self, engine_request_id: str) -> None:
        """Follow the request that the engine is about to get under this id."""
        self._engine_request_id = engine_request_id
        self._engine.follow(engine_request_id, self._follower, self.terms.key_terms())

    def close(self, *, broken: bool = False) -> None:
        """Follow it no more; `broken` says that it did not end here."""
        if self._engine_request_id is not None:
            self._engine.unfollow(self._engine_request_id)
        if self._trace is not None:
            self._trace.end(self.end(), broken=broken)

    def start(self, start: AnswerStart) -> AnswerStart:
        """The start of a streamed answer, with its share of tokens and journal."""
        follower = self._follower
        return AnswerStart(
            start.status,
            start.headers,
            start.body,
            follower.take_journal(),
            follower.take_num_tokens(),
            continuable=follower.continuable,
        )

    def piece(self, body: bytes) -> Piece:
        """A piece of the answer, with its share of tokens and journal."""
        return Piece(body, self._follower.take_journal(), self._follower.take_num_tokens())

    def take_num_tokens(self) -> int:
        """Tokens generated since the last part or call."""
        return self._follower.take_num_tokens()

    def end(self) -> AnswerEnd:
        """What the answer has cost; an ordinary checkpoint's answer has one thread a choice.

        A beam search counts as one thread, of unknown length, with the tokens of all its beams.
        """
        follower, trees = self._follower, self._follower.statistics
        if trees is None:
            num_roots = follower.num_roots
            alone = num_roots == 1 and not follower.searches_beams
            longest = follower.generated_tokens if alone else 0
            return AnswerEnd(
                follower.prompt_tokens, follower.generated_tokens, num_roots, 0, longest
            )
        return AnswerEnd(
            follower.prompt_tokens,
            follower.generated_tokens,
            trees.threads,
            trees.forks,
            trees.decode_steps,
        )

    def signed_end(self, replica: str) -> AnswerEnd:
        """The cost, with the replica's id and the time that the request has been there."""
        follower = self._follower
        return replace(
            self.end(),
            replica=replica,
            replica_s=round(time.monotonic() - self._came_s, 6),
            engine_s=round(max(follower.last_output_s - follower.began_s, 0.0), 6),
        )
