"""Answers that survive the loss of replicas at any point; the replicas are fakes."""

import asyncio
import json
import tracemalloc
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

from apar_core.journal import ThreadDelta
from deployments.config.retries import RetryConfig
from deployments.gateway.body import RequestBody
from deployments.relay.continuation import ClientStream, ContinuationError
from deployments.relay.relay import Progress, Retries, relay_response
from deployments.wire.errors import DONE_EVENT, NoReplicaError, ReplicaLostError
from deployments.wire.request import RelayedRequest
from deployments.wire.response import Piece, ResponseEnd, ResponseStart
from tests.fakes.examples import num_examples

CHAT = "/v1/chat/completions"
EVENTS = [(b"content-type", b"text/event-stream")]
TOKENS = ["Grüße", ", ", "", "\U0001f600", '"id":"x",\n\n', " data: ", "end", "."]
TEXT = "".join(TOKENS)
LOST = ReplicaLostError("dead")


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def chat_events(number: int, texts: list[str]) -> list[bytes]:
    """The stream of a replica, which has its own ids and times."""
    head = {"id": f"chatcmpl-{number}", "created": 1000 + number, "model": "m"}

    def chunk(delta: dict[str, str], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return event({**head, "choices": [choice]})

    return [
        chunk({"role": "assistant", "content": ""}),
        *(chunk({"content": text}) for text in texts),
        chunk({"content": ""}, "stop"),
        event({**head, "choices": [], "usage": {"completion_tokens": len(TOKENS)}}),
        b"data: [DONE]\n\n",
    ]


class DyingReplicas:
    """Replicas that generate TOKENS and die, one after another, after so many tokens or bytes."""

    def __init__(self, *deaths: int | None, piece_bytes: int = 10**9, by_bytes: bool = False):
        self.deaths = list(deaths)
        self.piece_bytes = piece_bytes
        self.by_bytes = by_bytes
        self.requests: list[RelayedRequest] = []
        self.num_running = 1

    async def stream(
        self, request: RelayedRequest
    ) -> AsyncGenerator[ResponseStart | Piece | ResponseEnd, None]:
        self.requests.append(request)
        number = len(self.requests)
        death = self.deaths.pop(0) if self.deaths else None
        known = len(request.terms.resume[0].token_ids) if request.terms.resume else 0
        texts = ["".join(TOKENS[:known]), *TOKENS[known:]]
        room = death
        is_first = True
        journal = tuple(range(known, len(TOKENS)))
        for index, whole in enumerate(chat_events(number, texts)):
            for start in range(0, len(whole), self.piece_bytes):
                body = whole[start : start + self.piece_bytes]
                if room is not None:
                    if self.by_bytes and room < len(body):
                        if room:
                            yield Piece(body[:room]) if not is_first else _start(body[:room])
                        raise LOST
                    room -= len(body) if self.by_bytes else 1
                    if room < 0:
                        raise LOST
                # A token's delta comes with the first byte of its event.
                new = journal[index - 2 : index - 1] if start == 0 and index >= 2 else ()
                delta = (ThreadDelta((), new),) if new else ()
                if is_first:
                    yield _start(body)
                    is_first = False
                else:
                    yield Piece(body, delta, len(new))
        yield ResponseEnd(generated_tokens=len(TOKENS))

    async def whole(
        self, request: RelayedRequest, progress: Progress | None = None
    ) -> tuple[ResponseStart, ResponseEnd]:
        self.requests.append(request)
        death = self.deaths.pop(0) if self.deaths else None
        # Three tokens are told of, if it comes so far.
        if progress is not None and death != 0:
            progress(1, 4)
            progress(2, 4)
        if death is not None:
            raise LOST
        return ResponseStart(200, [], b"{}"), ResponseEnd(generated_tokens=7)


def _start(body: bytes) -> ResponseStart:
    return ResponseStart(200, EVENTS, body, continuable=True)


class Observer:
    """What an observer was told."""

    def __init__(self) -> None:
        self.retries: list[bool] = []
        self.ends: list[ResponseEnd | None] = []
        self.num_tokens = 0

    def progress(self, num_tokens: int, prompt_tokens: int) -> None:
        self.num_tokens += num_tokens

    def retried(self, *, continued: bool) -> None:
        self.retries.append(continued)

    def ended(self, end: ResponseEnd | None) -> None:
        self.ends.append(end)


class Client:
    """What a client and an observer have seen."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.ended = False
        self.observer = Observer()

    async def send(self, message: Message) -> None:
        assert not self.ended
        if message["type"] == "http.response.start":
            assert self.status == 0
            self.status = message["status"]
            return
        self.body += message["body"]
        self.ended = not message["more_body"]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        events = self.body.split(b"\n\n")
        assert events.pop() == b""
        assert events.pop() == b"data: [DONE]"
        return [json.loads(each.removeprefix(b"data: ")) for each in events]


async def ask(
    replicas: DyingReplicas,
    *,
    streaming: bool = True,
    fields: dict[str, Any] | None = None,
    config: RetryConfig | None = None,
) -> Client:
    client = Client()
    await relay(replicas, client, streaming=streaming, fields=fields, config=config)
    assert client.ended
    assert len(client.observer.ends) == 1
    return client


async def relay(
    replicas: DyingReplicas,
    client: Client,
    *,
    streaming: bool = True,
    fields: dict[str, Any] | None = None,
    config: RetryConfig | None = None,
) -> None:
    retries = Retries(config or RetryConfig(max_retries=20), first_pause_s=0.0)
    raw = json.dumps(fields or {}).encode()
    continuable = RequestBody(raw).can_continue
    request = RelayedRequest("POST", CHAT, b"", [], raw, streams=streaming, continuable=continuable)
    await relay_response(replicas, request, client.send, client.observer, retries)


def assert_one_whole_stream(client: Client) -> None:
    chunks = client.chunks
    assert {(chunk["id"], chunk["created"]) for chunk in chunks} == {
        (chunks[0]["id"], chunks[0]["created"])
    }
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == TEXT
    assert sum("role" in choice["delta"] for choice in choices) == 1
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
    assert [chunk["usage"] for chunk in chunks if not chunk["choices"]] == [
        {"completion_tokens": len(TOKENS)}
    ]


@pytest.mark.parametrize("death", range(14))
async def test_stream_continues_wherever_its_replica_dies(death: int) -> None:
    client = await ask(DyingReplicas(death))

    assert_one_whole_stream(client)


# The first stream's events have some 1,300 bytes; a character of several may be cut too.
@pytest.mark.parametrize("death", range(0, 1400, 3))
async def test_stream_continues_from_any_byte(death: int) -> None:
    client = await ask(DyingReplicas(death, by_bytes=True, piece_bytes=11))

    assert_one_whole_stream(client)


@settings(max_examples=num_examples(150), deadline=None)
@given(
    deaths=st.lists(st.integers(0, 1500), max_size=5),
    piece_bytes=st.integers(1, 700),
    by_bytes=st.booleans(),
)
async def test_stream_survives_many_replicas(
    deaths: list[int], piece_bytes: int, by_bytes: bool
) -> None:
    replicas = DyingReplicas(*deaths, piece_bytes=piece_bytes, by_bytes=by_bytes)

    client = await ask(replicas)

    assert_one_whole_stream(client)
    assert len(client.observer.retries) == len(replicas.requests) - 1


async def test_next_replica_gets_the_whole_journal() -> None:
    replicas = DyingReplicas(4, 4)

    client = await ask(replicas)

    # Of a stream, the role, the empty text and two tokens come before the fourth event is lost.
    assert [request.terms.resume for request in replicas.requests] == [
        None,
        (ThreadDelta((), (0, 1)),),
        (ThreadDelta((), (0, 1, 2, 3)),),
    ]
    assert client.observer.retries == [True, True]
    assert client.observer.num_tokens == len(TOKENS)
    assert client.observer.ends == [ResponseEnd(generated_tokens=len(TOKENS))]


async def test_stream_that_has_sent_nothing_starts_again() -> None:
    replicas = DyingReplicas(0, 0)

    client = await ask(replicas)

    assert_one_whole_stream(client)
    assert [request.terms.resume for request in replicas.requests] == [None] * 3
    assert client.observer.retries == [False, False]
    assert client.chunks[0]["id"] == "chatcmpl-3"


async def test_a_client_that_leaves_with_the_last_event_is_charged_in_full() -> None:
    class Leaving(Client):
        async def send(self, message: Message) -> None:
            await super().send(message)
            if self.body.endswith(DONE_EVENT):
                raise asyncio.CancelledError

    client = Leaving()
    replicas = DyingReplicas()
    with pytest.raises(asyncio.CancelledError):
        await relay(replicas, client)

    assert [end and end.generated_tokens for end in client.observer.ends] == [len(TOKENS)]


async def test_whole_answer_is_retried() -> None:
    replicas = DyingReplicas(0, 0)

    client = await ask(replicas, streaming=False)

    assert (client.status, client.body) == (200, b"{}")
    assert len(replicas.requests) == 3
    assert client.observer.retries == [False, False]
    assert (client.observer.num_tokens, client.observer.ends) == (
        7,
        [ResponseEnd(generated_tokens=7)],
    )


async def test_tokens_of_whole_answers_count_once_over_the_loss_of_replicas() -> None:
    client = await ask(DyingReplicas(1, 0, 1), streaming=False)
    assert client.observer.num_tokens == 7

    lost = await ask(DyingReplicas(1, 1), streaming=False, config=RetryConfig(max_retries=1))
    assert (lost.status, lost.observer.num_tokens, lost.observer.ends) == (503, 3, [None])


@pytest.mark.parametrize("streaming", [True, False])
async def test_request_that_loses_every_replica_is_given_up(streaming: bool) -> None:
    replicas = DyingReplicas(*[0] * 10)

    client = await ask(replicas, streaming=streaming, config=RetryConfig(max_retries=2))

    assert client.status == 503
    assert json.loads(client.body)["error"]["code"] == "engine_lost"
    assert len(replicas.requests) == 3
    assert client.observer.ends == [None]


async def test_timeout_without_a_replica_is_not_retried() -> None:
    class NoReplicas(DyingReplicas):
        async def whole(
            self, request: RelayedRequest, progress: Progress | None = None
        ) -> tuple[ResponseStart, ResponseEnd]:
            self.requests.append(request)
            raise NoReplicaError("none")

    replicas = NoReplicas()

    client = await ask(replicas, streaming=False, config=RetryConfig(replica_wait_s=7.0))

    assert client.status == 503
    assert [request.replica_wait_s for request in replicas.requests] == [7.0]


@pytest.mark.parametrize(
    ("fields", "config"),
    [
        ({"echo": True}, RetryConfig()),
        ({}, RetryConfig(max_retries=0)),
        ({"tools": [{}]}, RetryConfig()),
    ],
)
async def test_stream_that_cannot_continue_ends_with_an_error_event(
    fields: dict[str, Any], config: RetryConfig
) -> None:
    client = await ask(DyingReplicas(4), fields=fields, config=config)

    assert client.chunks[-1]["error"]["code"] == "engine_lost"


async def test_streams_are_continued_only_if_configured() -> None:
    replicas = DyingReplicas()
    await ask(replicas)
    await ask(replicas, config=RetryConfig(continue_streams=False))

    assert [request.terms.keeps_journal for request in replicas.requests] == [True, False]


async def test_refusal_to_continue_ends_the_stream_with_an_error_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refusing(DyingReplicas):
        async def stream(
            self, request: RelayedRequest
        ) -> AsyncGenerator[ResponseStart | Piece | ResponseEnd, None]:
            if request.terms.resume is not None:
                yield ResponseStart(400, [], b'{"error":{"message":"my secret prompt",')
                yield Piece(b'"type":"BadRequestError","code":400}}')
                return
            async for part in super().stream(request):
                yield part

    client = await ask(Refusing(4), config=RetryConfig(max_retries=1))

    assert client.chunks[-1]["error"]["code"] == "engine_lost"
    reasons = [str(vars(record).get("reason")) for record in caplog.records]
    assert any("HTTP 400, type BadRequestError, code 400" in reason for reason in reasons)
    assert "secret" not in f"{reasons} {caplog.text}"


def test_text_that_differs_between_replicas_is_never_sent() -> None:
    stream = ClientStream()
    stream.forward(b"".join(chat_events(1, ["ab", "cd"])[:3]))
    stream.begin_again()

    with pytest.raises(ContinuationError, match="differ"):
        stream.forward(b"".join(chat_events(2, ["aX", "cd"])))


def test_text_that_ends_before_what_was_sent_is_an_error() -> None:
    stream = ClientStream()
    stream.forward(b"".join(chat_events(1, ["ab", "cd"])[:3]))
    stream.begin_again()

    with pytest.raises(ContinuationError, match="ends after 2 of 4"):
        stream.forward(b"".join(chat_events(2, ["ab"])))


def test_long_streams_are_not_kept() -> None:
    stream, text = ClientStream(), "a" * 1000
    tracemalloc.start()
    for _ in range(1000):
        stream.forward(event({"choices": [{"index": 0, "text": text}]}))
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert num_bytes < 300_000


# ---- thread-tagged streams ----------------------------------------------------------------------


def tagged_event(text: str, updates: list[dict[str, Any]], time_ms: int = 0) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return event({"choices": [choice], "apar": {"time_ms": time_ms, "updates": updates}})


def thread_update(name: str, text: str, tokens: int, **fields: Any) -> dict[str, Any]:
    update = {"choice": 0, "id": name, "text": text, "tokens": tokens, "state": "writing"}
    return update | fields


ROOT = {"parent": None, "position": None}
CHILD = {"parent": "root", "position": 2}


def updates_in(body: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for each in body.split(b"\n\n")[:-1]:
        found += json.loads(each.removeprefix(b"data: "))["apar"]["updates"]
    return found


def test_only_new_parts_of_updates_reach_the_client() -> None:
    stream = ClientStream()
    waits = thread_update("root.0", "", 0, state="waiting", **CHILD)
    stream.forward(tagged_event("ab", [thread_update("root", "ab", 3, **ROOT), waits]))
    stream.begin_again()

    again = thread_update("root", "ab cd", 5, **ROOT)
    child = thread_update("root.0", "é", 1, **CHILD)
    grandchild = thread_update("root.0.0", "x", 1, parent="root.0", position=1)
    events = stream.forward(tagged_event("ab", [again, child, grandchild]))

    assert updates_in(events) == [
        thread_update("root", " cd", 2),
        thread_update("root.0", "é", 1),
        grandchild,
    ]
    assert stream.forward(tagged_event("", [thread_update("root", "", 0)])) == b""


def test_edits_and_ends_reach_the_client_once() -> None:
    stream = ClientStream()
    edits = [{"paragraph": 0, "position": 0, "length": 0, "text": "\n"}]
    end = {"state": "ended", "finish_reason": "stop"}
    stream.forward(tagged_event("ab", [thread_update("root", "ab", 2, edits=edits, **ROOT)]))
    stream.begin_again()

    first = thread_update("root", "ab", 2, edits=edits, **ROOT)
    assert stream.forward(tagged_event("ab", [first])) == b""
    last = thread_update("root", "", 1, edits=edits, **end)
    assert updates_in(stream.forward(tagged_event("", [last]))) == [
        thread_update("root", "", 1, **end)
    ]


def test_a_thread_that_differs_between_replicas_is_refused() -> None:
    stream = ClientStream()
    stream.forward(tagged_event("", [thread_update("root", "ab", 2, **ROOT)]))
    stream.begin_again()

    with pytest.raises(ContinuationError, match=r"'apar\.root' differ"):
        stream.forward(tagged_event("", [thread_update("root", "ac", 2, **ROOT)]))


def test_the_time_of_a_stream_does_not_start_again_with_its_replica() -> None:
    clock = iter([100.0, 101.0, 103.5])
    stream = ClientStream(lambda: next(clock))
    stream.forward(tagged_event("a", [thread_update("root", "a", 1, **ROOT)], time_ms=2_000))
    stream.begin_again()
    times = []
    for text in ("ab", "c"):
        events = stream.forward(tagged_event(text, [thread_update("root", text, 2)], time_ms=7))
        times.append(json.loads(events.removeprefix(b"data: "))["apar"]["time_ms"])

    assert times == [2_000, 3_500]
