"""Metrics of vLLM and Prometheus that the dashboards use beside ours, as Ray's agents export them.

Their names have been seen in a running server (tests/integration/serving/test_dashboards.py).
"""

from cluster.metrics.catalogue import Kind, Metric

_ENGINE = {"model_name": "public name of the model", "ReplicaId": "id of the replica"}

PREEMPTIONS = Metric(
    "vllm_num_preemptions_total",
    Kind.COUNTER,
    "preemptions",
    "Threads whose KV blocks were taken away for others.",
    _ENGINE,
)
PREFIX_CACHE_QUERIES = Metric(
    "vllm_prefix_cache_queries_total",
    Kind.COUNTER,
    "tokens",
    "Tokens of prompts that were looked up in the prefix cache.",
    _ENGINE,
)
PREFIX_CACHE_HITS = Metric(
    "vllm_prefix_cache_hits_total",
    Kind.COUNTER,
    "tokens",
    "Tokens of prompts that were found there.",
    _ENGINE,
)

FOREIGN = (PREEMPTIONS, PREFIX_CACHE_QUERIES, PREFIX_CACHE_HITS)
