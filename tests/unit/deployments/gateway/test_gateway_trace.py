"""Trace of a request in the gateway, with fake replicas."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from apar_core.journal import ThreadDelta
from deployments.config.keys import KeyConfig
from deployments.config.retries import RetryConfig
from deployments.gateway.gateway_trace import start_trace
from deployments.routing.shared_router import Routers
from deployments.tracing import attributes as names
from deployments.wire.errors import ReplicaBrokenError, ReplicaLostError
from deployments.wire.request import RelayedRequest
from deployments.wire.response import Piece, ResponseEnd, ResponseStart
from tests.fakes.kept_spans import KeptSpans, parent_of
from tests.fakes.replicas import CHAT, EVENTS, JSON, FakeReplicas, client_of, gateway_of

CALLER = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "vendor=1"}
SECRET_TEXT = "a secret question"
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": SECRET_TEXT}],
    "max_tokens": 7,
    "temperature": SECRET_TEXT,
}
END = ResponseEnd(3, 9, 4, 3, 5, replica="replica-1")
NO_PAUSE = {"retries": RetryConfig(max_retries=1)}


@pytest.fixture
def kept() -> KeptSpans:
    return KeptSpans()


def client(kept: KeptSpans, *replicas: FakeReplicas, **settings: Any) -> httpx.AsyncClient:
    gateway = gateway_of(*replicas, **settings)
    gateway.tracing = kept.tracing
    gateway.retries.first_pause_s = 0.001
    return client_of(gateway)


def facts(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def failed(span: ReadableSpan) -> bool:
    return not (span.status.is_ok or span.status.is_unset)


class Taking(FakeReplicas):
    """Answers each attempt with its own parts."""

    def __init__(self, *attempts: tuple[ResponseStart | Piece | Exception, ...]) -> None:
        super().__init__(end=END)
        self.attempts = list(attempts)

    async def stream(
        self, request: RelayedRequest
    ) -> AsyncGenerator[ResponseStart | Piece | ResponseEnd, None]:
        self.parts = self.attempts.pop(0)
        async for part in super().stream(request):
            yield part


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_request_is_one_trace_with_ingress_queue_and_replica(
    kept: KeptSpans, streaming: bool
) -> None:
    replicas = FakeReplicas(ResponseStart(200, EVENTS if streaming else JSON, b"{}"), end=END)

    await client(kept, replicas).post(
        CHAT, json=BODY | {"stream": streaming}, headers={"x-request-id": "r1"} | CALLER
    )

    server, *parts = kept.all()
    assert server.name == f"POST {CHAT}"
    assert server.kind.name == "SERVER"
    assert server.parent is not None
    assert server.parent.span_id == int("cd" * 8, 16)
    assert {span.context.trace_id for span in kept.all()} == {int("ab" * 16, 16)}
    assert [span.name for span in parts] == [names.INGRESS, names.QUEUE, names.REPLICA]
    assert all(parent_of(span, kept.all()) is server for span in parts)
    assert not any(failed(span) for span in kept.all())
    given = facts(server)
    assert (names.FIRST_CHUNK_S in given) == streaming
    given.pop(names.FIRST_CHUNK_S, None)
    assert given == {
        names.HTTP_METHOD: "POST",
        names.HTTP_ROUTE: CHAT,
        names.HTTP_STATUS: 200,
        names.URL_PATH: CHAT,
        names.URL_SCHEME: "http",
        names.OPERATION: "chat",
        names.PROVIDER: "apar",
        names.REQUEST_MODEL: "m",
        names.RESPONSE_MODEL: "m",
        "gen_ai.request.max_tokens": 7,
        names.INPUT_TOKENS: 3,
        names.OUTPUT_TOKENS: 9,
        names.REQUEST_ID: "r1",
        names.KEY: "anonymous",
        names.THREADS: 4,
        names.FORKS: 3,
        names.REPLICA_ID: "replica-1",
    } | ({names.REQUEST_STREAM: True} if streaming else {})
    assert facts(parts[-1])[names.REPLICA_ID] == "replica-1"
    assert facts(parts[-1])[names.OUTCOME] == "answered"


@pytest.mark.parametrize("model", ["m", "any/other"])
async def test_spans_of_single_models_have_one_name(kept: KeptSpans, model: str) -> None:
    replicas = FakeReplicas(ResponseStart(200, JSON, b'{"data": []}'))

    await client(kept, replicas).get(f"/v1/models/{model}", headers=CALLER)

    server = kept.all()[0]
    assert server.name == "GET /v1/models/{model}"
    assert facts(server)[names.HTTP_ROUTE] == "/v1/models/{model}"


async def test_the_replica_gets_the_context_of_its_attempt(kept: KeptSpans) -> None:
    replicas = FakeReplicas(ResponseStart(200, JSON, b"{}"))

    await client(kept, replicas).post(CHAT, json=BODY, headers=CALLER)

    (request,) = replicas.requests
    attempt = kept.one(names.REPLICA).context
    assert request.terms.trace_headers == {
        "traceparent": f"00-{'ab' * 16}-{attempt.span_id:016x}-01",
        "tracestate": "vendor=1",
    }


async def test_no_text_of_the_request_is_in_its_trace(kept: KeptSpans) -> None:
    replicas = FakeReplicas(ResponseStart(200, JSON, b'{"content": "a secret answer"}'))

    await client(kept, replicas).post(CHAT + "?a=secret", json=BODY)

    assert "secret" not in " ".join(span.to_json() for span in kept.all())


async def test_without_trust_in_the_caller_a_new_trace_starts() -> None:
    kept = KeptSpans(honour_traceparent=False)
    replicas = FakeReplicas(ResponseStart(200, JSON, b"{}"))

    await client(kept, replicas).post(CHAT, json=BODY, headers=CALLER)

    server = kept.one(f"POST {CHAT}")
    assert server.parent is None
    assert server.context.trace_id != int("ab" * 16, 16)


async def test_a_request_that_is_not_sampled_sends_no_context() -> None:
    kept = KeptSpans(sample_ratio=0.0)
    replicas = FakeReplicas(ResponseStart(200, JSON, b"{}"))

    await client(kept, replicas).post(CHAT, json=BODY)

    assert kept.all() == []
    assert replicas.requests[0].terms.trace_headers is None


def test_without_tracing_there_is_no_trace() -> None:
    assert start_trace(None, {}) is None


async def test_the_log_names_the_trace(kept: KeptSpans, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="deployments.gateway.request_log"):
        await client(kept, FakeReplicas(ResponseStart(200, JSON, b"{}"))).post(CHAT, json=BODY)

    (record,) = (each for each in caplog.records if each.getMessage() == "request")
    trace_id = vars(record)["trace_id"]
    assert trace_id == f"{kept.one(names.REPLICA).context.trace_id:032x}"


async def test_an_unknown_key_is_refused_before_the_queue(kept: KeptSpans) -> None:
    keys = (KeyConfig(name="a", hash="sha256:" + "0" * 64),)

    answer = await client(kept, FakeReplicas(), keys=keys).post(CHAT, json=BODY)

    assert answer.status_code == 401
    assert [span.name for span in kept.all()] == [f"POST {CHAT}", names.INGRESS]
    server = facts(kept.all()[0])
    assert (server[names.HTTP_STATUS], server[names.ERROR_CODE]) == (401, "invalid_api_key")
    # A client error is not an error of the server span.
    assert not failed(kept.all()[0])


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/unknown"), ("BREW", CHAT)])
async def test_span_names_are_bounded(kept: KeptSpans, method: str, path: str) -> None:
    await client(kept, FakeReplicas()).request(method, path)

    server = kept.all()[0]
    assert server.name in ("POST", "HTTP")
    assert names.HTTP_ROUTE not in facts(server)
    assert facts(server)[names.HTTP_METHOD] in ("POST", "_OTHER")


async def test_a_full_queue_is_a_server_error(kept: KeptSpans) -> None:
    replicas = FakeReplicas(ResponseStart(200, JSON, b"{}"))
    replicas.gate.clear()
    http = client(kept, replicas)
    running = [asyncio.create_task(http.post(CHAT, json=BODY)) for _ in range(2)]
    while len(replicas.requests) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)

    refused = await http.post(CHAT, json=BODY, headers={"x-request-id": "refused"})
    replicas.gate.set()
    await asyncio.gather(*running)

    assert refused.status_code == 503
    (server,) = (s for s in kept.all() if facts(s).get(names.REQUEST_ID) == "refused")
    assert failed(server)
    assert facts(server)[names.ERROR_TYPE] == "overloaded"
    inside = [span for span in kept.all() if parent_of(span, kept.all()) is server]
    assert [span.name for span in inside] == [names.INGRESS, names.QUEUE]


async def test_the_queue_span_lasts_as_long_as_the_wait(kept: KeptSpans) -> None:
    replicas = FakeReplicas(ResponseStart(200, JSON, b"{}"))
    replicas.gate.clear()
    gateway = gateway_of(replicas, max_queued=1)
    gateway.tracing = kept.tracing
    http = client_of(gateway)
    tasks = [asyncio.create_task(http.post(CHAT, json=BODY)) for _ in range(3)]
    [model] = gateway.waiting()
    while not gateway.waiting()[model].waiting:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.2)
    replicas.gate.set()
    await asyncio.gather(*tasks)

    waits = sorted(
        (span.end_time or 0) - (span.start_time or 0) for span in kept.named(names.QUEUE)
    )
    assert waits[1] < waits[2]
    assert waits[2] >= 0.1e9


async def test_a_client_that_leaves_ends_its_trace(kept: KeptSpans) -> None:
    replicas = FakeReplicas(ResponseStart(200, EVENTS, b"data: 1\n\n"))
    replicas.gate.clear()
    task = asyncio.create_task(client(kept, replicas).post(CHAT, json=BODY | {"stream": True}))
    while not replicas.requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait([task])

    server = kept.one(f"POST {CHAT}")
    assert facts(server)[names.CANCELLED] is True
    assert not failed(server)
    assert facts(kept.one(names.REPLICA))[names.OUTCOME] == "left"


class Counted(Taking):
    """Replicas whose requests the router counts while they run, as over direct connections."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *attempts: tuple[ResponseStart | Piece | Exception, ...],
    ) -> None:
        super().__init__(*attempts)
        self.at: str | None = None
        monkeypatch.setattr(Routers, "replica_of", lambda _, deployment, request_id: self.at)

    async def stream(
        self, request: RelayedRequest
    ) -> AsyncGenerator[ResponseStart | Piece | ResponseEnd, None]:
        self.at = f"replica-{len(self.requests)}"
        try:
            async with aclosing(super().stream(request)) as parts:
                async for part in parts:
                    yield part
                    await asyncio.sleep(0)
        finally:
            self.at = None


async def test_a_lost_attempt_names_its_replica(
    kept: KeptSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_began = ReplicaLostError("killed", replica="replica-1")
    replicas = Counted(monkeypatch, (FIRST, ReplicaLostError("killed")), (never_began,), (REST,))

    await client(kept, replicas).post(CHAT, json={"stream": True})

    lost, other, last = kept.named(names.REPLICA)
    assert [facts(each)[names.OUTCOME] for each in (lost, other, last)] == ["lost"] * 2 + [
        "answered"
    ]
    assert facts(lost)[names.REPLICA_ID] == "replica-0"
    assert facts(other)[names.REPLICA_ID] == "replica-1"


async def test_an_attempt_whose_client_has_left_names_its_replica(
    kept: KeptSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = Counted(monkeypatch, (FIRST,) * 1000)
    task = asyncio.create_task(client(kept, replicas).post(CHAT, json={"stream": True}))
    while replicas.at is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

    attempt = facts(kept.one(names.REPLICA))
    assert (attempt[names.OUTCOME], attempt[names.REPLICA_ID]) == ("left", "replica-0")


FIRST = ResponseStart(
    200, EVENTS, b'data: {"choices":[{"text":"a"}]}\n\n', (ThreadDelta((), (1, 10)),), 2, True
)
SECOND = Piece(
    b"", (ThreadDelta((0,), (20, 3), 0), ThreadDelta((), (11,)), ThreadDelta((1,), (30,))), 4
)
REST = ResponseStart(200, EVENTS, b'data: {"choices":[{"text":"ab"}]}\n\ndata: [DONE]\n\n')


async def test_a_continued_stream_is_one_trace_with_both_replicas(kept: KeptSpans) -> None:
    replicas = Taking((FIRST, SECOND, ReplicaLostError("killed")), (REST,))

    answer = await client(kept, replicas, **NO_PAUSE).post(CHAT, json={"stream": True})

    assert "[DONE]" in answer.text
    assert "error" not in answer.text
    server = kept.one(f"POST {CHAT}")
    assert not failed(server)
    assert facts(server)[names.CONTINUED] == facts(server)[names.RETRIES] == 1
    lost, other = kept.named(names.REPLICA)
    assert failed(lost)
    assert (facts(lost)[names.OUTCOME], facts(lost)[names.OUTPUT_TOKENS]) == ("lost", 6)
    assert (facts(other)[names.OUTCOME], facts(other)[names.ATTEMPT]) == ("answered", 1)
    assert facts(other)[names.ATTEMPT_CONTINUES] is True
    assert len({span.context.trace_id for span in kept.all()}) == 1
    headers = [request.terms.trace_headers for request in replicas.requests]
    assert headers[0] != headers[1]


async def test_the_gateway_makes_thread_spans_for_a_replica_that_just_died(
    kept: KeptSpans,
) -> None:
    replicas = Taking((FIRST, SECOND, ReplicaLostError("killed")), (REST,))

    await client(kept, replicas, **NO_PAUSE).post(CHAT, json={"stream": True})

    threads = {facts(span)[names.THREAD_ID]: span for span in kept.named(names.THREAD)}
    assert set(threads) == {"root", "root.0", "root.1"}
    assert {name: facts(span)[names.FINISH_REASON] for name, span in threads.items()} == {
        "root": "lost",
        "root.0": "stop",
        "root.1": "lost",
    }
    assert facts(threads["root"])[names.THREAD_TOKENS] == 3
    assert facts(threads["root"])[names.OBSERVED_BY] == "gateway"
    assert parent_of(threads["root"], kept.all()) is kept.named(names.REPLICA)[0]
    assert parent_of(threads["root.1"], kept.all()) is threads["root"]


async def test_a_replica_that_broke_off_makes_its_own_thread_spans(
    kept: KeptSpans,
) -> None:
    replicas = Taking((FIRST, SECOND, ReplicaBrokenError("the engine has died")), (REST,))

    await client(kept, replicas, **NO_PAUSE).post(CHAT, json={"stream": True})

    assert kept.named(names.THREAD) == []
    assert facts(kept.named(names.REPLICA)[0])[names.ERROR_TYPE] == "ReplicaBrokenError"


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_request_without_a_replica_is_an_error(kept: KeptSpans, streaming: bool) -> None:
    parts = (FIRST, ReplicaLostError("a")) if streaming else (ReplicaLostError("a"),)
    replicas = Taking(parts, (ReplicaLostError("b"),))

    await client(kept, replicas, **NO_PAUSE).post(CHAT, json={"stream": streaming})

    server = kept.one(f"POST {CHAT}")
    assert failed(server)
    assert facts(server)[names.ERROR_TYPE] == "engine_lost"
    assert all(failed(span) for span in kept.named(names.REPLICA))
    assert len(kept.named(names.REPLICA)) == 2
