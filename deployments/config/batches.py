"""The Batch API: uploaded files, and batches of requests that run when there is room."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator


class BatchesConfig(BaseModel):
    """Batches of requests, in files that clients upload; kept in the database of `key_store`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(
        True, description="Whether `/v1/files` and `/v1/batches` are served, and batches run."
    )
    max_file_bytes: PositiveInt = Field(
        100 * 2**20,
        description="Limit on the size of an uploaded file (bytes); a larger one gets a 413. "
        "`limits.max_body_bytes` does not apply to uploads, but to each line's request.",
    )
    upload_timeout_s: PositiveFloat = Field(
        600.0,
        description="Timeout for receiving an uploaded file (seconds); a later one gets a 408.",
    )
    max_lines: PositiveInt = Field(
        50_000, description="Limit on the requests of one batch; a batch with more fails."
    )
    max_files: PositiveInt = Field(
        2_000, description="Limit on the files that a key may keep, results of batches included."
    )
    max_key_bytes: PositiveInt = Field(
        2**30,
        description="Limit on the bytes that the files and results of one key may take. A file "
        "over it gets a 413; the remaining lines of a batch over it end with an error.",
    )
    max_total_bytes: PositiveInt = Field(
        8 * 2**30, description="The same limit for the files and results of all keys together."
    )
    max_open_batches: PositiveInt = Field(
        20, description="Limit on the batches of one key that have not ended; one more gets a 400."
    )
    keep_days: PositiveInt = Field(
        30,
        description="Days for which files are kept after their upload, unless the upload says "
        "less, and batches and their results after their end.",
    )
    lines_at_once: PositiveInt = Field(
        128,
        description="Limit on the lines that a gateway has in queues and at replicas at once, "
        "those of all batches together.",
    )

    @model_validator(mode="after")
    def _check_bytes(self) -> Self:
        if self.max_key_bytes < self.max_file_bytes:
            raise ValueError(
                f"max_key_bytes: {self.max_key_bytes} is less than `max_file_bytes`, which is "
                f"{self.max_file_bytes}"
            )
        return self
