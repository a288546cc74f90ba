"""API keys of a cluster: who may call, how much of it, and before whom."""

import hashlib
import ipaddress
import re
import secrets
from collections import Counter
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator

ANONYMOUS = "anonymous"
"""Name, in logs and limits, of whoever calls a cluster that asks for no keys."""

_TOKEN_PREFIX = "apar-"
_TOKEN_BYTES = 32
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_PRIORITY = 1000


class KeyConfig(BaseModel):
    """One API key, known by its hash, and its limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Whose key it is: in logs and metrics; two keys of one name share limits.",
    )
    hash: str = Field(description="`sha256:` and 64 hex digits, as `apar keys hash` prints it.")
    models: tuple[str, ...] | None = Field(
        None, description="Models that the key may use, by their names; all when absent."
    )
    priority: int = Field(
        0,
        ge=-_MAX_PRIORITY,
        le=_MAX_PRIORITY,
        description="Class of its requests: a lower number is served before a higher one.",
    )
    weight: PositiveFloat = Field(
        1.0, description="Share of the thread steps among the keys of its class that wait."
    )
    requests_per_minute: PositiveInt | None = Field(
        None, description="Requests of the last minute; one more gets a 429. No limit when absent."
    )
    tokens_per_minute: PositiveInt | None = Field(
        None,
        description="Prompt tokens and generated ones, of all threads, of the last minute; a "
        "request beyond them gets a 429. No limit when absent.",
    )
    max_threads: PositiveInt | None = Field(
        None,
        description="Threads of the key alive at once in each model; no more of its requests run "
        "at once either, the others wait. No limit when absent.",
    )
    max_prompt_chars: PositiveInt | None = Field(
        None, description="Characters of a prompt; a longer one gets a 400. No limit when absent."
    )

    metrics_class: str = Field(
        "default",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Class under which metrics count the key's refused requests. Let many keys "
        "share one: each class is a series of its own.",
    )

    @field_validator("hash")
    @classmethod
    def _check_hash(cls, value: str) -> str:
        if not _HASH.fullmatch(value):
            raise ValueError("`sha256:` and 64 hex digits are expected; `apar keys new` makes them")
        return value


def new_token() -> str:
    """A fresh API key: 256 random bits behind a prefix that scanners for leaks can look for."""
    return _TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def hash_of(token: str) -> str:
    """The hash under which a key is configured.

    One round of SHA-256 and no salt: a slow, salted hash protects what people choose, and a key of
    256 random bits can neither be guessed nor looked up, however fast the hash. Each request pays
    for the hash, so it had better be fast.
    """
    return "sha256:" + hashlib.sha256(token.encode()).hexdigest()


def check_keys(keys: Iterable[KeyConfig]) -> None:
    """Raise ValueError where two records are of one key, or of one name with different limits."""
    keys = tuple(keys)
    hashes = Counter(key.hash for key in keys)
    for key in keys:
        if hashes[key.hash] > 1:
            raise ValueError(f"keys: {key.name!r} has the hash of another key")
    limits: dict[str, KeyConfig] = {}
    for key in keys:
        unhashed = key.model_copy(update={"hash": ""})
        if limits.setdefault(key.name, unhashed) != unhashed:
            raise ValueError(f"keys: the records of {key.name!r} must differ in their hash only")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address to listen on."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
