"""vLLM's CPU offloading with forked answers: its connector and manager, copies by torch.

Transfers take some steps, so that threads wait for their KV and blocks are still read after their
thread has ended. A thread that waits for others continues with its id, which the connector knows
until the thread's earlier stores have ended.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.engine.replay import REPLAY, replay_args
from apar_core.formats.parallel_format import ParallelFormat
from apar_core.scheduler.core_state import CoreState, core_state
from apar_core.vllm_names import RequestStatus
from tests.fakes.block_scripts import MARKERS, MESSAGES, RESULTS, Client
from tests.integration.connector_loads import Loaded, count_loads
from tests.integration.engine_process import EngineProcess
from tests.integration.plain_decoding import FLOAT_NOISE, Run, chats, generate_threads, mismatches
from tests.integration.random_checkpoint import write_checkpoint
from tests.integration.test_joins import PENALTY, greedy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_CHATS = 16
BLOCK_SIZE = 32
SHORT_MEMORY: dict[str, Any] = {"num_gpu_blocks_override": 40, "max_num_seqs": 32}
# In steps: stores still run when a thread could continue.
LONG_TRANSFER = 80
JOINED_TEXTS = {
    # The organizer joins a worker that has ended, and waits for another one.
    "": "go<FORK-1>one</FORK-1>" + "x" * 40 + "<JOIN-1>" + "y" * 30 + "<FORK-2>2</FORK-2><JOIN-2>",
    "0": "<RETURN>r1</RETURN>",
    "1": "thoughts<RETURN>r2</RETURN>",
}


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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("random"), MARKERS, context_tokens=768, spread=0.3
    )


def _organizer(
    checkpoint: Path, definition: ParallelFormat, transfer_steps: int
) -> tuple[EngineProcess, list[list[int]], dict[str, Any]]:
    """Return an engine, prompts of organizers, and parameters that script their first tokens."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = [tokenizer.encode(f"Question {number} " * 6) for number in range(4)]
    script = {key: tokenizer.encode(text) for key, text in JOINED_TEXTS.items()}
    for key in ("0", "1"):
        script[key].append(tokenizer.eos_token_id)
    sampling = {
        "temperature": 0.0,
        "frequency_penalty": PENALTY,
        "max_tokens": 400,
        "allowed_token_ids": [*tokenizer.encode("abcdefghijkl"), tokenizer.eos_token_id],
        "extra_args": replay_args(script),
    }
    engine = EngineProcess(
        model=str(checkpoint),
        block_size=BLOCK_SIZE,
        logits_processors=[REPLAY],
        additional_config={"apar": {"parallel_format": definition.model_dump(mode="json")}},
        **offloading(transfer_steps),
    )
    return engine, prompts, sampling


def _organize(
    engine: OfflineEngine, prompts: list[list[int]], sampling: dict[str, Any], aborts: bool
) -> tuple[list[list[int]], list[int], CoreState]:
    """Return the answers, how many stores ran at each pause of an organizer, and the end.

    `aborts`: abort everything as soon as all organizers wait, and nothing runs but their stores.
    """
    scheduler = engine.scheduler
    # Clients may not name control tokens, but a model without training rarely says them by itself.
    engine._engine.input_processor._refuse_control_ids = lambda _params: None
    records: Any = scheduler.connector.connector_scheduler._req_status
    pause, update = scheduler.pause_thread, scheduler.update_from_output
    num_stores: list[int] = []

    def counted(thread: Any) -> None:
        num_stores.append(len(records[thread.request_id].transfer_jobs))
        pause(thread)

    def watched(*args: Any) -> Any:
        outputs = update(*args)
        if core_state(scheduler).waiting_parents == len(prompts) and not scheduler.requests:
            raise InterruptedError
        return outputs

    scheduler.pause_thread = counted
    if aborts:
        scheduler.update_from_output = watched
    answers: dict[int, Any] = {}
    try:
        answers.update(engine.stream([{"prompt_token_ids": each} for each in prompts], sampling))
    except InterruptedError:
        scheduler.update_from_output = update
    _run_dry(engine)
    texts = [list(answers[number][0].token_ids) for number in sorted(answers)]
    return texts, num_stores, core_state(scheduler)


@pytest.mark.parametrize("transfer_steps", [1, LONG_TRANSFER])
@pytest.mark.parametrize("definition", [RESULTS, MESSAGES], ids=lambda each: each.name)
def test_threads_that_continue_after_their_stores_equal_plain_decoding(
    checkpoint: Path, definition: ParallelFormat, transfer_steps: int
) -> None:
    engine, prompts, sampling = _organizer(checkpoint, definition, transfer_steps)
    try:
        texts, num_stores, end = engine.call(_organize, prompts, sampling, False)
    finally:
        engine.close()

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    end_id, allowed = tokenizer.eos_token_id, sampling["allowed_token_ids"]
    script = {key: tokenizer.encode(text) for key, text in JOINED_TEXTS.items()}
    for prompt, text in zip(prompts, texts, strict=True):
        client = Client(definition, script, tokenizer)
        joined = client.answer(prompt)
        # An organizer reads its workers' results, and the text has all that they have written.
        _, context, generated = next(each for each in reversed(client.contexts) if not each[0])
        behind = greedy(checkpoint, allowed, [*context, *generated], [], {end_id})[:-1]
        assert text == [*joined, *behind]
        assert behind
    assert len(num_stores) == 2 * len(prompts)
    assert all(num_stores) == (transfer_steps == LONG_TRANSFER)
    assert end.free_blocks == end.kv_blocks
    assert end.threads == end.waiting_parents == 0


def test_an_abort_while_threads_wait_for_their_stores_frees_every_block(checkpoint: Path) -> None:
    engine, prompts, sampling = _organizer(checkpoint, RESULTS, LONG_TRANSFER)
    try:
        texts, num_stores, end = engine.call(_organize, prompts, sampling, True)
        later, _, _ = engine.call(_organize, prompts, sampling, False)
    finally:
        engine.close()

    assert texts == []
    assert len(num_stores) == len(later) == len(prompts)
    assert end.free_blocks == end.kv_blocks
    assert end.threads == end.waiting_parents == 0


def test_vllm_refuses_its_own_worker_without_a_gpu() -> None:
    with pytest.raises(Exception, match="CPU Offloading is currently only supported on CUDA-alike"):
        EngineProcess(**offloading(spec="CPUOffloadingSpec")).close()
