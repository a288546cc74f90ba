from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from apar_core.errors import EvaluationError
from cluster.experiments.driver import RunPlan, _Run, drive_side_by_side, question_order
from cluster.experiments.experiment_engine import Conditions, StepCounts
from cluster.experiments.program import Submission
from cluster.experiments.turn_clock import TurnClock
from tests.unit.cluster.experiments.peers.played import unforked_answer


def test_all_at_once_every_question_comes_once() -> None:
    assert list(question_order(3, None)) == [(0, True), (1, True), (2, True)]


def test_a_closed_loop_is_warm_before_the_measuredquestion_order_and_busy_behind_them() -> None:
    assert list(islice(question_order(3, 2), 8)) == [
        (2, False), (1, False), (0, True), (1, True), (2, True), (0, False), (1, False), (2, False),
    ]  # fmt: skip


class TwoRequests:
    """A client that asks again once its first request has ended."""

    def __init__(self) -> None:
        self.answer = unforked_answer()

    def start(self) -> list[Submission]:
        return [Submission("first", [1], {})]

    def on_tokens(self, name: str, token_ids: object) -> list[Submission]:
        return []

    def on_end(self, name: str) -> list[Submission]:
        return [Submission("second", [1, 2], {})] if name == "first" else []

    def text_ids(self) -> list[int]:
        return list(self.answer.flat)


def test_only_questions_that_have_not_begun_are_pending() -> None:
    waiting: set[str] = set()
    llm_engine = SimpleNamespace(
        add_request=lambda name, prompt, sampling: waiting.add(name),
        output_processor=SimpleNamespace(records=SimpleNamespace(take=lambda name: None)),
    )
    engine: Any = SimpleNamespace(
        llm_engine=llm_engine,
        counts=None,
        waiting_requests=lambda: waiting,
        has_pending=True,
        clock=TurnClock(),
        prepare=lambda conditions: None,
    )
    conditions = Conditions(concurrency=1, keeps_busy=False)
    run = _Run(RunPlan(engine, conditions, lambda index: TwoRequests(), 2), sample_s=1.0)

    def end(name: str) -> None:
        waiting.discard(name)
        output = SimpleNamespace(token_ids=[])
        run._take(SimpleNamespace(request_id=name, outputs=[output], finished=True))

    assert run.has_pending
    run.submit_what_may_come()
    # One question waits in the engine, and one for its client.
    assert waiting == {"run-0"}
    assert run.has_pending
    end("run-0")
    end("run-1")
    run.submit_what_may_come()
    assert waiting == {"run-2"}
    assert run.has_pending
    end("run-2")
    # The second request of the last question waits, but the question has begun.
    assert waiting == {"run-3"}
    assert not run.has_pending


class TimedEngine:
    """Generates one answer of 96 tokens, so many in each step, which lasts so long."""

    num_blocks = block_size = kv_tokens_in_use = 1

    def __init__(self, name: str, now_s: list[float], log: list[str], *, rate: int) -> None:
        self.clock = TurnClock(lambda: now_s[0])
        self.counts = StepCounts()
        self.step_s = 1.0
        self.is_aborted = False
        self.llm_engine = SimpleNamespace(
            add_request=lambda *request: None,
            step=self._step,
            output_processor=SimpleNamespace(records=SimpleNamespace(take=lambda name: None)),
        )
        counters = SimpleNamespace(delayed={}, accepted=0)
        self.scheduler = SimpleNamespace(admission=SimpleNamespace(counters=counters))
        self._name, self._now_s, self._log, self._rate = name, now_s, log, rate

    def prepare(self, conditions: Conditions) -> None:
        assert conditions == Conditions()

    def waiting_requests(self) -> set[str]:
        return set()

    def abort_all(self) -> None:
        self.is_aborted = True

    def _step(self) -> list[Any]:
        self._now_s[0] += self.step_s
        self._log.append(self._name)
        self.counts.steps += 1
        self.counts.text_tokens += self._rate
        is_last = self.counts.text_tokens == 96
        output = SimpleNamespace(token_ids=[])
        return [SimpleNamespace(request_id="run-0", outputs=[output], finished=is_last)]


class OneAnswer(TwoRequests):
    def __init__(self) -> None:
        self.answer: Any = SimpleNamespace(
            text_tokens=96, flat=[1], answer_id="a", category="generic"
        )

    def on_end(self, name: str) -> list[Submission]:
        return []


def test_clocks_go_on_after_a_run_that_fails() -> None:
    now_s = [0.0]
    broken, other = (TimedEngine(name, now_s, [], rate=1) for name in "bo")

    def fail() -> list[Any]:
        raise EvaluationError("the engine generated another answer")

    broken.llm_engine.step = fail
    engines: list[Any] = [broken, other]
    plans = [RunPlan(engine, Conditions(), lambda index: OneAnswer(), 1) for engine in engines]

    with pytest.raises(EvaluationError, match="another answer"):
        drive_side_by_side(plans, sample_s=1.0)

    before_s = (broken.clock(), other.clock())
    now_s[0] += 3.0
    assert (broken.clock() - before_s[0], other.clock() - before_s[1]) == (3.0, 3.0)


def test_runs_side_by_side_take_turns_and_end_together_each_in_its_own_time() -> None:
    now_s, log = [0.0], list[str]()
    slow = TimedEngine("s", now_s, log, rate=1)
    fast = TimedEngine("f", now_s, log, rate=3)
    engines: list[Any] = [slow, fast]
    plans = [RunPlan(engine, Conditions(), lambda index: OneAnswer(), 1) for engine in engines]

    runs = drive_side_by_side(plans, sample_s=1.0)

    # Three turns of one in which as much is generated as in a turn of the other.
    assert "".join(log) == ("s" * 16 + "f" * 16 + "s" * 32) * 2
    assert [run.wall_s for run in runs] == [96.0, 32.0]
    assert [run.served[0].latency_s for run in runs] == [96.0, 32.0]
    assert [sample.tokens_per_s for sample in runs[1].samples] == [3.0] * 32
    assert slow.is_aborted
    assert fast.is_aborted
    # Whatever runs in these engines next is timed as ever.
    before_s = fast.clock()
    now_s[0] += 5.0
    assert fast.clock() - before_s == 5.0
