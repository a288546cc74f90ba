"""Private names and behaviour of Ray Serve and vLLM's server that serving relies on."""

import inspect
from pathlib import Path

import pytest
from ray.serve import _private as serve_private
from ray.serve._private import http_util
from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.serve.handle import DeploymentHandle
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState

from cluster.local_ray import SERVE_FLAGS, serve_environment

SERVE = Path(inspect.getfile(serve_private)).parent


def test_ray_serve_reads_every_setting_that_we_make() -> None:
    constants = (SERVE / "constants.py").read_text()
    ours = [name for name in serve_environment(Path("/tmp/x")) if name.startswith("RAY_SERVE_")]

    assert set(SERVE_FLAGS) <= set(ours)
    assert [name for name in ours if f'"{name}"' not in constants] == []


@pytest.mark.parametrize(
    "line",
    [
        "    bind :{{ config.metrics_port }}",
        "    option splice-request\n",
        "    errorfile 503 {{ config.error_file_path }}\n",
        "\nfrontend http_frontend\n",
        "\nbackend default_backend\n    http-request return status 404 content-type text/plain ",
    ],
)
def test_haproxys_template_has_the_lines_that_we_put_right(line: str) -> None:
    assert line in (SERVE / "haproxy_templates.py").read_text()


def test_ray_serve_sends_request_ids_back_itself() -> None:
    middleware = inspect.getsource(http_util.RequestIdMiddleware)

    assert 'headers.append("X-Request-ID", request_id)' in middleware
    assert "headers.append(SERVE_HTTP_REQUEST_ID_HEADER, request_id)" in middleware


def test_logs_lie_beside_ray_serves_own() -> None:
    assert list(inspect.signature(get_serve_logs_dir).parameters) == []


def test_a_handle_takes_the_serialisation_of_calls() -> None:
    parameters = inspect.signature(DeploymentHandle.options).parameters

    assert {"request_serialization", "response_serialization"} <= set(parameters)
    assert hasattr(DeploymentHandle, "_init")  # the integration tests' handle


def test_vllms_server_can_be_built_around_an_engine() -> None:
    assert list(inspect.signature(build_app).parameters) == [
        "args",
        "supported_tasks",
        "model_config",
    ]
    assert inspect.iscoroutinefunction(init_app_state)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    assert hasattr(args, "scheduler_cls")
    assert hasattr(args, "kv_cache_memory_bytes")


def test_vllm_takes_our_field_and_our_request_id() -> None:
    for request in (ChatCompletionRequest, CompletionRequest):
        assert {"vllm_xargs", "stop_token_ids", "allowed_token_ids", "logit_bias"} <= set(
            request.model_fields
        )
    assert '"X-Request-Id"' in inspect.getsource(BaseServing._base_request_id)


def test_the_usage_chunk_of_a_stream_can_be_told_by_its_bytes() -> None:
    chunk = ChatCompletionStreamResponse(id="i", model="m", choices=[])

    assert '"choices":[]' in chunk.model_dump_json(exclude_unset=True)


def test_outputs_can_be_held_back_in_front_of_a_requests_queue() -> None:
    assert list(inspect.signature(RequestOutputCollector.put).parameters) == ["self", "output"]
    source = inspect.getsource(RequestState)
    assert "self.queue = queue" in source
    assert "self.output_kind = output_kind" in source
    assert isinstance(AsyncLLM.errored, property)
