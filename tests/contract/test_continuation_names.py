"""Private names and behaviour of vLLM and Ray Serve that continued streams rely on."""

import inspect

import msgspec
import pytest
from ray.serve.handle import DeploymentResponseGenerator
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.utils import random_uuid
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import MPClient
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.request import Request

from apar_core.engine.resume_request import stop_reason

# Whoever meets a new one here decides whether a stream with it can be continued.
KNOWN_PARAMETERS = set(
    [
        "n",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "temperature",
        "watermarking",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "logprob_token_ids",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "skip_clone",
        "output_text_buffer_length",
        "structured_outputs",
        "logit_bias",
        "allowed_token_ids",
        "extra_args",
        "bad_words",
        "skip_reading_prefix_cache",
        "thinking_token_budget",
        "repetition_detection",
        "routed_experts_prompt_start",
        "trace_decode_token_ids",
    ]
)


def test_a_call_over_a_handle_tells_when_a_replica_has_taken_it() -> None:
    assert inspect.iscoroutinefunction(DeploymentResponseGenerator._fetch_future_result_async)


def test_every_sampling_parameter_is_known() -> None:
    names = {field.name for field in msgspec.structs.fields(SamplingParams)}

    assert {name for name in names if not name.startswith("_")} == KNOWN_PARAMETERS


def test_known_outputs_can_be_put_out_before_the_engine_has_the_request() -> None:
    assert "self.is_prefilling = True" in inspect.getsource(RequestState)
    assert "tracing_enabled" in inspect.signature(OutputProcessor).parameters
    source = inspect.getsource(AsyncLLM._add_request)
    assert source.index("output_processor.add_request") < source.index("add_request_async")
    assert "if iteration_stats is None" in inspect.getsource(
        OutputProcessor._update_stats_from_output
    )


def test_choices_of_one_prompt_look_like_requests_of_one_choice() -> None:
    # So what tells them apart is their parent.
    assert "child_sampling_params.n = 1" in inspect.getsource(ParentRequest)


def test_a_thread_can_be_built_as_a_request() -> None:
    ours = {"prompt_token_ids", "sampling_params", "client_index", "arrival_time", "mm_features"}
    ours |= {"lora_request", "cache_salt", "priority", "trace_headers", "block_hasher"}

    assert ours <= set(inspect.signature(Request).parameters)
    assert "external_req_id" in {each.name for each in msgspec.structs.fields(EngineCoreRequest)}


@pytest.mark.parametrize(("token_id", "named"), [(3, None), (77, 77), (50, None)])
def test_a_stop_token_is_named_as_vllm_names_it(token_id: int, named: int | None) -> None:
    params = SamplingParams(max_tokens=50, stop_token_ids=[77])
    params._eos_token_id = 3
    request = Request("r", [1, 2], params, None)
    request.append_output_token_ids(token_id)

    check_stop(request, 100)

    assert request.stop_reason == stop_reason(params, [token_id]) == named


def test_finish_reasons_keep_their_numbers() -> None:
    # Gateway and replicas of two versions exchange them during a rollout.
    reasons = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
    assert [int(reason) for reason in reasons] == [0, 1, 2]


def test_an_engine_core_that_is_told_to_end_gives_its_requests_up() -> None:
    source = inspect.getsource(EngineCoreProc._handle_shutdown)
    assert "_send_abort_outputs(aborted_reqs)" in source
    # With a time to drain it would go on with them, and be killed in the middle.
    assert EngineArgs.shutdown_timeout == 0
    # Then it exits with 0, which its client takes for the engine's death as well.
    assert "engine_dead = True" in inspect.getsource(MPClient.start_engine_core_monitor)
    # A client's abort asks for no output of the engine core.
    assert "_send_abort" not in inspect.getsource(EngineCore.abort_requests)


def test_beams_are_named_after_their_search() -> None:
    source = inspect.getsource(BeamSearchOnlineMixin.beam_search)

    assert 'request_id_batch = f"{request_id}-{random_uuid()}"' in source
    assert 'request_id_item = f"{request_id_batch}-beam-{i}"' in source
    assert set(random_uuid()) <= set("0123456789abcdef")


@pytest.mark.parametrize("serving", [OpenAIServingChat, OpenAIServingCompletion])
def test_streams_end_with_done_and_an_event_is_one_line(serving: type) -> None:
    source = inspect.getsource(serving)

    assert 'yield "data: [DONE]\\n\\n"' in source
    assert 'yield f"data: {' in source
