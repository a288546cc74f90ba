"""The queue under arrivals, ends, departures and capacity changes in any order."""

import asyncio
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from apar_core.errors import CapacityError
from deployments.gateway.accounts import Account, Size
from deployments.gateway.fair_queue import FairQueue, Ticket
from deployments.wire.errors import RateLimitError
from tests.fakes.clock import Clock
from tests.fakes.examples import num_examples

MAX_WAITING = 6
CAPS = {"d": 1, "e": 2}
WEIGHTS = {"b": 2.0}
SENDERS = [("a", 0), ("b", 0), ("c", 1), ("d", 0), ("e", 0), ("e", 1), ("e", 2)]
"""Keys and the priorities of their requests."""


def account_of(queue: FairQueue, name: str, priority: int = 0) -> Account:
    """The account of a key that has its limits."""
    account = queue.account_of(name, priority)
    account.key.max_running = CAPS.get(name)
    account.key.weight = WEIGHTS.get(name, 1.0)
    return account


@dataclass(eq=False)
class Request:
    """A request in the machine; `number` tells the order of arrival."""

    account: Account
    number: int
    size: int
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
        assert not list(self.queue.keys)
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
                assert isinstance(error, CapacityError) or request.account.key.name in CAPS
                assert isinstance(error, CapacityError | RateLimitError)
        self.waiting = still

    @rule(sender=st.sampled_from(SENDERS), size=st.sampled_from([1, 1, 2, 3]))
    def arrive(self, sender: tuple[str, int], size: int) -> None:
        account = account_of(self.queue, *sender)
        task = self.loop.create_task(self.queue.enter(account, size=Size(size)))
        self.waiting.append(Request(account, self.num_arrived, size, task))
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
    @rule(index=st.integers(0), sender=st.sampled_from(SENDERS))
    def leave_and_arrive_in_one_moment(self, index: int, sender: tuple[str, int]) -> None:
        """A full queue may want to drop the very request whose client is leaving."""
        leaving = self.waiting[index % len(self.waiting)].task
        # Before the loop has woken the one that leaves, but after the newcomer's first step.
        self.loop.call_soon(leaving.cancel)
        self.arrive(sender, 1)

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0))
    def leave_the_queue(self, index: int) -> None:
        self.waiting[index % len(self.waiting)].task.cancel()
        self.rest()

    @rule(capacity=st.integers(0, 5))
    def resize(self, capacity: int) -> None:
        if capacity < self.capacity:
            self.over = self.num_sequences  # None of these is stopped.
        self.capacity = capacity
        self.queue.resize(capacity)
        self.rest()

    over = 0

    @property
    def num_sequences(self) -> int:
        return sum(request.size for request in self.running)

    @invariant()
    def no_more_run_than_there_is_room_for(self) -> None:
        self.over = min(self.over, self.num_sequences)
        # A request that is larger than the limit runs alone.
        assert len(self.running) <= 1 or self.num_sequences <= max(self.capacity, self.over)
        assert self.queue.state.running == len(self.running)
        assert self.queue.state.num_sequences == self.num_sequences

    @invariant()
    def no_room_stays_empty_while_someone_waits_who_may_run(self) -> None:
        free = self.capacity - self.num_sequences
        ready = [request for request in self.waiting if request.account.key.may_run]
        if free > 0 and ready:
            # Others wait behind a request that needs more places.
            assert self.running
            assert max(request.size for request in ready) > free
        assert ready or self.queue.state.num_startable == 0

    @invariant()
    def the_queue_is_bounded_and_counts_right(self) -> None:
        counted = sum(self.queue.state.waiting.values())
        assert counted == len(self.waiting) <= MAX_WAITING

    @invariant()
    def no_key_runs_more_than_its_own_bound(self) -> None:
        for name, cap in CAPS.items():
            sizes = [each.size for each in self.running if each.account.key.name == name]
            assert len(sizes) <= 1 or sum(sizes) <= cap

    @invariant()
    def only_accounts_of_busy_classes_are_kept(self) -> None:
        live = {request.account.priority for request in self.running + self.waiting}
        kept = {priority for key in self.queue.keys for priority in key.accounts}
        assert kept == live

    @invariant()
    def within_a_key_none_overtakes_another(self) -> None:
        for name, priority in SENDERS:
            waiting, running = (
                [
                    each.number
                    for each in requests
                    if (each.account.key.name, each.account.priority) == (name, priority)
                ]
                for requests in (self.waiting, self.running)
            )
            assert not waiting or all(number < min(waiting) for number in running)


QueueMachine.TestCase.settings = settings(
    max_examples=num_examples(150), stateful_step_count=40, deadline=None
)
TestQueue = QueueMachine.TestCase


@dataclass(eq=False)
class Sent:
    """A request in `PlainQueue`."""

    name: str
    priority: int
    number: int
    size: int
    runs: bool = False
    prepaid: float = 0.0


@dataclass
class Standing:
    """What `PlainQueue` knows of a key and priority."""

    virtual_time: float = 0.0
    mean_tokens: float = 0.0
    held: bool = False


class PlainQueue:
    """The same queue without counters and indexes: it goes through all requests every time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.requests: list[Sent] = []
        self.standings: dict[tuple[str, int], Standing] = {}
        self.last_started: dict[int, Standing] = {}
        self.mean_tokens = 0.0

    def num_running(self, name: str | None = None) -> int:
        return sum(each.size for each in self.requests if each.runs and name in (None, each.name))

    def may_run(self, name: str) -> bool:
        waiting = [each for each in self.requests if each.name == name and not each.runs]
        size = min(waiting, key=lambda each: (each.priority, each.number)).size if waiting else 1
        return name not in CAPS or fits(self.num_running(name), CAPS[name], size)

    def note_full(self, name: str) -> None:
        if not self.may_run(name):
            for (other, _), each in self.standings.items():
                each.held = each.held or name == other

    def standing(self, request: Sent) -> Standing:
        return self.standings[request.name, request.priority]

    def of_account(self, name: str, priority: int, *, runs: bool) -> list[Sent]:
        return [
            each
            for each in self.requests
            if (each.name, each.priority, each.runs) == (name, priority, runs)
        ]

    def arrive(self, request: Sent) -> None:
        name, priority = request.name, request.priority
        self.standings.setdefault((name, priority), Standing())
        if not self.of_account(name, priority, runs=False):
            self.lift(request, keeps_credit=bool(self.of_account(name, priority, runs=True)))
        self.requests.append(request)
        self.note_full(name)
        self.grant()

    def lift(self, request: Sent, *, keeps_credit: bool) -> None:
        own, priority = self.standing(request), request.priority
        rivals = {
            each.name: self.standing(each)
            for each in self.requests
            if each.priority == priority and not each.runs and each.name != request.name
        }
        rivals = {
            name: each for name, each in rivals.items() if self.may_run(name) and not each.held
        }
        levels = [(each, WEIGHTS.get(name, 1.0)) for name, each in rivals.items()]
        if not levels and priority in self.last_started:
            (name,) = {
                name
                for (name, _), each in self.standings.items()
                if each is self.last_started[priority]
            }
            levels = [(self.last_started[priority], WEIGHTS.get(name, 1.0))]
        if levels:
            floor = min(each.virtual_time for each, _ in levels)
            if keeps_credit:
                floor -= max(each.mean_tokens / weight for each, weight in levels)
            own.virtual_time = max(own.virtual_time, floor)
        own.held = not self.may_run(request.name)

    def grant(self) -> None:
        while True:
            ready: dict[str, Sent] = {}
            for each in self.requests:
                best = ready.get(each.name)
                if not each.runs and (best is None or each.priority < best.priority):
                    ready[each.name] = each
            firsts = [each for each in ready.values() if self.may_run(each.name)]
            for each in firsts:
                if self.standing(each).held:
                    self.lift(each, keeps_credit=True)
            if not firsts:
                return
            first = min(
                firsts,
                key=lambda each: (each.priority, self.standing(each).virtual_time, each.number),
            )
            if not fits(self.num_running(), self.capacity, first.size):
                return
            self.start(first)

    def start(self, request: Sent) -> None:
        request.runs = True
        own = self.standing(request)
        self.note_full(request.name)
        self.last_started[request.priority] = own
        request.prepaid = request.size * (own.mean_tokens or self.mean_tokens or 1)
        own.virtual_time += request.prepaid / WEIGHTS.get(request.name, 1.0)

    def end(self, request: Sent, num_tokens: int) -> None:
        own = self.standing(request)
        cost = max(num_tokens, request.size) - request.prepaid
        own.virtual_time += cost / WEIGHTS.get(request.name, 1.0)
        if num_tokens:
            length = num_tokens / request.size
            own.mean_tokens = _newer(own.mean_tokens or self.mean_tokens, length)
            self.mean_tokens = _newer(self.mean_tokens, length)
        self.requests.remove(request)
        self.grant()
        if not any(each.priority == request.priority for each in self.requests):
            self.last_started.pop(request.priority, None)
            self.standings = {
                place: each
                for place, each in self.standings.items()
                if place[1] != request.priority
            }


def fits(num_running: int, limit: int, size: int) -> bool:
    return num_running + size <= limit or num_running == 0


def _newer(mean: float, num_tokens: float) -> float:
    return mean + 0.1 * min(1.0, num_tokens / mean) * (num_tokens - mean) if mean else num_tokens


@dataclass(frozen=True)
class Arrival:
    """A step of the comparison: a request comes."""

    sender: tuple[str, int]
    size: int


@dataclass(frozen=True)
class End:
    """A step of the comparison: one of the running requests ends."""

    index: int
    num_tokens: int


async def compare_with_plain(capacity: int, steps: list[Arrival | End]) -> None:
    """Bring both queues arrivals and ends; after each, the same requests must run."""
    clock = Clock()
    queue = FairQueue(capacity=capacity, max_waiting=10**6, max_wait_s=3600, clock=clock)
    plain = PlainQueue(capacity)
    tasks: dict[int, asyncio.Task[Ticket]] = {}
    for number, step in enumerate(steps):
        clock.now_s += 1.0
        running = [each for each in plain.requests if each.runs]
        if isinstance(step, Arrival):
            entering = queue.enter(account_of(queue, *step.sender), size=Size(step.size))
            tasks[number] = asyncio.create_task(entering)
            await asyncio.sleep(0)
            plain.arrive(Sent(*step.sender, number, step.size))
        elif running:
            ending = running[step.index % len(running)]
            ticket = tasks.pop(ending.number).result()
            ticket.charge(step.num_tokens)
            ticket.leave()
            plain.end(ending, step.num_tokens)
        for _ in range(3):
            await asyncio.sleep(0)
        started = {number for number, task in tasks.items() if task.done()}
        assert started == {each.number for each in plain.requests if each.runs}
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


@settings(max_examples=num_examples(200), deadline=None)
@given(
    capacity=st.integers(1, 5),
    steps=st.lists(
        st.builds(Arrival, st.sampled_from(SENDERS), st.sampled_from([1, 1, 2, 3]))
        | st.builds(End, st.integers(0, 3), st.integers(0, 300)),
        max_size=80,
    ),
)
def test_the_queue_chooses_as_one_that_goes_through_all_requests(
    capacity: int, steps: list[Arrival | End]
) -> None:
    asyncio.run(compare_with_plain(capacity, steps))


class Cost(NamedTuple):
    """What a request takes: sequences, tokens of each one's answer, and tokens of its prompts."""

    num_sequences: int
    answer: int
    prompt: int

    @property
    def charged(self) -> float:
        """The cost that the virtual token counter gives it, in generated tokens."""
        return self.num_sequences * self.answer + self.prompt / 2


async def backlogged_run(
    capacity: int, num_steps: int, costs: dict[str, list[Cost]], weights: dict[str, float]
) -> dict[str, float]:
    """Service per weight that keys with endless queues got; `costs` are (repeated) requests."""
    queue = FairQueue(capacity=capacity, max_waiting=10**6, max_wait_s=3600)
    accounts = {name: queue.account_of(name) for name in costs}
    for name, account in accounts.items():
        account.key.weight = weights[name]
    got = dict.fromkeys(costs, 0.0)
    tasks: list[tuple[str, Cost, asyncio.Task[Ticket]]] = []
    for name, requests in costs.items():
        for number in range(num_steps + capacity):
            cost = requests[number % len(requests)]
            # The estimate is wrong; the end corrects it.
            size = Size(cost.num_sequences, cost.prompt // 2)
            entering = queue.enter(accounts[name], size=size)
            tasks.append((name, cost, asyncio.create_task(entering)))
    running: list[tuple[str, Cost, Ticket]] = []
    for _ in range(num_steps):
        for _ in range(3):
            await asyncio.sleep(0)
        running += [(name, cost, task.result()) for name, cost, task in tasks if task.done()]
        tasks = [each for each in tasks if not each[2].done()]
        name, cost, ticket = min(running, key=lambda each: each[1].answer)
        running.remove((name, cost, ticket))
        ticket.charge(cost.num_sequences * cost.answer)
        ticket.charge_prompt(cost.prompt)
        got[name] += cost.charged / weights[name]
        ticket.leave()
    for _, _, task in tasks:
        task.cancel()
    await asyncio.gather(*(task for _, _, task in tasks), return_exceptions=True)
    return got


@settings(max_examples=num_examples(60), deadline=None)
@given(
    capacity=st.integers(1, 4),
    costs=st.dictionaries(
        st.sampled_from("abc"),
        st.lists(
            st.builds(Cost, st.integers(1, 4), st.integers(1, 100), st.integers(0, 200)),
            min_size=1,
        ),
        min_size=2,
    ),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_keys_that_always_wait_get_service_by_their_weights(
    capacity: int, costs: dict[str, list[Cost]], weight: float
) -> None:
    """The bound of the virtual token counter: a constant, however long the run is."""
    weights = {name: weight if name == "a" else 1.0 for name in costs}

    got = asyncio.run(backlogged_run(capacity, 150, costs, weights))

    largest = max(
        max(cost.charged for cost in requests) / weights[name] for name, requests in costs.items()
    )
    assert max(got.values()) - min(got.values()) <= 2 * (capacity + 1) * largest


async def contended_run(capacity: int, num_steps: int, answers: dict[str, list[int]]) -> list[int]:
    """Steps for which each key, always with a request waiting, holds places.

    `answers` are the tokens of each key's (repeated) requests; one of no tokens, such as a rejected
    one, holds its place for a step.
    """
    queue = FairQueue(capacity=capacity, max_waiting=10**6, max_wait_s=3600)
    accounts = {name: queue.account_of(name) for name in answers}
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


@settings(max_examples=num_examples(40), deadline=None)
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
