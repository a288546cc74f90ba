"""Store of files and batches, in the database of the key store: the same in SQLite and Redis.

A gateway runs a batch while it holds the batch's lease. Results are written only under the lease,
and only for lines that have none: even if two gateways run a batch for a moment, each line appears
once in the results.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from deployments.config.key_store import KeyStoreConfig
from deployments.gateway.batches.records import Batch, Counts, Page, Result, StoredFile
from deployments.gateway.databases import RedisServer, SqliteFile

if TYPE_CHECKING:
    from redis.asyncio import Redis

CHUNK_BYTES = 2**19
"""Size of the pieces in which files are stored."""
_ANSWER_S = 10.0
_UPLOAD_S = 3_600
_DELETED_CHUNKS = 32
_DELETED_RESULTS = 128
_REDIS = "apar/batches/"
_ALL = "*"  # No key has this name.


class LeaseLostError(Exception):
    """Another gateway may run the batch."""


class Limits(NamedTuple):
    """Limits on what is stored: files and bytes of one key, bytes of all keys."""

    max_files: int
    max_key_bytes: int
    max_total_bytes: int


class Stored(NamedTuple):
    """What is stored for one key and, in bytes, for all keys."""

    num_files: int
    key_bytes: int
    total_bytes: int


class BatchStore(Protocol):
    """Files and batches of all gateways that share the database.

    Every method raises StoreError while the database fails.
    """

    async def begin_file(self, file: StoredFile, limits: Limits) -> Stored | None:
        """Reserve room for a file, which stays hidden; return what is stored if there is none."""

    async def append(self, file_id: str, number: int, data: bytes) -> None:
        """Write a chunk of a file; numbers count from 0."""

    async def finish_file(self, file: StoredFile) -> None:
        """Show a file whose chunks, or whose results, are complete."""

    async def file(self, file_id: str) -> StoredFile | None:
        """Return a complete file."""

    async def files(self, owner: str, page: Page, purpose: str | None = None) -> list[StoredFile]:
        """Return a key's complete files."""

    async def chunk(self, file_id: str, number: int) -> bytes | None:
        """Return a chunk of an uploaded file, None behind its end."""

    async def delete_file(self, file: StoredFile) -> None:
        """Delete a file and its content."""

    async def stored(self, owner: str) -> Stored:
        """Return what is stored for a key."""

    async def create(self, batch: Batch, max_open: int, max_ended: int) -> bool:
        """Add a batch; return false if so many batches of the key are open.

        Deletes some of the key's oldest batches that have ended and keep no results, if the key has
        more than `max_ended` batches.
        """

    async def batch(self, batch_id: str) -> tuple[Batch, Counts] | None:
        """Return a batch and the counts of its lines."""

    async def batches(self, owner: str, page: Page) -> list[tuple[Batch, Counts]]:
        """Return a key's batches."""

    async def open_batches(self) -> list[Batch]:
        """Return the batches of all keys that have not ended, oldest first."""

    async def claim(self, batch_id: str, holder: str, lease_s: float) -> bool:
        """Take or renew the lease of a batch; return whether `holder` has it."""

    async def release(self, batch_id: str, holder: str) -> None:
        """Give the lease back."""

    async def change(
        self, batch_id: str, change: Callable[[Batch], Batch], holder: str | None = None
    ) -> Batch | None:
        """Change a batch and return it; None if it does not exist.

        `change` may be called several times. Raises LeaseLostError if `holder` is given and does
        not hold the lease, and whatever `change` raises.
        """

    async def add_results(self, batch: Batch, holder: str, results: Sequence[Result]) -> None:
        """Write the results of lines that have none. Raises LeaseLostError."""

    async def answered(self, batch_id: str, first: int, last: int) -> set[int]:
        """Return the lines of a range, both ends included, that have results."""

    async def results(
        self, batch_id: str, first: int, last: int, *, has_errors: bool
    ) -> list[bytes]:
        """Return the records of a range of lines, both ends included, in order."""

    async def sweep(self, now_s: int, keep_s: int) -> None:
        """Delete expired files, uploads that were given up, and batches that ended long ago."""

    async def close(self) -> None:
        """Release connections."""


def open_store(config: KeyStoreConfig, storage_uri: str) -> BatchStore:
    """Return the store of a configuration; it connects on first use."""
    if config.path is not None:
        return SqliteBatches(config.path)
    return RedisBatches(storage_uri)


class SqliteBatches(SqliteFile):
    """Tables of files and batches in the SQLite file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, answer_s=_ANSWER_S)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            for statement in _TABLES:
                connection.execute(statement)

    async def begin_file(self, file: StoredFile, limits: Limits) -> Stored | None:
        """Reserve room for a file."""

        def write(connection: sqlite3.Connection) -> Stored | None:
            stored = _stored_sqlite(connection, file.owner)
            if not _has_room(stored, file.num_bytes, limits):
                return stored
            _put_file(connection, file, is_complete=False)
            return None

        return await self._run(write, writes=True)

    async def append(self, file_id: str, number: int, data: bytes) -> None:
        """Write a chunk of a file."""
        await self._run(
            lambda connection: connection.execute(
                "INSERT OR REPLACE INTO file_chunks VALUES (?, ?, ?)", (file_id, number, data)
            ),
            writes=True,
        )

    async def finish_file(self, file: StoredFile) -> None:
        """Show a file."""
        await self._run(
            lambda connection: _put_file(connection, file, is_complete=True), writes=True
        )

    async def file(self, file_id: str) -> StoredFile | None:
        """Return a complete file."""

        def read(connection: sqlite3.Connection) -> StoredFile | None:
            row = connection.execute(
                "SELECT record FROM files WHERE id = ? AND is_complete", (file_id,)
            ).fetchone()
            return None if row is None else StoredFile.model_validate_json(row[0])

        return await self._run(read)

    async def files(self, owner: str, page: Page, purpose: str | None = None) -> list[StoredFile]:
        """Return a key's complete files."""

        def read(connection: sqlite3.Connection) -> list[StoredFile]:
            where, order, values = _page_clauses(page)
            rows = connection.execute(
                "SELECT record FROM files WHERE owner = ? AND is_complete "
                f"AND (? IS NULL OR purpose = ?) {where} ORDER BY id {order} LIMIT ?",
                (owner, purpose, purpose, *values, page.limit),
            )
            return [StoredFile.model_validate_json(row[0]) for row in rows]

        return await self._run(read)

    async def chunk(self, file_id: str, number: int) -> bytes | None:
        """Return a chunk of an uploaded file."""

        def read(connection: sqlite3.Connection) -> bytes | None:
            row = connection.execute(
                "SELECT data FROM file_chunks WHERE file = ? AND number = ?", (file_id, number)
            ).fetchone()
            return None if row is None else bytes(row[0])

        return await self._run(read)

    async def delete_file(self, file: StoredFile) -> None:
        """Hide a file, then delete its content in several transactions, then its record."""

        def hide(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE files SET is_complete = 0 WHERE id = ?", (file.id,))

        await self._run(hide, writes=True)
        await self._delete_rows("file_chunks", "file = ?", (file.id,), _DELETED_CHUNKS)
        if file.batch_id is not None:
            await self._delete_results(file.batch_id, has_errors=file.has_errors)
        await self._run(
            lambda connection: connection.execute("DELETE FROM files WHERE id = ?", (file.id,)),
            writes=True,
        )

    async def _delete_results(self, batch_id: str, *, has_errors: bool) -> None:
        where = "batch = ? AND is_error = ?"
        await self._delete_rows("batch_results", where, (batch_id, has_errors), _DELETED_RESULTS)
        size = _counters(has_errors)[1]
        await self._run(
            lambda connection: connection.execute(
                f"UPDATE batch_jobs SET {size} = 0 WHERE id = ?", (batch_id,)
            ),
            writes=True,
        )

    async def _delete_rows(self, table: str, where: str, values: Sequence[Any], limit: int) -> None:
        """Delete rows in several transactions, between which others can write."""

        def delete_some(connection: sqlite3.Connection) -> int:
            return connection.execute(
                f"DELETE FROM {table} WHERE rowid IN "
                f"(SELECT rowid FROM {table} WHERE {where} LIMIT ?)",
                (*values, limit),
            ).rowcount

        while await self._run(delete_some, writes=True):
            pass

    async def stored(self, owner: str) -> Stored:
        """Return what is stored for a key."""
        return await self._run(lambda connection: _stored_sqlite(connection, owner))

    async def create(self, batch: Batch, max_open: int, max_ended: int) -> bool:
        """Add a batch."""

        def write(connection: sqlite3.Connection) -> bool:
            (num_open,) = connection.execute(
                "SELECT COUNT(*) FROM batch_jobs WHERE owner = ? AND is_open", (batch.owner,)
            ).fetchone()
            if num_open >= max_open:
                return False
            connection.execute(
                "INSERT INTO batch_jobs (id, owner, record, is_open) VALUES (?, ?, ?, 1)",
                (batch.id, batch.owner, batch.model_dump_json()),
            )
            connection.execute(
                "DELETE FROM batch_jobs WHERE owner = ?1 AND NOT is_open "
                "AND output_bytes + error_bytes = 0 AND id IN (SELECT id FROM batch_jobs "
                "WHERE owner = ?1 ORDER BY id DESC LIMIT -1 OFFSET ?2)",
                (batch.owner, max_ended),
            )
            return True

        return await self._run(write, writes=True)

    async def batch(self, batch_id: str) -> tuple[Batch, Counts] | None:
        """Return a batch and the counts of its lines."""

        def read(connection: sqlite3.Connection) -> tuple[Batch, Counts] | None:
            row = connection.execute(f"{_SELECT_BATCH} WHERE id = ?", (batch_id,)).fetchone()
            return None if row is None else _batch_of(row)

        return await self._run(read)

    async def batches(self, owner: str, page: Page) -> list[tuple[Batch, Counts]]:
        """Return a key's batches."""

        def read(connection: sqlite3.Connection) -> list[tuple[Batch, Counts]]:
            where, order, values = _page_clauses(page)
            rows = connection.execute(
                f"{_SELECT_BATCH} WHERE owner = ? {where} ORDER BY id {order} LIMIT ?",
                (owner, *values, page.limit),
            )
            return [_batch_of(row) for row in rows]

        return await self._run(read)

    async def open_batches(self) -> list[Batch]:
        """Return the batches that have not ended."""
        # Most servers never see a batch: they need no file.
        if not self._path.exists():
            return []
        return await self._run(
            lambda connection: [
                _batch_of(row)[0]
                for row in connection.execute(f"{_SELECT_BATCH} WHERE is_open ORDER BY id")
            ]
        )

    async def claim(self, batch_id: str, holder: str, lease_s: float) -> bool:
        """Take or renew the lease; the gateways of one machine have one clock."""

        def write(connection: sqlite3.Connection) -> bool:
            now_s = time.time()
            taken = connection.execute(
                "UPDATE batch_jobs SET holder = ?, leased_until_s = ? "
                "WHERE id = ? AND is_open AND (holder = ? OR leased_until_s < ?)",
                (holder, now_s + lease_s, batch_id, holder, now_s),
            )
            return taken.rowcount > 0

        return await self._run(write, writes=True)

    async def release(self, batch_id: str, holder: str) -> None:
        """Give the lease back."""
        await self._run(
            lambda connection: connection.execute(
                "UPDATE batch_jobs SET holder = '', leased_until_s = 0 WHERE id = ? AND holder = ?",
                (batch_id, holder),
            ),
            writes=True,
        )

    async def change(
        self, batch_id: str, change: Callable[[Batch], Batch], holder: str | None = None
    ) -> Batch | None:
        """Change a batch in one transaction."""

        def write(connection: sqlite3.Connection) -> Batch | None:
            _check_lease(connection, batch_id, holder)
            row = connection.execute(f"{_SELECT_BATCH} WHERE id = ?", (batch_id,)).fetchone()
            if row is None:
                return None
            batch = change(_batch_of(row)[0])
            connection.execute(
                "UPDATE batch_jobs SET record = ?, is_open = ?, ended_at = ? WHERE id = ?",
                (batch.model_dump_json(), batch.is_open, batch.ended_at, batch_id),
            )
            return batch

        return await self._run(write, writes=True)

    async def add_results(self, batch: Batch, holder: str, results: Sequence[Result]) -> None:
        """Write results in one transaction."""

        def write(connection: sqlite3.Connection) -> None:
            _check_lease(connection, batch.id, holder)
            for result in results:
                added = connection.execute(
                    "INSERT OR IGNORE INTO batch_results VALUES (?, ?, ?, ?)",
                    (batch.id, result.line, result.is_error, result.record),
                )
                count, size = _counters(result.is_error)
                connection.execute(
                    f"UPDATE batch_jobs SET {count} = {count} + ?, {size} = {size} + ? "
                    "WHERE id = ?",
                    (added.rowcount, added.rowcount * len(result.record), batch.id),
                )

        await self._run(write, writes=True)

    async def answered(self, batch_id: str, first: int, last: int) -> set[int]:
        """Return the lines of a range that have results."""
        return await self._run(
            lambda connection: {
                row[0]
                for row in connection.execute(
                    "SELECT line FROM batch_results WHERE batch = ? AND line BETWEEN ? AND ?",
                    (batch_id, first, last),
                )
            }
        )

    async def results(
        self, batch_id: str, first: int, last: int, *, has_errors: bool
    ) -> list[bytes]:
        """Return the records of a range of lines."""
        return await self._run(
            lambda connection: [
                bytes(row[0])
                for row in connection.execute(
                    "SELECT record FROM batch_results "
                    "WHERE batch = ? AND line BETWEEN ? AND ? AND is_error = ? ORDER BY line",
                    (batch_id, first, last, has_errors),
                )
            ]
        )

    async def sweep(self, now_s: int, keep_s: int) -> None:
        """Delete what has expired."""
        if not self._path.exists():
            return

        def read(connection: sqlite3.Connection) -> list[StoredFile]:
            used = {
                _batch_of(row)[0].input_file_id
                for row in connection.execute(f"{_SELECT_BATCH} WHERE is_open")
            }
            rows = connection.execute(
                "SELECT record FROM files WHERE expires_at <= ? "
                "OR (NOT is_complete AND created_at <= ?)",
                (now_s, now_s - _UPLOAD_S),
            )
            found = [StoredFile.model_validate_json(row[0]) for row in rows]
            return [file for file in found if file.id not in used]

        for file in await self._run(read):
            await self.delete_file(file)
        ended = "NOT is_open AND ended_at <= ?"
        results = f"batch IN (SELECT id FROM batch_jobs WHERE {ended})"
        long_ago = (now_s - keep_s,)
        await self._delete_rows("batch_results", results, long_ago, _DELETED_RESULTS)
        await self._delete_rows("batch_jobs", ended, long_ago, _DELETED_RESULTS)


_TABLES = (
    "CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, owner TEXT NOT NULL, "
    "purpose TEXT NOT NULL, record TEXT NOT NULL, num_bytes INTEGER NOT NULL, "
    "is_complete INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS files_of_owners ON files (owner, id)",
    "CREATE TABLE IF NOT EXISTS file_chunks (file TEXT NOT NULL, number INTEGER NOT NULL, "
    "data BLOB NOT NULL, PRIMARY KEY (file, number))",
    "CREATE TABLE IF NOT EXISTS batch_jobs (id TEXT PRIMARY KEY, owner TEXT NOT NULL, "
    "record TEXT NOT NULL, is_open INTEGER NOT NULL, ended_at INTEGER, "
    "holder TEXT NOT NULL DEFAULT '', leased_until_s REAL NOT NULL DEFAULT 0, "
    "completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0, "
    "output_bytes INTEGER NOT NULL DEFAULT 0, error_bytes INTEGER NOT NULL DEFAULT 0)",
    "CREATE INDEX IF NOT EXISTS batches_of_owners ON batch_jobs (owner, id)",
    "CREATE INDEX IF NOT EXISTS open_batches ON batch_jobs (is_open, id)",
    "CREATE TABLE IF NOT EXISTS batch_results (batch TEXT NOT NULL, line INTEGER NOT NULL, "
    "is_error INTEGER NOT NULL, record BLOB NOT NULL, PRIMARY KEY (batch, line))",
)
_SELECT_BATCH = "SELECT record, completed, failed, output_bytes, error_bytes FROM batch_jobs"


def _batch_of(row: Sequence[Any]) -> tuple[Batch, Counts]:
    return Batch.model_validate_json(row[0]), Counts(*row[1:])


def _counters(is_error: bool) -> tuple[str, str]:
    """Return the names of the counts to which a result belongs."""
    return ("failed", "error_bytes") if is_error else ("completed", "output_bytes")


def _put_file(connection: sqlite3.Connection, file: StoredFile, *, is_complete: bool) -> None:
    # Results count with their batch.
    num_bytes = 0 if file.batch_id is not None else file.num_bytes
    connection.execute(
        "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            file.id,
            file.owner,
            file.purpose,
            file.model_dump_json(),
            num_bytes,
            is_complete,
            file.created_at,
            file.expires_at,
        ),
    )


def _stored_sqlite(connection: sqlite3.Connection, owner: str) -> Stored:
    num_files, key_files, all_files = connection.execute(
        "SELECT TOTAL(owner = ?), TOTAL(num_bytes * (owner = ?)), TOTAL(num_bytes) FROM files",
        (owner, owner),
    ).fetchone()
    key_results, all_results = connection.execute(
        "SELECT TOTAL((output_bytes + error_bytes) * (owner = ?)), "
        "TOTAL(output_bytes + error_bytes) FROM batch_jobs",
        (owner,),
    ).fetchone()
    return Stored(int(num_files), int(key_files + key_results), int(all_files + all_results))


def _check_lease(connection: sqlite3.Connection, batch_id: str, holder: str | None) -> None:
    if holder is None:
        return
    row = connection.execute(
        "SELECT 1 FROM batch_jobs WHERE id = ? AND holder = ?", (batch_id, holder)
    ).fetchone()
    if row is None:
        raise LeaseLostError(f"{batch_id} is not held by {holder}")


def _has_room(stored: Stored, num_bytes: int, limits: Limits) -> bool:
    return (
        stored.num_files < limits.max_files
        and stored.key_bytes + num_bytes <= limits.max_key_bytes
        and stored.total_bytes + num_bytes <= limits.max_total_bytes
    )


def _page_clauses(page: Page) -> tuple[str, str, tuple[str, ...]]:
    order, compared = ("DESC", "<") if page.newest_first else ("ASC", ">")
    if page.after is None:
        return "", order, ()
    return f"AND id {compared} ?", order, (page.after,)


class RedisBatches(RedisServer):
    """Files and batches in Redis.

    Under `apar/batches/`: `file/ID` and `batch/ID` are records; `chunk/ID/N` the content of a file;
    `lease/ID`, `counts/ID`, `output/ID` and `error/ID` (hashes by line) belong to a batch; `files`,
    `hidden`, `open` and `ended` are sorted sets of ids by time; `files/OWNER`, `batches/OWNER` and
    `open/OWNER` are the ids of a key; `bytes` holds the stored bytes by owner.
    """

    # Each script is one step for all other clients. Limits and results are as in SqliteBatches.
    # `0 - num` because Lua writes a negated 0 as "-0", which Redis does not take.
    _BEGIN = """
        local files = redis.call('ZCARD', ARGV[1] .. 'files/' .. ARGV[2])
        local key = tonumber(redis.call('HGET', ARGV[1] .. 'bytes', ARGV[2]) or 0)
        local all = tonumber(redis.call('HGET', ARGV[1] .. 'bytes', '*') or 0)
        local num = tonumber(ARGV[5])
        if files >= tonumber(ARGV[6]) or key + num > tonumber(ARGV[7])
            or all + num > tonumber(ARGV[8]) then
            return {files, key, all}
        end
        redis.call('SET', ARGV[1] .. 'file/' .. ARGV[3], ARGV[4])
        redis.call('ZADD', ARGV[1] .. 'hidden', ARGV[9], ARGV[3])
        redis.call('ZADD', ARGV[1] .. 'files/' .. ARGV[2], 0, ARGV[3])
        redis.call('HINCRBY', ARGV[1] .. 'bytes', ARGV[2], num)
        redis.call('HINCRBY', ARGV[1] .. 'bytes', '*', num)
        return {}
    """
    _DELETE = """
        if redis.call('DEL', ARGV[1] .. 'file/' .. ARGV[3]) == 0 then return 0 end
        redis.call('ZREM', ARGV[1] .. 'hidden', ARGV[3])
        redis.call('ZREM', ARGV[1] .. 'files', ARGV[3])
        redis.call('ZREM', ARGV[1] .. 'files/' .. ARGV[2], ARGV[3])
        local num = tonumber(ARGV[4])
        if ARGV[5] ~= '' then
            num = tonumber(redis.call('HGET', ARGV[1] .. 'counts/' .. ARGV[5], ARGV[6]) or 0)
            redis.call('HDEL', ARGV[1] .. 'counts/' .. ARGV[5], ARGV[6])
            redis.call('UNLINK', ARGV[1] .. ARGV[7] .. '/' .. ARGV[5])
        end
        redis.call('HINCRBY', ARGV[1] .. 'bytes', ARGV[2], 0 - num)
        redis.call('HINCRBY', ARGV[1] .. 'bytes', '*', 0 - num)
        return 1
    """
    _CREATE = """
        if redis.call('SCARD', ARGV[1] .. 'open/' .. ARGV[2]) >= tonumber(ARGV[5]) then
            return 0
        end
        redis.call('SET', ARGV[1] .. 'batch/' .. ARGV[3], ARGV[4])
        redis.call('ZADD', ARGV[1] .. 'batches/' .. ARGV[2], 0, ARGV[3])
        redis.call('SADD', ARGV[1] .. 'open/' .. ARGV[2], ARGV[3])
        redis.call('ZADD', ARGV[1] .. 'open', 0, ARGV[3])
        local batches = ARGV[1] .. 'batches/' .. ARGV[2]
        local ids = {}
        local num = math.min(redis.call('ZCARD', batches) - ARGV[6], 1000)
        if num > 0 then ids = redis.call('ZRANGE', batches, 0, num - 1) end
        for i = 1, #ids do
            local counts = ARGV[1] .. 'counts/' .. ids[i]
            if not redis.call('ZSCORE', ARGV[1] .. 'open', ids[i])
                and tonumber(redis.call('HGET', counts, 'output_bytes') or 0) == 0
                and tonumber(redis.call('HGET', counts, 'error_bytes') or 0) == 0 then
                redis.call('DEL', counts, ARGV[1] .. 'batch/' .. ids[i])
                redis.call('ZREM', ARGV[1] .. 'ended', ids[i])
                redis.call('ZREM', batches, ids[i])
            end
        end
        return 1
    """
    _CLAIM = """
        if not redis.call('ZSCORE', ARGV[1] .. 'open', ARGV[2]) then return 0 end
        local holder = redis.call('GET', ARGV[1] .. 'lease/' .. ARGV[2])
        if holder and holder ~= ARGV[3] then return 0 end
        redis.call('SET', ARGV[1] .. 'lease/' .. ARGV[2], ARGV[3], 'PX', ARGV[4])
        return 1
    """
    _RELEASE = """
        if redis.call('GET', ARGV[1] .. 'lease/' .. ARGV[2]) == ARGV[3] then
            redis.call('DEL', ARGV[1] .. 'lease/' .. ARGV[2])
        end
    """
    # -1: the lease is lost; 0: the record is not what it was.
    _CHANGE = """
        if ARGV[3] ~= ''
            and redis.call('GET', ARGV[1] .. 'lease/' .. ARGV[2]) ~= ARGV[3] then return -1 end
        if redis.call('GET', ARGV[1] .. 'batch/' .. ARGV[2]) ~= ARGV[4] then return 0 end
        redis.call('SET', ARGV[1] .. 'batch/' .. ARGV[2], ARGV[5])
        if ARGV[6] ~= '' then
            redis.call('ZREM', ARGV[1] .. 'open', ARGV[2])
            redis.call('SREM', ARGV[1] .. 'open/' .. ARGV[7], ARGV[2])
            redis.call('ZADD', ARGV[1] .. 'ended', ARGV[6], ARGV[2])
            redis.call('DEL', ARGV[1] .. 'lease/' .. ARGV[2])
        end
        return 1
    """
    _ADD = """
        if redis.call('GET', ARGV[1] .. 'lease/' .. ARGV[2]) ~= ARGV[3] then return -1 end
        local counts = ARGV[1] .. 'counts/' .. ARGV[2]
        local bytes = 0
        for i = 5, #ARGV, 3 do
            local line = ARGV[i]
            if redis.call('HEXISTS', ARGV[1] .. 'output/' .. ARGV[2], line) == 0
                and redis.call('HEXISTS', ARGV[1] .. 'error/' .. ARGV[2], line) == 0 then
                local num = string.len(ARGV[i + 2])
                redis.call('HSET', ARGV[1] .. ARGV[i + 1] .. '/' .. ARGV[2], line, ARGV[i + 2])
                local count = 'completed'
                if ARGV[i + 1] == 'error' then count = 'failed' end
                redis.call('HINCRBY', counts, count, 1)
                redis.call('HINCRBY', counts, ARGV[i + 1] .. '_bytes', num)
                bytes = bytes + num
            end
        end
        redis.call('HINCRBY', ARGV[1] .. 'bytes', ARGV[4], bytes)
        redis.call('HINCRBY', ARGV[1] .. 'bytes', '*', bytes)
        return 1
    """
    _FORGET = """
        local counts = ARGV[1] .. 'counts/' .. ARGV[3]
        local num = 0
        for _, name in ipairs({'output', 'error'}) do
            num = num + tonumber(redis.call('HGET', counts, name .. '_bytes') or 0)
            redis.call('UNLINK', ARGV[1] .. name .. '/' .. ARGV[3])
        end
        redis.call('HINCRBY', ARGV[1] .. 'bytes', ARGV[2], 0 - num)
        redis.call('HINCRBY', ARGV[1] .. 'bytes', '*', 0 - num)
        redis.call('DEL', counts, ARGV[1] .. 'batch/' .. ARGV[3])
        redis.call('ZREM', ARGV[1] .. 'ended', ARGV[3])
        redis.call('ZREM', ARGV[1] .. 'batches/' .. ARGV[2], ARGV[3])
    """

    def __init__(self, uri: str) -> None:
        super().__init__(uri, answer_s=_ANSWER_S)

    async def begin_file(self, file: StoredFile, limits: Limits) -> Stored | None:
        """Reserve room for a file."""
        found = await self._call(
            self._BEGIN,
            file.owner,
            file.id,
            file.model_dump_json(),
            file.num_bytes,
            *limits,
            file.created_at,
        )
        return Stored(*map(int, found)) if found else None

    async def append(self, file_id: str, number: int, data: bytes) -> None:
        """Write a chunk of a file."""
        await self._run(lambda redis: redis.set(f"{_REDIS}chunk/{file_id}/{number}", data))

    async def finish_file(self, file: StoredFile) -> None:
        """Show a file."""

        async def write(redis: "Redis") -> None:
            async with redis.pipeline(transaction=True) as pipeline:
                pipeline.set(f"{_REDIS}file/{file.id}", file.model_dump_json())
                pipeline.zrem(f"{_REDIS}hidden", file.id)
                pipeline.zadd(f"{_REDIS}files", {file.id: file.expires_at})
                pipeline.zadd(f"{_REDIS}files/{file.owner}", {file.id: 0})
                await pipeline.execute()

        await self._run(write)

    async def file(self, file_id: str) -> StoredFile | None:
        """Return a complete file."""
        found = await self._files([file_id])
        return found[0] if found else None

    async def files(self, owner: str, page: Page, purpose: str | None = None) -> list[StoredFile]:
        """Return a key's complete files."""
        found: list[StoredFile] = []
        after = page.after
        while len(found) < page.limit:
            ids = await self._ids(f"files/{owner}", Page(after, page.limit, page.newest_first))
            files = await self._files(ids)
            found += [file for file in files if purpose in (None, file.purpose)]
            if len(ids) < page.limit:
                break
            after = ids[-1]
        return found[: page.limit]

    async def chunk(self, file_id: str, number: int) -> bytes | None:
        """Return a chunk of an uploaded file."""
        data: bytes | None = await self._run(
            lambda redis: redis.get(f"{_REDIS}chunk/{file_id}/{number}")
        )
        return data

    async def delete_file(self, file: StoredFile) -> None:
        """Delete a file and its content."""
        kind = "error" if file.has_errors else "output"
        await self._call(
            self._DELETE,
            file.owner,
            file.id,
            file.num_bytes,
            file.batch_id or "",
            f"{kind}_bytes",
            kind,
        )
        number = 0
        # In groups, and also for a file of which only a part arrived.
        while await self._unlink_chunks(file.id, number):
            number += _DELETED_CHUNKS

    async def stored(self, owner: str) -> Stored:
        """Return what is stored for a key."""

        async def read(redis: "Redis") -> Stored:
            async with redis.pipeline(transaction=True) as pipeline:
                pipeline.zcard(f"{_REDIS}files/{owner}")
                pipeline.hmget(f"{_REDIS}bytes", [owner, _ALL])
                num_files, num_bytes = await pipeline.execute()
            return Stored(num_files, *(int(number or 0) for number in num_bytes))

        stored: Stored = await self._run(read)
        return stored

    async def create(self, batch: Batch, max_open: int, max_ended: int) -> bool:
        """Add a batch."""
        record = batch.model_dump_json()
        return bool(
            await self._call(self._CREATE, batch.owner, batch.id, record, max_open, max_ended)
        )

    async def batch(self, batch_id: str) -> tuple[Batch, Counts] | None:
        """Return a batch and the counts of its lines."""
        found = await self._batches([batch_id])
        return found[0] if found else None

    async def batches(self, owner: str, page: Page) -> list[tuple[Batch, Counts]]:
        """Return a key's batches."""
        return await self._batches(await self._ids(f"batches/{owner}", page))

    async def open_batches(self) -> list[Batch]:
        """Return the batches that have not ended."""
        ids = await self._run(lambda redis: redis.zrange(f"{_REDIS}open", 0, -1))
        return [batch for batch, _ in await self._batches(_texts(ids))]

    async def claim(self, batch_id: str, holder: str, lease_s: float) -> bool:
        """Take or renew the lease, which ends by Redis' clock."""
        return bool(await self._call(self._CLAIM, batch_id, holder, int(lease_s * 1000)))

    async def release(self, batch_id: str, holder: str) -> None:
        """Give the lease back."""
        await self._call(self._RELEASE, batch_id, holder)

    async def change(
        self, batch_id: str, change: Callable[[Batch], Batch], holder: str | None = None
    ) -> Batch | None:
        """Change a batch; begin again if another client was faster."""
        while True:
            record = await self._run(lambda redis: redis.get(f"{_REDIS}batch/{batch_id}"))
            if record is None:
                return None
            batch = change(Batch.model_validate_json(record))
            changed = await self._call(
                self._CHANGE,
                batch_id,
                holder or "",
                record,
                batch.model_dump_json(),
                "" if batch.ended_at is None else batch.ended_at,
                batch.owner,
            )
            if changed == -1:
                raise LeaseLostError(f"{batch_id} is not held by {holder}")
            if changed:
                return batch

    async def add_results(self, batch: Batch, holder: str, results: Sequence[Result]) -> None:
        """Write results in one step."""
        arguments: list[Any] = []
        for result in results:
            arguments += [result.line, "error" if result.is_error else "output", result.record]
        added = await self._call(self._ADD, batch.id, holder, batch.owner, *arguments)
        if added == -1:
            raise LeaseLostError(f"{batch.id} is not held by {holder}")

    async def answered(self, batch_id: str, first: int, last: int) -> set[int]:
        """Return the lines of a range that have results."""
        lines = range(first, last + 1)

        async def read(redis: "Redis") -> list[int]:
            async with redis.pipeline(transaction=False) as pipeline:
                for line in lines:
                    pipeline.hexists(f"{_REDIS}output/{batch_id}", str(line))
                    pipeline.hexists(f"{_REDIS}error/{batch_id}", str(line))
                found: list[int] = await pipeline.execute()
            return found

        found = await self._run(read)
        return {line for number, line in enumerate(lines) if any(found[2 * number :][:2])}

    async def results(
        self, batch_id: str, first: int, last: int, *, has_errors: bool
    ) -> list[bytes]:
        """Return the records of a range of lines."""
        place = f"{_REDIS}{'error' if has_errors else 'output'}/{batch_id}"
        lines = [str(line) for line in range(first, last + 1)]
        records = await self._run(lambda redis: redis.hmget(place, lines))
        return [record for record in records if record is not None]

    async def sweep(self, now_s: int, keep_s: int) -> None:
        """Delete what has expired."""

        async def read(redis: "Redis") -> list[list[bytes]]:
            async with redis.pipeline(transaction=False) as pipeline:
                pipeline.zrangebyscore(f"{_REDIS}files", 0, now_s)
                pipeline.zrangebyscore(f"{_REDIS}hidden", 0, now_s - _UPLOAD_S)
                pipeline.zrangebyscore(f"{_REDIS}ended", 0, now_s - keep_s)
                found: list[list[bytes]] = await pipeline.execute()
            return found

        expired, hidden, ended = map(_texts, await self._run(read))
        used = {batch.input_file_id for batch in await self.open_batches()}
        for file in await self._files([*expired, *hidden], with_hidden=True):
            if file.id not in used:
                await self.delete_file(file)
        for batch, _ in await self._batches(ended):
            await self._call(self._FORGET, batch.owner, batch.id)

    async def _call(self, script: str, *arguments: Any) -> Any:
        """Run a script; its first argument is the prefix of all places."""
        return await self._run(lambda redis: redis.eval(script, 0, _REDIS, *arguments))

    async def _unlink_chunks(self, file_id: str, first: int) -> bool:
        """Delete a group of chunks; return whether there were any."""
        places = [f"{_REDIS}chunk/{file_id}/{first + each}" for each in range(_DELETED_CHUNKS)]
        return bool(await self._run(lambda redis: redis.unlink(*places)))

    async def _ids(self, place: str, page: Page) -> list[str]:
        """Return a part of a sorted set in which all scores are equal."""
        after = None if page.after is None else f"({page.after}"

        def ask(redis: "Redis") -> Any:
            if page.newest_first:
                return redis.zrevrangebylex(
                    _REDIS + place, after or "+", "-", start=0, num=page.limit
                )
            return redis.zrangebylex(_REDIS + place, after or "-", "+", start=0, num=page.limit)

        return _texts(await self._run(ask))

    async def _files(self, ids: Sequence[str], *, with_hidden: bool = False) -> list[StoredFile]:
        if not ids:
            return []

        async def read(redis: "Redis") -> tuple[list[bytes | None], list[float | None]]:
            async with redis.pipeline(transaction=True) as pipeline:
                pipeline.mget([f"{_REDIS}file/{file_id}" for file_id in ids])
                pipeline.zmscore(f"{_REDIS}hidden", list(ids))
                records, hidden = await pipeline.execute()
            return records, hidden

        records, hidden = await self._run(read)
        return [
            StoredFile.model_validate_json(record)
            for record, is_hidden in zip(records, hidden, strict=True)
            if record is not None and (with_hidden or is_hidden is None)
        ]

    async def _batches(self, ids: Sequence[str]) -> list[tuple[Batch, Counts]]:
        if not ids:
            return []
        names = list(Counts.__slots__)

        async def read(redis: "Redis") -> list[Any]:
            async with redis.pipeline(transaction=True) as pipeline:
                for batch_id in ids:
                    pipeline.get(f"{_REDIS}batch/{batch_id}")
                    pipeline.hmget(f"{_REDIS}counts/{batch_id}", names)
                found: list[Any] = await pipeline.execute()
            return found

        found = await self._run(read)
        return [
            (Batch.model_validate_json(record), Counts(*(int(number or 0) for number in counts)))
            for record, counts in zip(found[::2], found[1::2], strict=True)
            if record is not None
        ]


def _texts(values: Iterable[bytes]) -> list[str]:
    return [value.decode() for value in values]
