"""What a KV connector of vLLM loads, counted in the engine's process."""

from typing import Any

from apar_core.engine.offline_engine import OfflineEngine

Loaded = list[tuple[str, int]]
"""Request id of a thread, and how many tokens were loaded for it."""


def count_loads(engine: OfflineEngine) -> Loaded:
    """Return a list that grows with each load; without a connector it stays empty."""
    loaded: Loaded = []
    connector = engine.scheduler.connector
    if connector is not None:
        update = connector.update_state_after_alloc

        def counted(request: Any, blocks: Any, num_tokens: int) -> None:
            if num_tokens:
                loaded.append((request.request_id, num_tokens))
            update(request, blocks, num_tokens)

        connector.update_state_after_alloc = counted
    return loaded
