import pytest

from apar_core.tree.reader_times import ReaderTimes


def read(*moments: tuple[float, float]) -> ReaderTimes:
    times = ReaderTimes()
    for amount, now_s in moments:
        times.add(amount, now_s)
    return times


def test_times_are_those_of_the_text_in_reading_order() -> None:
    # Three tokens after 1 s, and after a fork seven more at once.
    times = read((1, 1.0), (2, 1.5), (7, 4.0))

    assert (times.first_s, times.last_s, times.amount) == (1.0, 4.0, 10)
    assert times.certain_s == pytest.approx((1 * 1.0 + 2 * 1.5 + 7 * 4.0) / 10)
    assert times.longest_silence_s == 2.5


def test_text_that_is_read_sooner_lowers_the_time_to_certain_token() -> None:
    one_thread = read(*((1, float(second)) for second in range(1, 9)))
    forked = read((2, 2.0), (3, 5.0), (3, 6.0))

    assert (one_thread.certain_s, forked.certain_s) == (4.5, 4.625)
    assert forked.last_s == 6.0  # The end is sooner, but the middle waits for the first paragraph.


def test_an_answer_without_text_has_no_times() -> None:
    times = read((0, 1.0), (-3, 2.0))

    assert times == ReaderTimes()
    assert times.certain_s is None


def test_one_moment_has_no_silence() -> None:
    assert read((5, 1.0), (0, 9.0)).longest_silence_s is None
