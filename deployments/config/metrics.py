"""Metrics for Prometheus, and where they are served."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_PORT = 9464
"""Port of each node's metrics; OpenTelemetry's usual port for Prometheus."""


class MetricsConfig(BaseModel):
    """Metrics for Prometheus: ours and vLLM's, from one page per node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(True, description="Whether metrics are recorded and served.")
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description=f"Port of `/metrics`, by default {DEFAULT_PORT}. A private cluster serves it "
        "on loopback only, and takes a free port for 0 or if the default is taken.",
    )
    targets_file: Path | None = Field(
        None,
        description="File in which `apar serve` keeps the metrics addresses of all nodes, for "
        "Prometheus' `file_sd_configs`.",
    )
