"""Order, limits, fairness and charges of a model's queue."""

import asyncio
from collections.abc import Callable

import pytest

from apar_core.errors import CapacityError
from deployments.gateway.accounts import Account, Size
from deployments.gateway.fair_queue import FairQueue, Ticket
from deployments.wire.errors import RateLimitError
from tests.fakes.clock import Clock

pytestmark = pytest.mark.usefixtures("simulated_time")

Enter = asyncio.Task[Ticket]


def queue_of(
    capacity: int = 1,
    max_waiting: int = 100,
    max_wait_s: float = 60.0,
    clock: Callable[[], float] | None = None,
) -> FairQueue:
    return FairQueue(
        capacity=capacity,
        max_waiting=max_waiting,
        max_wait_s=max_wait_s,
        clock=clock or Clock(),
    )


def account_of(
    queue: FairQueue,
    name: str,
    priority: int = 0,
    *,
    weight: float = 1.0,
    max_running: int | None = None,
    **fields: float,
) -> Account:
    account = queue.account_of(name, priority)
    account.key.weight, account.key.max_running = weight, max_running
    for field, value in fields.items():
        setattr(account, field, value)
    return account


async def enter(queue: FairQueue, *accounts: Account) -> list[Enter]:
    """Enter one request of each account, each settled before the next."""
    tasks = []
    for account in accounts:
        tasks.append(asyncio.create_task(queue.enter(account)))
        await settled()
    return tasks


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def served(queue: FairQueue, tasks: dict[str, Enter], num_tokens: int = 0) -> str:
    """End the one running request after some tokens; returns its name."""
    (name,) = [name for name, task in tasks.items() if task.done()]
    ticket = tasks.pop(name).result()
    ticket.charge(num_tokens)
    ticket.leave()
    await settled()
    return name


async def test_a_request_runs_at_once_where_there_is_room() -> None:
    queue = queue_of(capacity=2)

    tasks = await enter(queue, *[account_of(queue, "a")] * 3)

    assert [task.done() for task in tasks] == [True, True, False]
    assert (queue.state.running, queue.state.waiting) == (2, {"a": 1})
    tasks[0].result().leave()
    await settled()
    assert tasks[2].done()


async def test_requests_of_one_key_are_served_in_order_of_arrival() -> None:
    queue = queue_of()
    key = account_of(queue, "a")
    tasks = dict(zip("1234", await enter(queue, key, key, key, key), strict=True))

    order = [await served(queue, tasks, num_tokens=5) for _ in range(4)]

    assert order == ["1", "2", "3", "4"]


async def test_the_key_that_forks_more_gets_fewer_turns() -> None:
    queue = queue_of()
    forking, plain = account_of(queue, "forking"), account_of(queue, "plain")
    keys = {"forking": forking, "plain": plain}
    waiting: dict[str, Enter] = {}
    for name, key in keys.items():
        (waiting[f"{name}0"],) = await enter(queue, key)
    turns = []
    for number in range(1, 101):
        name = next(name for name, task in waiting.items() if task.done())
        key_name = name.rstrip("0123456789")
        turns.append(key_name)
        # The next request of the key waits before this one ends: both are always backlogged.
        (waiting[f"{key_name}{number}"],) = await enter(queue, keys[key_name])
        await served(queue, waiting, num_tokens=300 if key_name == "forking" else 100)

    # Equal tokens: a turn of the forking key costs three of the plain one's.
    assert abs(turns.count("plain") - 75) <= 2


async def test_a_key_of_twice_the_weight_gets_twice_the_tokens() -> None:
    queue = queue_of()
    heavy, light = account_of(queue, "heavy", weight=2.0), account_of(queue, "light")
    tasks = {f"{number}heavy": t for number, t in enumerate(await enter(queue, *[heavy] * 40))}
    tasks |= {f"{number}light": t for number, t in enumerate(await enter(queue, *[light] * 40))}

    turns = [(await served(queue, tasks, num_tokens=10)).lstrip("0123456789") for _ in range(30)]

    assert abs(turns.count("heavy") - 20) <= 1


async def test_a_better_priority_class_goes_first() -> None:
    queue = queue_of()
    urgent, ordinary = (
        account_of(queue, "urgent", priority=-1, virtual_time=1e9),
        account_of(queue, "ordinary"),
    )
    accounts = [ordinary, ordinary, urgent, urgent]
    tasks = dict(zip("abcd", await enter(queue, *accounts), strict=True))

    assert [await served(queue, tasks) for _ in range(4)] == ["a", "c", "d", "b"]


async def test_an_idle_key_saves_up_no_credit() -> None:
    queue = queue_of()
    busy, idle = account_of(queue, "busy"), account_of(queue, "idle")
    tasks = {f"busy{n}": task for n, task in enumerate(await enter(queue, *[busy] * 20))}
    for _ in range(5):
        await served(queue, tasks, num_tokens=1000)
    tasks |= {f"idle{n}": task for n, task in enumerate(await enter(queue, *[idle] * 20))}

    order = [(await served(queue, tasks, num_tokens=1000)).rstrip("0123456789") for _ in range(10)]

    assert order.count("idle") in (4, 5, 6)


async def test_a_new_key_starts_at_the_virtual_time_of_an_empty_queue() -> None:
    queue = queue_of(capacity=2)
    first, second = account_of(queue, "first"), account_of(queue, "second")
    _, running = await enter(queue, account_of(queue, "other"), first)
    running.result().charge(5000)
    running.result().leave()

    (place,) = await enter(queue, second)
    place.result().give_up()

    # With the token that the running key had been charged in advance.
    assert second.virtual_time == 5001


async def test_debts_are_forgotten_when_a_class_has_no_requests() -> None:
    queue = queue_of(capacity=2)
    for task, num_tokens in zip(
        await enter(queue, account_of(queue, "greedy"), account_of(queue, "modest")),
        (5000, 10),
        strict=True,
    ):
        task.result().charge(num_tokens)
        task.result().leave()
    assert not list(queue.keys)

    queue.resize(1)
    names = ("running", "greedy", "modest")
    running, *waiting = await enter(queue, *[account_of(queue, name) for name in names])
    running.result().leave()
    await settled()

    assert [task.done() for task in waiting] == [True, False]


async def test_tokens_of_running_requests_count_before_they_end() -> None:
    queue = queue_of(capacity=2)
    greedy, modest = account_of(queue, "greedy"), account_of(queue, "modest")
    running = await enter(queue, greedy, modest)
    waiting = await enter(queue, greedy, modest)

    running[0].result().charge(50)
    running[1].result().leave()
    await settled()

    assert [task.done() for task in waiting] == [False, True]


async def test_an_expected_answer_is_charged_in_advance_and_corrected_at_its_end() -> None:
    queue = queue_of(capacity=3)
    key = account_of(queue, "a", mean_tokens=100)
    tickets = [task.result() for task in await enter(queue, key, key)]
    assert key.virtual_time == 200

    tickets[0].charge(60)
    tickets[0].charge(60)
    tickets[1].charge(30)
    assert key.virtual_time == 220
    for ticket in tickets:
        ticket.leave()

    assert key.virtual_time == 150
    # The answer of 30 tokens counts for less than that of 120.
    assert key.mean_tokens == pytest.approx(102 - 0.1 * (30 / 102) * 72)


async def test_a_full_queue_refuses_the_key_that_fills_it_with_a_retry_time() -> None:
    clock = Clock()
    queue = queue_of(max_waiting=2, clock=clock)
    key = account_of(queue, "a")
    tasks = await enter(queue, *[key] * 3)
    for _ in range(2):  # One request ends every four seconds.
        clock.now_s += 4.0
        tasks.pop(0).result().leave()
        tasks += await enter(queue, key)

    with pytest.raises(CapacityError, match="2 requests wait") as refused:
        await queue.enter(key)

    assert refused.value.retry_after_s == 12.0


async def test_a_full_queue_drops_the_newest_request_of_the_key_that_fills_it() -> None:
    queue = queue_of(max_waiting=3)
    flood, other = account_of(queue, "flood"), account_of(queue, "other")
    tasks = await enter(queue, *[flood] * 4, other)

    assert [task.done() for task in tasks] == [True, False, False, True, False]
    with pytest.raises(CapacityError, match="hold less of the queue"):
        tasks[3].result()
    with pytest.raises(CapacityError):  # Two and one: to drop another would change nothing.
        await queue.enter(other)


async def test_a_full_queue_drops_from_the_key_with_most_requests_per_weight() -> None:
    queue = queue_of(max_waiting=7)
    newcomer = account_of(queue, "newcomer")
    few, most, heavy = (
        account_of(queue, "few"),
        account_of(queue, "most"),
        account_of(queue, "heavy", weight=4.0),
    )
    await enter(queue, *[few] * 2, *[most] * 3, *[heavy] * 3)

    await enter(queue, newcomer)

    assert queue.state.waiting == {"few": 1, "most": 2, "heavy": 3, "newcomer": 1}


async def test_a_heavy_key_displaces_a_light_one_that_fills_the_queue() -> None:
    queue = queue_of(max_waiting=4)
    light, heavy = account_of(queue, "light"), account_of(queue, "heavy", weight=4.0)
    await enter(queue, *[light] * 5)

    await enter(queue, *[heavy] * 3)

    # One more of the heavy key's requests counts 4 / 4, as much as the light key's last one.
    assert queue.state.waiting == {"light": 1, "heavy": 3}
    with pytest.raises(CapacityError):
        await queue.enter(heavy)


async def test_a_full_queue_drops_a_worse_class_first() -> None:
    queue = queue_of(max_waiting=1)
    tasks = await enter(
        queue,
        account_of(queue, "a"),
        account_of(queue, "low", priority=1),
        account_of(queue, "high"),
    )

    with pytest.raises(CapacityError):
        tasks[1].result()
    assert queue.state.waiting == {"high": 1}


async def test_a_request_that_waits_too_long_is_refused() -> None:
    queue = queue_of(max_wait_s=0.01)
    (running,) = await enter(queue, account_of(queue, "a"))

    with pytest.raises(CapacityError, match=r"within 0\.01 s"):
        await queue.enter(account_of(queue, "a"))

    assert queue.state.waiting == {}
    running.result().leave()
    assert queue.state.running == 0


async def test_a_key_at_its_cap_waits_and_lets_others_pass() -> None:
    queue = queue_of(capacity=3)
    bounded, other = account_of(queue, "b", max_running=1), account_of(queue, "o")

    tasks = await enter(queue, bounded, bounded, other)

    assert [task.done() for task in tasks] == [True, False, True]
    tasks[0].result().leave()
    await settled()
    assert tasks[1].done()


async def test_a_raised_cap_admits_waiting_requests() -> None:
    queue = queue_of(capacity=4)
    bounded = account_of(queue, "b", max_running=1)
    tasks = await enter(queue, bounded, bounded, bounded)

    bounded.key.max_running = 3
    tasks += await enter(queue, bounded)

    assert [task.done() for task in tasks] == [True, True, True, False]


async def test_a_client_that_leaves_gives_up_its_turn() -> None:
    queue = queue_of()
    key = account_of(queue, "a")
    running, leaving, last = await enter(queue, key, key, key)

    leaving.cancel()
    await settled()
    assert queue.state.waiting == {"a": 1}
    running.result().leave()
    await settled()

    assert last.done()


async def test_a_client_may_leave_while_it_is_being_refused() -> None:
    queue = queue_of(max_waiting=2)
    flood = account_of(queue, "flood")
    *_, dropped = await enter(queue, flood, flood, flood)

    newcomer = asyncio.create_task(queue.enter(account_of(queue, "other")))
    await asyncio.sleep(0)  # The newcomer has dropped flood's newest request.
    dropped.cancel()
    await settled()

    assert dropped.cancelled()
    assert not newcomer.done()
    assert queue.state.waiting == {"flood": 1, "other": 1}


async def test_a_client_that_leaves_when_its_turn_comes_passes_it_on() -> None:
    queue = queue_of()
    key = account_of(queue, "a")
    running, leaving, last = await enter(queue, key, key, key)

    running.result().leave()
    leaving.cancel()
    await settled()

    assert leaving.cancelled()
    assert last.done()
    last.result().leave()
    assert queue.state.running == 0


async def test_more_capacity_admits_requests_and_less_stops_none() -> None:
    queue = queue_of(capacity=1)
    key = account_of(queue, "a")
    tasks = await enter(queue, *[key] * 4)

    queue.resize(3)
    await settled()
    assert [task.done() for task in tasks] == [True, True, True, False]

    queue.configure(capacity=1, max_waiting=0, max_wait_s=1.0)
    tasks[0].result().leave()
    await settled()
    assert not tasks[3].done()
    with pytest.raises(CapacityError):
        await queue.enter(key)


async def test_new_limits_apply_to_the_next_requests() -> None:
    queue = queue_of(max_waiting=0)
    key = account_of(queue, "a")
    await enter(queue, key)

    queue.configure(capacity=1, max_waiting=1, max_wait_s=0.01)

    with pytest.raises(CapacityError, match=r"within 0\.01 s"):
        await queue.enter(key)


async def test_a_ticket_tells_how_long_its_request_waited() -> None:
    clock = Clock()
    clock.now_s = 100.0
    queue = queue_of(clock=clock)
    key = account_of(queue, "a")
    first, second = await enter(queue, key, key)

    clock.now_s = 102.5
    first.result().leave()
    await settled()

    assert (first.result().queued_s, second.result().queued_s) == (0.0, 2.5)


async def test_the_state_counts_waiting_requests_by_key() -> None:
    queue = queue_of()
    await enter(
        queue, account_of(queue, "a"), account_of(queue, "b"), *[account_of(queue, "c")] * 2
    )

    state = queue.state

    assert state.running == 1
    assert state.waiting == {"b": 1, "c": 2}


async def test_a_request_of_unknown_cost_keeps_its_advance_charge() -> None:
    queue = queue_of(capacity=2)
    key = account_of(queue, "a", mean_tokens=100)
    silent, told = [task.result() for task in await enter(queue, key, key)]
    told.charge(130)

    for ticket in (silent, told):
        ticket.leave(cost_is_known=False)

    assert (key.virtual_time, key.mean_tokens) == (230, 100)
    assert queue.state.running == 0


async def test_a_key_without_a_mean_pays_the_mean_of_all_keys_for_unknown_cost() -> None:
    queue = queue_of(capacity=2)
    known, new = account_of(queue, "known"), account_of(queue, "new", weight=2.0)
    first, second = [task.result() for task in await enter(queue, known, new)]
    first.charge(80)
    second.charge(20)
    first.leave()
    second.leave(cost_is_known=False)

    # It came when the other key had been charged one token in advance.
    assert (new.virtual_time, new.mean_tokens) == (1 + 80 / 2, 0)


async def test_the_mean_of_all_keys_follows_every_answer() -> None:
    queue = queue_of(capacity=3)
    known, new = account_of(queue, "known"), account_of(queue, "new")
    await enter(queue, account_of(queue, "other"))
    for num_tokens in (80, 180):
        (task,) = await enter(queue, known)
        task.result().charge(num_tokens)
        task.result().leave()
    virtual_time = known.virtual_time

    (task,) = await enter(queue, new)
    task.result().leave(cost_is_known=False)

    assert known.mean_tokens == pytest.approx(90)
    assert new.virtual_time == pytest.approx(virtual_time + 90)


async def test_a_request_of_unknown_cost_pays_at_least_its_known_tokens() -> None:
    queue = queue_of()
    key = account_of(queue, "a")
    (task,) = await enter(queue, key)
    task.result().charge(20)

    # Nothing is known of any answer, so one token is the guess.
    task.result().leave(cost_is_known=False)

    assert key.virtual_time == 20


async def test_the_first_answer_of_unknown_cost_costs_one_token() -> None:
    queue = queue_of()
    key = account_of(queue, "a")
    (task,) = await enter(queue, key)

    task.result().leave(cost_is_known=False)

    assert key.virtual_time == 1


async def test_keys_whose_cost_is_never_known_take_turns() -> None:
    queue = queue_of()
    first, second = account_of(queue, "a"), account_of(queue, "b")
    waiting = {"a": await enter(queue, *[first] * 9), "b": await enter(queue, *[second] * 9)}
    turns = ""
    for _ in range(8):
        (name,) = [name for name, tasks in waiting.items() if tasks[0].done()]
        turns += name
        waiting[name].pop(0).result().leave(cost_is_known=False)
        await settled()

    assert abs(turns.count("b") - 4) <= 1


async def test_a_request_without_output_costs_one_step_and_leaves_the_mean() -> None:
    queue = queue_of(capacity=9)
    key = account_of(queue, "a", mean_tokens=100, weight=2.0)

    for place in await enter(queue, *[key] * 9):
        place.result().leave()

    assert (key.virtual_time, key.mean_tokens) == (9 / 2, 100)


async def test_a_refund_uses_the_weight_of_the_charge() -> None:
    queue = queue_of(capacity=3)
    key = account_of(queue, "a", mean_tokens=100, weight=0.5)
    unused, short, long = [task.result() for task in await enter(queue, key, key, key)]

    key.key.weight = 50.0
    short.charge(40)
    long.charge(130)
    unused.give_up()
    short.leave()
    long.leave()

    assert key.virtual_time == pytest.approx((40 + 130) / 0.5)


async def test_a_new_key_is_charged_the_mean_of_all_keys_in_advance() -> None:
    queue = queue_of(capacity=3)
    known, new = account_of(queue, "known"), account_of(queue, "new")
    _, first = await enter(queue, account_of(queue, "other"), known)
    first.result().charge(80)
    first.result().leave()

    await enter(queue, new)

    # One token is that of the first request, when no answer was known.
    assert new.virtual_time == 1 + 80 + 80


async def test_tiny_requests_do_not_make_a_burst_cheap() -> None:
    queue = queue_of(capacity=2)
    key = account_of(queue, "a", mean_tokens=1000)
    await enter(queue, account_of(queue, "other"))

    for num_tokens in [1, 0] * 100:
        [place] = await enter(queue, key)
        place.result().charge(num_tokens)
        place.result().leave()

    # 100 tokens are a tenth of an answer, and change the mean by no more than a tenth of that.
    assert key.mean_tokens == pytest.approx(990, abs=1)


async def test_an_unused_place_costs_nothing_and_leaves_the_mean() -> None:
    queue = queue_of()
    key = account_of(queue, "a", weight=2.0, mean_tokens=100)
    running, leaving = await enter(queue, key, key)
    assert key.virtual_time == 50

    running.result().give_up()
    leaving.cancel()
    await settled()

    assert (key.virtual_time, key.mean_tokens) == (0, 100)
    assert queue.state.running == 0


async def test_a_new_key_does_not_start_at_the_level_of_a_key_at_its_cap() -> None:
    queue = queue_of(capacity=2)
    held, busy, new = (
        account_of(queue, "held", max_running=1),
        account_of(queue, "busy"),
        account_of(queue, "new"),
    )
    await enter(queue, held, busy, held, busy)
    busy.virtual_time = 10_000

    await enter(queue, new)

    assert new.virtual_time == 10_000


async def test_a_new_key_starts_at_the_level_of_the_waiting_key_that_is_next() -> None:
    queue = queue_of()
    running, next_key, later, new = [
        account_of(queue, name) for name in ("running", "next", "later", "new")
    ]
    await enter(queue, running, next_key, later)
    running.virtual_time, next_key.virtual_time, later.virtual_time = 20_000, 1_000, 5_000

    await enter(queue, new)

    assert new.virtual_time == 1_000


async def test_a_key_with_a_running_request_keeps_the_credit_of_the_longest_answer() -> None:
    queue = queue_of(capacity=2)
    light, heavy = (
        account_of(queue, "light", mean_tokens=300),
        account_of(queue, "heavy", weight=3, mean_tokens=600),
    )
    returning = account_of(queue, "returning")
    await enter(queue, returning, light, light, heavy)
    light.virtual_time = heavy.virtual_time = 10_000

    await enter(queue, returning)

    # 300 tokens of the light key, 600 / 3 of the heavy one.
    assert returning.virtual_time == 9_700


async def test_a_new_key_starts_at_the_level_of_its_own_class() -> None:
    queue = queue_of()
    ordinary, urgent, new = (
        account_of(queue, "ordinary"),
        account_of(queue, "urgent", priority=-1),
        account_of(queue, "new"),
    )
    await enter(queue, ordinary, urgent)
    urgent.virtual_time = 10_000

    await enter(queue, new)

    assert new.virtual_time == ordinary.virtual_time < 10_000


@pytest.mark.parametrize("raised", [True, False])
async def test_a_key_that_leaves_its_cap_keeps_credit_for_one_answer(raised: bool) -> None:
    queue = queue_of(capacity=2)
    held, busy = (
        account_of(queue, "held", max_running=1),
        account_of(queue, "busy", mean_tokens=300),
    )
    running, *_ = await enter(queue, held, busy, held, busy, busy)
    busy.virtual_time = 10_000

    if raised:
        held.key.max_running = 2
        await enter(queue, held)
    else:
        running.result().leave()

    # The end of its running request also gives it a place, charged one token in advance.
    assert held.virtual_time == 9_700 + (0 if raised else 1)


async def test_a_key_that_has_left_its_cap_sets_the_level_of_new_keys_again() -> None:
    queue = queue_of(capacity=2)
    held, busy = (
        account_of(queue, "held", max_running=1),
        account_of(queue, "busy", mean_tokens=300),
    )
    await enter(queue, held, busy, held, busy, busy)
    busy.virtual_time = 10_000
    held.key.max_running = 2
    await enter(queue, held)
    new = account_of(queue, "new")

    await enter(queue, new)

    assert new.virtual_time == held.virtual_time == 9_700


async def test_a_key_that_reaches_its_cap_from_the_queue_saves_up_no_credit() -> None:
    queue = queue_of()
    held, busy = (
        account_of(queue, "held", max_running=1),
        account_of(queue, "busy", mean_tokens=300),
    )
    await enter(queue, busy, held, held, busy)
    queue.resize(2)  # The first request of the held key leaves the queue.
    await settled()
    assert held.num_running == 1
    busy.virtual_time = 10_000

    held.key.max_running = 2
    queue.resize(2)

    assert held.virtual_time == 9_700


async def test_a_refusal_at_a_keys_own_cap_names_the_key_and_its_cap() -> None:
    queue = queue_of(capacity=5, max_waiting=2, max_wait_s=0.01)
    held = account_of(queue, "alice", max_running=1)
    (running,) = await enter(queue, held)

    late = await asyncio.gather(queue.enter(held), return_exceptions=True)
    tasks = await enter(queue, held, held)
    with pytest.raises(RateLimitError, match=r"alice.*`max_threads` of 1.*2 requests wait") as full:
        await queue.enter(held)

    assert isinstance(late[0], RateLimitError)
    assert (late[0].kind, full.value.kind, full.value.retry_after_s) == ("threads", "threads", 1.0)
    queue.resize(1)
    other = await enter(queue, account_of(queue, "other"))  # Drops the newest of alice's.
    assert isinstance(tasks[1].exception(), RateLimitError)
    await asyncio.gather(*other, *tasks, return_exceptions=True)
    assert isinstance(other[0].exception(), CapacityError)
    running.result().leave()


async def test_startable_requests_are_those_that_more_replicas_could_serve() -> None:
    queue = queue_of(capacity=1)
    bounded, free = account_of(queue, "bounded", max_running=2), account_of(queue, "free")

    await enter(queue, *[bounded] * 5, *[free] * 3)

    assert queue.state.waiting == {"bounded": 4, "free": 3}
    assert queue.state.num_startable == 1 + 3
    bounded.key.max_running = 1
    assert queue.state.num_startable == 3


async def test_a_full_queue_may_drop_a_request_whose_client_is_leaving() -> None:
    queue = queue_of(max_waiting=2)
    flood, other = account_of(queue, "flood"), account_of(queue, "other")
    tasks = await enter(queue, *[flood] * 3)

    newcomer = asyncio.create_task(queue.enter(other))
    tasks[2].cancel()  # Told of it only after the newcomer has come in.
    await settled()

    assert tasks[2].cancelled()
    assert not newcomer.done()
    assert queue.state.waiting == {"flood": 1, "other": 1}


async def enter_size(
    queue: FairQueue, name: str, num_sequences: int, prompt_tokens: int = 0, **fields: int
) -> Enter:
    account = account_of(queue, name, **fields)
    size = Size(num_sequences, prompt_tokens)
    task = asyncio.create_task(queue.enter(account, size=size))
    await settled()
    return task


async def test_a_request_takes_a_place_for_each_of_its_sequences() -> None:
    queue = queue_of(capacity=4)
    large = await enter_size(queue, "a", 3)
    small = [await enter_size(queue, "b", 1) for _ in range(2)]

    assert [task.done() for task in (large, *small)] == [True, True, False]
    assert (queue.state.running, queue.state.num_sequences) == (2, 4)
    large.result().leave()
    await settled()
    assert small[1].done()
    assert queue.state.num_sequences == 2


async def test_small_requests_do_not_take_the_places_that_a_large_one_waits_for() -> None:
    queue = queue_of(capacity=4)
    running = [await enter_size(queue, "a", 1) for _ in range(3)]
    large = await enter_size(queue, "b", 4)
    small = await enter_size(queue, "c", 1)

    assert not small.done()
    for task in running:
        task.result().leave()
    await settled()
    assert (large.done(), small.done()) == (True, False)
    large.result().leave()
    await settled()
    assert small.done()


async def test_a_more_urgent_request_passes_one_that_waits_for_more_places() -> None:
    queue = queue_of(capacity=4)
    await enter_size(queue, "a", 3)
    large = await enter_size(queue, "b", 2)

    urgent = await enter_size(queue, "c", 1, priority=-1)

    assert (large.done(), urgent.done()) == (False, True)


async def test_requests_behind_a_large_one_start_when_its_client_leaves() -> None:
    queue = queue_of(capacity=4)
    await enter_size(queue, "a", 3)
    large = await enter_size(queue, "b", 4)
    small = await enter_size(queue, "c", 1)

    large.cancel()
    await settled()

    assert small.done()


async def test_a_request_larger_than_a_lowered_limit_runs_alone() -> None:
    queue = queue_of(capacity=4)
    running = await enter_size(queue, "a", 2)
    large = await enter_size(queue, "b", 4)
    queue.resize(2)
    await settled()
    assert not large.done()

    running.result().leave()
    await settled()

    assert large.done()


async def test_the_cap_of_a_key_counts_sequences() -> None:
    queue = queue_of(capacity=9)
    first = await enter_size(queue, "a", 2, max_running=4)
    second = await enter_size(queue, "a", 3, max_running=4)
    other = await enter_size(queue, "b", 3)

    assert (first.done(), second.done(), other.done()) == (True, False, True)
    assert queue.state.num_startable == 0
    first.result().leave()
    await settled()
    assert second.done()


async def test_prompt_tokens_cost_half_of_generated_ones_and_are_corrected() -> None:
    queue = queue_of(capacity=2)
    task = await enter_size(queue, "a", 1, prompt_tokens=400)
    account = queue.account_of("a")
    # One token is charged for the answer of unknown length.
    assert account.virtual_time == 1 + 200

    task.result().charge(50)
    task.result().charge_prompt(500)
    assert account.virtual_time == 50 + 250
    task.result().leave()
    assert account.virtual_time == 50 + 250


async def test_an_unused_place_costs_no_prompt() -> None:
    queue = queue_of(capacity=2)
    account = queue.account_of("a")
    task = await enter_size(queue, "a", 1, prompt_tokens=400)

    task.result().give_up()

    assert account.virtual_time == 0


async def test_an_expected_answer_is_charged_for_each_sequence() -> None:
    queue = queue_of(capacity=9)
    account = account_of(queue, "a", mean_tokens=100)
    ticket = await queue.enter(account, size=Size(4))
    assert account.virtual_time == 400

    ticket.charge(440)
    ticket.leave()

    assert account.virtual_time == 440
    assert account.mean_tokens == pytest.approx(101)


async def test_a_key_whose_next_request_exceeds_its_cap_saves_up_no_credit() -> None:
    queue = queue_of(capacity=2)
    running = await enter_size(queue, "held", 1, max_running=2)
    busy = account_of(queue, "busy", mean_tokens=300)
    await enter(queue, busy)
    await enter_size(queue, "held", 2, max_running=2)
    await enter(queue, busy)
    busy.virtual_time = 10_000

    running.result().leave()

    assert queue.account_of("held").virtual_time == 9_700
