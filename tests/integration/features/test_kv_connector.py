"""Prefill in one engine and forked decoding in another, which reads the first one's KV.

NIXL moves it from memory to memory, and is not among our pinned packages: put it on `PYTHONPATH`.

vLLM's ExampleConnector writes the KV of the prompt of every new request to files, of children too,
and reads it wherever a prompt is the same. After a preemption it looks for files that it never
wrote, with and without forks, so memory is not short here.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.scheduler.core_state import CoreState, core_state
from cluster.local_ray import free_port
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


def _prefill(engine: OfflineEngine) -> list[tuple[list[int], dict[str, Any]]]:
    """Return the tokens of each prompt, and where the KV of all of them can be read."""
    prompts = [
        engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats(NUM_CHATS)
    ]
    from vllm import SamplingParams

    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.llm.generate(
        inputs,
        SamplingParams(temperature=0.0, max_tokens=1, extra_args={"kv_transfer_params": wanted}),
        use_tqdm=False,
    )
    assert all(output.kv_transfer_params for output in outputs)
    return [
        (prompt, dict(output.kv_transfer_params or {}))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _decode(
    engine: OfflineEngine, prefilled: list[tuple[list[int], dict[str, Any]]]
) -> tuple[list[tuple[str, int]], list[tuple[str, int]], Loaded]:
    """Return texts and threads after KV that was loaded, and after KV that was computed here."""
    loaded = count_loads(engine)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in prefilled]
    sampling = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
    transfers = [{**sampling, "extra_args": {"kv_transfer_params": each}} for _, each in prefilled]
    after_load = engine.generate(prompts, transfers)
    assert engine.llm.reset_prefix_cache()
    num_loaded = len(loaded)
    alone = engine.generate(prompts, sampling)
    assert len(loaded) == num_loaded
    return _texts(after_load), _texts(alone), loaded


def _texts(answers: list[Any]) -> list[tuple[str, int]]:
    return [(each.text, each.record.statistics.threads) for each in answers]


def _end(engine: OfflineEngine) -> CoreState:
    """Step until nothing is kept for another engine; return the end."""
    core: Any = engine._engine
    while engine.scheduler.has_requests():
        core.step()
    return core_state(engine.scheduler)


@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
def test_a_second_engine_pulls_the_prompts_kv_with_nixl_and_forks() -> None:
    def engine(role: str) -> EngineProcess:
        return EngineProcess(
            environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "UCX_TLS": "tcp,sm,self"},
            kv_transfer_config={
                "kv_connector": "NixlConnector",
                "kv_role": role,
                "kv_buffer_device": "cpu",
            },
        )

    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    try:
        prefilled = prefill.call(_prefill)
        after_load, alone, loaded = decode.call(_decode, prefilled)
        ends = [prefill.call(_end), decode.call(_end)]
    finally:
        prefill.close()
        decode.close()

    assert after_load == alone
    assert sum(threads - 1 for _, threads in after_load) > NUM_CHATS
    assert [num_tokens for _, num_tokens in loaded] == [len(prompt) for prompt, _ in prefilled]
    assert not [thread for thread, _ in loaded if "~" in thread]
    assert all(end.free_blocks == end.kv_blocks for end in ends)
