"""Names the place of a secret. The secret itself is read by the process that needs it."""

import os
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from apar_core.errors import AparError


class SecretError(AparError):
    """A secret cannot be read, or cannot be used; the message names its field, never its value."""


class SecretReference(BaseModel):
    """An environment variable or a file that holds a secret.

    Ray Serve stores an application's settings and shows them to whoever reads its REST API.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    env: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable of every process that needs the secret.",
    )
    file: Path | None = Field(
        None,
        description="File that holds the secret, on every node that needs it; line breaks at its "
        "end do not count.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_secrets(cls, value: Any) -> Any:
        if not isinstance(value, dict | SecretReference):
            raise ValueError(
                "write no secret here: give `{env: NAME}` or `{file: PATH}`, from where it is read"
            )
        return value

    @field_validator("file")
    @classmethod
    def _make_absolute(cls, file: Path | None) -> Path | None:
        # Ray's processes may have another working directory.
        return None if file is None else file.expanduser().absolute()

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if (self.env is None) == (self.file is None):
            raise ValueError("give either `env` or `file`")
        return self

    def read(self, field: str) -> str:
        """The secret; `field` names it in errors. Raises SecretError if there is none."""
        if self.env is not None:
            place = f"the environment variable {self.env}"
            secret = os.environ.get(self.env, "")
        else:
            assert self.file is not None
            place = str(self.file)
            try:
                secret = self.file.read_text(encoding="utf-8").rstrip("\r\n")
            except (OSError, ValueError) as error:
                # The error of a wrong encoding would show bytes of the secret.
                reason = getattr(error, "strerror", None) or "not UTF-8 text"
                raise SecretError(f"{field}: cannot read {place}: {reason}") from None
        if not secret:
            raise SecretError(f"{field}: {place} is not set or empty")
        return secret
