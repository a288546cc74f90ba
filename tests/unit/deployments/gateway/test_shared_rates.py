"""Rate limits shared by several gateways in a real Redis."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cluster.local_ray import free_port
from deployments.config.keys import KeyConfig, hash_of
from deployments.config.limits import LimitsConfig
from deployments.config.secret import SecretReference
from deployments.gateway.callers import Callers
from deployments.wire.errors import RateLimitError
from tests.fakes.tools import needs

pytestmark = needs("redis-server")
SECRET = "apar-one-of-the-keys"
START_S = 120.0


def gateway(port: int, password: SecretReference | None = None) -> Callers:
    """The callers of a gateway whose one key has two requests a minute, counted in Redis."""
    key = KeyConfig(name="a", hash=hash_of(SECRET), requests_per_minute=2)
    limits = LimitsConfig(rate_storage=f"redis://127.0.0.1:{port}", rate_storage_password=password)
    return Callers((key,), None, limits)


async def admit(known: Callers) -> None:
    rates = (await known.identify([(b"authorization", f"Bearer {SECRET}".encode())])).rates
    assert rates is not None
    await rates.admit_request()


@contextmanager
def redis(port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        ["redis-server", "--port", str(port), "--save", "", "--bind", "127.0.0.1", *options],
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


async def test_two_gateways_count_the_rate_of_a_key_together() -> None:
    port = free_port()
    with redis(port):
        first, second = gateway(port), gateway(port)
        await admit(first)
        await admit(second)

        for known in (first, second):
            with pytest.raises(RateLimitError):
                await admit(known)


async def test_redis_gets_the_configured_password(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port, password = free_port(), "p@ss:w/o%rd"
    file = tmp_path / "password"
    file.write_text(password)
    with redis(port, "--requirepass", password):
        known = gateway(port, SecretReference(file=file))
        await admit(known)
        await admit(known)
        with pytest.raises(RateLimitError):
            await admit(known)
        file.write_text("another-secret")
        refused = gateway(port, SecretReference(file=file))
        await admit(refused)

    assert "rates not counted" in caplog.text
    assert "another-secret" not in str([vars(record) for record in caplog.records])


async def test_requests_pass_while_the_store_is_gone() -> None:
    port = free_port()
    with redis(port) as process:
        known = gateway(port)
        await admit(known)
        process.kill()
        process.wait()

        for _ in range(5):
            await admit(known)
