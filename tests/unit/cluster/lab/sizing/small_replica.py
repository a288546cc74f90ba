"""A small replica whose runs take a fraction of a second."""

from __future__ import annotations

from apar_core.step_costs.costs import StepCosts
from cluster.lab.sizing.replica_run import Slos
from cluster.lab.sizing.requests import Workload
from cluster.lab.sizing.search import Replica, SearchConditions

COSTS = StepCosts(
    name="small",
    kind="predicted",
    source="made up",
    matrix_s=((1, 0.010), (4, 0.011), (16, 0.016)),
    attended_token_s=1e-6,
)
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
REPLICA = Replica("small", 1, COSTS, 1024, CONFIG, 256, 2048)
CONDITIONS = SearchConditions(
    Workload(forks="structured", prompt_tokens=16, answer_tokens=16),
    Slos(first_token_s=0.3, latency_s=2.0),
    max_model_len=256,
    measured=100,
)
