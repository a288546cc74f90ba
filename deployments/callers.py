"""Who calls, and what is kept of each caller between requests."""

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from limits.aio.storage import Storage

from cluster.keys_config import ANONYMOUS, KeyConfig
from cluster.limits_config import LimitsConfig, open_storage
from deployments.answer_parts import Headers
from deployments.counter_store import CounterStore
from deployments.keys import KeyRing
from deployments.rate_limits import Admission, KeyRates

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
        """Raises ConfigError if the keys' file cannot be read."""
        self._ring = KeyRing(keys, keys_file)
        self._open_storage = open_storage
        self._limits = limits
        self._store = CounterStore(open_storage(limits.rate_storage))
        self._secret = _secret(limits) or secrets.token_bytes(_SALT_CHARS)
        self._callers: dict[str, Caller] = {}

    def reconfigure(
        self, keys: tuple[KeyConfig, ...], keys_file: Path | None, limits: LimitsConfig
    ) -> None:
        """Take new keys and limits; raises ConfigError, and then changes nothing."""
        self._ring = KeyRing(keys, keys_file)
        secret = _secret(limits)
        same_storage = limits.rate_storage == self._limits.rate_storage
        if not same_storage:
            self._store = CounterStore(self._open_storage(limits.rate_storage))
        if not same_storage or secret != _secret(self._limits):
            self._callers = {}
            self._secret = secret or self._secret
        self._limits = limits

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


def _secret(limits: LimitsConfig) -> bytes | None:
    return None if limits.cache_secret is None else limits.cache_secret.get_secret_value().encode()


def _limits_of(key: KeyConfig) -> KeyConfig:
    """The record without its hash: a key that is being replaced has two."""
    return key.model_copy(update={"hash": ""})
