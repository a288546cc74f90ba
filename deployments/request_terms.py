"""What the gateway has decided about a request, for the replica that will run it."""

from collections.abc import Mapping
from dataclasses import dataclass

from apar_core.fork_parameters import KeyTerms
from deployments.answer_parts import Journal


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
