"""Private and undocumented names and behaviour of vLLM that this project relies on.

A vLLM upgrade that changes one of them fails here and says why it matters. No engine is started.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client.multiprocess import MultiProcessCollector
from vllm import envs
from vllm.config import ModelConfig, SchedulerConfig, VllmConfig
from vllm.config.aux_output import AuxOutputConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.model_executor.layers.attention import Attention
from vllm.outputs import RequestOutput
from vllm.renderers.params import TokenizeParams
from vllm.sampling_params import SamplingParams
from vllm.utils import random_uuid
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention import selector
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import register_backend
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
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
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, InprocClient, MPClient, SyncMPClient
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import (
    OutputProcessor,
    OutputProcessorOutput,
    RequestOutputCollector,
    RequestState,
)
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics import loggers
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, RequestStateStats
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput, SamplingMaskLists
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import block_table as v1_block_table
from vllm.v1.worker.gpu import block_table as v2_block_table
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample import logits_processor as v2_processors
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerWrapperBase
from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

from apar_core import vllm_names
from apar_core.engine.plugin import install_processors
from apar_core.engine.resume_request import stop_reason
from apar_core.journal import EndReason
from apar_core.vllm_names import (
    _MODULE_OF,
    NAMES,
    OVERRIDES,
    STABLE,
    SUPPORTED,
    make_arg_parser,
    vllm_version,
)
from deployments.replica.stream_start import HANDLERS

VERSION = ".".join(vllm_version().split(".")[:2])
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Signature:
    """Function that we call or override, with its parameters; a final `...` allows more."""

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
    """Piece of vLLM's source whose behaviour we rely on; white space is ignored."""

    where: Any
    pattern: str
    why: str


SIGNATURES = (
    # Overridden by ForkMixin.
    Signature(
        Scheduler._update_request_with_output,
        "self, request, new_token_ids, is_stale=False",
        "sees every sampled token; a fork token opens a thread",
    ),
    Signature(
        AsyncScheduler._update_request_with_output,
        "self, request, new_token_ids, is_stale=False",
        "the same, where vLLM schedules ahead",
    ),
    Signature(
        Scheduler._get_local_prefix_cache_hit,
        "self, request, ...",
        "a child's prefix hit is its parent's blocks",
    ),
    Signature(
        Scheduler._free_request,
        "self, request, delay_free_blocks=False",
        "a thread has ended, so a waiting child may start",
    ),
    Signature(Scheduler.add_request, "self, request", "opens a group"),
    Signature(
        Scheduler.finish_requests,
        "self, request_ids, finished_status",
        "an abort of a request ends all its threads",
    ),
    Signature(
        expand_batch_to_tokens,
        "x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0",
        "replaced on CPU, where vLLM's does nothing",
    ),
    Signature(Scheduler.schedule, "self, throttle_prefills=False", "starts the step timer"),
    Signature(
        Scheduler.update_from_output,
        "self, scheduler_output, model_runner_output",
        "adds outputs of threads that a limit ended",
    ),
    Signature(
        Scheduler.reset_prefix_cache,
        "self, reset_running_requests=False, reset_connector=False",
        "releases the blocks of waiting children, which would block the reset",
    ),
    Signature(
        Scheduler.set_pause_state,
        "self, pause_state",
        "a pause that waits for running requests waits for their children",
    ),
    Signature(
        Scheduler.make_stats,
        "self, spec_decoding_stats=None, ...",
        "made when it is known what a step sends",
    ),
    Signature(
        Scheduler.make_spec_decoding_stats,
        "self, spec_decoding_stats, ...",
        "counts on from steps that sent nothing",
    ),
    # Built for each child and each resumed thread.
    Signature(
        Request.__init__,
        "self, request_id, prompt_token_ids, sampling_params, pooling_params, client_index=0, "
        "arrival_time=None, prompt_embeds=None, prompt_is_token_ids=None, mm_features=None, "
        "lora_request=None, cache_salt=None, priority=0, trace_headers=None, block_hasher=None, "
        "resumable=False, session_id=None, reasoning_ended=None, reasoning_parser_kwargs=None, "
        "abort_immediately=False, kv_hints=None",
        "a new parameter may have to be copied to every thread",
    ),
    # Overridden by GatedQueue.
    Signature(PriorityRequestQueue.add_request, "self, request", "a request may be held back"),
    Signature(
        PriorityRequestQueue.remove_requests,
        "self, requests",
        "an abort, also while held back",
    ),
    # Called by BlockSharing and core_state.
    Signature(
        KVCacheManager.allocate_slots,
        "self, request, num_new_tokens, num_new_computed_tokens=0, ...",
        "replaced on the instance: drops a child's reference when it has its blocks",
    ),
    Signature(KVCacheManager.get_blocks, "self, request_id", "the parent's blocks"),
    Signature(KVCacheManager.create_kv_cache_blocks, "self, blocks", "a prefix of these blocks"),
    Signature(BlockPool.touch, "self, blocks", "keeps blocks alive for a waiting child"),
    Signature(BlockPool.free_blocks, "self, ordered_blocks", "frees them"),
    Signature(BlockPool.get_num_free_blocks, "self", "free KV blocks"),
    Signature(Scheduler.get_request_counts, "self", "running and waiting threads"),
    Signature(Request.update_block_hashes, "self", "completes the hashes that a child inherits"),
    # Overridden in the API process.
    Signature(
        OutputProcessor._update_stats_from_output,
        "self, req_state, engine_core_output, engine_core_timestamp, iteration_stats",
        "divides the time between tokens that came together",
    ),
    Signature(InputProcessor.__init__, "self, vllm_config, ...", "finds the control tokens"),
    Signature(
        InputProcessor._validate_params,
        "self, params, supported_tasks",
        "what fails here is the request's fault",
    ),
    Signature(
        StructuredOutputManager.accept_tokens,
        "self, request, new_token_ids",
        "replaced on the instance: notes dead ends of grammars",
    ),
    Signature(
        InputProcessor.process_inputs,
        "self, request_id, prompt, params, ...",
        "cleans the prompt and writes the fork parameters",
    ),
    Signature(OutputProcessor.add_request, "self, request, ...", "a request gets its tree"),
    Signature(
        OutputProcessor.process_outputs,
        "self, engine_core_outputs, ...",
        "joins the outputs of threads",
    ),
    Signature(OutputProcessor.abort_requests, "self, request_ids, internal", "drops trees"),
    Signature(OutputProcessor._finish_request, "self, req_state", "drops a finished tree"),
    Signature(
        ChatCompletionRequest.to_sampling_params,
        "self, max_tokens, default_sampling_params",
        "wrapped: a chat with tools does not fork",
    ),
    Signature(
        ResponsesRequest.to_sampling_params,
        "self, default_max_tokens, default_sampling_params=None",
        "wrapped: a response with tools does not fork",
    ),
    Signature(
        TokenizeParams._text_len_check,
        "self, tokenizer, text",
        "wrapped: a text that will be truncated is cut before it is tokenized",
    ),
    *(
        Signature(request.build_tok_params, "self, model_config", "wrapped: bounds the text")
        for request in (TokenizeCompletionRequest, TokenizeChatRequest, DetokenizeRequest)
    ),
    Signature(EngineArgs.create_engine_config, "self, ...", "wrapped: adds the logits processor"),
    # Logits processors.
    Signature(process_dict_updates, "req_entries, batch_update, new_state", "follows the batch"),
    Signature(
        LogitsProcessor.__init__, "self, vllm_config, device, is_pin_memory", "vLLM builds ours"
    ),
    Signature(LogitsProcessor.apply, "self, logits", "bans"),
    # The same for the V2 model runner.
    Signature(v2_processors.LogitsProcessor.__init__, "self, vllm_config, req_states", "as above"),
    Signature(
        v2_processors.LogitsProcessor.add_request, "self, req_idx, sampling_params", "new slots"
    ),
    Signature(v2_processors.LogitsProcessor.apply_staged_writes, "self", "before each step"),
    Signature(v2_processors.LogitsProcessor.apply, "self, logits, ctx", "bans"),
    Signature(LogprobsLists.slice_request, "self, req_idx, num_positions", "rows"),
    # Overridden by the virtual executor; timed by `apar experiment calibrate`.
    Signature(Executor._init_executor, "self", "no workers"),
    Signature(
        Executor.collective_rpc,
        "self, method, timeout=None, args=(), kwargs=None, non_block=False",
        "the engine core asks for supported tasks",
    ),
    Signature(Executor.execute_model, "self, scheduler_output, non_block=False", "a step"),
    Signature(Executor.sample_tokens, "self, grammar_output, non_block=False", "its output"),
    Signature(Executor.get_kv_cache_specs, "self", "size of a KV block"),
    Signature(Executor.determine_available_memory, "self", "the override decides"),
    Signature(Executor.get_supported_kv_cache_layouts, "self", "any"),
    Signature(Executor.set_kv_cache_layout, "self, layout_name, ...", "ignored"),
    Signature(Executor.initialize_from_config, "self, kv_cache_configs", "allocates nothing"),
    Signature(Executor.compile_or_warm_up_model, "self", "nothing to compile"),
    Signature(Executor.supports_async_scheduling, "", "outputs are futures"),
    # Family attention: overridden or called by apar_core/attention.
    *(
        Signature(
            builder.build,
            "self, common_prefix_len, common_attn_metadata, fast_build=False",
            "adds the families of a step",
        )
        for builder in (
            CPUAttentionMetadataBuilder,
            FlashAttentionMetadataBuilder,
            TritonAttentionMetadataBuilder,
        )
    ),
    *(
        Signature(
            implementation.forward,
            "self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, "
            "output_block_scale=None",
            "reads families in two passes",
        )
        for implementation in (CPUAttentionBackendImpl, FlashAttentionImpl, TritonAttentionImpl)
    ),
    Signature(
        FlashAttentionMetadataBuilder.update_block_table,
        "self, metadata, blk_table, slot_mapping",
        "another group's rows have other families",
    ),
    Signature(
        FlashAttentionMetadataBuilder.get_cudagraph_support,
        "vllm_config, kv_cache_spec",
        "no full CUDA graphs",
    ),
    Signature(Worker.init_device, "self", "builds the runner, whose block tables we watch"),
    Signature(
        Worker.determine_available_memory, "self", "sizes the KV cache beside a step's memory"
    ),
    Signature(
        EngineCore.add_request, "self, request, request_wave=0", "wrapped to ask workers before it"
    ),
    Signature(
        EngineCore.collective_rpc,
        "self, method, timeout=None, args=(), kwargs=None",
        "asks the workers which layers read families",
    ),
    Signature(Worker.load_model, "self, ...", "builds the model with our backends"),
    Signature(Worker.compile_or_warm_up_model, "self", "compiles our kernels before"),
    Signature(register_backend, "backend, class_path=None, ...", "puts ours in vLLM's place"),
    Signature(
        merge_attn_states,
        "output, prefix_output, prefix_lse, suffix_output, suffix_lse, ...",
        "merges the two passes",
    ),
    Signature(
        flash_attn_varlen_func,
        "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, ...",
        "both passes; the other arguments are given by name",
    ),
    Signature(
        v2_block_table.BlockTables.append_block_ids,
        "self, req_index, new_block_ids, overwrite",
        "the copy of the block tables on the host",
    ),
)


ATTRIBUTES = (
    Attributes(
        OffloadingConnectorScheduler,
        "_req_status",
        "a thread that waited continues with its id when the connector has no record of it",
    ),
    Attributes(OffloadingConnector, "connector_scheduler", "has these records"),
    Attributes(MultiConnector, "_connectors", "has connectors with these records"),
    Attributes(prometheus_client.Counter, "_value", "apar_core/metrics/counting.py counts in it"),
    Attributes(
        prometheus_client.Histogram,
        "_sum _buckets _upper_bounds",
        "apar_core/metrics/counting.py counts in them",
    ),
    Attributes(
        Scheduler,
        "requests running kv_cache_manager max_model_len scheduler_config max_num_running_reqs "
        "finished_req_ids_dict pause_state kv_holding_waiting grammar_compile_error_reqs "
        "structured_output_manager connector finished_req_ids",
        "live threads, their blocks, room for a child's tokens, ends reported to clients, pauses, "
        "constraints that fail",
    ),
    Attributes(KVCacheManager, "block_pool coordinator", "the pool whose blocks are shared"),
    Attributes(KVCacheCoordinator, "single_type_managers", "one per attention type"),
    Attributes(SingleTypeKVCacheManager, "block_size", "tokens per block"),
    Attributes(BlockPool, "num_gpu_blocks", "number of blocks"),
    Attributes(KVCacheBlock, "ref_cnt is_null", "blocks that an ended thread frees"),
    Attributes(
        SchedulerOutput, "num_scheduled_tokens total_num_scheduled_tokens", "a step's batch"
    ),
    Attributes(SchedulerConfig, "get_scheduler_cls async_scheduling policy", "our scheduler"),
    Attributes(VllmConfig, "use_v2_model_runner aux_output_config", "how tokens are banned"),
    Attributes(
        v2_processors.LogitsContext,
        "expanded_idx_mapping input_ids idx_mapping_np seq_lens_upper_bound_np",
        "rows of V2's logits",
    ),
    Attributes(
        v2_processors.LogitsProcRequestState, "device max_num_reqs prompt_len", "slots of V2"
    ),
    Attributes(AuxOutputConfig, "enable_return_routed_experts", "such engines do not fork"),
    Attributes(
        Request,
        "_block_hasher block_hashes num_computed_tokens num_prompt_tokens num_tokens max_tokens "
        "all_token_ids sampling_params client_index arrival_time mm_features lora_request "
        "cache_salt priority status",
        "copied to a child, or used to share the parent's KV",
    ),
    Attributes(
        InputProcessor, "model_config tokenizer renderer generation_config_fields", "tokens"
    ),
    Attributes(OutputProcessor, "request_states tokenizer", "states of aborted requests"),
    Attributes(
        RequestState,
        "request_id external_req_id prompt_len queue output_kind parent_req request_index",
        "records, pacing, choices of one prompt",
    ),
    Attributes(RequestStateStats, "num_generation_tokens", "trees travel in a subclass of it"),
    Attributes(EngineCore, "scheduler", "core_state reads it"),
    # Timed or called by cluster/lab/experiments.
    Attributes(LLMEngine, "step add_request abort_request", "requests and steps, one by one"),
    Attributes(Scheduler, "_preempt_request", "preemptions are counted"),
    # Read by the virtual executor.
    Attributes(
        SchedulerOutput,
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens "
        "finished_req_ids preempted_req_ids kv_cache_block_copies",
        "what a step computes and copies",
    ),
    Attributes(
        NewRequestData,
        "req_id prompt_token_ids sampling_params block_ids num_computed_tokens",
        "a new row and its script",
    ),
    Attributes(
        CachedRequestData,
        "req_ids resumed_req_ids new_block_ids num_computed_tokens num_output_tokens",
        "where a row stands, also after a preemption",
    ),
    Attributes(EngineCore, "model_executor batch_queue", "its executor, and steps in flight"),
    # Family attention.
    Attributes(
        CommonAttentionMetadata,
        "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len "
        "max_seq_len block_table_tensor slot_mapping causal seq_lens_cpu_upper_bound req_idx "
        "mm_req_doc_ranges",
        "the rows of a step",
    ),
    Attributes(Attention, "impl kv_cache get_attn_backend", "the layers to warm up"),
    Attributes(ModelConfig, "use_mla rswa_window dtype", "which models fit"),
    *(
        Attributes(
            implementation,
            "sliding_window alibi_slopes logits_soft_cap sinks attn_type kv_cache_dtype scale "
            "head_size num_heads",
            "which layers are read row by row",
        )
        for implementation in (CPUAttentionBackendImpl, FlashAttentionImpl, TritonAttentionImpl)
    ),
    Attributes(TritonAttentionImpl, "chunk_lookback", "as above"),
    Attributes(FlashAttentionImpl, "vllm_flash_attn_version", "which FlashAttention"),
    Attributes(FlashAttentionMetadataBuilder, "fa4_hd256 block_size", "as above"),
    Attributes(CPUAttentionMetadataBuilder, "isa block_size", "layout of the KV cache"),
    Attributes(v1_block_table.BlockTable, "block_table block_size", "on GPU and host"),
    Attributes(
        v2_block_table.BlockTables, "input_block_tables block_sizes num_blocks", "on the GPU"
    ),
)


# Every field of the structs that we rebuild or copy. A new field in vLLM fails here: decide where
# it belongs, and for `SamplingParams` whether `can_continue` allows it.
FIELDS = {
    # Rebuilt by `RequestThreads`. `HeldOutputs` keeps those of the last step, and holds no output
    # in which one is set that matters in each step (`has_only_tokens`).
    EngineCoreOutput: {
        "of the request": "request_id new_token_ids finish_reason stop_reason",
        "joined over threads": "new_logprobs new_sampling_mask num_nans_in_logits",
        "of the root, at once": "new_prompt_logprobs_tensors prompt_token_id_logprobs events "
        "prefill_stats trace_headers",
        "of the root, at the end": "kv_transfer_params ec_transfer_params mm_cache_miss_hashes "
        "spec_decode_metrics",
        "of the thread that failed": "error",
        "only of requests that do not generate text": "pooling_output",
        "only of engines whose requests do not fork": "routed_experts",
    },
    # `ForkMixin` adds outputs, and creates it for a client without outputs in the step.
    EngineCoreOutputs: {
        "added to": "outputs",
        "of the step": "scheduler_stats timestamp weight_version finished_requests",
        "set by the engine's process": "engine_index utility_output wave_complete start_wave",
    },
    # Changed by `ForkInputProcessor`.
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


NEW_FIELDS = {"error": "0.33"}
"""Fields that only vLLM from this version has."""


PASSAGES = (
    Passage(
        AsyncLLM.__init__,
        r"self\.input_processor = InputProcessor\(self\.vllm_config, .*"
        r"self\.output_processor = OutputProcessor\( renderer\.tokenizer, log_stats=",
        "the input processor says whose metrics the output processor behind it exports",
    ),
    Passage(
        init_app_state,
        r"state\.engine_client = engine_client",
        "the middleware of vLLM's own server finds its engine there",
    ),
    Passage(
        init_entrypoints_middleware,
        r"for middleware in args\.middleware: .*app\.add_middleware\(imported\)",
        "vLLM's own server takes our middleware by its name, in front of its check of API keys",
    ),
    Passage(
        VllmConfig._get_v2_model_runner_unsupported_features,
        r'in \( ?"suffix", .*"custom_class",? ?\): unsupported',
        "the V2 model runner refuses the chain of prompt tokens: if no longer, see "
        "docs/upgrade-vllm.md, Speculation on the V2 model runner",
    ),
    Passage(
        CPUAttentionBackendImpl.do_kv_cache_update,
        r"kv_cache = kv_cache\.view\(\(num_blocks, num_kv_heads, block_size \* 2, -1\)\) "
        r"key_cache, value_cache = kv_cache\.chunk\(2, dim=2\)",
        "family attention reads keys and values of a block one behind the other",
    ),
    *(
        Passage(
            implementation.forward,
            pattern,
            "family attention takes keys and values from the same views",
        )
        for implementation, pattern in (
            (
                FlashAttentionImpl,
                r"kv_cache\.transpose\(1, 2\)\.split\(self\.head_size, dim=-1\)",
            ),
            (TritonAttentionImpl, r"kv_cache = kv_cache\.transpose\(1, 2\) .*kv_cache\.split\("),
        )
    ),
    Passage(
        selector._cached_get_attn_backend,
        r"@cache def _cached_get_attn_backend\(",
        "cleared, so that a model gets our backends",
    ),
    Passage(
        WorkerWrapperBase.init_worker,
        r"load_general_plugins\(\).*resolve_obj_by_qualname\( parallel_config\.worker_cls",
        "the worker's class is a setting",
    ),
    Passage(
        UniProcExecutor._init_executor,
        r"self\.driver_worker = WorkerWrapperBase\(",
        "the worker, which counts what families saved, is in the engine core's process",
    ),
    Passage(
        v1_block_table.BlockTable.get_device_tensor,
        r"return self\.block_table\.gpu\[:num_reqs\]",
        "a step's table begins at the address of the runner's",
    ),
    Passage(
        v2_block_table.BlockTables.gather_block_tables,
        r"out = tuple\(self\.input_block_tables\).*return tuple\(bt\[:num_reqs_padded\] for bt",
        "the same in the V2 runner",
    ),
    Passage(
        v2_block_table.BlockTables.append_block_ids,
        r"start = self\.num_blocks\.np\[i, req_index\] if not overwrite else 0 .*"
        r"stage_write\(req_index, start, block_ids\)",
        "repeated on the host",
    ),
    Passage(
        DefaultModelState.prepare_attn,
        r"num_reqs = input_batch\.num_reqs .*req_idx=input_batch\.idx_mapping_np",
        "finds the rows of a step in the copy on the host",
    ),
    Passage(
        Scheduler.update_from_output,
        r"if \( stats := self\.make_stats\( spec_decoding_stats, .* \) is not None:",
        "returns None there, and attaches the statistics when it is known what the step sends",
    ),
    Passage(
        IterationStats.update_from_output,
        r"else: itl = engine_core_timestamp - req_stats\.last_token_ts "
        r"self\.inter_token_latencies_iter\.append\(itl\)",
        "divided among tokens that came together",
    ),
    Passage(
        prometheus_client.Counter.inc,
        r"if amount < 0: raise ValueError\(.* self\._value\.inc\(amount\) if exemplar:",
        "apar_core/metrics/counting.py does the same, without exemplars",
    ),
    Passage(
        prometheus_client.Histogram.observe,
        r"self\._sum\.inc\(amount\) for i, bound in enumerate\(self\._upper_bounds\): "
        r"if amount <= bound: self\._buckets\[i\]\.inc\(1\) if exemplar:",
        "apar_core/metrics/counting.py does the same, without exemplars",
    ),
    Passage(
        prometheus_client.Counter.labels,
        r"self\._metrics\[str_labelvalues\] = self\.__class__\(",
        "a series has the class of its family, so it counts with counting.py too",
    ),
    Passage(
        async_llm.AsyncLLM._run_output_handler,
        r"self\._logger_ref = \[self\.logger_manager\] .* if logger_ref\[0\]: logger_ref\[0\]\.rec",
        "keeps warm-up requests out of the statistics",
    ),
    Passage(
        Scheduler.schedule,
        r"request_queue = self\.waiting if not request_queue or input_budget <= draft_slots: break",
        "vLLM asks for the truth of GatedQueue, not its length, so held requests are not popped",
    ),
    Passage(
        Scheduler.get_num_unfinished_requests,
        r"PauseState\.PAUSED_NEW: .*num_waiting = len\(self\.kv_holding_waiting\)",
        "a pause ends when no thread of a request that has begun is in that queue",
    ),
    Passage(
        Scheduler.schedule,
        r"request_queue = self\.kv_holding_waiting if not request_queue and "
        r"self\._pause_state == PauseState\.UNPAUSED: request_queue = self\.waiting",
        "which also runs while no new request may",
    ),
    Passage(
        Scheduler.get_request_counts,
        r"len\(self\.running\), len\(self\.waiting\)",
        "requests held back by GatedQueue count as waiting",
    ),
    Passage(
        Scheduler.schedule,
        r"new_computed_blocks, num_new_local_computed_tokens, request\.shared_prefix_boundary, "
        r"hit_diverged, \) = self\._get_local_prefix_cache_hit\(request(, max_cache_hit_length)?\)",
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
        "set to False for a fork, so that the watermark does not apply",
    ),
    Passage(
        KVCacheManager.allocate_slots,
        r"if has_scheduled_reqs and request\.status in \( RequestStatus\.WAITING, "
        r"RequestStatus\.PREEMPTED, \): watermark_blocks = self\.watermark_blocks",
        "without it the watermark does not apply",
    ),
    Passage(
        FullAttentionManager.add_local_computed_blocks,
        r"if self\._has_partial_local_hit\(new_computed_blocks, num_local_computed_tokens\):",
        "a hit that ends inside a block is copied on write: the one copied block of a fork",
    ),
    Passage(
        Scheduler.update_from_output,
        r"new_token_ids, stopped = self\._update_request_with_output\(",
        "only the returned tokens reach the API process",
    ),
    Passage(
        check_stop,
        r"last_token_id == sampling_params\.eos_token_id.*request\.num_output_tokens >= "
        r"request\.max_tokens",
        "an end token is checked before the limit; raising max_tokens allows a control token",
    ),
    Passage(
        BaseIncrementalDetokenizer.update,
        r"if stop_terminated and not self\.include_stop_str_in_output: .*new_token_ids\[:-1\]",
        "the last token of a stopped output is not text, so the last output has no tokens",
    ),
    Passage(
        BaseIncrementalDetokenizer.update,
        r"for new_token_id in new_token_ids: self\.token_ids\.append\(new_token_id\) "
        r"self\.output_text \+= self\.decode_next\(new_token_id\)",
        "tagged streams learn the text of each token from decode_next",
    ),
    Passage(
        BaseIncrementalDetokenizer.update,
        r"if truncate_to != -1: self\.output_text = self\.output_text\[:truncate_to\]",
        "output_text is the answer without its stop string",
    ),
    Passage(
        BaseIncrementalDetokenizer.get_next_output_text,
        r"if last_offset < length: .*return self\.output_text\[last_offset:length\]",
        "the text of a thread since the last call",
    ),
    Passage(
        OutputProcessor.process_outputs,
        r"if req_state is None: .*continue",
        "outputs of threads after their request's end are ignored",
    ),
    Passage(
        Sampler.apply_sampling_params,
        r"for processor in self\.logits_processors: logits = processor\.apply\(logits, ctx\).*"
        r"self\.sampling_states\.apply_temperature",
        "V2's processors see the logits before the temperature",
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
        "a request with given tokens does not fork",
    ),
    Passage(
        RequestOutput.add,
        r"self\.kv_transfer_params = next_output\.kv_transfer_params",
        "the last output must have the fields reported at the end",
    ),
    Passage(
        async_llm.AsyncLLM.__init__,
        r"self\.input_processor = InputProcessor\(.*self\.output_processor = OutputProcessor\(",
        "the module's names, which our processors replace",
    ),
    Passage(
        llm_engine.LLMEngine.__init__,
        r"self\.input_processor = InputProcessor\(.*self\.output_processor = OutputProcessor\(",
        "the module's names, which our processors replace",
    ),
    Passage(
        GPUModelRunner.__init__,
        r"self\.drafter = create_custom_proposer\(.*self\.rejection_sampler = RejectionSampler\( "
        r"self\.sampler, self\.speculative_config, self\.device",
        "PromptChain replaces the sampler that is built right after it",
    ),
    Passage(
        GPUModelRunner.load_model,
        r"self\.drafter\.load_model\(self\.model\)",
        "a custom proposer gets the model, to which PromptChain adds its embeddings",
    ),
    Passage(
        apply_top_k_top_p,
        r"return apply_top_k_top_p_pytorch\(logits, k, p, allow_cpu_sync=is_cpu\)",
        "workers on CPUs replace this function, which sorts the vocabulary",
    ),
    Passage(
        GPUModelRunner._bookkeeping_sync,
        r"self\.discard_request_mask\.np\[:num_reqs\] .*"
        r"self\.input_batch\.generators\.get\(int\(i\)\) if gen is not None: gen\.set_offset\(",
        "workers on CPUs take these generators out of the batch while it is sampled",
    ),
    Passage(
        GPUModelRunner._sample,
        r"self\.rejection_sampler\( spec_decode_metadata, draft_probs, logits, sampling_metadata,",
        "ChainSampler reads the logits at the prompt tokens",
    ),
    Passage(
        GPUModelRunner.propose_draft_token_ids,
        r'"custom_class": assert isinstance\(sampled_token_ids, list\) .*\.propose\( '
        r"sampled_token_ids, self\.input_batch\.num_tokens_no_spec, "
        r"self\.input_batch\.token_ids_cpu, slot_mappings=slot_mappings,",
        "threads come in the order of the logits; the tokens have been waited for",
    ),
    Passage(
        Worker.determine_available_memory,
        r"memory_profiling\( self\.init_snapshot, .*self\.model_runner\.profile_run\(",
        "what is taken meanwhile counts as used since the worker's start",
    ),
    Passage(
        FlashAttentionImpl.forward,
        r"if attn_metadata is None: # Profiling run\. return output\.fill_\(0\)",
        "no attention is profiled, so family attention takes its memory itself",
    ),
    Passage(
        EngineCoreProc,
        r"method := getattr\(self, method_name\)",
        "core_state becomes a method of EngineCore",
    ),
)


def parameters(function: Callable[..., Any]) -> str:
    """Return names and defaults without annotations."""
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
def test_every_field_is_handled(struct: Any) -> None:
    placed = " ".join(FIELDS[struct].values()).split()
    expected = [
        name
        for name in placed
        if SUPPORTED.index(NEW_FIELDS.get(name, SUPPORTED[0])) <= SUPPORTED.index(VERSION)
    ]

    assert sorted(expected) == sorted(struct.__struct_fields__)


@pytest.mark.parametrize("expected", PASSAGES, ids=lambda each: each.where.__qualname__)
def test_passage(expected: Passage) -> None:
    source = " ".join(inspect.getsource(expected.where).split())

    assert re.search(expected.pattern, source), expected.why


def test_every_name_exists_and_has_the_type_that_mypy_sees() -> None:
    tree = ast.parse(inspect.getsource(vllm_names))
    (types,) = [
        node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECK" in ast.dump(node)
    ]
    seen = {
        (node.module, alias.asname.removeprefix("_"))
        for node in types.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }

    assert seen == {(module, name) for module, names in NAMES.items() for name in names.split()}
    for _, name in seen:
        assert getattr(vllm_names, name) is not None


@cache
def our_sources() -> list[tuple[Path, ast.Module]]:
    return [
        (path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8")))
        for package in ("apar_core", "cluster", "deployments")
        for path in (ROOT / package).rglob("*.py")
        if path != Path(vllm_names.__file__)
    ]


def test_no_other_module_imports_an_unstable_module_of_vllm() -> None:
    found = []
    for path, tree in our_sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [str(node.module)]
            else:
                continue
            found += [
                f"{path}:{node.lineno} {module}"
                for module in modules
                if module.partition(".")[0] == "vllm" and module not in STABLE
            ]

    assert found == []


def test_no_other_module_uses_a_private_attribute_of_vllm() -> None:
    """What `super()` has is in OVERRIDES, and `self` is one of our own classes."""
    classes: list[type[Any]] = [
        each for name in _MODULE_OF if inspect.isclass(each := getattr(vllm_names, name))
    ]
    classes.append(SamplingParams)
    private = {
        name
        for owner in classes
        for name in re.findall(r"\bself\.(_[a-z]\w*)|^    (_[a-z]\w*)\b", source_of(owner), re.M)
        for name in name
    }
    assert {"_block_hasher", "_logger_ref", "_preempt_request", "_bad_words_token_ids"} <= private

    found = [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for path, tree in our_sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in private
        and ast.unparse(node.value) not in ("self", "cls", "super()")
    ]

    assert found == []


def source_of(owner: type) -> str:
    return "".join(
        inspect.getsource(base) for base in owner.__mro__ if base.__module__.startswith("vllm.")
    )


def subclasses(owner: type[Any]) -> Iterator[type[Any]]:
    for each in type.__subclasses__(owner):
        yield each
        yield from subclasses(each)


def test_every_private_method_that_we_replace_is_listed() -> None:
    for path, tree in our_sources():
        if any(isinstance(node, ast.ClassDef) and node.bases for node in tree.body):
            names = {name.id for name in ast.walk(tree) if isinstance(name, ast.Name)}
            if names & _MODULE_OF.keys():
                import_module(".".join(path.with_suffix("").parts))
    replaced: dict[str, set[str]] = {}
    for name in _MODULE_OF:
        owner = getattr(vllm_names, name)
        if not inspect.isclass(owner):
            continue
        theirs = {member for base in owner.__mro__ for member in vars(base)}
        ours = {
            member
            for each in subclasses(owner)
            if each.__module__.partition(".")[0] in ("apar_core", "cluster", "deployments")
            for member in vars(each)
            if re.match("_(?!abc_)[a-z]", member) and member in theirs
        }
        if ours:
            replaced[name] = ours

    assert replaced == {name: set(methods.split()) for name, methods in OVERRIDES.items()}


def test_engines_look_up_their_processors_by_name() -> None:
    install_processors()
    for module in (async_llm, llm_engine):
        assert issubclass(vars(module)["InputProcessor"], InputProcessor)
        assert issubclass(vars(module)["OutputProcessor"], OutputProcessor)


def test_engine_core_clients_can_call_utilities() -> None:
    assert hasattr(SyncMPClient, "call_utility")
    assert hasattr(AsyncMPClient, "call_utility_async")
    # OfflineEngine reads the scheduler directly.
    assert re.search(r"self\.engine_core = EngineCore\(", inspect.getsource(InprocClient))


def test_named_fields_and_values() -> None:
    assert LogprobsLists._fields == (
        "logprob_token_ids",
        "logprobs",
        "sampled_token_ranks",
        "cu_num_generated_tokens",
    )
    assert SamplingMaskLists._fields == ("token_ids", "offsets", "cu_num_generated_tokens")
    assert list(KVCacheBlocks.__dataclass_fields__) == ["blocks"]
    assert OutputProcessorOutput.__annotations__.keys() == {"request_outputs", "reqs_to_abort"}
    # `thread_outputs._PRECEDENCE` has all of them.
    assert {reason.name for reason in FinishReason} == {
        "STOP",
        "LENGTH",
        "ABORT",
        "ERROR",
        "REPETITION",
    }
    for status in ("RUNNING", "FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
        assert status in RequestStatus.__members__
    # The limits on bad words in the V2 worker.
    assert {"VLLM_MAX_NUM_BAD_WORDS", "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS"} <= set(dir(envs))
    # Merges the outputs of a paced stream.
    assert parameters(RequestOutput.add) == "self, next_output, aggregate"


def test_the_http_application_can_be_built_around_an_engine() -> None:
    assert list(inspect.signature(build_app).parameters) == [
        "args",
        "supported_tasks",
        "model_config",
    ]
    assert inspect.iscoroutinefunction(init_app_state)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    assert hasattr(args, "scheduler_cls")
    assert hasattr(args, "kv_cache_memory_bytes")


@pytest.mark.parametrize(
    ("serving", "method"),
    [
        (OpenAIServingChat, HANDLERS["openai_serving_chat"]),
        (OpenAIServingCompletion, HANDLERS["openai_serving_completion"]),
        (OpenAIServingResponses, HANDLERS["openai_serving_responses"]),
        (AnthropicServingMessages, HANDLERS["anthropic_serving_messages"]),
    ],
)
def test_streams_can_be_started_with_their_first_output(serving: Any, method: str) -> None:
    assert inspect.iscoroutinefunction(getattr(serving, method))
    assert {"message", "err_type", "status_code", "param"} <= set(
        inspect.signature(serving.create_error_response).parameters
    )


def test_requests_accept_vllm_xargs_and_a_request_id() -> None:
    for request in (ChatCompletionRequest, CompletionRequest):
        assert {"vllm_xargs", "stop_token_ids", "allowed_token_ids", "logit_bias"} <= set(
            request.model_fields
        )
    assert '"X-Request-Id"' in inspect.getsource(BaseServing._base_request_id)


def test_the_usage_chunk_of_a_stream_is_recognized_by_its_bytes() -> None:
    chunk = ChatCompletionStreamResponse(id="i", model="m", choices=[])

    assert '"choices":[]' in chunk.model_dump_json(exclude_unset=True)


def test_a_requests_output_queue_can_be_replaced() -> None:
    assert list(inspect.signature(RequestOutputCollector.put).parameters) == ["self", "output"]
    source = inspect.getsource(RequestState)
    assert "self.queue = queue" in source
    assert "self.output_kind = output_kind" in source
    assert isinstance(AsyncLLM.errored, property)


def test_a_requests_last_output_and_its_answer_can_be_completed() -> None:
    source = inspect.getsource(RequestState.make_request_output)
    assert "self._new_completion_output(new_token_ids, finish_reason, stop_reason)" in source
    assert source.count("self._new_request_output(") == 2
    assert "metrics=self.stats" in inspect.getsource(RequestState._new_request_output)


def test_outputs_can_be_processed_before_the_engine_core_has_the_request() -> None:
    assert "self.is_prefilling = True" in inspect.getsource(RequestState)
    assert "tracing_enabled" in inspect.signature(OutputProcessor).parameters
    source = inspect.getsource(AsyncLLM._add_request)
    assert source.index("output_processor.add_request") < source.index("add_request_async")
    assert "if iteration_stats is None" in inspect.getsource(
        OutputProcessor._update_stats_from_output
    )


def test_a_choice_has_n_1_and_a_parent() -> None:
    assert "child_sampling_params.n = 1" in inspect.getsource(ParentRequest)


@pytest.mark.parametrize(("token_id", "named"), [(3, None), (77, 77), (50, None)])
def test_our_stop_reason_equals_vllms(token_id: int, named: int | None) -> None:
    params = SamplingParams(max_tokens=50, stop_token_ids=[77])
    params._eos_token_id = 3
    request = Request("r", [1, 2], params, None)
    request.append_output_token_ids(token_id)

    check_stop(request, 100)

    assert request.stop_reason == stop_reason(params, [token_id]) == named


def test_finish_reasons_keep_their_values() -> None:
    # Journals carry them between gateway and replicas of different versions.
    assert {each.name: int(each) for each in EndReason} == {"STOP": 0, "LENGTH": 1, "ABORT": 2}
    assert all(int(FinishReason[each.name]) == each for each in EndReason)


def test_a_shutdown_aborts_the_requests_of_the_engine_core() -> None:
    source = inspect.getsource(EngineCoreProc._handle_shutdown)
    assert "_send_abort_outputs(aborted_reqs)" in source
    # With a drain time it would continue them and be killed in between.
    assert EngineArgs.shutdown_timeout == 0
    # It exits with status 0, which its client also treats as a dead engine.
    assert "engine_dead = True" in inspect.getsource(MPClient.start_engine_core_monitor)
    # A client's abort gives no output.
    assert "_send_abort" not in inspect.getsource(EngineCore.abort_requests)


def test_beams_are_named_after_their_search() -> None:
    source = inspect.getsource(BeamSearchOnlineMixin.beam_search)

    assert 'request_id_batch = f"{request_id}-{random_uuid()}"' in source
    assert 'request_id_item = f"{request_id_batch}-beam-{i}"' in source
    assert set(random_uuid()) <= set("0123456789abcdef")


@pytest.mark.parametrize("serving", [OpenAIServingChat, OpenAIServingCompletion])
def test_events_of_a_stream_are_single_lines_and_end_with_done(serving: type) -> None:
    source = inspect.getsource(serving)

    assert 'yield "data: [DONE]\\n\\n"' in source
    assert 'yield f"data: {' in source


def test_vllm_counts_with_the_classes_of_its_logger_in_the_api_process() -> None:
    # A logger of the caller's that derives from vLLM's takes its place.
    assert PrometheusStatLogger._counter_cls is prometheus_client.Counter
    assert PrometheusStatLogger._histogram_cls is prometheus_client.Histogram
    made = inspect.getsource(StatLoggerManager.__init__)
    assert "isinstance(global_stat_logger, PrometheusStatLogger)" in made
    assert "if not custom_prometheus_logger:" in made
    # `counting` leaves exemplars out, and vLLM counts only by these two methods.
    source = inspect.getsource(loggers)
    assert "exemplar" not in source
    assert "self._counter_cls(" in source
    assert "self._histogram_cls(" in source
    assert not re.search(r"\b(counter|histogram)_\w+(\[\w+\])?\.(?!inc|observe|labels)", source)
    assert "stat_loggers" in inspect.signature(AsyncLLM.from_vllm_config).parameters


def test_the_files_of_prometheus_client_can_be_chosen_late() -> None:
    # Values look their class up when they are made, and the folder when they open a file.
    assert "values.ValueClass(" in inspect.getsource(prometheus_client.metrics.Counter)
    make: Any = prometheus_client.values.MultiProcessValue
    value = make()
    assert "multiprocess_mode" in inspect.signature(value.__init__).parameters
    source = inspect.getsource(prometheus_client.values.MultiProcessValue)
    assert "os.environ.get('PROMETHEUS_MULTIPROC_DIR')" in source
    assert "files" in inspect.signature(MultiProcessCollector.merge).parameters
    # What a value needs to be written later than it changes.
    assert "self._file.write_value(self._key, self._value, self._timestamp)" in source


def test_a_model_runner_output_can_be_built_by_hand() -> None:
    fields = inspect.signature(ModelRunnerOutput).parameters

    assert {"req_ids", "req_id_to_index", "sampled_token_ids"} <= set(fields)
    assert "is_prefill_chunk" in inspect.getsource(Request)
    schedule = inspect.getsource(Scheduler)
    # Looked up for every row, so it can be replaced on the instance.
    assert "self.kv_cache_manager.allocate_slots(" in schedule


def test_the_number_of_sequences_comes_from_the_fields_that_the_gateway_counts() -> None:
    """`RequestBody.num_sequences`: `n` answers to each of `prompt` and `prompt_embeds`."""
    for request in (ChatCompletionRequest, CompletionRequest):
        assert "n" in request.model_fields
        assert "best_of" not in request.model_fields
    assert {"prompt", "prompt_embeds"} <= set(CompletionRequest.model_fields)
    # The texts and whole decimal numbers that pydantic takes as integers.
    assert CompletionRequest.model_validate({"prompt": "x", "n": "3"}).n == 3
    assert CompletionRequest.model_validate({"prompt": "x", "n": 2.0}).n == 2
