"""Autoscaling of a model's replicas."""

from typing import Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

DEFAULT_TARGET_SHARE = 0.25
"""Default of `target_threads`, as a share of the threads that a replica can run."""


class AutoscalingConfig(BaseModel):
    """Bounds on the number of replicas, and the load that each should carry."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_replicas: NonNegativeInt = Field(
        1,
        description="Minimum number of replicas. With 0 the first request waits for one to start.",
    )
    max_replicas: PositiveInt = Field(description="Maximum number of replicas.")
    target_threads: PositiveFloat | None = Field(
        None,
        description="Target threads per replica: running threads, waiting forks and the threads "
        "expected of waiting requests. By default a quarter of what a replica can run: as steps "
        "take longer with more threads, a replica reaches half its maximum rate with far fewer "
        "than half its threads.",
    )
    target_kv_use: float = Field(
        0.5, gt=0, le=1, description="Target use of a replica's KV cache, as a share of it."
    )
    upscale_delay_s: NonNegativeFloat = Field(
        5.0,
        description="Time that the load must be above the targets before replicas are added "
        "(seconds).",
    )
    downscale_delay_s: NonNegativeFloat = Field(
        120.0,
        description="Time that fewer replicas must be enough before some are removed (seconds).",
    )
    downscale_headroom: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="Share of the targets that must stay free after replicas are removed.",
    )
    max_growth: float = Field(
        2.0,
        gt=1,
        description="Limit on one change: at most this multiple of the running replicas is "
        "requested, and at least the running replicas divided by it are kept.",
    )
    catch_up_s: NonNegativeFloat = Field(
        120.0,
        description="Add no replicas if the backlog is shrinking fast enough to be gone within "
        "this time (seconds), nor in the first 10 s after replicas were added. 0 turns this off.",
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}"
            )
        return self
