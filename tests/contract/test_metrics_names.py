"""Private names and behaviour of Ray's and vLLM's metrics that ours rely on."""

import inspect
from pathlib import Path

import ray
from ray._private import ray_constants, services, worker
from ray._private.telemetry import open_telemetry_metric_recorder as recorder
from ray.dashboard.modules.reporter import reporter_agent
from ray.experimental import internal_kv
from ray.util import metrics
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics import ray_wrappers
from vllm.v1.metrics.loggers import PrometheusStatLogger

RAY = Path(inspect.getfile(ray)).parent


def test_a_number_can_be_handed_to_ray_with_its_labels() -> None:
    assert list(inspect.signature(metrics.Metric._record).parameters) == ["self", "value", "tags"]
    # Why it is not `inc`: a count must be told before it rises.
    assert "if value <= 0:" in inspect.getsource(metrics.Counter.inc)


def test_rays_own_histograms_put_values_in_the_middle_of_their_buckets() -> None:
    source = inspect.getsource(recorder.OpenTelemetryMetricRecorder)

    assert "instrument.record(midpoint, attributes=filtered_tags)" in source


def test_a_gauge_lives_for_two_reports() -> None:
    source = inspect.getsource(recorder.OpenTelemetryMetricRecorder._resolve_gauge_ttl_seconds)

    assert "2 * effective_report_interval_ms / 1000.0" in source


def test_rays_agent_listens_on_loopback_where_its_node_is_there() -> None:
    agent = inspect.getsource(reporter_agent)

    assert "address=get_localhost_ip() if is_localhost(self._ip) else" in agent
    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR == "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    assert "ENABLE_RAY_CLUSTER" in inspect.getsource(services.get_node_ip_address)


def test_rays_core_knows_the_settings_that_we_make() -> None:
    core = (RAY / "_raylet.so").read_bytes()

    for name in (b"metrics_report_interval_ms", b"enable_metrics_collection"):
        assert name in core


def test_rays_store_of_keys_has_the_calls_of_notes() -> None:
    for name in ("put", "get", "del", "list"):
        call = getattr(internal_kv, f"_internal_kv_{name}")
        assert "namespace" in inspect.signature(call).parameters


def test_ray_tells_where_its_dashboard_is() -> None:
    assert list(inspect.signature(worker.get_dashboard_url).parameters) == []


def test_vllm_makes_its_metrics_of_classes_that_can_be_replaced() -> None:
    replaced = {"_gauge_cls", "_counter_cls", "_histogram_cls", "_spec_decoding_cls"}
    replaced |= {"_kv_connector_cls", "_perf_metrics_cls"}

    assert replaced <= set(vars(PrometheusStatLogger))
    assert issubclass(ray_wrappers.RayPrometheusStatLogger, PrometheusStatLogger)
    sanitize = ray_wrappers.RayPrometheusMetric._get_sanitized_opentelemetry_name
    assert sanitize("vllm:a_b") == "vllm_a_b"
    assert "stat_loggers" in inspect.signature(AsyncLLM.from_vllm_config).parameters
