"""References to secrets. Each process reads the secrets that it needs itself."""

import os
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deployments.config.files import SecretError


class SecretReference(BaseModel):
    """An environment variable or a file with a secret.

    The settings themselves must not have it: Ray Serve stores them, and its REST API shows them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    env: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable with the secret, in every process that needs it.",
    )
    file: Path | None = Field(
        None,
        description="File with the secret, on every node that needs it; line breaks at its end are "
        "ignored.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_secrets(cls, value: Any) -> Any:
        if not isinstance(value, dict | SecretReference):
            raise ValueError("do not write the secret here: give `{env: NAME}` or `{file: PATH}`")
        return value

    @field_validator("file")
    @classmethod
    def _make_absolute(cls, file: Path | None) -> Path | None:
        # Ray's processes may run in another working directory.
        return None if file is None else file.expanduser().absolute()

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if (self.env is None) == (self.file is None):
            raise ValueError("give either `env` or `file`")
        return self

    def read(self, field: str) -> str:
        """Return the secret. Raises SecretError, which names `field`, if there is none."""
        if self.env is not None:
            place = f"the environment variable {self.env}"
            secret = os.environ.get(self.env, "")
        else:
            assert self.file is not None
            place = str(self.file)
            try:
                secret = self.file.read_text(encoding="utf-8").rstrip("\r\n")
            except (OSError, ValueError) as error:
                # The message of a UnicodeDecodeError would show bytes of the secret.
                reason = getattr(error, "strerror", None) or "not UTF-8 text"
                raise SecretError(f"{field}: cannot read {place}: {reason}") from None
        if not secret:
            raise SecretError(f"{field}: {place} is not set or empty")
        return secret
