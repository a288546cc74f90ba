"""Load estimates between two reports."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.table import Forecast, ReplicaTable
from tests.unit.deployments.routing.loads import IDLE, busy

FOUR_THREADS = Forecast(threads=4.0, steps=100.0, generated_tokens=400.0, kv_tokens=480.0)


def table_of(*names: str, cap: int = 10) -> ReplicaTable:
    table = ReplicaTable()
    table.replicas_changed(dict.fromkeys(names, cap))
    return table


def test_requests_sent_after_the_report_are_added_to_it() -> None:
    table = table_of("a")
    slot = table.slots["a"]
    table.sent(slot, FOUR_THREADS, now_s=0.5)
    table.reported("a", busy(1, 3, at_s=0.8), now_s=1.0)
    table.sent(slot, FOUR_THREADS, now_s=1.2)

    assert table.requests[slot] == 2
    assert table.threads[slot] == 3 + 4
    assert table.room[slot] == 8


def test_a_late_report_does_not_hide_requests_sent_since() -> None:
    table = table_of("a")
    slot = table.slots["a"]
    table.reported("a", busy(0, 0, at_s=0.1), now_s=0.1)
    table.sent(slot, FOUR_THREADS, now_s=1.0)

    table.reported("a", busy(0, 0, at_s=0.9), now_s=1.5)

    assert table.requests[slot] == 1
    assert table.threads[slot] == 4


def test_a_request_on_its_way_when_the_report_was_taken_is_counted_once() -> None:
    table = table_of("a")
    slot = table.slots["a"]
    table.sent(slot, FOUR_THREADS, now_s=0.99)

    table.reported("a", busy(0, 0, at_s=1.0), now_s=1.1)
    assert (table.requests[slot], table.threads[slot]) == (1, 4)

    table.reported("a", busy(1, 2, at_s=1.2), now_s=1.3)
    assert (table.requests[slot], table.threads[slot]) == (1, 2)


def test_requests_missing_in_the_report_count_with_their_mean_threads() -> None:
    table = table_of("a")
    slot = table.slots["a"]
    table.sent(slot, FOUR_THREADS, now_s=0.98)
    table.sent(slot, replace(FOUR_THREADS, threads=2.0), now_s=0.99)

    table.reported("a", busy(1, 5, at_s=1.0), now_s=1.1)

    assert (table.requests[slot], table.threads[slot]) == (2, 5 + 3)


def test_only_requests_sent_after_a_late_report_are_added_to_it() -> None:
    table = table_of("a")
    slot = table.slots["a"]
    table.reported("a", busy(3, 3, at_s=0.5), now_s=1.0)
    table.sent(slot, FOUR_THREADS, now_s=1.2)
    table.sent(slot, FOUR_THREADS, now_s=1.8)

    # The report includes the first of the two, and four requests of other routers.
    table.reported("a", busy(5, 10, at_s=1.5), now_s=2.0)

    assert (table.requests[slot], table.threads[slot]) == (6, 14)


def test_used_blocks_are_the_report_plus_requests_sent_since() -> None:
    table = table_of("a")
    slot = table.slots["a"]
    assert table.used_blocks[slot] == 0
    table.sent(slot, FOUR_THREADS, now_s=0.5)
    # Half of 480 tokens, in blocks of 16 until a report gives their size.
    assert table.used_blocks[slot] == 15

    load = replace(busy(1, 4, at_s=1.0), free_blocks=9_900, block_size=32)
    table.reported("a", load, now_s=1.0)
    assert table.used_blocks[slot] == 100
    table.sent(slot, FOUR_THREADS, now_s=1.5)
    assert table.used_blocks[slot] == 100 + 15
    table.ended(slot, "a", FOUR_THREADS, now_s=2.0)
    assert table.used_blocks[slot] == 100
    assert table.sent_tokens[slot] == 960

    table.reported("a", replace(load, free_blocks=10_000, taken_at_s=3.0), now_s=3.0)
    assert table.used_blocks[slot] == 7.5


@pytest.mark.parametrize("rate", [{"step_s": 0.05}, {"tokens_per_s": 500.0}])
def test_a_report_without_a_rate_or_a_step_time_measures_nothing(rate: dict[str, Any]) -> None:
    table = table_of("a")
    before = (table.step_time.base_s, table.step_time.per_thread_s)

    table.reported("a", replace(busy(1, 4), **rate), now_s=0.1)

    assert (table.step_time.base_s, table.step_time.per_thread_s) == before


def test_requests_ended_since_the_report_are_subtracted() -> None:
    table = table_of("a")
    slot = table.slots["a"]
    table.sent(slot, FOUR_THREADS, now_s=0.0)
    table.reported("a", busy(3, 12, at_s=1.0), now_s=1.1)

    table.ended(slot, "a", FOUR_THREADS, now_s=1.2)

    assert (table.requests[slot], table.threads[slot]) == (2, 8)


def test_requests_of_other_routers_appear_in_the_report() -> None:
    table = table_of("a")
    table.reported("a", busy(7, 30), now_s=0.1)

    assert table.requests[table.slots["a"]] == 7
    assert table.room[table.slots["a"]] == 3


def test_waiting_forks_count_as_threads() -> None:
    table = table_of("a")
    table.reported("a", replace(busy(1, 4), waiting_forks=5), now_s=0.1)

    assert table.threads[table.slots["a"]] == 9


def test_a_report_that_is_not_newer_is_ignored() -> None:
    table = table_of("a")
    table.reported("a", busy(2, 2, at_s=5.0), now_s=5.1)
    table.reported("a", busy(9, 9, at_s=4.0), now_s=5.2)
    table.reported("a", busy(9, 9, at_s=5.0), now_s=5.3)

    assert table.requests[table.slots["a"]] == 2


@pytest.mark.parametrize("ahead_s", [-1000.0, 0.5, 1000.0])
def test_the_clock_of_a_replica_may_be_off(ahead_s: float) -> None:
    table = table_of("a")
    slot = table.slots["a"]
    table.reported("a", busy(0, 0, at_s=1.0 + ahead_s), now_s=1.0)
    table.sent(slot, FOUR_THREADS, now_s=1.5)
    table.reported("a", busy(0, 0, at_s=1.4 + ahead_s), now_s=1.6)
    assert table.requests[slot] == 1

    table.reported("a", busy(1, 1, at_s=2.0 + ahead_s), now_s=2.0)

    assert (table.requests[slot], table.threads[slot]) == (1, 1)


def test_a_removed_replica_frees_its_slot_and_its_counts() -> None:
    table = table_of("a", "b")
    slot = table.slots["a"]
    table.sent(slot, FOUR_THREADS, now_s=0.0)

    table.replicas_changed({"b": 10})
    assert table.room[slot] == 0

    table.replicas_changed({"b": 10, "c": 5})
    table.ended(slot, "a", FOUR_THREADS, now_s=1.0)

    assert table.slots["c"] == slot
    assert (table.requests[slot], table.threads[slot], table.room[slot]) == (0, 0, 5)


def test_the_table_grows_with_the_replicas() -> None:
    names = [str(index) for index in range(100)]
    table = table_of(*names)

    assert sorted(table.slots.values()) == list(range(100))
    assert (table.room > 0).sum() == 100


def test_memory_is_bounded_without_reports() -> None:
    table = table_of("a", cap=100_000)
    slot = table.slots["a"]
    table.reported("a", IDLE, now_s=0.0)
    for index in range(10_000):
        table.sent(slot, FOUR_THREADS, now_s=1.0 + index)

    row = table.rows[slot]
    assert row is not None
    assert len(row.since) < 5000
    assert table.requests[slot] == 10_000

    table.reported("a", busy(10_000, 5, at_s=20_000.0), now_s=20_000.0)
    assert table.threads[slot] == 10_000  # At least one thread per request.


def test_merged_changes_stay_separate_from_later_ones() -> None:
    table = table_of("a", cap=100_000)
    slot = table.slots["a"]
    table.reported("a", IDLE, now_s=0.0)
    for index in range(5000):
        table.sent(slot, FOUR_THREADS, now_s=1.0 + index)

    # 4096 changes are kept; the oldest one stands for the first 905 requests.
    table.reported("a", busy(905, 905, at_s=905.5), now_s=6000.0)

    assert table.requests[slot] == 5000
    assert table.threads[slot] == 905 + 4 * 4095


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["sent", "ended", "reported"]),
            st.sampled_from(["a", "b"]),
            st.floats(0.0, 2.0),
        ),
        max_size=60,
    )
)
def test_estimates_return_to_zero_when_all_requests_have_ended(
    events: list[tuple[str, str, float]],
) -> None:
    table = table_of("a", "b")
    running: dict[str, int] = {"a": 0, "b": 0}
    now_s = 0.0
    for kind, name, passed_s in events:
        now_s += passed_s
        slot = table.slots[name]
        if kind == "sent":
            table.sent(slot, FOUR_THREADS, now_s)
            running[name] += 1
        elif kind == "ended" and running[name]:
            table.ended(slot, name, FOUR_THREADS, now_s)
            running[name] -= 1
        elif kind == "reported":
            table.reported(name, busy(running[name], 3 * running[name], at_s=now_s), now_s)
        assert table.requests[slot] == running[name]
    for name, count in running.items():
        for _ in range(count):
            table.ended(table.slots[name], name, FOUR_THREADS, now_s)
        now_s += 1.0
        table.reported(name, busy(0, 0, at_s=now_s), now_s)

    for slot in table.slots.values():
        assert (table.requests[slot], table.threads[slot], table.used_blocks[slot]) == (0, 0, 0)
