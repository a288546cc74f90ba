"""Thresholds of the alerts."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from cluster.metrics import catalogue

JOB = "apar"
"""The `job` label of every target; on Kubernetes the pod monitors set it too."""


class RuleSettings(BaseModel):
    """When an operator is told; the defaults suit interactive use of a model of 7 B parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    availability: float = Field(
        0.999, gt=0, lt=1, description="Objective: share of requests without a server error."
    )
    first_token_s: PositiveFloat = Field(
        2.5, description="Objective: the longest good time to first token; a bucket's bound."
    )
    output_token_s: PositiveFloat = Field(
        0.1,
        description="Objective: the longest good time per token of the critical path; a bucket's "
        "bound.",
    )
    latency_share: float = Field(
        0.95, gt=0, lt=1, description="Objective: share of requests within the two times."
    )
    least_requests: PositiveInt = Field(
        20,
        description="Fewest requests of a model in an hour for an objective to be judged by: one "
        "error at night is no outage.",
    )
    queue_time_s: PositiveFloat = Field(
        5.0, description="90th percentile of the wait for a replica that is too long."
    )
    queue_growth_requests: PositiveInt = Field(
        10, description="Requests by which a queue may grow within 10 minutes."
    )
    rejected_requests: PositiveInt = Field(
        10, description="Requests that may be refused for want of room within 10 minutes."
    )
    authentication_failures: PositiveInt = Field(
        100, description="Requests with a wrong key within 10 minutes that look like an attack."
    )
    kv_cache_usage: float = Field(
        0.95, gt=0, lt=1, description="Share of a replica's KV blocks in use that is too much."
    )
    preemptions_per_s: PositiveFloat = Field(
        0.1, description="Preemptions of threads a second, of a replica, that are too many."
    )
    refused_forks: float = Field(
        0.1, gt=0, lt=1, description="Share of forks refused that is too much."
    )
    deferred_threads: float = Field(
        0.25, gt=0, description="Threads held back by a cap, per running one, that are too many."
    )
    replica_restarts: PositiveInt = Field(
        3, description="Replicas of a model lost within 30 minutes that are not yet too many."
    )
    hold_scale: PositiveFloat = Field(
        1.0,
        description="Factor on the time that every alert's condition must last; tests, which "
        "cannot wait for minutes, set less than 1.",
    )
    runbook: str = Field(
        "dashboards/RUNBOOK.md", description="Where the runbook is; put your own address here."
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        for bound, metric in (
            (self.first_token_s, catalogue.TIME_TO_FIRST_TOKEN),
            (self.output_token_s, catalogue.TIME_PER_OUTPUT_TOKEN),
        ):
            if bound not in metric.buckets:
                raise ValueError(f"{bound} is no bucket of {metric.exported}: {metric.buckets}")
        return self
