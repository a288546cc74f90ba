"""Stores of batches, in SQLite and in Redis."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from deployments.gateway.batches.store import BatchStore, RedisBatches, SqliteBatches
from tests.fakes.reopened import reopened
from tests.fakes.tools import needs

Open = Callable[[], BatchStore]


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=needs("redis-server"))])
async def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    """Open the same store again and again, as several gateways do."""

    def open_at(place: Path | str) -> BatchStore:
        return SqliteBatches(place) if isinstance(place, Path) else RedisBatches(place)

    async with reopened(request.param, tmp_path, open_at) as open_store:
        yield open_store


@pytest.fixture(autouse=True)
def patient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the store longer than usual: the machine may be busy."""
    monkeypatch.setattr("deployments.gateway.batches.store._ANSWER_S", 60.0)
