"""Answers of a replica while its engine lives, aborts requests, or dies."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason

from apar_core.engine.request_follower import RequestFollower
from apar_core.errors import EngineError
from apar_core.fork_parameters import KeyTerms
from apar_core.journal import ThreadDelta
from apar_core.scheduler.core_state import CoreState
from deployments.replica import answering
from deployments.replica.answering import Answering
from deployments.wire.request import SCOPE_KEY, Deadlines, RelayedRequest, RequestTerms
from deployments.wire.response import Piece, ResponseBroken, ResponseEnd, ResponseStart
from tests.fakes.core_states import a_core_state

pytestmark = pytest.mark.usefixtures("simulated_clocks")

REQUEST = RelayedRequest(
    "POST", "/v1/completions", b"", [], b"{}", RequestTerms(keeps_journal=True)
)


class FakeEngine:
    """An engine with scripted outputs."""

    def __init__(self) -> None:
        self.errored = False
        self.follower = RequestFollower(keeps_journal=False)
        self.hangs = False
        self.ended = False

    async def core_state(self) -> CoreState:
        if self.hangs:
            await asyncio.Event().wait()
        return a_core_state()

    def follow(
        self, request_id: str, follower: RequestFollower, terms: KeyTerms | None = None
    ) -> None:
        self.follower = follower
        follower.begin("r", 5, SamplingParams(), choice=None)

    def unfollow(self, request_id: str) -> None:
        pass

    def end(self, request_id: str) -> bool:
        """End the request, as the output processor does."""
        self.ended = True
        self.put(finish=FinishReason.LENGTH)
        return True

    def put(self, *token_ids: int, finish: FinishReason | None = None) -> None:
        self.follower.add(EngineCoreOutput("r", list(token_ids), finish_reason=finish))


class FakeApp:
    """Answers in pieces, each after an event in the engine."""

    def __init__(self, *steps: tuple[Callable[[], None], bytes]) -> None:
        self.steps = steps
        self.pause_s = 0.0
        self.disconnected = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        scope[SCOPE_KEY].begin("r")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        left = asyncio.ensure_future(receive())
        for happens, body in self.steps:
            happens()
            await asyncio.wait([left], timeout=self.pause_s)
            if left.done():
                self.disconnected = True
                return
            await send({"type": "http.response.body", "body": body, "more_body": True})
            # Let the reader take the piece before the next one.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        left.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def give_up(engine: FakeEngine) -> None:
    """Abort the request, as an engine core does when it shuts down."""
    engine.put(finish=FinishReason.ABORT)


def die(engine: FakeEngine) -> None:
    engine.errored = True


def answering_with(
    *steps: Callable[[FakeEngine], None],
) -> tuple[Answering, FakeApp, FakeEngine]:
    engine = FakeEngine()
    app = FakeApp(
        *((lambda step=step: step(engine), b"%d" % number) for number, step in enumerate(steps))
    )
    return Answering(engine, app, "replica-1"), app, engine


def put(*token_ids: int) -> Callable[[FakeEngine], None]:
    return lambda engine: engine.put(*token_ids)


@pytest.mark.parametrize("lose", [give_up, die])
async def test_a_stream_breaks_off_before_the_output_of_a_lost_engine(
    lose: Callable[[FakeEngine], None],
) -> None:
    def generate_and_lose(engine: FakeEngine) -> None:
        engine.put(12)
        lose(engine)

    replica, _, _ = answering_with(put(10, 11), generate_and_lose)
    assert not replica.engine_lost

    start, rest, broken = [part async for part in replica.stream(REQUEST)]

    assert isinstance(start, ResponseStart)
    assert (start.body, start.num_tokens) == (b"0", 2)
    # Neither the end of the thread nor text after it.
    assert rest == Piece(b"", (ThreadDelta((), (12,)),), 1, 5)
    assert isinstance(broken, ResponseBroken)
    assert broken.engine_died == (lose is die)
    assert replica.engine_lost
    assert replica.num_inside == 0


@pytest.mark.parametrize("lose", [give_up, die])
async def test_a_whole_answer_of_a_lost_engine_is_broken(
    lose: Callable[[FakeEngine], None],
) -> None:
    replica, _, _ = answering_with(put(10, 11), lose)

    told, broken = [part async for part in replica.whole(REQUEST)]

    assert isinstance(told, Piece)
    assert (told.num_tokens, told.prompt_tokens) == (2, 5)
    assert isinstance(broken, ResponseBroken)
    assert replica.engine_lost


async def test_a_request_after_the_loss_of_the_engine_waits_for_the_watchdog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, app, _ = answering_with(give_up)
    assert [type(part) async for part in replica.stream(REQUEST)] == [ResponseBroken]
    monkeypatch.setattr(answering, "ENGINE_ANSWER_S", 1e6)
    app.steps = ()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            _ = [part async for part in replica.stream(REQUEST)]

    assert replica.num_inside == 0


async def test_a_whole_answer_reports_its_tokens_as_they_are_generated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answering, "PROGRESS_S", 0.01)
    replica, app, _ = answering_with(put(10, 11), put(12), put(13))
    app.pause_s = 0.05

    parts: list[Any] = [part async for part in replica.whole(REQUEST)]

    *told, (start, end) = parts
    assert told[:2] == [
        Piece(b"", (ThreadDelta((), (10, 11)),), 2, 5),
        Piece(b"", (ThreadDelta((), (12,)),), 1, 5),
    ]
    assert start.body == b"012"
    assert isinstance(end, ResponseEnd)
    assert (end.prompt_tokens, end.generated_tokens, end.replica) == (5, 4, "replica-1")


async def test_a_short_whole_answer_is_one_part() -> None:
    replica, _, _ = answering_with(put(10, 11))

    parts: list[Any] = [part async for part in replica.whole(REQUEST)]

    assert [type(part) for part in parts] == [tuple]


@pytest.mark.parametrize("at_a_number", [True, False])
async def test_a_client_that_leaves_a_whole_answer_disconnects_the_application(
    monkeypatch: pytest.MonkeyPatch, at_a_number: bool
) -> None:
    monkeypatch.setattr(answering, "PROGRESS_S", 0.01)
    replica, app, _ = answering_with(put(10), put(11))
    app.pause_s = 1e6
    parts: Any = replica.whole(REQUEST)

    assert (await anext(parts)).num_tokens == 1
    if not at_a_number:
        waiting = asyncio.ensure_future(anext(parts))
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.wait([waiting])
    await parts.aclose()

    assert app.disconnected
    assert replica.num_inside == 0


async def test_an_error_in_the_application_does_not_lose_the_engine() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("broken app")

    failed = Answering(FakeEngine(), failing, "replica-1")
    for call in (failed.stream, failed.whole):
        with pytest.raises(RuntimeError, match="broken app"):
            _ = [part async for part in call(REQUEST)]
    assert not failed.engine_lost


async def test_an_engine_that_fails_to_answer_twice_in_a_row_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answering, "ENGINE_ANSWER_S", 0.01)
    replica, _, engine = answering_with()

    async def look() -> None:
        with pytest.raises(EngineError):
            await replica.check_health()

    engine.hangs = True
    await look()
    engine.hangs = False
    await replica.check_health()
    engine.hangs = True
    await look()
    assert not replica.engine_lost
    await look()
    assert replica.engine_lost

    engine.hangs = False
    await look()


def due(**seconds: float) -> RelayedRequest:
    """A request whose deadlines are these many seconds away."""
    now_s = time.time()
    deadlines = Deadlines(**{name: now_s + left_s for name, left_s in seconds.items()})
    return replace(REQUEST, terms=RequestTerms(deadlines=deadlines))


@pytest.mark.parametrize(
    ("seconds", "code"),
    [
        ({"answer_at_s": 0.02}, "deadline_exceeded"),
        ({"first_token_at_s": 0.02, "answer_at_s": 60.0}, "first_token_deadline_exceeded"),
    ],
)
async def test_a_deadline_without_a_token_is_an_error_that_names_it(
    seconds: dict[str, float], code: str
) -> None:
    engine = FakeEngine()
    app = FakeApp((lambda: None, b""), (lambda: None, b"late"))
    app.pause_s = 0.05
    for method in ("stream", "whole"):
        answering = Answering(engine, app, "replica")
        parts = [part async for part in getattr(answering, method)(due(**seconds))]

        start = parts[0] if method == "stream" else parts[-1][0]
        assert start.status == 503
        assert json.loads(start.body)["error"]["code"] == code
        assert (b"retry-after", b"1") in start.headers
        assert engine.ended


async def test_an_answer_that_has_begun_ends_at_its_deadline_without_an_error() -> None:
    engine = FakeEngine()
    app = FakeApp((lambda: engine.put(1), b"a"), (lambda: None, b"b"))
    app.pause_s = 0.05
    answering = Answering(engine, app, "replica")

    parts = [part async for part in answering.stream(due(answer_at_s=0.02, first_token_at_s=0.04))]

    assert isinstance(parts[0], ResponseStart)
    assert parts[0].status == 200
    assert engine.ended


async def test_a_deadline_after_the_end_has_no_effect() -> None:
    engine = FakeEngine()
    answering = Answering(engine, FakeApp((lambda: engine.put(1), b"a")), "replica")

    [part async for part in answering.stream(due(answer_at_s=0.05, first_token_at_s=0.05))]
    await asyncio.sleep(0.1)

    assert not engine.ended
