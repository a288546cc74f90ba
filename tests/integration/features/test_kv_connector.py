"""Prefill in one engine and forked decoding in another, which reads the first one's KV from disk.

vLLM's ExampleConnector writes the KV of the prompt of every new request to files, of children too,
and reads it wherever a prompt is the same. After a preemption it looks for files that it never
wrote, with and without forks, so memory is not short here.
"""

from pathlib import Path
from typing import Any

import pytest

from apar_core.engine.offline_engine import OfflineEngine
from tests.integration.connector_loads import Loaded, count_loads
from tests.integration.engine_process import EngineProcess
from tests.integration.plain_decoding import FLOAT_NOISE, Run, chats, generate_threads, mismatches

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_CHATS = 12
MAX_TOKENS = 200
# The connector writes a prompt in its first step, so that it must fit into one.
COMMON: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 8192}


def answers(folder: Path | None, max_tokens: int, **arguments: Any) -> tuple[Run, Loaded]:
    """Answer all chats; return the threads, and the tokens that were loaded for some of them."""
    if folder is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }
    engine = EngineProcess(**{**COMMON, **arguments})
    try:
        return engine.call(_answers, max_tokens)
    finally:
        engine.close()


def _answers(engine: OfflineEngine, max_tokens: int) -> tuple[Run, Loaded]:
    loaded = count_loads(engine)
    return generate_threads(engine, chats(NUM_CHATS), max_tokens), loaded


def test_a_second_engine_reads_the_prompts_kv_and_forks(tmp_path: Path) -> None:
    alone, _ = answers(None, MAX_TOKENS)
    _, loaded_by_prefill = answers(tmp_path, 1)
    num_prompts = len(list(tmp_path.iterdir()))

    decoded, loaded = answers(tmp_path, MAX_TOKENS)

    assert loaded_by_prefill == []
    assert len(list(tmp_path.iterdir())) > num_prompts > 1
    assert sum(num_tokens for _, num_tokens in loaded) >= 96
    # Children have their prefix from their parents.
    assert not [thread for thread, _ in loaded if "~" in thread]
    assert decoded.threads == alone.threads
    assert sum(thread.is_child for thread in decoded.threads) > NUM_CHATS
    assert all(each.gap < FLOAT_NOISE for each in mismatches(decoded.threads))
    assert decoded.state_after.free_blocks == decoded.state_after.kv_blocks
    assert decoded.state_after.threads == 0
