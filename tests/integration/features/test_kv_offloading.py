"""vLLM's CPU offloading with forked answers: its connector and manager, copies by torch.

Transfers take some steps, so that threads wait for their KV and blocks are still read after their
thread has ended.
"""

from typing import Any

import pytest

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.scheduler.core_state import CoreState, core_state
from apar_core.vllm_names import RequestStatus
from tests.integration.connector_loads import Loaded, count_loads
from tests.integration.engine_process import EngineProcess
from tests.integration.plain_decoding import FLOAT_NOISE, Run, chats, generate_threads, mismatches

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_CHATS = 16
BLOCK_SIZE = 32
SHORT_MEMORY = {"num_gpu_blocks_override": 40, "max_num_seqs": 32}


def offloading(transfer_steps: int = 3, spec: str = "TorchOffloadingSpec") -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": 64 << 20,
                "spec_name": spec,
                "spec_module_path": "tests.integration.torch_offloading",
                "transfer_steps": transfer_steps,
                "offload_prompt_only": False,
            },
        }
    }


def _answer_twice(engine: OfflineEngine) -> tuple[Run, Run, Loaded]:
    """Answer all chats, lose what the engine's own cache has, and answer them again."""
    loaded = count_loads(engine)
    first = generate_threads(engine, chats(NUM_CHATS), 200)
    _run_dry(engine)
    assert engine.llm.reset_prefix_cache()
    second = generate_threads(engine, chats(NUM_CHATS), 200)
    _run_dry(engine)
    return first, second, loaded


def _run_dry(engine: OfflineEngine) -> None:
    """Step until no transfer is left."""
    core: Any = engine._engine
    for _ in range(200):
        if not engine.scheduler.has_requests():
            return
        core.step()
    raise AssertionError("the scheduler keeps stepping without requests")


def _abort_while_loading(engine: OfflineEngine, of_child: bool) -> tuple[bool, CoreState]:
    """Abort everything when a thread waits for its KV; return whether one did, and the end."""
    scheduler = engine.scheduler
    prompts = [
        {
            "prompt_token_ids": engine.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=False
            )
        }
        for chat in chats(NUM_CHATS)
    ]
    sampling = [{"temperature": 0.0, "max_tokens": 200}] * NUM_CHATS
    engine.generate(prompts, sampling)
    _run_dry(engine)
    assert engine.llm.reset_prefix_cache()
    answers = engine.stream(prompts, sampling)
    is_loading = False
    update = scheduler.update_from_output

    def watched(*args: Any) -> Any:
        nonlocal is_loading
        outputs = update(*args)
        loading = [
            request
            for request in scheduler.requests.values()
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and ("~" in request.request_id) == of_child
        ]
        if loading:
            is_loading = True
            raise InterruptedError
        return outputs

    scheduler.update_from_output = watched
    try:
        for _ in answers:
            pass
    except InterruptedError:
        pass
    scheduler.update_from_output = update
    _run_dry(engine)
    return is_loading, core_state(scheduler)


@pytest.mark.parametrize("is_short", [False, True], ids=["long memory", "short memory"])
def test_threads_that_load_their_kv_equal_plain_decoding(is_short: bool) -> None:
    engine = EngineProcess(
        block_size=BLOCK_SIZE, **offloading(), **(SHORT_MEMORY if is_short else {})
    )
    try:
        first, second, loaded = engine.call(_answer_twice)
    finally:
        engine.close()

    for run in (first, second):
        assert sum(thread.is_child for thread in run.threads) > NUM_CHATS
        assert all(each.gap < FLOAT_NOISE for each in mismatches(run.threads))
        assert run.state_after.threads == 0
    assert second.state_after.free_blocks == second.state_after.kv_blocks
    assert any("~" not in thread for thread, _ in loaded)
    # Children too: the block that ends with their own first token.
    assert any("~" in thread for thread, _ in loaded)
    assert (first.preemptions > 0) == is_short


@pytest.mark.parametrize("of_child", [False, True], ids=["root", "child"])
def test_an_abort_while_kv_is_loaded_frees_every_block(of_child: bool) -> None:
    engine = EngineProcess(block_size=BLOCK_SIZE, **offloading(), **SHORT_MEMORY)
    try:
        was_loading, end = engine.call(_abort_while_loading, of_child)
    finally:
        engine.close()

    assert was_loading
    assert end.threads == end.deferred_threads == 0
    assert end.free_blocks == end.kv_blocks


def test_vllm_refuses_its_own_worker_without_a_gpu() -> None:
    with pytest.raises(Exception, match="CPU Offloading is currently only supported on CUDA-alike"):
        EngineProcess(**offloading(spec="CPUOffloadingSpec")).close()
