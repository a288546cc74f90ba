"""What a gateway counts of requests that are played."""

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
from tests.fakes.played_instruments import PlayedInstruments
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


class Told:
    """A gateway, and what it tells."""

    def __init__(self, *replicas: FakeReplicas, keys: tuple[KeyConfig, ...] = ()) -> None:
        self.instruments = PlayedInstruments()
        self.gateway: Gateway = gateway_of(*replicas, keys=keys)
        self.gateway.metrics = GatewayMetrics(self.instruments)
        self.http = client_of(self.gateway)

    def value(self, metric: Metric, part: str = "", **labels: str) -> float | None:
        return self.instruments.value(metric.name + part, **labels)

    async def outcomes(self, model: str = "m") -> dict[str, float]:
        """Requests of a model by their outcome, without the zeros."""
        await self.gateway.tell_metrics()
        return {
            outcome.value: number
            for outcome in Outcome
            if (number := self.value(catalogue.REQUESTS, model=model, outcome=outcome.value))
        }

    async def rejections(self) -> dict[tuple[str, str], float]:
        """Refusals by reason and key class, without the zeros."""
        await self.gateway.tell_metrics()
        return {
            (dict(labels)["reason"], dict(labels)["key_class"]): number
            for (name, labels), number in self.instruments.values.items()
            if name == catalogue.REQUESTS_REJECTED.name and number
        }


async def test_a_keys_file_that_cannot_be_used_is_told_until_it_is_mended(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("[]")
    told = Told(FakeReplicas(OK))
    values = []
    for text in ("[]", "- wrong", "[]"):
        file.write_text(text)
        await told.gateway.reconfigure(settings_of(1, keys_file=file), [FakeReplicas(OK)])
        await told.gateway.tell_metrics()
        values.append(told.value(catalogue.SETTINGS_REFUSED, source="keys_file"))

    assert values == [0, 1, 0]


async def test_log_lines_that_were_left_out_are_told() -> None:
    told = Told(FakeReplicas(OK))
    for num_lines in (0, 4):
        told.gateway.metrics.recorder.set_total(catalogue.LOG_LINES_DROPPED, num_lines)
        await told.gateway.tell_metrics()

    assert told.value(catalogue.LOG_LINES_DROPPED) == 4


async def test_requests_that_end_well_are_counted_and_timed() -> None:
    told = Told(FakeReplicas(OK), FakeReplicas(STREAM))

    await told.http.post(CHAT, json={"model": "m"})
    await told.http.post("/v1/completions", json={"model": "m1", "stream": True})

    assert await told.outcomes("m") == await told.outcomes("m1") == {"ok": 1}
    for model, num_streams in (("m", 0), ("m1", 1)):
        assert told.value(catalogue.REQUEST_LATENCY, "_count", model=model) == 1
        assert told.value(catalogue.QUEUE_TIME, "_count", model=model) == 1
        assert told.value(catalogue.TIME_TO_FIRST_TOKEN, "_count", model=model) == num_streams


async def test_only_requests_for_completions_count() -> None:
    told = Told(FakeReplicas(OK))

    await told.http.post("/tokenize", json={"model": "m"})
    await told.http.get("/v1/models")
    await told.http.get("/health")

    assert await told.outcomes() == {}
    assert await told.rejections() == {}


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
async def test_every_end_has_its_outcome(
    replicas: FakeReplicas,
    streams: bool,
    outcome: str,
    given_up: int,
    rejected: dict[tuple[str, str], float],
) -> None:
    told = Told(replicas)

    await told.http.post(CHAT, json={"model": "m", "stream": streams})

    assert await told.outcomes() == {outcome: 1}
    assert told.value(catalogue.GIVEN_UP, model="m") == given_up
    assert await told.rejections() == rejected
    assert told.value(catalogue.REQUEST_LATENCY, "_count", model="m") == 0


class Losing(FakeReplicas):
    """Each attempt meets the next error."""

    async def whole(
        self, request: RelayedRequest, progress: Progress | None = None
    ) -> tuple[AnswerStart, AnswerEnd]:
        self.requests.append(request)
        error = self.parts[len(self.requests) - 1]
        assert isinstance(error, Exception)
        raise error


async def test_a_request_that_was_taken_lost_and_taken_no_more_is_given_up() -> None:
    told = Told(Losing(ReplicaLostError("dead"), NoReplicaError("none")))

    answer = await told.http.post(CHAT, json={"model": "m"})

    assert answer.json()["error"]["code"] == NoReplicaError.code
    assert await told.outcomes() == {"server_error": 1}
    assert told.value(catalogue.GIVEN_UP, model="m") == 1
    assert await told.rejections() == {}


async def test_a_client_that_leaves_is_cancelled_and_seen_while_it_runs() -> None:
    replicas = FakeReplicas(OK)
    replicas.gate.clear()
    told = Told(replicas)

    request = asyncio.create_task(told.http.post(CHAT, json={"model": "m"}))
    while not replicas.requests:  # noqa: ASYNC110 - the request arrives within some turns
        await asyncio.sleep(0)
    await told.gateway.tell_metrics()
    running = told.value(catalogue.REQUESTS_RUNNING, model="m")
    request.cancel()
    await asyncio.wait([request])

    assert running == 1
    assert await told.outcomes() == {"cancelled": 1}
    assert told.value(catalogue.REQUESTS_RUNNING, model="m") == 0


async def test_lost_replicas_are_counted_by_what_became_of_the_request() -> None:
    told = Told()
    record = RequestRecord("r", "POST", CHAT, model="m", status=200, retries=3, continued=2)

    told.gateway.metrics.ended(record)
    told.gateway.metrics.flush([], ())

    assert told.value(catalogue.RETRIES, model="m") == 1
    assert told.value(catalogue.MIGRATIONS, model="m") == 2


async def test_refusals_are_counted_by_reason_and_class_of_the_key() -> None:
    key = KeyConfig(name="k", hash=hash_of("k"), metrics_class="paying")
    told = Told(FakeReplicas(OK), keys=(key,))
    headers = {"authorization": "Bearer k"}

    await told.http.post(CHAT, json={"model": "m"})
    await told.http.post(CHAT, json={"model": "other"}, headers=headers)
    await told.http.post(CHAT, content=b"[]", headers=headers)
    await told.http.post("/nowhere", headers=headers)
    await told.http.get(CHAT, headers=headers)

    assert await told.rejections() == {
        ("authentication", ANONYMOUS): 1,
        ("unknown_model", "paying"): 1,
        ("invalid", "paying"): 1,
        ("unknown_route", ANONYMOUS): 2,
    }
    # A wrong method asks for a path of completions, and ends with an error.
    assert await told.outcomes("unknown") == {"client_error": 4}


async def test_every_class_of_key_begins_with_0() -> None:
    key = KeyConfig(name="k", hash=hash_of("k"), metrics_class="paying")
    told = Told(FakeReplicas(OK), keys=(key,))

    await told.gateway.tell_metrics()

    for key_class in ("paying", ANONYMOUS):
        zero = told.value(catalogue.REQUESTS_REJECTED, reason="overloaded", key_class=key_class)
        assert zero == 0


async def test_the_front_door_tells_of_those_who_come_too_late() -> None:
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


async def test_replicas_are_told_once_a_router_knows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told(FakeReplicas(OK))
    [model] = told.gateway.waiting()

    await told.gateway.tell_metrics()
    unknown = told.value(catalogue.REPLICAS, model="m")
    known: Callable[[], dict[str, dict[str, int]]] = lambda: {model: {"full": 2}}  # noqa: E731
    monkeypatch.setattr(ROUTERS, "decisions", known)
    monkeypatch.setattr(ROUTERS, "capacity", lambda deployment: 3)
    await told.gateway.tell_metrics()

    assert unknown is None
    assert told.value(catalogue.REPLICAS, model="m") == 3
    assert told.value(catalogue.REPLICAS_WANTED, model="m") == 1
    assert told.value(catalogue.ROUTER_DECISIONS, model="m", reason="full") == 2
    assert told.value(catalogue.ROUTER_DECISIONS, model="m", reason="affinity") == 0


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
def test_outcomes_follow_from_the_record(record: RequestRecord, outcome: Outcome) -> None:
    assert outcome_of(record) is outcome
