"""Requests with a seed whose prompt takes several steps, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from apar_core.engine.offline_engine import OfflineEngine
from tests.integration.serving.apar_process import TINY

pytestmark = pytest.mark.engine


def test_a_seed_gives_the_same_text_however_its_prompt_was_computed() -> None:
    engine = OfflineEngine(
        "apar_core/models/apar_tiny",
        **TINY["engine"],
        kv_cache_memory_bytes=2**26,
        max_num_batched_tokens=64,
        max_num_seqs=4,
    )
    prompts: list[Any] = [{"prompt_token_ids": [10 + row, *range(20, 220)]} for row in range(3)]
    sampling = [
        {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True, "seed": seed} for seed in (1, 2)
    ]
    try:
        in_parts = engine.generate(prompts[:2], sampling)
        # Now from the prefix cache, in one step, beside the parts of another prompt.
        at_once = engine.generate(prompts, [*sampling, {"temperature": 1.0, "seed": 3}])
    finally:
        engine.shutdown()

    assert [each.token_ids for each in in_parts] == [each.token_ids for each in at_once[:2]]
