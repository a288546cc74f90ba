"""A request on its way from the gateway to a replica."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from apar_core.fork_parameters import KeyTerms
from apar_core.journal import Journal
from deployments.wire.response import Headers

SCOPE_KEY = "apar"
"""Key of the ASGI scope that holds a replica's `FollowedRequest`."""
MAX_DEADLINE_MS = 86_400_000
MAX_EXPECTED_TOKENS = 2**24
PARENT_ID_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$"
"""Bounds of a request's options; see `deployments/gateway/request_options.py`."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Deadlines of a request's first token and of its answer (Unix times).

    None where the client has set none. Gateways and replicas compare them with their own clocks.
    """

    answer_at_s: float | None = None
    first_token_at_s: float | None = None

    @property
    def first(self) -> tuple[str, float]:
        """The earlier deadline, by the name of its option, and its time."""
        times = {
            "deadline_ms": self.answer_at_s,
            "first_token_deadline_ms": self.first_token_at_s,
        }
        return min(
            ((name, at_s) for name, at_s in times.items() if at_s is not None),
            key=lambda item: item[1],
        )


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """Decisions of the gateway about a request.

    `request_id` is the id in logs and in the header `x-request-id`. `priority` is vLLM's: lower
    goes first. `key` names the API key (never its secret); `key_max_threads` caps the threads that
    all requests of the key may have alive on one replica, None for no cap. `cache_salt` separates
    the prefix cache of this request from others; None leaves the body's own salt. `keeps_journal`
    asks for `ThreadDelta`s with the pieces of a stream, so that another replica can continue it.
    `model` names the model or adapter that answers; None leaves the body's own. `resume` is the
    journal of the stream that this request continues. `trace_headers` are W3C's `traceparent` and
    `tracestate` if the request is traced. `deadlines` are None if it has none.
    """

    request_id: str | None = None
    priority: int = 0
    key: str | None = None
    key_max_threads: int | None = None
    cache_salt: str | None = None
    model: str | None = None
    keeps_journal: bool = False
    resume: Journal | None = None
    trace_headers: Mapping[str, str] | None = None
    deadlines: Deadlines | None = None

    def key_terms(self) -> KeyTerms | None:
        """Return the terms for the engine, None if there are none."""
        deadline_at_s = None if self.deadlines is None else self.deadlines.answer_at_s
        if self.key is None and deadline_at_s is None and not self.priority:
            return None
        return KeyTerms(self.key, self.key_max_threads, self.priority, deadline_at_s)


def write_terms(body: dict[str, Any], terms: RequestTerms) -> bool:
    """Write model and cache salt into a body for vLLM, in place; returns whether it changed.

    Priority, key and thread cap are not fields of the body: they reach the engine as `KeyTerms`.
    """
    given = {"model": terms.model, "cache_salt": terms.cache_salt}
    changes = {name: value for name, value in given.items() if value is not None}
    body.update(changes)
    return bool(changes)


@dataclass(frozen=True, slots=True)
class RequestHint:
    """Facts about a request that the router uses.

    `prompt_tokens` is an estimate from the prompt's length. `max_tokens` is the client's limit,
    None without one. `prefix_hashes[i]` covers all text up to the end of the prompt's i-th piece
    (system prompt, then each turn). Two prompts share as many leading hashes as leading pieces.
    `prefix_tokens[i]` estimates the tokens that hash i covers. `may_fork` is false if the request
    rules forks out. `num_choices` counts the requested answers, each with its own root thread.
    `expected_tokens` is the client's own forecast of each answer, and `family` is equal for
    requests of the same parent. `first_token_s` and `answer_s` are the seconds left until the
    request's deadlines; infinite without any.
    """

    prompt_tokens: int = 0
    max_tokens: int | None = None
    prefix_hashes: tuple[int, ...] = ()
    may_fork: bool = True
    prefix_tokens: tuple[int, ...] = ()
    num_choices: int = 1
    expected_tokens: int | None = None
    family: int | None = None
    first_token_s: float = math.inf
    answer_s: float = math.inf


@dataclass(frozen=True, slots=True)
class RelayedRequest:
    """An HTTP request that the gateway sends to a replica.

    `streams` is set if the client asked for a stream, `continuable` if another replica can continue
    it as far as HTTP is concerned. A replica must accept the request within `replica_wait_s`.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    terms: RequestTerms = field(default_factory=RequestTerms)
    hint: RequestHint = field(default_factory=RequestHint)
    streams: bool = False
    continuable: bool = False
    replica_wait_s: float = 60.0

    def scope(self) -> Scope:
        """Return the ASGI scope of this request.

        A spec version below 2.4 makes Starlette listen for `http.disconnect` during a stream.
        """
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "client": None,
            "server": None,
            "state": {},
        }
