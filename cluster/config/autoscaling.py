"""How a model's replicas follow its load."""

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
"""Of the threads that a replica can run, those that it should carry."""


class AutoscalingConfig(BaseModel):
    """Between how many replicas a model moves, and what a replica should carry."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_replicas: NonNegativeInt = Field(
        1, description="Replicas kept without any load; with 0 the first request waits for one."
    )
    max_replicas: PositiveInt = Field(description="Most replicas, whatever the load.")
    target_threads: PositiveFloat | None = Field(
        None,
        description="Threads that a replica should carry: running, waiting, held back and expected "
        "of waiting requests; a quarter of what it can run when absent: where steps take longer "
        "with each thread, half the rate of a full replica needs far fewer than half its threads.",
    )
    target_kv_use: float = Field(
        0.5, gt=0, le=1, description="Share of its KV cache that a replica should have in use."
    )
    upscale_delay_s: NonNegativeFloat = Field(
        5.0, description="Time for which more must be wanted before replicas are added."
    )
    downscale_delay_s: NonNegativeFloat = Field(
        120.0, description="Time for which fewer must be enough before replicas are removed."
    )
    downscale_headroom: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="Share of the targets that must stay free after replicas have been removed.",
    )
    max_growth: float = Field(
        2.0,
        gt=1,
        description="Most replicas to ask for at once, as a multiple of those that run; "
        "no more are taken away at once than leave the running ones divided by it.",
    )

    catch_up_s: NonNegativeFloat = Field(
        120.0,
        description="No more replicas are asked for while requests become fewer so fast that what "
        "is over the targets is gone within this time, in seconds, nor in the first 10 s of new "
        "replicas. 0 asks for them all the same.",
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} is over max_replicas {self.max_replicas}"
            )
        return self
