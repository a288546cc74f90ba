"""Traces of a running server, as a collector receives them over OTLP."""

import json
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.tracing import attributes as names
from tests.fakes.otlp_collector import Collector, Span, http_collector
from tests.fakes.waiting import wait_until
from tests.integration.serving.apar_process import (
    ENGINE,
    STOP_S,
    TINY,
    TOKEN,
    Server,
    authorization,
    held,
    serving,
    slowed,
)
from tests.integration.serving.killed_streams import BODIES, TIMEOUT_S, Victims
from tests.integration.serving.shared_server import SharedServer, wait_for_a_new_minute

pytestmark = pytest.mark.cluster

CHAT, LIST = BODIES["chat"]
SERVER = f"POST {CHAT}"
# Two clocks meet in a trace: the gateway's and, fixed once a request, the replica's.
TOLERANCE_NS = 20_000_000


class Traced:
    """A server and its collector; every request has an id to find its trace by."""

    def __init__(self, server: Server, collector: Collector, stack: ExitStack) -> None:
        self.server = server
        self.collector = collector
        # Closing it takes the collector away.
        self.stack = stack

    def ask(self, key: str = TOKEN, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """Return a whole answer and the id of its request."""
        request_id = uuid.uuid4().hex
        answer = httpx.post(
            self.server.url + CHAT,
            json=LIST | {"temperature": 0} | fields,
            headers=self.headers(request_id, key) | (headers or {}),
            timeout=TIMEOUT_S,
        )
        return answer, request_id

    def headers(self, request_id: str, key: str = TOKEN) -> dict[str, str]:
        return {"x-request-id": request_id} | authorization(key)

    def stream(self, request_id: str, after_texts: int = 0, then: Any = None, **fields: Any) -> Any:
        """Return the `apar` object of a stream.

        `then` is called after `after_texts` pieces; until then the engines are slow, so that the
        answer is not complete before. If it returns True, the client leaves.
        """
        body = LIST | {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        num_texts, apar = 0, None
        with (
            ExitStack() as slow,
            httpx.Client(headers=self.headers(request_id), timeout=TIMEOUT_S) as client,
        ):
            if then is not None:
                slow.enter_context(slowed(self.server.processes(ENGINE)))
            with client.stream("POST", self.server.url + CHAT, json=body | fields) as response:
                assert response.status_code == 200
                for line in response.iter_lines():
                    if not line or line == "data: [DONE]":
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    apar = chunk.get("apar", apar)
                    num_texts += 1
                    if then is not None and num_texts == after_texts:
                        slow.close()
                        if then():
                            return None
        return apar


@pytest.fixture
def traced(shared: SharedServer, server: Server) -> Traced:
    return Traced(server, shared.collector, ExitStack())


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """A server whose replicas run one request each; one more may wait."""
    with ExitStack() as stack:
        collector = stack.enter_context(http_collector())
        model = TINY | {
            "replicas": 2,
            "max_concurrency": 1,
            "max_queued_requests": 1,
            "threads_per_request": 16,
        }
        tracing = {"endpoint": collector.endpoint, "export_s": 0.2}
        with serving(tmp_path_factory.mktemp("tracing"), model, tracing=tracing) as server:
            yield Traced(server, collector, stack)


def named(spans: list[Span], name: str) -> list[Span]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_ns)


def one(spans: list[Span], name: str) -> Span:
    (span,) = named(spans, name)
    return span


def check_whole(spans: list[Span]) -> None:
    """Check that the spans form one tree and lie within their root and after their parents."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    root = one(spans, SERVER)
    for span in spans:
        assert root.start_ns - TOLERANCE_NS <= span.start_ns <= span.end_ns
        assert span.end_ns <= root.end_ns + TOLERANCE_NS
        if span is root:
            continue
        assert span.parent_id is not None
        parent = by_id[span.parent_id]
        assert parent.start_ns <= span.start_ns + TOLERANCE_NS
        if span.name == names.THREAD:
            assert (
                parent.name
                == (names.THREAD if names.THREAD_PARENT in span.attributes else names.DECODE)
                or names.OBSERVED_BY in span.attributes
            )
            # Both times are of one clock.
            assert parent.start_ns <= span.start_ns


def test_a_forked_request_has_a_span_for_each_of_its_threads(traced: Traced) -> None:
    answer, request_id = traced.ask()

    spans = traced.collector.trace(request_id)

    check_whole(spans)
    apar = answer.json()["apar"]
    threads = named(spans, names.THREAD)
    assert apar["forks"] > 3
    assert len(threads) == apar["threads"]
    assert len({span.attributes[names.THREAD_ID] for span in threads}) == apar["threads"]
    assert max(span.attributes[names.THREAD_DEPTH] for span in threads) == apar["max_depth"]
    generated = apar["text_tokens"] + apar["control_tokens"] - apar["forks"]
    assert sum(span.attributes[names.THREAD_TOKENS] for span in threads) == generated
    assert {span.attributes[names.FINISH_REASON] for span in threads} == {"stop"}
    # Threads run side by side: together they take longer than the request.
    together = sum(span.end_ns - span.start_ns for span in threads)
    decode = one(spans, names.DECODE)
    assert together > decode.end_ns - decode.start_ns
    # And most begin while their parent still writes.
    ends = {span.span_id: span.end_ns for span in threads}
    children = [span for span in threads if span.parent_id in ends]
    assert len(children) == apar["forks"]
    assert all(span.start_ns <= ends[span.parent_id or ""] for span in children)
    usage = answer.json()["usage"]
    server = one(spans, SERVER).attributes
    assert server[names.INPUT_TOKENS] == usage["prompt_tokens"]
    assert server[names.THREADS] == apar["threads"]
    assert server[names.KEY] == TOKEN
    assert not any(span.failed for span in spans)


def test_phases_come_in_order_from_both_processes(traced: Traced) -> None:
    _, request_id = traced.ask()

    spans = traced.collector.trace(request_id)

    order = [
        names.INGRESS,
        names.QUEUE,
        names.REPLICA,
        names.ENGINE,
        names.ENGINE_QUEUE,
        names.PREFILL,
        names.DECODE,
    ]
    phases = [one(spans, name) for name in order]
    starts = [span.start_ns for span in phases]
    assert all(a <= b + TOLERANCE_NS for a, b in pairwise(starts))
    assert one(spans, names.ENGINE).parent_id == one(spans, names.REPLICA).span_id
    assert one(spans, names.ENGINE).kind == "SERVER"
    roles = {span.name: span.resource["apar.role"] for span in spans}
    assert (roles[SERVER], roles[names.THREAD]) == ("gateway", "replica")
    replica = one(spans, names.ENGINE).attributes[names.REPLICA_ID]
    assert one(spans, SERVER).attributes[names.REPLICA_ID] == replica
    assert replica


def test_choices_have_trees_of_their_own(traced: Traced) -> None:
    answer, request_id = traced.ask(n=2, max_tokens=60, temperature=0.3)

    spans = traced.collector.trace(request_id)

    check_whole(spans)
    threads = named(spans, names.THREAD)
    assert len(threads) == answer.json()["apar"]["threads"]
    assert {span.attributes[names.THREAD_CHOICE] for span in threads} == {0, 1}


def test_a_clients_trace_goes_on(traced: Traced) -> None:
    trace_id, span_id = uuid.uuid4().hex, uuid.uuid4().hex[:16]

    _, request_id = traced.ask(headers={"traceparent": f"00-{trace_id}-{span_id}-01"})

    server = one(traced.collector.trace(request_id), SERVER)
    assert (server.trace_id, server.parent_id) == (trace_id, span_id)


def test_a_client_may_decide_against_a_trace(traced: Traced) -> None:
    trace_id = uuid.uuid4().hex

    traced.ask(headers={"traceparent": f"00-{trace_id}-{'cd' * 8}-00"})
    traced.collector.trace(traced.ask()[1])

    assert not [span for span in traced.collector.spans if span.trace_id == trace_id]


@pytest.mark.slow
def test_waiting_and_being_refused_can_be_seen(narrow: Traced) -> None:
    with ThreadPoolExecutor(6) as executor:
        with held(narrow.server.processes(ENGINE)):  # No place becomes free.
            asking = [executor.submit(narrow.ask) for _ in range(6)]
            wait_until(lambda: sum(each.done() for each in asking) == 3)
        asked = [each.result() for each in asking]

    traces = [narrow.collector.trace(request_id) for _, request_id in asked]
    codes = [answer.status_code for answer, _ in asked]
    assert sorted(codes) == [200] * 3 + [503] * 3
    for (answer, _), spans in zip(asked, traces, strict=True):
        server = one(spans, SERVER)
        assert server.failed == (answer.status_code == 503)
        assert server.attributes[names.HTTP_STATUS] == answer.status_code
        assert bool(named(spans, names.REPLICA)) == (answer.status_code == 200)
    waits = [one(spans, names.QUEUE) for spans in traces]
    longest = max(span.end_ns - span.start_ns for span in waits)
    decodes = [one(spans, names.DECODE) for spans in traces if named(spans, names.DECODE)]
    # Two run and one waits until one of them has ended.
    assert longest >= min(span.end_ns - span.start_ns for span in decodes)


@pytest.mark.parametrize(
    ("key", "status", "code"), [("x", 401, "invalid_api_key"), ("once", 429, "")]
)
def test_a_refused_request_is_a_trace_of_its_ingress(
    traced: Traced, key: str, status: int, code: str
) -> None:
    wait_for_a_new_minute()
    answer, request_id = traced.ask(key)
    if status == 429:
        answer, request_id = traced.ask(key)
    assert answer.status_code == status

    spans = traced.collector.trace(request_id)

    assert sorted(span.name for span in spans) == sorted([SERVER, names.INGRESS])
    server = one(spans, SERVER)
    assert not server.failed
    assert server.attributes[names.ERROR_CODE] == (code or "rate_limit_exceeded")


def test_a_client_that_leaves_cuts_its_threads(traced: Traced) -> None:
    request_id = uuid.uuid4().hex

    engines = traced.server.processes(ENGINE)

    with ExitStack() as until_it_has_left:

        def leave() -> bool:
            until_it_has_left.enter_context(held(engines))
            return True

        traced.stream(request_id, 1, leave, max_tokens=1800, ignore_eos=True)
        traced.server.record(request_id)

    spans = traced.collector.trace(request_id)
    server = one(spans, SERVER)
    assert server.attributes[names.CANCELLED] is True
    assert not server.failed
    reasons = [span.attributes[names.FINISH_REASON] for span in named(spans, names.THREAD)]
    assert "cut" in reasons
    assert one(spans, names.REPLICA).attributes[names.OUTCOME] == "left"
    traced.server.wait_until_idle()


@pytest.mark.slow
@pytest.mark.parametrize("kills_replica", [True, False])
def test_a_stream_continued_after_a_kill_is_one_trace(narrow: Traced, kills_replica: bool) -> None:
    narrow.server.wait_for_replicas(2)
    victims = Victims(narrow.server)
    request_id = uuid.uuid4().hex

    apar = narrow.stream(request_id, 12, lambda: victims.kill(replica=kills_replica))

    spans = narrow.collector.trace(request_id)
    check_whole(spans)
    server = one(spans, SERVER)
    # The first attempt to go on may reach a replica that is about to end.
    first, *more, last = named(spans, names.REPLICA)
    assert (server.attributes[names.CONTINUED], server.failed) == (1 + len(more), False)
    assert all(each.attributes[names.OUTCOME] == "lost" and each.failed for each in (first, *more))
    assert (last.attributes[names.OUTCOME], last.failed) == ("answered", False)
    assert first.attributes[names.REPLICA_ID] != last.attributes[names.REPLICA_ID]
    threads = named(spans, names.THREAD)
    ids = {span.attributes[names.THREAD_ID] for span in threads}
    assert len(ids) == apar["threads"]
    # A thread that ran in both has a span in each.
    lived_on = [span for span in threads if span.attributes[names.FINISH_REASON] == "lost"]
    assert lived_on
    assert len(threads) == len(ids) + len(lived_on)
    # A process that is killed tells nothing more.
    by_gateway = any(names.OBSERVED_BY in span.attributes for span in threads)
    assert by_gateway == kills_replica


@pytest.mark.slow
def test_without_its_collector_the_server_answers_as_before(narrow: Traced) -> None:
    narrow.server.wait_for_replicas(2)
    expected, request_id = narrow.ask()
    narrow.collector.trace(request_id)
    before = len(narrow.server.log.read_text(errors="replace"))
    narrow.stack.close()

    answers = [narrow.ask()[0] for _ in range(5)]

    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == {
        expected.json()["choices"][0]["message"]["content"]
    }
    said = narrow.server.log.read_text(errors="replace")[before:]
    assert "Traceback" not in said
    assert said.count("spans could not be exported") <= 3


@pytest.mark.slow
def test_the_last_spans_are_sent_when_the_server_ends(tmp_path: Path) -> None:
    with http_collector() as collector:
        tracing = {"endpoint": collector.endpoint, "export_s": 600.0}
        with serving(tmp_path, TINY, tracing=tracing) as server:
            traced = Traced(server, collector, ExitStack())
            answer, request_id = traced.ask()
            server.process.send_signal(signal.SIGINT)
            server.process.wait(timeout=STOP_S)

        spans = collector.trace(request_id)

    check_whole(spans)
    assert len(named(spans, names.THREAD)) == answer.json()["apar"]["threads"]
