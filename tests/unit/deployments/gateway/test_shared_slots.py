"""Leases of slots: never more running than the limit, whatever happens to messages."""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.gateway.fair_queue import FairQueue, Ticket
from deployments.gateway.shared_slots import (
    EXPIRY_S,
    TRUST_S,
    Demand,
    LedgerSilentError,
    Need,
    SharedSlots,
    SlotLedger,
    fair_shares,
)
from tests.fakes.examples import num_examples

SLOT = "model"
limits = st.integers(0, 12)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Wire:
    """A gateway's connection to the ledger, which a test can break."""

    def __init__(self, ledger: SlotLedger, gateway: str) -> None:
        self.ledger = ledger
        self.gateway = gateway
        self.num_gateways = 0
        self.loses_question = self.loses_answer = False

    async def exchange(self, demands: Mapping[str, Demand], num_expected: int) -> dict[str, int]:
        if self.loses_question:
            raise LedgerSilentError
        granted = self.ledger.exchange(self.gateway, demands, num_expected=num_expected)
        if self.loses_answer:
            raise LedgerSilentError
        self.num_gateways = self.ledger.num_gateways
        return granted


class Gateway:
    """The part of a gateway that starts requests on leased slots."""

    def __init__(self, ledger: SlotLedger, name: str, num_gateways: int, clock: Clock) -> None:
        self.wire = Wire(ledger, name)
        self.slots = SharedSlots(self.wire, num_gateways, clock)
        self.running = self.waiting = 0

    def start_all(self, limit: int) -> None:
        while self.waiting and self.running < self.slots.of(SLOT, limit):
            self.waiting -= 1
            self.running += 1

    async def exchange(self, limit: int) -> None:
        needs = {}
        if self.running or self.waiting:
            needs[SLOT] = Need(limit, self.running, self.waiting)
        await self.slots.exchange(needs)
        self.start_all(limit)


def made(num: int, clock: Clock | None = None) -> tuple[Clock, list[Gateway]]:
    clock = clock or Clock()
    ledger = SlotLedger(clock)
    clock.now_s += EXPIRY_S + 1  # Nothing is left of an earlier ledger.
    return clock, [Gateway(ledger, str(n), num, clock) for n in range(num)]


@given(limit=limits, wanted=st.lists(st.integers(0, 20), max_size=5))
def test_shares_are_max_min_fair(limit: int, wanted: list[int]) -> None:
    shares = fair_shares(limit, {str(n): number for n, number in enumerate(wanted)})
    given_out = list(shares.values())

    assert sum(given_out) == min(limit, sum(wanted))
    assert all(0 <= share <= number for share, number in zip(given_out, wanted, strict=True))
    # Whoever gets less than it wants gets at most one slot less than anyone else.
    unmet = [s for s, number in zip(given_out, wanted, strict=True) if s < number]
    assert not unmet or max(given_out) <= min(unmet) + 1


class Hanging(Wire):
    """A ledger whose answers take as long as the test wants."""

    def __init__(self, ledger: SlotLedger) -> None:
        super().__init__(ledger, "first")
        self.answers = asyncio.Event()

    async def exchange(self, demands: Mapping[str, Demand], num_expected: int) -> dict[str, int]:
        granted = await super().exchange(demands, num_expected)
        await self.answers.wait()
        return granted


async def test_a_gateway_falls_back_while_a_question_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    wire = Hanging(SlotLedger(clock))
    clock.now_s = EXPIRY_S + 1
    slots = SharedSlots(wire, 2, clock)
    need = {SLOT: Need(8, 0, 8)}
    wire.answers.set()
    await slots.exchange(need)
    assert (slots.of(SLOT, 8), slots.is_alone) == (8, False)

    wire.answers.clear()
    question = asyncio.create_task(slots.exchange(need))
    await asyncio.sleep(0)
    clock.now_s += TRUST_S + 0.1
    assert (slots.of(SLOT, 8), slots.is_alone) == (4, True)

    # A late answer says what the ledger granted when it was asked.
    wire.answers.set()
    await question
    assert slots.is_alone
    await slots.exchange(need)
    assert (slots.of(SLOT, 8), slots.is_alone) == (8, False)
    assert [record.message for record in caplog.records] == [
        "the state that gateways share does not answer; this gateway uses its part of the slots, "
        "and requests pass unlimited by rates",
        "the state that gateways share answers again",
    ]


steps = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["arrive", "end", "exchange", "lose question", "lose answer"]),
        st.integers(1, 4),
    ),
    max_size=60,
)


@settings(max_examples=num_examples(60), deadline=None)
@given(limit=limits, taken=steps)
def test_together_the_gateways_never_run_more_than_the_limit(
    limit: int, taken: list[tuple[int, str, int]]
) -> None:
    async def run() -> None:
        _, gateways = made(3)
        for number, action, amount in taken:
            gateway = gateways[number]
            if action == "arrive":
                gateway.waiting += amount
                gateway.start_all(limit)
            elif action == "end":
                gateway.running -= min(amount, gateway.running)
                gateway.start_all(limit)
            else:
                gateway.wire.loses_question = action == "lose question"
                gateway.wire.loses_answer = action == "lose answer"
                await gateway.exchange(limit)
            assert sum(each.running for each in gateways) <= limit

    asyncio.run(run())


@settings(max_examples=num_examples(40), deadline=None)
@given(
    limit=limits, arrived=st.lists(st.integers(0, 12), min_size=2, max_size=4), starts=st.booleans()
)
def test_after_one_round_per_gateway_and_one_all_slots_are_used_and_no_gateway_starves(
    limit: int, arrived: list[int], *, starts: bool
) -> None:
    async def run() -> None:
        _, gateways = made(len(arrived))
        # Before, one gateway had all the slots.
        await gateways[0].slots.exchange({SLOT: Need(limit, 0, 12)})
        for gateway, number in zip(gateways, arrived, strict=True):
            gateway.waiting = number
        for _ in range(len(gateways) + 1):
            for gateway in gateways:
                need = Need(limit, gateway.running, gateway.waiting)
                await gateway.slots.exchange({SLOT: need})
                if starts:
                    gateway.start_all(limit)
        if starts:
            assert sum(gateway.running for gateway in gateways) == min(limit, sum(arrived))
        else:  # Running requests would keep their slots.
            leased = [gateway.slots.of(SLOT, limit) for gateway in gateways]
            least = limit // len(arrived)
            assert all(own >= min(n, least) for own, n in zip(leased, arrived, strict=True))

    asyncio.run(run())


async def test_a_single_place_is_used_in_turn() -> None:
    clock, gateways = made(2)
    started = [0, 0]
    for gateway in gateways:
        gateway.waiting = 50
    for _ in range(40):
        for number, gateway in enumerate(gateways):
            clock.now_s += 0.05
            before = gateway.running
            await gateway.exchange(1)
            started[number] += gateway.running - before
        for gateway in gateways:
            gateway.running = 0

    assert min(started) >= 5
    assert abs(started[0] - started[1]) <= 1


async def test_a_dead_gateways_places_return() -> None:
    clock, (first, second) = made(2)
    first.waiting = second.waiting = 8
    await first.exchange(8)
    await second.exchange(8)
    clock.now_s += EXPIRY_S + 0.1
    await second.exchange(8)

    assert second.running == 8


async def test_without_the_ledger_the_limit_is_divided() -> None:
    clock, gateways = made(2)
    for gateway in gateways:
        gateway.waiting = 9
        gateway.wire.loses_question = True
        await gateway.exchange(5)
        assert gateway.running == 0
    clock.now_s += TRUST_S + 0.1
    for gateway in gateways:
        await gateway.exchange(5)

    assert [gateway.running for gateway in gateways] == [2, 2]


async def test_a_new_ledger_leaves_gateways_it_has_not_heard_their_share() -> None:
    clock = Clock()
    ledger = SlotLedger(clock)
    first = Gateway(ledger, "first", 2, clock)
    first.waiting = 8
    await first.exchange(8)
    assert first.running == 4

    clock.now_s += EXPIRY_S + 0.1
    await first.exchange(8)
    assert first.running == 8


async def served_tokens(
    waits_at: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, float],
    num_answers: int,
    seed: int,
) -> Counter[str]:
    """Tokens of each key after so many answers; a key always has a request waiting at its gateways.

    Each of two gateways has half of the slots.
    """
    draw, tokens = random.Random(seed), Counter[str]()
    queues = [FairQueue(capacity=4, max_waiting=99, max_wait_s=1e6) for _ in range(2)]
    running: list[tuple[int, str, Ticket]] = []

    async def enter(number: int, name: str) -> None:
        account = queues[number].account_of(name)
        account.key.weight = weights[name]
        running.append((number, name, await queues[number].enter(account)))

    tasks = set()
    asking = [(number, name) for name, numbers in waits_at.items() for number in numbers]

    def ask(number: int, name: str) -> None:
        tasks.add(asyncio.create_task(enter(number, name)))

    for number, name in asking * 8:
        ask(number, name)
    await asyncio.sleep(0)
    for _ in range(num_answers):
        number, name, ticket = running.pop(draw.randrange(len(running)))
        length = draw.randint(10, 60)
        ticket.charge(length)
        tokens[name] += length
        ticket.leave()
        ask(number, name)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return tokens


@pytest.mark.parametrize("seed", [1, 2])
async def test_two_queues_serve_keys_by_weight_where_both_wait(seed: int) -> None:
    both = {"heavy": (0, 1), "light": (0, 1)}
    tokens = await served_tokens(both, {"heavy": 2.0, "light": 1.0}, 1500, seed)

    assert 1.7 < tokens["heavy"] / tokens["light"] < 2.3


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_key_at_one_gateway_gets_its_share_of_that_gateway(seed: int) -> None:
    """One queue would give it a half; two give it a half of a half, and never less."""
    uneven = {"everywhere": (0, 1), "here": (0,)}
    tokens = await served_tokens(uneven, {"everywhere": 1.0, "here": 1.0}, 1500, seed)

    assert 0.2 < tokens["here"] / tokens.total() < 0.3
