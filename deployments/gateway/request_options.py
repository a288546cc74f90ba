"""Scheduling options of a request: deadlines, priority, hints for the router.

Each option is a field of `apar` in the body, or a header; the field takes precedence. The expected
length may also come as Dynamo's `nvext.agent_hints.osl`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from apar_core.errors import RequestError
from deployments.config.keys import MAX_PRIORITY, KeyConfig
from deployments.wire.request import (
    MAX_DEADLINE_MS,
    MAX_EXPECTED_TOKENS,
    PARENT_ID_PATTERN,
    Deadlines,
)
from deployments.wire.response import Headers

_ID = re.compile(PARENT_ID_PATTERN)
_HEADER_PREFIX = b"x-apar-"


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of one request.

    Deadlines count from the request's arrival (milliseconds). `expected_tokens` is the length of
    the answer that the client expects. `parent_request_id` names what the request is a part of:
    requests with the same parent resemble each other.
    """

    deadline_ms: int | None = None
    first_token_deadline_ms: int | None = None
    expected_tokens: int | None = None
    parent_request_id: str | None = None

    def deadlines(self, arrived_at_s: float) -> Deadlines | None:
        """Return the deadlines of a request that arrived at a Unix time; None without any."""
        if self.deadline_ms is None and self.first_token_deadline_ms is None:
            return None
        answer, first = (
            None if value is None else arrived_at_s + value / 1000
            for value in (self.deadline_ms, self.first_token_deadline_ms)
        )
        return Deadlines(answer, first)


def read_options(fields: Mapping[str, Any], headers: Headers) -> RequestOptions:
    """Return a request's options. Raises RequestError, which names the field or the header."""
    given = dict(_from_headers(headers))
    nvext = fields.get("nvext")
    hints: Any = nvext.get("agent_hints") if isinstance(nvext, dict) else None
    if isinstance(hints, dict) and hints.get("osl") is not None:
        given["expected_tokens"] = ("nvext.agent_hints.osl", hints["osl"])
    # If it is not an object, the replica refuses it.
    apar: Any = fields.get("apar")
    for name in _CHECKS if isinstance(apar, dict) else ():
        if apar.get(name) is not None:
            given[name] = (f"apar.{name}", apar[name])
    if not given:
        return NO_OPTIONS
    for name, (place, value) in given.items():
        _CHECKS[name](place, value)
    return RequestOptions(**{name: value for name, (_, value) in given.items()})


def priority_of(key: KeyConfig, fields: Mapping[str, Any]) -> int:
    """Return the priority of a request: the key's, or what the request asks for.

    Raises RequestError for a priority that the key does not allow.
    """
    given = fields.get("priority")
    if given is None:
        return key.priority
    _check_number("priority", given, -MAX_PRIORITY, MAX_PRIORITY)
    if given < key.most_urgent:
        raise RequestError(
            f"`priority` is {given}; this key allows {key.most_urgent} to {MAX_PRIORITY}, lower "
            "numbers go first",
            param="priority",
        )
    return int(given)


def _from_headers(headers: Headers) -> Mapping[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {}
    for raw_name, raw_value in headers:
        if not raw_name.startswith(_HEADER_PREFIX):
            continue
        name = raw_name.removeprefix(_HEADER_PREFIX).decode("latin-1").replace("-", "_")
        if name in _CHECKS:
            value = raw_value.decode("latin-1").strip()
            is_number = name != "parent_request_id" and value.isascii() and value.isdigit()
            # A longer number is out of every range, and slow to parse.
            parsed = int(value) if is_number and len(value) <= 18 else value
            found[name] = (raw_name.decode("latin-1"), parsed)
    return found


def _check_number(place: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        shown = value if isinstance(value, int | float | str) else type(value).__name__
        raise RequestError(
            f"`{place}` must be an integer from {least} to {most}, got {str(shown)[:40]!r}",
            param=place,
        )


def _check_id(place: str, value: object) -> None:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise RequestError(
            f"`{place}` must be 1 to 128 letters, digits, `.`, `_`, `:` and `-`", param=place
        )


_CHECKS = {
    "deadline_ms": lambda place, value: _check_number(place, value, 1, MAX_DEADLINE_MS),
    "first_token_deadline_ms": lambda place, value: _check_number(place, value, 1, MAX_DEADLINE_MS),
    "expected_tokens": lambda place, value: _check_number(place, value, 1, MAX_EXPECTED_TOKENS),
    "parent_request_id": _check_id,
}
NO_OPTIONS = RequestOptions()
