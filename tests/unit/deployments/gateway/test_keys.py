"""Finding the key of a request, and following the keys' file."""

import asyncio
import json
import logging
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deployments.config import ConfigError
from deployments.config.keys import KeyConfig, hash_of, load_keys
from deployments.gateway.callers import KeyRing
from deployments.gateway.key_store import SqliteStore, StoredKey
from deployments.wire.errors import StoreError, UnknownKeyError
from tests.fakes.clock import Clock

ALICE = KeyConfig(name="alice", hash=hash_of("alices"))


def bearer(token: str, scheme: str = "Bearer") -> list[tuple[bytes, bytes]]:
    return [(b"accept", b"*/*"), (b"authorization", f"{scheme} {token}".encode())]


def write(file: Path, *names: str) -> None:
    """Write keys whose tokens are their names, atomically as in a mounted secret."""
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps([{"name": name, "hash": hash_of(name)} for name in names]))
    fresh.replace(file)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_a_known_key_is_found(scheme: str) -> None:
    assert await KeyRing([ALICE]).find(bearer("alices", scheme)) == ALICE


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        bearer(""),
        bearer("alices", scheme="Basic"),
        bearer("alice"),
        bearer("alicess"),
        bearer(ALICE.hash),
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"x-authorization", b"Bearer alices")],
    ],
)
async def test_any_other_header_is_refused(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(UnknownKeyError) as refused:
        await KeyRing([ALICE]).find(headers)

    assert "alices" not in str(refused.value)


async def test_without_configured_keys_any_key_or_none_is_accepted() -> None:
    assert await KeyRing().find([]) is None
    assert await KeyRing().find(bearer("none")) is None


async def test_an_empty_file_admits_nobody(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    write(file)

    with pytest.raises(UnknownKeyError):
        await KeyRing(file=file).find([])


async def test_a_changed_file_is_read_again_within_a_second(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys.json", Clock()
    write(file, "bob")
    ring = KeyRing([ALICE], file, clock)
    assert (await ring.find(bearer("bob"))) is not None

    write(file, "carol")
    clock.now_s = 1.1

    with pytest.raises(UnknownKeyError):
        await ring.find(bearer("bob"))
    assert (await ring.find(bearer("carol"))) is not None
    assert await ring.find(bearer("alices")) == ALICE


@pytest.mark.parametrize("text", ["[{", "{}", '[{"name": "bob"}]', None])
async def test_a_broken_file_keeps_the_old_keys_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    file, clock = tmp_path / "keys.json", Clock()
    write(file, "bob")
    ring = KeyRing(file=file, clock=clock)
    if text is None:
        file.unlink()
    else:
        file.write_text(text)

    with caplog.at_level(logging.ERROR):
        for clock.now_s in (2.0, 4.0):
            assert (await ring.find(bearer("bob"))) is not None
    assert [record.message for record in caplog.records] == [
        "keys file not used: the previous keys stay in force"
    ]

    write(file, "carol")
    clock.now_s = 6.0
    assert (await ring.find(bearer("carol"))) is not None


async def test_new_settings_with_a_broken_file_keep_the_old_keys_until_it_is_fixed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "keys.json", Clock()
    write(file, "bob")
    ring = KeyRing([ALICE], file, clock)
    file.write_text('[{"name": "bob", "hash": "wrong"}]')

    await ring.reconfigure([ALICE], file)

    assert ring.is_outdated
    assert (await ring.find(bearer("bob"))) is not None
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert vars(record)["file"] == str(file)
    assert "0.hash" in vars(record)["reason"]

    write(file, "carol")
    clock.now_s = 2.0
    assert (await ring.find(bearer("carol"))) is not None
    assert not ring.is_outdated


async def test_new_keys_that_conflict_with_the_file_keep_the_old_ones(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    write(file, "bob")
    ring = KeyRing([ALICE], file)

    await ring.reconfigure([KeyConfig(name="bob", hash=hash_of("other"), weight=2)], file)

    assert ring.is_outdated
    assert (await ring.find(bearer("bob"))) is not None
    assert await ring.find(bearer("alices")) == ALICE


async def test_parsing_a_file_does_not_block_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, loop_ran = tmp_path / "keys.json", threading.Event()
    write(file, "bob")
    ring = KeyRing(file=file)

    def slow(path: Path) -> tuple[KeyConfig, ...]:
        assert loop_ran.wait(10), "the event loop stood still"
        return load_keys(path)

    monkeypatch.setattr("deployments.gateway.callers.load_keys", slow)
    asyncio.get_running_loop().call_later(0.01, loop_ran.set)

    await ring.reconfigure([ALICE], file)

    assert not ring.is_outdated


def test_a_missing_file_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone"):
        KeyRing(file=tmp_path / "gone")


async def test_an_unreadable_file_is_read_again_and_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock, fails = tmp_path / "keys.json", Clock(), [OSError("I/O error")] * 2
    write(file, "bob")
    ring = KeyRing(file=file, clock=clock)
    write(file, "carol")

    def flaky(path: Path) -> tuple[KeyConfig, ...]:
        if fails:
            raise ConfigError(f"{path}: I/O error") from fails.pop()
        return load_keys(path)

    monkeypatch.setattr("deployments.gateway.callers.load_keys", flaky)
    for clock.now_s in (2.0, 4.0):
        assert (await ring.find(bearer("bob"))) is not None
    clock.now_s = 6.0

    # Nothing that the file's version shows has changed.
    assert (await ring.find(bearer("carol"))) is not None
    assert not ring.is_outdated
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1


class BreakableStore(SqliteStore):
    """A store that fails while `is_broken` is set."""

    is_broken = False

    async def keys_version(self) -> int:
        if self.is_broken:
            raise StoreError("broken")
        return await super().keys_version()


async def test_a_run_time_key_is_refused_when_the_store_has_failed_for_too_long(
    tmp_path: Path,
) -> None:
    clock, store = Clock(), BreakableStore(tmp_path / "keys.db")
    bob = StoredKey(
        id="1",
        created_at=datetime.now(UTC),
        created_by="alice",
        key=KeyConfig(name="bob", hash=hash_of("bobs")),
    )
    await store.create(bob)
    ring = KeyRing([ALICE], clock=clock, store=store, max_age_s=300.0)
    assert await ring.find(bearer("bobs")) == bob.key

    store.is_broken = True
    await store.revoke(["1"])  # By another gateway.
    clock.now_s += 299.0
    assert await ring.find(bearer("bobs")) == bob.key
    clock.now_s += 2.0
    with pytest.raises(StoreError):
        await ring.find(bearer("bobs"))
    assert await ring.find(bearer("alices")) == ALICE

    store.is_broken = False
    clock.now_s += 2.0
    with pytest.raises(UnknownKeyError):
        await ring.find(bearer("bobs"))
    await store.close()


@pytest.mark.parametrize(("is_revoked", "found"), [(False, ["bob"] * 3), (True, [None] * 3)])
@pytest.mark.parametrize("idle_s", [10.0, 1000.0])
async def test_after_a_quiet_time_all_requests_wait_for_the_store(
    tmp_path: Path, idle_s: float, is_revoked: bool, found: list[str | None]
) -> None:
    clock, store = Clock(), SqliteStore(tmp_path / "keys.db")
    key = KeyConfig(name="bob", hash=hash_of("bobs"))
    await store.create(StoredKey(id="1", created_at=datetime.now(UTC), created_by="alice", key=key))
    ring = KeyRing([ALICE], clock=clock, store=store, max_age_s=300.0)
    await ring.find(bearer("bobs"))

    async def name_of_key() -> str | None:
        try:
            known = await ring.find(bearer("bobs"))
        except UnknownKeyError:
            return None
        return None if known is None else known.name

    clock.now_s += idle_s
    if is_revoked:
        await store.revoke(["1"])  # By another gateway.

    assert await asyncio.gather(*(name_of_key() for _ in range(3))) == found
    await store.close()


async def test_another_store_is_read_at_once(tmp_path: Path) -> None:
    before, after = SqliteStore(tmp_path / "before.db"), SqliteStore(tmp_path / "after.db")
    key = KeyConfig(name="bob", hash=hash_of("bobs"))
    await after.create(StoredKey(id="1", created_at=datetime.now(UTC), created_by="alice", key=key))
    ring = KeyRing([ALICE], clock=Clock(), store=before)
    with pytest.raises(UnknownKeyError):
        await ring.find(bearer("bobs"))

    ring.use_store(after)

    assert await ring.find(bearer("bobs")) == key
    await before.close()
    await after.close()


async def test_a_key_is_not_called_unknown_while_the_store_was_never_read(tmp_path: Path) -> None:
    store = BreakableStore(tmp_path / "keys.db")
    store.is_broken = True
    ring = KeyRing([ALICE], store=store)

    with pytest.raises(StoreError):
        await ring.find(bearer("bobs"))
    assert await ring.find(bearer("alices")) == ALICE
    await store.close()
