from dataclasses import replace

import pytest

from apar_core.scheduler.fork_admission import ForkAdmission
from apar_core.scheduler.fork_policy import EagerPolicy, ForkPolicy
from apar_core.scheduler.thread_table import ThreadGroup
from apar_core.step_costs.costs import StepBatch
from tests.fakes.scripted_engine import fork_parameters

BATCH = StepBatch(4, 400)


class SmallOnly(EagerPolicy):
    """Admits forks that attend to few tokens."""

    def admits(self, batch: StepBatch, limit_s: float | None = None) -> bool:
        return batch.attended_tokens <= 500


def group_of(name: str, arrival: float, *, max_threads: int = 9) -> ThreadGroup[str]:
    group: ThreadGroup[str] = ThreadGroup(
        name, fork_parameters(max_threads=max_threads), 100, (0, arrival)
    )
    group.live.add(name)
    return group


def admission(
    *, max_replica_threads: int | None = None, policy: ForkPolicy | None = None
) -> ForkAdmission[str]:
    return ForkAdmission(max_replica_threads, policy or EagerPolicy(), len)


def test_children_of_the_oldest_request_start_first_and_in_order() -> None:
    forks = admission()
    young, old = group_of("young", 2.0), group_of("old", 1.0)
    for group, child in ((young, "a"), (old, "b"), (old, "c")):
        forks.wait(group, child)

    taken = [forks.next(4, BATCH) for _ in range(4)]

    assert taken == [(old, "b"), (old, "c"), (young, "a"), None]


def test_children_of_a_request_with_a_deadline_start_before_those_of_older_ones() -> None:
    forks = admission()
    old, late, soon = group_of("old", 1.0), group_of("late", 2.0), group_of("soon", 3.0)
    late.parameters = replace(late.parameters, deadline_at_s=20.0)
    soon.parameters = replace(soon.parameters, deadline_at_s=10.0)
    for group in (old, late, soon):
        forks.wait(group, "child")

    assert [forks.next(4, BATCH) for _ in range(3)] == [
        (soon, "child"),
        (late, "child"),
        (old, "child"),
    ]


def test_a_fork_blocked_by_replica_or_policy_blocks_all_others() -> None:
    forks = admission(policy=SmallOnly())
    forks.wait(group_of("old", 1.0), "x" * 101)
    forks.wait(group_of("young", 2.0), "y")

    assert forks.next(4, BATCH) is None


def test_the_replica_limit_counts_every_thread() -> None:
    forks = admission(max_replica_threads=5)
    forks.wait(group_of("a", 1.0), "child")

    assert forks.next(5, BATCH) is None
    assert forks.next(4, BATCH) is not None


@pytest.mark.parametrize(
    ("forks", "reason"),
    [(admission(max_replica_threads=4), "replica"), (admission(policy=SmallOnly()), "policy")],
)
def test_the_reason_of_a_delay_is_what_blocks_the_oldest_request(
    forks: ForkAdmission[str], reason: str
) -> None:
    full, waiting = group_of("full", 1.0, max_threads=1), group_of("waiting", 2.0)
    forks.wait(full, "x" * 200)
    for _ in range(2):
        forks.wait(waiting, "x" * 200)
    assert forks.next(4, BATCH) is None

    forks.settle()

    assert forks.waiting_by_reason([full, waiting]) == {
        "request": 1,
        "key": 0,
        "replica": 2 * (reason == "replica"),
        "policy": 2 * (reason == "policy"),
    }
    assert forks.counters.delayed == forks.waiting_by_reason([full, waiting])


def test_the_reason_of_a_delay_is_the_current_one() -> None:
    forks = admission(max_replica_threads=4, policy=SmallOnly())
    group = group_of("a", 1.0)
    forks.wait(group, "x" * 200)

    assert forks.next(4, BATCH) is None
    assert forks.waiting_by_reason([group])["replica"] == 1
    assert forks.next(3, BATCH) is None
    assert forks.waiting_by_reason([group])["policy"] == 1


def test_a_fork_counts_once_however_long_it_waits() -> None:
    forks = admission(max_replica_threads=5)
    group = group_of("a", 1.0)
    for child in ("first", "second"):
        forks.wait(group, child)
    assert forks.next(4, BATCH) is not None
    assert forks.next(5, BATCH) is None
    forks.settle()
    forks.settle()

    assert forks.next(4, BATCH) is not None
    forks.settle()

    assert forks.counters.accepted == 1
    assert sum(forks.counters.delayed.values()) == 1


def test_forks_of_a_request_that_ended_are_not_counted_as_accepted() -> None:
    forks = admission(max_replica_threads=1)
    group = group_of("a", 1.0)
    forks.wait(group, "child")
    group.closed = True
    group.deferred.clear()
    forks.closed(group)

    forks.settle()

    assert forks.counters.accepted == 0
    assert forks.next(0, BATCH) is None
