from dataclasses import replace

import pytest

from apar_core.errors import TreeError
from apar_core.scheduler.thread_table import ThreadGroup, ThreadTable
from tests.fakes.scripted_engine import CHILD, END, FORK, fork_parameters


def group(*, budget: int = 10, max_threads: int = 2, max_forks: int = 3) -> ThreadGroup[str]:
    parameters = fork_parameters(max_threads=max_threads, max_forks=max_forks)
    return ThreadTable[str]().open_group("r", parameters, budget)


def test_control_tokens_pass_the_budget() -> None:
    threads = group(budget=2)

    assert threads.within_budget([10, FORK, 11, FORK, 12]) == [10, FORK, 11]


def test_budget_counts_neither_control_nor_end_tokens() -> None:
    threads = group(budget=10)

    threads.count_text([10, FORK, 11, CHILD, END], stopped=True)

    assert threads.used_tokens == 2


def test_exhausted_group_may_not_fork() -> None:
    threads = group(budget=1)
    assert threads.may_fork()

    threads.count_text([10], stopped=False)

    assert threads.exhausted
    assert not threads.may_fork()


def test_text_is_accepted_within_the_budget() -> None:
    threads = group(budget=1)
    assert threads.takes_as_text(10)
    assert not threads.takes_as_text(FORK)

    threads.count_text([10], stopped=False)

    assert not threads.takes_as_text(10)


def test_a_request_continues_while_another_thread_runs_or_waits() -> None:
    threads = group()
    assert not threads.continues_without("r")

    threads.deferred.append("child")
    assert threads.continues_without("r")
    threads.deferred.clear()
    threads.live.add("r~0")
    assert threads.continues_without("r")

    threads.closed = True
    assert not threads.continues_without("r")


def test_a_waiting_child_may_start_if_it_has_a_place() -> None:
    threads = group(max_threads=2)
    assert not threads.has_startable

    threads.deferred.append("child")
    assert threads.has_startable
    threads.live.add("r~0")
    assert not threads.has_startable


def test_groups_are_ordered_by_priority_then_arrival() -> None:
    table: ThreadTable[str] = ThreadTable()
    arrivals = {"late": (0, 2.0), "urgent": (-1, 3.0), "early": (0, 1.0)}
    for name, arrival in arrivals.items():
        table.open_group(name, fork_parameters(), 10, arrival=arrival)

    ordered = sorted(table.groups, key=lambda group: group.order)

    assert [group.root_id for group in ordered] == ["urgent", "early", "late"]


def test_a_deadline_far_away_puts_no_request_before_others() -> None:
    table: ThreadTable[str] = ThreadTable()
    deadlines = {"early": None, "a day": 86_403.0, "soon": 20.0, "late": None, "a minute": 65.0}
    for second, (name, deadline_at_s) in enumerate(deadlines.items()):
        parameters = replace(fork_parameters(), deadline_at_s=deadline_at_s)
        table.open_group(name, parameters, 10, arrival=(0, float(second)))

    ordered = sorted(table.groups, key=lambda group: group.order)

    assert [group.root_id for group in ordered] == ["soon", "early", "a day", "late", "a minute"]


def test_a_live_thread_has_its_group() -> None:
    table: ThreadTable[str] = ThreadTable()
    threads = table.open_group("r", fork_parameters(), 10)
    table.add_thread(threads, "r~0")
    assert table.group("r~0") is threads

    assert table.end_thread("r~0") is threads

    assert table.group("r~0") is None
    assert table.end_thread("r~0") is None
    assert table.group("r") is threads


def test_refused_children_are_numbered_too() -> None:
    threads = group()

    assert [threads.next_child("r") for _ in range(2)] == [("r~0", 0), ("r~1", 1)]
    assert threads.next_child("r~0") == ("r~0~0", 0)


def test_place_is_free_again_when_a_thread_ends() -> None:
    table: ThreadTable[str] = ThreadTable()
    threads = table.open_group("r", fork_parameters(max_threads=1), 10)
    assert not threads.has_place()

    table.end_thread("r")

    assert threads.has_place()


def test_group_outlives_its_root_thread_until_the_last_thread_ends() -> None:
    table: ThreadTable[str] = ThreadTable()
    threads = table.open_group("r", fork_parameters(), 10)
    table.add_thread(threads, "r~0")

    table.end_thread("r")
    assert table.group_of_root("r") is threads

    table.end_thread("r~0")
    assert table.group_of_root("r") is None
    assert table.groups == []


def test_group_with_deferred_children_is_kept() -> None:
    table: ThreadTable[str] = ThreadTable()
    threads = table.open_group("r", fork_parameters(), 10)
    threads.deferred.append("child")

    table.end_thread("r")
    assert table.groups == [threads]

    threads.deferred.clear()
    table.drop_if_ended(threads)
    assert table.groups == []


def test_request_cannot_be_added_twice() -> None:
    table: ThreadTable[str] = ThreadTable()
    table.open_group("r", fork_parameters(), 10)

    with pytest.raises(TreeError, match="'r' was added twice"):
        table.open_group("r", fork_parameters(), 10)
