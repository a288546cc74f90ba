"""Private names and behaviour of Ray Serve and vLLM's server that serving relies on."""

import inspect
import subprocess
from pathlib import Path

import grpc
import pytest
from ray._private import services
from ray.serve import _private as serve_private
from ray.serve._private import http_util
from ray.serve._private.constants import (
    SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    SERVE_MULTIPLEXED_MODEL_ID,
    SERVE_SESSION_ID,
)
from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.serve._private.utils import call_function_from_import_path
from ray.serve.handle import DeploymentHandle
from starlette.types import Message, Receive, Scope, Send
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

from cluster.client_headers import STEERING_HEADERS, middlewares
from cluster.local_ray import SERVE_FLAGS, serve_environment
from deployments.relay.replica_calls import TOO_LARGE

SERVE = Path(inspect.getfile(serve_private)).parent


def test_ray_serve_reads_every_setting_that_we_make() -> None:
    constants = (SERVE / "constants.py").read_text()
    ours = [name for name in serve_environment(Path("/tmp/x")) if name.startswith("RAY_SERVE_")]

    assert set(SERVE_FLAGS) <= set(ours)
    assert [name for name in ours if f'"{name}"' not in constants] == []


def test_ray_starts_its_processes_through_a_popen_that_we_replace() -> None:
    assert issubclass(services.ConsolePopen, subprocess.Popen)
    assert "ConsolePopen(" in inspect.getsource(services.start_ray_process)


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


def test_ray_serve_reads_steering_headers_behind_our_middleware() -> None:
    assert {
        SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER.encode(),
        SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER.encode(),
        SERVE_SESSION_ID.encode(),
        SERVE_MULTIPLEXED_MODEL_ID.replace("_", "-").encode(),
    } == STEERING_HEADERS
    flag = SERVE_FLAGS["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
    given = call_function_from_import_path(flag)
    assert http_util.validate_http_proxy_callback_return(given) == given != []
    # Both HTTP servers, behind HAProxy and without it, put the middlewares around their handling.
    assert "_apply_middlewares" in inspect.getsource(http_util.start_asgi_http_server)
    for server in ("proxy.py", "replica.py"):
        source = (SERVE / server).read_text()
        assert "configure_http_middlewares(" in source
        assert "start_asgi_http_server(" in source


async def test_steering_headers_do_not_reach_ray_serve() -> None:
    seen: list[dict[bytes, bytes]] = []

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(dict(scope["headers"]))

    app = http_util._apply_middlewares(serve, middlewares())  # type: ignore[arg-type]
    headers = [(b"x-request-timeout-seconds", b"0.01"), (b"x-request-disconnect-disabled", b"?1")]
    headers += [(b"x_session_id", b"\xff"), (b"serve_multiplexed_model_id", b"\xff"), (b"a", b"b")]
    await app({"type": "http", "method": "POST", "headers": headers}, None, None)  # type: ignore[arg-type]

    assert http_util.parse_request_timeout_header(dict(headers), None) == 0.01
    assert http_util.parse_request_timeout_header(seen[0], None) is None
    assert http_util.parse_disconnect_disabled_header(dict(headers))
    assert not http_util.parse_disconnect_disabled_header(seen[0])
    assert seen[0].keys() - {b"x-request-id"} == {b"a"}


async def test_a_get_request_brings_no_body_to_ray_serve() -> None:
    messages = [{"type": "http.request", "body": b"x" * 9, "more_body": True}] * 3
    messages.append({"type": "http.disconnect"})

    async def client_sends() -> Message:
        return messages.pop(0)

    seen: list[Message] = []

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([await receive(), await receive()])

    app = http_util._apply_middlewares(serve, middlewares())  # type: ignore[arg-type]
    await app({"type": "http", "method": "GET", "headers": []}, client_sends, None)  # type: ignore[arg-type]

    assert seen == [
        {"type": "http.request", "body": b"", "more_body": False},
        {"type": "http.disconnect"},
    ]


async def test_grpc_names_the_sizes_of_a_message_over_its_limit() -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 100)])
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("s", {"m": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/s/m")(b"x" * 101)
    await server.stop(None)

    assert TOO_LARGE.search(str(refused.value)).groups() == ("101", "100")  # type: ignore[union-attr]


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
