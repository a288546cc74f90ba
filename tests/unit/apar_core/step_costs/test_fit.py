"""The fit recovers known costs, also from noisy samples with outliers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apar_core.errors import StepCostsError
from apar_core.step_costs.costs import StepBatch, StepCosts
from apar_core.step_costs.fit import fit_costs
from tests.fakes.examples import num_examples

KNOTS = (1, 64, 128, 512)
TRUE = StepCosts(
    "gpu", "measured", "test", ((1, 0.008), (64, 0.009), (128, 0.011), (512, 0.032)), 4e-7,
    copied_block_s=1e-5, row_s=3e-6, launch_s=0.001,
)  # fmt: skip


def grid() -> list[StepBatch]:
    """Rows by context by prefill, with and without copied blocks."""
    return [
        StepBatch(rows, rows * context + prefill, prefill, copied)
        for rows in (1, 4, 16, 64, 96, 128, 256, 384)
        for context in (64, 512, 1500)
        for prefill in (0, 48, 128)
        for copied in (0, 2)
    ]


def timed(
    costs: StepCosts, noise: float = 0.0, slow_share: float = 0.0
) -> list[tuple[StepBatch, float]]:
    """Samples with normal noise, some of them several times as long."""
    source = random.Random(1)
    return [
        (
            batch,
            costs.device_s(batch)
            * max(0.1, source.gauss(1, noise))
            * (source.uniform(2, 20) if source.random() < slow_share else 1),
        )
        for batch in grid()
    ]


def assert_close(found: StepCosts, share: float) -> None:
    for batch in grid():
        assert found.device_s(batch) == pytest.approx(TRUE.device_s(batch), rel=share)


def test_exact_samples_give_the_costs_back() -> None:
    fit = fit_costs(timed(TRUE), name="n", source="s", knots=KNOTS)

    assert_close(fit.costs, 1e-6)
    assert fit.costs.attended_token_s == pytest.approx(TRUE.attended_token_s)
    assert fit.costs.copied_block_s == pytest.approx(TRUE.copied_block_s)
    assert fit.costs.row_s == pytest.approx(TRUE.row_s)
    assert (fit.costs.name, fit.costs.source, fit.costs.kind) == ("n", "s", "measured")
    assert fit.samples == len(grid())
    assert fit.median_error < 1e-6
    assert abs(fit.total_error) < 1e-6


def test_noise_and_slow_outliers_change_the_costs_little_and_are_reported() -> None:
    fit = fit_costs(timed(TRUE, noise=0.03, slow_share=0.15), name="n", source="s", knots=KNOTS)

    assert_close(fit.costs, 0.04)
    assert 0.1 * fit.samples < fit.outliers < 0.25 * fit.samples
    assert 0.01 < fit.median_error < 0.06
    # The outliers take longer than predicted.
    assert fit.total_error < -0.2
    assert fit.p90_error > 0.5


def test_knots_are_chosen_from_the_samples() -> None:
    fit = fit_costs(timed(TRUE), name="n", source="s")
    tokens = [number for number, _ in fit.costs.matrix_s]

    assert len(tokens) <= 8
    assert (tokens[0], tokens[-1]) == (1, 512)
    assert set(tokens) <= {batch.tokens for batch in grid()}
    assert fit.median_error < 0.05


def test_the_last_slope_goes_on_beyond_the_last_knot() -> None:
    short = [each for each in timed(TRUE) if each[0].tokens <= 400]
    fit = fit_costs(short, name="n", source="s", knots=(1, 64, 128, 300))
    far, near = (fit.costs.device_s(StepBatch(1, 0, tokens)) for tokens in (1999, 999))

    assert far - near == pytest.approx(1000 * (0.032 - 0.011) / 384, rel=1e-3)


def test_rows_and_tokens_are_one_cost_without_prefill() -> None:
    decoding = [each for each in timed(TRUE) if each[0].prefill_tokens == 0]

    fit = fit_costs(decoding, name="n", source="s", knots=KNOTS)

    assert fit.costs.row_s == 0
    for batch, seconds in decoding:
        assert fit.costs.device_s(batch) == pytest.approx(seconds, rel=1e-6)


@settings(deadline=None, max_examples=num_examples(25))
@given(
    st.lists(st.floats(0, 0.02), min_size=4, max_size=4),
    st.floats(0, 1e-5),
    st.floats(0, 1e-4),
    st.integers(0, 2**32),
)
def test_fitted_costs_are_never_negative_and_never_fall_with_tokens(
    rises: list[float], attended_s: float, row_s: float, seed: int
) -> None:
    table = tuple((n, 1e-4 + sum(rises[: i + 1])) for i, n in enumerate(KNOTS))
    costs = StepCosts("n", "measured", "s", table, attended_s, row_s=row_s)
    source = random.Random(seed)
    samples = [(b, costs.device_s(b) * source.uniform(0.8, 1.2)) for b in grid()]

    found = fit_costs(samples, name="n", source="s", knots=KNOTS).costs

    seconds = [each for _, each in found.matrix_s]
    assert seconds == sorted(seconds)
    assert min(seconds[0], found.attended_token_s, found.row_s, found.launch_s) >= 0


@pytest.mark.parametrize(
    ("samples", "knots", "message"),
    [
        ([], None, "above 0 seconds"),
        ([(StepBatch(1, 1), 0.0)], None, "above 0 seconds"),
        ([(StepBatch(1, 1), float("nan"))], None, "above 0 seconds"),
        ([(StepBatch(1, 1), 1.0)] * 20, None, "1 different steps do not determine 2 costs"),
        ([(StepBatch(1, 1), 1.0)], (4, 2), r"increasing numbers of tokens, not \[4, 2\]"),
    ],
)
def test_samples_that_determine_nothing_are_refused(
    samples: list[tuple[StepBatch, float]], knots: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(StepCostsError, match=message):
        fit_costs(samples, name="n", source="s", knots=knots)


def test_tokens_that_several_rows_read_get_a_time_of_their_own() -> None:
    true = replace(TRUE, repeated_token_s=5e-8)
    batches = [replace(each, repeated_tokens=each.attended_tokens // 2) for each in grid()]
    samples = [(batch, true.device_s(batch)) for batch in (*batches, *grid())]

    found = fit_costs(samples, name="n", source="s", knots=KNOTS).costs

    assert found.attended_token_s == pytest.approx(true.attended_token_s)
    assert found.repeated_token_s == pytest.approx(true.repeated_token_s)


@pytest.mark.parametrize(("repeated_are_free", "expected"), [(True, 0.0), (False, None)])
def test_without_repeated_tokens_the_caller_says_what_they_cost(
    repeated_are_free: bool, expected: float | None
) -> None:
    fit = fit_costs(
        timed(TRUE), name="n", source="s", knots=KNOTS, repeated_are_free=repeated_are_free
    )

    assert fit.costs.repeated_token_s == expected
    batch = StepBatch(64, 32_000, repeated_tokens=16_000)
    read = 32_000 if expected is None else 16_000
    assert fit.costs.device_s(batch) == pytest.approx(TRUE.device_s(StepBatch(64, read)))
