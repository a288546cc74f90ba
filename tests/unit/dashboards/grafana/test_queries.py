"""Variables are replaced as Grafana replaces them."""

import pytest

from dashboards.grafana.queries import POINTS, View, all_queries, boards, named, panels, queries

HOUR = View(1000.0, 4600.0)


def test_intervals_are_not_shorter_than_those_of_scrapes() -> None:
    assert HOUR.expression("rate(x[$__rate_interval])") == "rate(x[60000ms])"
    assert HOUR.expression("y[$__range:$__interval]") == "y[3600000ms:15000ms]"


def test_intervals_grow_with_the_range() -> None:
    week = View(0.0, 60.0 * POINTS)

    assert week.expression("[$__interval] [$__rate_interval]") == "[60000ms] [75000ms]"


@pytest.mark.parametrize(
    ("chosen", "pattern"),
    [((), ".*"), (("a",), "a"), (("a", "b"), "(a|b)"), (("apar-1.5",), "apar-1\\\\.5")],
)
def test_chosen_values_become_a_regular_expression(chosen: tuple[str, ...], pattern: str) -> None:
    view = View(0.0, 1.0, chosen={"model": chosen})

    assert view.expression('x{model=~"$model"}') == f'x{{model=~"{pattern}"}}'


def test_a_repeated_row_sees_its_own_value() -> None:
    view = View(0.0, 1.0, chosen={"model": ("m",), "replica": ("a", "b")}).of("replica", "b")

    assert view.expression("$model $replica") == "m b"


def test_a_variable_that_no_dashboard_has_is_refused() -> None:
    with pytest.raises(KeyError):
        HOUR.expression("$cluster")


def test_series_are_named_by_their_labels() -> None:
    assert named("{{model}} p50", {"model": "m"}) == "m p50"
    assert named("{{model}}", {}) == ""


def test_every_target_is_a_query() -> None:
    targets = sum(
        len(panel["targets"]) for board in boards().values() for panel, _ in panels(board)
    )

    assert len(all_queries()) == targets > 80
    assert {query.repeat for query in queries(boards()["apar-overview"])} == {None}
