"""The engineer's dashboard: how models fork, what it saves, and what happens in the KV cache."""

from grafana_foundation_sdk.models import units

from dashboards.grafana.board import Board, Row
from dashboards.grafana.figure5 import figure5
from dashboards.grafana.panels import (
    BLOCKS,
    BLOCKS_PER_S,
    FORKS_PER_S,
    JOINS_PER_S,
    LEVELS,
    REQUESTS,
    ROWS_PER_S,
    SECONDS,
    SHARE,
    STEPS_PER_S,
    THREADS,
    TOKENS,
    TOKENS_PER_S,
    AnyPanel,
    Query,
    Text,
    Unit,
    buckets,
    lines,
    stat,
)
from dashboards.grafana.promql import (
    RATE_WINDOW,
    WHOLE_RANGE,
    events,
    level,
    mean,
    quantile,
    rate,
    ratio,
    saving,
    selector,
    total,
)
from deployments.metrics import catalogue as of
from deployments.metrics.catalogue import Metric

STATE_COLOURS = {"running": "green", "resting": "blue", "waiting": "orange", "deferred": "purple"}
FORK_COLOURS = {"accepted": "green", "delayed": "purple", "refused": "red"}


def forks() -> Board:
    """Build the dashboard of threads, forks, their savings, and KV blocks."""
    return Board(
        uid="apar-forks",
        title="APAR / Forks and KV cache",
        description="Threads, forks, their savings, and the blocks of the KV cache.",
        rows=(
            Row("Whole time range", _totals()),
            Row("Threads and forks", _threads()),
            Row("Savings over sequential decoding", _savings()),
            Row("KV cache", _cache()),
            Row("Engine", _engine()),
            Row("Replicas compared", _by_replica()),
            Row("Figure 5 and tables 2 and 1 of the paper", figure5()),
        ),
    )


def _totals() -> list[AnyPanel]:
    """Show the numbers of the paper's tables, over all requests that finished in the range."""
    single = rate(of.REQUEST_THREADS, matchers=('le="1.0"',), series="_bucket", window=WHOLE_RANGE)
    requests = rate(of.REQUEST_THREADS, series="_count", window=WHOLE_RANGE)
    return [
        _total(
            "Attended tokens saved",
            "Attended tokens saved by forking, as a share of what one thread would need for the "
            "same text (paper, table 2: 15 to 35 %).",
            SHARE,
            saving(of.ATTENDED_TOKENS, of.SEQUENTIAL_ATTENDED_TOKENS, window=WHOLE_RANGE),
        ),
        _total(
            "Cached tokens saved",
            "Peak cached tokens saved by forking, as a share of what one thread would need "
            "(paper, table 1: 12 to 27 %).",
            SHARE,
            saving(of.CACHED_TOKENS, of.SEQUENTIAL_CACHED_TOKENS, window=WHOLE_RANGE),
        ),
        _total(
            "Steps saved",
            "Decode steps saved by forking until a request's last thread ends, as a share of what "
            "one thread would need.",
            SHARE,
            saving(of.CRITICAL_PATH_STEPS, of.SEQUENTIAL_STEPS, window=WHOLE_RANGE),
        ),
        _total(
            "Threads per request",
            "Mean number of threads of finished requests (paper, table 7: #T).",
            THREADS,
            mean(of.REQUEST_THREADS, window=WHOLE_RANGE),
        ),
        _total(
            "Requests that fork",
            "Share of finished requests with more than one thread (paper, table 7: %P).",
            SHARE,
            f"1 - {ratio(single, requests)}",
        ),
        _total(
            "Depth",
            "Mean depth of the paragraph trees of finished requests. 0 means no fork.",
            LEVELS,
            mean(of.REQUEST_DEPTH, window=WHOLE_RANGE),
        ),
    ]


def _total(title: str, description: str, unit: Unit, expression: str) -> AnyPanel:
    return stat(
        Text(title, description, unit, 4, 5), Query(expression, ""), instant=True, decimals=1
    )


def _threads() -> list[AnyPanel]:
    return [
        lines(
            Text(
                "Threads by state",
                "Threads in a batch, threads waiting for the scheduler, and forks held back by a "
                "cap.",
                THREADS,
            ),
            Query(level(of.THREADS, "state"), "{{state}}"),
            stacked=True,
            colours=STATE_COLOURS,
        ),
        lines(
            Text(
                "Forks by outcome",
                "Forks requested by models per second: accepted at once, delayed by a cap and "
                "started later, or refused.",
                FORKS_PER_S,
            ),
            Query(rate(of.FORKS, "outcome"), "{{outcome}}"),
            stacked=True,
            colours=FORK_COLOURS,
        ),
        lines(
            Text(
                "Delayed forks by reason",
                "Delayed forks per second, by the cap that held them back.",
                FORKS_PER_S,
            ),
            Query(rate(of.FORK_DELAYS, "reason"), "{{reason}}"),
            stacked=True,
            at_least=1,
        ),
        buckets(
            Text("Threads per request", "Finished requests by number of threads.", THREADS, 12),
            Query(_observed(of.REQUEST_THREADS), "{{le}}"),
        ),
        buckets(
            Text(
                "Depth of the paragraph tree",
                "Finished requests by the depth of their paragraph tree. 0 means no fork.",
                LEVELS,
                12,
            ),
            Query(_observed(of.REQUEST_DEPTH), "{{le}}"),
        ),
    ]


def _observed(histogram: Metric) -> str:
    """Count the observations of each bucket."""
    return total(f"increase({selector(histogram, series='_bucket')}[{RATE_WINDOW}])", "le")


def _savings() -> list[AnyPanel]:
    peak = ratio(rate(of.CACHED_TOKENS, "model"), rate(of.SEQUENTIAL_CACHED_TOKENS, "model"))
    path = ratio(rate(of.CRITICAL_PATH_STEPS, "model"), rate(of.SEQUENTIAL_STEPS, "model"))
    return [
        lines(
            Text(
                "Attended tokens",
                "Attended tokens per second of finished requests, and what one thread would have "
                "attended to for the same texts.",
                TOKENS_PER_S,
            ),
            Query(rate(of.ATTENDED_TOKENS), "forked"),
            Query(rate(of.SEQUENTIAL_ATTENDED_TOKENS), "sequential"),
            colours={"forked": "green", "sequential": "orange"},
        ),
        lines(
            Text("Attended tokens saved", "1 - forked / sequential, by model.", SHARE),
            Query(saving(of.ATTENDED_TOKENS, of.SEQUENTIAL_ATTENDED_TOKENS, "model"), "{{model}}"),
        ),
        lines(
            Text(
                "Cached peak and critical path",
                "Peak cached tokens and critical-path steps, relative to one thread. Lower is "
                "better: 100 % means no gain.",
                SHARE,
            ),
            Query(peak, "{{model}} cached peak"),
            Query(path, "{{model}} critical path"),
        ),
        lines(
            Text(
                "Time to certain token",
                "Time from a streamed request's arrival until a token is sent in reading order, "
                "mean over the tokens of a request: answers that forked, and answers that did not.",
                SECONDS,
            ),
            *(
                Query(quantile(share, of.TIME_TO_CERTAIN_TOKEN, "forked"), f"{name} {{{{forked}}}}")
                for share, name in ((0.5, "p50 forked:"), (0.9, "p90 forked:"))
            ),
        ),
    ]


def _cache() -> list[AnyPanel]:
    opened = rate(of.FORKS, "model", matchers=('outcome=~"accepted|delayed"',))
    prefix_hits = ratio(
        rate(of.PREFIX_CACHE_HITS, "model_name"), rate(of.PREFIX_CACHE_QUERIES, "model_name")
    )
    return [
        lines(
            Text(
                "Blocks held and free",
                "KV blocks held by threads, and free KV blocks, over all engines.",
                BLOCKS,
            ),
            Query(f"{level(of.KV_BLOCKS)} - {level(of.KV_FREE_BLOCKS)}", "held"),
            Query(level(of.KV_FREE_BLOCKS), "free"),
            stacked=True,
            colours={"held": "blue", "free": "green"},
        ),
        lines(
            Text(
                "Blocks shared, copied, released early",
                "KV blocks per second: shared by parents with children, copied because they were "
                "half full, and released by threads that ended before their request. With "
                "`attention: family`, also the block reads per layer that were not needed, and the "
                "rows that shared them.",
                BLOCKS_PER_S,
            ),
            Query(rate(of.KV_SHARED_BLOCKS), "shared"),
            Query(rate(of.KV_COPIED_BLOCKS), "copied"),
            Query(rate(of.KV_RELEASED_EARLY_BLOCKS), "released early"),
            Query(rate(of.FAMILY_SAVED_BLOCKS), "reads saved"),
            Query(rate(of.FAMILY_ROWS), "rows in families"),
            right_axis={"E": ROWS_PER_S},
        ),
        lines(
            Text(
                "Blocks per fork",
                "KV blocks per fork that opened a thread, at once or delayed. A fork copies at "
                "most one block; longer text before a fork means more shared blocks.",
                BLOCKS,
            ),
            Query(ratio(rate(of.KV_SHARED_BLOCKS, "model"), opened), "{{model}} shared"),
            Query(ratio(rate(of.KV_COPIED_BLOCKS, "model"), opened), "{{model}} copied"),
        ),
        lines(
            Text(
                "Joins",
                "For formats whose parent waits for its children: joins per second, and the tokens "
                "before the threads that continue, reused from the KV cache or computed. "
                "Discarded: generated tokens of list items after the end of their list.",
                TOKENS_PER_S,
            ),
            Query(rate(of.JOINS), "joins"),
            Query(rate(of.JOIN_TOKENS, "outcome"), "tokens {{outcome}}"),
            Query(rate(of.DISCARDED_TOKENS), "tokens discarded"),
            right_axis={"A": JOINS_PER_S},
        ),
        lines(
            Text(
                "Preemptions",
                "Threads preempted by vLLM in the last scrapes. Preemptions mean that the cache is "
                "too small for the admitted requests.",
                Unit(units.Short, "preemptions"),
            ),
            Query(events(of.PREEMPTIONS), "preemptions"),
            at_least=1,
        ),
        lines(
            Text(
                "Prefix cache hits",
                "Share of prompt tokens, including those of restarted threads, found in vLLM's "
                "prefix cache.",
                SHARE,
            ),
            Query(prefix_hits, "{{model_name}}"),
            at_least=1,
        ),
    ]


def _engine() -> list[AnyPanel]:
    return [
        lines(
            Text("Steps", "Forward passes per second, over all replicas.", STEPS_PER_S),
            Query(rate(of.ENGINE_STEPS, "model"), "{{model}}"),
        ),
        lines(
            Text(
                "Tokens per step",
                "Generated tokens per forward pass, that is, threads per batch.",
                TOKENS,
            ),
            Query(_per_step(of.GENERATED_TOKENS, "model"), "{{model}}"),
        ),
        lines(
            Text("Time per step", "Mean time of a forward pass.", SECONDS),
            Query(_per_step(of.ENGINE_BUSY_SECONDS, "model"), "{{model}}"),
        ),
    ]


def _per_step(counter: Metric, by: str) -> str:
    return ratio(rate(counter, by), rate(of.ENGINE_STEPS, by))


def _by_replica() -> list[AnyPanel]:
    """Compare replicas. To see all of this dashboard for one of them, select it at the top."""
    saved = saving(of.ATTENDED_TOKENS, of.SEQUENTIAL_ATTENDED_TOKENS, "replica")
    values = {
        "Requests": ("Requests in the replica.", REQUESTS, level(of.REPLICA_REQUESTS, "replica")),
        "Engine requests": (
            "Requests in the engine, each once with all its threads; each choice of `n` counts.",
            REQUESTS,
            level(of.ENGINE_REQUESTS, "replica"),
        ),
        "Threads": ("Threads in all states.", THREADS, level(of.THREADS, "replica")),
        "KV cache": ("Share of KV blocks held.", SHARE, level(of.KV_CACHE_USAGE, "replica")),
        "Tokens": ("Tokens of all threads.", TOKENS_PER_S, rate(of.GENERATED_TOKENS, "replica")),
        "Tokens of children": (
            "Tokens of threads that forks have opened, counted when they end.",
            TOKENS_PER_S,
            rate(of.CHILD_TOKENS, "replica"),
        ),
        "Forks": ("Forks requested.", FORKS_PER_S, rate(of.FORKS, "replica")),
        "Utilization": (
            "Share of time in forward passes.",
            SHARE,
            rate(of.ENGINE_BUSY_SECONDS, "replica"),
        ),
        "Savings": ("Share of attended tokens saved by forking.", SHARE, saved),
        "Time per step": (
            "Mean time of a forward pass.",
            SECONDS,
            _per_step(of.ENGINE_BUSY_SECONDS, "replica"),
        ),
        "Tokens per step": (
            "Generated tokens per forward pass.",
            TOKENS,
            _per_step(of.GENERATED_TOKENS, "replica"),
        ),
    }
    return [
        lines(
            Text(f"{title} by replica", description, unit),
            Query(expression, "{{replica}}"),
            at_least=1 if unit is SHARE else None,
        )
        for title, (description, unit, expression) in values.items()
    ]
