"""A request on its way from the gateway to a replica."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from apar_core.fork_parameters import KeyTerms
from deployments.wire.answer import Headers, Journal


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """Terms of one request.

    `request_id` is the id in logs and in the header `x-request-id`. `priority` is vLLM's: lower
    goes first. `key` names the API key (never its secret) and `key_max_threads` caps the threads
    that all requests of that key may have alive on one replica; None for no cap. `cache_salt`
    keeps the prefix cache of one key from another's. `keeps_journal` asks for `ThreadDelta`s with
    the pieces of a stream, so that it can be continued elsewhere; `resume` is the journal of the
    stream that this request continues. `trace_headers` are W3C's `traceparent` and `tracestate` of
    a request that is traced.
    """

    request_id: str | None = None
    priority: int = 0
    key: str | None = None
    key_max_threads: int | None = None
    cache_salt: str | None = None
    keeps_journal: bool = False
    resume: Journal | None = None
    trace_headers: Mapping[str, str] | None = None

    def key_terms(self) -> KeyTerms | None:
        """What the engine needs to know of the key; None for a caller without one."""
        if self.key is None:
            return None
        return KeyTerms(self.key, self.key_max_threads, self.priority)


@dataclass(frozen=True, slots=True)
class RequestHint:
    """What the gateway has read off a request for its router.

    `prompt_tokens` is an estimate from the prompt's length. `max_tokens` is the client's limit,
    None where it named none. `prefix_hashes` grow with the prompt: the i-th covers all text up to
    the end of its i-th piece (system prompt, then each turn), so that two prompts share as many
    leading hashes as they share leading pieces. `prefix_tokens` estimates the tokens that each of
    them covers. `may_fork` is false where the request says so. `num_choices` counts the answers
    that the request asks for, each from a root thread of its own.
    """

    prompt_tokens: int = 0
    max_tokens: int | None = None
    prefix_hashes: tuple[int, ...] = ()
    may_fork: bool = True
    prefix_tokens: tuple[int, ...] = ()
    num_choices: int = 1


@dataclass(frozen=True, slots=True)
class RelayedRequest:
    """An HTTP request on its way from the gateway to a replica, which must take it in time."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    terms: RequestTerms = field(default_factory=RequestTerms)
    hint: RequestHint = field(default_factory=RequestHint)
    replica_wait_s: float = 60.0

    def scope(self) -> Scope:
        """The ASGI scope of this request.

        The version below 2.4 makes Starlette listen for `http.disconnect` during a stream.
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


_SALT_CHARS = 32


def write_terms(body: dict[str, Any], terms: RequestTerms) -> bool:
    """Write the cache salt of a caller with a key, in place; returns whether it was written.

    Priority, key and cap are no fields of a body: they reach the engine as `KeyTerms`.
    """
    given_salt = body.get("cache_salt")
    # Values of any other type are vLLM's to refuse, and so stay as they are.
    if terms.cache_salt is None or not (given_salt is None or _is_text(given_salt)):
        return False
    body["cache_salt"] = salt_within(terms.cache_salt, given_salt)
    return True


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def salt_within(key_salt: str, given: str | None) -> str:
    """The salt of a request: the key's, or the one that its client gives, within the key's."""
    if given is None:
        return key_salt
    # JSON can carry lone surrogates.
    salt = f"{key_salt}/{given}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(salt).hexdigest()[:_SALT_CHARS]
