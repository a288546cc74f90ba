"""The queue of waiting forks, compared with a linear search over all requests."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apar_core.scheduler.fork_admission import ForkQueue
from apar_core.scheduler.thread_table import ThreadGroup
from tests.fakes.examples import num_examples
from tests.fakes.scripted_engine import fork_parameters


def group_of(
    name: str, *, arrival: float = 0.0, priority: int = 0, max_threads: int = 9, **key: object
) -> ThreadGroup[str]:
    parameters = fork_parameters(max_threads=max_threads, **key)  # type: ignore[arg-type]
    return ThreadGroup(name, parameters, 100, (priority, arrival))


def waiting(queue: ForkQueue[str], *groups: ThreadGroup[str]) -> None:
    for group in groups:
        group.deferred.append("child")
        queue.offer(group)


def test_requests_come_by_priority_then_by_arrival() -> None:
    queue: ForkQueue[str] = ForkQueue()
    late, early = group_of("a", arrival=2.0), group_of("b", arrival=1.0)
    urgent = group_of("c", arrival=3.0, priority=-1, key="k")
    waiting(queue, late, early, urgent)

    order = []
    while (group := queue.first()) is not None:
        group.deferred.clear()
        order.append(group.root_id)

    assert order == ["c", "b", "a"]


def test_a_request_at_its_own_limit_lets_the_next_pass() -> None:
    queue: ForkQueue[str] = ForkQueue()
    full, other = group_of("a", arrival=1.0, max_threads=1), group_of("b", arrival=2.0)
    full.live.add("a")
    waiting(queue, full, other)
    assert queue.first() is other

    full.live.clear()
    queue.offer(full)

    assert queue.first() is full


def test_a_key_at_its_limit_lets_the_next_key_pass() -> None:
    queue: ForkQueue[str] = ForkQueue()
    first = group_of("a", arrival=1.0, key="k", key_max_threads=2)
    second = group_of("b", arrival=2.0, key="k", key_max_threads=2)
    other = group_of("c", arrival=3.0, key="l", key_max_threads=2)
    for name in ("a", "b"):
        queue.thread_began(name, "k")
    queue.thread_began("c", "l")
    waiting(queue, first, second, other)
    assert queue.first() is other

    queue.thread_ended("b")

    assert queue.first() is first
    queue.thread_began("a~0", "k")
    assert queue.first() is other


def test_threads_without_a_key_are_not_counted() -> None:
    queue: ForkQueue[str] = ForkQueue()
    queue.thread_began("a", None)
    queue.thread_began("b", "k")
    assert dict(queue.key_threads) == {"k": 1}

    queue.thread_ended("a")
    queue.thread_ended("b")
    queue.thread_ended("never began")

    assert dict(queue.key_threads) == {}


@pytest.mark.parametrize("key", [None, "k"])
def test_an_ended_request_is_skipped(key: str | None) -> None:
    queue: ForkQueue[str] = ForkQueue()
    ended, other = group_of("a", arrival=1.0, key=key), group_of("b", arrival=2.0, key=key)
    waiting(queue, ended, other)

    ended.closed = True
    ended.deferred.clear()

    assert queue.first() is other


@dataclass
class Model:
    """Reference queue: all requests in a list."""

    queue: ForkQueue[str]
    groups: list[ThreadGroup[str]] = field(default_factory=list)

    def first(self) -> ThreadGroup[str] | None:
        able = [
            group
            for group in self.groups
            if group.has_startable and not self.queue.key_is_full(group)
        ]
        return min(able, key=lambda group: group.order, default=None)


events = st.lists(
    st.tuples(st.sampled_from(["open", "fork", "start", "end", "close"]), st.integers(0, 30)),
    max_size=80,
)


@settings(max_examples=num_examples(300), deadline=None)
@given(events=events)
def test_the_first_request_equals_that_of_a_linear_search(events: list[tuple[str, int]]) -> None:
    model = Model(ForkQueue())
    queue, groups = model.queue, model.groups
    for event, number in events:
        if event == "open":
            key = [None, "k", "l"][number % 3]
            name = f"r{len(groups)}"
            limits = {"key": key, "key_max_threads": 2 if key else None}
            group = group_of(
                name, arrival=-float(number), max_threads=1 + number % 3, priority=number % 2,
                **limits,
            )  # fmt: skip
            group.live.add(name)
            groups.append(group)
            queue.thread_began(name, key)
        elif groups:
            group = groups[number % len(groups)]
            if event == "fork" and not group.closed:
                waiting(queue, group)
            elif event == "start" and (first := queue.first()) is not None:
                first.deferred.popleft()
                child = f"{first.root_id}~{number}-{len(first.live)}"
                first.live.add(child)
                queue.thread_began(child, first.parameters.key)
            elif event == "end" and group.live:
                thread = sorted(group.live)[-1]
                group.live.discard(thread)
                queue.thread_ended(thread)
                queue.offer(group)
            elif event == "close":
                group.closed = True
                group.deferred.clear()
        assert queue.first() is model.first()
