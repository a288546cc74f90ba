"""Fixtures of all unit tests."""

import sys

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


@pytest.fixture(autouse=True)
def read_environment() -> None:
    """Let vLLM read the environment anew; an engine of an earlier test in this process kept it."""
    if (envs := sys.modules.get("vllm.envs")) is not None:
        envs.disable_envs_cache()
