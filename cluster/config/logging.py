"""What the processes of a cluster log, and where."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat


class LoggingConfig(BaseModel):
    """Logs are lines of JSON: one for each request at its end, and one for each other event."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path | None = Field(
        None,
        description="Folder for the log files of gateway and replicas. When absent, `apar serve` "
        "prints the lines on its standard error.",
    )
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Events below it are left out; the lines of requests are INFO."
    )
    content: bool = Field(
        False, description="Whether the lines of requests hold prompt and answer text."
    )
    max_file_mib: PositiveFloat = Field(
        100.0, description="Size at which a log file is closed and a new one begun."
    )
    keep_files: NonNegativeInt = Field(5, description="Closed log files that are kept.")
