"""Metrics of a gateway, with fake replicas."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.app.ingress import DrainMiddleware
from deployments.config.keys import ANONYMOUS, KeyConfig, hash_of
from deployments.gateway.gateway import Gateway
from deployments.gateway.gateway_metrics import GatewayMetrics, Outcome, outcome_of, watch_lag
from deployments.gateway.request_log import RequestRecord
from deployments.gateway.shared_slots import SharedSlots
from deployments.metrics import catalogue
from deployments.metrics.catalogue import Metric
from deployments.relay.relay import Progress
from deployments.routing.shared_router import ROUTERS
from deployments.wire.errors import NoReplicaError, ReplicaLostError
from deployments.wire.request import RelayedRequest
from deployments.wire.response import Piece, ResponseEnd, ResponseStart
from tests.fakes.clock import Clock
from tests.fakes.replicas import (
    CHAT,
    EVENTS,
    JSON,
    FakeReplicas,
    client_of,
    gateway_of,
    settings_of,
)

OK = ResponseStart(200, JSON, b"{}")
STREAM = ResponseStart(200, EVENTS, b"data: {}\n\n")
ERROR_EVENT = Piece(b'data: {"error": {"message": "no", "code": 500}}\n\ndata: [DONE]\n\n')


class ExportedMetrics:
    """A gateway and the metrics it exports."""

    def __init__(self, *replicas: FakeReplicas, keys: tuple[KeyConfig, ...] = ()) -> None:
        self.gateway: Gateway = gateway_of(*replicas, keys=keys)
        self.http = client_of(self.gateway)

    def value(self, metric: Metric, part: str = "", **labels: str) -> float | None:
        return self.gateway.metrics.recorder.value(metric, part, **labels)

    def counts(self, metric: Metric, *names: str) -> dict[tuple[str, ...], float]:
        """Series of a counter by some labels, without the zeros."""
        found: dict[tuple[str, ...], float] = {}
        for family in self.gateway.metrics.recorder.registry.collect():
            for sample in family.samples:
                if sample.name == metric.name and sample.value:
                    key = tuple(sample.labels[name] for name in names)
                    found[key] = found.get(key, 0.0) + sample.value
        return found

    def outcomes(self, model: str = "m") -> dict[str, float]:
        """Requests of a model by their outcome, without the zeros."""
        counts = self.counts(catalogue.REQUESTS, "model", "outcome")
        return {outcome: number for (name, outcome), number in counts.items() if name == model}

    def rejections(self) -> dict[tuple[str, ...], float]:
        """Refusals by reason and key class, without the zeros."""
        return self.counts(catalogue.REQUESTS_REJECTED, "reason", "key_class")


async def test_an_invalid_keys_file_is_reported_until_it_is_fixed(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("[]")
    exported = ExportedMetrics(FakeReplicas(OK))
    values = []
    for text in ("[]", "- wrong", "[]"):
        file.write_text(text)
        await exported.gateway.reconfigure(settings_of(1, keys_file=file), [FakeReplicas(OK)])
        exported.gateway.take_metrics()
        values.append(exported.value(catalogue.SETTINGS_REFUSED, source="keys_file"))

    assert values == [0, 1, 0]


async def test_dropped_log_lines_are_counted() -> None:
    exported = ExportedMetrics(FakeReplicas(OK))
    for num_lines in (0, 4):
        exported.gateway.metrics.recorder.set_total(catalogue.LOG_LINES_DROPPED, num_lines)
        exported.gateway.take_metrics()

    assert exported.value(catalogue.LOG_LINES_DROPPED) == 4


async def test_successful_requests_are_counted_and_timed() -> None:
    exported = ExportedMetrics(FakeReplicas(OK), FakeReplicas(STREAM))

    await exported.http.post(CHAT, json={"model": "m"})
    await exported.http.post("/v1/completions", json={"model": "m1", "stream": True})

    exported.gateway.take_metrics()
    assert exported.outcomes("m") == exported.outcomes("m1") == {"ok": 1}
    for model, num_streams in (("m", 0), ("m1", 1)):
        assert exported.value(catalogue.REQUEST_LATENCY, "_count", model=model) == 1
        assert exported.value(catalogue.QUEUE_TIME, "_count", model=model) == 1
        assert exported.value(catalogue.TIME_TO_FIRST_TOKEN, "_count", model=model) == num_streams


async def test_only_requests_for_completions_count() -> None:
    exported = ExportedMetrics(FakeReplicas(OK))

    await exported.http.post("/tokenize", json={"model": "m"})
    await exported.http.get("/v1/models")
    await exported.http.get("/health")

    assert exported.outcomes() == {}
    assert exported.rejections() == {}


@pytest.mark.parametrize(
    ("replicas", "streams", "outcome", "given_up", "rejected"),
    [
        (FakeReplicas(ResponseStart(400, JSON, b"{}")), False, "client_error", 0, {}),
        (FakeReplicas(ResponseStart(500, JSON, b"{}")), False, "server_error", 0, {}),
        (FakeReplicas(RuntimeError("ours")), False, "server_error", 0, {}),
        (FakeReplicas(STREAM, ERROR_EVENT), True, "server_error", 0, {}),
        (FakeReplicas(STREAM, ReplicaLostError("dead")), True, "server_error", 1, {}),
        (
            FakeReplicas(NoReplicaError("none")),
            False,
            "server_error",
            0,
            {("no_replica", ANONYMOUS): 1},
        ),
    ],
)
async def test_every_request_has_an_outcome(
    replicas: FakeReplicas,
    streams: bool,
    outcome: str,
    given_up: int,
    rejected: dict[tuple[str, str], float],
) -> None:
    exported = ExportedMetrics(replicas)

    await exported.http.post(CHAT, json={"model": "m", "stream": streams})

    exported.gateway.take_metrics()
    assert exported.outcomes() == {outcome: 1}
    assert exported.value(catalogue.GIVEN_UP, model="m") == given_up
    assert exported.rejections() == rejected
    assert exported.value(catalogue.REQUEST_LATENCY, "_count", model="m") == 0


class Losing(FakeReplicas):
    """Each attempt raises the next error."""

    async def whole(
        self, request: RelayedRequest, progress: Progress | None = None
    ) -> tuple[ResponseStart, ResponseEnd]:
        self.requests.append(request)
        error = self.parts[len(self.requests) - 1]
        assert isinstance(error, Exception)
        raise error


async def test_a_lost_request_that_no_other_replica_takes_is_given_up() -> None:
    exported = ExportedMetrics(Losing(ReplicaLostError("dead"), NoReplicaError("none")))

    answer = await exported.http.post(CHAT, json={"model": "m"})

    assert answer.json()["error"]["code"] == NoReplicaError.code
    assert exported.outcomes() == {"server_error": 1}
    assert exported.value(catalogue.GIVEN_UP, model="m") == 1
    assert exported.rejections() == {}


async def test_a_disconnect_counts_as_cancelled_after_running() -> None:
    replicas = FakeReplicas(OK)
    replicas.gate.clear()
    exported = ExportedMetrics(replicas)

    request = asyncio.create_task(exported.http.post(CHAT, json={"model": "m"}))
    while not replicas.requests:  # noqa: ASYNC110 - the request arrives within some turns
        await asyncio.sleep(0)
    exported.gateway.take_metrics()
    running = exported.value(catalogue.REQUESTS_RUNNING, model="m")
    request.cancel()
    await asyncio.wait([request])

    assert running == 1
    exported.gateway.take_metrics()
    assert exported.outcomes() == {"cancelled": 1}
    assert exported.value(catalogue.REQUESTS_RUNNING, model="m") == 0


async def test_lost_replicas_are_counted_by_the_result_of_the_request() -> None:
    exported = ExportedMetrics()
    record = RequestRecord("r", "POST", CHAT, model="m", status=200, retries=3, continued=2)

    exported.gateway.metrics.ended(record)

    assert exported.value(catalogue.RETRIES, model="m") == 1
    assert exported.value(catalogue.MIGRATIONS, model="m") == 2


async def test_refusals_are_counted_by_reason_and_key_class() -> None:
    key = KeyConfig(name="k", hash=hash_of("k"), metrics_class="paying")
    exported = ExportedMetrics(FakeReplicas(OK), keys=(key,))
    headers = {"authorization": "Bearer k"}

    await exported.http.post(CHAT, json={"model": "m"})
    await exported.http.post(CHAT, json={"model": "other"}, headers=headers)
    await exported.http.post(CHAT, content=b"[]", headers=headers)
    await exported.http.post("/nowhere", headers=headers)
    await exported.http.get(CHAT, headers=headers)

    assert exported.rejections() == {
        ("authentication", ANONYMOUS): 1,
        ("unknown_model", "paying"): 1,
        ("invalid", "paying"): 1,
        ("unknown_route", ANONYMOUS): 2,
    }
    # A wrong method on the completions path ends with an error.
    assert exported.outcomes("unknown") == {"client_error": 4}


async def test_every_key_class_starts_at_0() -> None:
    key = KeyConfig(name="k", hash=hash_of("k"), metrics_class="paying")
    exported = ExportedMetrics(FakeReplicas(OK), keys=(key,))

    exported.gateway.take_metrics()

    for key_class in ("paying", ANONYMOUS):
        zeros = [
            exported.value(catalogue.REQUESTS_REJECTED, reason="overloaded", key_class=key_class),
            exported.value(catalogue.REQUESTS, model="m", outcome="ok", key_class=key_class),
            exported.value(catalogue.CHARGED_TOKENS, model="m", kind="prompt", key_class=key_class),
        ]
        assert zeros == [0, 0, 0]


async def test_requests_and_tokens_are_counted_by_key_class() -> None:
    key = KeyConfig(name="k", hash=hash_of("k"), metrics_class="paying")
    exported = ExportedMetrics(
        FakeReplicas(OK, end=ResponseEnd(prompt_tokens=3, generated_tokens=5)), keys=(key,)
    )

    await exported.http.post(CHAT, json={"model": "m"}, headers={"authorization": "Bearer k"})
    await exported.http.post(CHAT, json={"model": "m"})

    assert exported.counts(catalogue.REQUESTS, "key_class", "outcome") == {
        ("paying", "ok"): 1,
        (ANONYMOUS, "client_error"): 1,
    }
    assert exported.counts(catalogue.CHARGED_TOKENS, "key_class", "kind") == {
        ("paying", "prompt"): 3,
        ("paying", "generated"): 5,
    }


class Pausing(FakeReplicas):
    """A stream whose replica is lost in its middle; some chunks have no text in reading order."""

    def __init__(self, forks: int) -> None:
        super().__init__(STREAM)
        self.forks = forks
        self.begun = False

    async def stream(self, request: RelayedRequest) -> AsyncGenerator[Any, None]:
        yield replace(STREAM, continuable=True)
        if not self.begun:
            self.begun = True
            for pause_s, certain in ((0.25, 1), (0.5, 3), (0.25, 3)):
                await asyncio.sleep(pause_s)
                yield Piece(b"data: {}\n\n", certain_tokens=certain)
            raise ReplicaLostError("gone")
        # The tokens that the client has count again.
        for pause_s, certain in ((0.0, 3), (0.5, 6), (0.125, 8)):
            await asyncio.sleep(pause_s)
            yield Piece(b"data: {}\n\n", certain_tokens=certain)
        yield ResponseEnd(threads=self.forks + 1, forks=self.forks)


@pytest.mark.usefixtures("simulated_clocks")
@pytest.mark.parametrize(("forks", "forked"), [(0, "no"), (2, "yes")])
async def test_a_streams_times_are_those_of_its_text_in_reading_order(
    forks: int, forked: str
) -> None:
    exported = ExportedMetrics(Pausing(forks), FakeReplicas(OK))
    exported.gateway.take_metrics()
    other = {"no": "yes", "yes": "no"}[forked]

    await exported.http.post(CHAT, json={"model": "m", "stream": True})
    await exported.http.post(CHAT, json={"model": "m1"})

    def value(metric: Metric, part: str) -> float | None:
        assert exported.value(metric, "_count", model="m", forked=other) == 0
        assert exported.value(metric, "_count", model="m", forked="unknown") == 0
        assert exported.value(metric, "_count", model="m", forked=forked) == 1
        assert exported.value(metric, "_count", model="m1", forked="unknown") == 0
        return exported.value(metric, part, model="m", forked=forked)

    # 1 token after 0.25 s, 2 more after 0.75 s; the next 3 after 1.5 s at least.
    pause_s = value(catalogue.LONGEST_SILENCE, "_sum")
    assert pause_s is not None
    assert pause_s >= 0.75
    mean_s = (0.25 + 2 * 0.75 + 3 * (0.75 + pause_s) + 2 * (0.875 + pause_s)) / 8
    assert value(catalogue.TIME_TO_CERTAIN_TOKEN, "_sum") == pytest.approx(mean_s)


async def test_a_stream_that_breaks_off_does_not_tell_whether_it_forked() -> None:
    lost = FakeReplicas(
        ResponseStart(200, EVENTS, b"data: {}\n\n", certain_tokens=1), ReplicaLostError("gone")
    )
    exported = ExportedMetrics(lost)

    await exported.http.post(CHAT, json={"model": "m", "stream": True})

    for forked, number in (("unknown", 1), ("yes", None), ("no", None)):
        found = exported.value(catalogue.TIME_TO_CERTAIN_TOKEN, "_count", model="m", forked=forked)
        assert found == number


async def test_a_blocked_event_loop_is_measured() -> None:
    metrics = GatewayMetrics()
    task = asyncio.create_task(watch_lag(metrics, period_s=0.01))
    await asyncio.sleep(0.03)
    time.sleep(0.1)  # noqa: ASYNC251 - blocks the loop on purpose
    await asyncio.sleep(0.03)
    task.cancel()

    lags = metrics.recorder
    assert (lags.value(catalogue.EVENT_LOOP_LAG, "_sum") or 0) >= 0.08
    within = lags.value(catalogue.EVENT_LOOP_LAG, "_bucket", le="0.05") or 0
    assert (lags.value(catalogue.EVENT_LOOP_LAG, "_count") or 0) - within >= 1


async def test_a_removed_model_leaves_the_gauges() -> None:
    exported = ExportedMetrics(FakeReplicas(OK), FakeReplicas(OK))
    exported.gateway.take_metrics()

    await exported.gateway.reconfigure(settings_of(1), [FakeReplicas(OK)])
    exported.gateway.take_metrics()

    assert exported.value(catalogue.REPLICAS_WANTED, model="m") == 1
    assert math.isnan(exported.value(catalogue.REPLICAS_WANTED, model="m1") or 0)


async def test_what_a_gateway_cannot_reach_is_exported() -> None:
    replicas = FakeReplicas(OK)
    exported = ExportedMetrics(replicas)
    clock = Clock(0.0)
    # It is heard of once, when it is made.
    ledger: Any = None
    exported.gateway.share(SharedSlots(ledger, 2, clock))
    values = []
    for unreachable, now_s in ((0, 0.0), (2, 60.0)):
        replicas.num_unreachable, clock.now_s = unreachable, now_s
        exported.gateway.take_metrics()
        values.append(
            (
                exported.value(catalogue.UNREACHABLE_REPLICAS, model="m"),
                exported.value(catalogue.SHARED_STATE_SILENT),
            )
        )

    assert values == [(0, 0), (2, 1)]


async def test_requests_during_a_drain_are_counted() -> None:
    num_late = 0

    def count() -> None:
        nonlocal num_late
        num_late += 1

    drain = DrainMiddleware(gateway_of(FakeReplicas(OK)), count)
    async with client_of(drain) as http:
        await http.post(CHAT, json={"model": "m"})
        drain.close()
        await http.post(CHAT, json={"model": "m"})

    assert num_late == 1


async def test_the_replica_count_is_exported_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exported = ExportedMetrics(FakeReplicas(OK))
    [model] = exported.gateway.waiting()

    exported.gateway.take_metrics()
    at_first = exported.value(catalogue.REPLICAS, model="m")
    known: Callable[[], dict[str, dict[str, int]]] = lambda: {model: {"full": 2}}  # noqa: E731
    monkeypatch.setattr(ROUTERS, "decisions", known)
    monkeypatch.setattr(ROUTERS, "capacity", lambda deployment: 3)
    exported.gateway.take_metrics()

    assert at_first == 0
    assert exported.value(catalogue.REPLICAS, model="m") == 3
    assert exported.value(catalogue.REPLICAS_WANTED, model="m") == 1
    assert exported.value(catalogue.ROUTER_DECISIONS, model="m", reason="full") == 2
    assert exported.value(catalogue.ROUTER_DECISIONS, model="m", reason="affinity") == 0


@pytest.mark.parametrize(
    ("record", "outcome"),
    [
        (RequestRecord("r", "POST", CHAT), Outcome.CANCELLED),
        (RequestRecord("r", "POST", CHAT, status=200, cancelled=True), Outcome.CANCELLED),
        (RequestRecord("r", "POST", CHAT, status=200), Outcome.OK),
        (RequestRecord("r", "POST", CHAT, status=429), Outcome.CLIENT_ERROR),
        (RequestRecord("r", "POST", CHAT, status=503), Outcome.SERVER_ERROR),
    ],
)
def test_the_outcome_follows_from_the_record(record: RequestRecord, outcome: Outcome) -> None:
    assert outcome_of(record) is outcome
