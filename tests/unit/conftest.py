"""Fixtures of all unit tests."""

import pytest

from tests.fakes.simulated_time import CLOCKS, SimulatedTime


@pytest.fixture
async def simulated_time(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    """Simulate the time of the test's event loop."""
    return SimulatedTime(monkeypatch)


@pytest.fixture
def simulated_clocks(simulated_time: SimulatedTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clocks of the module `time` follow the simulated time."""
    for name in CLOCKS:
        monkeypatch.setattr(f"time.{name}", simulated_time.clock(name))
