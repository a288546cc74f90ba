"""When requests come: rates and bursts as asked for, the same in every run, clear errors."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apar_core.errors import EvaluationError
from cluster.loadtest.arrivals import AllAtOnce, GammaArrivals, read_arrivals, read_timestamps
from tests.fakes.examples import num_examples

AZURE = Path(__file__).resolve().parents[5] / "shared/data/arrivals/AzureLLMInferenceTrace_conv.csv"


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise([0.0, *times])]


def test_all_at_once_is_at_the_start() -> None:
    assert AllAtOnce().times_s(3, seed=1) == [0.0, 0.0, 0.0]


@settings(max_examples=num_examples(30), deadline=None)
@given(
    rate=st.floats(0.01, 1000),
    cv=st.floats(0.2, 3.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_arrivals_have_their_rate_and_their_burstiness(
    rate: float, cv: float, seed: int
) -> None:
    number = 20_000
    arrivals = GammaArrivals(rate, cv)

    times = arrivals.times_s(number, seed)

    # The mean of n gaps is within 5 standard errors; the deviation of heavy tails is looser.
    assert times[-1] / number * rate == pytest.approx(1, abs=5 * cv / number**0.5)
    between = gaps(times)
    assert statistics.pstdev(between) / statistics.fmean(between) == pytest.approx(cv, rel=0.15)
    assert min(between) >= 0
    assert times == arrivals.times_s(number, seed)
    assert times != arrivals.times_s(number, seed + 1)


def test_a_poisson_process_has_a_cv_of_one_and_independent_gaps() -> None:
    between = gaps(GammaArrivals(8).times_s(50_000, seed=3))

    assert statistics.fmean(between) == pytest.approx(1 / 8, rel=0.02)
    assert statistics.pstdev(between) == pytest.approx(1 / 8, rel=0.03)
    assert statistics.correlation(between[:-1], between[1:]) == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize("content", ["100\n101.5\n101.5\n104\n", "104\n100\n101.5\n101.5\n"])
def test_recorded_seconds_keep_their_gaps_in_a_random_window(tmp_path: Path, content: str) -> None:
    path = tmp_path / "times.txt"
    path.write_text(content)

    as_recorded = read_arrivals(path, None).times_s(6, seed=0)
    scaled = read_arrivals(path, 4).times_s(6, seed=0)

    recorded = [1.5, 0.0, 2.5]
    windows = [[recorded[(start + i) % 3] for i in range(6)] for start in range(3)]
    assert gaps(as_recorded) in windows
    assert scaled[-1] == pytest.approx(6 / 4)
    assert gaps(scaled) == pytest.approx([gap * 6 / 4 / 8 for gap in gaps(as_recorded)])
    starts = {tuple(read_arrivals(path, None).times_s(3, seed=seed)) for seed in range(20)}
    assert len(starts) == 3


@pytest.mark.skipif(not AZURE.is_file(), reason="the shared data does not lie beside it")
def test_a_production_services_gaps_are_kept_at_any_rate() -> None:
    times = sorted(read_timestamps(AZURE))
    assert len(times) == 19_366
    # From 18:15:46 to 19:14:09 on one day.
    assert times[-1] - times[0] == pytest.approx(58 * 60 + 23, abs=2)

    as_recorded = read_arrivals(AZURE, None).times_s(5000, seed=1)
    scaled = read_arrivals(AZURE, 2).times_s(5000, seed=1)

    recorded = {round(after - before, 4) for before, after in pairwise(times)}
    assert {round(gap, 4) for gap in gaps(as_recorded)} <= recorded
    assert scaled[-1] == pytest.approx(2500)
    stretch = 2500 / as_recorded[-1]
    assert scaled == pytest.approx([time_s * stretch for time_s in as_recorded])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2023-11-16 18:15:46.6805900", 46.68059),
        ("2023-11-16T18:15:03.97+00:00", 3.97),
        ("2023-11-16T18:15:03.9712345Z", 3.971234),
        ("2023-11-16T20:15:03.971234+02:00", 3.971234),
    ],
)
def test_a_moment_may_have_any_number_of_digits_and_a_zone(
    tmp_path: Path, text: str, seconds: float
) -> None:
    path = tmp_path / "times.csv"
    path.write_text(f"TIMESTAMP\n2023-11-16 18:15:00\n{text}\n")

    start, moment = read_timestamps(path)

    assert moment - start == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1\ntwo\n", r"row 2: neither seconds nor a table with TIMESTAMP: \['two'\]"),
        ("1,2\n", "row 1: neither seconds"),
        ("1\ninf\n", "row 2: neither seconds"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.68,3\nlater,4\n", "row 3: no TIMESTAMP"),
        ("1\n\n\ntwo\n", "row 4: neither seconds"),
        ("TIMESTAMP\n\n2023-11-16 18:15:46.68\n\nlater\n", "row 5: no TIMESTAMP"),
        (f"1\n{'2' * 200_000}\n", "cannot be read: field larger than field limit"),
        ("5\n5\n", "the 2 recorded times have no gap"),
        ("", "the 0 recorded times have no gap"),
    ],
)
def test_a_file_without_times_is_refused_with_its_row(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "times.csv"
    path.write_text(content)

    with pytest.raises(EvaluationError, match=message):
        read_arrivals(path, 2)
