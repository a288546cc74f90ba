"""The stores of usage and run-time keys: the same behaviour in SQLite and in Redis."""

import asyncio
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cluster.local_ray import free_port
from deployments.config.keys import KeyConfig, hash_of
from deployments.gateway.batches.store import SqliteBatches
from deployments.gateway.key_store import (
    Batch,
    KeyStore,
    RedisStore,
    Row,
    SqliteStore,
    StoredKey,
    Usage,
    Used,
)
from deployments.wire.errors import StoreError
from tests.fakes.reopened import reopened
from tests.fakes.tools import needs

Open = Callable[[], KeyStore]


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=needs("redis-server"))])
async def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    """Open the same store again and again, as several gateways do."""

    def open_at(place: Path | str) -> KeyStore:
        return SqliteStore(place) if isinstance(place, Path) else RedisStore(place)

    async with reopened(request.param, tmp_path, open_at) as open_store:
        yield open_store


def stored(name: str, key_id: str = "1") -> StoredKey:
    key = KeyConfig(name=name, hash=hash_of(name + key_id), tokens_per_day=5)
    return StoredKey(id=key_id, created_at=datetime.now(UTC), created_by="admin", key=key)


def today() -> str:
    return datetime.now(UTC).date().isoformat()


async def test_what_is_written_after_other_processes_have_used_the_file_is_not_lost(
    tmp_path: Path,
) -> None:
    """Another gateway that ends, or a user who looks into the file."""
    path = tmp_path / "keys.db"
    # As in a gateway: usage and batches in the same file.
    usage, batches = SqliteStore(path), SqliteBatches(path)
    program = (
        "import sqlite3, sys;"
        "print(*sqlite3.connect(sys.argv[1]).execute('SELECT sum(requests) FROM usage').fetchone())"
    )
    counted = []
    for _ in range(3):
        await usage.add(Batch({Row(today(), "a", "m"): Usage(requests=1)}))
        await batches.open_batches()
        reader = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, path, stdout=subprocess.PIPE
        )
        counted.append(int((await reader.communicate())[0]))
    await usage.close()
    await batches.close()

    assert counted == [1, 2, 3]


async def test_usage_of_several_gateways_adds_up(open_again: Open) -> None:
    first, second = open_again(), open_again()
    row, other = Row("2026-11-23", "a", "m"), Row("2026-11-02", "a", "m2")
    batch = Batch({row: Usage(requests=1, prompt_tokens=5), other: Usage(generated_tokens=7)})

    await first.add(batch)
    await first.add(batch)  # Sent again after a timeout.
    await second.add(Batch({row: Usage(requests=2, errors=1, threads=3, forks=2)}))

    both = Usage(requests=3, errors=1, prompt_tokens=5, threads=3, forks=2)
    assert await first.report("2026-11-01", "2026-11-30") == [
        (other, Usage(generated_tokens=7)),
        (row, both),
    ]
    assert await second.report("2026-11-23", "2026-11-23") == [(row, both)]
    assert await second.used("a", "2026-11-23") == Used(3, 5, 3, 12)
    assert await second.used("a", "2026-11-24") == Used(0, 0, 3, 12)
    assert await second.used("a", "2026-12-01") == await first.used("b", "2026-11-23") == Used()


async def test_keys_created_by_one_gateway_are_seen_and_revoked_by_another(
    open_again: Open,
) -> None:
    first, second = open_again(), open_again()
    assert await second.keys() == []
    before = await second.keys_version()

    await first.create(stored("a"))
    await first.create(stored("b", "2"))
    created = await second.keys_version()

    assert [each.key.name for each in await second.keys()] == ["a", "b"]
    assert (await second.keys())[0].key == stored("a").key
    await second.revoke(["1"])
    assert [each.id for each in await first.keys()] == ["2"]
    assert len({before, created, await first.keys_version()}) == 3


async def _write_record(store: KeyStore, key_id: str, record: str) -> None:
    if isinstance(store, SqliteStore):
        await store._run(
            lambda connection: connection.execute(
                "INSERT INTO keys (id, record) VALUES (?, ?)", (key_id, record)
            ),
            writes=True,
        )
    else:
        assert isinstance(store, RedisStore)
        await store._run(lambda client: client.hset("apar/keys", key_id, record))


@pytest.mark.parametrize("record", ["", "{}", '{"of": "a newer version"}', "[1]"])
async def test_a_record_that_cannot_be_read_refuses_its_key_only(
    open_again: Open, record: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_again()
    await store.create(stored("a"))
    await _write_record(store, "broken", record)
    await store.create(stored("b", "2"))

    assert [each.key.name for each in await store.keys()] == ["a", "b"]
    [logged] = caplog.records
    assert "not readable" in logged.message
    assert vars(logged)["key_id"] == "broken"


async def test_a_store_that_was_emptied_repeats_no_version(open_again: Open) -> None:
    store = open_again()
    await store.create(stored("a"))
    before = await store.keys_version()

    if isinstance(store, SqliteStore):
        for file in store._path.parent.iterdir():
            file.unlink()
    else:
        assert isinstance(store, RedisStore)
        await store._run(lambda client: client.flushall())
    again = open_again()
    await again.create(stored("b"))

    assert await again.keys_version() != before


async def test_a_store_that_cannot_be_reached_raises_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "keys.db").mkdir()
    for store in (
        SqliteStore(tmp_path / "keys.db"),
        RedisStore(f"redis://:secret@127.0.0.1:{free_port()}"),
    ):
        with pytest.raises(StoreError) as failed:
            await store.used("a", today())

        assert "secret" not in str(failed.value)
        await store.close()


async def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.db"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    store = SqliteStore(path)

    with pytest.raises(StoreError, match="version 99"):
        await store.keys()
    await store.close()


async def test_the_file_is_the_owners_only_and_forgets_old_usage(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "keys.db"
    store = SqliteStore(path)
    await store.add(Batch({Row("2020-01-01", "a", "m"): Usage(requests=1)}))
    await store.close()
    again = SqliteStore(path, keep_days=30)

    assert await again.report("2020-01-01", "2030-01-01") == []
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    await again.close()


async def test_a_write_of_two_processes_at_once_waits_its_turn(tmp_path: Path) -> None:
    stores = [SqliteStore(tmp_path / "keys.db") for _ in range(4)]
    day = today()
    row = Row(day, "a", "m")

    await asyncio.gather(
        *(store.add(Batch({row: Usage(requests=1)})) for store in stores for _ in range(5))
    )

    assert await stores[0].report(day, day) == [(row, Usage(requests=20))]
    for store in stores:
        await store.close()


async def test_several_gateways_open_a_new_file_at_once(tmp_path: Path) -> None:
    for number in range(20):
        stores = [SqliteStore(tmp_path / f"{number}.db") for _ in range(8)]
        reports = await asyncio.gather(*(store.report(today(), today()) for store in stores))
        assert reports == [[]] * 8
        for store in stores:
            await store.close()


_WRITER = """
import asyncio, sys
from pathlib import Path
from deployments.gateway.key_store import Batch, SqliteStore, Usage
from deployments.gateway.ledger import Ledger

class TellingStore(SqliteStore):
    num_written = 0

    async def add(self, batch: Batch) -> None:
        await super().add(batch)
        self.num_written += sum(usage.requests for usage in batch.rows.values())
        print("written", self.num_written, flush=True)

async def main() -> None:
    ledger = Ledger(TellingStore(Path(sys.argv[1])), flush_s=0.05)
    for number in range(1, 1_000_000):
        ledger.add(ledger.row("a", "m"), Usage(requests=1))
        print("counted", number, flush=True)
        await asyncio.sleep(0.001)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_killed_gateway_loses_at_most_what_it_had_not_flushed(tmp_path: Path) -> None:
    path = tmp_path / "keys.db"
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    told, killed, num_writes = dict[str, int](), False, 0
    for line in process.stdout:
        what, number = line.split()
        told[what] = int(number)
        num_writes += what == "written"
        if num_writes == 3 and not killed:
            process.send_signal(signal.SIGKILL)
            killed = True
    process.wait()
    store = SqliteStore(path)

    ((_, usage),) = await store.report(today(), today())

    assert 0 < told["written"] <= usage.requests <= told["counted"]
    await store.close()
