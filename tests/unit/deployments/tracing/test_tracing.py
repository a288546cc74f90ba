"""Sampling and export of spans; a collector never blocks the process."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

from cluster.local_ray import free_port
from deployments.config.tracing import TracingConfig
from deployments.tracing.tracing import Tracing, close_tracing, open_tracing, reopened
from tests.fakes.otlp_collector import grpc_collector, http_collector

SLOWLY: dict[str, Any] = {"export_s": 60.0}


def make_spans(tracing: Tracing, number: int) -> None:
    for _ in range(number):
        tracing.start("work", SpanKind.INTERNAL, Context()).end()


async def test_spans_reach_a_collector_over_http_with_headers_and_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("APAR_TEST_HEADER", "secret")
    with http_collector() as collector:
        config = TracingConfig.model_validate(
            {
                "endpoint": collector.endpoint,
                "headers": {"authorization": {"env": "APAR_TEST_HEADER"}},
                "service_name": "mine",
            }
        )
        tracing = Tracing(config, "gateway")
        make_spans(tracing, 3)
        await close_tracing(tracing)

    assert [span.name for span in collector.spans] == ["work"] * 3
    (headers,) = collector.headers
    assert headers["authorization"] == "secret"
    assert headers[":path"] == "/v1/traces"
    resource = collector.spans[0].resource
    assert (resource["service.name"], resource["apar.role"]) == ("mine", "gateway")


async def test_a_path_in_the_endpoint_is_kept() -> None:
    with http_collector() as collector:
        tracing = Tracing(TracingConfig(endpoint=collector.endpoint + "/otlp/traces"), "gateway")
        make_spans(tracing, 1)
        await close_tracing(tracing)

    assert collector.headers[0][":path"] == "/otlp/traces"


async def test_spans_reach_a_collector_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APAR_TEST_HEADER", "secret")
    with grpc_collector() as collector:
        config = TracingConfig.model_validate(
            {
                "endpoint": collector.endpoint,
                "protocol": "grpc",
                "headers": {"Authorization": {"env": "APAR_TEST_HEADER"}},
            }
        )
        tracing = Tracing(config, "replica")
        make_spans(tracing, 3)
        await close_tracing(tracing)

    assert len(collector.spans) == 3
    assert collector.headers[0]["authorization"] == "secret"


def test_spans_are_sent_in_the_interval_of_the_configuration() -> None:
    with http_collector() as collector:
        tracing = Tracing(TracingConfig(endpoint=collector.endpoint, export_s=0.05), "gateway")
        slow = Tracing(TracingConfig(endpoint=collector.endpoint, **SLOWLY), "replica")
        make_spans(tracing, 1)
        make_spans(slow, 1)

        assert collector.wait_for(lambda span: True).resource["apar.role"] == "gateway"
        assert len(collector.spans) == 1
        slow.flush_soon()
        collector.wait_for(lambda span: span.resource["apar.role"] == "replica")


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, 0), (1.0, 200), (0.5, None)])
def test_the_ratio_of_traces_is_sampled(ratio: float, expected: int | None) -> None:
    tracing = Tracing(TracingConfig(endpoint="http://127.0.0.1:1", sample_ratio=ratio), "gateway")

    spans = [tracing.start("work", SpanKind.SERVER, Context()) for _ in range(200)]

    sampled = sum(span.is_recording() for span in spans)
    # Fewer than 60 or more than 140 heads of 200 fair coins have a probability of 10^-8.
    assert sampled == expected if expected is not None else 60 < sampled < 140


@pytest.mark.parametrize("flag", ["00", "01"])
def test_the_callers_sampling_decision_is_kept(flag: str) -> None:
    ratio = 1.0 if flag == "00" else 0.0
    tracing = Tracing(TracingConfig(endpoint="http://127.0.0.1:1", sample_ratio=ratio), "gateway")
    header = f"00-{'ab' * 16}-{'cd' * 8}-{flag}"

    span = tracing.start("work", SpanKind.SERVER, tracing.context_of({"traceparent": header}))

    assert span.is_recording() == (flag == "01")
    assert span.get_span_context().trace_id == int("ab" * 16, 16)


class Held(SpanExporter):
    """Exports nothing before it is released, and counts."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.num_spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.released.wait()
        self.num_spans += len(spans)
        return SpanExportResult.SUCCESS


async def test_the_queue_is_bounded() -> None:
    exporter = Held()
    config = TracingConfig(endpoint="http://127.0.0.1:1", max_queued_spans=10, export_s=60.0)
    tracing = Tracing(config, "gateway", exporter)

    # A batch fills the queue and wakes the exporter, which hangs.
    make_spans(tracing, 1000)
    exporter.released.set()
    await close_tracing(tracing)

    assert 10 <= exporter.num_spans <= 30


async def test_a_hanging_collector_delays_shutdown_only_until_the_timeout() -> None:
    exporter = Held()
    tracing = Tracing(TracingConfig(endpoint="http://127.0.0.1:1"), "gateway", exporter)
    make_spans(tracing, 1)

    await close_tracing(tracing, 0.2)

    assert exporter.num_spans == 0
    exporter.released.set()


async def test_a_collector_that_is_down_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    config = TracingConfig(endpoint=f"http://127.0.0.1:{free_port()}", export_s=0.05, timeout_s=0.2)
    tracing = Tracing(config, "gateway")
    with caplog.at_level(logging.DEBUG):
        for _ in range(5):
            make_spans(tracing, 1)
            await asyncio.sleep(0.3)
        await close_tracing(tracing)

    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in warnings] == ["spans could not be exported"]


async def test_a_changed_configuration_reopens_tracing_without_losing_spans() -> None:
    off = TracingConfig()
    assert open_tracing(off, "gateway") is None
    assert reopened(None, off, "gateway") is None
    with http_collector() as collector:
        config = TracingConfig(endpoint=collector.endpoint, **SLOWLY)
        first = reopened(None, config, "gateway")
        assert first is not None
        assert reopened(first, config, "gateway") is first
        make_spans(first, 1)

        second = reopened(first, config.model_copy(update={"service_name": "b"}), "gateway")

        assert second is not None
        assert second is not first
        assert collector.wait_for(lambda span: True).resource["service.name"] == "apar"
        make_spans(second, 1)
        assert reopened(second, off, "gateway") is None
        collector.wait_for(lambda span: span.resource["service.name"] == "b")
