"""Every unstable name of vLLM that this project uses, in one place.

vLLM promises stability for a few modules only (`STABLE`). All other names are imported from here,
and `tests/contract/test_vllm_names.py` checks each against the installed vLLM. Our classes that
replace private methods are listed in `OVERRIDES`; private attributes of vLLM's objects are read
and written by the functions at the end. `docs/upgrade-vllm.md` says how to support another version.

A name is imported when it is first used, because each of vLLM's processes needs only some of them.
"""

from __future__ import annotations

from argparse import Action, ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from apar_core.errors import EngineError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from vllm import SamplingParams
    from vllm.config.lora import MaxLoRARanks as MaxLoRARanks
    from vllm.engine.arg_utils import EngineArgs as EngineArgs
    from vllm.engine.protocol import EngineClient as EngineClient
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state as init_app_state
    from vllm.entrypoints.launchers.app import build_app as build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser as make_arg_parser
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionRequest as ChatCompletionRequest,
    )
    from vllm.entrypoints.openai.models.protocol import LoRAModulePath as LoRAModulePath
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest as ResponsesRequest
    from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest as DetokenizeRequest
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest as TokenizeChatRequest
    from vllm.entrypoints.serve.tokenize.protocol import (
        TokenizeCompletionRequest as TokenizeCompletionRequest,
    )
    from vllm.lora.layers import BaseLayerWithLoRA as BaseLayerWithLoRA
    from vllm.lora.layers import ClassificationHeadWithLoRA as ClassificationHeadWithLoRA
    from vllm.lora.layers import LogitsProcessorWithLoRA as LogitsProcessorWithLoRA
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA as VocabParallelEmbeddingWithLoRA
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA as BaseLinearLayerWithLoRA
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU as PunicaWrapperCPU
    from vllm.lora.request import LoRARequest as LoRARequest
    from vllm.model_executor.layers.attention import Attention as Attention
    from vllm.model_executor.layers.linear import ColumnParallelLinear as ColumnParallelLinear
    from vllm.model_executor.layers.linear import (
        MergedColumnParallelLinear as MergedColumnParallelLinear,
    )
    from vllm.model_executor.layers.linear import QKVParallelLinear as QKVParallelLinear
    from vllm.model_executor.layers.linear import ReplicatedLinear as ReplicatedLinear
    from vllm.model_executor.layers.linear import RowParallelLinear as RowParallelLinear
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod as UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead as ParallelLMHead
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        VocabParallelEmbedding as VocabParallelEmbedding,
    )
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.tokenizers import cached_tokenizer_from_config as cached_tokenizer_from_config
    from vllm.tokenizers import get_tokenizer as get_tokenizer
    from vllm.transformers_utils.config import get_config as get_config
    from vllm.transformers_utils.config import get_hf_text_config as get_hf_text_config
    from vllm.usage.usage_lib import UsageContext as UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser as FlexibleArgumentParser
    from vllm.utils.math_utils import cdiv as cdiv
    from vllm.utils.torch_utils import direct_register_custom_op as direct_register_custom_op
    from vllm.v1.attention.backend import AttentionCGSupport as AttentionCGSupport
    from vllm.v1.attention.backend import CommonAttentionMetadata as CommonAttentionMetadata
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as CPUAttentionBackend
    from vllm.v1.attention.backends.cpu_attn import (
        CPUAttentionBackendImpl as CPUAttentionBackendImpl,
    )
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata as CPUAttentionMetadata
    from vllm.v1.attention.backends.cpu_attn import (
        CPUAttentionMetadataBuilder as CPUAttentionMetadataBuilder,
    )
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend as FlashAttentionBackend
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl as FlashAttentionImpl
    from vllm.v1.attention.backends.flash_attn import (
        FlashAttentionMetadata as FlashAttentionMetadata,
    )
    from vllm.v1.attention.backends.flash_attn import (
        FlashAttentionMetadataBuilder as FlashAttentionMetadataBuilder,
    )
    from vllm.v1.attention.backends.triton_attn import (
        TritonAttentionBackend as TritonAttentionBackend,
    )
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl as TritonAttentionImpl
    from vllm.v1.attention.backends.triton_attn import (
        TritonAttentionMetadata as TritonAttentionMetadata,
    )
    from vllm.v1.attention.backends.triton_attn import (
        TritonAttentionMetadataBuilder as TritonAttentionMetadataBuilder,
    )
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states as merge_attn_states
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks as KVCacheBlocks
    from vllm.v1.core.kv_cache_manager import KVCacheManager as KVCacheManager
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler as AsyncScheduler
    from vllm.v1.core.sched.interface import PauseState as PauseState
    from vllm.v1.core.sched.output import SchedulerOutput as SchedulerOutput
    from vllm.v1.core.sched.request_queue import PriorityRequestQueue as PriorityRequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler as Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import (
        FullAttentionManager as FullAttentionManager,
    )
    from vllm.v1.engine import EngineCoreEvent as EngineCoreEvent
    from vllm.v1.engine import EngineCoreEventType as EngineCoreEventType
    from vllm.v1.engine import EngineCoreOutput as EngineCoreOutput
    from vllm.v1.engine import EngineCoreOutputs as EngineCoreOutputs
    from vllm.v1.engine import EngineCoreRequest as EngineCoreRequest
    from vllm.v1.engine import FinishReason as FinishReason
    from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLM
    from vllm.v1.engine.async_llm import InputStreamError as InputStreamError
    from vllm.v1.engine.core import EngineCore as EngineCore
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer as IncrementalDetokenizer
    from vllm.v1.engine.exceptions import EngineGenerateError as EngineGenerateError
    from vllm.v1.engine.input_processor import InputProcessor as InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor as OutputProcessor
    from vllm.v1.engine.output_processor import OutputProcessorOutput as OutputProcessorOutput
    from vllm.v1.engine.output_processor import RequestOutputCollector as RequestOutputCollector
    from vllm.v1.engine.output_processor import RequestState as RequestState
    from vllm.v1.executor.abstract import Executor as Executor
    from vllm.v1.kv_cache_interface import AttentionSpec as AttentionSpec
    from vllm.v1.kv_cache_interface import FullAttentionSpec as FullAttentionSpec
    from vllm.v1.kv_cache_interface import KVCacheConfig as KVCacheConfig
    from vllm.v1.metrics.loggers import PrometheusStatLogger as PrometheusStatLogger
    from vllm.v1.metrics.stats import IterationStats as IterationStats
    from vllm.v1.metrics.stats import RequestStateStats as RequestStateStats
    from vllm.v1.metrics.stats import SchedulerStats as SchedulerStats
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT as EMPTY_MODEL_RUNNER_OUTPUT
    from vllm.v1.outputs import LogprobsLists as LogprobsLists
    from vllm.v1.outputs import ModelRunnerOutput as ModelRunnerOutput
    from vllm.v1.outputs import SamplerOutput as SamplerOutput
    from vllm.v1.outputs import SamplingMaskLists as SamplingMaskLists
    from vllm.v1.request import Request as Request
    from vllm.v1.request import RequestStatus as RequestStatus
    from vllm.v1.sample.logits_processor import BatchUpdate as BatchUpdate
    from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates as process_dict_updates
    from vllm.v1.sample.metadata import SamplingMetadata as SamplingMetadata
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_only as apply_top_k_only
    from vllm.v1.sample.ops.topk_topp_sampler import (
        apply_top_k_top_p_pytorch as apply_top_k_top_p_pytorch,
    )
    from vllm.v1.sample.rejection_sampler import RejectionSampler as RejectionSampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata as SpecDecodeMetadata
    from vllm.v1.spec_decode.metrics import SpecDecodingStats as SpecDecodingStats
    from vllm.v1.worker.cpu_worker import CPUWorker as CPUWorker
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext as LogitsContext
    from vllm.v1.worker.gpu.sample.logits_processor.interface import (
        LogitsProcessor as _V2LogitsProcessor,
    )
    from vllm.v1.worker.gpu.sample.logits_processor.interface import (
        LogitsProcRequestState as LogitsProcRequestState,
    )
    from vllm.v1.worker.gpu_worker import Worker as Worker

    V2LogitsProcessor = _V2LogitsProcessor

SUPPORTED = ("0.32", "0.33")
"""Versions of vLLM whose names have been checked, as major.minor."""

STABLE = frozenset(
    {"vllm", "vllm.config", "vllm.exceptions", "vllm.outputs", "vllm.sampling_params"}
)
"""Modules of vLLM that any module of this project may import."""

# The names above by their module, for imports at run time.
NAMES = {
    "vllm.config.lora": "MaxLoRARanks",
    "vllm.engine.arg_utils": "EngineArgs",
    "vllm.engine.protocol": "EngineClient",
    "vllm.entrypoints.launchers.api_server.app_state": "init_app_state",
    "vllm.entrypoints.launchers.app": "build_app",
    "vllm.entrypoints.launchers.cli_args": "make_arg_parser",
    "vllm.entrypoints.openai.chat_completion.protocol": "ChatCompletionRequest",
    "vllm.entrypoints.openai.models.protocol": "LoRAModulePath",
    "vllm.entrypoints.openai.responses.protocol": "ResponsesRequest",
    "vllm.entrypoints.serve.tokenize.protocol": "DetokenizeRequest TokenizeChatRequest "
    "TokenizeCompletionRequest",
    "vllm.lora.layers": "BaseLayerWithLoRA ClassificationHeadWithLoRA LogitsProcessorWithLoRA "
    "VocabParallelEmbeddingWithLoRA",
    "vllm.lora.layers.base_linear": "BaseLinearLayerWithLoRA",
    "vllm.lora.punica_wrapper.punica_cpu": "PunicaWrapperCPU",
    "vllm.lora.request": "LoRARequest",
    "vllm.model_executor.layers.attention": "Attention",
    "vllm.model_executor.layers.linear": "ColumnParallelLinear MergedColumnParallelLinear "
    "QKVParallelLinear ReplicatedLinear RowParallelLinear UnquantizedLinearMethod",
    "vllm.model_executor.layers.vocab_parallel_embedding": "ParallelLMHead VocabParallelEmbedding",
    "vllm.tokenizers": "cached_tokenizer_from_config get_tokenizer",
    "vllm.transformers_utils.config": "get_config get_hf_text_config",
    "vllm.usage.usage_lib": "UsageContext",
    "vllm.utils.argparse_utils": "FlexibleArgumentParser",
    "vllm.utils.math_utils": "cdiv",
    "vllm.utils.torch_utils": "direct_register_custom_op",
    "vllm.v1.attention.backend": "AttentionCGSupport CommonAttentionMetadata",
    "vllm.v1.attention.backends.cpu_attn": "CPUAttentionBackend CPUAttentionBackendImpl "
    "CPUAttentionMetadata CPUAttentionMetadataBuilder",
    "vllm.v1.attention.backends.flash_attn": "FlashAttentionBackend FlashAttentionImpl "
    "FlashAttentionMetadata FlashAttentionMetadataBuilder",
    "vllm.v1.attention.backends.triton_attn": "TritonAttentionBackend TritonAttentionImpl "
    "TritonAttentionMetadata TritonAttentionMetadataBuilder",
    "vllm.v1.attention.ops.merge_attn_states": "merge_attn_states",
    "vllm.v1.core.kv_cache_manager": "KVCacheBlocks KVCacheManager",
    "vllm.v1.core.sched.async_scheduler": "AsyncScheduler",
    "vllm.v1.core.sched.interface": "PauseState",
    "vllm.v1.core.sched.output": "SchedulerOutput",
    "vllm.v1.core.sched.request_queue": "PriorityRequestQueue",
    "vllm.v1.core.sched.scheduler": "Scheduler",
    "vllm.v1.core.single_type_kv_cache_manager": "FullAttentionManager",
    "vllm.v1.engine": "EngineCoreEvent EngineCoreEventType EngineCoreOutput EngineCoreOutputs "
    "EngineCoreRequest FinishReason",
    "vllm.v1.engine.async_llm": "AsyncLLM InputStreamError",
    "vllm.v1.engine.core": "EngineCore",
    "vllm.v1.engine.detokenizer": "IncrementalDetokenizer",
    "vllm.v1.engine.exceptions": "EngineGenerateError",
    "vllm.v1.engine.input_processor": "InputProcessor",
    "vllm.v1.engine.output_processor": "OutputProcessor OutputProcessorOutput "
    "RequestOutputCollector RequestState",
    "vllm.v1.executor.abstract": "Executor",
    "vllm.v1.kv_cache_interface": "AttentionSpec FullAttentionSpec KVCacheConfig",
    "vllm.v1.metrics.loggers": "PrometheusStatLogger",
    "vllm.v1.metrics.stats": "IterationStats RequestStateStats SchedulerStats",
    "vllm.v1.outputs": "EMPTY_MODEL_RUNNER_OUTPUT LogprobsLists ModelRunnerOutput "
    "SamplerOutput SamplingMaskLists",
    "vllm.v1.request": "Request RequestStatus",
    "vllm.v1.sample.logits_processor": "BatchUpdate LogitsProcessor",
    "vllm.v1.sample.logits_processor.builtin": "process_dict_updates",
    "vllm.v1.sample.metadata": "SamplingMetadata",
    "vllm.v1.sample.ops.topk_topp_sampler": "apply_top_k_only apply_top_k_top_p_pytorch",
    "vllm.v1.sample.rejection_sampler": "RejectionSampler",
    "vllm.v1.spec_decode.metadata": "SpecDecodeMetadata",
    "vllm.v1.spec_decode.metrics": "SpecDecodingStats",
    "vllm.v1.worker.cpu_worker": "CPUWorker",
    "vllm.v1.worker.gpu.sample.logits_processor.interface": "LogitsContext V2LogitsProcessor "
    "LogitsProcRequestState",
    "vllm.v1.worker.gpu_worker": "Worker",
}
MOVED = {
    # vLLM 0.33
    "vllm.entrypoints.launchers.cli_args": "vllm.entrypoints.common.cli_args",
}
"""Modules of `NAMES` that a later version has renamed."""
_RENAMED = {"V2LogitsProcessor": "LogitsProcessor"}
"""Names that vLLM uses twice, by ours."""
_MODULE_OF = {name: module for module, names in NAMES.items() for name in names.split()}

OVERRIDES = {
    "AsyncLLM": "_add_request",
    "Executor": "_init_executor",
    "InputProcessor": "_validate_params",
    "OutputProcessor": "_finish_request _update_stats_from_output",
    "PrometheusStatLogger": "_counter_cls _histogram_cls",
    "Scheduler": "_free_request _get_local_prefix_cache_hit _update_request_with_output",
}
"""Private methods and attributes that our subclasses of a vLLM class replace."""


def vllm_version() -> str:
    """Return the version of the installed vLLM; its CPU build has another name in the metadata."""
    version: str = import_module("vllm").__version__
    return version


def is_supported(version: str) -> bool:
    """Return whether the names of a version have been checked; builds and patches do not matter."""
    return ".".join(version.split(".")[:2]) in SUPPORTED


def __getattr__(name: str) -> Any:
    """Import a name. Raises EngineError if this vLLM is not supported or lacks the name."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    version = vllm_version()
    if not is_supported(version):
        raise EngineError(
            f"vLLM {version} is installed, but forks use internals that were checked with vLLM "
            f"{' and '.join(SUPPORTED)} only; see docs/upgrade-vllm.md"
        )
    if module in MOVED and find_spec(module) is None:
        module = MOVED[module]
    try:
        value = getattr(import_module(module), _RENAMED.get(name, name))
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("vllm"):
            raise
        raise EngineError(f"vLLM {version} has no {module}.{name}: {error}") from error
    globals()[name] = value
    return value


def actions_of(parser: ArgumentParser) -> dict[str, Action]:
    """Return the arguments of a parser by the names of their values."""
    return {action.dest: action for action in parser._actions}


def patch_processors(input_processor: type, output_processor: type) -> None:
    """Let both of vLLM's engines build these processors.

    vLLM has no setting for the classes, so their names are replaced where it looks them up.
    """
    for engine in ("vllm.v1.engine.async_llm", "vllm.v1.engine.llm_engine"):
        names = vars(import_module(engine))
        names["InputProcessor"] = input_processor
        names["OutputProcessor"] = output_processor


@contextmanager
def replaced_adapter_kernels(name: str) -> Iterator[None]:
    """Let models that are built meanwhile take the kernels of LoRA from this class.

    vLLM asks its platform for the class by name and has no setting for it.
    """
    names = vars(import_module("vllm.lora.punica_wrapper.punica_selector"))
    original = names["current_platform"]

    class Platform:
        @staticmethod
        def get_punica_wrapper() -> str:
            return name

    names["current_platform"] = Platform
    try:
        yield
    finally:
        names["current_platform"] = original


_BOUNDED = "_apar_bounds_truncated_texts"


def bound_truncated_texts() -> None:
    """Cut a text to what the context can hold before it is tokenized, if it will be truncated.

    vLLM 0.32 does so only if the request says from which side. May be called more than once.
    """
    owner: Any = import_module("vllm.renderers.params").TokenizeParams
    check = owner._text_len_check
    if hasattr(check, _BOUNDED):
        return

    def bounded(self: Any, tokenizer: Any, text: str) -> str:
        truncates = self.truncate_prompt_tokens is not None and self.truncation_side is None
        side = getattr(tokenizer, "truncation_side", None) if truncates else None
        checking = self if side is None else replace(self, truncation_side=side)
        checked: str = check(checking, tokenizer, text)
        return checked

    setattr(bounded, _BOUNDED, True)
    owner._text_len_check = bounded


def replace_next_rejection_sampler(build: Callable[..., Any]) -> None:
    """Let the model runner that is being built take its rejection sampler from `build`.

    The V1 model runner builds its proposer and then, by a name in its module, its rejection
    sampler. The name is restored before `build` is called.
    """
    names = vars(import_module("vllm.v1.worker.gpu_model_runner"))
    original = names["RejectionSampler"]

    def build_once(*args: Any, **kwargs: Any) -> Any:
        names["RejectionSampler"] = original
        return build(*args, **kwargs)

    names["RejectionSampler"] = build_once


def replace_top_k_top_p(keep: Callable[..., Any]) -> None:
    """Let samplers of this process restrict tokens by this function; only CPUs ask for it."""
    vars(import_module("vllm.v1.sample.ops.topk_topp_sampler"))["apply_top_k_top_p_pytorch"] = keep


def replace_expand_batch_to_tokens(expand: Callable[..., Any]) -> None:
    """Replace the function that gives each draft its thread's temperature, top_k and top_p."""
    vars(import_module("vllm.v1.sample.rejection_sampler"))["expand_batch_to_tokens"] = expand


def add_utility(name: str, function: Callable[[Any], Any]) -> None:
    """Let the API process call a function of the engine core (`call_utility`) by this name."""
    setattr(import_module("vllm.v1.engine.core").EngineCore, name, function)


_CALLED_BEFORE = "_apar_called_before"


def call_before_requests(function: Callable[[Any], None]) -> None:
    """Call a function with an engine core of this process before it takes its first request.

    vLLM builds the scheduler while it builds the engine core, and gives it no way to the workers.
    May be called more than once with the same function.
    """
    core: Any = import_module("vllm.v1.engine.core").EngineCore
    if hasattr(core, _CALLED_BEFORE):
        return
    add_request = core.add_request

    def after_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, _CALLED_BEFORE):
            setattr(self, _CALLED_BEFORE, True)
            function(self)
        return add_request(self, *args, **kwargs)

    setattr(core, _CALLED_BEFORE, False)
    core.add_request = after_function


def is_transferring(connector: Any, request_id: str) -> bool:
    """Return whether a KV connector keeps a record of a request, also after the request's end.

    `OffloadingConnector` does until all stores of the request's blocks have ended. The records of
    other connectors are not read.
    """
    parts = getattr(connector, "_connectors", None)  # MultiConnector
    if parts is not None:
        return any(is_transferring(part, request_id) for part in parts)
    records = getattr(getattr(connector, "connector_scheduler", None), "_req_status", {})
    return request_id in records


def block_hasher(request: Request) -> Callable[[Request], Any] | None:
    """Return the function that hashes a request's full blocks; None without prefix caching."""
    return request._block_hasher


def inherit_block_hashes(parent: Request, child: Request, *, num_shared_tokens: int) -> None:
    """Take over the hashes of the shared blocks instead of computing them again."""
    hasher = parent._block_hasher
    if hasher is None:
        return
    # Hashes cover whole blocks and agree as far as the tokens do, so the number is rounded down.
    num_shared = len(parent.block_hashes) * num_shared_tokens // parent.num_tokens
    child._block_hasher = hasher
    child.block_hashes = list(parent.block_hashes[:num_shared])
    child.update_block_hashes()


def copy_error(source: EngineCoreOutput, target: EngineCoreOutput) -> None:
    """Take over the error of an output, a field that vLLM has since 0.33."""
    error = getattr(source, "error", None)
    if error is not None:
        with_error: Any = target
        with_error.error = error


def bad_words_of(params: SamplingParams) -> list[list[int]]:
    """Return the banned token sequences of a request whose bad words have been tokenized."""
    return params._bad_words_token_ids or []


def add_bad_words(params: SamplingParams, sequences: Sequence[list[int]]) -> None:
    """Ban further token sequences."""
    params._bad_words_token_ids = [*bad_words_of(params), *sequences]


def call_at_preemption(scheduler: Any, function: Callable[[], None]) -> None:
    """Call a function whenever a scheduler preempts a request."""
    preempt = scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        function()
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted


def watch_text(state: RequestState, note: Callable[[str], None]) -> None:
    """Call a function with the text of each token that a request's detokenizer decodes."""
    detokenizer: Any = state.detokenizer
    decode = detokenizer.decode_next

    def decode_next(token_id: int) -> str:
        text: str = decode(token_id)
        note(text)
        return text

    detokenizer.decode_next = decode_next


def complete_outputs(
    state: RequestState,
    completed: Callable[[CompletionOutput], None],
    answered: Callable[[RequestOutput], None],
) -> None:
    """Call functions with a request's last output, and with the answer that gets it.

    An answer with several choices has the outputs of several requests of the engine.
    """
    owner: Any = state
    make_output, make_answer = owner._new_completion_output, owner._new_request_output

    def new_completion_output(*args: Any, **kwargs: Any) -> CompletionOutput:
        output: CompletionOutput = make_output(*args, **kwargs)
        if output.finish_reason is not None:
            completed(output)
        return output

    def new_request_output(*args: Any, **kwargs: Any) -> RequestOutput:
        answer: RequestOutput = make_answer(*args, **kwargs)
        if answer.finished:
            answered(answer)
        return answer

    owner._new_completion_output = new_completion_output
    owner._new_request_output = new_request_output


def decoded_text(state: RequestState) -> str:
    """Return the text of a request so far, after the removal of a stop string."""
    detokenizer: Any = state.detokenizer
    text: str = detokenizer.output_text
    return text


@contextmanager
def replaced_attention(paths: Mapping[str, str]) -> Iterator[None]:
    """Let models that are built meanwhile use our attention backends: paths by vLLM's names.

    vLLM's own choice of a backend, and its reasons, stay as they are.
    """
    registry = import_module("vllm.v1.attention.backends.registry")
    chosen = import_module("vllm.v1.attention.selector")._cached_get_attn_backend
    overrides = registry._ATTN_OVERRIDES
    before = dict(overrides)
    for name, path in paths.items():
        registry.register_backend(registry.AttentionBackendEnum[name], path)
    # An engine that this process has built before may have left the original there.
    chosen.cache_clear()
    try:
        yield
    finally:
        overrides.clear()
        overrides.update(before)
        chosen.cache_clear()


def attention_backend(name: str) -> type:
    """Return the backend that vLLM takes for a name: its own, or what has replaced it."""
    registry = import_module("vllm.v1.attention.backends.registry")
    backend: type = registry.AttentionBackendEnum[name].get_class()
    return backend


def flash_attention() -> Callable[..., Any]:
    """Return FlashAttention's function for paged sequences; only GPUs have it."""
    function: Callable[..., Any] = import_module(
        "vllm.v1.attention.backends.fa_utils"
    ).flash_attn_varlen_func
    return function


def with_aligned_strides(tensor: Tensor) -> Tensor:
    """Return a KV cache whose dimensions of size 1 have strides that FlashAttention 3 accepts."""
    aligned: Tensor = import_module("vllm.utils.torch_utils").canonicalize_singleton_dim_strides(
        tensor
    )
    return aligned


def cpu_attention_kernel(builder: CPUAttentionMetadataBuilder) -> str:
    """Return vLLM's name of the instruction set whose attention kernel and KV layout are used."""
    return builder.isa


def metadata_builders(worker: Worker) -> Iterator[Any]:
    """Yield the builders of attention metadata of a worker's model."""
    runner: Any = worker.model_runner
    for groups in runner.attn_groups:
        for group in groups:
            yield from group.metadata_builders


def worker_in_this_process(engine_core: Any) -> Any:
    """Return the worker that runs in an engine core's process; None if it has one of its own."""
    wrapper = getattr(engine_core.model_executor, "driver_worker", None)
    return getattr(wrapper, "worker", None)


_HOST_TABLES: dict[int, tuple[NDArray[np.int32], int, bool]] = {}
"""Block tables on the host by the address of those on the GPU: table, block size, and whether its
rows are the runner's slots instead of the rows of a step."""
_WATCHED = "_apar_watched"


def watch_block_tables() -> None:
    """Keep the block tables that this process builds from now on available on the host.

    The V1 model runner fills them there; the V2 runner writes them on the GPU, so its writes are
    repeated in a copy. May be called more than once.
    """
    v1: Any = import_module("vllm.v1.worker.block_table").BlockTable
    v2: Any = import_module("vllm.v1.worker.gpu.block_table").BlockTables
    if hasattr(v1, _WATCHED):
        return
    setattr(v1, _WATCHED, True)
    v1_init, v2_init, v2_append = v1.__init__, v2.__init__, v2.append_block_ids

    def init_v1(self: Any, *args: Any, **kwargs: Any) -> None:
        v1_init(self, *args, **kwargs)
        buffer = self.block_table
        _HOST_TABLES[buffer.gpu.data_ptr()] = (buffer.np, self.block_size, False)

    def init_v2(self: Any, *args: Any, **kwargs: Any) -> None:
        v2_init(self, *args, **kwargs)
        self.apar_copies = [np.zeros(table.shape, np.int32) for table in self.input_block_tables]
        for table, copy, block_size in zip(
            self.input_block_tables, self.apar_copies, self.block_sizes, strict=True
        ):
            _HOST_TABLES[table.data_ptr()] = (copy, block_size, True)

    def append_v2(
        self: Any, req_index: int, new_block_ids: tuple[list[int], ...], overwrite: bool
    ) -> None:
        for group, block_ids in enumerate(new_block_ids):
            start = 0 if overwrite else int(self.num_blocks.np[group, req_index])
            self.apar_copies[group][req_index, start : start + len(block_ids)] = block_ids
        v2_append(self, req_index, new_block_ids, overwrite)

    v1.__init__, v2.__init__, v2.append_block_ids = init_v1, init_v2, append_v2


def host_block_table(
    metadata: CommonAttentionMetadata, block_size: int, num_blocks: int
) -> NDArray[np.int32] | None:
    """Return a step's block table on the host without waiting for the GPU.

    It has a row per request, and at least `num_blocks` columns, as far as the table has them. None
    if `watch_block_tables` has not seen it, or its blocks have another size.
    """
    table, num_rows = metadata.block_table_tensor, metadata.num_reqs
    if table.device.type == "cpu":
        on_host: NDArray[np.int32] = table[:num_rows].numpy()
        return on_host
    known = _HOST_TABLES.get(table.data_ptr())
    if known is None or known[1] != block_size:
        return None
    if not known[2]:
        return known[0][:num_rows]
    slots = metadata.req_idx
    if slots is None:
        return None
    # A table is as wide as the longest possible request: megabytes, of which a step needs few.
    return known[0][:, :num_blocks].take(slots[:num_rows], axis=0)


@contextmanager
def without_statistics(engine: AsyncLLM) -> Iterator[None]:
    """Keep the outputs of an engine out of its statistics."""
    loggers, engine._logger_ref[0] = engine._logger_ref[0], None
    try:
        yield
    finally:
        engine._logger_ref[0] = loggers
