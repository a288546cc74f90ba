"""Exported state of an engine that answers late."""

import asyncio

import pytest

from apar_core.scheduler.core_state import CoreState
from deployments.replica.replica_metrics import LastState
from tests.fakes.core_states import a_core_state

pytestmark = pytest.mark.usefixtures("simulated_clocks")


class FakeCore:
    """An engine core that answers with numbers, while its gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_asked = 0

    async def state(self) -> CoreState:
        self.num_asked += 1
        number = self.num_asked
        await self.gate.wait()
        return a_core_state(threads=number)


async def test_during_a_long_step_the_last_state_is_repeated_without_another_call() -> None:
    core = FakeCore()
    last = LastState(core.state, timeout_s=0.01)

    first = await last.get()
    core.gate.clear()
    during = [await last.get() for _ in range(3)]
    core.gate.set()
    after = await last.get()

    assert first == a_core_state(threads=1)
    assert during == [first] * 3
    assert after == a_core_state(threads=2)
    assert core.num_asked == 2


async def test_an_old_state_is_dropped() -> None:
    core = FakeCore()
    last = LastState(core.state, timeout_s=0.01, max_age_s=0.03)

    await last.get()
    core.gate.clear()
    await asyncio.sleep(0.05)

    assert await last.get() is None
    last.close()


async def test_a_dead_engine_raises_at_every_call() -> None:
    async def dead() -> CoreState:
        raise ConnectionError("the engine core is dead")

    last = LastState(dead)

    for _ in range(2):
        with pytest.raises(ConnectionError):
            await last.get()
