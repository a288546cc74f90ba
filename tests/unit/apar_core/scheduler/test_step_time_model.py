import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apar_core.scheduler.step_time import (
    MIN_STEPS,
    BatchView,
    StepTimeCoefficients,
    StepTimeModel,
)

TRUE = StepTimeCoefficients(0.004, 0.0002, 0.0005, 0.00003)


def true_s(batch: BatchView, coefficients: StepTimeCoefficients = TRUE) -> float:
    return (
        coefficients.fixed_s
        + coefficients.row_s * batch.rows
        + coefficients.attended_kilotoken_s * batch.attended_tokens / 1000
        + coefficients.prefill_token_s * batch.prefill_tokens
    )


def random_batch(numbers: random.Random, *, most_rows: int = 64) -> BatchView:
    """Draw a batch of rows with contexts of 100 to 900 tokens, sometimes with a prompt."""
    rows = numbers.randint(1, most_rows)
    attended = sum(numbers.randint(100, 900) for _ in range(rows))
    prefill = numbers.choice([0, 0, 0, 2, numbers.randint(10, 500)])
    return BatchView(rows, attended, prefill)


def taught(num_steps: int, *, noise: float = 0.0, seed: int = 1) -> StepTimeModel:
    numbers = random.Random(seed)
    model = StepTimeModel()
    for _ in range(num_steps):
        batch = random_batch(numbers)
        model.observe(batch, true_s(batch) * numbers.gauss(1, noise))
    return model


def test_coefficients_are_found_without_noise() -> None:
    found = taught(600).coefficients

    assert found.fixed_s == pytest.approx(TRUE.fixed_s, rel=0.02)
    assert found.row_s == pytest.approx(TRUE.row_s, rel=0.02)
    assert found.attended_kilotoken_s == pytest.approx(TRUE.attended_kilotoken_s, rel=0.02)
    assert found.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_steps_are_predicted_despite_noise(seed: int) -> None:
    model = taught(600, noise=0.1, seed=seed)

    for batch in (BatchView(1, 300), BatchView(32, 16000), BatchView(64, 32000, 200)):
        assert model.predict_s(batch) == pytest.approx(true_s(batch), rel=0.1)


def test_nothing_is_predicted_before_enough_steps() -> None:
    assert not taught(MIN_STEPS - 1).is_ready
    assert taught(MIN_STEPS - 1).coefficients == StepTimeCoefficients(0, 0, 0, 0)
    assert taught(MIN_STEPS).is_ready


@pytest.mark.parametrize("outlier_s", [0.5, 30.0])
def test_rare_slow_steps_change_little(outlier_s: float) -> None:
    numbers = random.Random(2)
    model = StepTimeModel()
    for number in range(600):
        batch = random_batch(numbers)
        # The first step compiles; some later steps are interrupted.
        slow = number == 0 or number % 50 == 7
        model.observe(batch, outlier_s if slow else true_s(batch) * numbers.gauss(1, 0.05))

    for batch in (BatchView(4, 2000), BatchView(32, 16000)):
        assert model.predict_s(batch) == pytest.approx(true_s(batch), rel=0.1)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_lasting_change_is_followed(factor: float) -> None:
    model = taught(600, noise=0.05)
    changed = StepTimeCoefficients(
        TRUE.fixed_s, TRUE.row_s * factor, TRUE.attended_kilotoken_s, TRUE.prefill_token_s
    )
    numbers = random.Random(3)
    for _ in range(2500):
        batch = random_batch(numbers)
        model.observe(batch, true_s(batch, changed) * numbers.gauss(1, 0.05))

    for batch in (BatchView(8, 4000), BatchView(48, 24000)):
        assert model.predict_s(batch) == pytest.approx(true_s(batch, changed), rel=0.05)


def test_the_cost_of_a_row_is_remembered_while_the_batch_is_constant() -> None:
    model = taught(600)
    for _ in range(5000):
        model.observe(BatchView(16, 8000), true_s(BatchView(16, 8000)))

    batch = BatchView(64, 32000)
    assert model.predict_s(batch) == pytest.approx(true_s(batch), rel=0.1)


def test_the_other_coefficients_are_fitted_again_without_a_negative_one() -> None:
    numbers = random.Random(5)
    model = StepTimeModel()
    for _ in range(600):
        batch = random_batch(numbers)
        # As if attended tokens saved half the cost of their rows.
        seconds = 0.05 + 0.001 * batch.rows - 0.001 * batch.attended_tokens / 1000
        model.observe(batch, seconds)

    assert model.coefficients.attended_kilotoken_s == 0
    assert model.predict_s(BatchView(32, 16000)) == pytest.approx(0.05 + 0.016, rel=0.02)
    assert model.coefficients.row_s == pytest.approx(0.0005, rel=0.1)


def test_costs_that_cannot_be_separated_are_fixed_time() -> None:
    model = StepTimeModel()
    for _ in range(200):
        model.observe(BatchView(1, 100), 0.005)

    # A single request gives no information about rows: more rows are predicted to be free.
    assert model.predict_s(BatchView(8, 800)) == pytest.approx(0.005, rel=0.05)


@settings(max_examples=50, deadline=None)
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
    model = StepTimeModel()
    for rows, attended, prefill, seconds in steps:
        model.observe(BatchView(rows, attended, prefill), seconds)
        found = model.coefficients
        assert min(found.fixed_s, found.row_s) >= 0
        assert min(found.attended_kilotoken_s, found.prefill_token_s) >= 0
        assert model.predict_s(BatchView(rows, attended, prefill)) >= 0
