"""Blocks of the KV cache: held, shared, copied, released early, taken away."""

from grafana_foundation_sdk.models import units

from cluster.metrics import catalogue as of
from dashboards.grafana.foreign_metrics import PREEMPTIONS, PREFIX_CACHE_HITS, PREFIX_CACHE_QUERIES
from dashboards.grafana.panels import (
    BLOCKS,
    BLOCKS_PER_S,
    SHARE,
    AnyPanel,
    Query,
    Text,
    Unit,
    lines,
)
from dashboards.grafana.promql import events, level, rate, ratio


def panels() -> list[AnyPanel]:
    return [_held(), shared_blocks(), _per_fork(), _preemptions(), _prefix_cache()]


def shared_blocks(span: int = 8, height: int = 8) -> AnyPanel:
    """What forking does to the blocks."""
    text = Text(
        "Blocks shared, copied, released early",
        "KV blocks a second: taken over by children from parents, copied because half full, given "
        "back by threads that ended before their request.",
        BLOCKS_PER_S,
        span,
        height,
    )
    return lines(
        text,
        Query(rate(of.KV_SHARED_BLOCKS), "shared"),
        Query(rate(of.KV_COPIED_BLOCKS), "copied"),
        Query(rate(of.KV_RELEASED_EARLY_BLOCKS), "released early"),
    )


def _held() -> AnyPanel:
    text = Text(
        "Blocks held and free",
        "KV blocks of all engines that threads hold, and those that none holds.",
        BLOCKS,
    )
    return lines(
        text,
        Query(f"{level(of.KV_BLOCKS)} - {level(of.KV_FREE_BLOCKS)}", "held"),
        Query(level(of.KV_FREE_BLOCKS), "free"),
        stacked=True,
        colours={"held": "blue", "free": "green"},
    )


def _per_fork() -> AnyPanel:
    text = Text(
        "Blocks per fork",
        "Of forks that open a thread, at once or delayed. At most one block is copied at a fork; "
        "the longer the text before forks, the more are shared.",
        BLOCKS,
    )
    opened = rate(of.FORKS, "model", matchers=('outcome=~"accepted|delayed"',))
    return lines(
        text,
        Query(ratio(rate(of.KV_SHARED_BLOCKS, "model"), opened), "{{model}} shared"),
        Query(ratio(rate(of.KV_COPIED_BLOCKS, "model"), opened), "{{model}} copied"),
    )


def _preemptions() -> AnyPanel:
    text = Text(
        "Preemptions",
        "Threads whose blocks vLLM took away for others, within the last scrapes: the cache is "
        "too small for what was let in.",
        Unit(units.Short, "preemptions"),
        12,
    )
    # vLLM exports the counter from the first preemption on.
    expression = f"{events(PREEMPTIONS)} or 0 * {level(of.KV_BLOCKS)}"
    return lines(text, Query(expression, "preemptions"), at_least=1)


def _prefix_cache() -> AnyPanel:
    text = Text(
        "Prefix cache hits",
        "Share of the tokens of prompts, and of threads that begin again, that were found in "
        "vLLM's prefix cache.",
        SHARE,
        12,
    )
    share = ratio(rate(PREFIX_CACHE_HITS, "model_name"), rate(PREFIX_CACHE_QUERIES, "model_name"))
    return lines(text, Query(share, "{{model_name}}"), at_least=1)
