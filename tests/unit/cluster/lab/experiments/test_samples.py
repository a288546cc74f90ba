import pytest

from cluster.lab.experiments.samples import Sample, Sampler, Spread, spread, steady


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def sample(at_s: float, *, pending: bool = True) -> Sample:
    return Sample(at_s, tokens_per_s=at_s, kv_tokens=0.0, rows=1.0, has_pending=pending)


def test_an_interval_holds_the_rate_and_the_means_of_its_steps() -> None:
    clock = Clock()
    sampler = Sampler(3.0, clock, lambda: True)
    for tokens, kv_tokens, rows in ((2, 100, 2), (4, 200, 4), (6, 300, 6)):
        clock.now_s += 1.5
        sampler.add_step(tokens=tokens, kv_tokens=kv_tokens, rows=rows)

    # The first two steps fill an interval of 3 seconds; the third is in none yet.
    assert sampler.samples == [Sample(3.0, 2.0, 150.0, 3.0, True)]


def test_running_requests_are_counted_at_the_end_of_an_interval() -> None:
    clock, running = Clock(), [2, 5]
    sampler = Sampler(1.0, clock, lambda: True, lambda: running.pop(0))
    for _ in range(4):
        clock.now_s += 0.5
        sampler.add_step(tokens=1, kv_tokens=10, rows=1)

    assert [each.running for each in sampler.samples] == [2, 5]


def test_a_step_longer_than_the_interval_is_one_sample_of_its_own_length() -> None:
    clock = Clock()
    sampler = Sampler(1.0, clock, lambda: False)
    clock.now_s += 4.0
    sampler.add_step(tokens=8, kv_tokens=10, rows=1)

    assert sampler.samples == [Sample(4.0, 2.0, 10.0, 1.0, False)]


def test_the_first_third_and_the_end_without_pending_requests_are_left_out() -> None:
    samples = [sample(1), sample(2), sample(3), sample(4), sample(5), sample(6, pending=False)]

    assert [each.at_s for each in steady(samples)] == [3, 4, 5]


@pytest.mark.parametrize("pending", [0, 1, 2])
def test_fewer_than_three_samples_with_pending_requests_are_no_basis(pending: int) -> None:
    samples = [sample(at, pending=at <= 3 + pending) for at in range(1, 10)]

    assert steady(samples) == []
    assert [each.at_s for each in steady([sample(at) for at in (1, 2, 3, 4)])] == [2, 3, 4]


def test_the_whole_run_has_the_steps_of_closed_and_of_open_intervals() -> None:
    clock = Clock()
    sampler = Sampler(3.0, clock, lambda: False)
    for tokens, kv_tokens, rows in ((2, 100, 2), (4, 200, 4), (6, 300, 6)):
        clock.now_s += 2.0
        sampler.add_step(tokens=tokens, kv_tokens=kv_tokens, rows=rows)

    assert sampler.whole() == Sample(6.0, 2.0, 200.0, 4.0, False)


def test_a_spread_has_mean_and_quartiles() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 10.0]) == Spread(mean=4.0, p25=2.0, p75=4.0)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)


def test_a_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="data point"):
        spread([])
