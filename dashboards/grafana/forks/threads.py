"""How models fork, and what becomes of the forks."""

from cluster.metrics import catalogue as of
from cluster.metrics.catalogue import Metric
from dashboards.grafana.panels import (
    FORKS_PER_S,
    LEVELS,
    THREADS,
    AnyPanel,
    Query,
    Text,
    buckets,
    lines,
)
from dashboards.grafana.promql import RATE_WINDOW, level, rate, selector, total

STATE_COLOURS = {"running": "green", "waiting": "orange", "deferred": "purple"}
FORK_COLOURS = {"accepted": "green", "delayed": "purple", "refused": "red"}


def panels() -> list[AnyPanel]:
    return [_states(), _outcomes(), _delays(), _threads_per_request(), _depths()]


def _states() -> AnyPanel:
    text = Text(
        "Threads by state",
        "Threads that are in a batch, that wait for the scheduler, and forks that a cap has not "
        "let in yet.",
        THREADS,
    )
    query = Query(level(of.THREADS, "state"), "{{state}}")
    return lines(text, query, stacked=True, colours=STATE_COLOURS)


def _outcomes() -> AnyPanel:
    text = Text(
        "Forks by outcome",
        "Forks that models asked for, a second, each with one outcome: accepted at once, delayed "
        "by a cap and started later, or refused.",
        FORKS_PER_S,
    )
    query = Query(rate(of.FORKS, "outcome"), "{{outcome}}")
    return lines(text, query, stacked=True, colours=FORK_COLOURS)


def _delays() -> AnyPanel:
    text = Text("Delayed forks by reason", "Which cap they waited for, a second.", FORKS_PER_S)
    return lines(
        text, Query(rate(of.FORK_DELAYS, "reason"), "{{reason}}"), stacked=True, at_least=1
    )


def _threads_per_request() -> AnyPanel:
    text = Text("Threads per request", "Finished requests by number of threads.", THREADS, 12)
    return buckets(text, Query(_observed(of.REQUEST_THREADS), "{{le}}"))


def _depths() -> AnyPanel:
    text = Text(
        "Depth of the paragraph tree",
        "Finished requests by the depth of their tree; 0 without a fork.",
        LEVELS,
        12,
    )
    return buckets(text, Query(_observed(of.REQUEST_DEPTH), "{{le}}"))


def _observed(histogram: Metric) -> str:
    """How much fell into each bucket."""
    return total(f"increase({selector(histogram, series='_bucket')}[{RATE_WINDOW}])", "le")
