"""Private and undocumented names of vLLM that `apar_core` leans on, each with its reason.

A vLLM upgrade that moves one of them fails here and says what changed; no engine is started.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
)
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    async_llm,
    llm_engine,
)
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, InprocClient, SyncMPClient
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestState
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState


@dataclass(frozen=True)
class Signature:
    """A function and its parameters as we call or override it; `ellipsis` allows more of them."""

    function: Callable[..., Any]
    parameters: str
    why: str


@dataclass(frozen=True)
class Attributes:
    """Attributes that a class or its constructor sets."""

    owner: type
    names: str
    why: str


@dataclass(frozen=True)
class Passage:
    """A piece of vLLM's source whose behaviour we build on; white space does not count."""

    where: Any
    pattern: str
    why: str


SIGNATURES = (
    # Overridden by ForkMixin.
    Signature(
        Scheduler._update_request_with_output,
        "self, request, new_token_ids, is_stale=False",
        "every sampled token passes here; a fork token opens a thread",
    ),
    Signature(
        AsyncScheduler._update_request_with_output,
        "self, request, new_token_ids, is_stale=False",
        "as above, where vLLM schedules ahead",
    ),
    Signature(
        Scheduler._get_local_prefix_cache_hit,
        "self, request",
        "a child's prefix hit is its parent's blocks",
    ),
    Signature(
        Scheduler._free_request,
        "self, request, delay_free_blocks=False",
        "a thread has ended, so a deferred child may start",
    ),
    Signature(Scheduler.add_request, "self, request", "opens a group; children join in"),
    Signature(
        Scheduler.finish_requests,
        "self, request_ids, finished_status",
        "an abort of a request reaches all its threads",
    ),
    Signature(
        Scheduler.schedule, "self, throttle_prefills=False", "a step is timed from its schedule"
    ),
    Signature(
        Scheduler.update_from_output,
        "self, scheduler_output, model_runner_output",
        "outputs of threads that a limit has ended are added",
    ),
    Signature(
        Scheduler.reset_prefix_cache,
        "self, reset_running_requests=False, reset_connector=False",
        "blocks kept for waiting children would keep the cache from being reset",
    ),
    # Built for each child and each resumed thread.
    Signature(
        Request.__init__,
        "self, request_id, prompt_token_ids, sampling_params, pooling_params, client_index=0, "
        "arrival_time=None, prompt_embeds=None, prompt_is_token_ids=None, mm_features=None, "
        "lora_request=None, cache_salt=None, priority=0, trace_headers=None, block_hasher=None, "
        "resumable=False, session_id=None, reasoning_ended=None, reasoning_parser_kwargs=None, "
        "abort_immediately=False, kv_hints=None",
        "a new one may belong to every thread",
    ),
    # Overridden by GatedQueue.
    Signature(PriorityRequestQueue.add_request, "self, request", "a request may stand outside"),
    Signature(PriorityRequestQueue.remove_requests, "self, requests", "an abort, also outside"),
    # Called by BlockSharing and core_state.
    Signature(
        KVCacheManager.allocate_slots,
        "self, request, num_new_tokens, num_new_computed_tokens=0, ...",
        "replaced on the instance: drops a child's reference once it has its blocks",
    ),
    Signature(KVCacheManager.get_blocks, "self, request_id", "the parent's blocks"),
    Signature(KVCacheManager.create_kv_cache_blocks, "self, blocks", "a prefix of them"),
    Signature(BlockPool.touch, "self, blocks", "keeps blocks alive for a waiting child"),
    Signature(BlockPool.free_blocks, "self, ordered_blocks", "and lets them go"),
    Signature(BlockPool.get_num_free_blocks, "self", "free KV blocks"),
    Signature(Scheduler.get_request_counts, "self", "threads running and waiting"),
    Signature(Request.update_block_hashes, "self", "completes what a child inherited"),
    # Overridden in the API process.
    Signature(InputProcessor.__init__, "self, vllm_config, ...", "where control tokens are found"),
    Signature(
        InputProcessor.process_inputs,
        "self, request_id, prompt, params, ...",
        "cleans the prompt and writes the fork parameters",
    ),
    Signature(OutputProcessor.add_request, "self, request, ...", "a request gets its tree"),
    Signature(
        OutputProcessor.process_outputs,
        "self, engine_core_outputs, ...",
        "threads are joined before vLLM sees their outputs",
    ),
    Signature(OutputProcessor.abort_requests, "self, request_ids, internal", "drops trees"),
    Signature(OutputProcessor._finish_request, "self, req_state", "drops a finished tree"),
    Signature(
        ChatCompletionRequest.to_sampling_params,
        "self, max_tokens, default_sampling_params",
        "wrapped: a chat with tools asks for no forks",
    ),
    Signature(
        ResponsesRequest.to_sampling_params,
        "self, default_max_tokens, default_sampling_params=None",
        "wrapped: a response with tools asks for no forks",
    ),
    Signature(EngineArgs.create_engine_config, "self, ...", "wrapped: adds the logits processor"),
    # Logits processors.
    Signature(process_dict_updates, "req_entries, batch_update, new_state", "follows the batch"),
    Signature(
        LogitsProcessor.__init__, "self, vllm_config, device, is_pin_memory", "how vLLM builds ours"
    ),
    Signature(LogitsProcessor.apply, "self, logits", "bans"),
    Signature(LogprobsLists.slice_request, "self, req_idx, num_positions", "rows"),
)

ATTRIBUTES = (
    Attributes(
        Scheduler,
        "requests running kv_cache_manager max_model_len scheduler_config max_num_running_reqs "
        "finished_req_ids_dict",
        "threads alive, their blocks, room for a child's tokens, ends reported to clients",
    ),
    Attributes(KVCacheManager, "block_pool coordinator", "the pool whose blocks are shared"),
    Attributes(KVCacheCoordinator, "single_type_managers", "one per kind of attention"),
    Attributes(SingleTypeKVCacheManager, "block_size", "tokens that share a block"),
    Attributes(BlockPool, "num_gpu_blocks", "how many blocks there are"),
    Attributes(
        Request,
        "_block_hasher block_hashes num_computed_tokens num_prompt_tokens num_tokens max_tokens "
        "all_token_ids sampling_params client_index arrival_time mm_features lora_request "
        "cache_salt priority status",
        "what a child takes from its parent, and how far the parent's KV reaches",
    ),
    Attributes(
        InputProcessor, "model_config tokenizer renderer generation_config_fields", "tokens"
    ),
    Attributes(OutputProcessor, "request_states tokenizer", "states of aborted requests"),
    Attributes(
        RequestState,
        "request_id external_req_id prompt_len queue output_kind",
        "records, pacing",
    ),
    Attributes(EngineCore, "scheduler", "core_state looks into it"),
)

# Every field of what we rebuild or copy. A field that is new in vLLM fails here, and needs a place.
FIELDS = {
    # Rebuilt by `RequestThreads`.
    EngineCoreOutput: {
        "of the request": "request_id new_token_ids finish_reason stop_reason",
        "joined over threads": "new_logprobs new_sampling_mask num_nans_in_logits",
        "of the root, at once": "new_prompt_logprobs_tensors prompt_token_id_logprobs events "
        "prefill_stats trace_headers",
        "of the root, at the end": "kv_transfer_params ec_transfer_params mm_cache_miss_hashes "
        "spec_decode_metrics",
        "only of requests that do not generate text": "pooling_output",
        "only of engines whose requests do not fork": "routed_experts",
    },
    # `ForkMixin` adds outputs, and makes one for a client that would get none in the step.
    EngineCoreOutputs: {
        "added to": "outputs",
        "of the step": "scheduler_stats timestamp weight_version finished_requests",
        "set by the engine's process": "engine_index utility_output wave_complete start_wave",
    },
    # Written by `ForkInputProcessor`; everything else is passed on as it is.
    EngineCoreRequest: {
        "changed": "prompt_token_ids sampling_params priority",
        "read": "request_id mm_features prompt_embeds resumable external_req_id",
        "passed on": "pooling_params arrival_time lora_request cache_salt data_parallel_rank "
        "prompt_is_token_ids client_index current_wave trace_headers reasoning_ended "
        "reasoning_parser_kwargs abort_immediately session_id kv_hints",
    },
    # Copied from a thread to its child by `build_child_request`.
    SamplingParams: {
        "changed for a child": "max_tokens min_tokens seed extra_args skip_reading_prefix_cache",
        "answered by the root alone": "prompt_logprobs prompt_logprob_token_ids "
        "prompt_logprob_start",
        "the same for each thread": "presence_penalty frequency_penalty repetition_penalty "
        "temperature watermarking _watermarking_skipped top_p top_k min_p stop_token_ids "
        "_eos_token_id _all_stop_token_ids logprobs logprob_token_ids logit_bias "
        "allowed_token_ids bad_words _bad_words_token_ids thinking_token_budget "
        "repetition_detection",
        "of the whole text, in the API process": "n stop detokenize skip_special_tokens "
        "spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval "
        "output_text_buffer_length flat_logprobs skip_clone",
        "not with forks": "ignore_eos structured_outputs trace_decode_token_ids "
        "routed_experts_prompt_start",
    },
}

PASSAGES = (
    Passage(
        async_llm.AsyncLLM._run_output_handler,
        r"self\._logger_ref = \[self\.logger_manager\] .* if logger_ref\[0\]: logger_ref\[0\]\.rec",
        "the requests that warm an engine up are kept out of its statistics",
    ),
    Passage(
        Scheduler.schedule,
        r"request_queue = self\.waiting if not request_queue or input_budget <= draft_slots: break",
        "what GatedQueue holds back is not offered: its truth, not its length, is asked for",
    ),
    Passage(
        Scheduler.get_request_counts,
        r"len\(self\.running\), len\(self\.waiting\)",
        "what GatedQueue holds back counts as waiting",
    ),
    Passage(
        Scheduler.schedule,
        r"new_computed_blocks, num_new_local_computed_tokens, request\.shared_prefix_boundary, "
        r"hit_diverged, \) = self\._get_local_prefix_cache_hit\(request\)",
        "a hit has four parts: blocks, tokens, boundary, diverged",
    ),
    Passage(
        Scheduler.schedule,
        r"allocate_slots\( request, num_tokens_past_hit, "
        r"num_new_computed_tokens=num_new_local_computed_tokens,",
        "ForkCounters reads the shared tokens from this keyword",
    ),
    Passage(
        Scheduler.schedule,
        r"has_scheduled_reqs=bool\(self\.running\)",
        "a fork is given this keyword as False: what is kept free is not kept from it",
    ),
    Passage(
        KVCacheManager.allocate_slots,
        r"if has_scheduled_reqs and request\.status in \( RequestStatus\.WAITING, "
        r"RequestStatus\.PREEMPTED, \): watermark_blocks = self\.watermark_blocks",
        "without it the watermark does not count",
    ),
    Passage(
        FullAttentionManager.add_local_computed_blocks,
        r"if self\._has_partial_local_hit\(new_computed_blocks, num_local_computed_tokens\):",
        "a hit that ends inside a block is copied on write: the fork's one copied block",
    ),
    Passage(
        Scheduler.update_from_output,
        r"new_token_ids, stopped = self\._update_request_with_output\(",
        "the returned tokens, no others, reach the API process",
    ),
    Passage(
        check_stop,
        r"last_token_id == sampling_params\.eos_token_id.*request\.num_output_tokens >= "
        r"request\.max_tokens",
        "an end token counts before a limit; raising max_tokens by one pays for a control token",
    ),
    Passage(
        BaseIncrementalDetokenizer.update,
        r"if stop_terminated and not self\.include_stop_str_in_output: .*new_token_ids\[:-1\]",
        "the last token of a stopped output is no text, so a finish travels without tokens",
    ),
    Passage(
        OutputProcessor.process_outputs,
        r"if req_state is None: .*continue",
        "outputs of threads whose request has ended are ignored",
    ),
    Passage(
        BadWordsState.add_request,
        r"if num_bad_words > max_num_bad_words: raise ValueError.*"
        r"if len\(flattened_tokens\) > max_total_tokens: raise ValueError",
        "the V2 worker dies above these limits, so the input processor checks them",
    ),
    Passage(
        InputProcessor._normalize_trace_replay_params,
        r"sampling_params\.ignore_eos = True",
        "a request whose tokens are given does not fork",
    ),
    Passage(
        RequestOutput.add,
        r"self\.kv_transfer_params = next_output\.kv_transfer_params",
        "what is reported at the end must be in the last output",
    ),
    Passage(
        async_llm.AsyncLLM.__init__,
        r"self\.input_processor = InputProcessor\(.*self\.output_processor = OutputProcessor\(",
        "our processors replace these names in the module",
    ),
    Passage(
        llm_engine.LLMEngine.__init__,
        r"self\.input_processor = InputProcessor\(.*self\.output_processor = OutputProcessor\(",
        "our processors replace these names in the module",
    ),
    Passage(
        EngineCoreProc,
        r"method := getattr\(self, method_name\)",
        "core_state is a method that we add to EngineCore",
    ),
)


def parameters(function: Callable[..., Any]) -> str:
    """Names and defaults, without annotations."""
    found = inspect.signature(function).parameters.values()
    return ", ".join(str(each.replace(annotation=inspect.Parameter.empty)) for each in found)


@pytest.mark.parametrize("expected", SIGNATURES, ids=lambda each: each.function.__qualname__)
def test_signature(expected: Signature) -> None:
    found, wanted = parameters(expected.function), expected.parameters
    if wanted.endswith(", ..."):
        assert found.startswith(wanted.removesuffix(", ...")), expected.why
    else:
        assert found == wanted, expected.why


@pytest.mark.parametrize("expected", ATTRIBUTES, ids=lambda each: each.owner.__name__)
def test_attributes(expected: Attributes) -> None:
    source = inspect.getsource(expected.owner)
    for name in expected.names.split():
        is_set = re.search(rf"\bself\.{name}\b(: [^\n]*?)? = ", source)
        declared = re.search(rf"^    {name}: ", source, re.MULTILINE)
        inherited = hasattr(expected.owner, name)
        assert is_set or declared or inherited, f"{name}: {expected.why}"


@pytest.mark.parametrize("struct", FIELDS, ids=lambda each: each.__name__)
def test_each_field_has_its_place(struct: Any) -> None:
    placed = " ".join(FIELDS[struct].values()).split()

    assert sorted(placed) == sorted(struct.__struct_fields__)


@pytest.mark.parametrize("expected", PASSAGES, ids=lambda each: each.where.__qualname__)
def test_passage(expected: Passage) -> None:
    source = " ".join(inspect.getsource(expected.where).split())

    assert re.search(expected.pattern, source), expected.why


def test_engines_look_their_processors_up_by_name() -> None:
    for module in (async_llm, llm_engine):
        assert issubclass(vars(module)["InputProcessor"], InputProcessor)
        assert issubclass(vars(module)["OutputProcessor"], OutputProcessor)


def test_every_client_of_the_engine_core_calls_utilities() -> None:
    assert hasattr(SyncMPClient, "call_utility")
    assert hasattr(AsyncMPClient, "call_utility_async")
    # Without a second process, OfflineEngine reaches the scheduler itself.
    assert re.search(r"self\.engine_core = EngineCore\(", inspect.getsource(InprocClient))


def test_values_that_are_written_out() -> None:
    assert LogprobsLists._fields == (
        "logprob_token_ids",
        "logprobs",
        "sampled_token_ranks",
        "cu_num_generated_tokens",
    )
    assert SamplingMaskLists._fields == ("token_ids", "offsets", "cu_num_generated_tokens")
    assert list(KVCacheBlocks.__dataclass_fields__) == ["blocks"]
    assert OutputProcessorOutput.__annotations__.keys() == {"request_outputs", "reqs_to_abort"}
    # Each needs a place in the order in which the threads' reasons make the request's.
    assert {reason.name for reason in FinishReason} == {
        "STOP",
        "LENGTH",
        "ABORT",
        "ERROR",
        "REPETITION",
    }
    for status in ("RUNNING", "FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
        assert status in RequestStatus.__members__
    # Deltas of a stream are merged by it.
    assert parameters(RequestOutput.add) == "self, next_output, aggregate"
