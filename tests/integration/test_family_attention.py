"""The whole engine through family attention, in float32: forked decoding equals plain decoding."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from apar_core.engine.offline_engine import OfflineEngine
from tests.integration.engine_process import EngineProcess
from tests.integration.plain_decoding import (
    FLOAT_NOISE,
    Run,
    chats,
    generate_threads,
    mismatches,
)
from tests.integration.serving.apar_process import TINY, serving
from tests.integration.serving.killed_streams import Victims, stream
from tests.integration.test_equality import WAYS

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# The embedded model's prompts are short, so that blocks of 32 tokens have short prefixes.
FAMILY: dict[str, Any] = {"attention": "family", "family": {"min_prefix_blocks": 1}}
DRAFTS = "attention: family: rows with drafts are read row by row"
NAMES = (
    "large batch, blocks of 32",
    "large batch, blocks of 16",
    "short memory, blocks of 16",
    "n-gram speculation, chunked prefill, blocks of 16",
    "short memory, chunked prefill",
    "n-gram speculation, short memory, chunked prefill",
    "prompt chain",
)


def family_arguments(way: str) -> dict[str, Any]:
    arguments = WAYS[way][0]
    additional = arguments.get("additional_config", {})
    settings = additional.get("apar", {}) | FAMILY
    return arguments | {"additional_config": additional | {"apar": settings}}


def generate_and_count(
    engine: OfflineEngine, messages: list[list[dict[str, str]]], max_tokens: int
) -> tuple[Run, dict[str, int]]:
    run = generate_threads(engine, messages, max_tokens)
    (counts,) = engine.llm.collective_rpc("family_counts")
    return run, counts


@pytest.mark.parametrize("way", NAMES)
def test_every_thread_equals_plain_decoding_of_its_prefix(way: str) -> None:
    _, num_chats, expected = WAYS[way]
    engine = EngineProcess(**family_arguments(way))
    try:
        run, counts = engine.call(generate_and_count, chats(num_chats), 300)
    finally:
        engine.close()

    differing = mismatches(run.threads)
    # Shown with `pytest -o log_cli=true --log-cli-level=INFO`.
    logger.info(
        "%s: %d threads, %d preemptions, %d draft tokens, %s; ties within float noise: %d",
        way,
        len(run.threads),
        run.preemptions,
        run.num_draft_tokens,
        counts,
        len(differing),
    )
    speculates = "speculated" in expected
    about_attention = [each for each in engine.warnings if each.startswith("attention")]
    assert about_attention == [DRAFTS] * speculates
    assert all(each.gap < FLOAT_NOISE for each in differing)
    assert (run.preemptions > 0) == ("preempted" in expected)
    assert (run.num_draft_tokens > 0) == ("speculated" in expected)
    assert run.state_after.free_blocks == run.state_after.kv_blocks
    assert run.state_after.threads == 0
    # With a chain of prompt tokens, every row of every step has drafts.
    assert (counts["shared_steps"] > 0) == (way != "prompt chain")
    assert counts["shared_steps"] <= counts["steps"]
    assert counts["shared_rows"] >= 2 * counts["shared_steps"]
    assert counts["saved_blocks"] >= counts["shared_steps"]


def test_an_engine_that_cannot_read_families_says_so_once_and_answers() -> None:
    engine = EngineProcess(
        additional_config={"apar": FAMILY}, kv_cache_dtype="fp8", dtype="bfloat16"
    )
    try:
        run = engine.call(generate_threads, chats(2), 40)
    finally:
        engine.close()

    assert engine.warnings == [
        "attention: family: KV blocks are read row by row, because of a KV cache of type fp8"
    ]
    assert run.threads


@pytest.mark.cluster
def test_a_stream_whose_replica_is_killed_continues_on_another_one(tmp_path: Path) -> None:
    model = TINY | {"replicas": 2, **FAMILY}
    with serving(tmp_path, model) as server:
        server.wait_for_replicas(2)
        expected = stream(server, "chat")
        for _ in range(3):
            server.wait_for_replicas(2)
            victims = Victims(server)
            answer = stream(server, "chat", 1, partial(victims.kill, replica=True))
            if server.record(answer.request_id)["continued"]:
                break

        assert answer.errors == []
        assert answer.text == expected.text
        assert answer.usage == expected.usage
        assert answer.apar == expected.apar
        assert server.record(answer.request_id)["continued"] >= 1
        server.wait_until_idle(2)
