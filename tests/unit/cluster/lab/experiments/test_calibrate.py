"""A calibration of a virtual engine finds the costs that the engine was given."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from apar_core.step_costs.costs import StepBatch, StepCosts
from cluster.lab.experiments.calibrate import (
    StepSample,
    StepTimer,
    fit_samples,
    measure_forks,
    measure_point,
)
from cluster.lab.experiments.settings import Grid
from cluster.lab.virtual.engine import VirtualEngine, VirtualSpec

pytestmark = pytest.mark.engine
COSTS = StepCosts(
    "any",
    "predicted",
    "made up",
    # Beyond the last number of tokens as before it: in proportion.
    ((1, 5e-3), (8, 6e-3), (64, 48e-3)),
    attended_token_s=2e-6,
    launch_s=1e-3,
    copied_block_s=1e-4,
    repeated_token_s=4e-7,
)
HOST = {"host_base_s": 3e-4, "host_row_s": 2e-5}
CONFIG = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
GRID = Grid(model="any", rows=(1, 2, 4, 8, 16, 32), contexts=(32, 128), prefill=(16, 64), repeats=1)


# The synchronous virtual executor charges the engine core's time within the step.
@pytest.fixture(scope="module", params=[(False, {}), (True, HOST)], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest) -> Iterator[VirtualEngine]:
    is_async, host = request.param
    spec = VirtualSpec(
        CONFIG, replace(COSTS, **host), 16_384, is_async=is_async, max_rows=128, max_step_tokens=256
    )
    with VirtualEngine(spec) as engine:
        yield engine


@pytest.fixture(scope="module")
def samples(engine: VirtualEngine) -> list[StepSample]:
    timer = StepTimer(engine, clock=lambda: engine.device.clock.now_s)
    found = [*measure_forks(engine, timer, GRID)]
    for rows in GRID.rows:
        for context in GRID.contexts:
            found += measure_point(engine, timer, GRID, rows, context)
    return found


def test_the_fit_finds_the_costs_of_the_device(
    engine: VirtualEngine, samples: list[StepSample]
) -> None:
    fit = fit_samples(samples, name="found", source="a test", knots=GRID.knots)

    assert abs(fit.total_error) < 0.03
    assert fit.median_error < 0.005
    batches = (
        StepBatch(1, 40),
        StepBatch(24, 24 * 100),
        StepBatch(8, 8 * 70, 60, 2),
        StepBatch(24, 24 * 100, repeated_tokens=16 * 100),
    )
    for batch in batches:
        assert fit.costs.device_s(batch) == pytest.approx(COSTS.device_s(batch), rel=0.03)
    assert fit.costs.attended_token_s == pytest.approx(COSTS.attended_token_s, rel=0.05)
    assert fit.costs.repeated_token_s == pytest.approx(COSTS.repeated_token_s, rel=0.1)
    assert (fit.costs.kind, fit.costs.name) == ("measured", "found")


def test_the_engine_cores_time_is_found_where_vllm_schedules_ahead(
    engine: VirtualEngine, samples: list[StepSample]
) -> None:
    if not engine.spec.is_async:
        pytest.skip("the virtual executor charges it within the step")
    costs = fit_samples(samples, name="found", source="a test", knots=GRID.knots).costs

    assert costs.host_base_s == pytest.approx(HOST["host_base_s"], rel=0.02)
    assert costs.host_row_s == pytest.approx(HOST["host_row_s"], rel=0.02)


def test_samples_have_every_kind_of_step(samples: list[StepSample]) -> None:
    batches = [sample.batch for sample in samples]
    decoding = [batch for batch in batches if not batch.prefill_tokens]

    for rows in GRID.rows:
        assert sum(batch.rows == rows for batch in decoding) >= GRID.steps
    for tokens in GRID.prefill:
        assert any(batch.prefill_tokens == tokens - 1 and batch.rows == 9 for batch in batches)
    assert sum(batch.copied_blocks for batch in batches) > 0
