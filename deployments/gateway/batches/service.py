"""The Batch API of one gateway as a whole: its store, its routes, and the batches that it runs."""

from deployments.config.batches import BatchesConfig
from deployments.gateway.batches.api import BatchApi
from deployments.gateway.batches.runner import BatchMetrics, BatchRunner, LineServer
from deployments.gateway.batches.store import BatchStore


class Batches:
    """Belongs to one event loop."""

    def __init__(
        self, store: BatchStore, server: LineServer, metrics: BatchMetrics, config: BatchesConfig
    ) -> None:
        self._store = store
        self.runner = BatchRunner(store, server, metrics, config)
        self.api = BatchApi(store, self.runner, config)

    def configure(self, config: BatchesConfig) -> None:
        """Apply new settings; running batches continue."""
        self.runner.configure(config)
        self.api.config = config

    def start(self) -> None:
        """Run the batches that are waiting, from now on."""
        self.runner.start()

    async def close(self) -> None:
        """Stop the batches where they are, and release the store."""
        await self.runner.close()
        await self._store.close()
