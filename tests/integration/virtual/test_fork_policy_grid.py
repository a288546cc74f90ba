"""Forks with the default reserve are never worse than sequential decoding."""

from collections.abc import Iterator

import pytest

from apar_core.scheduler.fork_settings import ForkSettings
from benchmarks.fork_policy_grid import METHODS, TRACES, PolicyGrid

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(not TRACES.is_dir(), reason=f"needs {TRACES}"),
]
TOLERANCE = 0.01


def test_the_grid_runs_the_default_reserve() -> None:
    settings = ForkSettings()
    assert METHODS["eager+reserve"] == (True, settings.growth_reserve_tokens)
    assert settings.policy == "eager"


@pytest.fixture(scope="module", params=["llama-7b", "llama-3-8b"])
def grid(request: pytest.FixtureRequest) -> Iterator[PolicyGrid]:
    grid = PolicyGrid(request.param, num_requests=500)
    yield grid
    grid.shutdown()


@pytest.mark.parametrize("share", [0.1, 0.9])
@pytest.mark.parametrize("trace", ["structured", "mixed"])
def test_forks_are_as_fast_as_sequential_decoding_and_as_eager_forks(
    grid: PolicyGrid, share: float, trace: str
) -> None:
    gpus = ("a100-80gb", "h100")
    sequential, eager, reserve = (
        grid.runs(gpus, share, trace, method) for method in ("sequential", "eager", "eager+reserve")
    )

    for base, other, ours in zip(sequential, eager, reserve, strict=True):
        assert ours.whole >= (1 - TOLERANCE) * max(base.whole, other.whole)
        assert ours.latency_s <= (1 + TOLERANCE) * min(base.latency_s, other.latency_s)
