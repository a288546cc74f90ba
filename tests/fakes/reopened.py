"""Stores that are opened again and again, as several gateways open theirs."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Protocol, TypeVar

from cluster.local_ray import free_port
from tests.unit.deployments.gateway.test_shared_rates import redis


class Closable(Protocol):
    """A store of gateways."""

    async def close(self) -> None:
        """Release connections."""


Store = TypeVar("Store", bound=Closable)


@asynccontextmanager
async def reopened(
    kind: str, folder: Path, open_at: Callable[[Path | str], Store]
) -> AsyncIterator[Callable[[], Store]]:
    """Yield what opens the same store again, and close all of them in the end.

    kind: "sqlite" or "redis". open_at: opens a store in a file, or at the address of Redis.
    """
    opened: list[Store] = []
    port = free_port()

    def open_store() -> Store:
        is_file = kind == "sqlite"
        opened.append(
            open_at(folder / "folder" / "keys.db" if is_file else f"redis://127.0.0.1:{port}")
        )
        return opened[-1]

    with nullcontext() if kind == "sqlite" else redis(port):
        yield open_store
        for store in opened:
            await store.close()
