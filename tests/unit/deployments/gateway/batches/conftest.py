"""Stores of batches, in SQLite and in Redis."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from cluster.local_ray import free_port
from deployments.gateway.batches.store import BatchStore, RedisBatches, SqliteBatches
from tests.fakes.tools import needs
from tests.unit.deployments.gateway.test_shared_rates import redis

Open = Callable[[], BatchStore]


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=needs("redis-server"))])
async def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    """Open the same store again and again, as several gateways do."""
    opened: list[BatchStore] = []
    port = free_port()

    def open_store() -> BatchStore:
        if request.param == "sqlite":
            opened.append(SqliteBatches(tmp_path / "folder" / "keys.db"))
        else:
            opened.append(RedisBatches(f"redis://127.0.0.1:{port}"))
        return opened[-1]

    if request.param == "sqlite":
        yield open_store
    else:
        with redis(port):
            yield open_store
    for store in opened:
        await store.close()


@pytest.fixture(autouse=True)
def patient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the store longer than usual: the machine may be busy."""
    monkeypatch.setattr("deployments.gateway.batches.store._ANSWER_S", 60.0)
