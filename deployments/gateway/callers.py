"""The callers of the gateway: their API keys, rate limits and parts of the prefix cache."""

import asyncio
import hashlib
import hmac
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from apar_core.errors import AparError
from deployments.config.key_store import KeyStoreConfig
from deployments.config.keys import ANONYMOUS, KeyConfig, check_keys, hash_of, load_keys
from deployments.config.limits import IN_MEMORY, LimitsConfig, open_storage
from deployments.gateway.key_store import KeyStore, StoredKey, open_store
from deployments.gateway.ledger import Ledger, utc_now
from deployments.gateway.rate_limits import CounterStore, KeyRates, WindowStorage
from deployments.wire.errors import ExpiredKeyError, StoreError, UnknownKeyError
from deployments.wire.response import Headers

logger = logging.getLogger(__name__)

_SCHEME = b"bearer "
# Anthropic's clients send the key here.
_KEY_HEADER = b"x-api-key"
# A change of the file, for example a revoked key, takes effect after at most this time.
_FILE_AGE_S = 1.0
# The same for keys created or revoked at run time, by any gateway.
STORE_AGE_S = 1.0
MAX_KEYS_AGE_S = KeyStoreConfig().max_keys_age_s
_SALT_CHARS = 32

_Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Caller:
    """The owner of a key, or anyone if the gateway requires no keys.

    `rates` is None without rate limits. `cache_salt` separates the key's part of the prefix cache.
    """

    name: str
    key: KeyConfig | None = None
    rates: KeyRates | None = None
    cache_salt: str | None = None

    @property
    def owner(self) -> str:
        """The name under which the caller's files and batches are stored, empty for everyone."""
        return "" if self.key is None else self.name

    def may_use(self, model: str) -> bool:
        """Return whether the caller may use a model."""
        return self.key is None or self.key.models is None or model in self.key.models

    async def rate_headers(self) -> Headers:
        """Return the `x-ratelimit-*` headers of a response; none for a caller without rates."""
        return [] if self.rates is None else await self.rates.headers()


EVERYONE = Caller(ANONYMOUS)


class Callers:
    """All callers of one gateway. Keys with the same name belong to one caller."""

    def __init__(
        self,
        keys: tuple[KeyConfig, ...],
        keys_file: Path | None,
        limits: LimitsConfig,
        key_store: KeyStoreConfig | None = None,
    ) -> None:
        """Raise ConfigError if the keys file cannot be read, SecretError if a secret cannot."""
        self._shared_storage: WindowStorage | None = None
        self._storage_uri = limits.read_storage_uri()
        self._store = self._open_store()
        self._store_config = key_store
        self.store = None if key_store is None else open_store(key_store, self._storage_uri)
        self.ledger = Ledger(self.store, 1.0 if key_store is None else key_store.flush_s)
        self.ring = KeyRing(keys, keys_file, store=self.store, max_age_s=_max_age_s(key_store))
        self._given_secret = limits.read_cache_secret()
        self._secret = self._given_secret or secrets.token_bytes(_SALT_CHARS)
        self._callers: dict[str, Caller] = {}
        self._closing: list[Ledger] = []

    async def close(self) -> None:
        """Write the usage that is not stored yet."""
        for ledger in (*self._closing, self.ledger):
            await ledger.close()

    @property
    def keys_are_outdated(self) -> bool:
        """Whether older keys stay in force because the configured ones are unusable."""
        return self.ring.is_outdated

    @property
    def metrics_classes(self) -> set[str]:
        """The `metrics_class` of all keys in force."""
        return self.ring.metrics_classes

    async def reconfigure(
        self,
        keys: tuple[KeyConfig, ...],
        keys_file: Path | None,
        limits: LimitsConfig,
        key_store: KeyStoreConfig | None = None,
    ) -> None:
        """Apply new keys and limits; if the keys are unusable, the old ones stay in force.

        Raises SecretError if a secret of the limits cannot be read. The old limits then stay.
        """
        await self.ring.reconfigure(keys, keys_file)
        storage_uri = await asyncio.to_thread(limits.read_storage_uri)
        secret = await asyncio.to_thread(limits.read_cache_secret)
        if key_store != self._store_config or (
            key_store is not None and key_store.path is None and storage_uri != self._storage_uri
        ):
            before = self.ledger
            self._store_config = key_store
            self.store = None if key_store is None else open_store(key_store, storage_uri)
            self.ledger = Ledger(self.store, 1.0 if key_store is None else key_store.flush_s)
            self.ring.use_store(self.store, _max_age_s(key_store))
            # Running requests still count in the old ledger, which writes until nothing is left.
            self._closing.append(before)
        if storage_uri != self._storage_uri:
            self._storage_uri = storage_uri
            self._store = self._open_store()
            self._callers = {}
        if secret != self._given_secret:
            self._callers = {}
            # Without a configured secret, the last one keeps the prefix cache usable.
            self._given_secret, self._secret = secret, secret or self._secret

    def share(self, storage: WindowStorage | None) -> None:
        """Count rates in this storage unless the configuration names one.

        None if this is the only gateway. What was counted elsewhere is forgotten.
        """
        self._shared_storage = storage
        self._store = self._open_store()
        self._callers = {}

    @property
    def cache_secret(self) -> bytes:
        """The secret that separates the keys in the prefix cache."""
        return self._secret

    def share_cache_secret(self, secret: bytes) -> None:
        """Use the other gateways' secret unless the configuration names one.

        Otherwise a prompt sent by one gateway would miss the prefix cache when another sends it.
        """
        if self._given_secret is None and secret != self._secret:
            self._secret = secret
            self._callers = {
                name: replace(caller, cache_salt=self._salt(name))
                for name, caller in self._callers.items()
            }

    async def settle(self) -> None:
        """Charge outstanding tokens to the counters, where other gateways see them."""
        for caller in list(self._callers.values()):
            if caller.rates is not None:
                await caller.rates.settle()

    def _open_store(self) -> CounterStore:
        if self._shared_storage is not None and self._storage_uri == IN_MEMORY:
            return CounterStore(self._shared_storage)
        return CounterStore(open_storage(self._storage_uri))

    async def identify(self, headers: Headers) -> Caller:
        """Return the caller of a request. Raises UnknownKeyError."""
        key = await self.ring.find(headers)
        return EVERYONE if key is None else self._caller_of(key)

    def _caller_of(self, key: KeyConfig) -> Caller:
        caller = self._callers.get(key.name)
        if caller is None or caller.key is None or _limits_of(caller.key) != _limits_of(key):
            # The storage still holds what was counted under the old limits.
            caller = Caller(key.name, key, self._rates(key), self._salt(key.name))
            self._callers[key.name] = caller
        return caller

    async def named(self, name: str) -> Caller | None:
        """Return the caller of this name, None while no key of this name is in force.

        Without required keys, the empty name is everyone's. Raises StoreError.
        """
        if not self.ring.asks_for_keys:
            return EVERYONE if name == "" else None
        key = await self.ring.named(name)
        return None if key is None else self._caller_of(key)

    def _rates(self, key: KeyConfig) -> KeyRates | None:
        if key.requests_per_minute is None and key.tokens_per_minute is None:
            return None
        return KeyRates(self._store, key)

    def _salt(self, name: str) -> str:
        """Return a salt for the key that nobody can guess and that reveals no secret."""
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()[:_SALT_CHARS]


def _max_age_s(key_store: KeyStoreConfig | None) -> float:
    return MAX_KEYS_AGE_S if key_store is None else key_store.max_keys_age_s


def _limits_of(key: KeyConfig) -> KeyConfig:
    """Return the key without its hash: a key that is being rotated has two hashes."""
    return key.model_copy(update={"hash": ""})


class KeyRing:
    """The API keys of the configuration, of a mounted file, and those created at run time.

    The file and the store of run-time keys are read again when they change. Without configured keys
    and a file, no key is required. After construction nothing fails: unusable keys are logged, and
    the previous ones stay in force. Run-time keys stay in force for `max_age_s` after their store
    was last read. A run-time key that contradicts a configured one has no effect.
    """

    def __init__(
        self,
        keys: Sequence[KeyConfig] = (),
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        store: KeyStore | None = None,
        max_age_s: float = MAX_KEYS_AGE_S,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """Raise ConfigError if the file cannot be read: no caller would have access."""
        self._store = store
        self._max_age_s = max_age_s
        self._stored_read_s = -math.inf
        self._now = now
        self.stored: tuple[StoredKey, ...] = ()
        self._stored_by_hash: dict[str, KeyConfig] = {}
        self._stored_version: int | None = None
        self._asked_store_s = clock() - STORE_AGE_S
        self._asking = asyncio.Lock()
        self._store_fails = False
        self._keys = tuple(keys)
        self._file = file
        self._clock = clock
        self._reading = asyncio.Lock()
        self._looked_at_s = clock()
        self._version = None if file is None else _version_of(file)
        self._from_file = () if file is None else load_keys(file)
        self._by_hash = _by_hash(self._keys, self._from_file)
        self._problem: str | None = None

    @property
    def is_outdated(self) -> bool:
        """Whether older keys stay in force because the configured ones are unusable."""
        return self._problem is not None

    @property
    def metrics_classes(self) -> set[str]:
        """The `metrics_class` of all keys in force."""
        keys = (*self._by_hash.values(), *self._stored_by_hash.values())
        return {key.metrics_class for key in keys}

    @property
    def configured(self) -> tuple[KeyConfig, ...]:
        """The keys of the configuration and of the file."""
        return tuple(self._by_hash.values())

    def use_store(self, store: KeyStore | None, max_age_s: float = MAX_KEYS_AGE_S) -> None:
        """Take run-time keys from another store."""
        self._store, self._stored_version = store, None
        self._max_age_s, self._stored_read_s = max_age_s, -math.inf
        self._asked_store_s = -math.inf
        self._take_stored(())

    async def reconfigure(self, keys: Sequence[KeyConfig], file: Path | None) -> None:
        """Apply other keys or another file, which is parsed in a thread: it may be large.

        If the file cannot be read, the keys that were last read from a file stay in force.
        """
        async with self._reading:
            self._keys, self._file = tuple(keys), file
            await asyncio.to_thread(self._read)
            self._looked_at_s = self._clock()

    async def find(self, headers: Headers) -> KeyConfig | None:
        """Return the key of a request, None if none is required.

        Raises UnknownKeyError. Raises StoreError for a key that is not configured if the run-time
        keys were last read too long ago.
        """
        if not self.asks_for_keys:
            return None
        token = _token(headers)
        if token is None:
            raise UnknownKeyError(
                "You didn't provide an API key. Send it as `Authorization: Bearer <key>` or "
                "`x-api-key: <key>`."
            )
        await self._look_at_file()
        digest = hash_of(token)
        key = self._by_hash.get(digest)
        if key is None:
            await self._ask_store()
            self._check_age()
            key = self._stored_by_hash.get(digest)
        # No timing leak: a caller cannot choose the digest that is looked up, and the comparison
        # takes constant time.
        if key is None or not hmac.compare_digest(key.hash, digest):
            raise UnknownKeyError("Unknown API key.")
        if key.expires_at is not None and key.expires_at <= self._now():
            raise ExpiredKeyError(f"The API key expired at {key.expires_at:%Y-%m-%dT%H:%M:%S%z}.")
        return key

    @property
    def asks_for_keys(self) -> bool:
        """Whether requests need a key."""
        return bool(self._keys) or self._file is not None

    async def named(self, name: str) -> KeyConfig | None:
        """Return a key of this name that is in force. Raises StoreError."""
        await self._look_at_file()
        await self._ask_store()
        now = self._now()
        for key in (*self._by_hash.values(), *self._stored_by_hash.values()):
            if key.name == name and (key.expires_at is None or key.expires_at > now):
                return key
        self._check_age()
        return None

    async def _ask_store(self) -> None:
        """Read the run-time keys if they have changed; check at most once per `STORE_AGE_S`."""
        if self._clock() - self._asked_store_s < STORE_AGE_S:
            return
        if self._asking.locked():
            # While another request asks, use the keys just read, or those left by a failing store.
            age_s = self._clock() - self._stored_read_s
            if age_s < (self._max_age_s if self._store_fails else 2 * STORE_AGE_S):
                return
        async with self._asking:
            if self._clock() - self._asked_store_s >= STORE_AGE_S:
                await self.refresh()

    def _check_age(self) -> None:
        """Raise StoreError if the run-time keys are too old: one may have been revoked since."""
        age_s = self._clock() - self._stored_read_s
        if self._store is not None and age_s > self._max_age_s:
            raise StoreError(f"keys last read {age_s:.0f} s ago")

    async def refresh(self) -> None:
        """Read the run-time keys now if they have changed; a failing store is logged."""
        store = self._store
        if store is None:
            return
        asked_s = self._clock()
        try:
            version = await store.keys_version()
            if version != self._stored_version:
                self._take_stored(await store.keys())
                self._stored_version = version
            self._store_fails = False
            self._stored_read_s = asked_s
        except StoreError as error:
            if not self._store_fails:
                logger.error("keys not read from the store", extra={"reason": str(error)})
            self._store_fails = True
        self._asked_store_s = self._clock()

    def _take_stored(self, stored: Sequence[StoredKey]) -> None:
        """Put run-time keys in force, except those that contradict configured ones."""
        usable: list[StoredKey] = []
        self.stored = tuple(stored)
        for each in stored:
            try:
                check_keys([*self._by_hash.values(), *(other.key for other in usable), each.key])
            except ValueError as error:
                logger.error("key of the store not used", extra={"reason": str(error)})
            else:
                usable.append(each)
        self._stored_by_hash = {each.key.hash: each.key for each in usable}

    async def _look_at_file(self) -> None:
        if self._file is None or self._clock() - self._looked_at_s < _FILE_AGE_S:
            return
        async with self._reading:
            if self._clock() - self._looked_at_s >= _FILE_AGE_S:
                await asyncio.to_thread(self._reread, self._file)
                self._looked_at_s = self._clock()

    def _reread(self, file: Path) -> None:
        try:
            is_same = _version_of(file) == self._version
        except OSError:
            is_same = False  # Reading the file will fail too, and report why.
        if not is_same:
            self._read()

    def _read(self) -> None:
        """Put the configured keys and those of the file in force, if they are usable."""
        from_file = self._from_file
        problem: Exception | None = None
        reported = self._problem
        try:
            # Before reading, so that a broken file is reported once and reread when it changes.
            self._version = None if self._file is None else _version_of(self._file)
            from_file = () if self._file is None else load_keys(self._file)
        except (AparError, OSError, ValueError) as error:
            problem = error
            if isinstance(error, OSError) or isinstance(error.__cause__, OSError):
                # The file may become readable without a change of its version.
                self._version = None
        try:
            self._by_hash = _by_hash(self._keys, from_file)
            self._from_file = from_file
            self._take_stored(self.stored)
        except ValueError as error:
            problem = problem or error
        self._problem = None if problem is None else str(problem)
        if self._problem is not None:
            if self._problem == reported:
                return
            logger.error(
                "keys file not used: the previous keys stay in force",
                extra={"file": str(self._file), "reason": self._problem},
            )
        elif self._file is not None:
            logger.info(
                "keys file read",
                extra={"file": str(self._file), "num_keys": len(self._from_file)},
            )


def _by_hash(*sources: Sequence[KeyConfig]) -> dict[str, KeyConfig]:
    keys = [key for source in sources for key in source]
    check_keys(keys)
    return {key.hash: key for key in keys}


def _version_of(file: Path) -> _Version | None:
    """Return a version that changes when a file, or the link of a mounted secret, is replaced."""
    try:
        status = os.stat(file)  # noqa: PTH116 - follows links, as opening the file does
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _token(headers: Headers) -> str | None:
    for name, value in headers:
        if name == b"authorization" and value[: len(_SCHEME)].lower() == _SCHEME:
            return value[len(_SCHEME) :].strip().decode("latin-1") or None
    for name, value in headers:
        if name == _KEY_HEADER:
            return value.strip().decode("latin-1") or None
    return None
