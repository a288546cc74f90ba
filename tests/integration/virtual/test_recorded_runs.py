"""Runs in virtual time take as many steps as runs of an engine with a model did.

These were recorded on 2026-11-22 with vLLM's CPU engine, a model of 2 layers, and a limit of four
requests at once: minutes each, where these take a second.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from apar_core.engine.replay import replay_args
from apar_core.step_costs.costs import StepCosts
from cluster.lab.virtual.engine import VirtualEngine, VirtualSpec
from cluster.lab.virtual.text import virtual_text
from cluster.loadtest.replay_answers import ReplayAnswer, replay_answers
from cluster.loadtest.trace import read_trace

TRACE = Path("../shared/data/traces/structured.jsonl")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not TRACE.is_file(), reason=f"needs {TRACE}"),
]
COSTS = StepCosts("any", "predicted", "made up", ((1, 1e-3),), 0.0)
CONFIG = {"hidden_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 12}
MAX_REQUESTS, MAX_TOKENS, BLOCK_SIZE, KV_TOKENS = 4, 600, 32, 6144


@pytest.fixture(scope="module")
def engine() -> Iterator[VirtualEngine]:
    spec = VirtualSpec(
        CONFIG,
        COSTS,
        kv_tokens=KV_TOKENS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_TOKENS + BLOCK_SIZE,
        max_rows=1024,
        max_step_tokens=2048,
        is_async=False,
    )
    with VirtualEngine(spec) as engine:
        yield engine


@pytest.fixture(scope="module")
def answers(engine: VirtualEngine) -> Sequence[ReplayAnswer]:
    text = virtual_text()
    fitting, _ = replay_answers(read_trace(TRACE), text, text.tokens, max_tokens=MAX_TOKENS)
    return random.Random(0).sample(fitting, 48)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kv_share", "sequential_steps", "forked_steps"),
    [(0.1, 6773, 3049), (0.2, 3900, 1928), (0.3, 3785, 1928), (0.9, 3785, 1928)],
)
def test_runs_take_as_many_steps_as_recorded(
    engine: VirtualEngine,
    answers: Sequence[ReplayAnswer],
    kv_share: float,
    sequential_steps: int,
    forked_steps: int,
) -> None:
    assert num_steps(engine, answers, kv_share, forks=False) == sequential_steps
    assert num_steps(engine, answers, kv_share, forks=True) == forked_steps


def num_steps(
    engine: VirtualEngine, answers: Sequence[ReplayAnswer], kv_share: float, *, forks: bool
) -> int:
    """Answer everything with a share of the KV cache, and return the steps."""
    manager = engine.scheduler.kv_cache_manager
    num_blocks = KV_TOKENS // BLOCK_SIZE
    num_left = round(kv_share * num_blocks)
    assert engine.scheduler.reset_prefix_cache()
    ballast = manager.block_pool.get_new_blocks(num_blocks - num_left)
    manager.watermark_blocks = int(engine.scheduler.scheduler_config.watermark * num_left)
    # The recorded engine admitted requests as vLLM does.
    engine.scheduler.growth_reserve_tokens = 0
    engine.scheduler.gate.max_requests = MAX_REQUESTS
    before = engine.device.totals.steps
    try:
        found = engine.generate(
            [{"prompt_token_ids": list(answer.prompt_ids)} for answer in answers],
            [
                {
                    "temperature": 0.0,
                    "max_tokens": answer.max_tokens,
                    "detokenize": False,
                    "extra_args": {
                        **replay_args(answer.scripts(forked=forks)),
                        "apar_enabled": forks,
                    },
                }
                for answer in answers
            ],
        )
    finally:
        manager.block_pool.free_blocks(ballast)
    end_id = answers[0].flat[-1]
    for answer, made in zip(answers, found, strict=True):
        text = [token_id for token_id in made.token_ids if token_id != end_id]
        assert text == answer.flat[:-1]
    return engine.device.totals.steps - before
