"""Metrics of a gateway, with fake replicas."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config.keys import ANONYMOUS, KeyConfig, hash_of
from cluster.metrics import catalogue
from cluster.metrics.catalogue import Metric
from deployments.app.ingress import FrontDoor
from deployments.gateway.gateway import Gateway
from deployments.gateway.gateway_metrics import GatewayMetrics, Outcome, outcome_of
from deployments.gateway.request_log import RequestRecord
from deployments.relay.relay import Progress
from deployments.routing.shared_router import ROUTERS
from deployments.wire.answer import AnswerEnd, AnswerStart, Piece
from deployments.wire.errors import NoReplicaError, ReplicaLostError
from deployments.wire.request import RelayedRequest
from tests.fakes.instruments import FakeInstruments
from tests.fakes.replicas import (
    CHAT,
    EVENTS,
    JSON,
    FakeReplicas,
    client_of,
    gateway_of,
    settings_of,
)

OK = AnswerStart(200, JSON, b"{}")
STREAM = AnswerStart(200, EVENTS, b"data: {}\n\n")
ERROR_EVENT = Piece(b'data: {"error": {"message": "no", "code": 500}}\n\ndata: [DONE]\n\n')


class ExportedMetrics:
    """A gateway and the metrics it exports."""

    def __init__(self, *replicas: FakeReplicas, keys: tuple[KeyConfig, ...] = ()) -> None:
        self.instruments = FakeInstruments()
        self.gateway: Gateway = gateway_of(*replicas, keys=keys)
        self.gateway.metrics = GatewayMetrics(self.instruments)
        self.http = client_of(self.gateway)

    def value(self, metric: Metric, part: str = "", **labels: str) -> float | None:
        return self.instruments.value(metric.name + part, **labels)

    async def outcomes(self, model: str = "m") -> dict[str, float]:
        """Requests of a model by their outcome, without the zeros."""
        await self.gateway.flush_metrics()
        return {
            outcome.value: number
            for outcome in Outcome
            if (number := self.value(catalogue.REQUESTS, model=model, outcome=outcome.value))
        }

    async def rejections(self) -> dict[tuple[str, str], float]:
        """Refusals by reason and key class, without the zeros."""
        await self.gateway.flush_metrics()
        return {
            (dict(labels)["reason"], dict(labels)["key_class"]): number
            for (name, labels), number in self.instruments.values.items()
            if name == catalogue.REQUESTS_REJECTED.name and number
        }


async def test_an_invalid_keys_file_is_reported_until_it_is_fixed(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("[]")
    exported = ExportedMetrics(FakeReplicas(OK))
    values = []
    for text in ("[]", "- wrong", "[]"):
        file.write_text(text)
        await exported.gateway.reconfigure(settings_of(1, keys_file=file), [FakeReplicas(OK)])
        await exported.gateway.flush_metrics()
        values.append(exported.value(catalogue.SETTINGS_REFUSED, source="keys_file"))

    assert values == [0, 1, 0]


async def test_dropped_log_lines_are_counted() -> None:
    exported = ExportedMetrics(FakeReplicas(OK))
    for num_lines in (0, 4):
        exported.gateway.metrics.recorder.set_total(catalogue.LOG_LINES_DROPPED, num_lines)
        await exported.gateway.flush_metrics()

    assert exported.value(catalogue.LOG_LINES_DROPPED) == 4


async def test_successful_requests_are_counted_and_timed() -> None:
    exported = ExportedMetrics(FakeReplicas(OK), FakeReplicas(STREAM))

    await exported.http.post(CHAT, json={"model": "m"})
    await exported.http.post("/v1/completions", json={"model": "m1", "stream": True})

    assert await exported.outcomes("m") == await exported.outcomes("m1") == {"ok": 1}
    for model, num_streams in (("m", 0), ("m1", 1)):
        assert exported.value(catalogue.REQUEST_LATENCY, "_count", model=model) == 1
        assert exported.value(catalogue.QUEUE_TIME, "_count", model=model) == 1
        assert exported.value(catalogue.TIME_TO_FIRST_TOKEN, "_count", model=model) == num_streams


async def test_only_requests_for_completions_count() -> None:
    exported = ExportedMetrics(FakeReplicas(OK))

    await exported.http.post("/tokenize", json={"model": "m"})
    await exported.http.get("/v1/models")
    await exported.http.get("/health")

    assert await exported.outcomes() == {}
    assert await exported.rejections() == {}


@pytest.mark.parametrize(
    ("replicas", "streams", "outcome", "given_up", "rejected"),
    [
        (FakeReplicas(AnswerStart(400, JSON, b"{}")), False, "client_error", 0, {}),
        (FakeReplicas(AnswerStart(500, JSON, b"{}")), False, "server_error", 0, {}),
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

    assert await exported.outcomes() == {outcome: 1}
    assert exported.value(catalogue.GIVEN_UP, model="m") == given_up
    assert await exported.rejections() == rejected
    assert exported.value(catalogue.REQUEST_LATENCY, "_count", model="m") == 0


class Losing(FakeReplicas):
    """Each attempt raises the next error."""

    async def whole(
        self, request: RelayedRequest, progress: Progress | None = None
    ) -> tuple[AnswerStart, AnswerEnd]:
        self.requests.append(request)
        error = self.parts[len(self.requests) - 1]
        assert isinstance(error, Exception)
        raise error


async def test_a_lost_request_that_no_other_replica_takes_is_given_up() -> None:
    exported = ExportedMetrics(Losing(ReplicaLostError("dead"), NoReplicaError("none")))

    answer = await exported.http.post(CHAT, json={"model": "m"})

    assert answer.json()["error"]["code"] == NoReplicaError.code
    assert await exported.outcomes() == {"server_error": 1}
    assert exported.value(catalogue.GIVEN_UP, model="m") == 1
    assert await exported.rejections() == {}


async def test_a_disconnect_counts_as_cancelled_after_running() -> None:
    replicas = FakeReplicas(OK)
    replicas.gate.clear()
    exported = ExportedMetrics(replicas)

    request = asyncio.create_task(exported.http.post(CHAT, json={"model": "m"}))
    while not replicas.requests:  # noqa: ASYNC110 - the request arrives within some turns
        await asyncio.sleep(0)
    await exported.gateway.flush_metrics()
    running = exported.value(catalogue.REQUESTS_RUNNING, model="m")
    request.cancel()
    await asyncio.wait([request])

    assert running == 1
    assert await exported.outcomes() == {"cancelled": 1}
    assert exported.value(catalogue.REQUESTS_RUNNING, model="m") == 0


async def test_lost_replicas_are_counted_by_the_result_of_the_request() -> None:
    exported = ExportedMetrics()
    record = RequestRecord("r", "POST", CHAT, model="m", status=200, retries=3, continued=2)

    exported.gateway.metrics.ended(record)
    exported.gateway.metrics.flush([], ())

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

    assert await exported.rejections() == {
        ("authentication", ANONYMOUS): 1,
        ("unknown_model", "paying"): 1,
        ("invalid", "paying"): 1,
        ("unknown_route", ANONYMOUS): 2,
    }
    # A wrong method on the completions path ends with an error.
    assert await exported.outcomes("unknown") == {"client_error": 4}


async def test_every_key_class_starts_at_0() -> None:
    key = KeyConfig(name="k", hash=hash_of("k"), metrics_class="paying")
    exported = ExportedMetrics(FakeReplicas(OK), keys=(key,))

    await exported.gateway.flush_metrics()

    for key_class in ("paying", ANONYMOUS):
        zero = exported.value(catalogue.REQUESTS_REJECTED, reason="overloaded", key_class=key_class)
        assert zero == 0


async def test_requests_during_a_drain_are_counted() -> None:
    num_late = 0

    def count() -> None:
        nonlocal num_late
        num_late += 1

    door = FrontDoor(gateway_of(FakeReplicas(OK)), count)
    async with client_of(door) as http:
        await http.post(CHAT, json={"model": "m"})
        door.close()
        await http.post(CHAT, json={"model": "m"})

    assert num_late == 1


async def test_the_replica_count_is_exported_once_there_is_a_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exported = ExportedMetrics(FakeReplicas(OK))
    [model] = exported.gateway.waiting()

    await exported.gateway.flush_metrics()
    unknown = exported.value(catalogue.REPLICAS, model="m")
    known: Callable[[], dict[str, dict[str, int]]] = lambda: {model: {"full": 2}}  # noqa: E731
    monkeypatch.setattr(ROUTERS, "decisions", known)
    monkeypatch.setattr(ROUTERS, "capacity", lambda deployment: 3)
    await exported.gateway.flush_metrics()

    assert unknown is None
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
