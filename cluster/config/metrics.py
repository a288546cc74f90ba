"""Metrics for Prometheus, and where they are served."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_PORT = 9464
"""Port of a private cluster's metrics; OpenTelemetry's usual port for Prometheus."""


class MetricsConfig(BaseModel):
    """Metrics for Prometheus: ours, vLLM's and Ray's, from one address per node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(True, description="Whether metrics are recorded and served.")
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of `/metrics` on a private cluster, on loopback only; 0 uses a free one. "
        f"By default {DEFAULT_PORT}, or a free one if it is taken.",
    )
    report_s: float = Field(
        5.0,
        ge=1,
        le=30,
        description="Interval at which a private cluster's processes report metrics (seconds); "
        "metrics are at most this old.",
    )
    targets_file: Path | None = Field(
        None,
        description="File in which `apar serve` keeps the metrics addresses of all nodes, for "
        "Prometheus' `file_sd_configs`.",
    )
