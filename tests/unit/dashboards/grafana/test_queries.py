"""Dashboard variables are replaced as Grafana replaces them."""

import pytest

from tests.fakes.grafana import POINTS, View, named

HOUR = View(1000.0, 4600.0)


def test_intervals_are_at_least_the_scrape_interval() -> None:
    assert HOUR.expression("rate(x[$__rate_interval])") == "rate(x[60000ms])"
    assert HOUR.expression("y[$__range:$__interval]") == "y[3600000ms:15000ms]"


def test_intervals_grow_with_the_range() -> None:
    week = View(0.0, 60.0 * POINTS)

    assert week.expression("[$__interval] [$__rate_interval]") == "[60000ms] [75000ms]"


@pytest.mark.parametrize(
    ("chosen", "pattern"),
    [((), ".*"), (("a",), "a"), (("a", "b"), "(a|b)"), (("apar-1.5",), "apar-1\\\\.5")],
)
def test_selected_values_become_a_regular_expression(chosen: tuple[str, ...], pattern: str) -> None:
    view = View(0.0, 1.0, chosen={"model": chosen})

    assert view.expression('x{model=~"$model"}') == f'x{{model=~"{pattern}"}}'


def test_an_unknown_variable_raises() -> None:
    with pytest.raises(KeyError):
        HOUR.expression("$region")


def test_legends_are_filled_with_labels() -> None:
    assert named("{{model}} p50", {"model": "m"}) == "m p50"
    assert named("{{model}}", {}) == ""
