"""The order, the bounds and the fairness of a model's queue."""

import asyncio
from collections.abc import Callable

import pytest

from apar_core.errors import CapacityError
from deployments.gateway.fair_queue import Account, FairQueue, Ticket

Enter = asyncio.Task[Ticket]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


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


async def enter(queue: FairQueue, *accounts: Account) -> list[Enter]:
    """One request of each account after the other, each come to rest."""
    tasks = []
    for account in accounts:
        tasks.append(asyncio.create_task(queue.enter(account)))
        await settled()
    return tasks


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def served(queue: FairQueue, tasks: dict[str, Enter], num_tokens: int = 0) -> str:
    """End the one request that runs, after so many tokens; returns its name."""
    (name,) = [name for name, task in tasks.items() if task.done()]
    ticket = tasks.pop(name).result()
    ticket.charge(num_tokens)
    ticket.leave()
    await settled()
    return name


async def test_a_request_runs_at_once_where_there_is_room() -> None:
    queue = queue_of(capacity=2)

    tasks = await enter(queue, *[Account("a")] * 3)

    assert [task.done() for task in tasks] == [True, True, False]
    assert (queue.state.running, queue.state.waiting) == (2, {"a": 1})
    tasks[0].result().leave()
    await settled()
    assert tasks[2].done()


async def test_within_a_key_the_first_to_come_goes_first() -> None:
    queue, key = queue_of(), Account("a")
    tasks = dict(zip("1234", await enter(queue, key, key, key, key), strict=True))

    order = [await served(queue, tasks, num_tokens=5) for _ in range(4)]

    assert order == ["1", "2", "3", "4"]


async def test_the_key_that_forks_more_gets_fewer_turns() -> None:
    queue, forking, plain = queue_of(), Account("forking"), Account("plain")
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
    queue, heavy, light = queue_of(), Account("heavy", weight=2.0), Account("light")
    tasks = {f"{number}heavy": t for number, t in enumerate(await enter(queue, *[heavy] * 40))}
    tasks |= {f"{number}light": t for number, t in enumerate(await enter(queue, *[light] * 40))}

    turns = [(await served(queue, tasks, num_tokens=10)).lstrip("0123456789") for _ in range(30)]

    assert abs(turns.count("heavy") - 20) <= 1


async def test_a_better_class_goes_before_everyone_else() -> None:
    queue = queue_of()
    urgent, ordinary = Account("urgent", priority=-1, virtual_time=1e9), Account("ordinary")
    accounts = [ordinary, ordinary, urgent, urgent]
    tasks = dict(zip("abcd", await enter(queue, *accounts), strict=True))

    assert [await served(queue, tasks) for _ in range(4)] == ["a", "c", "d", "b"]


async def test_a_key_that_was_idle_has_saved_nothing_up() -> None:
    queue, busy, idle = queue_of(), Account("busy"), Account("idle")
    tasks = {f"busy{n}": task for n, task in enumerate(await enter(queue, *[busy] * 20))}
    for _ in range(5):
        await served(queue, tasks, num_tokens=1000)
    tasks |= {f"idle{n}": task for n, task in enumerate(await enter(queue, *[idle] * 20))}

    order = [(await served(queue, tasks, num_tokens=1000)).rstrip("0123456789") for _ in range(10)]

    assert order.count("idle") in (4, 5, 6)


async def test_a_key_comes_no_cheaper_to_an_empty_queue() -> None:
    queue, first, second = queue_of(), Account("first"), Account("second")
    (running,) = await enter(queue, first)
    running.result().charge(5000)
    running.result().leave()

    (place,) = await enter(queue, second)
    place.result().give_up()

    assert second.virtual_time == 5000


async def test_tokens_of_running_requests_count_before_they_end() -> None:
    queue, greedy, modest = queue_of(capacity=2), Account("greedy"), Account("modest")
    running = await enter(queue, greedy, modest)
    waiting = await enter(queue, greedy, modest)

    running[0].result().charge(50)
    running[1].result().leave()
    await settled()

    assert [task.done() for task in waiting] == [False, True]


async def test_an_expected_answer_is_charged_in_advance_and_put_right_at_its_end() -> None:
    queue, key = queue_of(capacity=3), Account("a", mean_tokens=100)
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


async def test_a_full_queue_refuses_the_key_that_fills_it_and_says_when_to_retry() -> None:
    clock = Clock()
    queue, key = queue_of(max_waiting=2, clock=clock), Account("a")
    tasks = await enter(queue, *[key] * 3)
    for _ in range(2):  # One request ends every four seconds.
        clock.now_s += 4.0
        tasks.pop(0).result().leave()
        tasks += await enter(queue, key)

    with pytest.raises(CapacityError, match="2 requests wait") as refused:
        await queue.enter(key)

    assert refused.value.retry_after_s == 12.0


async def test_a_full_queue_drops_the_newest_of_the_key_that_fills_it_for_another() -> None:
    queue, flood, other = queue_of(max_waiting=3), Account("flood"), Account("other")
    tasks = await enter(queue, *[flood] * 4, other)

    assert [task.done() for task in tasks] == [True, False, False, True, False]
    with pytest.raises(CapacityError, match="hold less of the queue"):
        tasks[3].result()
    with pytest.raises(CapacityError):  # Two and one: to drop another would change nothing.
        await queue.enter(other)


async def test_a_full_queue_drops_the_key_with_the_most_requests_for_its_weight() -> None:
    queue, newcomer = queue_of(max_waiting=7), Account("newcomer")
    few, most, heavy = Account("few"), Account("most"), Account("heavy", weight=4.0)
    await enter(queue, *[few] * 2, *[most] * 3, *[heavy] * 3)

    await enter(queue, newcomer)

    assert queue.state.waiting == {"few": 1, "most": 2, "heavy": 3, "newcomer": 1}


async def test_a_heavy_key_finds_room_in_a_queue_that_a_light_one_fills() -> None:
    queue, light, heavy = queue_of(max_waiting=4), Account("light"), Account("heavy", weight=4.0)
    await enter(queue, *[light] * 5)

    await enter(queue, *[heavy] * 3)

    # One more of the heavy key's requests counts 4 / 4, as much as the light key's last one.
    assert queue.state.waiting == {"light": 1, "heavy": 3}
    with pytest.raises(CapacityError):
        await queue.enter(heavy)


async def test_a_full_queue_drops_a_worse_class_first() -> None:
    queue = queue_of(max_waiting=1)
    tasks = await enter(queue, Account("a"), Account("low", priority=1), Account("high"))

    with pytest.raises(CapacityError):
        tasks[1].result()
    assert queue.state.waiting == {"high": 1}


async def test_who_waits_too_long_is_told_so() -> None:
    queue = queue_of(max_wait_s=0.01)
    (running,) = await enter(queue, Account("a"))

    with pytest.raises(CapacityError, match=r"within 0\.01 s"):
        await queue.enter(Account("a"))

    assert queue.state.waiting == {}
    running.result().leave()
    assert queue.state.running == 0


async def test_a_key_at_its_own_bound_waits_and_lets_others_pass() -> None:
    queue, bounded, other = queue_of(capacity=3), Account("b", max_running=1), Account("o")

    tasks = await enter(queue, bounded, bounded, other)

    assert [task.done() for task in tasks] == [True, False, True]
    tasks[0].result().leave()
    await settled()
    assert tasks[1].done()


async def test_a_bound_that_is_raised_lets_waiting_requests_in() -> None:
    queue, bounded = queue_of(capacity=4), Account("b", max_running=1)
    tasks = await enter(queue, bounded, bounded, bounded)

    bounded.max_running = 3
    tasks += await enter(queue, bounded)

    assert [task.done() for task in tasks] == [True, True, True, False]


async def test_a_client_that_leaves_the_queue_gives_up_its_turn() -> None:
    queue, key = queue_of(), Account("a")
    running, leaving, last = await enter(queue, key, key, key)

    leaving.cancel()
    await settled()
    assert queue.state.waiting == {"a": 1}
    running.result().leave()
    await settled()

    assert last.done()


async def test_a_client_that_leaves_as_it_is_refused_is_gone() -> None:
    queue, flood = queue_of(max_waiting=2), Account("flood")
    *_, dropped = await enter(queue, flood, flood, flood)

    newcomer = asyncio.create_task(queue.enter(Account("other")))
    await asyncio.sleep(0)  # The newcomer has dropped flood's newest request.
    dropped.cancel()
    await settled()

    assert dropped.cancelled()
    assert not newcomer.done()
    assert queue.state.waiting == {"flood": 1, "other": 1}


async def test_a_client_that_leaves_as_its_turn_comes_passes_it_on() -> None:
    queue, key = queue_of(), Account("a")
    running, leaving, last = await enter(queue, key, key, key)

    running.result().leave()
    leaving.cancel()
    await settled()

    assert leaving.cancelled()
    assert last.done()
    last.result().leave()
    assert queue.state.running == 0


async def test_more_room_lets_more_in_and_less_room_stops_none() -> None:
    queue, key = queue_of(capacity=1), Account("a")
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


async def test_new_bounds_hold_for_the_next_requests() -> None:
    queue, key = queue_of(max_waiting=0), Account("a")
    await enter(queue, key)

    queue.configure(capacity=1, max_waiting=1, max_wait_s=0.01)

    with pytest.raises(CapacityError, match=r"within 0\.01 s"):
        await queue.enter(key)


async def test_a_ticket_tells_how_long_its_request_waited() -> None:
    clock = Clock()
    clock.now_s = 100.0
    queue, key = queue_of(clock=clock), Account("a")
    first, second = await enter(queue, key, key)

    clock.now_s = 102.5
    first.result().leave()
    await settled()

    assert (first.result().queued_s, second.result().queued_s) == (0.0, 2.5)


async def test_the_state_counts_waiting_requests_by_key() -> None:
    queue = queue_of()
    await enter(queue, Account("a"), Account("b"), *[Account("c")] * 2)

    state = queue.state

    assert state.running == 1
    assert state.waiting == {"b": 1, "c": 2}
