"""The database of the gateways, a SQLite file or Redis: transactions off the event loop.

The key store and the store of batches keep their tables in the same database, over connections of
their own, so that a large file does not delay a request. Every access raises StoreError while the
database fails.
"""

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deployments.wire.errors import StoreError

if TYPE_CHECKING:
    from redis.asyncio import Redis

Answer = TypeVar("Answer")

_LOCK_S = 5.0
_SCHEMA_VERSION = 1


class SqliteFile:
    """One SQLite file in WAL mode, shared by the gateways of one machine."""

    def __init__(self, path: Path, *, answer_s: float) -> None:
        """`answer_s` is the default timeout of a transaction."""
        self._path = path
        self._answer_s = answer_s
        self._connection: sqlite3.Connection | None = None
        # One thread: SQLite serializes writers anyway.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sqlite")

    async def close(self) -> None:
        """Close the file after the work in progress."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._drop)
        self._executor.shutdown(wait=False)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Create the tables; called for each new connection."""
        raise NotImplementedError

    async def _run(
        self,
        work: Callable[[sqlite3.Connection], Answer],
        answer_s: float | None = None,
        *,
        writes: bool = False,
    ) -> Answer:
        """Run one transaction in the file's thread."""

        def run() -> Answer:
            try:
                connection = self._connection or self._open()
                with connection:
                    connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
                    return work(connection)
            except BaseException:
                self._drop()
                raise

        loop = asyncio.get_running_loop()
        try:
            # A thread cannot be interrupted.
            async with asyncio.timeout(self._answer_s if answer_s is None else answer_s):
                return await asyncio.shield(loop.run_in_executor(self._executor, run))
        except (sqlite3.Error, OSError, RuntimeError, ValueError) as error:
            raise StoreError(f"{self._path}: {error!r}") from error

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Owner only: the file holds hashes of keys, the usage of each, and prompts of batches.
        # Never open a file that exists: to close it would release the locks that other connections
        # of this process hold, and other processes would remove the log that these write to
        # (https://www.sqlite.org/howtocorrupt.html, section 2.2).
        with suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        connection = sqlite3.connect(
            self._path, timeout=_LOCK_S, isolation_level=None, check_same_thread=False
        )
        try:
            _set_wal(connection)
            connection.execute("PRAGMA synchronous = FULL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > _SCHEMA_VERSION:
                raise ValueError(
                    f"the file has version {version}; this program knows {_SCHEMA_VERSION}"
                )
            self._prepare(connection)
            connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _drop(self) -> None:
        """Close the connection; the next use opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()


def _set_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL mode, in which readers and a writer can use the file at the same time.

    Retries while the file is busy: for this switch, SQLite does not wait for other connections
    that are opening it.
    """
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.02)


class RedisServer:
    """Redis, shared by all gateways."""

    def __init__(self, uri: str, *, answer_s: float) -> None:
        """`answer_s` is the default timeout of an access."""
        self._uri = uri
        self._answer_s = answer_s
        self._connected: Redis | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._connected is not None:
            await self._connected.aclose()

    async def _run(self, ask: Callable[["Redis"], Any], answer_s: float | None = None) -> Any:
        from redis.asyncio import Redis
        from redis.exceptions import RedisError

        try:
            if self._connected is None:
                self._connected = Redis.from_url(self._uri)
            async with asyncio.timeout(self._answer_s if answer_s is None else answer_s):
                return await ask(self._connected)
        except (RedisError, OSError) as error:
            # The message of an error may hold the address, but never the password.
            raise StoreError(f"Redis: {type(error).__name__}") from error
