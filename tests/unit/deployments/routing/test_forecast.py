"""Forecast of a request's cost from finished ones."""

from dataclasses import replace

import pytest

from deployments.routing.table import Forecaster
from deployments.wire.request import RequestHint
from deployments.wire.response import ResponseEnd
from tests.unit.deployments.routing.loads import FORKED, HINT, PLAIN


def learnt(*ends: ResponseEnd, hint: RequestHint = HINT, times: int = 100) -> Forecaster:
    forecaster = Forecaster()
    for _ in range(times):
        for end in ends:
            forecaster.learn(hint, end)
    return forecaster


def test_the_forecast_follows_finished_requests() -> None:
    forecast = learnt(FORKED).forecast(HINT)

    assert forecast.threads == pytest.approx(8.0, rel=0.1)
    assert forecast.steps == pytest.approx(100, rel=0.1)
    assert forecast.generated_tokens == pytest.approx(800, rel=0.1)
    assert forecast.kv_tokens == pytest.approx(864, rel=0.1)


def test_the_forecast_of_a_mixture_is_its_mean() -> None:
    forecast = learnt(FORKED, PLAIN).forecast(HINT)

    assert forecast.generated_tokens == pytest.approx(450, rel=0.1)


def test_a_single_request_changes_the_forecast_little() -> None:
    assert learnt(FORKED, times=1).forecast(HINT).threads < 4


def test_requests_that_may_not_fork_are_forecast_separately() -> None:
    forecaster = learnt(FORKED)
    unforked = replace(HINT, may_fork=False)
    assert forecaster.forecast(unforked).threads == 1.0

    for _ in range(100):
        forecaster.learn(unforked, PLAIN)

    assert forecaster.forecast(unforked).steps == pytest.approx(100, rel=0.15)
    assert forecaster.forecast(HINT).threads > 6


def test_the_forecast_is_bounded_by_max_tokens() -> None:
    forecast = learnt(FORKED).forecast(replace(HINT, max_tokens=40))

    assert forecast.generated_tokens == 40
    assert forecast.steps <= 40


def test_the_forecast_grows_with_the_number_of_choices() -> None:
    forecaster = learnt(FORKED)
    one, three = forecaster.forecast(HINT), forecaster.forecast(replace(HINT, num_choices=3))

    assert three.threads == pytest.approx(3 * one.threads)
    assert three.generated_tokens == pytest.approx(3 * one.generated_tokens)
    assert three.steps == one.steps


def test_a_request_that_never_ran_is_not_learnt() -> None:
    forecaster = learnt(FORKED)
    before = forecaster.forecast(HINT)
    forecaster.learn(HINT, ResponseEnd())

    assert forecaster.forecast(HINT) == before


def test_recent_requests_outweigh_old_ones() -> None:
    forecaster = learnt(PLAIN, times=2000)
    for _ in range(1000):
        forecaster.learn(HINT, FORKED)

    assert forecaster.forecast(HINT).threads > 6


def test_a_clients_expected_length_replaces_the_mean() -> None:
    forecast = learnt(FORKED).forecast(replace(HINT, expected_tokens=1600))

    assert forecast.generated_tokens == 1600
    assert forecast.threads == pytest.approx(8.0, rel=0.1)
    assert forecast.steps == pytest.approx(200, rel=0.1)
    capped = learnt(FORKED).forecast(replace(HINT, expected_tokens=1600, max_tokens=40))
    assert capped.generated_tokens == 40


def test_requests_of_one_parent_are_forecast_by_each_other() -> None:
    forecaster = learnt(FORKED)
    family = replace(HINT, family=1)
    assert forecaster.forecast(family) == forecaster.forecast(HINT)

    for _ in range(9):
        forecaster.learn(family, PLAIN)

    assert forecaster.forecast(family).generated_tokens < 200
    assert forecaster.forecast(replace(HINT, family=2)).generated_tokens > 600


def test_only_the_last_parents_are_remembered() -> None:
    forecaster = Forecaster()
    for family in range(3000):
        forecaster.learn(replace(HINT, family=family), FORKED)

    assert len(forecaster._families) == 1024
    mean = forecaster.forecast(HINT)
    assert forecaster.forecast(replace(HINT, family=0)) == mean
