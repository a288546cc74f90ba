"""What no request of a cluster may exceed, and where the rates of its keys are counted."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    SecretStr,
    field_serializer,
    field_validator,
    model_validator,
)

# The library takes as long to import as all else that `apar --help` needs.
if TYPE_CHECKING:
    from limits.aio.storage import Storage

_IN_MEMORY = "memory://"
_ASYNC = "async+"
_REDIS = "redis"
_BODIES_HELD = 16


class LimitsConfig(BaseModel):
    """Limits for everyone; a key's own come on top."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_body_bytes: PositiveInt = Field(
        16 * 2**20, description="Bytes of a request's body; a larger one gets a 413."
    )
    max_held_body_bytes: PositiveInt | None = Field(
        None,
        description="Bytes of the bodies of all requests that a gateway holds at once; a request "
        "beyond them gets a 503. One key holds no more than is free, alone one half. 16 times "
        "`max_body_bytes` when absent.",
    )
    max_prompt_chars: PositiveInt | None = Field(
        None, description="Characters of a prompt; a longer one gets a 400. No limit when absent."
    )
    rate_storage: str = Field(
        _IN_MEMORY,
        description="Where the rates of keys are counted, as a URI of the library `limits`: "
        "`redis://host:6379` lets several clusters share them (it needs the extra `redis`).",
    )
    cache_secret: SecretStr | None = Field(
        None,
        min_length=16,
        description="Secret of which each key's part of the prefix cache is derived; a new one "
        "with each start when absent.",
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
        if uri != _IN_MEMORY:
            from limits.errors import ConfigurationError

            try:
                open_storage(uri)
            except ConfigurationError as error:
                raise ValueError(_without_password(str(error))) from None
        return uri

    @field_serializer("rate_storage", when_used="json")
    def _mask_password(self, uri: str) -> str:
        return _without_password(uri)


def _without_password(text: str) -> str:
    return re.sub(r"//\S*@", "//***@", text)


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
