"""States of an engine core."""

from typing import Any

from apar_core.scheduler.core_state import CoreState

IDLE: dict[str, Any] = {
    "requests": 0,
    "threads": 0,
    "running_threads": 0,
    "waiting_threads": 0,
    "kv_blocks": 10,
    "free_blocks": 10,
}


def a_core_state(**counts: Any) -> CoreState:
    """Return the state of an idle engine, except for `counts`."""
    return CoreState.from_plain(IDLE | counts)
