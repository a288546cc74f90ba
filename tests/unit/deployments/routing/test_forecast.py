"""What a request will probably bring, from what others have brought."""

from dataclasses import replace

import pytest

from deployments.routing.table import Forecaster
from deployments.wire.answer import AnswerEnd
from deployments.wire.request import RequestHint
from tests.unit.deployments.routing.loads import FORKED, HINT, PLAIN


def learnt(*ends: AnswerEnd, hint: RequestHint = HINT, times: int = 100) -> Forecaster:
    forecaster = Forecaster()
    for _ in range(times):
        for end in ends:
            forecaster.learn(hint, end)
    return forecaster


def test_requests_are_expected_to_bring_what_the_last_ones_brought() -> None:
    forecast = learnt(FORKED).forecast(HINT)

    assert forecast.threads == pytest.approx(8.0, rel=0.1)
    assert forecast.steps == pytest.approx(100, rel=0.1)
    assert forecast.generated_tokens == pytest.approx(800, rel=0.1)
    assert forecast.kv_tokens == pytest.approx(864, rel=0.1)


def test_a_mixture_is_expected_by_its_mean() -> None:
    forecast = learnt(FORKED, PLAIN).forecast(HINT)

    assert forecast.generated_tokens == pytest.approx(450, rel=0.1)


def test_a_single_request_changes_little() -> None:
    assert learnt(FORKED, times=1).forecast(HINT).threads < 4


def test_requests_that_may_not_fork_are_expected_to_bring_one_thread() -> None:
    forecaster = learnt(FORKED)
    unforked = replace(HINT, may_fork=False)
    assert forecaster.forecast(unforked).threads == 1.0

    for _ in range(100):
        forecaster.learn(unforked, PLAIN)

    assert forecaster.forecast(unforked).steps == pytest.approx(100, rel=0.15)
    assert forecaster.forecast(HINT).threads > 6


def test_no_more_is_expected_than_the_client_allows() -> None:
    forecast = learnt(FORKED).forecast(replace(HINT, max_tokens=40))

    assert forecast.generated_tokens == 40
    assert forecast.steps <= 40


def test_every_choice_counts() -> None:
    forecaster = learnt(FORKED)
    one, three = forecaster.forecast(HINT), forecaster.forecast(replace(HINT, num_choices=3))

    assert three.threads == pytest.approx(3 * one.threads)
    assert three.generated_tokens == pytest.approx(3 * one.generated_tokens)
    assert three.steps == one.steps


def test_a_request_that_never_ran_teaches_nothing() -> None:
    forecaster = learnt(FORKED)
    before = forecaster.forecast(HINT)
    forecaster.learn(HINT, AnswerEnd())

    assert forecaster.forecast(HINT) == before


def test_new_habits_are_learnt_over_old_ones() -> None:
    forecaster = learnt(PLAIN, times=2000)
    for _ in range(1000):
        forecaster.learn(HINT, FORKED)

    assert forecaster.forecast(HINT).threads > 6
