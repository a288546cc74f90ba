"""What forking saved against one thread that generates the same text (paper, section 3.4)."""

from cluster.metrics import catalogue as of
from dashboards.grafana.panels import (
    LEVELS,
    SHARE,
    THREADS,
    TOKENS_PER_S,
    AnyPanel,
    Query,
    Text,
    Unit,
    lines,
    stat,
)
from dashboards.grafana.promql import WHOLE_RANGE, mean, rate, ratio, saving


def totals() -> list[AnyPanel]:
    """The figures of the paper's tables, of everything that ended in the range."""
    single = rate(of.REQUEST_THREADS, matchers=('le="1.0"',), series="_bucket", window=WHOLE_RANGE)
    requests = rate(of.REQUEST_THREADS, series="_count", window=WHOLE_RANGE)
    return [
        _total(
            "Attended tokens saved",
            "Share of the attention that one thread would have needed for the same text and that "
            "forked requests did not (paper, table 2: 15 to 35 %).",
            SHARE,
            saving(of.ATTENDED_TOKENS, of.SEQUENTIAL_ATTENDED_TOKENS, window=WHOLE_RANGE),
        ),
        _total(
            "Cached tokens saved",
            "The same of the tokens cached at a request's peak (paper, table 1: 12 to 27 %).",
            SHARE,
            saving(of.CACHED_TOKENS, of.SEQUENTIAL_CACHED_TOKENS, window=WHOLE_RANGE),
        ),
        _total(
            "Steps saved",
            "The same of the decode steps until a request's last thread has ended.",
            SHARE,
            saving(of.CRITICAL_PATH_STEPS, of.SEQUENTIAL_STEPS, window=WHOLE_RANGE),
        ),
        _total(
            "Threads a request",
            "Threads of a finished request, on average (paper, table 7: #T).",
            THREADS,
            mean(of.REQUEST_THREADS, window=WHOLE_RANGE),
        ),
        _total(
            "Requests that fork",
            "Share of the finished requests that had more than one thread (paper, table 7: %P).",
            SHARE,
            f"1 - {ratio(single, requests)}",
        ),
        _total(
            "Depth",
            "Depth of a finished paragraph tree, on average; 0 without a fork.",
            LEVELS,
            mean(of.REQUEST_DEPTH, window=WHOLE_RANGE),
        ),
    ]


def over_time() -> list[AnyPanel]:
    return [_attended(), _attended_saved(), _peak_and_path()]


def _total(title: str, description: str, unit: Unit, expression: str) -> AnyPanel:
    return stat(
        Text(title, description, unit, 4, 5), Query(expression, ""), instant=True, decimals=1
    )


def _attended() -> AnyPanel:
    text = Text(
        "Attended tokens",
        "Tokens attended to a second by finished requests, and what one thread would have "
        "attended to for the same texts.",
        TOKENS_PER_S,
    )
    return lines(
        text,
        Query(rate(of.ATTENDED_TOKENS), "forked"),
        Query(rate(of.SEQUENTIAL_ATTENDED_TOKENS), "sequential"),
        colours={"forked": "green", "sequential": "orange"},
    )


def _attended_saved() -> AnyPanel:
    saved = saving(of.ATTENDED_TOKENS, of.SEQUENTIAL_ATTENDED_TOKENS, "model")
    return lines(
        Text("Attended tokens saved", "1 - forked / sequential, by model.", SHARE),
        Query(saved, "{{model}}"),
    )


def _peak_and_path() -> AnyPanel:
    text = Text(
        "Cached peak and critical path",
        "Tokens cached at the peak, and steps of the critical path, each over what one thread "
        "would have needed: lower is better, 100 % is no gain.",
        SHARE,
    )
    peak = ratio(rate(of.CACHED_TOKENS, "model"), rate(of.SEQUENTIAL_CACHED_TOKENS, "model"))
    path = ratio(rate(of.CRITICAL_PATH_STEPS, "model"), rate(of.SEQUENTIAL_STEPS, "model"))
    return lines(text, Query(peak, "{{model}} cached peak"), Query(path, "{{model}} critical path"))
