"""Parameters of a client in the input processor: read, passed on or refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from apar_core.engine.async_engine import SCHEDULER_CLS
from apar_core.engine.input_processor import CLIENT_ARGS, ForkInputProcessor
from apar_core.engine.replay import (
    PARAM,
    REPLAY_ARG,
    REPLAY_REQUEST_ARG,
    ReplayRules,
    ReplayText,
    replay_args,
    replayed_tokens,
)
from apar_core.fork_parameters import EXTRA_ARG, HOLD_ARG, ForkParameters, KeyTerms
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.scheduler.fork_settings import CONFIG_KEY
from apar_core.scheduler.thread_requests import RESUME_ARG
from tests.fakes.scripted_engine import END

ROOT = {"": [10, 11, END]}


def set_replay(**prompt: Any) -> dict[str, Any]:
    """Return the request for the engine, with a context of ten tokens."""
    # Without a configuration: only the replay rules are needed.
    processor = ForkInputProcessor.__new__(ForkInputProcessor)
    processor._replay_rules = ReplayRules(100, frozenset({END}))
    processor.model_config = SimpleNamespace(max_model_len=10)  # type: ignore[assignment]
    params = SamplingParams(max_tokens=50, extra_args={REPLAY_REQUEST_ARG: json.dumps(ROOT)})
    request = EngineCoreRequest(
        request_id="r",
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        **prompt,
    )
    processor._set_replay(request, params)
    return dict(params.extra_args or {})


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt_token_ids": [5] * 7},
        {"prompt_token_ids": None, "prompt_embeds": torch.zeros(7, 4)},
    ],
)
def test_a_replay_that_fits_the_context_reaches_the_engine(prompt: dict[str, Any]) -> None:
    extra_args = set_replay(**prompt)

    assert replayed_tokens(extra_args) == ROOT
    assert REPLAY_REQUEST_ARG not in extra_args


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt_token_ids": [5] * 8},
        {"prompt_token_ids": None, "prompt_embeds": torch.zeros(8, 4)},
    ],
)
def test_a_replay_that_exceeds_the_context_is_a_clients_error(
    prompt: dict[str, Any],
) -> None:
    with pytest.raises(VLLMValidationError, match=r"needs 11 tokens.*context holds 10") as raised:
        set_replay(**prompt)

    assert raised.value.parameter == PARAM


def processor_of(scheduler_cls: str | None = SCHEDULER_CLS, **settings: Any) -> ForkInputProcessor:
    """Input processor of an engine with the embedded model; the engine does not run."""
    config = EngineArgs(
        model=str(checkpoint_path()),
        scheduler_cls=scheduler_cls,
        enable_prefix_caching=True,
        max_model_len=768,
        additional_config={CONFIG_KEY: settings},
    ).create_engine_config()
    return ForkInputProcessor(config)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {},
            "forks: format apar; control tokens: '[Fork]' is 3, '[Child]' is 4; at most 32 threads "
            "and 512 forks a request; policy eager; requests fork unless they say otherwise",
        ),
        (
            {
                "enabled": False,
                "max_threads": 4,
                "max_replica_threads": 64,
                "max_requests": 16,
                "policy": "adaptive",
                "token_time_ms": 25,
            },
            "forks: format apar; control tokens: '[Fork]' is 3, '[Child]' is 4; at most 4 threads "
            "and 512 forks a request, 64 threads in all, 16 requests; policy adaptive (25 ms a "
            "token); requests fork if they ask for it",
        ),
    ],
)
def test_an_engine_says_at_its_start_how_it_forks(
    settings: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "apar_core"):
        processor_of(**settings)

    assert [record.message for record in caplog.records if record.message[:6] == "forks:"] == [said]


@pytest.fixture(scope="module")
def processor() -> ForkInputProcessor:
    return processor_of()


@pytest.fixture(scope="module")
def server_processor() -> ForkInputProcessor:
    processor = processor_of()
    processor.explain_refusals()
    return processor


def processed(
    processor: ForkInputProcessor, params: SamplingParams, request_id: str = "r"
) -> EngineCoreRequest:
    return processor.process_inputs(request_id, "Hi", params, ("generate",), priority=-5)


def constrained(**constraint: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))


def parameters_of(request: EngineCoreRequest) -> ForkParameters:
    assert request.sampling_params is not None
    parameters = ForkParameters.from_extra_args(request.sampling_params.extra_args)
    assert parameters is not None
    return parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("apar_priority", -1),
        ("apar_key", "alice"),
        ("apar_key_max_threads", 99),
        (EXTRA_ARG, {"fork_id": 1}),
        (EXTRA_ARG, "x"),
        (RESUME_ARG, [[[], [1], None]]),
        (REPLAY_ARG, "\n=1,2\n"),
        ("apar_anything", 1),
    ],
)
def test_a_client_cannot_set_internal_arguments(
    processor: ForkInputProcessor, name: str, value: object
) -> None:
    with pytest.raises(VLLMValidationError, match=f"vllm_xargs.{name} is internal") as raised:
        processed(processor, SamplingParams(extra_args={"mine": 1, name: value}))

    assert raised.value.parameter == f"vllm_xargs.{name}"


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
@pytest.mark.parametrize("spelled", ["{}", "{}.0", " {} "])
def test_control_tokens_are_refused_as_pydantic_reads_them(
    processor: ForkInputProcessor, field: str, spelled: str
) -> None:
    assert processor.format is not None
    texts = [spelled.format(each) for each in processor.format.texts]
    given = {"logit_bias": dict.fromkeys(texts, 5)}.get(field, texts)
    try:
        request = CompletionRequest.model_validate({"prompt": "Hi", field: given})
        params = request.to_sampling_params(50, {})
    except (ValueError, VLLMValidationError):
        return  # Not a number.

    with pytest.raises(VLLMValidationError, match=r"\[Fork\]") as raised:
        processed(processor, params)

    assert raised.value.parameter == field


@pytest.mark.parametrize(
    ("params", "parameter", "reason"),
    [
        (constrained(regex=r"\p{L}+"), "structured_outputs", "Unicode character class"),
        (
            constrained(json={"items": [{"type": "string"}], "type": "array"}),
            "structured_outputs",
            "items",
        ),
        (
            constrained(json={"type": "integer", "multipleOf": 3}),
            "structured_outputs",
            "not supported",
        ),
        (constrained(grammar='start ::= "a"'), "structured_outputs", "root rule"),
        (SamplingParams(seed=2**63), "seed", "out of range"),
        (constrained(json={"const": 2**70}), "structured_outputs", "64 bits"),
    ],
)
def test_what_the_engine_could_not_use_is_refused_with_the_reason(
    server_processor: ForkInputProcessor, params: SamplingParams, parameter: str, reason: str
) -> None:
    with pytest.raises(VLLMValidationError, match=reason) as raised:
        processed(server_processor, params)

    assert raised.value.parameter == parameter
    assert "/project" not in str(raised.value)


def test_any_failure_of_a_check_is_the_requests_fault(
    server_processor: ForkInputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr(SamplingParams, "verify", fail)

    with pytest.raises(VLLMValidationError, match="no such thing"):
        processed(server_processor, SamplingParams())


def test_a_clients_arguments_are_read_or_passed_on(
    processor: ForkInputProcessor,
) -> None:
    given = {"mine": 1, "apar_enabled": 0, "apar_max_threads": 3}
    request = processed(processor, SamplingParams(extra_args=given))

    assert request.sampling_params is not None
    assert request.sampling_params.extra_args is not None
    assert request.sampling_params.extra_args.keys() == {"mine", EXTRA_ARG}
    assert (parameters_of(request).enabled, parameters_of(request).max_threads) == (False, 3)
    # The prompts of one HTTP request share these arguments.
    assert given == {"mine": 1, "apar_enabled": 0, "apar_max_threads": 3}
    assert {"apar_enabled", "apar_max_threads"} < CLIENT_ARGS


def test_an_argument_that_is_none_counts_as_absent(processor: ForkInputProcessor) -> None:
    """A table has every row's columns in each row."""
    given = {"apar_enabled": None, "apar_max_threads": None, "apar_tree": None}
    parameters = parameters_of(processed(processor, SamplingParams(extra_args=given)))

    assert parameters == parameters_of(processed(processor, SamplingParams()))


def test_an_answer_with_a_tree_comes_in_one_piece(processor: ForkInputProcessor) -> None:
    asked = {"apar_tree": True}

    request = processed(processor, SamplingParams(extra_args=asked))

    assert request.sampling_params is not None
    assert request.sampling_params.output_kind == RequestOutputKind.FINAL_ONLY
    streamed = SamplingParams(extra_args=asked, output_kind=RequestOutputKind.DELTA)
    with pytest.raises(VLLMValidationError, match="apar_tree is for whole answers"):
        processed(processor, streamed)


@pytest.mark.parametrize("part", ["", "-0", "-1", "-0123abcd-beam-2", "-1-0123abcd-beam-0"])
def test_the_terms_of_a_key_apply_to_each_part_of_a_request(part: str) -> None:
    processor = processor_of()
    processor.key_terms["cmpl-a"] = KeyTerms("alice", key_max_threads=7, priority=3)

    request = processed(processor, SamplingParams(), f"cmpl-a{part}")

    parameters = parameters_of(request)
    assert (parameters.key, parameters.key_max_threads, request.priority) == ("alice", 7, 3)


@pytest.mark.parametrize("key_terms", [{}, {"a": KeyTerms("alice"), "a-1": None}])
def test_a_request_without_a_key_has_no_terms_and_no_priority(
    key_terms: dict[str, KeyTerms | None],
) -> None:
    """Nor does a request whose id looks like a part of another."""
    processor = processor_of()
    processor.key_terms |= key_terms

    request = processed(processor, SamplingParams(), "a-1")

    parameters = parameters_of(request)
    assert (parameters.key, parameters.key_max_threads, request.priority) == (None, None, 0)


def test_a_replay_of_this_process_reaches_the_engine_as_plain_text(
    processor: ForkInputProcessor,
) -> None:
    request = processed(processor, SamplingParams(extra_args=replay_args(ROOT)))

    assert request.sampling_params is not None
    extra_args = request.sampling_params.extra_args or {}
    assert replayed_tokens(extra_args) == ROOT
    # Only a plain str can be sent to the engine core.
    assert type(extra_args[REPLAY_ARG]) is str
    assert type(replay_args(ROOT)[REPLAY_ARG]) is ReplayText


def test_an_engine_that_does_not_fork_leaves_arguments_alone() -> None:
    given = {"apar_priority": 1, "mine": 2, EXTRA_ARG: {"fork_id": 1}}
    request = processed(processor_of(scheduler_cls=None), SamplingParams(extra_args=given))

    assert request.priority == -5
    assert request.sampling_params is not None
    assert request.sampling_params.extra_args == {"apar_priority": 1, "mine": 2}


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("fields", "forks"),
    [
        ({}, True),
        ({"tools": [TOOL]}, False),
        ({"tools": [TOOL], "tool_choice": "auto"}, False),
        ({"tools": [TOOL], "vllm_xargs": {"apar_enabled": 1}}, False),
        ({"tools": [TOOL], "tool_choice": "none"}, True),
    ],
)
def test_a_chat_that_may_call_tools_does_not_fork(
    processor: ForkInputProcessor, fields: dict[str, Any], forks: bool
) -> None:
    chat = ChatCompletionRequest.model_validate({"messages": MESSAGES, **fields})

    request = processed(processor, chat.to_sampling_params(50, {}))

    assert parameters_of(request).enabled is forks


def test_a_response_that_may_call_tools_does_not_fork(processor: ForkInputProcessor) -> None:
    tool = {"type": "function", "name": "weather", "parameters": {}, "strict": False}
    plain, calling = (
        ResponsesRequest.model_validate({"input": "Hi", "tools": tools}) for tools in ([], [tool])
    )

    assert parameters_of(processed(processor, plain.to_sampling_params(50, {}))).enabled
    assert not parameters_of(processed(processor, calling.to_sampling_params(50, {}))).enabled


def test_an_engine_that_returns_routed_experts_does_not_fork() -> None:
    config = EngineArgs(
        model=str(checkpoint_path()), scheduler_cls=SCHEDULER_CLS, enable_prefix_caching=True
    ).create_engine_config()
    config.aux_output_config.enable_return_routed_experts = True

    request = processed(ForkInputProcessor(config), SamplingParams())

    assert not parameters_of(request).enabled


# Each is one token sequence; with a space before it, it would be longer.
WORDS = [f"~{index}" for index in range(128)]


def v2_processor(monkeypatch: pytest.MonkeyPatch) -> ForkInputProcessor:
    """Input processor of an engine with the V2 model runner, which needs a GPU to run."""
    config = EngineArgs(
        model=str(checkpoint_path()), scheduler_cls=SCHEDULER_CLS, enable_prefix_caching=True
    ).create_engine_config()
    config.model_config.logits_processors = None
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    return ForkInputProcessor(config)


def test_bad_words_above_the_limit_of_the_v2_worker_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker would raise, which ends the engine; vLLM checks the number of words itself."""
    processor = v2_processor(monkeypatch)

    def ask(words: list[str]) -> EngineCoreRequest:
        return processed(processor, SamplingParams(bad_words=words))

    allowed = ask(WORDS).sampling_params
    assert allowed is not None
    # No bad word is ours.
    assert len(allowed._bad_words_token_ids or []) == 128
    with pytest.raises(VLLMValidationError, match=r"bad_words has \d+ tokens, more than the 1024"):
        ask([word * 9 for word in WORDS[:60]])


def test_bad_words_are_not_limited_with_the_v1_model_runner(
    processor: ForkInputProcessor,
) -> None:
    request = processed(processor, SamplingParams(bad_words=WORDS))

    assert request.sampling_params is not None
    assert len(request.sampling_params._bad_words_token_ids or []) == 128


@pytest.fixture(scope="module")
def holding() -> ForkInputProcessor:
    return processor_of(output_interval_s=0.05)


def may_wait(processor: ForkInputProcessor, **params: Any) -> bool:
    kind = params.pop("output_kind", RequestOutputKind.DELTA)
    request = processed(processor, SamplingParams(output_kind=kind, **params))
    assert request.sampling_params is not None
    return bool((request.sampling_params.extra_args or {}).get(HOLD_ARG, False))


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_streams_and_whole_answers_may_wait_for_their_tokens(
    holding: ForkInputProcessor, processor: ForkInputProcessor, kind: RequestOutputKind
) -> None:
    assert may_wait(holding, output_kind=kind)
    assert not may_wait(processor, output_kind=kind)


@pytest.mark.parametrize(
    "params",
    [
        {"stop": ["\n"]},
        {"logprobs": 0},
        {"logprob_token_ids": [5]},
        {"output_kind": RequestOutputKind.CUMULATIVE},
    ],
)
def test_a_request_that_needs_each_token_at_once_does_not_wait(
    holding: ForkInputProcessor, params: dict[str, Any]
) -> None:
    assert not may_wait(holding, **params)


def test_a_request_with_a_deadline_does_not_wait(holding: ForkInputProcessor) -> None:
    holding.key_terms["r"] = KeyTerms(key="k", deadline_at_s=5.0)
    with_deadline = may_wait(holding)
    holding.key_terms["r"] = KeyTerms(key="k")

    assert not with_deadline
    assert may_wait(holding)


def test_a_client_cannot_say_that_its_request_may_wait(processor: ForkInputProcessor) -> None:
    with pytest.raises(VLLMValidationError, match=f"vllm_xargs.{HOLD_ARG} is internal"):
        processed(processor, SamplingParams(extra_args={HOLD_ARG: True}))
