"""Limits on every request, and the counters for the keys' rate limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qs, quote, urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from deployments.config.files import SecretError
from deployments.config.secret import SecretReference

# Importing this library takes as long as all else that `apar --help` imports.
if TYPE_CHECKING:
    from limits.aio.storage import Storage

BODY_TIMEOUT_S = 60.0
"""Default of `body_timeout_s`."""
IN_MEMORY = "memory://"
"""URI of counters in the memory of the gateway, or of an actor that several gateways share."""
_ASYNC = "async+"
_REDIS = "redis"
MIN_SECRET_CHARS = 16
_BODIES_HELD = 16


class LimitsConfig(BaseModel):
    """Limits on every request, in addition to those of its key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_body_bytes: PositiveInt = Field(
        16 * 2**20,
        description="Limit on the size of a request body (bytes); a larger one gets a 413.",
    )
    body_timeout_s: PositiveFloat = Field(
        BODY_TIMEOUT_S,
        description="Timeout for receiving a request body (seconds); a later one gets a 408. On a "
        "Ray cluster of your own, bodies that fit into HAProxy's buffer of 16 KiB have 60 s.",
    )
    max_held_body_bytes: PositiveInt | None = Field(
        None,
        description="Limit on the bodies of requests and whole answers that a gateway holds at "
        "once (bytes); a request over it gets a 503. One key may hold as many bytes as are free, "
        "so alone at most half. By default 16 times `max_body_bytes`.",
    )
    max_prompt_chars: PositiveInt | None = Field(
        None,
        description="Limit on the length of a prompt (characters); a longer one gets a 400. By "
        "default none.",
    )
    rate_storage: str = Field(
        IN_MEMORY,
        description="Storage for rate-limit counters, as a URI for the library `limits`. With "
        "`redis://host:6379` several clusters share them (needs the extra `redis`).",
    )
    rate_storage_password: SecretReference | None = Field(
        None, description="Password for `rate_storage`, read by the gateway."
    )
    cache_secret: SecretReference | None = Field(
        None,
        description="Secret that separates the keys in the prefix cache, at least "
        f"{MIN_SECRET_CHARS} characters, read by the gateway. By default a new one at each "
        "start.",
    )

    @model_validator(mode="after")
    def _check_bodies(self) -> Self:
        # A key holds no more than is free, so half of the limit must fit one body.
        if self.held_body_bytes < 2 * self.max_body_bytes:
            raise ValueError(
                f"max_held_body_bytes: {self.held_body_bytes} is less than twice `max_body_bytes`, "
                f"which is {self.max_body_bytes}"
            )
        return self

    @property
    def held_body_bytes(self) -> int:
        """The effective `max_held_body_bytes`."""
        return self.max_held_body_bytes or _BODIES_HELD * self.max_body_bytes

    @field_validator("rate_storage")
    @classmethod
    def _check_storage(cls, uri: str) -> str:
        url = urlsplit(uri)
        if url.password is not None or "password" in parse_qs(url.query.lower()):
            raise ValueError("remove the password; set `rate_storage_password` instead")
        if uri != IN_MEMORY:
            from limits.errors import ConfigurationError

            try:
                open_storage(uri)
            except ConfigurationError as error:
                raise ValueError(str(error)) from None
        return uri

    @model_validator(mode="after")
    def _check_password(self) -> Self:
        if self.rate_storage_password is not None and self.rate_storage == IN_MEMORY:
            raise ValueError("rate_storage_password: has no effect without `rate_storage`")
        return self

    def read_storage_uri(self) -> str:
        """Return the URI of `rate_storage` with its password. Raises SecretError."""
        if self.rate_storage_password is None:
            return self.rate_storage
        password = self.rate_storage_password.read("limits.rate_storage_password")
        scheme, _, rest = self.rate_storage.partition("://")
        user, _, place = rest.rpartition("@")
        return f"{scheme}://{user}:{quote(password, safe='')}@{place}"

    def read_cache_secret(self) -> bytes | None:
        """Return the `cache_secret`, None if not configured. Raises SecretError."""
        if self.cache_secret is None:
            return None
        secret = self.cache_secret.read("limits.cache_secret")
        if len(secret) < MIN_SECRET_CHARS:
            raise SecretError(
                f"limits.cache_secret: the secret has {len(secret)} characters; at least "
                f"{MIN_SECRET_CHARS} are needed"
            )
        return secret.encode()


def open_storage(uri: str) -> Storage:
    """Return the counters behind a URI; connects at the first use.

    Raises limits' ConfigurationError for an unknown scheme or a missing client library.
    """
    import limits.storage
    from limits.aio.storage import SlidingWindowCounterSupport, Storage
    from limits.errors import ConfigurationError

    # By default limits would use coredis, in an old version.
    options = {"implementation": "redispy"} if _REDIS in uri.partition("://")[0] else {}
    storage = limits.storage.storage_from_string(
        _ASYNC + uri.removeprefix(_ASYNC), wrap_exceptions=True, **options
    )
    if not (isinstance(storage, Storage) and isinstance(storage, SlidingWindowCounterSupport)):
        raise ConfigurationError(f"{uri}: the storage does not support sliding windows")
    return storage
