"""Stores, in SQLite or Redis, of each key's usage and of the keys created at run time.

A store is written in batches, off the event loop. Days and months are in UTC. Every method raises
StoreError while the store fails.
"""

import json
import logging
import secrets
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from deployments.config.files import problems_of
from deployments.config.key_store import KeyStoreConfig
from deployments.config.keys import KeyConfig
from deployments.gateway.databases import RedisServer, SqliteFile

if TYPE_CHECKING:
    from redis.asyncio import Redis

logger = logging.getLogger(__name__)

ANSWER_S = 0.5
"""Timeout of a store: it must not delay requests for longer."""
# Reports and admin calls may take longer than a request may wait.
_REPORT_S = 10.0
_BATCH_MEMORY_S = 86_400
_REDIS = "apar/"


@dataclass(slots=True)
class Usage:
    """Usage of a model by a key on a day.

    `requests` counts the requests sent to a replica, and `errors` those of them that ended with an
    error. `refused` requests were not sent. Tokens, threads and forks include all choices.
    """

    requests: int = 0
    errors: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    threads: int = 0
    forks: int = 0

    def add(self, other: "Usage") -> None:
        """Add another usage to this one."""
        for name in COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def tokens(self) -> int:
        """Tokens that count towards budgets."""
        return self.prompt_tokens + self.generated_tokens


COUNTERS = tuple(item.name for item in fields(Usage))


class Row(NamedTuple):
    """Day, key and model of a `Usage`; `day` has the form 2026-11-23."""

    day: str
    key: str
    model: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Usage to add to the store, exactly once even if it is sent again after a timeout."""

    rows: Mapping[Row, Usage]
    batch_id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Used(NamedTuple):
    """Requests and tokens of a key in the current day and month, as far as they are stored."""

    day_requests: int = 0
    day_tokens: int = 0
    month_requests: int = 0
    month_tokens: int = 0


class StoredKey(BaseModel):
    """A key created at run time; `id` distinguishes it from keys of the same name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    created_at: AwareDatetime
    created_by: str
    key: KeyConfig


class KeyStore(Protocol):
    """Usage and run-time keys of all gateways that share the store."""

    async def add(self, batch: Batch) -> None:
        """Add usage."""

    async def used(self, key: str, day: str) -> Used:
        """Return what a key has used on a day and in its month."""

    async def report(self, first: str, last: str) -> list[tuple[Row, Usage]]:
        """Return the usage from one day to another, both included, ordered by day, key, model."""

    async def keys_version(self) -> int:
        """Return a number that changes with every change of the keys."""

    async def keys(self) -> list[StoredKey]:
        """Return the keys, oldest first, without records that cannot be read."""

    async def create(self, key: StoredKey) -> None:
        """Add a key."""

    async def revoke(self, ids: Sequence[str]) -> None:
        """Remove keys."""

    async def close(self) -> None:
        """Release connections."""


def open_store(config: KeyStoreConfig, storage_uri: str) -> KeyStore:
    """Return the store of a configuration; it connects on first use.

    `storage_uri` is `limits.rate_storage` with its password; it is used if there is no path.
    """
    if config.path is not None:
        return SqliteStore(config.path, config.keep_days)
    return RedisStore(storage_uri, config.keep_days)


class SqliteStore(SqliteFile):
    """Tables of usage and keys in the SQLite file."""

    def __init__(self, path: Path, keep_days: int = 400) -> None:
        super().__init__(path, answer_s=ANSWER_S)
        self._keep_days = keep_days

    async def add(self, batch: Batch) -> None:
        """Add usage in one transaction; a batch that was added before is ignored."""
        columns = ", ".join(COUNTERS)
        marks = ", ".join("?" * (3 + len(COUNTERS)))
        sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in COUNTERS)
        values = [
            (row.key, row.day, row.model, *(getattr(usage, name) for name in COUNTERS))
            for row, usage in batch.rows.items()
        ]

        def write(connection: sqlite3.Connection) -> None:
            now_s = int(time.time())
            connection.execute("DELETE FROM batches WHERE at_s < ?", (now_s - _BATCH_MEMORY_S,))
            mark = (batch.batch_id, now_s)
            if not connection.execute("INSERT OR IGNORE INTO batches VALUES (?, ?)", mark).rowcount:
                return
            connection.executemany(
                f"INSERT INTO usage (key, day, model, {columns}) VALUES ({marks}) "
                f"ON CONFLICT (key, day, model) DO UPDATE SET {sums}",
                values,
            )

        await self._run(write, _REPORT_S, writes=True)

    async def used(self, key: str, day: str) -> Used:
        """Return what a key has used on a day and in its month."""
        tokens = "prompt_tokens + generated_tokens"

        def read(connection: sqlite3.Connection) -> Used:
            row = connection.execute(
                f"SELECT TOTAL(requests * (day = ?)), TOTAL(({tokens}) * (day = ?)), "
                f"TOTAL(requests), TOTAL({tokens}) FROM usage "
                "WHERE key = ? AND day BETWEEN ? AND ?",
                (day, day, key, f"{day[:7]}-01", f"{day[:7]}-31"),
            ).fetchone()
            return Used(*map(int, row))

        return await self._run(read)

    async def report(self, first: str, last: str) -> list[tuple[Row, Usage]]:
        """Return the usage of a range of days."""

        def read(connection: sqlite3.Connection) -> list[tuple[Row, Usage]]:
            rows = connection.execute(
                f"SELECT day, key, model, {', '.join(COUNTERS)} FROM usage "
                "WHERE day BETWEEN ? AND ? ORDER BY day, key, model",
                (first, last),
            )
            return [(Row(*row[:3]), Usage(*row[3:])) for row in rows]

        return await self._run(read, _REPORT_S)

    async def keys_version(self) -> int:
        """Return a number that changes with every change of the keys."""
        return await self._run(
            lambda connection: int(
                connection.execute("SELECT value FROM facts WHERE name = 'keys'").fetchone()[0]
            )
        )

    async def keys(self) -> list[StoredKey]:
        """Return the keys, oldest first."""

        def read(connection: sqlite3.Connection) -> list[StoredKey]:
            rows = connection.execute("SELECT id, record FROM keys ORDER BY rowid")
            return _readable(rows)

        return await self._run(read, _REPORT_S)

    async def create(self, key: StoredKey) -> None:
        """Add a key."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT INTO keys (id, record) VALUES (?, ?)", (key.id, _record_of(key))
            )
            connection.execute("UPDATE facts SET value = ? WHERE name = 'keys'", (_new_version(),))

        await self._run(write, _REPORT_S, writes=True)

    async def revoke(self, ids: Sequence[str]) -> None:
        """Remove keys."""

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany("DELETE FROM keys WHERE id = ?", [(each,) for each in ids])
            connection.execute("UPDATE facts SET value = ? WHERE name = 'keys'", (_new_version(),))

        await self._run(write, _REPORT_S, writes=True)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        counters = ", ".join(f"{name} INTEGER NOT NULL" for name in COUNTERS)
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS usage (key TEXT NOT NULL, day TEXT NOT NULL, "
                f"model TEXT NOT NULL, {counters}, PRIMARY KEY (key, day, model)) WITHOUT ROWID"
            )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS keys (id TEXT PRIMARY KEY, record TEXT NOT NULL)"
            )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL)"
            )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, at_s INTEGER NOT NULL)"
            )
            connection.execute("INSERT OR IGNORE INTO facts VALUES ('keys', 0)")
            oldest = (datetime.now(UTC).date() - timedelta(days=self._keep_days)).isoformat()
            connection.execute("DELETE FROM usage WHERE day < ?", (oldest,))


class RedisStore(RedisServer):
    """One hash of counters per day, and one of all keys."""

    # One call, so that a batch is added once and completely. ARGV: two lifetimes, then hash, field
    # and number of each counter.
    _ADD = """
        if not redis.call('SET', KEYS[1], 1, 'NX', 'EX', ARGV[1]) then return 0 end
        for i = 3, #ARGV, 3 do
            redis.call('HINCRBY', ARGV[i], ARGV[i + 1], ARGV[i + 2])
            redis.call('EXPIRE', ARGV[i], ARGV[2])
        end
        return 1
    """

    def __init__(self, uri: str, keep_days: int = 400) -> None:
        super().__init__(uri, answer_s=ANSWER_S)
        self._keep_s = (keep_days + 31) * 86_400

    async def add(self, batch: Batch) -> None:
        """Add usage; a batch that was added before is ignored."""
        arguments: list[str | int] = [_BATCH_MEMORY_S, self._keep_s]
        for row, usage in batch.rows.items():
            for name in COUNTERS:
                if number := getattr(usage, name):
                    arguments += [f"{_REDIS}usage/{row.day}", _field(*row[1:], name), number]
            for period in (row.day, row.day[:7]):
                for name in ("requests", "tokens"):
                    if number := getattr(usage, name):
                        arguments += [f"{_REDIS}used/{period}", _field(row.key, name), number]
        mark = f"{_REDIS}batch/{batch.batch_id}"
        await self._run(lambda redis: redis.eval(self._ADD, 1, mark, *arguments))

    async def used(self, key: str, day: str) -> Used:
        """Return what a key has used on a day and in its month."""
        names = [_field(key, "requests"), _field(key, "tokens")]

        async def read(redis: "Redis") -> Used:
            async with redis.pipeline(transaction=False) as pipeline:
                for period in (day, day[:7]):
                    pipeline.hmget(f"{_REDIS}used/{period}", names)
                found = await pipeline.execute()
            return Used(*(int(number or 0) for numbers in found for number in numbers))

        used: Used = await self._run(read)
        return used

    async def report(self, first: str, last: str) -> list[tuple[Row, Usage]]:
        """Return the usage of a range of days."""
        begin, end = date.fromisoformat(first), date.fromisoformat(last)
        days = [
            (begin + timedelta(days=number)).isoformat() for number in range((end - begin).days + 1)
        ]

        async def read(redis: "Redis") -> list[Mapping[bytes, bytes]]:
            async with redis.pipeline(transaction=False) as pipeline:
                for day in days:
                    pipeline.hgetall(f"{_REDIS}usage/{day}")
                found: list[Mapping[bytes, bytes]] = await pipeline.execute()
            return found

        rows: dict[Row, Usage] = {}
        for day, counters in zip(days, await self._run(read, _REPORT_S), strict=True):
            for place, number in counters.items():
                key, model, name = json.loads(place)
                if name in COUNTERS:
                    setattr(rows.setdefault(Row(day, key, model), Usage()), name, int(number))
        return sorted(rows.items())

    async def keys_version(self) -> int:
        """Return a number that changes with every change of the keys."""
        return int(await self._run(lambda redis: redis.get(f"{_REDIS}keys/version")) or 0)

    async def keys(self) -> list[StoredKey]:
        """Return the keys, oldest first."""
        records = await self._run(lambda redis: redis.hgetall(f"{_REDIS}keys"), _REPORT_S)
        return sorted(_readable(records.items()), key=lambda key: (key.created_at, key.id))

    async def create(self, key: StoredKey) -> None:
        """Add a key."""
        await self._change(lambda pipeline: pipeline.hset(f"{_REDIS}keys", key.id, _record_of(key)))

    async def revoke(self, ids: Sequence[str]) -> None:
        """Remove keys."""
        await self._change(lambda pipeline: pipeline.hdel(f"{_REDIS}keys", *ids))

    async def _change(self, work: Callable[[Any], Any]) -> None:
        async def write(redis: "Redis") -> None:
            async with redis.pipeline(transaction=True) as pipeline:
                work(pipeline)
                pipeline.set(f"{_REDIS}keys/version", _new_version())
                await pipeline.execute()

        await self._run(write, _REPORT_S)


def _new_version() -> int:
    """Return a random number, which no other version of the keys has had.

    A counter would restart in a store that was emptied or restored, and gateways would mistake
    other keys for those that they know.
    """
    return secrets.randbits(63)


def _readable(records: Iterable[tuple[bytes | str, bytes | str]]) -> list[StoredKey]:
    """Return the keys of records (id and content), in order; log and skip unreadable ones."""
    keys = []
    for key_id, record in records:
        try:
            keys.append(StoredKey.model_validate_json(record))
        except ValueError as error:
            # Without the content, which holds a hash.
            problems = problems_of(error) if isinstance(error, ValidationError) else str(error)
            name = key_id.decode(errors="replace") if isinstance(key_id, bytes) else key_id
            facts = {"key_id": name, "reason": problems}
            logger.error("record of the key store not readable; its key is refused", extra=facts)
    return keys


def _record_of(key: StoredKey) -> str:
    return key.model_dump_json(exclude_unset=True)


def _field(*parts: str) -> str:
    return json.dumps(parts, separators=(",", ":"))
