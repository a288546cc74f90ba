"""The times of a request, each defined once: for objectives, summaries, plots and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.loadtest.records import RequestRecord


@dataclass(frozen=True, slots=True)
class RequestTime:
    """One time of a request in seconds; None where an answer has no such time."""

    title: str
    of: Callable[[RequestRecord], float | None]


def first_token_s(record: RequestRecord) -> float | None:
    """Return the time from sending to the first piece of text."""
    return record.pieces[0][0] if record.pieces else None


def token_s(record: RequestRecord) -> float | None:
    """Return the time per further token of the text."""
    return _per_further(record, record.text_tokens)


def path_token_s(record: RequestRecord) -> float | None:
    """Return the time per further step of the critical path.

    None without the server's `apar` statistics: nobody else knows how many steps there were.
    """
    return _per_further(record, int((record.apar or {}).get("decode_steps", 0)))


def paragraph_s(record: RequestRecord) -> float | None:
    """Return the time from sending to a complete first paragraph."""
    return record.paragraph_s


def end_to_end_s(record: RequestRecord) -> float | None:
    """Return the time from sending to the last part of the answer, its finish reason."""
    return record.end_s


def _per_further(record: RequestRecord, tokens: int) -> float | None:
    if not record.pieces or tokens < 2:
        return None
    return (record.end_s - record.pieces[0][0]) / (tokens - 1)


FIRST = "ttft"
"""Name of the time to first token, which every answer with text has."""

REQUEST_TIMES = {
    FIRST: RequestTime("time to first token", first_token_s),
    "tpot": RequestTime("time per token", token_s),
    "path": RequestTime("time per token on the critical path", path_token_s),
    "paragraph": RequestTime("time to first complete paragraph", paragraph_s),
    "e2e": RequestTime("end-to-end latency", end_to_end_s),
}
"""By the name under which objectives, summaries and files know it."""

ITL = "itl"
"""Name of the inter-token latency: the gap between two pieces of text, of which a request has
many."""

TITLES = {name: time.title for name, time in REQUEST_TIMES.items()} | {ITL: "inter-token latency"}


def values_of(name: str, records: Sequence[RequestRecord]) -> list[float]:
    """Return a time of all requests that ended well and have it; all gaps for `itl`."""
    whole = [record for record in records if record.error is None]
    if name == ITL:
        return [gap for record in whole for gap in record.gaps_s]
    found = (REQUEST_TIMES[name].of(record) for record in whole)
    return [value for value in found if value is not None]
