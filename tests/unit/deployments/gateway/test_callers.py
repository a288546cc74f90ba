"""Callers: their limits and cache salts, and what new settings change."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from limits.aio.storage import MemoryStorage

from deployments.config.files import SecretError
from deployments.config.keys import ANONYMOUS, KeyConfig
from deployments.config.limits import LimitsConfig
from deployments.config.secret import SecretReference
from deployments.gateway.callers import Caller, Callers
from deployments.wire.errors import RateLimitError, UnknownKeyError
from tests.fakes.replicas import key


class SharedStorage(MemoryStorage):
    """A store that all gateways of the test reach under one URI, as they would a Redis."""

    STORAGE_SCHEME = ["async+shared"]  # noqa: RUF012 - the library's own declaration
    state: "MemoryStorage | None" = None

    def __init__(self, uri: str | None = None, **options: Any) -> None:
        super().__init__(uri, **options)
        if SharedStorage.state is None:
            SharedStorage.state = self
        vars(self).update(vars(SharedStorage.state))


def callers(*keys: KeyConfig, file: Path | None = None, **limits: Any) -> Callers:
    return Callers(keys, file, LimitsConfig(**limits))


async def identified(known: Callers, token: str) -> Caller:
    return await known.identify([(b"authorization", f"Bearer {token}".encode())])


async def admit(known: Callers, token: str) -> None:
    rates = (await identified(known, token)).rates
    assert rates is not None
    await rates.admit_request()


async def test_two_keys_of_one_name_share_their_limits() -> None:
    limits = {"requests_per_minute": 1}
    known = callers(key("a", "old", **limits), key("a", "new", **limits))
    await admit(known, "old")

    with pytest.raises(RateLimitError):
        await admit(known, "new")


async def test_gateways_that_share_a_store_share_the_rates() -> None:
    SharedStorage.state = None
    first, second = (
        callers(key("a", requests_per_minute=1), rate_storage="shared://anywhere") for _ in range(2)
    )
    await admit(first, "a")

    with pytest.raises(RateLimitError):
        await admit(second, "a")


async def test_usage_still_counts_under_new_limits() -> None:
    known = callers(key("a", requests_per_minute=2))
    await admit(known, "a")

    await known.reconfigure((key("a", requests_per_minute=1),), None, LimitsConfig())
    with pytest.raises(RateLimitError):
        await admit(known, "a")
    await known.reconfigure((key("a", requests_per_minute=2),), None, LimitsConfig())
    await admit(known, "a")


async def test_a_key_keeps_its_cache_salt_until_the_secret_changes(tmp_path: Path) -> None:
    known = callers(key("a"))
    salts = [(await identified(known, "a")).cache_salt]
    file = tmp_path / "secret"
    referring = LimitsConfig(cache_secret=SecretReference(file=file))
    for limits, secret in (
        (LimitsConfig(), ""),
        (referring, "x" * 16),
        (referring, "x" * 16),
        (referring, "y" * 16),
        (LimitsConfig(), ""),
    ):
        file.write_text(secret)
        await known.reconfigure((key("a", weight=2),), None, limits)
        salts.append((await identified(known, "a")).cache_salt)

    assert salts[0] == salts[1] != salts[2]
    assert salts[2] == salts[3] != salts[4]
    # Without a configured secret the last one stays.
    assert salts[4] == salts[5]


async def test_an_unreadable_secret_keeps_the_old_limits_but_takes_the_new_keys() -> None:
    known = callers(key("a"))
    salt = (await identified(known, "a")).cache_salt
    nowhere = LimitsConfig(cache_secret=SecretReference(env="APAR_TEST_NOT_SET"))

    with pytest.raises(SecretError, match=r"limits\.cache_secret: .*APAR_TEST_NOT_SET is not set"):
        await known.reconfigure((key("a"), key("b")), None, nowhere)

    assert (await identified(known, "a")).cache_salt == salt
    assert (await identified(known, "b")).name == "b"


async def test_an_unreadable_file_keeps_the_keys_of_the_previous_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump([key("a").model_dump(mode="json")]))
    known = callers(key("inline"), file=file)

    await known.reconfigure((key("other"),), tmp_path / "gone", LimitsConfig())

    assert known.keys_are_outdated
    assert [(await identified(known, name)).name for name in ("a", "other")] == ["a", "other"]
    with pytest.raises(UnknownKeyError):
        await identified(known, "inline")


async def test_limits_of_a_key_from_a_file_apply(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump([key("a", models=["m"]).model_dump(mode="json")]))
    known = callers(file=file)

    caller = await identified(known, "a")

    assert caller.may_use("m")
    assert not caller.may_use("n")
    with pytest.raises(UnknownKeyError):
        await known.identify([])


async def test_without_keys_everyone_is_one_unlimited_caller() -> None:
    caller = await callers().identify([])

    assert (caller.name, caller.rates, caller.cache_salt) == (ANONYMOUS, None, None)
    assert caller.may_use("anything")
    assert await caller.rate_headers() == []
