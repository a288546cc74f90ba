"""Metrics of others that rules use, as seen in a running cluster.

vLLM's come through Ray with the labels `model_name` and `ReplicaId`.
"""

PREEMPTIONS = "ray_vllm_num_preemptions_total"
UP = "up"

NAMES = frozenset({PREEMPTIONS, UP})
