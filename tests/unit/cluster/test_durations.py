"""Durations with a unit."""

import pytest

from cluster.durations import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2s", 2.0), ("50ms", 0.05), ("5m", 300.0), ("1.5h", 5400.0), ("20us", 2e-5), (".5s", 0.5)],
)
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "2", "s", "-2s", "2 s", "1e3s", "nan", "2d", "2ss"])
def test_anything_else_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(ValueError, match="write a number and a unit, such as 2s, 50ms, 5m or 1h"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(1800.0, "30m"), (2.0, "2s"), (0.05, "50ms"), (2e-5, "20us"), (0.0, "0s")]
)
def test_a_duration_is_written_in_its_largest_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
