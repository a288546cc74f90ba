"""Private and undocumented names and behaviour of Ray that this project relies on.

A Ray upgrade that changes one of them fails here. No cluster is started.
"""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
import uvicorn
from ray import _raylet, serve
from ray._private import ray_constants, services, worker
from ray._private.node import Node
from ray.core.generated import autoscaler_pb2, gcs_pb2
from ray.dashboard.modules.reporter import reporter_agent, reporter_consts
from ray.experimental import internal_kv
from ray.serve import _private as serve_private
from ray.serve import context
from ray.serve._private import cluster_node_info_cache, default_impl, http_util
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import ReplicaID, RequestMetadata
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.constants import (
    SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    SERVE_MULTIPLEXED_MODEL_ID,
    SERVE_NAMESPACE,
    SERVE_SESSION_ID,
)
from ray.serve._private.deployment_state import DeploymentState
from ray.serve._private.handle_options import InitHandleOptionsBase
from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.serve._private.replica import Replica as ServeReplica
from ray.serve._private.replica import UserCallableWrapper
from ray.serve._private.request_router.common import PendingRequest, RequestRoutingContext
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import FIFOMixin, RequestRouter
from ray.serve._private.router import AsyncioRouter, CurrentLoopRouter
from ray.serve._private.utils import call_function_from_import_path
from ray.serve._private.version import DeploymentVersion
from ray.serve.config import AutoscalingContext
from ray.serve.context import ReplicaContext
from ray.serve.deployment import Deployment
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.types import Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from cluster.local_ray import _UNNEEDED, serve_environment
from deployments.client_headers import STEERING_HEADERS, middlewares
from deployments.relay.replica_calls import TOO_LARGE
from deployments.routing.ray_router import ThreadRequestRouter
from deployments.serve_controller import GCS_TIMEOUT_S
from deployments.serve_flags import SERVE_FLAGS

SERVE = Path(inspect.getfile(serve_private)).parent
RAYLET: Any = _raylet
GCS: Any = gcs_pb2
AUTOSCALER: Any = autoscaler_pb2
RAY = Path(inspect.getfile(ray)).parent


def test_ray_serve_reads_every_setting_that_we_set() -> None:
    constants = (SERVE / "constants.py").read_text()
    ours = [name for name in serve_environment(Path("/tmp/x")) if name.startswith("RAY_SERVE_")]

    assert set(SERVE_FLAGS) <= set(ours)
    assert [name for name in ours if f'"{name}"' not in constants] == []


def test_ray_reads_its_token_from_the_file_that_we_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = RAYLET.AuthenticationTokenLoader.instance()
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    for number in range(2):
        (tmp_path / f"{number}").write_text(f"token-{number}-of-this-test")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / f"{number}"))
        loader.reset_cache()

        assert loader.get_raw_token(ignore_auth_mode=True) == f"token-{number}-of-this-test"
    monkeypatch.undo()
    loader.reset_cache()


def test_ray_starts_its_processes_through_a_popen_that_we_replace() -> None:
    assert issubclass(services.ConsolePopen, subprocess.Popen)
    assert "ConsolePopen(" in inspect.getsource(services.start_ray_process)


def test_ray_starts_what_we_do_without_through_methods_that_we_replace() -> None:
    started = inspect.getsource(Node.start_ray_processes)
    started += inspect.getsource(Node.start_head_processes)

    for name in _UNNEEDED:
        assert f"self.{name}(" in started
        given = list(inspect.signature(getattr(Node, name)).parameters.values())[1:]
        assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in given)


@pytest.mark.parametrize(
    "line",
    [
        "    bind :{{ config.metrics_port }}",
        "    stats socket {{ config.socket_path }} mode 666 level admin ",
        "global\n",
        "    maxconn {{ config.maxconn }}\n",
        "\ndefaults\n",
        "    use_backend {{ backend.name or 'unknown' }} if is_",
        "    option splice-request\n",
        "    errorfile 503 {{ config.error_file_path }}\n",
        "\nfrontend http_frontend\n",
        "\nbackend default_backend\n    http-request return status 404 content-type text/plain ",
    ],
)
def test_haproxys_template_has_the_lines_that_we_change(line: str) -> None:
    assert line in (SERVE / "haproxy_templates.py").read_text()


def test_ray_serve_reads_steering_headers_after_our_middleware() -> None:
    assert {
        SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER.encode(),
        SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER.encode(),
        SERVE_SESSION_ID.encode(),
        SERVE_MULTIPLEXED_MODEL_ID.replace("_", "-").encode(),
    } == STEERING_HEADERS
    flag = SERVE_FLAGS["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
    given = call_function_from_import_path(flag)
    assert http_util.validate_http_proxy_callback_return(given) == given != []
    # Both HTTP servers, behind HAProxy and without it, apply the middlewares.
    assert "_apply_middlewares" in inspect.getsource(http_util.start_asgi_http_server)
    for server in ("proxy.py", "replica.py"):
        source = (SERVE / server).read_text()
        assert "configure_http_middlewares(" in source
        assert "start_asgi_http_server(" in source


def test_a_restarted_controller_counts_deployments_as_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []

    def recover(self: DeploymentState, target_state_checkpoint: object) -> None:
        seen.append(self._replica_has_started)

    signature = inspect.signature(DeploymentState.recover_target_state_from_checkpoint)
    assert list(signature.parameters) == ["self", "target_state_checkpoint"]
    assert "self._replica_has_started: bool = False" in inspect.getsource(DeploymentState.__init__)
    assert "not self._replica_has_started" in inspect.getsource(DeploymentState._terminally_failed)
    monkeypatch.setattr(DeploymentState, "recover_target_state_from_checkpoint", recover)
    monkeypatch.setattr(cluster_node_info_cache, "RAY_GCS_RPC_TIMEOUT_S", 3.0)
    call_function_from_import_path(SERVE_FLAGS["RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH"])
    state: Any = object.__new__(DeploymentState)
    state._replica_has_started = False

    state.recover_target_state_from_checkpoint(None)

    assert seen == [False]
    assert state._replica_has_started
    source = inspect.getsource(cluster_node_info_cache)
    assert "get_all_node_info(timeout=RAY_GCS_RPC_TIMEOUT_S)" in source
    assert vars(cluster_node_info_cache)["RAY_GCS_RPC_TIMEOUT_S"] == GCS_TIMEOUT_S


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


async def test_ray_serve_gets_no_body_of_a_get_request() -> None:
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


async def test_grpc_reports_the_sizes_of_a_message_that_is_too_large() -> None:
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


def test_ray_serve_returns_request_ids() -> None:
    middleware = inspect.getsource(http_util.RequestIdMiddleware)

    assert 'headers.append("X-Request-ID", request_id)' in middleware
    assert "headers.append(SERVE_HTTP_REQUEST_ID_HEADER, request_id)" in middleware


def test_the_folder_of_ray_serves_logs_is_known() -> None:
    assert list(inspect.signature(get_serve_logs_dir).parameters) == []


def test_a_handle_has_serialization_options() -> None:
    parameters = inspect.signature(DeploymentHandle.options).parameters

    assert {"request_serialization", "response_serialization"} <= set(parameters)


def test_a_handle_can_be_used_without_an_event_loop() -> None:
    assert list(inspect.signature(DeploymentHandle._init).parameters) == ["self", "kwargs"]
    assert "_run_router_in_separate_loop" in InitHandleOptionsBase.__dataclass_fields__


def test_our_router_overrides_the_methods_that_ray_serve_calls() -> None:
    for name in (
        "initialize_state",
        "update_replicas",
        "choose_replicas",
        "on_replica_actor_died",
        "on_request_completed",
        "_choose_replica_for_request",
    ):
        ours, theirs = getattr(ThreadRequestRouter, name), getattr(RequestRouter, name)
        assert ours is not theirs
        assert name == "initialize_state" or (
            list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
        )
    assert "self._deployment_id = " in inspect.getsource(RequestRouter.__init__)
    assert issubclass(ThreadRequestRouter, FIFOMixin)


def test_a_pending_request_has_its_arguments_and_its_future() -> None:
    fields = PendingRequest.__dataclass_fields__
    assert {"args", "kwargs", "metadata", "future", "routing_context"} <= set(fields)
    assert "should_backoff" in RequestRoutingContext.__dataclass_fields__
    assert "internal_request_id" in RequestMetadata.__dataclass_fields__


def test_a_replica_has_its_id_its_limit_and_its_routing_stats() -> None:
    assert isinstance(RunningReplica.routing_stats, property)
    assert isinstance(RunningReplica.max_ongoing_requests, property)
    assert isinstance(RunningReplica.replica_id, property)
    assert "unique_id" in ReplicaID.__dataclass_fields__
    assert "record_routing_stats" in inspect.getsource(UserCallableWrapper)


def test_a_replica_is_given_to_the_oldest_request() -> None:
    ours = inspect.signature(ThreadRequestRouter._fulfill_next_pending_request)
    assert list(ours.parameters) == list(
        inspect.signature(FIFOMixin._fulfill_next_pending_request).parameters
    )
    assert "pr = self._pending_requests_to_fulfill.popleft()" in inspect.getsource(
        FIFOMixin._fulfill_next_pending_request
    )
    assert "self._fulfill_next_pending_request(\n" in inspect.getsource(
        RequestRouter._fulfill_pending_requests
    )


def test_every_request_passes_the_choice_of_a_replica() -> None:
    choice = "request_router._choose_replica_for_request(\n"
    assert choice in inspect.getsource(AsyncioRouter._route_and_send_request_once)
    assert "pending_request.reset_future()" in inspect.getsource(
        RequestRouter._choose_replica_for_request
    )


def test_the_end_of_every_call_is_reported_with_its_id() -> None:
    source = inspect.getsource(AsyncioRouter._route_and_send_request_once)
    assert "on_request_completed(\n" in source
    assert "pr.metadata.internal_request_id" in source
    assert "on_request_completed(\n" in inspect.getsource(AsyncioRouter._process_finished_request)


def test_a_call_reports_when_a_replica_has_accepted_it() -> None:
    assert inspect.iscoroutinefunction(DeploymentResponseGenerator._fetch_future_result_async)


class Nothing:
    """A deployment."""


def test_a_deployment_keeps_its_version() -> None:
    deployment: Any = serve.deployment(Nothing)
    versioned = deployment.options(version="1", _internal=True)

    assert versioned.version == "1"
    assert versioned.options(num_replicas=2).version == "1"
    assert "max_surge_percent" in inspect.signature(Deployment.options).parameters


def test_replicas_of_the_same_version_are_not_restarted() -> None:
    source = inspect.getsource(DeploymentVersion.requires_actor_restart)

    assert "self.code_version != new_version.code_version" in source
    assert "init_args" not in source


def test_a_handle_leads_to_the_running_replicas() -> None:
    assert "self._router: Optional[Router] = _router" in inspect.getsource(
        DeploymentHandle.__init__
    )
    assert "self._asyncio_router = AsyncioRouter(" in inspect.getsource(CurrentLoopRouter.__init__)
    assert isinstance(AsyncioRouter.request_router, property)
    assert isinstance(RequestRouter.curr_replicas, property)
    assert hasattr(DeploymentHandle, "broadcast")


def test_an_autoscaling_policy_gets_the_reports_and_keeps_its_state() -> None:
    parameters = inspect.signature(AutoscalingContext.__init__).parameters

    assert {
        "aggregated_metrics",
        "total_queued_requests",
        "current_num_replicas",
        "target_num_replicas",
        "deployment_name",
    } <= set(parameters)
    # Built once.
    assert "_resolve_policy_callable" in inspect.getsource(DeploymentAutoscalingState.register)


def test_gcs_drains_nodes_and_knows_their_addresses() -> None:
    assert {"drain_node", "get_all_node_info"} <= set(dir(RAYLET.InnerGcsClient))
    assert callable(RAYLET.GcsClient)
    assert GCS.GcsNodeInfo.GcsNodeState.Value("ALIVE") == 0
    assert {"node_id", "node_manager_address", "state"} <= set(
        GCS.GcsNodeInfo.DESCRIPTOR.fields_by_name
    )
    # Any other reason is refused while the node has work.
    assert AUTOSCALER.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION") == 2


def test_rays_agent_listens_on_loopback_if_its_node_does() -> None:
    agent = inspect.getsource(reporter_agent)

    assert "address=get_localhost_ip() if is_localhost(self._ip) else" in agent
    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR == "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    assert "ENABLE_RAY_CLUSTER" in inspect.getsource(services.get_node_ip_address)


def test_rays_core_knows_the_settings_that_we_set() -> None:
    core = (RAY / "_raylet.so").read_bytes()
    names = [
        name for name in serve_environment(Path("/tmp/x")) if re.fullmatch("RAY_[a-z_]+", name)
    ]

    assert len(names) > 5
    assert [name for name in names if name.encode() not in core] == []
    assert "REPORTER_UPDATE_INTERVAL_MS" in inspect.getsource(reporter_consts)


def test_uvicorn_hands_out_the_request_whose_answer_it_sends() -> None:
    cycle = inspect.getsource(RequestResponseCycle)

    assert "result = await app(" in cycle
    assert "self.scope, self.receive, self.send" in cycle
    # All that it does with its transport; `HeadWithBody` stands in for it.
    assert set(re.findall(r"self\.transport\.(\w+)\(", cycle)) == {"write", "close", "is_closing"}
    assert "if self.disconnected or self.response_complete:" in cycle
    # When it stops, it waits for the requests that are inside.
    assert "self.server_state.tasks" in inspect.getsource(uvicorn.Server.shutdown)
    # Nothing but our middleware stands between uvicorn's `send` and the shortcut.
    assert "self.app(scope, receive, send)" in inspect.getsource(ProxyHeadersMiddleware.__call__)


def test_replicas_are_actors_in_serves_namespace() -> None:
    assert SERVE_NAMESPACE == "serve"
    assert "namespace=SERVE_NAMESPACE" in (SERVE / "deployment_state.py").read_text()


def test_rays_key_value_store_has_namespaces() -> None:
    for name in ("put", "get", "del", "list"):
        call = getattr(internal_kv, f"_internal_kv_{name}")
        assert "namespace" in inspect.signature(call).parameters


def test_the_url_of_rays_dashboard_is_known() -> None:
    assert list(inspect.signature(worker.get_dashboard_url).parameters) == []


def test_a_replica_knows_its_cap_and_ends_after_its_handles_calls() -> None:
    assert "_deployment_config" in ReplicaContext.__dataclass_fields__
    assert "max_ongoing_requests" in DeploymentConfig.model_fields
    source = inspect.getsource(ServeReplica._perform_graceful_shutdown)
    assert source.index("_drain_ongoing_requests(") < source.index("self.shutdown()")
    assert "call_destructor()" in inspect.getsource(ServeReplica.shutdown)


def test_calls_of_a_request_keep_the_id_that_its_context_has() -> None:
    assert "_internal_request_id" in inspect.signature(context._set_request_context).parameters
    assert context._get_serve_request_context()._internal_request_id == ""
    source = inspect.getsource(default_impl)
    assert "internal_request_id=_request_context._internal_request_id" in source
