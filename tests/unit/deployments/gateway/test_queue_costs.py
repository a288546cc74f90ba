"""What nobody counted, whom a newcomer is compared with, and waits for a key's own bound."""

import asyncio

import pytest

from apar_core.errors import CapacityError
from deployments.gateway.fair_queue import Account
from deployments.wire.errors import RateLimitError
from tests.unit.deployments.gateway.test_fair_queue import enter, queue_of, settled


async def test_a_request_of_unknown_cost_keeps_what_it_was_charged_in_advance() -> None:
    queue, key = queue_of(capacity=2), Account("a", mean_tokens=100)
    silent, told = [task.result() for task in await enter(queue, key, key)]
    told.charge(130)

    for ticket in (silent, told):
        ticket.leave(cost_is_known=False)

    assert (key.virtual_time, key.mean_tokens) == (230, 100)
    assert queue.state.running == 0


async def test_without_a_mean_of_its_own_it_costs_what_others_do() -> None:
    queue, known, new = queue_of(capacity=2), Account("known"), Account("new", weight=2.0)
    first, second = [task.result() for task in await enter(queue, known, new)]
    first.charge(80)
    second.charge(20)
    first.leave()
    second.leave(cost_is_known=False)

    # It came when the other key had been charged one token in advance.
    assert (new.virtual_time, new.mean_tokens) == (1 + 80 / 2, 0)


async def test_the_mean_of_all_keys_follows_every_answer() -> None:
    queue, known, new = queue_of(capacity=3), Account("known"), Account("new")
    for num_tokens in (80, 180):
        (task,) = await enter(queue, known)
        task.result().charge(num_tokens)
        task.result().leave()
    virtual_time = known.virtual_time

    (task,) = await enter(queue, new)
    task.result().leave(cost_is_known=False)

    assert known.mean_tokens == pytest.approx(90)
    assert new.virtual_time == pytest.approx(virtual_time + 90)


async def test_a_request_that_generated_more_than_the_guess_pays_what_it_generated() -> None:
    queue, key = queue_of(), Account("a")
    (task,) = await enter(queue, key)
    task.result().charge(20)

    # Nothing is known of any answer, so one token is the guess.
    task.result().leave(cost_is_known=False)

    assert key.virtual_time == 20


async def test_the_first_answer_of_unknown_cost_costs_one_token() -> None:
    queue, key = queue_of(), Account("a")
    (task,) = await enter(queue, key)

    task.result().leave(cost_is_known=False)

    assert key.virtual_time == 1


async def test_keys_that_never_tell_their_cost_take_turns() -> None:
    queue, first, second = queue_of(), Account("a"), Account("b")
    waiting = {"a": await enter(queue, *[first] * 9), "b": await enter(queue, *[second] * 9)}
    turns = ""
    for _ in range(8):
        (name,) = [name for name, tasks in waiting.items() if tasks[0].done()]
        turns += name
        waiting[name].pop(0).result().leave(cost_is_known=False)
        await settled()

    assert abs(turns.count("b") - 4) <= 1


async def test_a_request_that_generates_nothing_costs_a_step_and_teaches_nothing() -> None:
    queue, key = queue_of(capacity=9), Account("a", mean_tokens=100, weight=2.0)

    for place in await enter(queue, *[key] * 9):
        place.result().leave()

    assert (key.virtual_time, key.mean_tokens) == (9 / 2, 100)


async def test_a_refund_has_the_weight_of_the_charge() -> None:
    queue, key = queue_of(capacity=3), Account("a", mean_tokens=100, weight=0.5)
    unused, short, long = [task.result() for task in await enter(queue, key, key, key)]

    key.weight = 50.0
    short.charge(40)
    long.charge(130)
    unused.give_up()
    short.leave()
    long.leave()

    assert key.virtual_time == pytest.approx((40 + 130) / 0.5)


async def test_a_new_key_is_charged_in_advance_what_others_cost() -> None:
    queue, known, new = queue_of(capacity=2), Account("known"), Account("new")
    (first,) = await enter(queue, known)
    first.result().charge(80)
    first.result().leave()

    await enter(queue, new)

    assert new.virtual_time == 80 + 80


async def test_tiny_requests_make_no_burst_cheap() -> None:
    queue, key = queue_of(), Account("a", mean_tokens=1000)

    for num_tokens in [1, 0] * 100:
        [place] = await enter(queue, key)
        place.result().charge(num_tokens)
        place.result().leave()

    # 100 tokens are a tenth of an answer, and change the mean by no more than a tenth of that.
    assert key.mean_tokens == pytest.approx(990, abs=1)


async def test_a_place_that_was_not_used_costs_nothing_and_teaches_nothing() -> None:
    queue, key = queue_of(), Account("a", weight=2.0, mean_tokens=100)
    running, leaving = await enter(queue, key, key)
    assert key.virtual_time == 50

    running.result().give_up()
    leaving.cancel()
    await settled()

    assert (key.virtual_time, key.mean_tokens) == (0, 100)
    assert queue.state.running == 0


async def test_a_newcomer_is_not_set_back_to_a_key_at_its_own_bound() -> None:
    queue = queue_of(capacity=2)
    held, busy, new = Account("held", max_running=1), Account("busy"), Account("new")
    await enter(queue, held, busy, held, busy)
    busy.virtual_time = 10_000

    await enter(queue, new)

    assert new.virtual_time == 10_000


async def test_a_newcomer_is_set_back_to_the_waiting_key_whose_turn_is_next() -> None:
    queue = queue_of()
    running, next_key, later, new = [Account(name) for name in ("running", "next", "later", "new")]
    await enter(queue, running, next_key, later)
    running.virtual_time, next_key.virtual_time, later.virtual_time = 20_000, 1_000, 5_000

    await enter(queue, new)

    assert new.virtual_time == 1_000


async def test_a_key_with_a_running_request_keeps_the_credit_of_the_longest_answer() -> None:
    queue = queue_of(capacity=2)
    light, heavy = Account("light", mean_tokens=300), Account("heavy", weight=3, mean_tokens=600)
    returning = Account("returning")
    await enter(queue, returning, light, light, heavy)
    light.virtual_time = heavy.virtual_time = 10_000

    await enter(queue, returning)

    # 300 tokens of the light key, 600 / 3 of the heavy one.
    assert returning.virtual_time == 9_700


async def test_a_newcomer_is_compared_with_its_own_class_only() -> None:
    queue = queue_of()
    ordinary, urgent, new = Account("ordinary"), Account("urgent", priority=-1), Account("new")
    await enter(queue, ordinary, urgent)
    urgent.virtual_time = 10_000

    await enter(queue, new)

    assert new.virtual_time == ordinary.virtual_time < 10_000


@pytest.mark.parametrize("raised", [True, False])
async def test_a_key_that_comes_off_its_bound_has_saved_up_one_answer_at_most(raised: bool) -> None:
    queue = queue_of(capacity=2)
    held, busy = Account("held", max_running=1), Account("busy", mean_tokens=300)
    running, *_ = await enter(queue, held, busy, held, busy, busy)
    busy.virtual_time = 10_000

    if raised:
        held.max_running = 2
        await enter(queue, held)
    else:
        running.result().leave()

    # The end of its running request also gives it a place, charged one token in advance.
    assert held.virtual_time == 9_700 + (0 if raised else 1)


async def test_a_key_off_its_bound_is_compared_with_newcomers_again() -> None:
    queue = queue_of(capacity=2)
    held, busy = Account("held", max_running=1), Account("busy", mean_tokens=300)
    await enter(queue, held, busy, held, busy, busy)
    busy.virtual_time = 10_000
    held.max_running = 2
    await enter(queue, held)
    new = Account("new")

    await enter(queue, new)

    assert new.virtual_time == held.virtual_time == 9_700


async def test_a_key_that_reaches_its_bound_from_the_queue_saves_nothing_up_either() -> None:
    queue = queue_of()
    held, busy = Account("held", max_running=1), Account("busy", mean_tokens=300)
    await enter(queue, busy, held, held, busy)
    queue.resize(2)  # The first request of the held key leaves the queue.
    await settled()
    assert held.num_running == 1
    busy.virtual_time = 10_000

    held.max_running = 2
    queue.resize(2)

    assert held.virtual_time == 9_700


async def test_who_waits_for_its_own_bound_in_vain_is_told_which() -> None:
    queue = queue_of(capacity=5, max_waiting=2, max_wait_s=0.01)
    held = Account("alice", max_running=1)
    (running,) = await enter(queue, held)

    late = await asyncio.gather(queue.enter(held), return_exceptions=True)
    tasks = await enter(queue, held, held)
    with pytest.raises(RateLimitError, match=r"alice.*`max_threads` of 1.*2 requests wait") as full:
        await queue.enter(held)

    assert isinstance(late[0], RateLimitError)
    assert (late[0].kind, full.value.kind, full.value.retry_after_s) == ("threads", "threads", 1.0)
    queue.resize(1)
    other = await enter(queue, Account("other"))  # Drops the newest of alice's.
    assert isinstance(tasks[1].exception(), RateLimitError)
    await asyncio.gather(*other, *tasks, return_exceptions=True)
    assert isinstance(other[0].exception(), CapacityError)
    running.result().leave()


async def test_only_what_more_replicas_could_serve_counts_as_startable() -> None:
    queue = queue_of(capacity=1)
    bounded, free = Account("bounded", max_running=2), Account("free")

    await enter(queue, *[bounded] * 5, *[free] * 3)

    assert queue.state.waiting == {"bounded": 4, "free": 3}
    assert queue.state.num_startable == 1 + 3
    bounded.max_running = 1
    assert queue.state.num_startable == 3


async def test_a_full_queue_may_drop_a_request_whose_client_is_just_leaving() -> None:
    queue, flood, other = queue_of(max_waiting=2), Account("flood"), Account("other")
    tasks = await enter(queue, *[flood] * 3)

    newcomer = asyncio.create_task(queue.enter(other))
    tasks[2].cancel()  # Told of it only after the newcomer has come in.
    await settled()

    assert tasks[2].cancelled()
    assert not newcomer.done()
    assert queue.state.waiting == {"flood": 1, "other": 1}
