"""API keys: who may send requests, how many, and with which priority."""

import hashlib
import ipaddress
import re
import secrets
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from deployments.config.files import ConfigError, problems_of, read_yaml

ANONYMOUS = "anonymous"
"""Name in logs and limits for requests without a key."""

TOKEN_PREFIX = "apar-"
"""Begin of every key that we make; secret scanners can look for it."""
_TOKEN_BYTES = 32
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
MAX_PRIORITY = 1000
"""Bound of priorities, in both directions."""


class KeyConfig(BaseModel):
    """One API key, known by its hash, and its limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        # HTTP clients drop `.` and `..` from a path, so `DELETE /admin/keys/..` names no key.
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$",
        description="Owner of the key, as shown in logs and metrics. Keys with the same name share "
        "their limits. Up to 64 letters, digits, `_`, `-` and `.`, not beginning with `.`.",
    )
    hash: str = Field(
        description="SHA-256 hash of the key: `sha256:` and 64 hex digits, as `apar keys hash` "
        "prints it."
    )
    models: tuple[str, ...] | None = Field(
        None, description="Names of the models that the key may use; by default all."
    )
    admin: bool = Field(
        False,
        description="Whether the key may create and revoke keys and read everybody's usage, at "
        "`/admin`.",
    )
    expires_at: AwareDatetime | None = Field(
        None,
        description="When the key stops working, with a time zone: `2027-01-31T00:00:00Z`. By "
        "default never.",
    )
    priority: int = Field(
        0,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Priority class of the key's requests; lower numbers are served first.",
    )
    best_priority: int | None = Field(
        None,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Lowest number that a request may ask for in its field `priority`. By default "
        "`priority`, so that a request can only let others go first.",
    )
    weight: PositiveFloat = Field(
        1.0,
        description="Weight of the key in fair queueing: its share of the thread steps and prompt "
        "tokens among the waiting keys of its priority class.",
    )
    requests_per_minute: PositiveInt | None = Field(
        None,
        description="Limit on requests per minute; a request over it gets a 429. By default none.",
    )
    tokens_per_minute: PositiveInt | None = Field(
        None,
        description="Limit on prompt tokens and generated tokens of all threads per minute; a "
        "request over it gets a 429. By default none.",
    )
    requests_per_day: PositiveInt | None = Field(
        None,
        description="Budget of requests per calendar day (UTC); a request over it gets a 429. By "
        "default none.",
    )
    requests_per_month: PositiveInt | None = Field(
        None, description="Budget of requests per calendar month (UTC). By default none."
    )
    tokens_per_day: PositiveInt | None = Field(
        None,
        description="Budget of prompt tokens and generated tokens of all threads per calendar day "
        "(UTC). By default none.",
    )
    tokens_per_month: PositiveInt | None = Field(
        None, description="Budget of tokens per calendar month (UTC). By default none."
    )
    max_threads: PositiveInt | None = Field(
        None,
        description="Limit on the key's running threads, and on its running sequences (a request "
        "has one for each answer to each prompt), per model; further requests wait. A request of "
        "more sequences gets a 400. By default none.",
    )
    max_prompt_chars: PositiveInt | None = Field(
        None,
        description="Limit on the length of a prompt (characters); a longer one gets a 400. By "
        "default none.",
    )
    metrics_class: str = Field(
        "default",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Label under which metrics count the key's requests and tokens. Let many keys "
        "share a class: each one is a time series.",
    )

    @property
    def most_urgent(self) -> int:
        """Lowest priority number that a request of the key may ask for."""
        return self.priority if self.best_priority is None else self.best_priority

    @model_validator(mode="after")
    def _check_priorities(self) -> Self:
        if self.best_priority is not None and self.best_priority > self.priority:
            raise ValueError(
                f"best_priority: {self.best_priority} is greater than `priority`, which is "
                f"{self.priority}"
            )
        return self

    @field_validator("hash")
    @classmethod
    def _check_hash(cls, value: str) -> str:
        if not _HASH.fullmatch(value):
            raise ValueError(
                "`sha256:` and 64 hex digits are expected, as `apar keys new` prints them"
            )
        return value


def new_token() -> str:
    """Return a new API key: 256 random bits after the prefix."""
    return TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def hash_of(token: str) -> str:
    """Return the hash of a key for the configuration.

    One round of SHA-256 without salt is enough: a key of 256 random bits cannot be guessed. The
    hash must be fast because every request computes it.
    """
    return "sha256:" + hashlib.sha256(token.encode()).hexdigest()


def check_keys(keys: Iterable[KeyConfig]) -> None:
    """Raise ValueError for duplicate hashes, and for one name with different limits."""
    keys = tuple(keys)
    hashes = Counter(key.hash for key in keys)
    for key in keys:
        if hashes[key.hash] > 1:
            raise ValueError(f"keys: {key.name!r} has the hash of another key")
    limits: dict[str, KeyConfig] = {}
    for key in keys:
        unhashed = key.model_copy(update={"hash": ""})
        if limits.setdefault(key.name, unhashed) != unhashed:
            raise ValueError(f"keys: the records of {key.name!r} may differ only in their hash")


def load_keys(path: Path) -> tuple[KeyConfig, ...]:
    """Return the keys of a YAML or JSON file with a list of records.

    Raises ConfigError for an invalid file. An empty list is valid: then nobody has access.
    """
    loaded = read_yaml(path)
    try:
        keys = _KEYS.validate_python(loaded)
        check_keys(keys)
    except ValidationError as error:
        raise ConfigError(f"{path}: {problems_of(error, KeyConfig)}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return keys


_KEYS = TypeAdapter(tuple[KeyConfig, ...])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
