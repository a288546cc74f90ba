"""Content and place of the logs."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat


class LoggingConfig(BaseModel):
    """Logs are JSON lines: one per request at its end, and one per other event."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path | None = Field(
        None,
        description="Folder for the log files of gateway and replicas. By default `apar serve` "
        "prints the lines on standard error.",
    )
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Minimum level of logged events; the lines of requests are INFO."
    )
    content: bool = Field(
        False, description="Whether the lines of requests include prompt and answer text."
    )
    max_file_mib: PositiveFloat = Field(
        100.0, description="Size at which a log file is rotated (MiB)."
    )
    keep_files: NonNegativeInt = Field(5, description="Number of rotated log files to keep.")
