"""Usage and budgets of API keys; usage is counted in memory and written to the store in batches.

A budget counts the stored usage, the usage that this gateway has not stored yet, and the prompt
tokens of requests that run here (an estimate until the replica has counted them). Other gateways
see new usage the next time they read the store. If the store fails, usage is kept and written
later, and budgets count what is known: an outage of the store must not become one of the cluster.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import NamedTuple

from deployments.config.keys import KeyConfig
from deployments.gateway.key_store import ANSWER_S, Batch, KeyStore, Row, Usage, Used
from deployments.gateway.request_log import RequestRecord
from deployments.wire.errors import BudgetError, StoreError

logger = logging.getLogger(__name__)

UNKNOWN_MODEL = "unknown"
"""Model recorded for requests that named no model that the key may use."""


def usage_model(record: RequestRecord) -> str:
    """Return the model or adapter for which a request's usage is recorded."""
    return record.adapter or record.model or UNKNOWN_MODEL


class Budget(NamedTuple):
    """A limit of a key per calendar day or month; `field` is its name in the configuration."""

    field: str
    period: str
    unit: str


BUDGETS = tuple(
    Budget(f"{unit}_per_{period}", period, unit)
    for unit in ("requests", "tokens")
    for period in ("day", "month")
)


def has_budget(key: KeyConfig) -> bool:
    """Return whether the key has a budget."""
    return any(getattr(key, budget.field) is not None for budget in BUDGETS)


def utc_now() -> datetime:
    """Return the current time in UTC, in which days and months begin."""
    return datetime.now(UTC)


def renewal(period: str, now: datetime) -> datetime:
    """Return when the next day or month begins."""
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        return midnight + timedelta(days=1)
    # The first of the month plus 31 days is a day of the next month.
    return (midnight.replace(day=1) + timedelta(days=31)).replace(day=1)


@dataclass(slots=True)
class _Known:
    """Usage of a key as last read from the store, and the time of reading."""

    used: Used
    day: str
    read_at: datetime


class Ledger:
    """Usage and budgets of all keys in one gateway; belongs to one event loop."""

    def __init__(
        self,
        store: KeyStore | None,
        flush_s: float = 1.0,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """Without a store, nothing is counted and budgets are not enforced."""
        self._store = store
        self.flush_s = flush_s
        self._now = now
        self._pending: defaultdict[str, dict[Row, Usage]] = defaultdict(dict)
        self.epoch = 0
        # The batch being written, kept until it succeeds: it has one id for all attempts.
        self._batch: Batch | None = None
        self._known: dict[str, _Known] = {}
        # Prompt tokens of running requests, by key.
        self._reserved: Counter[str] = Counter()
        # A read between a write and the update of `_known` would count usage twice.
        self._lock = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None
        self._is_failing = False

    async def check(self, key: KeyConfig) -> None:
        """Raise BudgetError if a budget of the key is used up."""
        if self._store is None or not has_budget(key):
            return
        await self._look_up(key.name, self._store)
        self._check(key)

    def begin(self, key: KeyConfig, model: str, prompt_tokens: int) -> "Tally":
        """Count a request that is about to be sent, with an estimate of its prompt tokens.

        Raises BudgetError if other requests have used up the budget since `check`.
        """
        if self._store is not None and has_budget(key):
            self._check(key)
        return Tally(self, key.name, model, prompt_tokens)

    def row(self, key: str, model: str) -> Row:
        """Return the row in which usage is counted now."""
        return Row(self._now().date().isoformat(), key, model)

    def add(self, row: Row, usage: Usage) -> None:
        """Add usage to a row."""
        if self._store is not None:
            self.pending(row).add(usage)

    def pending(self, row: Row) -> Usage:
        """Return a row's unwritten usage, which may be added to while `epoch` stays the same."""
        rows = self._pending[row.key]
        usage = rows.get(row)
        if usage is None:
            usage = rows[row] = Usage()
        if self._writer is None and self._store is not None:
            self._writer = asyncio.get_running_loop().create_task(self._write_soon())
        return usage

    def refused(self, key: str, record: RequestRecord) -> None:
        """Count a request that was not sent to a replica."""
        self.add(self.row(key, usage_model(record)), Usage(refused=1))

    async def flush(self) -> None:
        """Write the counted usage. Raises StoreError; the usage is then kept and written later."""
        if self._store is None:
            return
        async with self._lock:
            while self._batch is not None or self._pending:
                if self._batch is None:
                    new = [item for rows in self._pending.values() for item in rows.items()]
                    self._batch, self._pending = Batch(dict(new)), defaultdict(dict)
                    self.epoch += 1
                await self._store.add(self._batch)
                self._stored(self._batch)
                self._batch = None

    async def close(self) -> None:
        """Write all usage and close the store; usage that cannot be written is logged as lost."""
        if self._writer is not None:
            self._writer.cancel()
            with suppress(asyncio.CancelledError):
                await self._writer
        try:
            await self.flush()
        except StoreError as error:
            num_rows = sum(map(len, self._pending.values()))
            num_rows += 0 if self._batch is None else len(self._batch.rows)
            logger.error("usage lost", extra={"reason": str(error), "num_rows": num_rows})
        if self._store is not None:
            await self._store.close()

    async def _write_soon(self) -> None:
        """Write every `flush_s` seconds until nothing is left."""
        while self._pending or self._batch is not None:
            await asyncio.sleep(self.flush_s)
            try:
                # Shielded: a write that has begun must not be abandoned halfway.
                await asyncio.shield(self.flush())
            except StoreError as error:
                if not self._is_failing:
                    logger.error("usage not written yet", extra={"reason": str(error)})
                self._is_failing = True
            else:
                self._is_failing = False
        self._writer = None

    def _stored(self, batch: Batch) -> None:
        for row, usage in batch.rows.items():
            if (known := self._known.get(row.key)) is not None:
                known.used = _with(known.used, known.day, row, usage)

    async def _look_up(self, name: str, store: KeyStore) -> None:
        """Read the usage stored by all gateways, unless it was read within `flush_s`."""
        if self._is_current(name):
            return
        now = self._now()
        day = now.date().isoformat()
        try:
            async with asyncio.timeout(ANSWER_S), self._lock:
                if self._is_current(name):
                    return
                self._known[name] = _Known(await store.used(name, day), day, now)
        except (StoreError, TimeoutError) as error:
            if not self._is_failing:
                logger.error("budgets not read", extra={"reason": repr(error)})
            self._is_failing = True
            before = self._known.get(name)
            used = Used() if before is None else _as_of(before, day)
            self._known[name] = _Known(used, day, now)

    def _is_current(self, name: str) -> bool:
        known, now = self._known.get(name), self._now()
        return (
            known is not None
            and known.day == now.date().isoformat()
            and (now - known.read_at).total_seconds() < self.flush_s
        )

    def _check(self, key: KeyConfig) -> None:
        now = self._now()
        used = self._used(key.name, now.date().isoformat())
        for budget in BUDGETS:
            limit = getattr(key, budget.field)
            number = getattr(used, f"{budget.period}_{budget.unit}")
            if limit is not None and number >= limit:
                renews_at = renewal(budget.period, now)
                raise BudgetError(
                    f"Key {key.name} has used {number} of {limit} in its budget `{budget.field}`, "
                    f"which renews at {renews_at:%Y-%m-%dT%H:%M:%SZ}.",
                    kind=budget.field,
                    retry_after_s=(renews_at - now).total_seconds(),
                )

    def _used(self, name: str, day: str) -> Used:
        """Return a key's usage, including what is not stored yet."""
        known = self._known.get(name)
        used = Used() if known is None else _as_of(known, day)
        for row, usage in self._pending.get(name, {}).items():
            used = _with(used, day, row, usage)
        for row, usage in () if self._batch is None else self._batch.rows.items():
            if row.key == name:
                used = _with(used, day, row, usage)
        reserved = Usage(prompt_tokens=self._reserved[name])
        return _with(used, day, Row(day, name, ""), reserved)

    def _reserve(self, name: str, num_tokens: int) -> None:
        self._reserved[name] += num_tokens
        if not self._reserved[name]:
            del self._reserved[name]


class Tally:
    """Usage of one request."""

    def __init__(self, ledger: Ledger, key: str, model: str, prompt_tokens: int) -> None:
        self._ledger = ledger
        self._key = key
        self._model = model
        self._begun_in = ledger.row(key, model)
        self._usage = Usage()
        self._epoch = -1
        self._reserved = prompt_tokens
        ledger._reserve(key, prompt_tokens)
        ledger.add(self._begun_in, Usage(requests=1))

    def answered_by(self, model: str) -> None:
        """Count the request for the model that answers instead; call before tokens are counted."""
        self._ledger.add(self._begun_in, Usage(requests=-1))
        self._model, self._begun_in = model, self._begun_in._replace(model=model)
        self._ledger.add(self._begun_in, Usage(requests=1))

    def prompt(self, num_tokens: int) -> None:
        """Set the number of prompt tokens that is counted while the request runs."""
        self._ledger._reserve(self._key, num_tokens - self._reserved)
        self._reserved = num_tokens

    def generated(self, num_tokens: int) -> None:
        """Count generated tokens."""
        ledger = self._ledger
        if not num_tokens or ledger._store is None:
            return
        # Called for every piece of a stream, so the row is looked up only after a write.
        if self._epoch != ledger.epoch:
            self._usage = ledger.pending(ledger.row(self._key, self._model))
            self._epoch = ledger.epoch
        self._usage.generated_tokens += num_tokens

    def close(self, record: RequestRecord) -> None:
        """Count the remaining usage; call once, after the end of the request."""
        self._ledger._reserve(self._key, -self._reserved)
        if record.sent_s is None:
            self._ledger.add(self._begun_in, Usage(requests=-1))
            return
        has_failed = record.error_code is not None or (record.status or 0) >= HTTPStatus.BAD_REQUEST
        rest = Usage(
            errors=int(has_failed and not record.cancelled),
            prompt_tokens=record.prompt_tokens or 0,
            threads=record.threads or 0,
            forks=record.forks or 0,
        )
        self._ledger.add(self._ledger.row(self._key, self._model), rest)


def _with(used: Used, day: str, row: Row, usage: Usage) -> Used:
    """Return `used` with a row added, if the row is of that day or month."""
    if row.day[:7] != day[:7]:
        return used
    today = row.day == day
    return Used(
        used.day_requests + today * usage.requests,
        used.day_tokens + today * usage.tokens,
        used.month_requests + usage.requests,
        used.month_tokens + usage.tokens,
    )


def _as_of(known: _Known, day: str) -> Used:
    """Return the known usage of a day, which may have begun after the store was read."""
    if known.day == day:
        return known.used
    if known.day[:7] == day[:7]:
        return known.used._replace(day_requests=0, day_tokens=0)
    return Used()
