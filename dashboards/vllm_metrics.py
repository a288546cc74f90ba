"""vLLM's own metrics that dashboards and alerts use, as Ray's agents export them.

tests/integration/serving/test_dashboards.py checks the names against a running server.
"""

from cluster.metrics.catalogue import Kind, Metric

_ENGINE = {"model_name": "public name of the model", "ReplicaId": "id of the replica"}

PREEMPTIONS = Metric(
    "vllm_num_preemptions_total",
    Kind.COUNTER,
    "preemptions",
    "Threads preempted to free their KV blocks.",
    _ENGINE,
)
PREFIX_CACHE_QUERIES = Metric(
    "vllm_prefix_cache_queries_total",
    Kind.COUNTER,
    "tokens",
    "Prompt tokens looked up in the prefix cache.",
    _ENGINE,
)
PREFIX_CACHE_HITS = Metric(
    "vllm_prefix_cache_hits_total",
    Kind.COUNTER,
    "tokens",
    "Prompt tokens found in the prefix cache.",
    _ENGINE,
)

VLLM_METRICS = (PREEMPTIONS, PREFIX_CACHE_QUERIES, PREFIX_CACHE_HITS)
