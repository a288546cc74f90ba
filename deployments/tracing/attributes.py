"""Names of spans and of their attributes.

Names without `apar.` follow OpenTelemetry's semantic conventions (HTTP: stable; gen_ai:
incubating). No attribute contains prompt text, answer text or a secret.
"""

INGRESS = "ingress"
"""From arrival until the request is queued: key, limits, body."""
QUEUE = "queue"
"""Wait for room at the replicas."""
REPLICA = "replica"
"""One attempt at a replica, as the gateway sees it."""
ENGINE = "engine"
"""Request inside a replica: HTTP application and engine."""
ENGINE_QUEUE = "engine queue"
"""Wait for the engine's scheduler."""
PREFILL = "prefill"
"""From scheduling to the first token."""
DECODE = "decode"
"""From the first token to the last one of any thread; parent of the root threads."""
THREAD = "thread"
"""One thread, from its fork (root: first token) to its last token."""

HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
URL_PATH = "url.path"
URL_SCHEME = "url.scheme"
ERROR_TYPE = "error.type"

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_MODEL = "gen_ai.response.model"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
NUMBER_FIELDS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "n": "gen_ai.request.choice.count",
}
"""Numeric fields of a request's body, with their attributes."""

REQUEST_ID = "apar.request_id"
KEY = "apar.key"
ERROR_CODE = "apar.error_code"
RETRIES = "apar.retries"
CONTINUED = "apar.continued"
CANCELLED = "apar.cancelled"
THREADS = "apar.threads"
FORKS = "apar.forks"
CRITICAL_PATH_TOKENS = "apar.critical_path_tokens"
REPLICA_ID = "apar.replica"
ATTEMPT = "apar.attempt"
ATTEMPT_CONTINUES = "apar.attempt.continues"
OUTCOME = "apar.outcome"
THREADS_DROPPED = "apar.threads.dropped"
THREADS_ELSEWHERE = "apar.threads.ended_elsewhere"

THREAD_ID = "apar.thread.id"
THREAD_PARENT = "apar.thread.parent"
THREAD_DEPTH = "apar.thread.depth"
THREAD_CHOICE = "apar.thread.choice"
THREAD_TOKENS = "apar.thread.tokens"
THREAD_TOKENS_BEFORE = "apar.thread.tokens_before"
THREAD_WAIT_S = "apar.thread.wait_s"
THREAD_PREEMPTIONS = "apar.thread.preemptions"
FINISH_REASON = "apar.thread.finish_reason"
OBSERVED_BY = "apar.thread.observed_by"
