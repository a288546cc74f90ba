"""Many steps at once take as long as one by one, and tell how many fit into a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cluster_simulation.step_times import MODELS, ROOFLINE_7B, StepTimes

TIMES = StepTimes(5e-3, 20e-6, 0.2e-6, 25e-6)

counts = st.integers(1, 300)


@given(num_steps=counts, rows=counts, attended=st.integers(0, 100_000))
def test_steps_together_take_as_long_as_one_by_one(
    num_steps: int, rows: int, attended: int
) -> None:
    one_by_one = sum(TIMES.step_s(rows, attended + ahead * rows) for ahead in range(num_steps))

    assert TIMES.steps_s(num_steps, rows, attended) == pytest.approx(one_by_one, rel=1e-12)


@given(
    elapsed_s=st.floats(1e-6, 20.0),
    rows=counts,
    attended=st.integers(0, 100_000),
    attended_token_s=st.sampled_from([0.0, 1e-12, 0.2e-6]),
)
def test_the_step_that_runs_is_the_last_that_has_begun(
    elapsed_s: float, rows: int, attended: int, attended_token_s: float
) -> None:
    times = StepTimes(5e-3, 20e-6, attended_token_s, 25e-6)

    begun = times.steps_within(elapsed_s, rows, attended)

    assert times.steps_s(begun, rows, attended) >= elapsed_s
    assert begun == 1 or times.steps_s(begun - 1, rows, attended) < elapsed_s


def test_every_model_says_whether_its_times_were_measured() -> None:
    measured = {name: model.source.startswith("measured on ") for name, model in MODELS.items()}

    assert measured == {"7b-roofline": False, "tiny-measured": True}
    assert ROOFLINE_7B.source.startswith("not measured: ")
