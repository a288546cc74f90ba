"""Forks in models with a sliding window, alone or beside full attention (several KV-cache groups).

The embedded model gets windows here that it was not trained with. Its answers are poor, but its
threads must still be those of plain decoding with the same windows.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.models.apar_tiny import checkpoint_path
from tests.integration.engine_process import EngineProcess
from tests.integration.plain_decoding import FLOAT_NOISE, chats, generate_threads, mismatches

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WINDOW = 40
NUM_CHATS = 16
LARGEST_BLOCK = 32
FULL, SLIDING = "full_attention", "sliding_attention"
# name: (type of each layer, engine arguments, kinds of the engine's KV-cache groups)
WAYS: dict[str, tuple[list[str], dict[str, Any], set[str]]] = {
    "both": ([SLIDING, FULL] * 2, {}, {"FullAttentionManager", "SlidingWindowManager"}),
    "both, short memory, chunked prefill": (
        [SLIDING, FULL] * 2,
        {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 64, "max_num_seqs": 32},
        {"FullAttentionManager", "SlidingWindowManager"},
    ),
    "both in one group": (
        [SLIDING, FULL] * 2,
        {"disable_hybrid_kv_cache_manager": True},
        {"FullAttentionManager"},
    ),
    "sliding only": ([SLIDING] * 4, {}, {"SlidingWindowManager"}),
}


def windowed(folder: Path, layer_types: list[str]) -> Path:
    """Write the embedded model as one of another type, whose layers may have a window."""
    shutil.copytree(checkpoint_path(), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["MistralForCausalLM"],
        "model_type": "ministral",
        "sliding_window": WINDOW,
        "layer_types": layer_types,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def groups_of(engine: OfflineEngine) -> set[str]:
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    return {type(manager).__name__ for manager in managers}


@pytest.mark.parametrize("way", WAYS)
def test_every_thread_equals_plain_decoding_of_its_prefix(way: str, tmp_path: Path) -> None:
    layer_types, arguments, groups = WAYS[way]
    checkpoint = windowed(tmp_path, layer_types)
    engine = EngineProcess(model=str(checkpoint), **arguments)
    try:
        found_groups = engine.call(groups_of)
        run = engine.call(generate_threads, chats(NUM_CHATS), 300)
    finally:
        engine.close()

    assert found_groups == groups
    children = [thread for thread in run.threads if thread.is_child]
    assert len(children) >= NUM_CHATS
    # Some threads look back over more than a window.
    assert any(len(thread.prefix) > WINDOW + 32 for thread in children)
    assert all(each.gap < FLOAT_NOISE for each in mismatches(run.threads, checkpoint))
    # The windows matter: the embedded model itself writes other threads.
    assert any(each.gap > FLOAT_NOISE for each in mismatches(run.threads))
    assert (run.preemptions > 0) == ("short memory" in way)
    # Without full attention only, children find whole blocks in the prefix cache.
    counters = run.state_after.fork_counters
    is_shared = groups == {"FullAttentionManager"}
    assert (counters.fallbacks == 0) == (counters.copied_blocks > 0) == is_shared
    assert counters.shared_tokens > 0
    # What is left of a prefix is less than a block, which the parent may not have computed yet.
    assert counters.computed_tokens < (LARGEST_BLOCK + 2) * counters.forks
    assert run.state_after.free_blocks == run.state_after.kv_blocks
    assert run.state_after.threads == 0
