"""Forked decoding generates the tokens of plain greedy decoding in float32.

Each test runs an engine with other settings: block size, batch size, scarce memory, chunked
prefill, speculation.
"""

import logging
import math
from typing import Any

import pytest

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.engine.prompt_chain import PROPOSER
from apar_core.models.guesses import SHIPPED_PROMPTS
from apar_core.scheduler.pacing import StepPlan
from tests.fakes.fork_policies import MostTokens
from tests.integration.engine_process import EngineProcess
from tests.integration.plain_decoding import (
    FLOAT_NOISE,
    Run,
    chats,
    generate_threads,
    mismatches,
)

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.engine

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
CHAIN = {
    "speculative_config": {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": 3,
    },
    "additional_config": {"apar": {"prompt_tokens": str(SHIPPED_PROMPTS["apar-tiny"])}},
}
# name: (engine arguments, number of chats, events that must happen)
WAYS: dict[str, tuple[dict[str, Any], int, set[str]]] = {
    "large batch, blocks of 32": ({}, 32, set()),
    "large batch, blocks of 16": ({"block_size": 16}, 24, set()),
    "short memory, blocks of 16": (
        {"block_size": 16, "num_gpu_blocks_override": 52, "max_num_seqs": 32},
        16,
        {"preempted"},
    ),
    "n-gram speculation, chunked prefill, blocks of 16": (
        {"block_size": 16, "speculative_config": NGRAM, "max_num_batched_tokens": 256},
        16,
        {"speculated"},
    ),
    "small batch, blocks of 64": ({"block_size": 64, "max_num_seqs": 4}, 12, set()),
    "chunked prefill, blocks of 128": (
        {"block_size": 128, "max_num_batched_tokens": 32, "max_num_seqs": 32},
        16,
        set(),
    ),
    "short memory": ({"num_gpu_blocks_override": 26}, 32, {"preempted"}),
    "short memory, chunked prefill": (
        {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 64, "max_num_seqs": 32},
        24,
        {"preempted"},
    ),
    "n-gram speculation": ({"speculative_config": NGRAM}, 32, {"speculated"}),
    "n-gram speculation, short memory, chunked prefill": (
        {
            "speculative_config": NGRAM,
            "num_gpu_blocks_override": 26,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 48,
        },
        16,
        {"preempted", "speculated"},
    ),
    "prompt chain": (CHAIN, 32, {"speculated"}),
    "prompt chain, short memory, chunked prefill": (
        {
            **CHAIN,
            "num_gpu_blocks_override": 26,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 48,
        },
        16,
        {"preempted", "speculated"},
    ),
}
# Of these `make test` runs the first ones, and continuous integration also the second ones.
FAST_WAYS = {"large batch, blocks of 32", "n-gram speculation, short memory, chunked prefill"}
CI_WAYS = {"short memory, blocks of 16", "chunked prefill, blocks of 128"}
MIN_FORKED_THREADS_PER_CHAT = 1.2
# Filled by the tests, read by the last one.
FORKED_THREADS: dict[str, int] = {}


def marks(way: str) -> list[pytest.MarkDecorator]:
    if way in FAST_WAYS:
        return []
    return [pytest.mark.ci if way in CI_WAYS else pytest.mark.slow]


@pytest.mark.parametrize("way", [pytest.param(way, marks=marks(way)) for way in WAYS])
def test_every_thread_equals_plain_decoding_of_its_prefix(way: str) -> None:
    engine_args, num_chats, expected = WAYS[way]
    engine = EngineProcess(**engine_args)
    try:
        run = engine.call(generate_threads, chats(num_chats), 300)
    finally:
        engine.close()

    differing = mismatches(run.threads)
    FORKED_THREADS[way] = sum(thread.is_child for thread in run.threads)
    # Shown with `pytest -o log_cli=true --log-cli-level=INFO`.
    logger.info(
        "%s: %d threads, %d of them forked, %d tokens, %d preemptions, %d draft tokens; "
        "ties within float noise: %d, largest gap %g",
        way,
        len(run.threads),
        FORKED_THREADS[way],
        sum(len(thread.generated) for thread in run.threads),
        run.preemptions,
        run.num_draft_tokens,
        len(differing),
        max((each.gap for each in differing), default=0.0),
    )
    # After a tie the thread goes its own way, so one tie can explain many tokens.
    assert all(each.gap < FLOAT_NOISE for each in differing)
    assert FORKED_THREADS[way] > 0
    assert (run.preemptions > 0) == ("preempted" in expected)
    assert (run.num_draft_tokens > 0) == ("speculated" in expected)
    assert run.state_after.free_blocks == run.state_after.kv_blocks
    assert run.state_after.threads == 0


def generate_with_rests(
    engine: OfflineEngine, messages: list[list[dict[str, str]]], max_tokens: int
) -> tuple[Run, int]:
    """Let threads rest where a step would have more than 18 tokens; count the rests."""
    scheduler = engine.scheduler
    scheduler.admission.policy = MostTokens(18)
    # Nothing counts as an overload, in which no thread rests.
    scheduler.pacing.memory_s = math.inf
    num_rests, plan = [0], scheduler.pacing.plan

    def counted(*args: Any) -> StepPlan:
        found: StepPlan = plan(*args)
        num_rests[0] += len(found.resting)
        return found

    scheduler.pacing.plan = counted
    return generate_threads(engine, messages, max_tokens), num_rests[0]


@pytest.mark.parametrize(
    "way",
    [
        "large batch, blocks of 32",
        pytest.param("n-gram speculation", marks=pytest.mark.ci),
        pytest.param("prompt chain", marks=pytest.mark.slow),
    ],
)
def test_threads_that_rest_continue_with_the_tokens_of_plain_decoding(way: str) -> None:
    engine = EngineProcess(**WAYS[way][0])
    try:
        run, num_rests = engine.call(generate_with_rests, chats(16), 300)
    finally:
        engine.close()

    assert num_rests > 20
    assert all(each.gap < FLOAT_NOISE for each in mismatches(run.threads))
    assert run.state_after.free_blocks == run.state_after.kv_blocks
    assert run.state_after.threads == 0


def test_enough_forked_threads_were_compared() -> None:
    if FAST_WAYS - FORKED_THREADS.keys():
        pytest.skip("only part of the runs was selected")

    num_chats = sum(WAYS[way][1] for way in FORKED_THREADS)
    assert sum(FORKED_THREADS.values()) >= MIN_FORKED_THREADS_PER_CHAT * num_chats
