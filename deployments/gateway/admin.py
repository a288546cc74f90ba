"""Routes for admin keys: keys are created, listed and revoked, and usage is reported.

`/admin/keys` manages keys, `/admin/usage` reports usage. A key's secret is returned at most once:
in the response to its creation, if the server generated it.
"""

import json
import uuid
from collections.abc import Mapping
from datetime import date
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, unquote

from pydantic import ValidationError

from apar_core.errors import RequestError
from deployments.config.files import problems_of
from deployments.config.keys import KeyConfig, check_keys, hash_of, new_token
from deployments.gateway.body import parse_fields
from deployments.gateway.callers import STORE_AGE_S, Caller, Callers
from deployments.gateway.key_store import COUNTERS, KeyStore, Row, StoredKey, Usage
from deployments.gateway.ledger import utc_now
from deployments.wire.errors import (
    JSON_TYPE,
    AdminRequiredError,
    ConflictError,
    StoreError,
    UnknownRouteError,
    WrongMethodError,
)
from deployments.wire.response import ResponseStart

ADMIN_PATH = "/admin/"
_KEYS, _USAGE = "/admin/keys", "/admin/usage"
_METHODS = {_KEYS: ("GET", "POST"), _USAGE: ("GET",)}
_MAX_DAYS = 400
# Days of a report without `from`, today included.
_DAYS = 30


class Admin:
    """Answers the requests of admin keys."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    async def answer(
        self, method: str, path: str, query: bytes, body: bytes, caller: Caller
    ) -> ResponseStart:
        """Return the response to a request. Raises RequestError and CapacityError."""
        if caller.key is None or not caller.key.admin:
            raise AdminRequiredError(
                f"The key {caller.name} is no admin's: set `admin: true` in its record."
            )
        name = unquote(path.removeprefix(_KEYS + "/")) if path.startswith(_KEYS + "/") else None
        allowed = ("DELETE",) if name else _METHODS.get(path)
        if allowed is None:
            raise UnknownRouteError(f"Unknown route: {method} {path}")
        if method not in allowed:
            raise WrongMethodError(method, path, allowed)
        if self._callers.store is None:
            raise StoreError("no store is configured")
        store = self._callers.store
        parameters = dict(parse_qsl(query.decode("latin-1")))
        if path == _USAGE:
            return await self._usage(store, parameters)
        # Include what other gateways have changed meanwhile.
        await self._callers.ring.refresh()
        if name:
            return await self._revoke(store, name, parameters.get("id"))
        if method == "GET":
            return _json(HTTPStatus.OK, {"data": self._list()})
        return await self._create(store, body, caller)

    def _list(self) -> list[dict[str, Any]]:
        ring = self._callers.ring
        configured = [_shown(key) | {"source": "configuration"} for key in ring.configured]
        return configured + [_shown_stored(stored) for stored in ring.stored]

    async def _create(self, store: KeyStore, body: bytes, caller: Caller) -> ResponseStart:
        fields = parse_fields(body)
        token = None if "hash" in fields else new_token()
        if token is not None:
            fields = fields | {"hash": hash_of(token)}
        ring = self._callers.ring
        try:
            key = KeyConfig.model_validate(fields)
        except ValidationError as error:
            location = error.errors()[0]["loc"]
            raise RequestError(
                problems_of(error, KeyConfig), param=str(location[0]) if location else None
            ) from None
        try:
            check_keys([*ring.configured, *(stored.key for stored in ring.stored), key])
        except ValueError as error:
            raise ConflictError(str(error), param="name") from None
        stored = StoredKey(
            id=uuid.uuid4().hex[:12], created_at=utc_now(), created_by=caller.name, key=key
        )
        await store.create(stored)
        await ring.refresh()
        shown = _shown_stored(stored)
        return _json(HTTPStatus.CREATED, shown if token is None else shown | {"key": token})

    async def _revoke(self, store: KeyStore, name: str, key_id: str | None) -> ResponseStart:
        ring = self._callers.ring
        revoked = [
            stored
            for stored in ring.stored
            if stored.key.name == name and key_id in (None, stored.id)
        ]
        if not revoked:
            if any(key.name == name for key in ring.configured):
                raise ConflictError(
                    f"The key {name} is in the configuration; remove it there.", param="name"
                )
            which = "" if key_id is None else f" and id {key_id}"
            raise _UnknownError(f"No key has the name {name}{which}.", param="name")
        await store.revoke([stored.id for stored in revoked])
        await ring.refresh()
        body = {
            "revoked": [_shown_stored(stored) for stored in revoked],
            "effective_within_s": 2 * STORE_AGE_S,
        }
        return _json(HTTPStatus.OK, body)

    async def _usage(self, store: KeyStore, parameters: Mapping[str, str]) -> ResponseStart:
        for name in parameters:
            if name not in ("from", "to", "key", "model"):
                raise RequestError(
                    f"Unknown parameter `{name}`; known: from, to, key, model", param=name
                )
        last = _day(parameters, "to") or utc_now().date()
        first = _day(parameters, "from") or _days_before(last, _DAYS - 1)
        if first > last:
            raise RequestError(f"`from` is {first}, after `to`, which is {last}", param="from")
        if (last - first).days >= _MAX_DAYS:
            raise RequestError(
                f"`from` to `to` are {(last - first).days + 1} days; at most {_MAX_DAYS} are "
                "reported at once",
                param="from",
            )
        ledger = self._callers.ledger
        await ledger.flush()
        rows = await store.report(first.isoformat(), last.isoformat())
        body = {
            "from": first.isoformat(),
            "to": last.isoformat(),
            # Other gateways write at this interval.
            "complete_within_s": ledger.flush_s,
            "data": [_usage_row(row, usage) for row, usage in rows if _matches(row, parameters)],
        }
        return _json(HTTPStatus.OK, body)


class _UnknownError(RequestError):
    """The request names something that does not exist."""

    status = 404
    code = "not_found"


def _matches(row: Row, parameters: Mapping[str, str]) -> bool:
    return parameters.get("key", row.key) == row.key and (
        parameters.get("model", row.model) == row.model
    )


def _usage_row(row: Row, usage: Usage) -> dict[str, Any]:
    return row._asdict() | {name: getattr(usage, name) for name in COUNTERS}


def _shown(key: KeyConfig) -> dict[str, Any]:
    return key.model_dump(mode="json", exclude={"hash"}, exclude_defaults=True)


def _shown_stored(stored: StoredKey) -> dict[str, Any]:
    facts = stored.model_dump(mode="json", exclude={"key"})
    return _shown(stored.key) | facts | {"source": "store"}


def _day(parameters: Mapping[str, str], name: str) -> date | None:
    if (given := parameters.get(name)) is None:
        return None
    try:
        return date.fromisoformat(given)
    except ValueError:
        raise RequestError(
            f"`{name}` must be a day such as 2026-11-23, got {given!r}", param=name
        ) from None


def _days_before(day: date, days: int) -> date:
    """Return the date this many days before `day`, but not before `date.min`."""
    return date.fromordinal(max(day.toordinal() - days, date.min.toordinal()))


def _json(status: int, body: dict[str, Any]) -> ResponseStart:
    return ResponseStart(status, [JSON_TYPE], json.dumps(body).encode())
