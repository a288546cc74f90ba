import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apar_core.scheduler.step_time import MIN_STEPS, LearnedStepCosts
from apar_core.step_costs.costs import StepBatch, StepCosts
from tests.fakes.examples import num_examples

TRUE = StepCosts(
    "true", "predicted", "test", ((1, 0.004), (64, 0.004 + 63 * 0.00003), (1024, 0.0347)),
    attended_token_s=0.5e-6, row_s=0.0002,
)  # fmt: skip


def random_batch(numbers: random.Random, *, most_rows: int = 64) -> StepBatch:
    """Draw a batch of rows with contexts of 100 to 900 tokens, sometimes with a prompt."""
    rows = numbers.randint(1, most_rows)
    attended = sum(numbers.randint(100, 900) for _ in range(rows))
    prefill = numbers.choice([0, 0, 0, 2, numbers.randint(10, 500)])
    return StepBatch(rows, attended, prefill)


def taught(
    num_steps: int, *, noise: float = 0.0, seed: int = 1, true: StepCosts = TRUE
) -> LearnedStepCosts:
    numbers = random.Random(seed)
    learned = LearnedStepCosts()
    for _ in range(num_steps):
        batch = random_batch(numbers)
        learned.observe(batch, true.device_s(batch) * numbers.gauss(1, noise))
    return learned


def test_costs_are_found_without_noise() -> None:
    found = taught(1200).costs

    assert found.attended_token_s == pytest.approx(TRUE.attended_token_s, rel=0.02)
    assert found.row_s == pytest.approx(TRUE.row_s, rel=0.05)
    for batch in (StepBatch(1, 300), StepBatch(48, 24_000, 100), StepBatch(64, 32_000, 400)):
        assert found.device_s(batch) == pytest.approx(TRUE.device_s(batch), rel=0.02)


def test_a_knee_is_found() -> None:
    knee = StepCosts(
        "knee", "predicted", "test", ((1, 0.010), (128, 0.011), (512, 0.035)), 1e-7, launch_s=0.001
    )
    numbers = random.Random(4)
    learned = LearnedStepCosts()
    for _ in range(1500):
        batch = random_batch(numbers, most_rows=400)
        learned.observe(batch, knee.device_s(batch) * numbers.gauss(1, 0.02))

    for rows in (1, 64, 128, 256, 400, 800):
        batch = StepBatch(rows, 300 * rows)
        assert learned.costs.device_s(batch) == pytest.approx(knee.device_s(batch), rel=0.05)


def test_known_costs_predict_at_once_and_are_corrected() -> None:
    learned = LearnedStepCosts(TRUE)
    batch = StepBatch(32, 16_000)
    assert learned.is_ready
    assert learned.predict_s(batch) == pytest.approx(TRUE.device_s(batch), rel=0.01)
    assert learned.costs.device_s(batch) == pytest.approx(TRUE.device_s(batch), rel=0.01)

    numbers = random.Random(6)
    slower = TRUE.slower(1.5)
    for _ in range(1500):
        seen = random_batch(numbers)
        learned.observe(seen, slower.device_s(seen))

    assert learned.predict_s(batch) == pytest.approx(slower.device_s(batch), rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_steps_are_predicted_despite_noise(seed: int) -> None:
    learned = taught(600, noise=0.1, seed=seed)

    for batch in (StepBatch(1, 300), StepBatch(32, 16000), StepBatch(64, 32000, 200)):
        assert learned.predict_s(batch) == pytest.approx(TRUE.device_s(batch), rel=0.1)


def test_nothing_is_predicted_before_enough_steps() -> None:
    assert not taught(MIN_STEPS - 1).is_ready
    assert taught(MIN_STEPS - 1).costs.device_s(StepBatch(8, 800)) == 0
    assert taught(MIN_STEPS).is_ready


@pytest.mark.parametrize("outlier_s", [0.5, 30.0])
def test_rare_slow_steps_change_little(outlier_s: float) -> None:
    numbers = random.Random(2)
    learned = LearnedStepCosts()
    for number in range(600):
        batch = random_batch(numbers)
        # The first step compiles; some later steps are interrupted.
        slow = number == 0 or number % 50 == 7
        learned.observe(batch, outlier_s if slow else TRUE.device_s(batch) * numbers.gauss(1, 0.05))

    for batch in (StepBatch(4, 2000), StepBatch(32, 16000)):
        assert learned.predict_s(batch) == pytest.approx(TRUE.device_s(batch), rel=0.1)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_lasting_change_is_followed(factor: float) -> None:
    learned = taught(600, noise=0.05)
    changed = replace(TRUE, row_s=factor * TRUE.row_s)
    numbers = random.Random(3)
    for _ in range(2500):
        batch = random_batch(numbers)
        learned.observe(batch, changed.device_s(batch) * numbers.gauss(1, 0.05))

    for batch in (StepBatch(8, 4000), StepBatch(48, 24000)):
        assert learned.predict_s(batch) == pytest.approx(changed.device_s(batch), rel=0.05)


def test_the_cost_of_a_row_is_remembered_while_the_batch_is_constant() -> None:
    learned = taught(600)
    for _ in range(5000):
        learned.observe(StepBatch(16, 8000), TRUE.device_s(StepBatch(16, 8000)))

    batch = StepBatch(64, 32000)
    assert learned.predict_s(batch) == pytest.approx(TRUE.device_s(batch), rel=0.1)


def test_the_other_coefficients_are_fitted_again_without_a_negative_one() -> None:
    numbers = random.Random(5)
    learned = LearnedStepCosts()
    for _ in range(600):
        batch = random_batch(numbers)
        # As if attended tokens saved half the cost of their rows.
        seconds = 0.05 + 0.001 * batch.rows - 0.001 * batch.attended_tokens / 1000
        learned.observe(batch, seconds)

    assert learned.costs.attended_token_s == 0
    assert learned.predict_s(StepBatch(32, 16000)) == pytest.approx(0.05 + 0.016, rel=0.02)


def test_costs_that_cannot_be_separated_are_fixed_time() -> None:
    learned = LearnedStepCosts()
    for _ in range(200):
        learned.observe(StepBatch(1, 100), 0.005)

    # A single request gives no information about rows: more rows are predicted to be free.
    assert learned.predict_s(StepBatch(8, 800)) == pytest.approx(0.005, rel=0.05)


@settings(max_examples=num_examples(50), deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(1, 512), st.integers(0, 10**6), st.integers(0, 8192), st.floats(1e-5, 100)
        ),
        min_size=MIN_STEPS,
        max_size=80,
    )
)
def test_no_coefficient_is_ever_negative(steps: list[tuple[int, int, int, float]]) -> None:
    learned = LearnedStepCosts()
    for rows, attended, prefill, seconds in steps:
        learned.observe(StepBatch(rows, attended, prefill), seconds)
        found = learned.costs
        assert min(found.launch_s, found.row_s, found.attended_token_s) >= 0
        times = [found.matrix_time_s(tokens) for tokens in (1, 8, 64, 512, 2048)]
        assert times[0] >= 0
        # Interpolated, so equal but for rounding where the curve is flat.
        assert times == pytest.approx(sorted(times), rel=1e-12, abs=0)
        assert learned.predict_s(StepBatch(rows, attended, prefill)) >= 0
