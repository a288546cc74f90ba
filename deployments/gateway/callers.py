"""Who calls, and what is kept of each caller between requests."""

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from limits.aio.storage import Storage

from cluster.config.keys import ANONYMOUS, KeyConfig
from cluster.config.limits import LimitsConfig, open_storage
from deployments.gateway.keys import KeyRing
from deployments.gateway.rate_limits import Admission, CounterStore, KeyRates
from deployments.wire.answer import Headers

_SALT_CHARS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Caller:
    """A key, or everyone where none are asked for: its limits, and its part of the prefix cache."""

    name: str
    key: KeyConfig | None = None
    rates: KeyRates | None = None
    cache_salt: str | None = None

    def may_use(self, model: str) -> bool:
        """Whether the caller's key is for this model."""
        return self.key is None or self.key.models is None or model in self.key.models

    def give_back(self, admission: Admission) -> None:
        """Refund what a request was counted as."""
        if self.rates is not None:
            self.rates.give_back(admission)

    async def rate_headers(self) -> Headers:
        """The `x-ratelimit-*` headers of an answer; none for a caller without rates."""
        return [] if self.rates is None else await self.rates.headers()


EVERYONE = Caller(ANONYMOUS)


class Callers:
    """The callers of one gateway. Keys of one name are one caller."""

    def __init__(
        self,
        keys: tuple[KeyConfig, ...],
        keys_file: Path | None,
        limits: LimitsConfig,
        open_storage: Callable[[str], Storage] = open_storage,
    ) -> None:
        """Raises ConfigError if the keys' file cannot be read, SecretError if a secret cannot."""
        self._ring = KeyRing(keys, keys_file)
        self._open_storage = open_storage
        self._storage_uri = limits.read_storage_uri()
        self._store = CounterStore(open_storage(self._storage_uri))
        self._given_secret = limits.read_cache_secret()
        self._secret = self._given_secret or secrets.token_bytes(_SALT_CHARS)
        self._callers: dict[str, Caller] = {}

    @property
    def keys_are_outdated(self) -> bool:
        """Whether older keys are in force, because those configured now cannot be used."""
        return self._ring.is_outdated

    async def reconfigure(
        self, keys: tuple[KeyConfig, ...], keys_file: Path | None, limits: LimitsConfig
    ) -> None:
        """Take new keys and limits. Keys that cannot be used are logged, and the old ones stay.

        Raises SecretError where a secret of the limits cannot be read; the old ones stay then, too.
        """
        await self._ring.reconfigure(keys, keys_file)
        storage_uri = await asyncio.to_thread(limits.read_storage_uri)
        secret = await asyncio.to_thread(limits.read_cache_secret)
        if storage_uri != self._storage_uri:
            self._store = CounterStore(self._open_storage(storage_uri))
        if (storage_uri, secret) != (self._storage_uri, self._given_secret):
            self._callers = {}
            self._secret = secret or self._secret
        self._storage_uri, self._given_secret = storage_uri, secret

    async def identify(self, headers: Headers) -> Caller:
        """Whose request it is; raises UnknownKeyError."""
        key = await self._ring.find(headers)
        if key is None:
            return EVERYONE
        caller = self._callers.get(key.name)
        if caller is None or caller.key is None or _limits_of(caller.key) != _limits_of(key):
            # What was counted in the old limits' windows is in the storage, and counts on.
            caller = Caller(key.name, key, self._rates(key), self._salt(key.name))
            self._callers[key.name] = caller
        return caller

    def _rates(self, key: KeyConfig) -> KeyRates | None:
        if key.requests_per_minute is None and key.tokens_per_minute is None:
            return None
        return KeyRates(self._store, key)

    def _salt(self, name: str) -> str:
        """What keeps the key's prefixes apart: nobody can guess it, and it holds no secret."""
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()[:_SALT_CHARS]


def _limits_of(key: KeyConfig) -> KeyConfig:
    """The record without its hash: a key that is being replaced has two."""
    return key.model_copy(update={"hash": ""})
