"""Private names of vLLM that the experiments time or call."""

from __future__ import annotations

import inspect

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (LLMEngine, "step"),
        (LLMEngine, "add_request"),
        (LLMEngine, "abort_request"),
        (OutputProcessor, "process_outputs"),
        (Scheduler, "schedule"),
        (Scheduler, "update_from_output"),
        (Scheduler, "_preempt_request"),
        (CPUModelRunner, "_update_states"),
        (CPUModelRunner, "_prepare_inputs"),
        (CPUModelRunner, "_build_attention_metadata"),
        (CPUModelRunner, "_preprocess"),
        (CPUModelRunner, "_model_forward"),
        (CPUModelRunner, "_sample"),
        (CPUModelRunner, "_bookkeeping_sync"),
        (LogitsProcessors, "all"),
        (BaseIncrementalDetokenizer, "update"),
    ],
)
def test_a_part_of_a_step_is_still_called_so(owner: type, name: str) -> None:
    assert hasattr(owner, name)


def test_the_detokeniser_is_timed_where_it_is_defined() -> None:
    # An instance's own attribute would not be found through a subclass that overrides it.
    assert "update" in vars(BaseIncrementalDetokenizer)
    subclasses = BaseIncrementalDetokenizer.__subclasses__()
    assert subclasses
    assert not any("update" in vars(subclass) for subclass in subclasses)


def test_the_worker_of_an_engine_in_one_process_is_reached_through_its_executor() -> None:
    assert "self.driver_worker = WorkerWrapperBase" in inspect.getsource(UniProcExecutor)


def test_a_scheduler_is_answered_by_ids_and_sampled_tokens() -> None:
    fields = inspect.signature(ModelRunnerOutput).parameters

    assert {"req_ids", "req_id_to_index", "sampled_token_ids"} <= set(fields)
    assert "is_prefill_chunk" in inspect.getsource(Request)
    schedule = inspect.getsource(Scheduler)
    # Looked up anew for every row, so that it can be replaced while children wait.
    assert "self.kv_cache_manager.allocate_slots(" in schedule
