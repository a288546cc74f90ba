"""The queue under arrivals, ends, departures and capacity changes in any order."""

import asyncio
from dataclasses import dataclass, field
from itertools import cycle

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from apar_core.errors import CapacityError
from deployments.gateway.fair_queue import Account, FairQueue, Ticket
from deployments.wire.errors import RateLimitError

MAX_WAITING = 6


@dataclass(eq=False)
class Request:
    """A request in the machine; `number` tells the order of arrival."""

    account: Account
    number: int
    task: "asyncio.Task[Ticket]"
    ticket: Ticket | None = None


@dataclass
class Seen:
    """What must hold of every grant: recorded in the order in which the tasks got their places."""

    granted: list[Request] = field(default_factory=list)


class QueueMachine(RuleBasedStateMachine):
    """Every step brings the queue to rest, then compares it with what is known of it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.capacity = 2
        self.queue = FairQueue(capacity=2, max_waiting=MAX_WAITING, max_wait_s=3600)
        self.accounts = [
            Account("a"),
            Account("b", weight=2.0),
            Account("c", priority=1),
            Account("d", max_running=1),
        ]
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_arrived = 0

    def teardown(self) -> None:
        """Everyone leaves; nothing of them may stay."""
        while self.running or self.waiting:
            for request in self.waiting:
                request.task.cancel()
            for request in self.running:
                assert request.ticket is not None
                request.ticket.leave()
            self.running = []
            self.rest()
        state = self.queue.state
        assert (state.running, state.waiting) == (0, {})
        assert all(account.num_running == 0 for account in self.accounts)
        self.loop.close()

    def rest(self) -> None:
        """Run the loop until nothing moves, and sort the requests into their lists."""
        for _ in range(4):
            self.loop.run_until_complete(asyncio.sleep(0))
        still = []
        for request in self.waiting:
            if not request.task.done():
                still.append(request)
            elif not request.task.cancelled() and request.task.exception() is None:
                request.ticket = request.task.result()
                self.running.append(request)
            elif not request.task.cancelled():
                error = request.task.exception()
                assert isinstance(error, CapacityError) or request.account.max_running == 1
                assert isinstance(error, CapacityError | RateLimitError)
        self.waiting = still

    @rule(index=st.integers(0, 3))
    def arrive(self, index: int) -> None:
        account = self.accounts[index]
        task = self.loop.create_task(self.queue.enter(account))
        self.waiting.append(Request(account, self.num_arrived, task))
        self.num_arrived += 1
        self.rest()

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0), num_tokens=st.integers(0, 500))
    def generate(self, index: int, num_tokens: int) -> None:
        ticket = self.running[index % len(self.running)].ticket
        assert ticket is not None
        ticket.charge(num_tokens)

    @precondition(lambda self: self.running)
    @rule(
        index=st.integers(0), leaving=st.integers(0), leaves=st.booleans(), is_known=st.booleans()
    )
    def end(self, index: int, leaving: int, leaves: bool, is_known: bool) -> None:
        """A request ends; in the same moment a client in the queue may leave."""
        request = self.running.pop(index % len(self.running))
        assert request.ticket is not None
        before = request.account.virtual_time
        request.ticket.leave(cost_is_known=is_known)
        assert is_known or request.account.virtual_time >= before
        if leaves and self.waiting:
            self.waiting[leaving % len(self.waiting)].task.cancel()
        self.rest()

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0), accounts=st.integers(0, 3))
    def leave_and_arrive_in_one_moment(self, index: int, accounts: int) -> None:
        """A full queue may want to drop the very request whose client is leaving."""
        leaving = self.waiting[index % len(self.waiting)].task
        # Before the loop has woken the one that leaves, but after the newcomer's first step.
        self.loop.call_soon(leaving.cancel)
        self.arrive(accounts)

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0))
    def leave_the_queue(self, index: int) -> None:
        self.waiting[index % len(self.waiting)].task.cancel()
        self.rest()

    @rule(capacity=st.integers(0, 5))
    def resize(self, capacity: int) -> None:
        if capacity < self.capacity:
            self.over = len(self.running)  # None of these is stopped.
        self.capacity = capacity
        self.queue.resize(capacity)
        self.rest()

    over = 0

    @invariant()
    def no_more_run_than_there_is_room_for(self) -> None:
        self.over = min(self.over, len(self.running))
        assert len(self.running) <= max(self.capacity, self.over)
        assert self.queue.state.running == len(self.running)

    @invariant()
    def no_room_stays_empty_while_someone_waits_who_may_run(self) -> None:
        if len(self.running) < self.capacity:
            assert not [request for request in self.waiting if request.account.may_run]
            assert self.queue.state.num_startable == 0

    @invariant()
    def the_queue_is_bounded_and_counts_right(self) -> None:
        counted = sum(self.queue.state.waiting.values())
        assert counted == len(self.waiting) <= MAX_WAITING

    @invariant()
    def no_key_runs_more_than_its_own_bound(self) -> None:
        assert sum(request.account.name == "d" for request in self.running) <= 1

    @invariant()
    def within_a_key_none_overtakes_another(self) -> None:
        for account in self.accounts:
            waiting = [each.number for each in self.waiting if each.account is account]
            running = [each.number for each in self.running if each.account is account]
            assert not waiting or all(number < min(waiting) for number in running)


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestQueue = QueueMachine.TestCase


async def backlogged_run(
    capacity: int, num_steps: int, sizes: dict[str, list[int]], weights: dict[str, float]
) -> dict[str, float]:
    """Tokens per weight that keys with endless queues got; `sizes` are (repeated) answers."""
    queue = FairQueue(capacity=capacity, max_waiting=10**6, max_wait_s=3600)
    accounts = {name: Account(name, weight=weights[name]) for name in sizes}
    got = dict.fromkeys(sizes, 0.0)
    tasks: list[tuple[str, int, asyncio.Task[Ticket]]] = []
    for name, answers in sizes.items():
        for number in range(num_steps + capacity):
            size = answers[number % len(answers)]
            tasks.append((name, size, asyncio.create_task(queue.enter(accounts[name]))))
    running: list[tuple[str, int, Ticket]] = []
    for _ in range(num_steps):
        for _ in range(3):
            await asyncio.sleep(0)
        running += [(name, size, task.result()) for name, size, task in tasks if task.done()]
        tasks = [each for each in tasks if not each[2].done()]
        name, size, ticket = min(running, key=lambda each: each[1])
        running.remove((name, size, ticket))
        ticket.charge(size)
        got[name] += size / weights[name]
        ticket.leave()
    for _, _, task in tasks:
        task.cancel()
    await asyncio.gather(*(task for _, _, task in tasks), return_exceptions=True)
    return got


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(1, 4),
    sizes=st.dictionaries(
        st.sampled_from("abc"), st.lists(st.integers(1, 100), min_size=1), min_size=2
    ),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_keys_that_always_wait_get_tokens_by_their_weights(
    capacity: int, sizes: dict[str, list[int]], weight: float
) -> None:
    """The bound of the virtual token counter: a constant, however long the run is."""
    weights = {name: weight if name == "a" else 1.0 for name in sizes}

    got = asyncio.run(backlogged_run(capacity, 150, sizes, weights))

    largest = max(max(answers) / weights[name] for name, answers in sizes.items())
    assert max(got.values()) - min(got.values()) <= 2 * (capacity + 1) * largest


async def contended_run(capacity: int, num_steps: int, answers: dict[str, list[int]]) -> list[int]:
    """Steps for which each key, always with a request waiting, holds places.

    `answers` are the tokens of each key's (repeated) requests; one of no tokens, such as a rejected
    one, holds its place for a step.
    """
    queue = FairQueue(capacity=capacity, max_waiting=10**6, max_wait_s=3600)
    accounts = {name: Account(name) for name in answers}
    turns = {name: cycle(sizes) for name, sizes in answers.items()}
    # All places can become free twice before the next requests arrive.
    waiting = {
        name: [asyncio.create_task(queue.enter(account)) for _ in range(2 * capacity + 1)]
        for name, account in accounts.items()
    }
    held = dict.fromkeys(answers, 0)
    running: list[tuple[str, int, Ticket]] = []
    for _ in range(num_steps):
        for _ in range(3):
            await asyncio.sleep(0)
        for name, tasks in waiting.items():
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                tasks.append(asyncio.create_task(queue.enter(accounts[name])))
                running.append((name, next(turns[name]), task.result()))
        for name, _, _ in running:
            held[name] += 1
        for name, size, ticket in list(running):
            ticket.charge(min(1, size))
            if ticket.num_tokens >= size:
                running.remove((name, size, ticket))
                ticket.leave()
    tasks = [task for each in waiting.values() for task in each]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return list(held.values())


@settings(max_examples=40, deadline=None)
@given(
    capacity=st.integers(1, 4),
    tricks=st.lists(st.integers(0, 20), min_size=1, max_size=30),
    answer=st.integers(1, 20),
)
@example(capacity=1, tricks=[0], answer=20)
@example(capacity=4, tricks=[0] * 20 + [20] * 4, answer=20)
@example(capacity=3, tricks=[5, 0, 2, 0, 6], answer=1)
def test_no_sequence_of_tiny_or_rejected_requests_gains_service(
    capacity: int, tricks: list[int], answer: int
) -> None:
    """A key that behaves gets its half of the places' time, whatever the other one sends."""
    tricky, behaving = asyncio.run(
        contended_run(capacity, 800, {"tricky": tricks, "behaving": [answer]})
    )

    assert tricky - behaving <= 2 * (capacity + 1) * 20
