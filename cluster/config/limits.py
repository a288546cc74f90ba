"""What no request of a cluster may exceed, and where the rates of its keys are counted."""

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

from cluster.config.secret import SecretError, SecretReference

# The library takes as long to import as all else that `apar --help` needs.
if TYPE_CHECKING:
    from limits.aio.storage import Storage

_IN_MEMORY = "memory://"
_ASYNC = "async+"
_REDIS = "redis"
MIN_SECRET_CHARS = 16
_BODIES_HELD = 16


class LimitsConfig(BaseModel):
    """Limits for everyone; a key's own come on top."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_body_bytes: PositiveInt = Field(
        16 * 2**20, description="Bytes of a request's body; a larger one gets a 413."
    )
    body_timeout_s: PositiveFloat = Field(
        60.0, description="Seconds in which a request's body must arrive; a later one gets a 408."
    )
    max_held_body_bytes: PositiveInt | None = Field(
        None,
        description="Bytes of the bodies of all requests that a gateway holds at once; a request "
        "beyond them gets a 503. A key may hold as many bytes as are free; alone, half of them. 16 "
        "times `max_body_bytes` when absent.",
    )
    max_prompt_chars: PositiveInt | None = Field(
        None, description="Characters of a prompt; a longer one gets a 400. No limit when absent."
    )
    rate_storage: str = Field(
        _IN_MEMORY,
        description="Where the rates of keys are counted, as a URI of the library `limits`: "
        "`redis://host:6379` lets several clusters share them (it needs the extra `redis`).",
    )
    rate_storage_password: SecretReference | None = Field(
        None, description="Where the gateway reads the password for `rate_storage`."
    )
    cache_secret: SecretReference | None = Field(
        None,
        description="Where the gateway reads the secret of which each key's part of the prefix "
        f"cache is derived, {MIN_SECRET_CHARS} characters or more; a new one with each start when "
        "absent.",
    )

    @model_validator(mode="after")
    def _check_bodies(self) -> Self:
        # A key holds no more than is free, so half of it must have room for one body.
        if self.held_body_bytes < 2 * self.max_body_bytes:
            raise ValueError(
                f"max_held_body_bytes: {self.held_body_bytes} is less than twice `max_body_bytes`, "
                f"which is {self.max_body_bytes}"
            )
        return self

    @property
    def held_body_bytes(self) -> int:
        """Bytes of the bodies of all requests that a gateway holds at once."""
        return self.max_held_body_bytes or _BODIES_HELD * self.max_body_bytes

    @field_validator("rate_storage")
    @classmethod
    def _check_storage(cls, uri: str) -> str:
        url = urlsplit(uri)
        if url.password is not None or "password" in parse_qs(url.query.lower()):
            raise ValueError("leave the password out; `rate_storage_password` says where it is")
        if uri != _IN_MEMORY:
            from limits.errors import ConfigurationError

            try:
                open_storage(uri)
            except ConfigurationError as error:
                raise ValueError(str(error)) from None
        return uri

    @model_validator(mode="after")
    def _check_password(self) -> Self:
        if self.rate_storage_password is not None and self.rate_storage == _IN_MEMORY:
            raise ValueError("rate_storage_password: without effect where rates are in memory")
        return self

    def read_storage_uri(self) -> str:
        """The URI of `rate_storage` with its password; raises SecretError."""
        if self.rate_storage_password is None:
            return self.rate_storage
        password = self.rate_storage_password.read("limits.rate_storage_password")
        scheme, _, rest = self.rate_storage.partition("://")
        user, _, place = rest.rpartition("@")
        return f"{scheme}://{user}:{quote(password, safe='')}@{place}"

    def read_cache_secret(self) -> bytes | None:
        """The `cache_secret`, None where none is configured; raises SecretError."""
        if self.cache_secret is None:
            return None
        secret = self.cache_secret.read("limits.cache_secret")
        if len(secret) < MIN_SECRET_CHARS:
            raise SecretError(
                f"limits.cache_secret: the secret has {len(secret)} characters; "
                f"{MIN_SECRET_CHARS} are the least"
            )
        return secret.encode()


def open_storage(uri: str) -> Storage:
    """The counters behind a URI; connects with the first use.

    Raises limits' ConfigurationError for an unknown scheme or a missing client library.
    """
    import limits.storage
    from limits.aio.storage import SlidingWindowCounterSupport, Storage
    from limits.errors import ConfigurationError

    # The client that Redis itself maintains; limits would take coredis, in an old version.
    options = {"implementation": "redispy"} if _REDIS in uri.partition("://")[0] else {}
    storage = limits.storage.storage_from_string(
        _ASYNC + uri.removeprefix(_ASYNC), wrap_exceptions=True, **options
    )
    if not (isinstance(storage, Storage) and isinstance(storage, SlidingWindowCounterSupport)):
        raise ConfigurationError(f"{uri}: the storage counts no sliding windows")
    return storage
