"""What the cluster tells of itself in numbers, and where they can be read."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_PORT = 9464
"""Where a private cluster is read; OpenTelemetry's usual port for Prometheus."""


class MetricsConfig(BaseModel):
    """Metrics for Prometheus: our own, vLLM's and Ray's, from one address on each node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(True, description="Whether metrics are recorded and can be read.")
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of `/metrics` on a private cluster, for this machine only; 0 takes any "
        f"free one. {DEFAULT_PORT} when absent, or any free one where that is taken.",
    )
    report_s: float = Field(
        5.0,
        ge=1,
        le=30,
        description="How often a private cluster's processes report their numbers: how old these "
        "are at most.",
    )
    targets_file: Path | None = Field(
        None,
        description="File that `apar serve` keeps up to date with the addresses of all nodes, for "
        "`file_sd_configs` of Prometheus.",
    )
