"""Throughput samples, selected as in the paper's appendix C.2."""

import pytest

from cluster.loadtest.statistics import sampled, spread
from tests.unit.cluster.loadtest.load_records import record


def test_tokens_count_in_the_sample_of_their_arrival() -> None:
    # Pieces at 1, 4 and 5 s with 4, 4 and 8 characters: 16 tokens are 4, 4 and 8.
    one = record(pieces=[(1.0, 4), (4.0, 4), (5.0, 8)], text_tokens=16, end_s=6.5)

    samples = sampled([one], 3.0)

    assert samples.tokens_per_s == pytest.approx((4 / 3, 12 / 3))


def test_warm_up_and_cool_down_are_excluded() -> None:
    # One request a second for 20 s, each answered at once for 10 s: the last has begun at 19.5 s.
    requests = [
        record(sent_s=float(second), pieces=[(0.5 + each, 1) for each in range(11)], text_tokens=11)
        for second in range(20)
    ]

    samples = sampled(requests, 3.0)

    assert len(samples.tokens_per_s) == 9  # 29.5 s
    # A request is pending in the samples that begin before 19.5 s: seven, of which three go.
    assert (samples.first, samples.end) == (3, 7)
    found = spread(samples)
    assert found is not None
    assert found.num_samples == 4
    # From 10 s on, eleven answers are under way and each brings a token a second.
    assert found.mean == pytest.approx(11.0, rel=0.03)


def test_quartiles_are_those_of_the_kept_samples() -> None:
    amounts = (9, 9, 3, 6, 9, 12, 12, 12)
    requests = [
        record(sent_s=3.0 * place, pieces=[(0.1, 1)], text_tokens=amount, end_s=0.2)
        for place, amount in enumerate(amounts)
    ]
    last = record(sent_s=24.0, pieces=[(0.1, 1)], text_tokens=1, end_s=0.5)

    samples = sampled([*requests, last], 3.0)

    # 24.5 s are eight samples; all have a pending request; the first three are warm-up.
    assert samples.kept == pytest.approx((2.0, 3.0, 4.0, 4.0, 4.0))
    found = spread(samples)
    assert found is not None
    assert (found.mean, found.p25, found.p75) == pytest.approx((3.4, 3.0, 4.0))


def test_a_request_that_never_got_a_token_was_pending_to_its_end() -> None:
    answered = record(pieces=[(0.1, 1)], end_s=30.0)
    refused = record(sent_s=0.0, pieces=[], end_s=14.0, error="timeout")

    assert sampled([answered, refused], 3.0).end == 5


def test_incomplete_answers_count_no_tokens() -> None:
    cut = record(error="cut")

    assert sampled([record(), cut], 1.0).tokens_per_s == sampled([record()], 1.0).tokens_per_s


def test_two_samples_are_no_steady_state() -> None:
    last = record(sent_s=8.9, pieces=[(0.05, 1)], end_s=0.2)

    samples = sampled([record(), last], 3.0)

    assert (samples.first, samples.end) == (1, 3)
    assert spread(samples) is None


def test_a_run_shorter_than_a_sample_has_no_samples() -> None:
    assert spread(sampled([record()], 10.0)) is None
    assert spread(sampled([], 3.0)) is None
