from itertools import islice
from types import SimpleNamespace
from typing import Any

from cluster.experiments.driver import _Run, question_order
from cluster.experiments.experiment_engine import Conditions
from cluster.experiments.program import Submission
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
    )
    conditions = Conditions(concurrency=1, keeps_busy=False)
    run = _Run(engine, conditions, lambda index: TwoRequests(), 2, lambda: None)

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
