"""Spans of a request inside a replica, from outputs as vLLM's engine makes them."""

from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from vllm import SamplingParams
from vllm.v1.engine import (
    FINISH_REASON_STRINGS,
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
)

from apar_core.engine.thread_outputs import RequestThreads
from apar_core.fork_parameters import ForkParameters
from apar_core.journal import Journal, ThreadDelta
from apar_core.scheduler.core_state import CoreState
from deployments.replica.answering import FollowedRequest
from deployments.replica.engine_trace import _ABORT, _PREEMPTED, _SCHEDULED, start_engine_trace
from deployments.tracing import attributes as names
from deployments.tracing.thread_spans import FINISH_REASONS
from deployments.wire.request import RequestTerms
from tests.fakes.core_states import a_core_state
from tests.fakes.kept_spans import KeptSpans, parent_of

FORK, CHILD, END = 1, 2, 3
PARAMETERS = ForkParameters(FORK, (CHILD,), (CHILD,), True, 16, 100, (END,))
TRACE = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
OUTPUT_S = 1 / 256


class Clock:
    """The monotonic clock; it moves at each output."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


CLOCK = Clock()


class FakeRequest:
    """One traced request in a replica, and the fake engine that it runs in."""

    errored = False

    def __init__(self, kept: KeptSpans, resume: Journal | None = None) -> None:
        self.kept = kept
        terms = RequestTerms(keeps_journal=True, resume=resume, trace_headers=TRACE)
        trace = start_engine_trace(kept.tracing, terms.trace_headers, "replica-1")
        self.request = FollowedRequest(self, terms, trace)
        self.request.begin("chatcmpl-1")

    def follow(self, request_id: str, follower: Any, terms: Any = None) -> None:
        self.follower = follower

    def unfollow(self, request_id: str) -> None:
        pass

    def end(self, request_id: str) -> bool:
        return False

    async def core_state(self) -> CoreState:
        return a_core_state()

    def begin(self, root: str = "r", choice: int | None = None) -> RequestThreads:
        self.follower.begin(root, 5, SamplingParams(), choice=choice)
        return RequestThreads(root, PARAMETERS, None, self.follower)

    def threads(self) -> dict[str, ReadableSpan]:
        return {str(facts(span)[names.THREAD_ID]): span for span in self.kept.named(names.THREAD)}


def output(
    thread: str, token_ids: list[int], finish: FinishReason | None = None, **fields: Any
) -> EngineCoreOutput:
    CLOCK.now_s += OUTPUT_S
    return EngineCoreOutput(thread, token_ids, finish_reason=finish, **fields)


def event(kind: EngineCoreEventType, timestamp: float | None = None) -> EngineCoreEvent:
    return EngineCoreEvent.new_event(kind, timestamp)


def start(span: ReadableSpan) -> int:
    assert span.start_time is not None
    return span.start_time


def end(span: ReadableSpan) -> int:
    assert span.end_time is not None
    return span.end_time


def facts(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", CLOCK)


@pytest.fixture
def kept() -> KeptSpans:
    return KeptSpans()


def test_the_values_of_vllms_events_and_finish_reasons() -> None:
    assert (EngineCoreEventType.SCHEDULED, EngineCoreEventType.PREEMPTED) == (
        _SCHEDULED,
        _PREEMPTED,
    )
    assert FinishReason.ABORT == _ABORT
    assert tuple(FINISH_REASON_STRINGS) == FINISH_REASONS


def test_every_thread_has_a_span_under_its_parents(kept: KeptSpans) -> None:
    fake = FakeRequest(kept)
    threads = fake.begin()
    threads.feed(output("r", [10, FORK, 11]))
    threads.feed(output("r~0", [20, FORK]))
    threads.feed(output("r~0~0", [30, END], STOP))
    threads.feed(output("r", [FORK, END], STOP))
    threads.feed(output("r~0", [END], STOP))
    threads.feed(output("r~1", [40], LENGTH))
    fake.request.close()

    spans = fake.threads()
    assert set(spans) == {"root", "root.0", "root.0.0", "root.1"}
    assert {name: facts(span)[names.THREAD_TOKENS] for name, span in spans.items()} == {
        "root": 5,
        "root.0": 3,
        "root.0.0": 2,
        "root.1": 1,
    }
    assert parent_of(spans["root.0.0"], kept.all()) is spans["root.0"]
    assert parent_of(spans["root.1"], kept.all()) is spans["root"]
    assert parent_of(spans["root"], kept.all()) is kept.one(names.DECODE)
    assert facts(spans["root.0.0"])[names.THREAD_PARENT] == "root.0"
    assert facts(spans["root.0.0"])[names.THREAD_DEPTH] == 2
    assert facts(spans["root.1"])[names.FINISH_REASON] == "length"
    assert facts(spans["root"])[names.FINISH_REASON] == "stop"
    # A child starts at its fork, a token of its parent, and may outlive it.
    assert start(spans["root"]) == start(spans["root.0"]) < start(spans["root.0.0"])
    assert start(spans["root.1"]) == end(spans["root"]) < end(spans["root.1"])


def test_phases_follow_each_other(kept: KeptSpans) -> None:
    fake = FakeRequest(kept)
    threads = fake.begin()
    events = [event(EngineCoreEventType.QUEUED), event(EngineCoreEventType.SCHEDULED)]
    threads.feed(output("r", [10], events=events))
    threads.feed(output("r", [END], STOP))
    fake.request.close()

    engine = kept.one(names.ENGINE)
    phases = [kept.one(name) for name in (names.ENGINE_QUEUE, names.PREFILL, names.DECODE)]
    assert all(parent_of(phase, kept.all()) is engine for phase in phases)
    queue, prefill, decode = phases
    assert start(engine) <= start(queue) <= end(queue) == start(prefill)
    assert start(prefill) < end(prefill) == start(decode) < end(decode) <= end(engine)
    assert engine.parent is not None
    assert engine.parent.span_id == int("cd" * 8, 16)
    assert engine.context.trace_id == int("ab" * 16, 16)
    assert facts(engine)[names.REPLICA_ID] == "replica-1"
    assert facts(engine)[names.OUTPUT_TOKENS] == 2
    assert engine.status.is_unset


@pytest.mark.parametrize("timestamp", [1.0, 1e12])
def test_timestamps_of_another_machines_clock_are_ignored(
    kept: KeptSpans, timestamp: float
) -> None:
    fake = FakeRequest(kept)
    threads = fake.begin()
    threads.feed(output("r", [END], STOP, events=[event(EngineCoreEventType.SCHEDULED, timestamp)]))
    fake.request.close()

    assert kept.named(names.ENGINE_QUEUE) == []
    assert start(kept.one(names.PREFILL)) < end(kept.one(names.PREFILL))


def test_the_span_of_a_thread_has_its_delay_and_preemptions(kept: KeptSpans) -> None:
    fake = FakeRequest(kept)
    threads = fake.begin()
    threads.feed(output("r", [FORK, 10]))
    CLOCK.now_s += 0.25
    threads.feed(output("r~0", [20], events=[event(EngineCoreEventType.SCHEDULED)]))
    preempted = [event(EngineCoreEventType.PREEMPTED), event(EngineCoreEventType.SCHEDULED)]
    threads.feed(output("r~0", [END], STOP, events=preempted))
    fake.request.close()

    child = facts(fake.threads()["root.0"])
    assert child[names.THREAD_WAIT_S] == 0.25
    assert child[names.THREAD_PREEMPTIONS] == 1


def test_threads_beyond_the_span_limit_are_counted() -> None:
    kept = KeptSpans(max_thread_spans=3)
    fake = FakeRequest(kept)
    threads = fake.begin()
    threads.feed(output("r", [FORK] * 4 + [END], STOP))
    threads.feed(output("r~3", [FORK, END], STOP))
    for child in ("r~0", "r~1", "r~2", "r~3~0"):
        threads.feed(output(child, [END], STOP))
    fake.request.close()

    assert set(fake.threads()) == {"root", "root.0", "root.1"}
    assert facts(kept.one(names.ENGINE))[names.THREADS_DROPPED] == 3


def test_each_choice_has_its_own_tree_of_spans(kept: KeptSpans) -> None:
    fake = FakeRequest(kept)
    for choice in range(2):
        threads = fake.begin(f"{choice}_r", choice)
        threads.feed(output(f"{choice}_r", [FORK, END], STOP))
        threads.feed(output(f"{choice}_r~0", [END], STOP))
    fake.request.close()

    found = [
        (facts(span)[names.THREAD_ID], facts(span)[names.THREAD_CHOICE])
        for span in kept.named(names.THREAD)
    ]
    assert sorted(found) == [("root", 0), ("root", 1), ("root.0", 0), ("root.0", 1)]
    children = [span for span in kept.named(names.THREAD) if names.THREAD_PARENT in facts(span)]
    assert len(children) == 2
    for child in children:
        parent = parent_of(child, kept.all())
        assert parent is not None
        assert facts(parent)[names.THREAD_ID] == facts(child)[names.THREAD_PARENT] == "root"
        assert facts(parent)[names.THREAD_CHOICE] == facts(child)[names.THREAD_CHOICE]


def test_a_continued_request_has_spans_of_the_threads_that_run_here(kept: KeptSpans) -> None:
    journal = (
        ThreadDelta((), (FORK, 10), int(STOP)),
        ThreadDelta((0,), (20, FORK)),
        ThreadDelta((0, 0), (30,)),
    )
    fake = FakeRequest(kept, journal)
    threads = fake.begin()
    fake.follower.replay(begins=True)
    threads.feed(EngineCoreOutput("r", [FORK, 10], finish_reason=LENGTH))
    threads.feed(EngineCoreOutput("r~0", [20, FORK]))
    threads.feed(EngineCoreOutput("r~0~0", [30]))
    fake.follower.replay(begins=False)
    threads.feed(output("r~0~0", [31, END], STOP))
    threads.feed(output("r~0", [FORK, END], STOP))
    threads.feed(output("r~0~1", [END], STOP))
    fake.request.close()

    spans = fake.threads()
    assert set(spans) == {"root.0", "root.0.0", "root.0.1"}
    assert facts(kept.one(names.ENGINE))[names.THREADS_ELSEWHERE] == 1
    assert parent_of(spans["root.0"], kept.all()) is kept.one(names.DECODE)
    assert parent_of(spans["root.0.0"], kept.all()) is spans["root.0"]
    assert facts(spans["root.0"])[names.THREAD_TOKENS_BEFORE] == 2
    assert facts(spans["root.0"])[names.THREAD_TOKENS] == 2
    # Although the child was observed before its parent.
    assert start(spans["root.0"]) == start(spans["root.0.0"]) < start(spans["root.0.1"])


def test_a_disconnect_cuts_the_running_threads(kept: KeptSpans) -> None:
    fake = FakeRequest(kept)
    threads = fake.begin()
    threads.feed(output("r", [FORK, 10]))
    threads.feed(output("r~0", [END], STOP))
    CLOCK.now_s += 0.25
    fake.request.close()

    spans = fake.threads()
    assert facts(spans["root"])[names.FINISH_REASON] == "cut"
    assert spans["root"].status.is_unset
    assert end(spans["root.0"]) < end(spans["root"])


def give_up(threads: RequestThreads) -> None:
    threads.feed(output("r", [], FinishReason.ABORT))


@pytest.mark.parametrize("lose", [give_up, lambda threads: None])
def test_threads_of_a_lost_engine_are_lost(
    kept: KeptSpans, lose: Callable[[RequestThreads], None]
) -> None:
    fake = FakeRequest(kept)
    threads = fake.begin()
    threads.feed(output("r", [FORK, 10]))
    threads.feed(output("r~0", [END], STOP))
    lose(threads)
    fake.request.close(broken=True)

    spans = fake.threads()
    assert facts(spans["root"])[names.FINISH_REASON] == "lost"
    assert not spans["root"].status.is_ok
    assert not spans["root"].status.is_unset
    assert spans["root.0"].status.is_unset
    assert not kept.one(names.ENGINE).status.is_unset


def test_a_request_that_is_never_scheduled_waits_until_its_end(kept: KeptSpans) -> None:
    fake = FakeRequest(kept)
    fake.begin()
    CLOCK.now_s += 0.25
    fake.request.close()

    assert {span.name for span in kept.all()} == {names.ENGINE, names.ENGINE_QUEUE}
    assert end(kept.one(names.ENGINE_QUEUE)) == end(kept.one(names.ENGINE))


def test_a_request_that_never_reaches_the_engine_is_one_span(kept: KeptSpans) -> None:
    trace = start_engine_trace(kept.tracing, TRACE, "replica-1")
    FollowedRequest(FakeRequest(kept), RequestTerms(), trace).close()

    assert [span.name for span in kept.all()] == [names.ENGINE]


def test_an_untraced_request_is_not_observed(kept: KeptSpans) -> None:
    assert start_engine_trace(None, TRACE, "replica-1") is None
    assert start_engine_trace(kept.tracing, None, "replica-1") is None
